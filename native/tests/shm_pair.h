// What tests of shared memory begin with: two ranks of one process, and what a call throws.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <memory>

#include "harness.h"
#include "transport/shm/edge.h"

namespace hetcoll::testing {

using Frame = struct hetcoll::Message;  // not the plan of that name

// Two ranks of one process.
struct Pair {
  explicit Pair(std::size_t ring_bytes, ShmOptions options = {SlotStores::kClaimed}) : layout(2, ring_bytes) {
    const int fd = memfd_create("hetcoll-test", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(layout.total_bytes)) != 0) std::abort();
    segment = std::make_shared<ShmSegment>(fd, layout, options);
    close(fd);
    a = MakeShm(*segment, 0, 1, 1);
    b = MakeShm(*segment, 1, 0, 0);
  }

  // The header line that carries fragment `index` from rank 0 to rank 1, or back.
  ShmLine& line(int channel, std::uint64_t index) { return Edge(*segment, 0, 1, channel).line(index); }
  ShmLine& line_back(int channel, std::uint64_t index) { return Edge(*segment, 1, 0, channel).line(index); }

  ShmLayout layout;
  std::shared_ptr<ShmSegment> segment;
  std::array<LinkEnds, kChannels> a;
  std::array<LinkEnds, kChannels> b;
};

inline Bytes ReceiveAll(RecvEnd& end, const Frame& m) {
  Bytes got(m.total);
  for (std::size_t at = 0; at < m.total;) {
    const std::ptrdiff_t n = end.Pull(m, at, got.data() + at, m.total - at, false);
    CHECK(n > 0, "%zu of %zu bytes came", at, m.total);
    if (n <= 0) break;
    at += static_cast<std::size_t>(n);
  }
  return got;
}

// What a call throws, as it were; kNone where it does not.
template <class Fn>
FaultKind KindOf(Fn&& call) {
  try {
    call();
  } catch (const Fault& fault) {
    return fault.kind;
  }
  return FaultKind::kNone;
}

}  // namespace hetcoll::testing
