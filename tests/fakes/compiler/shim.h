// What NVRTC and hipRTC have built in, for kernels that g++ compiles: it comes before the source. The threads of a
// block are fibers of the stand-in runtime, which this reaches through a table of functions (runtime/hooks.h).
#pragma once

#include "hooks.h"

#define HETCOLL_STANDIN 1
#ifdef STANDIN_SCAN
#define __global__ STANDIN_KERNEL_HERE
#else
#define __global__ __attribute__((noinline))
#endif
#define __device__
#define __host__
#define __constant__ static
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __shared__ static thread_local  // a block runs on one thread of the host

// Of the runtime, not of the kernel: its accesses are not checked.
#define STANDIN_OWN __attribute__((no_sanitize("kernel-address"), noinline, visibility("hidden")))

extern const standin::Hooks* standin_hooks __attribute__((visibility("hidden")));

#define STANDIN_VECTOR(type, name, alignment)                      \
  struct alignas(2 * sizeof(type)) name##2 { type x, y; };         \
  struct alignas(alignment) name##4 { type x, y, z, w; };          \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; } \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
STANDIN_VECTOR(signed char, char, 4)
STANDIN_VECTOR(unsigned char, uchar, 4)
STANDIN_VECTOR(short, short, 8)
STANDIN_VECTOR(unsigned short, ushort, 8)
STANDIN_VECTOR(int, int, 16)
STANDIN_VECTOR(unsigned, uint, 16)
STANDIN_VECTOR(float, float, 16)
STANDIN_VECTOR(long long, longlong, 16)
STANDIN_VECTOR(unsigned long long, ulonglong, 16)
STANDIN_VECTOR(double, double, 16)
#undef STANDIN_VECTOR
struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

STANDIN_OWN inline uint3 standin_index(const unsigned (standin::ThreadView::*array)[3]) {
  const unsigned* a = standin_hooks->view()->*array;
  return {a[0], a[1], a[2]};
}
STANDIN_OWN inline int standin_warp() { return static_cast<int>(standin_hooks->view()->warp_size); }
#define threadIdx standin_index(&standin::ThreadView::thread)
#define blockIdx standin_index(&standin::ThreadView::block)
#define blockDim standin_index(&standin::ThreadView::block_dim)
#define gridDim standin_index(&standin::ThreadView::grid_dim)
#define warpSize standin_warp()

STANDIN_OWN inline unsigned standin_barrier(unsigned predicate) { return standin_hooks->barrier(predicate); }
inline unsigned standin_threads() { return blockDim.x * blockDim.y * blockDim.z; }
inline void __syncthreads() { standin_barrier(0); }
inline int __syncthreads_count(int predicate) { return static_cast<int>(standin_barrier(predicate != 0)); }
inline int __syncthreads_or(int predicate) { return standin_barrier(predicate != 0) != 0; }
inline int __syncthreads_and(int predicate) { return standin_barrier(predicate == 0) == 0; }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
STANDIN_OWN inline void __nanosleep(unsigned) { standin_hooks->yield(); }
STANDIN_OWN inline void __trap() { standin_hooks->trap(); }
inline long long clock64() { return static_cast<long long>(__builtin_ia32_rdtsc()); }
inline long long wall_clock64() { return clock64(); }

// Warps: lanes exchange a word each between two barriers of the lanes in the mask.
inline unsigned standin_lane() {
  return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % static_cast<unsigned>(warpSize);
}
STANDIN_OWN inline void standin_warp_barrier(unsigned long long mask) { standin_hooks->warp_barrier(mask); }
STANDIN_OWN inline void standin_put(unsigned lane, unsigned long long word) {
  standin_hooks->warp_slots()[lane] = word;
}
STANDIN_OWN inline unsigned long long standin_get(unsigned lane) { return standin_hooks->warp_slots()[lane]; }
inline void __syncwarp(unsigned long long mask = ~0ull) { standin_warp_barrier(mask); }
template <class T>
T standin_exchange(unsigned long long mask, T value, unsigned lane) {
  static_assert(sizeof(T) <= 8);
  unsigned long long word = 0;
  __builtin_memcpy(&word, &value, sizeof value);
  standin_put(standin_lane(), word);
  standin_warp_barrier(mask);
  word = standin_get(lane);
  standin_warp_barrier(mask);
  __builtin_memcpy(&value, &word, sizeof value);
  return value;
}
template <class T>
T __shfl_sync(unsigned long long mask, T value, int lane, int width = warpSize) {
  unsigned first = standin_lane() / width * width;
  return standin_exchange(mask, value, first + static_cast<unsigned>(lane) % width);
}
template <class T>
T __shfl_down_sync(unsigned long long mask, T value, unsigned delta, int width = warpSize) {
  unsigned lane = standin_lane(), target = lane + delta;
  return standin_exchange(mask, value, target / width == lane / width ? target : lane);
}
template <class T>
T __shfl_up_sync(unsigned long long mask, T value, unsigned delta, int width = warpSize) {
  unsigned lane = standin_lane();
  return standin_exchange(mask, value, lane % width >= delta ? lane - delta : lane);
}
template <class T>
T __shfl_xor_sync(unsigned long long mask, T value, int flip, int width = warpSize) {
  unsigned lane = standin_lane(), target = lane ^ static_cast<unsigned>(flip);
  return standin_exchange(mask, value, target / width == lane / width ? target : lane);
}
inline unsigned long long __ballot_sync(unsigned long long mask, int predicate) {
  standin_put(standin_lane(), predicate != 0);
  standin_warp_barrier(mask);
  unsigned long long votes = 0;
  for (int lane = 0; lane < warpSize; ++lane) {
    if (mask >> lane & 1) votes |= standin_get(static_cast<unsigned>(lane)) << lane;
  }
  standin_warp_barrier(mask);
  return votes;
}
inline int __any_sync(unsigned long long mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned long long mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

#define STANDIN_ATOMIC(name, operation)            \
  template <class T>                               \
  T atomic##name(T* at, T value) {                 \
    return operation(at, value, __ATOMIC_SEQ_CST); \
  }                                                \
  template <class T>                               \
  T atomic##name##_system(T* at, T value) {        \
    return operation(at, value, __ATOMIC_SEQ_CST); \
  }                                                \
  template <class T>                               \
  T atomic##name##_block(T* at, T value) {         \
    return operation(at, value, __ATOMIC_SEQ_CST); \
  }
STANDIN_ATOMIC(Add, __atomic_fetch_add)
STANDIN_ATOMIC(Sub, __atomic_fetch_sub)
STANDIN_ATOMIC(And, __atomic_fetch_and)
STANDIN_ATOMIC(Or, __atomic_fetch_or)
STANDIN_ATOMIC(Xor, __atomic_fetch_xor)
STANDIN_ATOMIC(Exch, __atomic_exchange_n)
#undef STANDIN_ATOMIC
template <class T>
T atomicCAS(T* at, T expected, T value) {
  __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}
template <class T>
T atomicCAS_system(T* at, T expected, T value) {
  return atomicCAS(at, expected, value);
}
template <class T>
T atomicMax(T* at, T value) {
  T seen = *at;
  while (seen < value) {
    T before = atomicCAS(at, seen, value);
    if (before == seen) break;
    seen = before;
  }
  return seen;
}
template <class T>
T atomicMin(T* at, T value) {
  T seen = *at;
  while (value < seen) {
    T before = atomicCAS(at, seen, value);
    if (before == seen) break;
    seen = before;
  }
  return seen;
}
inline unsigned atomicInc(unsigned* at, unsigned limit) {
  unsigned seen = *at;
  for (;;) {
    unsigned before = atomicCAS(at, seen, seen >= limit ? 0 : seen + 1);
    if (before == seen) return seen;
    seen = before;
  }
}

#define STANDIN_BITS(name, from, to)              \
  inline to name(from value) {                    \
    static_assert(sizeof(from) == sizeof(to));    \
    to bits;                                      \
    __builtin_memcpy(&bits, &value, sizeof bits); \
    return bits;                                  \
  }
STANDIN_BITS(__float_as_uint, float, unsigned)
STANDIN_BITS(__float_as_int, float, int)
STANDIN_BITS(__uint_as_float, unsigned, float)
STANDIN_BITS(__int_as_float, int, float)
STANDIN_BITS(__double_as_longlong, double, long long)
STANDIN_BITS(__longlong_as_double, long long, double)
#undef STANDIN_BITS
template <class T>
T __ldg(const T* at) {
  return *at;
}
inline int __clz(int value) { return value ? __builtin_clz(static_cast<unsigned>(value)) : 32; }
inline int __clzll(long long v) { return v ? __builtin_clzll(static_cast<unsigned long long>(v)) : 64; }
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }

#define STANDIN_EXTREMES(type)                              \
  inline type min(type a, type b) { return b < a ? b : a; } \
  inline type max(type a, type b) { return a < b ? b : a; }
STANDIN_EXTREMES(int)
STANDIN_EXTREMES(unsigned)
STANDIN_EXTREMES(long)
STANDIN_EXTREMES(unsigned long)
STANDIN_EXTREMES(long long)
STANDIN_EXTREMES(unsigned long long)
#undef STANDIN_EXTREMES
inline float min(float a, float b) { return __builtin_fminf(a, b); }
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
inline double min(double a, double b) { return __builtin_fmin(a, b); }
inline double max(double a, double b) { return __builtin_fmax(a, b); }
#define STANDIN_MATH(name)                                         \
  inline float name##f(float a) { return __builtin_##name##f(a); } \
  inline double name(double a) { return __builtin_##name(a); }
STANDIN_MATH(fabs)
STANDIN_MATH(floor)
STANDIN_MATH(ceil)
STANDIN_MATH(trunc)
STANDIN_MATH(rint)
STANDIN_MATH(sqrt)
#undef STANDIN_MATH
inline float fminf(float a, float b) { return __builtin_fminf(a, b); }
inline float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
inline double fmin(double a, double b) { return __builtin_fmin(a, b); }
inline double fmax(double a, double b) { return __builtin_fmax(a, b); }
inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline bool isnan(float a) { return __builtin_isnan(a); }
inline bool isnan(double a) { return __builtin_isnan(a); }
inline bool isinf(float a) { return __builtin_isinf(a); }
inline bool isinf(double a) { return __builtin_isinf(a); }
