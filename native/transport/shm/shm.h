// Shared memory: one segment a communicator and host, laid out for every ordered pair of local ranks and channel.
//
// A directed edge has a ring of header lines and a ring of data. A header line is one cache line that carries a stamp,
// the signature and, for small fragments, the payload itself: one line moves from core to core and nothing else. Stamps
// only grow and lie where no payload ever does, so a receiver cannot take old bytes for news, whatever the payload
// is. The segment is a memfd: it has no name, so nothing is left when a job is killed, and /dev/shm's size does not
// matter. Its pages come into being when they are first touched, so edges that no plan uses cost nothing.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/message.h"
#include "transport/shm/pages.h"
#include "transport/transport.h"

namespace hetcoll {

inline constexpr std::size_t kInlineBytes = 40;

// Where the bytes of a fragment are, and when its sender may use them and the line again. A line goes round: its sender
// fills it and stores the stamp; the receiver opens it, consumes it and counts it in ShmCredit::lines; the sender
// reclaims it, in order:
//
//   free -- fill, stamp --> published -- Open --> open -- Consume, credit --> consumed -- Reclaim --> free
//                                                                                  |  `kept`: not before ...
//   place          the bytes are in         offset          fragment               |
//   kLine          the header line          -               -                      -
//   kSlot          this edge's ring         in the ring     -                      its answer, kReturned, was read
//   kReturned      the receiver's own ring  in that ring    its index, sent out    -
//   kLent          its owner's heap         in the segment  the owner's line or 0  `home`: the last one has read it
//   kPrivate       the sender's process     the address     -                      -
//   kRecycledSlot  a slot that is given     its number      -                      - (the slot is the receiver's now)
//
// See private.h for kPrivate and edge.h for kRecycledSlot.
enum class ShmPlace : std::uint8_t { kLine, kSlot, kReturned, kLent, kPrivate, kRecycledSlot };

struct alignas(64) ShmLine {
  struct Where {
    std::uint64_t offset;        // as in the table
    std::uint64_t fragment = 0;  // as in the table; kLent: where in the segment that line is, or 0: this one
    std::int8_t channel = -1;    // kReturned: of its way out; kSlot: on which it may come back, or -1
    // Truths. Another process may write any byte, so they are none of the language's.
    std::uint8_t kept = 0;        // written by the receiver: it comes back, or was lent on
    std::uint8_t gives = 0;       // kLent: its owner does not read it again
    std::uint8_t home = 0;        // kLent, kept: written by whoever was the last to read it
    std::int8_t band = -1;        // of a message that is timed (ProtocolChoice), or -1
    std::uint32_t copied_ns = 0;  // and what it took to copy this into a slot; 0 where it was not timed
  };

  std::atomic<std::uint64_t> stamp;  // index of this fragment + 1, written last
  std::uint64_t signature;
  std::uint32_t nbytes : 24;
  std::uint32_t place : 8;
  std::uint32_t total;  // low 32 bits of the message's length, as a check
  union {
    std::byte payload[kInlineBytes];
    Where where;
  };
};
static_assert(sizeof(ShmLine) == 64);

// Written by the receiver only.
struct alignas(128) ShmCredit {
  std::atomic<std::uint64_t> lines;  // fragments consumed
  // Whether the receiver can read the sender's memory: 0 where it has not tried yet, 1 where it can, 2 where it cannot.
  std::atomic<std::uint32_t> reads;
  std::atomic<std::uint32_t> asked;  // what the receiver has ProtocolChoice ask for
};

struct alignas(128) ShmDoorbell {
  std::atomic<std::uint32_t> sleeping;  // the rank is in poll(2); whoever has news for it rings
  std::atomic<std::uint32_t> core;      // where it last began to wait, plus one
  std::atomic<std::uint64_t> name;      // the `Doorbell`'s, there before it sleeps
};

// What a rank tells the others of its host.
struct alignas(128) ShmOwner {
  std::atomic<std::uint32_t> withdrawn;  // it has failed, and what it lent may change: nobody may rely on it any more
  std::atomic<std::int32_t> pid;         // 0 before the rest is there
  std::uint64_t token;                   // what lies at `token_at` in its process
  std::uint64_t token_at;
};

struct ShmLayout {
  // `most_heap`: what the heaps of all ranks may take together.
  ShmLayout(int local_size, std::size_t ring_bytes, std::size_t most_heap = SIZE_MAX);

  std::size_t OwnerOffset(int local_rank) const;
  std::size_t EdgeOffset(int src, int dst, int channel) const;
  std::size_t HeapOffset(int local_rank) const;
  int HeapOwner(std::size_t offset) const;  // on whose heap this is, or -1

  int local_size;
  std::size_t ring_bytes;
  std::size_t recycled_bytes;  // of a slot that changes hands
  std::size_t edge_bytes;
  std::size_t heap_bytes;  // one rank's: address space, not memory
  std::size_t total_bytes;
};

inline constexpr std::uint64_t kLines = 64;
inline constexpr std::size_t kRecycled = 2;  // slots that change hands, of each direction and channel at first

enum class SlotStores : int { kAuto, kCached, kStreaming, kClaimed };  // as in Python: env.py

enum class PrivateReads : int { kAuto, kAlways, kNever };  // as in Python: env.py

// Of a sum that is only sent on no more than one place is needed: whoever lends what goes into it need not have it back
// as it was, so each rank adds to what lies there and lends it on. Its owner has it back when the last one has read it.
struct BorrowedBuffers {
  // The fragment that this rank was lent in this way and that one of its receiving ends shows, untouched so far.
  const std::byte* data = nullptr;
  std::size_t n = 0;
  ShmLine* line = nullptr;
  void Show(const std::byte* at, std::size_t nbytes, ShmLine& by) { data = at, n = nbytes, line = &by; }

  std::vector<int> returned;  // local ranks whose memory went home, and who may sleep
};

struct ShmOptions {
  SlotStores stores = SlotStores::kAuto;
  PrivateReads reads = PrivateReads::kAuto;
  bool weighs = false;  // messages of middle length go the way that takes less time: not where ranks share cores
};

// How the slots of this host are written and given back.
//
// A store into a line that another core's cache holds as well must first take it away from there. How long that takes
// depends on the processor, on where the two cores are, and on whether the other one has written the line: AMD's give a
// modified line away at about the speed of a copy, but take four to ten times as long for one that was only read. So
// there the reader of a slot of a ring writes a word into each of its lines once it has read them (kClaimed). Where the
// processor's string instruction is fast, longer copies into slots, and out of those that change hands, are its work.
//
// Elsewhere, ordinary stores are several times slower than those around the cache where the reader's core is behind
// another cache, and a virtual machine's cores move about. Which it is shows in how long a copy into a slot takes, so
// some are timed.
class StorePolicy {
 public:
  explicit StorePolicy(SlotStores stores);
  bool claims() const { return stores_ == SlotStores::kClaimed; }
  bool around_cache() const { return around_left_ > 0; }
  // Whether n bytes go into slots, and out of those that need no claim, by the processor's string instruction.
  bool strings(std::size_t n) const { return n >= least_string_; }
  // How much of a ring to use for a message of `total` bytes, whose slots may come back. The less, the fewer cache
  // lines; but one that the reader's cache still holds unmodified is best left alone until it has been evicted. What
  // comes back was modified there.
  std::size_t Window(std::size_t total, std::size_t capacity, bool back) const;
  // Copies into a slot by the better way.
  void Copy(std::byte* slot, const std::byte* data, std::size_t n);

 private:
  SlotStores stores_;
  std::size_t least_string_ = SIZE_MAX;
  int copies_ = 0;
  int slow_ = 0;     // consecutive samples
  int around_left_;  // copies until ordinary stores are tried again
};

// The mapping. Closing the descriptor is the caller's business.
class ShmSegment {
 public:
  ShmSegment(int fd, const ShmLayout& layout, const ShmOptions& options = {});
  ShmSegment(const ShmSegment&) = delete;
  ShmSegment& operator=(const ShmSegment&) = delete;

  // The same memory at the same place, for another rank of this process.
  std::shared_ptr<ShmSegment> Share() const;

  std::byte* base() const { return base_.get(); }
  ShmDoorbell& doorbell(int local_rank) const;
  ShmOwner& owner(int local_rank) const;
  // Says which process this rank is, so that others can try to read its memory.
  void Introduce(int local_rank);
  std::byte* edge(int src, int dst, int channel) const { return base() + layout_.EdgeOffset(src, dst, channel); }
  const ShmLayout& layout() const { return layout_; }
  StorePolicy& policy() const { return *policy_; }
  PrivateReads reads() const { return options_.reads; }
  // Whether ProtocolChoice chooses.
  bool weighs() const { return options_.weighs && options_.reads == PrivateReads::kAuto && !policy_->claims(); }
  OwnPages& pages() const { return *pages_; }
  BorrowedBuffers& borrowed() const { return *borrowed_; }

 private:
  ShmSegment(std::shared_ptr<std::byte> base, const ShmLayout& layout, const ShmOptions& options);

  ShmOptions options_;
  std::unique_ptr<StorePolicy> policy_ = std::make_unique<StorePolicy>(options_.stores);
  std::unique_ptr<OwnPages> pages_ = std::make_unique<OwnPages>();
  std::unique_ptr<BorrowedBuffers> borrowed_ = std::make_unique<BorrowedBuffers>();
  ShmLayout layout_;
  std::shared_ptr<std::byte> base_;
  std::unique_ptr<std::uint64_t> token_ = std::make_unique<std::uint64_t>(0);
};

// All channels of `me` to and from local rank `other`, which is rank `peer` of the communicator.
std::array<LinkEnds, kChannels> MakeShm(const ShmSegment& segment, int me, int other, int peer);

}  // namespace hetcoll
