// Shared memory: one segment a communicator and host, laid out for every ordered pair of local ranks and channel.
//
// A directed edge has a ring of header lines and a ring of data. A header line is one cache line that carries a stamp,
// the signature and, for small fragments, the payload itself: one line moves from core to core and nothing else. Stamps
// only grow and lie where no payload ever does, so a receiver cannot take old bytes for news (DESIGN M1-M3). The
// segment is a memfd: it has no name, so nothing is left when a job is killed, and /dev/shm's size does not matter. Its
// pages come into being when they are first touched, so edges that no plan uses cost nothing.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "transport/transport.h"

namespace hetcoll {

inline constexpr std::size_t kInlineBytes = 40;

struct alignas(64) ShmLine {
  std::atomic<std::uint64_t> stamp;  // index of this fragment + 1, written last
  std::uint64_t signature;
  std::uint32_t nbytes;  // kLentBit: the payload is where it was, at the segment offset that `payload` holds
  std::uint32_t total;   // low 32 bits of the message's length, as a check
  std::byte payload[kInlineBytes];
};
static_assert(sizeof(ShmLine) == 64);
inline constexpr std::uint32_t kLentBit = 1u << 31;

// Written by the receiver only.
struct alignas(128) ShmCredit {
  std::atomic<std::uint64_t> lines;  // header lines consumed
  std::atomic<std::uint64_t> bytes;  // position in the data ring up to which it was consumed
};

struct alignas(128) ShmDoorbell {
  std::atomic<std::uint32_t> sleeping;  // the rank is in poll(2); whoever has news for it rings
  std::atomic<std::uint32_t> core;      // where it last began to wait, plus one
};

struct ShmLayout {
  ShmLayout(int local_size, std::size_t ring_bytes);

  std::size_t EdgeOffset(int src, int dst, int channel) const;
  std::size_t HeapOffset(int local_rank) const;

  int local_size;
  std::size_t ring_bytes;
  std::size_t edge_bytes;
  std::size_t heap_bytes;  // one rank's: address space, not memory
  std::size_t total_bytes;
};

inline constexpr std::uint64_t kLines = 64;

enum class SlotStores : int { kAuto, kCached, kStreaming };  // as in Python: wiring.py

// How the slots of this host are best written.
//
// Ordinary stores fetch each line from wherever it was last: a few nanoseconds where that is a shared cache, but tens
// where the reader's core is behind another one, and a virtual machine's cores move about. There, stores around the
// cache are several times faster. Which it is shows in how long a copy into a slot takes, so some are timed.
class StorePolicy {
 public:
  explicit StorePolicy(SlotStores stores) : stores_(stores), around_left_(stores == SlotStores::kStreaming) {}
  bool around_cache() const { return around_left_ > 0; }
  // Copies into a slot by the better way.
  void Copy(std::byte* slot, const std::byte* data, std::size_t n);

 private:
  SlotStores stores_;
  int copies_ = 0;
  int slow_ = 0;     // consecutive samples
  int around_left_;  // copies until ordinary stores are tried again
};

// The mapping. Closing the descriptor is the caller's business.
class ShmSegment {
 public:
  ShmSegment(int fd, const ShmLayout& layout, SlotStores stores = SlotStores::kAuto);
  ShmSegment(const ShmSegment&) = delete;
  ShmSegment& operator=(const ShmSegment&) = delete;

  // The same memory at the same place, for another rank of this process.
  std::shared_ptr<ShmSegment> Share() const;

  std::byte* base() const { return base_.get(); }
  ShmDoorbell& doorbell(int local_rank) const;
  std::byte* edge(int src, int dst, int channel) const { return base() + layout_.EdgeOffset(src, dst, channel); }
  const ShmLayout& layout() const { return layout_; }
  StorePolicy& policy() const { return *policy_; }

 private:
  ShmSegment(std::shared_ptr<std::byte> base, const ShmLayout& layout, SlotStores stores)
      : stores_(stores), layout_(layout), base_(std::move(base)) {}

  SlotStores stores_;
  std::unique_ptr<StorePolicy> policy_ = std::make_unique<StorePolicy>(stores_);
  ShmLayout layout_;
  std::shared_ptr<std::byte> base_;
};

std::unique_ptr<SendEnd> MakeShmSend(const ShmSegment& segment, int src, int dst, int channel);
std::unique_ptr<RecvEnd> MakeShmRecv(const ShmSegment& segment, int src, int dst, int channel, int peer);

}  // namespace hetcoll
