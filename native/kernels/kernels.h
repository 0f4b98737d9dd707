// Element-wise kernels on host memory: what every reduction and copy in the engine comes down to.
//
// One source (kernels.inc.h) is compiled once per instruction set and chosen at run time by what the processor has.
// All of them give the same bits: no contraction, and 16- and 8-bit floats are computed in float32 and rounded once,
// to nearest even, on store. Max and min of floats propagate NaN and put -0 below +0, so that they give the same bits
// whatever the order of the operands.
#pragma once

#include <cstddef>

#include "base/types.h"

namespace hetcoll {

// How a kernel goes through memory.
enum class Sweep : unsigned char {
  kPlain,
  // Stores to dst bypass the cache: for destinations larger than it that are not read soon.
  kAround,
  // Four pages by turns: for what another core's cache holds. A processor reads ahead within each page that it is in,
  // but not far enough to make up for the way from there in one alone.
  kPages,
};

// dst[i] = a[i] (+) b[i] for i < count elements. dst may be the same pointer as a or b (or neither), never a shifted
// overlap.
using ReduceFn = void (*)(void* dst, const void* a, const void* b, std::size_t count, Sweep sweep);

// The same, and dst2[i] gets the same value: a reduction whose result also goes to a transport's slot. dst2 may be b,
// or overlaps nothing; it is always stored through the cache.
using Reduce2Fn = void (*)(void* dst, void* dst2, const void* a, const void* b, std::size_t count, Sweep sweep);

// x[i] = x[i] / divisor, in place: AVG's second half. Integers truncate toward zero; complex numbers by parts. The
// divisor is at least 1.
using ScaleFn = void (*)(void* x, std::size_t count, unsigned divisor);

struct Kernels {
  ReduceFn reduce;
  Reduce2Fn reduce2;
  ScaleFn scale;
};

// The kernels for one type and operation (kAvg reduces as kSum), or null where the pair is undefined (types.py:
// supports). Unaligned pointers are allowed. `one_nan`: whatever NaN comes out, it is the quiet one of sign 0 without a
// payload. Otherwise sums and products may give any, by the order of the operands and the processor: looking for NaNs
// takes a seventh more instructions where the sums of an all-reduce of 1 MiB are most of its work.
const Kernels* FindKernels(DType dtype, ReduceOp op, bool one_nan = false);

// dst[i] = src[i] as 8-bit float of kind `to`: of the same format in OCP's kind and AMD's older one (fnuz), by value
// (devices/kernels/convert.h). `to` = `from`, OCP's: to what both kinds hold. dst may be src. False: no such pair.
bool ConvertFloat8(void* dst, const void* src, std::size_t count, DType from, DType to);

// memcpy. Regions do not overlap.
void CopyBytes(void* dst, const void* src, std::size_t nbytes, Sweep sweep = Sweep::kPlain);

// The same, but src, which begins at a cache line, is spent: a word is written into each of its lines. Why that makes
// sense: StorePolicy in transport/shm/shm.h. `stream` is Sweep::kAround.
void TakeBytes(void* dst, void* src, std::size_t nbytes, bool stream);

// Copies by the processor's own instruction for it. Its stores need not become visible in order, so more of them are
// under way where the lines lie in another core's cache. FastStrings says whether this is a fast one.
bool FastStrings();
void CopyString(void* dst, const void* src, std::size_t nbytes);

// The instruction set chosen at start: "avx512", "avx2" or "baseline" (HETCOLL_ISA can only lower it; Python passes
// it). What FindKernels gave before stays as it was.
const char* KernelIsa();
bool SetKernelIsa(const char* name);  // false when the processor lacks it or the name is unknown

}  // namespace hetcoll
