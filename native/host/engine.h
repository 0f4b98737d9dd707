// The engine of one communicator on one rank: it owns the links, runs plans and decides how to wait.
//
// A blocking call runs its plan on the caller's own thread. Collectives run one after another in the order of the
// calls; point-to-point tasks run beside them, in turn on each port. Whoever waits drives everything that is in flight;
// a thread of the engine's own drives asynchronous work that nobody waits for, and sleeps otherwise.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "base/forks.h"
#include "base/team.h"
#include "host/flight_recorder.h"
#include "host/keeper.h"
#include "host/task.h"
#include "host/windows.h"
#include "plan/plan.h"
#include "transport/fault.h"
#include "transport/shm/doorbell.h"
#include "transport/shm/heap.h"
#include "transport/shm/shm.h"
#include "transport/shm/slots.h"
#include "transport/tcp.h"
#include "transport/transport.h"
#include "transport/verbs/verbs.h"

namespace hetcoll {

struct EngineOptions {
  int rank;
  int size;
  std::uint64_t identity;  // hash of the communicator's id and epoch
  int local_rank;
  double spin_seconds;                        // how long to spin before giving the processor away
  bool oversubscribed;                        // more ranks here than cores: give it away almost at once
  std::string fault{};                        // what goes wrong on purpose: FaultSpec::Parse
  std::int64_t sleep_slice_ns = 100'000'000;  // an upper bound on noticing what no doorbell announces
  std::int64_t recovery_ns = 1'000'000'000;   // until an RDMA rail that was lost is tried again for the first time
  Integrity integrity = Integrity::kOff;
};

enum class Outcome : int { kDone, kPending, kFailed };

// A step that nothing but its peer keeps from moving. Of a send, `done` bytes of `total` were handed to the link, of a
// receive they came. `bytes` and `messages` went through this end of the link since it was made.
struct Awaited {
  int peer;
  int channel;
  bool sends;
  std::size_t done;
  std::size_t total;
  std::uint64_t bytes;
  std::uint64_t messages;
};

// Bytes of what an engine holds, and its descriptors and threads.
struct EngineMemory {
  Holdings links;
  std::size_t slots = 0;   // in shared memory, through which this rank's messages leave
  std::size_t arrays = 0;  // of the heap, that are lent to arrays
  std::size_t plans = 0;   // decoded; bound ones are their owners'
  std::size_t scratch = 0;
  std::size_t threads = 0;
};

class Engine {
 public:
  explicit Engine(const EngineOptions& options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Links. `local_ranks` are the ranks of this host in the segment's order.
  void AttachShm(int fd, std::size_t ring_bytes, std::size_t most_heap, std::span<const int> local_ranks,
                 const ShmOptions& options);
  void AttachShm(std::shared_ptr<ShmSegment> segment, std::span<const int> local_ranks);
  void AttachTcp(int peer, int channel, std::span<const int> fds);
  // A port that verbs links may use; its number. `api` stands for the system's libibverbs in tests.
  int AddNic(NicInfo info, const VerbsApi& api);
  void AttachVerbs(int peer, int channel, std::span<const std::pair<int, std::string>> rails, std::size_t ring_bytes,
                   std::span<const int> fds);
  // The slots to and from a rank on a GPU, of this host.
  // `helpers`: threads that help with all such links, as many as the first one says.
  void AttachSlots(int peer, int channel, const Slots& out, const Slots& in, unsigned helpers);
  bool Linked(int peer, int channel);

  // TCP sockets that broke: see Mending. Of links that are attached once `MendTcp` gave the descriptor that is readable
  // while `TakeLost` has something. Callable from any thread; an engine that has failed refuses all.
  int MendTcp();
  std::vector<LostSocket> TakeLost();
  bool IsLost(const SocketId& id);
  std::optional<Came> HoldSocket(const SocketId& id, std::uint32_t number, bool first);
  bool ResumeSocket(const SocketId& id, std::uint32_t number, int socket, const Came& came);
  void GiveUpSocket(const SocketId& id, const std::string& why);
  std::map<int, std::uint64_t> Undelivered();  // bytes, by peer
  std::uint64_t reconnects() const { return tcp_->mending == nullptr ? 0 : tcp_->mending->made.load(); }
  // What it holds now. Callable from any thread.
  EngineMemory Memory();

  // User memory that NICs may read and write where it lies. `seen_at` is the address that they have for a device's,
  // which only they are to touch. Unregister: false while it is in use.
  int RegisterMemory(std::uintptr_t address, std::size_t nbytes, const std::vector<RegionKey>& keys,
                     std::optional<std::uintptr_t> seen_at);
  bool UnregisterMemory(int handle);
  // Whether the verbs links have events to take.
  bool has_news() const { return link_events_.load(std::memory_order_relaxed); }
  // Asks the verbs links under the engine's lock; `none` where there are none.
  template <class Fn, class Result>
  Result AskVerbs(Fn&& ask, Result none) {
    contenders_.fetch_add(1);
    std::lock_guard lock(mutex_);
    contenders_.fetch_sub(1);
    return verbs_ == nullptr ? none : ask(*verbs_);
  }

  int AddPlan(std::span<const std::byte> encoded);
  std::shared_ptr<Shape> Bind(int plan, DType dtype, ReduceOp op, std::size_t send_count, std::size_t recv_count,
                              std::span<const std::size_t> send_table, std::span<const std::size_t> recv_table,
                              std::uint64_t descriptor, bool p2p, bool skip_empty = false,
                              Format format = Format::kNone);

  // Starts a task. The memory must stay valid until it is finished. `residual`: as Task::Prepare has it. `snapshot`:
  // where its result is copied before it is over and a later collective begins, or null.
  std::shared_ptr<Task> Submit(const std::shared_ptr<Shape>& shape, const void* send, void* recv,
                               float* residual = nullptr, std::byte* snapshot = nullptr);

  // The fast path for a blocking collective: runs it to the end on this thread if nothing else is in flight and its
  // peers are prompt. Otherwise `task` is what was submitted instead, and the outcome kPending.
  Outcome RunPrompt(const std::shared_ptr<Shape>& shape, const void* send, void* recv, std::shared_ptr<Task>& task,
                    float* residual = nullptr);

  // Drives the engine until the task is finished, `until` (NowNs) has come, or the engine has failed.
  Outcome Drive(const Pending& task, std::int64_t until);

  // One-sided messages. From here on a thread of the engine's own serves what other ranks ask for, the links' first two
  // channels are `Windows`'s, and no plan runs here.
  void ServeWindows();
  // What `ask` does to the windows, under the engine's lock, and sends what it has them send, as far as there is room.
  template <class Fn>
  auto AskWindows(Fn&& ask) {
    const std::unique_lock lock = LockSoon();
    if constexpr (std::is_void_v<std::invoke_result_t<Fn, Windows&>>) {
      ask(*windows_);
      BeginTransfers();
    } else {
      auto result = ask(*windows_);
      BeginTransfers();
      return result;
    }
  }

  // See Windows. Links over RDMA have it copy, too.
  void UseCopier(const std::shared_ptr<Copier>& copier, std::span<std::byte> pinned) {
    AskWindows([&](Windows& windows) {
      windows.UseCopier(copier, pinned);
      if (verbs_ != nullptr) verbs_->regions().copier = copier;
    });
  }
  void RevokeWindow(std::uint32_t id) {
    AskWindows([&](Windows& windows) { windows.Revoke(links_, id); });
  }

  // For a call whose bytes others move: gives it the number that it has on every rank, and returns the signature of its
  // messages. `shape` is a number of NewShape's.
  std::uint64_t Enter(int shape, std::uint64_t descriptor, bool p2p);
  int NewShape() { return shapes_++; }

  // Lets the engine's own thread finish what was submitted so far.
  void DriveInBackground();

  // Ends every wait here at once with this failure; the first one is kept. Callable from any thread. When it returns,
  // nothing here touches a caller's memory any more.
  void Halt(FaultKind kind, int peer, const std::string& text);
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  Failure failure() const;

  // Ends everything here for good, lets the peers see the end of what was sent, and gives links, memory, descriptors
  // and the thread back. Callable from any thread, while others wait as well.
  void Close();

  // `peer` will send nothing more: waits for it fail once what it sent before is used up.
  void PeerLeft(int peer);

  // For people: the operation in flight and how far it is. Callable from any thread.
  std::string Describe();
  // What is waited for in what is in flight. Callable from any thread.
  std::vector<Awaited> WaitsFor();
  // Bytes and messages that ever went through this end of a link: that which sends, or that which receives.
  std::pair<std::uint64_t, std::uint64_t> Through(int peer, int channel, bool sends);
  // Bytes that ever went to each rank. Callable from any thread.
  std::vector<std::uint64_t> Sent();
  // By its links through shared memory. Callable from any thread.
  Copies Copied();
  // For how long nothing has moved, of what is waited for; 0 unless it waits.
  double still_seconds() const;

  // Memory that the ranks of this host share; null before AttachShm, and once it is closed.
  std::shared_ptr<Heap> heap() {
    const std::unique_lock lock = LockSoon();
    return heap_;
  }

  // Counters for tests and `explain`.
  std::uint64_t collectives() const { return history_.count(); }
  // Grows while anything that is waited for moves, by however little.
  std::uint64_t moves() const { return moves_.load(std::memory_order_relaxed); }
  // How often it went to sleep since it had looked at everything and nothing could move.
  std::uint64_t naps() const { return naps_.load(std::memory_order_relaxed); }
  // The shape of the collective with this number, or -1 where that is long ago.
  int History(std::uint64_t sequence) const { return history_.Find(sequence); }
  // The same for sends and receives, which are counted together.
  std::uint64_t messages() const { return messages_.count(); }
  int MessageHistory(std::uint64_t number) const { return messages_.Find(number); }
  const IntegrityCounts& integrity() const { return tcp_->counts; }
  // The last collectives, or the last sends and receives.
  std::vector<CallRecord> Records(bool messages, std::size_t most) const {
    TickClock clock = ticks_;
    clock.Now();
    return (messages ? messages_ : history_).Last(most, clock);
  }
  std::size_t scratch_bytes() {
    const std::unique_lock lock = LockSoon();
    return scratch_size_;
  }
  // Whether this process is a fork of the one that made the engine: then nothing here may be used, or destroyed.
  bool forked() const { return birthplace_.left(); }
  // In such a process, once: closes its copies of sockets, without a lock.
  void Abandon();

 private:
  template <class Fn, class Result>
  Result AskMending(Fn&& ask, Result none) {
    contenders_.fetch_add(1);
    std::lock_guard lock(mutex_);
    contenders_.fetch_sub(1);
    return tcp_->mending == nullptr || failed() ? none : ask(*tcp_->mending);
  }
  bool HasLink(int peer, int channel) { return links_.tx(peer, channel).end != nullptr; }
  void Prepare(const Plan& plan);
  const Plan& PlanOf(int number);
  std::shared_ptr<Task> TakeTask(Shape& shape);
  std::uint64_t NextSignature(const Shape& shape, Task& task) {
    return Sign(shape.id, shape.descriptor, shape.p2p, task.mark);
  }
  std::uint64_t Sign(int shape, std::uint64_t hash, bool p2p, FlightRecorder::Mark& mark);
  void ServeLinks(std::vector<pollfd>& fds);
  std::unique_lock<std::mutex> LockSoon();
  void BeginTransfers();  // the nine below: under mutex_
  bool PassAll();
  bool PassWindows(bool (Windows::*pass)(Links&));
  void NoteCore();
  bool LeaveCore();  // false where it did not
  // What a task waits for. `far`: a rank in whose shared memory it cannot look, so that a look is a call of the system
  // or of a device: the clock says how long to spin there, and not the number of looks. `own_core`: a rank that was
  // last seen on the very core that we run on. It cannot move before we let it, and spinning would only keep it out.
  struct Wait {
    bool far = false;
    bool own_core = false;
  };
  Wait WaitsFor(const Task& task);
  Wait WaitsForAny();         // of the tasks that may move
  bool PassTask(Task& task);  // false also when it failed the engine
  void NoteStill(std::int64_t now);
  void RingDoorbells();
  void SayGoodbye();
  void Ring(const ShmDoorbell& bell) const;  // if it sleeps
  void RingLenders();
  void Fail(FaultKind kind, int peer, const std::string& text);
  void StopBackground();
  void CheckDeparted();
  bool NoTasks() const { return collectives_.empty() && p2p_.empty(); }
  bool Idle() const { return NoTasks() && (windows_ == nullptr || failed()); }
  void FenceLinks();
  void DropTasks();
  template <class Done>
  void DriveUntil(Done&& done, std::int64_t until);
  std::int64_t YieldNs() const;
  void Sleep(std::unique_lock<std::mutex>& lock, std::int64_t until, std::int64_t idle);
  void BackgroundLoop();
  std::byte* Scratch(std::size_t bytes);
  std::byte* Stage(std::size_t bytes);

  EngineOptions options_;
  Birthplace birthplace_;
  std::int64_t spin_ns_ = 0;
  int prompt_spins_ = 0;
  int core_ = -1;  // what NoteCore said last; under mutex_, as are the next three
  int crowded_waits_ = 0;
  std::int64_t leave_at_ns_ = 0;     // when LeaveCore may go to another core again,
  std::int64_t leave_again_ns_ = 0;  // and how long after the last time that is
  // Threads in Sleep: those that nothing has rung for, and those that something has. A ring begins a generation. Under
  // mutex_.
  int sleepers_ = 0;
  int woken_ = 0;
  unsigned generation_ = 0;
  bool crowded_ = false;  // kMoveAfter of them have passed
  Doorbell doorbell_;
  FaultInjector injector_;
  std::shared_ptr<ShmSegment> segment_;
  BorrowedBuffers* borrowed_ = nullptr;  // the segment's
  std::shared_ptr<Heap> heap_;
  std::shared_ptr<TcpShared> tcp_;
  Mending::Resumed resumed_;  // under mutex_
  ShmDoorbell* own_bell_ = nullptr;
  std::atomic<bool> link_events_{false};
  bool draining_ = false;  // under mutex_: closing, and what was sent is still on its way
  std::unique_ptr<VerbsHost> verbs_;
  Links links_;
  std::unique_ptr<Keeper> keeper_;
  std::vector<std::unique_ptr<Plan>> plans_;
  std::atomic<int> shapes_{0};

  std::mutex mutex_;  // tasks, ports, scratch, plans
  std::atomic<int> contenders_{0};
  std::deque<std::shared_ptr<Task>> collectives_;
  std::vector<std::shared_ptr<Task>> p2p_;
  std::unique_ptr<Windows> windows_;
  std::atomic<std::uint64_t> moves_{0};        // written under mutex_
  std::atomic<std::uint64_t> naps_{0};         // the same
  std::atomic<std::uint64_t> still_moves_{0};  // what moves_ was at still_ns_
  std::atomic<std::int64_t> still_ns_{0};
  TickClock ticks_;
  FlightRecorder history_;  // of collectives
  // What signatures of collectives are made from: all calls so far. So ranks that have once called different things
  // disagree about every later call, also where no message of the first one went astray.
  std::uint64_t called_;
  FlightRecorder messages_;     // of sends and receives
  std::shared_ptr<Team> team_;  // helps with links to GPUs
  std::unique_ptr<std::byte, void (*)(std::byte*)> scratch_;
  std::size_t scratch_size_ = 0;
  std::byte* stage_ = nullptr;  // on the heap, whose end it has
  std::size_t stage_size_ = 0;

  std::atomic<bool> failed_{false};
  mutable std::mutex failure_mutex_;
  Failure failure_;
  std::vector<std::atomic<bool>> departed_;
  std::atomic<bool> any_departed_{false};

  std::mutex background_mutex_;
  std::condition_variable background_wake_;
  std::thread background_;
  bool background_stop_ = false;
  bool background_work_ = false;
  std::atomic<bool> background_driving_{false};
  std::atomic<int> drivers_{0};  // threads inside Drive, the engine's own not counted
};

}  // namespace hetcoll
