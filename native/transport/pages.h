// Whether this process's memory is mapped by huge pages: what the kernel must look up page by page is read more slowly.
#pragma once

#include <cstddef>

namespace hetcoll {

class OwnPages {
 public:
  OwnPages();
  ~OwnPages();
  OwnPages(const OwnPages&) = delete;
  OwnPages& operator=(const OwnPages&) = delete;

  // Whether at least half of [at, at + n) is; false where that cannot be found out, as before Linux 6.7. It takes about
  // a nanosecond for each page that is not huge.
  bool MostlyHuge(const void* at, std::size_t n) const;

 private:
  int fd_;
};

}  // namespace hetcoll
