#include "engine/relay.h"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <thread>

#include "engine/clock.h"
#include "transport/tcp.h"

namespace hetcoll {
namespace {

// How long a thread with messages under way spins, then yields, before it sleeps.
constexpr std::int64_t kSpinNs = 50'000;
constexpr std::int64_t kYieldNs = 200'000;
// A stream that writes a word wakes nobody, so while one is awaited sleeps are short.
constexpr std::int64_t kShortestNapNs = 20'000;
constexpr std::int64_t kLongestNapNs = 500'000;

timespec Time(std::int64_t ns) { return {ns / 1'000'000'000, ns % 1'000'000'000}; }

}  // namespace

// The messages of one edge that go through one link. Moved by one thread.
class Relay::Lane {
 public:
  Lane(int peer, int channel, const Slots& slots, LinkEnds end)
      : peer_(peer), channel_(channel), slots_(slots), end_(std::move(end)) {}

  void Expect() { posted_.fetch_add(1, std::memory_order_relaxed); }
  void Add(const RelayMessage& m) { queue_.push_back(m); }
  bool empty() const { return queue_.empty(); }

  // Moves what can move without waiting; true if anything did. Throws Fault.
  bool Move() {
    const RelayMessage& m = queue_.front();
    if (!Ours(m)) return false;
    const std::size_t at = done_.load(std::memory_order_relaxed);
    const Message message{m.signature, m.nbytes};
    std::byte* data = slots_.At(m.number) + at;
    const std::ptrdiff_t n = end_.send != nullptr ? end_.send->Push(message, at, data, m.nbytes - at)
                                                  : end_.recv->Pull(message, at, data, m.nbytes - at, false);
    if (n == kWouldBlock) return false;
    done_.store(at + static_cast<std::size_t>(n), std::memory_order_relaxed);
    moves_.fetch_add(1, std::memory_order_relaxed);
    if (at + static_cast<std::size_t>(n) == m.nbytes) Finish(m);
    return true;
  }

  // Whether nothing but the GPU keeps it from moving; else what to wait on goes to `fds`.
  bool WaitsForGpu(std::vector<pollfd>& fds) const {
    if (!Ours(queue_.front())) return true;
    if (end_.send != nullptr) {
      end_.send->AddPoll(fds);
    } else {
      end_.recv->AddPoll(fds);
    }
    return false;
  }

  // Streams that wait for this lane's words wait no more.
  void Release() {
    if (end_.send != nullptr) {
      slots_.ReleaseCredit();
    } else {
      slots_.ReleaseReady();
    }
  }

  void Close() {
    if (end_.send != nullptr) end_.send->Finish();
    end_ = {};
  }

  bool idle() const { return posted_.load(std::memory_order_acquire) == through_.load(std::memory_order_acquire); }
  std::uint64_t moves() const { return moves_.load(std::memory_order_relaxed); }
  std::string Describe() const {
    if (idle()) return "";
    return std::string(outgoing_ ? "send to rank " : "receive from rank ") + std::to_string(peer_) + " on channel " +
           std::to_string(channel_) + ": " + std::to_string(posted_ - through_) + " messages, the first at byte " +
           std::to_string(done_.load(std::memory_order_relaxed));
  }

 private:
  bool Ours(const RelayMessage& m) const { return outgoing_ ? slots_.Full(m.number) : slots_.Free(m.number); }

  void Finish(const RelayMessage& m) {
    if (outgoing_) {
      slots_.Grant(m.number);
    } else {
      slots_.Publish(m.number);
    }
    done_.store(0, std::memory_order_relaxed);
    queue_.pop_front();
    through_.fetch_add(1, std::memory_order_release);
  }

  int peer_;
  int channel_;
  Slots slots_;
  LinkEnds end_;  // one of the two
  bool outgoing_ = end_.send != nullptr;
  std::deque<RelayMessage> queue_;
  std::atomic<std::size_t> done_{0};  // bytes of the first
  std::atomic<std::uint64_t> posted_{0};
  std::atomic<std::uint64_t> through_{0};
  std::atomic<std::uint64_t> moves_{0};
};

// A thread that moves the messages of some lanes.
class Relay::Worker {
 public:
  explicit Worker(Relay& relay) : relay_(relay), wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (wake_ < 0) throw Fault(FaultKind::kSystem, -1, std::string("eventfd: ") + std::strerror(errno));
    thread_ = std::thread([this] { Run(); });
  }
  ~Worker() {
    if (thread_.joinable()) thread_.join();
    close(wake_);
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  void Own(Lane* lane) {
    std::lock_guard lock(mutex_);
    lanes_.push_back(lane);
    if (over_) lane->Release();
  }

  void Post(Lane* lane, const RelayMessage& m) {
    Tell([&] {
      if (stop_) return;
      lane->Expect();
      inbox_.emplace_back(lane, m);
    });
  }

  void Stop() {
    Tell([&] { stop_ = true; });
  }
  void Join() {
    if (thread_.joinable()) thread_.join();
  }
  void Abandon() {
    if (thread_.joinable()) thread_.detach();
  }

 private:
  template <class Change>
  void Tell(Change&& change) {
    bool asleep = false;
    {
      std::lock_guard lock(mutex_);
      change();
      news_.store(true, std::memory_order_release);
      std::swap(asleep, asleep_);
    }
    const std::uint64_t one = 1;
    if (asleep) static_cast<void>(write(wake_, &one, sizeof one));  // it fails only when the thread is awake
  }

  void Run() {
    pthread_setname_np(pthread_self(), "hetcoll-relay");
    std::vector<Lane*> active;
    std::int64_t idle_since = 0;
    std::int64_t nap = kShortestNapNs;
    while (Listen(active)) {
      if (MoveAny(active)) {
        std::erase_if(active, [](const Lane* lane) { return lane->empty(); });
        idle_since = 0;
        nap = kShortestNapNs;
        continue;
      }
      const std::int64_t now = NowNs();
      if (idle_since == 0) idle_since = now;
      const std::int64_t idle = now - idle_since;
      if (!active.empty() && idle < kSpinNs && !relay_.options_.oversubscribed) {
        CpuRelax();
      } else if (!active.empty() && idle < kYieldNs) {
        sched_yield();
      } else {
        Sleep(active, nap);
        nap = std::min(2 * nap, kLongestNapNs);
      }
    }
    std::lock_guard lock(mutex_);
    over_ = true;
    for (Lane* lane : lanes_) lane->Release();
  }

  bool MoveAny(const std::vector<Lane*>& active) {
    bool moved = false;
    for (Lane* lane : active) {
      try {
        moved |= lane->Move();
      } catch (const Fault& fault) {
        relay_.Fail(fault.kind, fault.peer, std::string(fault.what()) + " (" + lane->Describe() + ")");
        return true;
      }
    }
    return moved;
  }

  // Takes what is new; false when it is time to end.
  bool Listen(std::vector<Lane*>& active) {
    if (!news_.load(std::memory_order_acquire)) return true;
    std::lock_guard lock(mutex_);
    for (const auto& [lane, message] : inbox_) {
      if (lane->empty()) active.push_back(lane);
      lane->Add(message);
    }
    inbox_.clear();
    news_.store(false, std::memory_order_relaxed);
    return !stop_;
  }

  // Until there is news, or a socket is ready, or `nap` is over where only the GPU's words will tell.
  void Sleep(const std::vector<Lane*>& active, std::int64_t nap) {
    fds_.assign(1, {wake_, POLLIN, 0});
    bool short_nap = false;
    for (const Lane* lane : active) short_nap |= lane->WaitsForGpu(fds_);
    {
      std::lock_guard lock(mutex_);
      if (news_.load(std::memory_order_relaxed)) return;
      asleep_ = true;
    }
    const timespec timeout = Time(nap);
    static_cast<void>(ppoll(fds_.data(), fds_.size(), short_nap ? &timeout : nullptr, nullptr));
    {
      std::lock_guard lock(mutex_);
      asleep_ = false;
    }
    std::uint64_t count = 0;
    static_cast<void>(read(wake_, &count, sizeof count));  // there may be none
  }

  Relay& relay_;
  int wake_;
  std::vector<pollfd> fds_;
  std::mutex mutex_;
  std::vector<Lane*> lanes_;
  std::vector<std::pair<Lane*, RelayMessage>> inbox_;
  bool asleep_ = false;
  bool stop_ = false;
  bool over_ = false;
  std::atomic<bool> news_{false};
  std::thread thread_;
};

Relay::Relay(const RelayOptions& options)
    : options_(options), injector_(FaultSpec::Parse(options.fault), options.rank), pid_(getpid()) {
  // The two ends of a link that misbehaves share state.
  const unsigned threads = options.fault.empty() ? options.threads : 1;
  for (unsigned i = 0; i < threads; ++i) workers_.push_back(std::make_unique<Worker>(*this));
}

Relay::~Relay() {
  if (getpid() == pid_) {
    Close();
  } else {  // the threads are the parent's, and so are the connections
    for (auto& worker : workers_) worker->Abandon();
  }
}

void Relay::Connect(int peer, int channel, std::span<const int> fds) {
  std::vector<LinkEnds>& links = links_[{peer, channel}];
  for (const int fd : fds) {
    links.push_back(injector_.Wrap(MakeTcp(std::span(&fd, 1), peer, nullptr), 1, peer, channel));
  }
}

std::shared_ptr<RelayEdge> Relay::AddEdge(int peer, int channel, bool out, const Slots& slots) {
  auto edge = std::make_shared<RelayEdge>(shared_from_this(), slots.count);
  for (LinkEnds& link : links_.at({peer, channel})) {
    LinkEnds end;
    if (out) {
      end.send = std::move(link.send);
    } else {
      end.recv = std::move(link.recv);
    }
    auto lane = std::make_unique<Lane>(peer, channel, slots, std::move(end));
    Worker* worker = workers_[turn_++ % workers_.size()].get();
    worker->Own(lane.get());
    edge->lanes_.emplace_back(worker, lane.get());
    std::lock_guard lock(mutex_);
    lanes_.push_back(std::move(lane));
  }
  return edge;
}

void RelayEdge::Post(const RelayMessage& m) const {
  const auto& [worker, lane] = lanes_[m.number % slots_ % lanes_.size()];
  worker->Post(lane, m);
}

bool Relay::Idle() const {
  std::lock_guard lock(mutex_);
  return stopped_ || std::all_of(lanes_.begin(), lanes_.end(), [](const auto& lane) { return lane->idle(); });
}

void Relay::Stop() {
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  news_.notify_all();
  for (auto& worker : workers_) worker->Stop();
}

void Relay::Fail(FaultKind kind, int peer, const std::string& text) {
  {
    std::lock_guard lock(mutex_);
    if (!stopped_) failure_ = {kind, peer, text};
  }
  Stop();
}

Failure Relay::AwaitFailure(std::int64_t until) {
  std::unique_lock lock(mutex_);
  const auto limit = std::chrono::steady_clock::time_point(std::chrono::nanoseconds(until));
  news_.wait_until(lock, limit, [&] { return stopped_; });
  return failure_;
}

void Relay::Close() {
  Stop();
  for (auto& worker : workers_) worker->Join();
  std::lock_guard lock(mutex_);
  for (auto& lane : lanes_) lane->Close();
  links_.clear();
}

std::string Relay::Describe() const {
  std::lock_guard lock(mutex_);
  std::string out;
  for (const auto& lane : lanes_) {
    const std::string one = lane->Describe();
    if (!one.empty()) out += (out.empty() ? "" : "; ") + one;
  }
  return out;
}

std::uint64_t Relay::moves() const {
  std::lock_guard lock(mutex_);
  std::uint64_t sum = 0;
  for (const auto& lane : lanes_) sum += lane->moves();
  return sum;
}

}  // namespace hetcoll
