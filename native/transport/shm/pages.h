// What kind of memory this process's is: what the kernel must look up page by page is read more slowly by others, and
// what belongs to devices not at all.
#pragma once

#include <array>
#include <cstddef>
#include <utility>

namespace hetcoll {

inline constexpr std::size_t kPage = 4096;

class OwnPages {
 public:
  OwnPages();
  ~OwnPages();
  OwnPages(const OwnPages&) = delete;
  OwnPages& operator=(const OwnPages&) = delete;

  // Whether at least half of [at, at + n) is; false where that cannot be found out, as before Linux 6.7. It takes about
  // a nanosecond for each page that is not huge.
  bool MostlyHuge(const void* at, std::size_t n) const;

  // Whether other processes that may can read [at, at + n): not where it is mapped from a device, or made by
  // memfd_secret(2). Both ends of it are tried; what was found good lately is not tried again.
  bool Readable(const void* at, std::size_t n);

 private:
  int fd_;
  std::array<std::pair<const void*, std::size_t>, 8> good_{};
  std::size_t next_ = 0;
};

}  // namespace hetcoll
