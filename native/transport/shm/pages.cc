#include "transport/shm/pages.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <iterator>

namespace hetcoll {
namespace {

// As in linux/fs.h since 6.7.
struct ScanRegion {
  std::uint64_t start, end, categories;
};
struct ScanCall {
  std::uint64_t size, flags, start, end, walk_end, regions, region_count, most_pages;
  std::uint64_t inverted, wanted, any_of, returned;
};
static_assert(sizeof(ScanCall) == 96);
constexpr unsigned long kPagemapScan = _IOWR('f', 16, ScanCall);
constexpr std::uint64_t kIsHuge = 1 << 6;

}  // namespace

OwnPages::OwnPages() : fd_(open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC)) {}

OwnPages::~OwnPages() {
  if (fd_ >= 0) close(fd_);
}

bool OwnPages::MostlyHuge(const void* at, std::size_t n) const {
  ScanRegion regions[16];
  ScanCall call{};
  call.size = sizeof call;
  call.start = reinterpret_cast<std::uintptr_t>(at) / kPage * kPage;
  call.end = (reinterpret_cast<std::uintptr_t>(at) + n + kPage - 1) / kPage * kPage;
  call.regions = reinterpret_cast<std::uintptr_t>(regions);
  call.region_count = std::size(regions);
  call.wanted = call.returned = kIsHuge;
  const int found = fd_ < 0 ? -1 : ioctl(fd_, kPagemapScan, &call);
  std::uint64_t huge = 0;
  for (int i = 0; i < found; ++i) huge += regions[i].end - regions[i].start;
  return 2 * huge >= n && n > 0;
}

bool OwnPages::Readable(const void* at, std::size_t n) {
  const std::pair range{at, n};
  if (std::find(good_.begin(), good_.end(), range) != good_.end()) return true;
  std::byte ends[2];
  iovec here{ends, sizeof ends};
  auto* first = static_cast<std::byte*>(const_cast<void*>(at));  // as iovec wants it; it is only read
  const iovec there[] = {{first, 1}, {first + n - 1, 1}};
  if (process_vm_readv(getpid(), &here, 1, there, std::size(there), 0) != sizeof ends) return false;
  good_[next_++ % good_.size()] = range;
  return true;
}

}  // namespace hetcoll
