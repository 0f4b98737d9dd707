// One-sided messages: what this rank puts into the windows of others and gets from them, and what they do with its own.
//
// Between two ranks there are two FIFOs each way: one of requests, with what is put, and one of answers, with what is
// got. All of one request is answered before the next one of the same rank is looked at, so a rank's requests to a
// window are done in their order. A window is written by its owner's engine alone, under the engine's lock: one that
// was closed is not touched again, however late a piece for it comes.
//
// Over RDMA a put of many bytes is asked for first, and the owner answers where NICs may write it: from where it lies,
// when it is registered, straight to its place. The owner looks at nothing else of that peer until it is whole. A get
// says where what it asks for may be written, and a put that comes behind waits until the window was read.
//
// Memory may be a device's: then pieces that NICs do not read or write where they lie pass through pinned memory
// (staging.h), and a request is answered when the last copy of it has ended.
#pragma once

#include <poll.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "host/staging.h"
#include "host/task.h"
#include "host/transfer.h"

namespace hetcoll {

inline constexpr int kRequests = 0;  // channels
inline constexpr int kAnswers = 1;
inline constexpr std::size_t kMostPieces = std::size_t{1} << 20;   // of one request
inline constexpr std::size_t kAskedBytes = std::size_t{64} << 10;  // a put of fewer is sent unasked
inline constexpr int kTurn = 64;                                   // messages of one FIFO until others have their turn

struct WindowCounts {
  std::uint64_t puts = 0;  // of others, into windows of this rank
  std::uint64_t gets = 0;
  std::uint64_t pieces = 0;   // of both
  std::uint64_t bytes = 0;    // that were read and written where they lie in a window
  std::uint64_t refused = 0;  // pieces that came for a closed window, or would not have been inside
  std::uint64_t direct = 0;   // of the bytes: copied by a device from the memory of the rank that put them
};

// All of it under the engine's lock.
class Windows {
 public:
  Windows(int rank, int size, std::uint64_t identity);

  // From here on memory may be that of a device, which does these copies, through this pinned memory.
  void UseCopier(std::shared_ptr<Copier> copier, std::span<std::byte> pinned);

  void Add(std::uint32_t id, std::byte* base, std::size_t nbytes, std::size_t signals, bool device = false);
  // Of a device's window of the peer: where this rank's device sees it; nothing: not any more. What a device sees it
  // reads by itself, when it is put to its rank and when its rank gets it.
  void See(std::uint32_t id, int peer, std::span<const std::byte> theirs);
  // The peer's device sees this window of this rank, until that is closed and `Settled`.
  void IsSeen(std::uint32_t id, int peer);
  // The memory of `peer`'s part is registered for RDMA.
  void Place(std::uint32_t id, int peer);
  // When it returns, nothing here touches the window any more; a device or a NIC, once it is `Settled`. Gets that are
  // being answered have what was in it.
  void Close(std::uint32_t id);
  bool Settled(std::uint32_t id);
  // No NIC touches the closed window any more: it costs the rails to those that are at it.
  void Revoke(Links& links, std::uint32_t id);
  // Keeps its signals in these words, too: of a window that is closed, or where the engine has failed, kReleased.
  void Show(std::uint32_t id, std::uint64_t* words);
  std::uint64_t Signal(std::uint32_t id, std::size_t index) const;
  // Done when the signal is `value` or more.
  std::shared_ptr<Transfer> Expect(std::uint32_t id, std::size_t index, std::uint64_t value);

  // Pieces of this memory to or from a window of `peer`; at the end of a put the signal grows by one, if it is one.
  std::shared_ptr<Transfer> Put(std::uint32_t id, int peer, const std::byte* src, std::span<const Piece> pieces,
                                int signal, const Where& where = {});
  std::shared_ptr<Transfer> Get(std::uint32_t id, int peer, std::byte* dst, std::span<const Piece> pieces,
                                const Where& where = {});

  // Moves what can be moved without waiting; whether anything did. Throws Fault.
  bool Pass(Links& links);
  // Of that only what this rank has to send: it looks at no peer to whom it has nothing to say.
  bool Push(Links& links);
  // Whether something is to be sent, or copied here.
  bool Unsent() const { return unsent_ > 0 || Copies(); }
  // Whether a device does something that it will not tell of: it must be looked at.
  bool Silent() const { return device_ != nullptr && device_->Busy(); }
  // Whether a device copies for this rank, its own or that of a rank that reads it: then it is soon over.
  bool Copying() const;
  // Whether something of this rank's waits for `peer`.
  bool Needs(int peer) const;
  void AddPoll(Links& links, std::vector<pollfd>& fds) const;
  // What poll() said of these. Where it heard something the next pass looks also for answers that nobody waits for: a
  // connection that broke is noticed, and one that was made again proved, by who reads.
  void Heard(std::span<const pollfd> fds);
  // This rank asks nothing more, and says so: to who serves it, the end of a stream is the loss of a rank without that.
  // What it has not begun to ask it does not ask. Waits for room to say it until then.
  void Leave(Links& links, std::int64_t until);
  // That rank has closed its engine: it reads nothing any more.
  void Left(Links& links, int peer);
  // The engine has failed: ends all that waits.
  void Drop();
  std::string Describe() const;
  const WindowCounts& counts() const { return counts_; }

 private:
  // kPull: a put whose owner reads it from the window of the asker's that `offset` names; a table of runs follows.
  // kRead: a get that the asker reads when it is allowed to; kDone, which nobody answers, is the next of its requests,
  // when it has. kPlace: a put whose pieces come when the owner has said where they may be written (Allowed). kFetch: a
  // get that says so itself (a Placement, behind a table of runs). kLeave, the last one, is not answered either.
  enum class Ask : std::uint32_t { kPut, kGet, kPull, kRead, kDone, kPlace, kFetch, kLeave };
  struct Head {  // of a request
    std::uint32_t id = 0;
    Ask ask = Ask::kPut;
    std::int32_t signal = -1;  // or none
    std::uint32_t pieces = 0;  // of several, a table of runs follows; of one, it is here
    std::uint64_t offset = 0;
    std::uint64_t nbytes = 0;
  };
  struct Run {
    std::uint64_t offset;  // in the window
    std::uint64_t nbytes;
    std::uint64_t from = 0;  // of kPull: in the asker's window; of kFetch: behind the Placement
  };
  struct Allowed {  // the answer to kPlace, before that to the put
    std::uint32_t status = 0;
    std::uint32_t pad = 0;
    Placement into;  // the window; none: pieces come as others do
  };
  struct Window {
    std::byte* base = nullptr;
    std::size_t nbytes = 0;
    bool device = false;
    bool open = true;
    std::array<std::uint64_t, 2> last{};  // marks, by way: of what touched it before it was closed
    std::set<int> seen;                   // by whose device
    std::vector<bool> placed;             // by peer, whose part is registered
    std::vector<std::uint64_t> signals;
    std::uint64_t* shown = nullptr;  // the same for a device's streams
    struct Expected {
      std::size_t index;
      std::uint64_t value;
      std::shared_ptr<Transfer> transfer;
    };
    std::vector<Expected> expected;
  };
  struct Part {  // a message
    const std::byte* data;
    std::size_t nbytes;
    bool lends;  // it lies still until it was read: of a device's, where it goes straight
    bool device = false;
    std::uint64_t place = 0;  // behind the Placement
  };
  struct Item {
    std::vector<std::byte> own;   // what is nobody else's
    std::vector<std::byte> kept;  // of a window that was closed meanwhile
    std::vector<Part> parts;
    std::size_t next = 0;
    std::int64_t window = -1;  // whose memory the parts after the first are
    bool device = false;       // some parts are
    bool straight = false;     // and NICs may read these, and write them at `into`, as far as is known: not staged
    bool holds = false;        // what comes behind it waits until what it gets was read, or what it asks is answered
    bool exposes = false;      // its last part, before it is sent
    Placement into = {};       // where its parts go, if that is known
    std::shared_ptr<Transfer> transfer = nullptr;  // that it ends
    Gate after = nullptr;                          // it is not looked at before this is true
    Late late{};                                   // nor before that was read
  };
  struct Outbound {
    std::deque<Item> items;
    std::uint64_t number = 0;  // messages before this one
    std::size_t at = 0;        // in the message
    bool held = false;         // by what was sent before
    // Up to where its Outlet was told to copy: an item, a part of it, a byte of that.
    std::size_t staged_item = 0;
    std::size_t staged_part = 0;
    std::size_t staged_at = 0;
  };
  // A put that waits for the device to copy what came last.
  struct Landing {
    std::uint64_t mark;
    std::uint32_t id;
    std::int32_t signal;
    Refusal refusal;
  };
  enum class Phase { kHead, kTable, kWhere, kLanding, kRuns };
  struct Inbound {
    Phase phase = Phase::kHead;
    std::uint64_t number = 0;
    std::size_t at = 0;
    std::size_t run = 0;
    bool ended = false;         // the peer will ask nothing more
    std::int64_t reading = -1;  // the window that it was allowed to read, until it has
    bool exposed = false;       // it was told where it may write, and nobody took that back
    bool placed = false;        // so pieces of this request may lie where they belong
    Head head{};
    Placement where;  // of kFetch
    std::vector<Run> runs;
    Refusal refusal = Refusal::kNone;
    std::deque<Landing> landing;
  };
  // What this rank puts to its own window or gets from there, and a device must copy.
  struct Own {
    std::shared_ptr<Transfer> transfer;
    std::uint32_t id;
    int signal;
    bool gets;
    std::byte* memory;
    std::vector<Piece> pieces;
    Where where;
    std::uint64_t mark = 0;
  };
  struct Device {
    Device(std::shared_ptr<Copier> copier, std::span<std::byte> pinned, std::size_t fifos);
    bool Busy() const;

    std::shared_ptr<Copier> copier;
    Inlet inlet;
    std::deque<Outlet> outlets;  // by peer and channel
    std::deque<Own> own;
    std::deque<std::pair<std::uint64_t, std::shared_ptr<Transfer>>> landed;  // gets, and their marks
    std::size_t gated = 0;                                                   // items that are not looked at yet
    std::size_t landing = 0;                                                 // puts that wait for a copy
    std::optional<Fault> fault;                                              // of what no Pass has begun
  };
  struct Peer {
    std::array<Outbound, 2> out;  // by channel
    std::array<Inbound, 2> in;
    std::uint32_t status = 0;  // of an answer
    Allowed allowed;
    std::int64_t lent = -1;                          // a window that is read where it lies to answer a get
    std::deque<std::shared_ptr<Transfer>> awaiting;  // an answer each
    bool quiet = false;                              // the last look found nothing, and poll() tells when there is more
  };

  Message MessageOf(std::uint64_t number, std::size_t total, bool lends, bool answered = false) const {
    return {.signature = identity_ + number * kNumberStep,
            .total = total,
            .may_lend = lends,
            .use = Use::kStored,
            .revocable = true,
            .answered = answered};
  }
  Window* Find(std::uint32_t id);
  Refusal Check(std::uint32_t id, std::span<const Run> runs, int signal);
  void Raise(std::uint32_t id, int signal);
  std::shared_ptr<Transfer> ToSelf(std::uint32_t id, std::byte* memory, std::span<const Piece> pieces, int signal,
                                   bool gets, const Where& where);
  // `src`: of a put, but for one that its owner reads, from `source` of this rank's part on.
  void Request(const std::shared_ptr<Transfer>& transfer, const Head& head, std::span<const Piece> pieces,
               const std::byte* src, const Where& where, std::uint64_t source = 0);
  bool Asks(std::uint32_t id, int peer, std::span<const Piece> pieces) const;
  static bool Disjoint(std::span<const Run> runs);
  void ExposeFor(Links& links, Item& item);
  void Allow(Links& links, int peer);
  bool IsAllowed(Links& links, int peer, bool& moved);
  void Answer(int peer, Refusal refusal, std::span<const Run> runs, std::uint32_t id, const Placement& into = {});
  void Queue(int peer, int channel, Item item);
  // False where the peer waits for the rest of what it was asked.
  bool QueueLeave(int peer);
  bool HasHeard(Links& links, int peer);
  bool Send(Links& links, int peer, int channel);
  // More of the message that is due at `dst`, to memory that `room` gives for at most so many bytes of it; `took` is
  // told how many came. What a NIC wrote to `dst` needs neither. Whether that was all of it.
  template <class Room, class Took>
  bool TakeTo(Links& links, Port<RecvEnd>& port, Inbound& in, const std::byte* dst, std::size_t total, bool& moved,
              Room&& room, Took&& took);
  bool Take(Links& links, Port<RecvEnd>& port, Inbound& in, std::byte* dst, std::size_t total, bool& moved);
  bool Sink(Links& links, Port<RecvEnd>& port, Inbound& in, std::size_t total, bool& moved);
  bool Land(Links& links, Port<RecvEnd>& port, Inbound& in, std::byte* dst, std::size_t total, bool& moved);
  bool PassPeer(Links& links, int peer);
  void LookAtAnswers(Links& links, int peer);
  bool Idle(Links& links, int peer);
  void HearQuiet(Links& links);
  void AddPollOf(Links& links, int peer, std::vector<pollfd>& fds) const;
  bool Serve(Links& links, int peer);
  bool ServeStep(Links& links, int peer, bool& moved);
  void Admit(Links& links, int peer);
  bool Collect(Links& links, int peer);
  bool CollectStep(Links& links, int peer, bool& moved);
  static void CheckAsked(const Transfer& transfer);
  // Of what a device copies.
  bool Copies() const { return device_ != nullptr && !device_->own.empty(); }
  Outlet& OutletOf(int peer, int channel) {
    return device_->outlets[2 * static_cast<std::size_t>(peer) + static_cast<std::size_t>(channel)];
  }
  static std::uint64_t CountOf(const Late& late, std::uint64_t most, int peer);
  void Shorten(Outbound& out, std::size_t index);
  bool Ready(Outbound& out, std::size_t index);
  void Stage(int peer, int channel);
  void StageRest(int peer, int channel);
  void HasGivenBack(Peer& peer);
  void KeepRest(int peer, std::size_t index);
  std::shared_ptr<Transfer> PutSeen(std::uint32_t id, int peer, const std::byte* src, std::span<const Piece> pieces,
                                    int signal, const Where& where);
  std::shared_ptr<Transfer> GetSeen(std::uint32_t id, int peer, std::byte* dst, std::span<const Piece> pieces,
                                    const Where& where);
  // Whether NICs write or read that window for the peer.
  static bool IsUsed(const Peer& peer, std::uint32_t id) {
    return (peer.in[kRequests].exposed && peer.in[kRequests].head.id == id) ||
           peer.lent == static_cast<std::int64_t>(id);
  }
  std::span<const std::byte> Theirs(int peer, std::uint64_t id) const;
  bool Readable(int peer, const Inbound& in) const;
  void Read(const std::shared_ptr<Transfer>& transfer);
  void HasRead(const Transfer& transfer);
  void Pull(int peer, Inbound& in);
  void PutIsThere(int peer, Inbound& in);
  bool PassCopies();
  bool PassOwn();
  void Release(Window& window);
  void KeepAnswers(std::uint32_t id);
  void CloseDevice(std::uint32_t id, Window& window);
  void Drain();

  int rank_;
  std::uint64_t identity_;
  std::map<std::uint32_t, Window> windows_;
  // What this rank's device sees of peers' windows.
  std::map<std::pair<int, std::uint32_t>, std::span<const std::byte>> theirs_;
  std::vector<Peer> peers_;
  std::size_t unsent_ = 0;  // items
  std::vector<std::byte> sink_;
  std::vector<pollfd> polled_;  // of quiet peers, which are:
  std::vector<int> polled_peers_;
  bool heard_ = false;  // something came
  WindowCounts counts_;
  std::unique_ptr<Device> device_;
};

template <class Room, class Took>
bool Windows::TakeTo(Links& links, Port<RecvEnd>& port, Inbound& in, const std::byte* dst, std::size_t total,
                     bool& moved, Room&& room, Took&& took) {
  Message m = MessageOf(in.number, total, false);
  const Placement place{1, reinterpret_cast<std::uintptr_t>(dst), {}};
  if (in.phase == Phase::kRuns && in.placed) m.into = &place;
  for (;;) {
    View there{nullptr, 0};
    if (m.into != nullptr) there = port.end->Peek(m, in.at, total - in.at);
    std::ptrdiff_t n = there.n;
    if (n == kWouldBlock) return false;
    if (n > 0 && there.data == dst + in.at) {
      port.end->Consume(static_cast<std::size_t>(n));
    } else {
      const std::span<std::byte> to = room(total - in.at);
      if (to.empty() && total > 0) return false;
      n = port.end->Pull(m, in.at, to.data(), to.size(), false);
      if (n == kWouldBlock) return false;
      took(static_cast<std::size_t>(n));
    }
    moved = true;
    in.at += static_cast<std::size_t>(n);
    port.taken += static_cast<std::uint64_t>(n);
    links.Touch(port);
    if (in.at == total) break;
  }
  in.at = 0;
  ++in.number;
  ++port.through;
  return true;
}

}  // namespace hetcoll
