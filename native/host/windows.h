// One-sided messages: what this rank puts into the windows of others and gets from them, and what they do with its own.
//
// Between two ranks there are two FIFOs each way: one of requests, with what is put, and one of answers, with what is
// got. All of one request is answered before the next one of the same rank is looked at, so a rank's requests to a
// window are done in their order. A window is written by its owner's engine alone, under the engine's lock: one that
// was closed is not touched again, however late a piece for it comes.
#pragma once

#include <poll.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "host/task.h"

namespace hetcoll {

inline constexpr int kRequests = 0;  // channels
inline constexpr int kAnswers = 1;
inline constexpr std::size_t kMostPieces = std::size_t{1} << 20;  // of one request
inline constexpr int kTurn = 64;                                  // messages of one FIFO until others have their turn

// Why a request was not carried out.
enum class Refusal : int {
  kNone = 0,
  kClosed = 1,   // its owner has closed the window
  kOutside = 2,  // a piece is not inside it, or there is no such signal: who asked was told another size
};

// A part of a request: bytes of memory here and of the window there.
struct Piece {
  std::uint64_t here;
  std::uint64_t there;
  std::uint64_t nbytes;
};

struct WindowCounts {
  std::uint64_t puts = 0;  // of others, into windows of this rank
  std::uint64_t gets = 0;
  std::uint64_t pieces = 0;   // of both
  std::uint64_t bytes = 0;    // that were read and written where they lie in a window
  std::uint64_t refused = 0;  // pieces that came for a closed window, or would not have been inside
};

// A put or a get of this rank, or its waiting for a signal.
struct Transfer : Pending {
  int peer = -1;
  std::byte* base = nullptr;  // of a get: where its pieces go
  std::vector<Piece> pieces;  // of a get
};

// All of it under the engine's lock.
class Windows {
 public:
  Windows(int rank, int size, std::uint64_t identity);

  void Add(std::uint32_t id, std::byte* base, std::size_t nbytes, std::size_t signals);
  // When it returns, nothing here touches the window any more. Gets that are being answered have what was in it.
  void Close(std::uint32_t id);
  std::uint64_t Signal(std::uint32_t id, std::size_t index) const;
  // Done when the signal is `value` or more.
  std::shared_ptr<Transfer> Expect(std::uint32_t id, std::size_t index, std::uint64_t value);

  // Pieces of this memory to or from a window of `peer`; at the end of a put the signal grows by one, if it is one.
  std::shared_ptr<Transfer> Put(std::uint32_t id, int peer, const std::byte* src, std::span<const Piece> pieces,
                                int signal);
  std::shared_ptr<Transfer> Get(std::uint32_t id, int peer, std::byte* dst, std::span<const Piece> pieces);

  // Moves what can be moved without waiting; whether anything did. Throws Fault.
  bool Pass(Links& links);
  // Whether something is to be sent.
  bool Unsent() const { return unsent_ > 0; }
  // Whether something of this rank's waits for `peer`.
  bool Needs(int peer) const;
  void AddPoll(Links& links, std::vector<pollfd>& fds) const;
  // The engine has failed: ends all that waits.
  void Drop();
  std::string Describe() const;
  const WindowCounts& counts() const { return counts_; }

 private:
  struct Head {  // of a request
    std::uint32_t id = 0;
    std::uint32_t gets = 0;
    std::int32_t signal = -1;  // or none
    std::uint32_t pieces = 0;  // of several, a table of runs follows; of one, it is here
    std::uint64_t offset = 0;
    std::uint64_t nbytes = 0;
  };
  struct Run {
    std::uint64_t offset;  // in the window
    std::uint64_t nbytes;
  };
  struct Window {
    std::byte* base = nullptr;
    std::size_t nbytes = 0;
    bool open = true;
    std::vector<std::uint64_t> signals;
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
    bool lends;  // it lies still until it was read
  };
  struct Item {
    std::vector<std::byte> own;  // what is nobody else's
    std::vector<Part> parts;
    std::size_t next = 0;
    std::int64_t window = -1;  // whose memory the parts after the first are
  };
  struct Outbound {
    std::deque<Item> items;
    std::uint64_t number = 0;  // messages before this one
    std::size_t at = 0;        // in the message
  };
  enum class Phase { kHead, kTable, kRuns };
  struct Inbound {
    Phase phase = Phase::kHead;
    std::uint64_t number = 0;
    std::size_t at = 0;
    std::size_t run = 0;
    bool ended = false;  // the peer will ask nothing more
    Head head{};
    std::vector<Run> runs;
    Refusal refusal = Refusal::kNone;
  };
  struct Peer {
    std::array<Outbound, 2> out;  // by channel
    std::array<Inbound, 2> in;
    std::uint32_t status = 0;                        // of an answer
    std::deque<std::shared_ptr<Transfer>> awaiting;  // an answer each
  };

  Message MessageOf(std::uint64_t number, std::size_t total, bool lends) const {
    return {.signature = identity_ + number * kNumberStep, .total = total, .may_lend = lends, .use = Use::kStored};
  }
  Window* Find(std::uint32_t id);
  Refusal Check(std::uint32_t id, std::span<const Run> runs, int signal);
  void Raise(std::uint32_t id, int signal);
  std::shared_ptr<Transfer> ToSelf(std::uint32_t id, std::byte* memory, std::span<const Piece> pieces, int signal,
                                   bool gets);
  void Request(int peer, const Head& head, std::span<const Piece> pieces, const std::byte* src);
  void Answer(int peer, Refusal refusal, std::span<const Run> runs, std::uint32_t id);
  void Queue(int peer, int channel, Item item);
  bool Send(Links& links, int peer, int channel);
  bool Take(Links& links, Port<RecvEnd>& port, Inbound& in, std::byte* dst, std::size_t total, bool& moved);
  bool Serve(Links& links, int peer);
  bool ServeStep(Links& links, int peer, bool& moved);
  void Admit(int peer);
  bool Collect(Links& links, int peer);
  bool CollectStep(Links& links, int peer, bool& moved);

  int rank_;
  std::uint64_t identity_;
  std::map<std::uint32_t, Window> windows_;
  std::vector<Peer> peers_;
  std::size_t unsent_ = 0;  // items
  std::vector<std::byte> sink_;
  WindowCounts counts_;
};

}  // namespace hetcoll
