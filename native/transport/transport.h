// What the engine asks of a transport: the two ends of a (source, destination, channel) FIFO of messages.
//
// A message is what one step of a plan sends: `total` bytes with a 64-bit signature that says which operation it
// belongs to. Ends never wait: they move what they can and say so. A message may move in fragments; where they fall is
// the sender's affair. A receiver names the signature and the length that it expects; anything else is a MismatchFault.
#pragma once

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace hetcoll {

inline constexpr std::ptrdiff_t kWouldBlock = -1;

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

struct Message {
  std::uint64_t signature;
  std::size_t total;
};

class SendEnd {
 public:
  virtual ~SendEnd() = default;
  SendEnd() = default;
  SendEnd(const SendEnd&) = delete;
  SendEnd& operator=(const SendEnd&) = delete;

  // Offers bytes [at, at + n) of a message. Returns how many were taken (they may be reused at once), or kWouldBlock.
  // An empty message (total 0) is taken as a whole and returns 0.
  virtual std::ptrdiff_t Push(const Message& m, std::size_t at, const std::byte* data, std::size_t n) = 0;

  // A place for exactly n further bytes that the caller fills before Commit, or null (no room now, or no such place in
  // this transport). It lets a reduction write its result straight into the slot.
  virtual std::byte* Reserve(std::size_t n) {
    static_cast<void>(n);
    return nullptr;
  }
  virtual void Commit(const Message& m, std::size_t at, std::size_t n) {
    static_cast<void>(m);
    static_cast<void>(at);
    static_cast<void>(n);
  }

  // The descriptor to wait on while blocked, where there is one.
  virtual void AddPoll(std::vector<pollfd>& fds) const { static_cast<void>(fds); }
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

  // Copies up to n bytes of the message, from offset `at` on, to dst. Returns how many, or kWouldBlock; 0 only for an
  // empty message, whose frame is then consumed. `stream` asks for stores around the cache.
  virtual std::ptrdiff_t Pull(const Message& m, std::size_t at, std::byte* dst, std::size_t n, bool stream) = 0;

  // Up to n bytes where they lie; valid until Consume, which may take fewer. An empty message gives n == 0 and is
  // finished by Consume(0).
  virtual View Peek(const Message& m, std::size_t at, std::size_t n) = 0;
  virtual void Consume(std::size_t n) = 0;

  virtual void AddPoll(std::vector<pollfd>& fds) const { static_cast<void>(fds); }
};

}  // namespace hetcoll
