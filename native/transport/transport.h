// What the engine asks of a transport: the two ends of a (source, destination, channel) FIFO of messages.
//
// A message is what one step of a plan sends: `total` bytes with a 64-bit signature that says which operation it
// belongs to and which of that operation's messages on this FIFO it is. Ends never wait: they move what they can and
// say so. A message may move in fragments; where they fall is the sender's affair. A receiver names the signature and
// the length that it expects; anything else is a Fault.
#pragma once

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/message.h"

namespace hetcoll {

inline constexpr std::ptrdiff_t kWouldBlock = -1;
inline constexpr std::ptrdiff_t kOutOfReach = -2;  // of Push: Message::device, and no NIC reads it there

enum class FaultKind : int {
  kNone = 0,
  kMismatch = 1,  // the peer's frame belongs to another operation
  kPeerGone = 2,  // the connection ended, or the peer left and what is needed never came
  kCorrupt = 3,   // a frame that no correct peer sends
  kSystem = 4,    // a system call failed
  kTimeout = 5,
  kAborted = 6,
};

struct Fault : std::runtime_error {
  Fault(FaultKind kind, int peer, const std::string& what) : std::runtime_error(what), kind(kind), peer(peer) {}
  FaultKind kind;
  int peer;
};

// What went wrong first; kept until the end.
struct Failure {
  FaultKind kind = FaultKind::kNone;
  int peer = -1;
  std::string text;
};

// For a frame that is not the one that was due. Signatures of different operations are random; those of one operation
// lie a few steps apart.
inline Fault WrongFrame(const Message& due, std::uint64_t signature, std::size_t total, int peer) {
  constexpr std::uint64_t kInverse = 0xf1de83e19937733du;
  static_assert(kNumberStep * kInverse == 1);
  const auto ahead = static_cast<std::int64_t>((signature - due.signature) * kInverse);
  if (ahead == 0 || ahead < -(1 << 20) || ahead > (1 << 20)) {
    const bool same = ahead == 0;
    return {FaultKind::kMismatch, peer,
            same ? "a message of " + std::to_string(total) + " bytes came, " + std::to_string(due.total) + " were due"
                 : "the frame belongs to another operation"};
  }
  const std::string what = ahead > 0 ? std::to_string(ahead) + " of its messages are missing" : "a message came twice";
  return {FaultKind::kCorrupt, peer, "the frame is of this operation, but " + what};
}

class Team;

// What a link holds beside the memory of its users. Of sockets, `socket_bytes` is what the kernel may keep in them, in
// both directions, and copies of what may have to be sent again.
struct Holdings {
  std::size_t descriptors = 0;
  std::size_t socket_bytes = 0;
  std::size_t pinned_bytes = 0;
};

// What the processor has copied of a link's messages since it was made, and what it need not: bytes put into memory
// that both sides have, or lent there, and bytes taken to where they were to be.
struct Copies {
  std::uint64_t staged = 0;
  std::uint64_t lent = 0;
  std::uint64_t taken = 0;
};

class SendEnd {
 public:
  virtual ~SendEnd() = default;
  SendEnd() = default;
  SendEnd(const SendEnd&) = delete;
  SendEnd& operator=(const SendEnd&) = delete;

  // Called when a plan that uses this end is loaded, perhaps more than once: what the first message need not wait for.
  virtual void Prepare() {}

  // Offers bytes [at, at + n) of a message. Returns how many were taken (but see Lent), or kWouldBlock. Bytes of a
  // device's memory are lent, or else kOutOfReach: then the rest of the message comes from the host's.
  // An empty message (total 0) is taken as a whole and returns 0.
  virtual std::ptrdiff_t Push(const Message& m, std::size_t at, const std::byte* data, std::size_t n) = 0;

  // How many of the bytes taken last, from the first that is still read where it lies: memory that the peer can reach
  // is lent, not copied, and must not be written until it is given back.
  virtual std::size_t Lent() { return 0; }
  // Where the link can copy what is lent it does so now, and nothing is lent any more; whether that changed anything.
  // For when somebody waits for the memory, who is not to wait for the peer.
  virtual bool Keep() { return false; }

  // The peer has taken the first so many messages to their end: nothing of them is lent any more.
  virtual void Answered(std::uint64_t messages) { static_cast<void>(messages); }
  // From here on nothing that was lent is read where it lies, though the peer may not have answered.
  virtual void Recall() {}

  // A place for exactly n further bytes, which will also be at `data`, that the caller fills before Commit; or null (no
  // room now, or no need or no such place in this transport). It lets a reduction write its result straight into a
  // slot. `from` is null, or n bytes that a RecvEnd of this rank shows and the result is computed from: the place may
  // be this one.
  virtual std::byte* Reserve(const std::byte* data, std::size_t n, const std::byte* from) {
    static_cast<void>(data);
    static_cast<void>(n);
    static_cast<void>(from);
    return nullptr;
  }
  virtual void Commit(const Message& m, std::size_t at, std::size_t n) {
    static_cast<void>(m);
    static_cast<void>(at);
    static_cast<void>(n);
  }

  // The descriptor to wait on while blocked, where there is one.
  virtual void AddPoll(std::vector<pollfd>& fds) const { static_cast<void>(fds); }

  // Whether nothing will tell when it can move again: it must be looked at.
  virtual bool Silent() const { return false; }

  // Once the peer has left: whether a kWouldBlock is the last word.
  virtual bool FinalWithoutPeer() const { return true; }

  // Adds what the link of this end holds, for both of its directions.
  virtual void Count(Holdings& held) const { static_cast<void>(held); }
  // Adds what it has copied; only where that is to or from memory that both sides have.
  virtual void CountCopies(Copies& copies) const { static_cast<void>(copies); }

  // Nothing more will be pushed: the peer may see the end behind what was.
  virtual void Finish() {}

  // In a forked child: closes its copies of the link's sockets, and nothing else. The link is not used or destroyed
  // afterwards.
  virtual void Abandon() {}
};

struct View {
  const std::byte* data;
  std::ptrdiff_t n;  // kWouldBlock when nothing is there
};

class RecvEnd {
 public:
  virtual ~RecvEnd() = default;
  RecvEnd() = default;
  RecvEnd(const RecvEnd&) = delete;
  RecvEnd& operator=(const RecvEnd&) = delete;

  virtual void Prepare() {}

  // Copies up to n bytes of the message, from offset `at` on, to dst. Returns how many, or kWouldBlock; 0 only for an
  // empty message, whose frame is then consumed. `stream` asks for stores around the cache.
  virtual std::ptrdiff_t Pull(const Message& m, std::size_t at, std::byte* dst, std::size_t n, bool stream) = 0;

  // All of this message will be pulled to `dst`, which is free from now on, after those announced before. Some
  // transports then write it there.
  virtual void Announce(const Message& m, std::byte* dst) {
    static_cast<void>(m);
    static_cast<void>(dst);
  }

  // Where the link can, it lets the peer write messages straight to this memory, once that is told of the result, until
  // `Hide`: see Message::into.
  virtual Placement Expose(std::byte* base, std::size_t n) {
    static_cast<void>(base);
    static_cast<void>(n);
    return {};
  }
  // The peer has written all that it was to write there, or (`at_once`) shall write there no more.
  virtual void Hide(bool at_once = false) { static_cast<void>(at_once); }

  // Up to n bytes where they lie, which is their place where the peer wrote them there (Message::into); valid until
  // Consume, which may take fewer. An empty message gives n == 0 and is finished by Consume(0).
  virtual View Peek(const Message& m, std::size_t at, std::size_t n) = 0;
  virtual void Consume(std::size_t n) = 0;
  // Whether that is most likely in another core's cache: Sweep::kPages.
  virtual bool Far() const { return false; }

  virtual void AddPoll(std::vector<pollfd>& fds) const { static_cast<void>(fds); }
  virtual bool Silent() const { return false; }
  // Whether, once a look has found nothing, poll() alone tells of all that comes.
  virtual bool Polled() const { return false; }

  // See SendEnd.
  virtual void CountCopies(Copies& copies) const { static_cast<void>(copies); }

  // Threads that help with what it brings.
  virtual Team* team() const { return nullptr; }

  // Once the peer has left: whether a kWouldBlock is the last word. Not where data may still be under way.
  virtual bool FinalWithoutPeer() const { return true; }
};

struct LinkEnds {
  std::unique_ptr<SendEnd> send;
  std::unique_ptr<RecvEnd> recv;
};

}  // namespace hetcoll
