// The memory that the ranks of a communicator share: a file without a name (memfd) of the process that made the id,
// which the others open through /proc. Nothing of it outlives its processes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace fake::nccl {

constexpr std::size_t kChunk = 256 * 1024;  // of a rank's data that the others see at a time
constexpr std::size_t kSlot = 64 * 1024;    // the same of a message to one peer

struct Id {  // ncclUniqueId
  char magic[8];
  char vendor[8];
  std::int32_t process;
  std::int32_t fd;
  std::uint64_t nonce;
  char unused[96];
};
static_assert(sizeof(Id) == 128);

struct Call {  // what a rank takes part in: all must agree
  std::uint64_t kind, count, dtype, op, root;
  bool operator==(const Call&) const = default;
};

struct alignas(64) Peer {
  std::atomic<std::uint64_t> published;  // steps whose data lies in its chunk
  std::atomic<std::uint64_t> consumed;   // steps in which it has read the others' chunks
  std::atomic<std::uint64_t> exchanged;  // rounds of the hosts' exchange
  std::int64_t words[2][4];              // of the two latest
  Call call;
};

struct alignas(64) Pair {  // messages from one rank to another, a slot at a time
  std::atomic<std::uint64_t> produced, consumed;
  std::uint64_t message;         // bytes of the whole message that the slot is of
  std::atomic<unsigned> joined;  // 1: the sender has called, 2: the receiver has
  unsigned char data[kSlot];
};

// Lets go of the file of an id that this process made: every rank has joined, or never will.
void forget(const Id& id);

class Segment {
 public:
  // Makes the file of a new id, which this process keeps until it has joined.
  static bool make(Id* id);
  // Null when the id is no longer, or for another number of ranks.
  static std::shared_ptr<Segment> join(const Id& id, int ranks);
  ~Segment();

  int ranks() const { return ranks_; }
  Peer& peer(int rank) const { return peers()[rank]; }
  Pair& pair(int from, int to) const;
  unsigned char* chunk(int rank) const;

 private:
  Segment(void* memory, int ranks) : memory_(static_cast<unsigned char*>(memory)), ranks_(ranks) {}
  static std::size_t bytes(int ranks);
  Peer* peers() const { return reinterpret_cast<Peer*>(memory_ + 64); }

  unsigned char* memory_;
  int ranks_;
};

}  // namespace fake::nccl
