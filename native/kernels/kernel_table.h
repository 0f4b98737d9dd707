// What each instruction set's translation unit offers to the dispatcher. It holds no code, so it may be shared.
#pragma once

#include <cstddef>

#include "kernels/codecs.h"
#include "kernels/kernels.h"

namespace hetcoll {

struct KernelTable {
  Kernels entry[kDTypes][kReduceOps];    // reduce is null where the pair is undefined
  Kernels one_nan[kDTypes][kReduceOps];  // the same where `entry` gives several NaNs, else null
  Codec codec[kDTypes][kFormats];        // round is null where there is none
  void (*copy)(char* dst, const char* src, std::size_t nbytes, Sweep sweep);
  void (*take)(char* dst, char* src, std::size_t nbytes, bool stream);
};

namespace baseline {
const KernelTable& Table();
}
#ifdef __x86_64__
namespace avx2 {
const KernelTable& Table();
}
namespace avx512 {
const KernelTable& Table();
}
#endif

}  // namespace hetcoll
