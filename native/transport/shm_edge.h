// What the two ends of an edge in shared memory have in common.
#pragma once

#include <sys/mman.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "transport/shm.h"

namespace hetcoll {

inline constexpr std::size_t kLineBytes = 64;

struct Edge {
  Edge(const ShmSegment& segment, int src, int dst, int channel)
      : Edge(segment.edge(src, dst, channel), segment.layout().ring_bytes) {}
  Edge(std::byte* at, std::size_t ring_bytes)
      : credit(reinterpret_cast<ShmCredit*>(at)),
        lines(reinterpret_cast<ShmLine*>(at + sizeof(ShmCredit))),
        data(at + sizeof(ShmCredit) + kLines * sizeof(ShmLine)),
        capacity(ring_bytes) {}

  // Has the kernel map all pages now and at once, instead of one page fault for each 4 KiB of the first messages. Older
  // kernels than 5.14 refuse, and the faults stay.
  void Prepare(const StorePolicy& policy) {
    constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, absent from older headers
    if (prepared) return;
    prepared = true;
    const std::byte* end = data + policy.Window(capacity, capacity);
    static_cast<void>(
        madvise(credit, static_cast<std::size_t>(end - reinterpret_cast<std::byte*>(credit)), kPopulateWrite));
  }

  ShmLine& line(std::uint64_t fragment) const { return lines[fragment % kLines]; }

  ShmCredit* credit;
  ShmLine* lines;
  std::byte* data;
  std::size_t capacity;
  bool prepared = false;
};

// What the ends of one rank toward one peer know of each other, so that a fragment can come and go back in one slot.
struct Neighbour {
  // The slot that the receiving end of a channel has open, untouched so far, and may send back.
  struct Open {
    std::byte* slot = nullptr;
    std::size_t n = 0;
    ShmLine* line = nullptr;
    std::uint64_t fragment = 0;
  };
  std::array<Open, kChannels> open;
  // For each header line of the sending end of a channel: the last fragment there whose return was read, plus one.
  std::array<std::array<std::uint64_t, kLines>, kChannels> home{};
};

// The ends of rank `me` on one channel toward `other`, which is rank `peer` of the communicator.
std::unique_ptr<SendEnd> MakeShmSend(const ShmSegment& segment, int me, int other, int channel,
                                     std::shared_ptr<Neighbour> neighbour);
std::unique_ptr<RecvEnd> MakeShmRecv(const ShmSegment& segment, int me, int other, int channel, int peer,
                                     std::shared_ptr<Neighbour> neighbour);

}  // namespace hetcoll
