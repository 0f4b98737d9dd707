// What NVRTC and hipRTC have built in, for kernels that g++ compiles: it comes before the source. The threads of a
// block are fibers of the fake runtime, which this reaches through a table of functions (runtime/hooks.h).
#pragma once

#include "hooks.h"

#define HETCOLL_FAKE 1
#ifdef FAKE_SCAN
#define __global__ FAKE_KERNEL_HERE
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
#define FAKE_OWN __attribute__((no_sanitize("kernel-address"), noinline, visibility("hidden")))

extern const fake::Hooks* fake_hooks __attribute__((visibility("hidden")));

#define FAKE_VECTOR(type, name, alignment)                      \
  struct alignas(2 * sizeof(type)) name##2 { type x, y; };         \
  struct alignas(alignment) name##4 { type x, y, z, w; };          \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; } \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
FAKE_VECTOR(signed char, char, 4)
FAKE_VECTOR(unsigned char, uchar, 4)
FAKE_VECTOR(short, short, 8)
FAKE_VECTOR(unsigned short, ushort, 8)
FAKE_VECTOR(int, int, 16)
FAKE_VECTOR(unsigned, uint, 16)
FAKE_VECTOR(float, float, 16)
FAKE_VECTOR(long long, longlong, 16)
FAKE_VECTOR(unsigned long long, ulonglong, 16)
FAKE_VECTOR(double, double, 16)
#undef FAKE_VECTOR
struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

FAKE_OWN inline uint3 fake_index(const unsigned (fake::ThreadView::*array)[3]) {
  const unsigned* a = fake_hooks->view()->*array;
  return {a[0], a[1], a[2]};
}
FAKE_OWN inline int fake_warp() { return static_cast<int>(fake_hooks->view()->warp_size); }
#define threadIdx fake_index(&fake::ThreadView::thread)
#define blockIdx fake_index(&fake::ThreadView::block)
#define blockDim fake_index(&fake::ThreadView::block_dim)
#define gridDim fake_index(&fake::ThreadView::grid_dim)
#define warpSize fake_warp()

FAKE_OWN inline unsigned fake_barrier(unsigned predicate) { return fake_hooks->barrier(predicate); }
inline unsigned fake_threads() { return blockDim.x * blockDim.y * blockDim.z; }
inline void __syncthreads() { fake_barrier(0); }
inline int __syncthreads_count(int predicate) { return static_cast<int>(fake_barrier(predicate != 0)); }
inline int __syncthreads_or(int predicate) { return fake_barrier(predicate != 0) != 0; }
inline int __syncthreads_and(int predicate) { return fake_barrier(predicate == 0) == 0; }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
FAKE_OWN inline void __nanosleep(unsigned) { fake_hooks->yield(); }
FAKE_OWN inline void __trap() { fake_hooks->trap(); }
inline long long clock64() { return static_cast<long long>(__builtin_ia32_rdtsc()); }
inline long long wall_clock64() { return clock64(); }

// Warps: lanes exchange a word each between two barriers of the lanes in the mask.
inline unsigned fake_lane() {
  return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % static_cast<unsigned>(warpSize);
}
FAKE_OWN inline void fake_warp_barrier(unsigned long long mask) { fake_hooks->warp_barrier(mask); }
FAKE_OWN inline void fake_put(unsigned lane, unsigned long long word) {
  fake_hooks->warp_slots()[lane] = word;
}
FAKE_OWN inline unsigned long long fake_get(unsigned lane) { return fake_hooks->warp_slots()[lane]; }
inline void __syncwarp(unsigned long long mask = ~0ull) { fake_warp_barrier(mask); }
template <class T>
T fake_exchange(unsigned long long mask, T value, unsigned lane) {
  static_assert(sizeof(T) <= 8);
  unsigned long long word = 0;
  __builtin_memcpy(&word, &value, sizeof value);
  fake_put(fake_lane(), word);
  fake_warp_barrier(mask);
  word = fake_get(lane);
  fake_warp_barrier(mask);
  __builtin_memcpy(&value, &word, sizeof value);
  return value;
}
template <class T>
T __shfl_sync(unsigned long long mask, T value, int lane, int width = warpSize) {
  unsigned first = fake_lane() / width * width;
  return fake_exchange(mask, value, first + static_cast<unsigned>(lane) % width);
}
template <class T>
T __shfl_down_sync(unsigned long long mask, T value, unsigned delta, int width = warpSize) {
  unsigned lane = fake_lane(), target = lane + delta;
  return fake_exchange(mask, value, target / width == lane / width ? target : lane);
}
template <class T>
T __shfl_up_sync(unsigned long long mask, T value, unsigned delta, int width = warpSize) {
  unsigned lane = fake_lane();
  return fake_exchange(mask, value, lane % width >= delta ? lane - delta : lane);
}
template <class T>
T __shfl_xor_sync(unsigned long long mask, T value, int flip, int width = warpSize) {
  unsigned lane = fake_lane(), target = lane ^ static_cast<unsigned>(flip);
  return fake_exchange(mask, value, target / width == lane / width ? target : lane);
}
inline unsigned long long __ballot_sync(unsigned long long mask, int predicate) {
  fake_put(fake_lane(), predicate != 0);
  fake_warp_barrier(mask);
  unsigned long long votes = 0;
  for (int lane = 0; lane < warpSize; ++lane) {
    if (mask >> lane & 1) votes |= fake_get(static_cast<unsigned>(lane)) << lane;
  }
  fake_warp_barrier(mask);
  return votes;
}
inline int __any_sync(unsigned long long mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned long long mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

#define FAKE_ATOMIC(name, operation)            \
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
FAKE_ATOMIC(Add, __atomic_fetch_add)
FAKE_ATOMIC(Sub, __atomic_fetch_sub)
FAKE_ATOMIC(And, __atomic_fetch_and)
FAKE_ATOMIC(Or, __atomic_fetch_or)
FAKE_ATOMIC(Xor, __atomic_fetch_xor)
FAKE_ATOMIC(Exch, __atomic_exchange_n)
#undef FAKE_ATOMIC
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

#define FAKE_BITS(name, from, to)              \
  inline to name(from value) {                    \
    static_assert(sizeof(from) == sizeof(to));    \
    to bits;                                      \
    __builtin_memcpy(&bits, &value, sizeof bits); \
    return bits;                                  \
  }
FAKE_BITS(__float_as_uint, float, unsigned)
FAKE_BITS(__float_as_int, float, int)
FAKE_BITS(__uint_as_float, unsigned, float)
FAKE_BITS(__int_as_float, int, float)
FAKE_BITS(__double_as_longlong, double, long long)
FAKE_BITS(__longlong_as_double, long long, double)
#undef FAKE_BITS
template <class T>
T __ldg(const T* at) {
  return *at;
}
inline int __clz(int value) { return value ? __builtin_clz(static_cast<unsigned>(value)) : 32; }
inline int __clzll(long long v) { return v ? __builtin_clzll(static_cast<unsigned long long>(v)) : 64; }
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }

#define FAKE_EXTREMES(type)                              \
  inline type min(type a, type b) { return b < a ? b : a; } \
  inline type max(type a, type b) { return a < b ? b : a; }
FAKE_EXTREMES(int)
FAKE_EXTREMES(unsigned)
FAKE_EXTREMES(long)
FAKE_EXTREMES(unsigned long)
FAKE_EXTREMES(long long)
FAKE_EXTREMES(unsigned long long)
#undef FAKE_EXTREMES
inline float min(float a, float b) { return __builtin_fminf(a, b); }
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
inline double min(double a, double b) { return __builtin_fmin(a, b); }
inline double max(double a, double b) { return __builtin_fmax(a, b); }
#define FAKE_MATH(name)                                         \
  inline float name##f(float a) { return __builtin_##name##f(a); } \
  inline double name(double a) { return __builtin_##name(a); }
FAKE_MATH(fabs)
FAKE_MATH(floor)
FAKE_MATH(ceil)
FAKE_MATH(trunc)
FAKE_MATH(rint)
FAKE_MATH(sqrt)
#undef FAKE_MATH
inline float fminf(float a, float b) { return __builtin_fminf(a, b); }
inline float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
inline double fmin(double a, double b) { return __builtin_fmin(a, b); }
inline double fmax(double a, double b) { return __builtin_fmax(a, b); }
inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline bool isnan(float a) { return __builtin_isnan(a); }
inline bool isnan(double a) { return __builtin_isnan(a); }
inline bool isinf(float a) { return __builtin_isinf(a); }
inline bool isinf(double a) { return __builtin_isinf(a); }
