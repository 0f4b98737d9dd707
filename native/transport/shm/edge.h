// What the two ends of an edge in shared memory have in common.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "transport/shm/shm.h"

namespace hetcoll {

inline constexpr std::size_t kLineBytes = 64;

inline constexpr std::size_t AlignUp(std::size_t n, std::size_t to) { return (n + to - 1) / to * to; }

struct Edge {
  Edge(const ShmSegment& segment, int src, int dst, int channel)
      : Edge(segment.edge(src, dst, channel), segment.layout()) {}
  Edge(std::byte* at, const ShmLayout& layout)
      : credit(reinterpret_cast<ShmCredit*>(at)),
        lines(reinterpret_cast<ShmLine*>(at + sizeof(ShmCredit))),
        recycled(at + sizeof(ShmCredit) + kLines * sizeof(ShmLine)),
        data(recycled + kRecycled * layout.recycled_bytes),
        capacity(layout.ring_bytes) {}

  // Has the kernel map all pages now and at once, instead of one page fault for each 4 KiB of the first messages. Older
  // kernels than 5.14 refuse, and the faults stay.
  void Prepare(const StorePolicy& policy) {
    constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, absent from older headers
    if (prepared) return;
    prepared = true;
    const auto window = [&](bool back) { return policy.Window(capacity, capacity, back); };
    const std::byte* end = data + std::max(window(false), window(true));
    static_cast<void>(
        madvise(credit, static_cast<std::size_t>(end - reinterpret_cast<std::byte*>(credit)), kPopulateWrite));
  }

  ShmLine& line(std::uint64_t fragment) const { return lines[fragment % kLines]; }

  ShmCredit* credit;
  ShmLine* lines;
  std::byte* recycled;  // where its slots that change hands begin
  std::byte* data;
  std::size_t capacity;
  bool prepared = false;
};

// Slots that change hands: whoever has read one fills it next. Its lines are in the reader's cache by then, so of the
// two journeys that a line of a ring makes for each message, there and back, one is spared. Between two ranks and on
// one channel there are 2 * kRecycled, half of which are either's at first. They are used where messages go both ways,
// and run out where more go one way: then there is the ring.
class RecycledSlots {
 public:
  RecycledSlots(const ShmSegment& segment, int me, int other, int channel) {
    const int low = std::min(me, other), high = std::max(me, other);
    const std::size_t bytes = segment.layout().recycled_bytes;
    for (std::size_t i = 0; i < kRecycled; ++i) {
      slots_[i] = Edge(segment, low, high, channel).recycled + i * bytes;
      slots_[kRecycled + i] = Edge(segment, high, low, channel).recycled + i * bytes;
      mine_[i] = static_cast<std::uint8_t>(i + (me == low ? 0 : kRecycled));
    }
  }

  std::byte* slot(std::size_t number) const { return slots_[number]; }
  bool empty() const { return count_ == 0; }
  // The one that was read last, which is the likeliest to be in the cache.
  std::uint8_t Take() { return mine_[--count_]; }
  // False where there are no more: no correct peer gives back what we have.
  bool Give(std::uint64_t number) {
    if (count_ == mine_.size()) return false;
    mine_[count_++] = static_cast<std::uint8_t>(number);
    return true;
  }

  bool midway = false;  // a message has come in part, so more of it is sure to come

 private:
  std::array<std::byte*, 2 * kRecycled> slots_{};
  std::array<std::uint8_t, 2 * kRecycled> mine_{};
  std::size_t count_ = kRecycled;
};

// What the ends of one rank toward one peer know of each other, so that a fragment can come and go back in one slot.
struct Neighbour {
  Neighbour(const ShmSegment& segment, int me, int other)
      : recycled{RecycledSlots(segment, me, other, 0), RecycledSlots(segment, me, other, 1),
                 RecycledSlots(segment, me, other, 2)} {
    static_assert(kChannels == 3);
  }

  // The slot that the receiving end of a channel has open, untouched so far, and may send back.
  struct Open {
    std::byte* slot = nullptr;
    std::size_t n = 0;
    ShmLine* line = nullptr;
    std::uint64_t fragment = 0;
  };
  std::array<Open, kChannels> open;
  std::array<RecycledSlots, kChannels> recycled;
  // For each header line of the sending end of a channel: the last fragment there whose return was read, plus one.
  std::array<std::array<std::uint64_t, kLines>, kChannels> home{};
};

// The ends of rank `me` on one channel toward `other`, which is rank `peer` of the communicator.
std::unique_ptr<SendEnd> MakeShmSend(const ShmSegment& segment, int me, int other, int channel,
                                     std::shared_ptr<Neighbour> neighbour);
std::unique_ptr<RecvEnd> MakeShmRecv(const ShmSegment& segment, int me, int other, int channel, int peer,
                                     std::shared_ptr<Neighbour> neighbour);

}  // namespace hetcoll
