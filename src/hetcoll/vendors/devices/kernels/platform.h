// What differs between the compilers of this source: NVRTC (CUDA), hipRTC or Clang (HIP), and any C++ compiler. For the
// last, a shim takes a GPU's part: it runs the threads of a launch one after another, block after block. A compiler
// that defines HETCOLL_FAKE has CUDA's words for blocks and threads, and GCC's atomics.
//
// Nothing here depends on the width of a wavefront, and no header of a vendor is needed.
#pragma once

#include "devices/kernels/integers.h"

namespace hetcoll {
using U64 = unsigned long long;
constexpr unsigned kMaxThreads = 512;  // in a block
}  // namespace hetcoll

// ---- Functions, memory ----

#if defined(__CUDACC__)

#define HETCOLL_DEVICE [[maybe_unused]] static __device__ inline
#define HETCOLL_MEMCPY memcpy
#define HETCOLL_UNROLL _Pragma("unroll")

namespace hetcoll {
// PTX: ld.volatile and st.volatile are relaxed accesses of system scope.
template <class T>
HETCOLL_DEVICE T LoadRelaxed(const T* from) {
  return *static_cast<const volatile T*>(from);
}
template <class T>
HETCOLL_DEVICE void StoreRelaxed(T* to, T value) {
  *static_cast<volatile T*>(to) = value;
}
HETCOLL_DEVICE U64 LoadAcquire(const U64* from) {
  U64 value;
  asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}
HETCOLL_DEVICE void StoreRelease(U64* to, U64 value) {
  asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
// After all that the block has stored before its last barrier.
HETCOLL_DEVICE void PublishRelease(U64* to, U64 value) {
  __threadfence_system();
  StoreRelease(to, value);
}
HETCOLL_DEVICE void LoadRelaxedPair(const void* from, U64* pair) {
  asm volatile("ld.volatile.v2.u64 {%0, %1}, [%2];" : "=l"(pair[0]), "=l"(pair[1]) : "l"(from) : "memory");
}
HETCOLL_DEVICE void StoreRelaxedPair(void* to, U64 first, U64 second) {
  asm volatile("st.volatile.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(first), "l"(second) : "memory");
}
HETCOLL_DEVICE unsigned FetchAdd(unsigned* at, unsigned more) { return atomicAdd(at, more); }
HETCOLL_DEVICE void Fence() { __threadfence(); }  // of this device
HETCOLL_DEVICE void SystemFence() { __threadfence_system(); }
}  // namespace hetcoll

#else

#if defined(__HIP__)
#define HETCOLL_DEVICE [[maybe_unused]] static __attribute__((device)) inline
#define HETCOLL_UNROLL _Pragma("unroll")
#else
#define HETCOLL_DEVICE [[maybe_unused]] static inline
#define HETCOLL_UNROLL
#endif
#define HETCOLL_MEMCPY __builtin_memcpy

namespace hetcoll {
// Of system scope, on AMD's GPUs too.
template <class T>
HETCOLL_DEVICE T LoadRelaxed(const T* from) {
  return __atomic_load_n(from, __ATOMIC_RELAXED);
}
template <class T>
HETCOLL_DEVICE void StoreRelaxed(T* to, T value) {
  __atomic_store_n(to, value, __ATOMIC_RELAXED);
}
HETCOLL_DEVICE U64 LoadAcquire(const U64* from) { return __atomic_load_n(from, __ATOMIC_ACQUIRE); }
HETCOLL_DEVICE void StoreRelease(U64* to, U64 value) { __atomic_store_n(to, value, __ATOMIC_RELEASE); }
// After all that the block has stored before its last barrier: fences are cumulative.
HETCOLL_DEVICE void PublishRelease(U64* to, U64 value) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  StoreRelease(to, value);
}
HETCOLL_DEVICE void LoadRelaxedPair(const void* from, U64* pair) {
  pair[0] = LoadRelaxed(static_cast<const U64*>(from));
  pair[1] = LoadRelaxed(static_cast<const U64*>(from) + 1);
}
HETCOLL_DEVICE void StoreRelaxedPair(void* to, U64 first, U64 second) {
  StoreRelaxed(static_cast<U64*>(to), first);
  StoreRelaxed(static_cast<U64*>(to) + 1, second);
}
HETCOLL_DEVICE unsigned FetchAdd(unsigned* at, unsigned more) { return __atomic_fetch_add(at, more, __ATOMIC_RELAXED); }
HETCOLL_DEVICE void Fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
HETCOLL_DEVICE void SystemFence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
}  // namespace hetcoll

#endif

// ---- Kernels, blocks and threads ----

#if defined(__CUDACC__) || defined(HETCOLL_FAKE)

#define HETCOLL_KERNEL extern "C" __global__ void __launch_bounds__(hetcoll::kMaxThreads)
#define HETCOLL_ENTRY(name)
#define HETCOLL_SHARED __shared__

namespace hetcoll {
HETCOLL_DEVICE unsigned BlockSize() { return blockDim.x; }
HETCOLL_DEVICE unsigned BlockIndex() { return blockIdx.x; }
HETCOLL_DEVICE unsigned ThreadInBlock() { return threadIdx.x; }
HETCOLL_DEVICE U64 ThreadIndex() { return U64{blockIdx.x} * blockDim.x + threadIdx.x; }
HETCOLL_DEVICE U64 ThreadCount() { return U64{gridDim.x} * blockDim.x; }
HETCOLL_DEVICE bool LastInBlock() { return threadIdx.x == blockDim.x - 1; }
HETCOLL_DEVICE unsigned Blocks() { return gridDim.x; }
HETCOLL_DEVICE void Barrier() { __syncthreads(); }
}  // namespace hetcoll

#elif defined(__HIP__)

#define HETCOLL_KERNEL extern "C" __attribute__((global, amdgpu_flat_work_group_size(1, hetcoll::kMaxThreads))) void
#define HETCOLL_ENTRY(name)
#define HETCOLL_SHARED static __attribute__((shared))

namespace hetcoll {
HETCOLL_DEVICE unsigned BlockSize() { return __builtin_amdgcn_workgroup_size_x(); }
HETCOLL_DEVICE unsigned BlockIndex() { return __builtin_amdgcn_workgroup_id_x(); }
HETCOLL_DEVICE unsigned ThreadInBlock() { return __builtin_amdgcn_workitem_id_x(); }
HETCOLL_DEVICE U64 ThreadIndex() {
  return U64{__builtin_amdgcn_workgroup_id_x()} * BlockSize() + __builtin_amdgcn_workitem_id_x();
}
HETCOLL_DEVICE U64 ThreadCount() { return __builtin_amdgcn_grid_size_x(); }
HETCOLL_DEVICE bool LastInBlock() { return __builtin_amdgcn_workitem_id_x() == BlockSize() - 1; }
HETCOLL_DEVICE unsigned Blocks() { return __builtin_amdgcn_grid_size_x() / BlockSize(); }
HETCOLL_DEVICE void Barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
}  // namespace hetcoll

#else

#define HETCOLL_KERNEL static void
// A kernel's way in: void launch_NAME(const unsigned grid[3], const unsigned block[3], void** params), where params
// points to the arguments, as cuLaunchKernel's kernelParams does.
#define HETCOLL_ENTRY(name)                                                                       \
  extern "C" void launch_##name(const unsigned grid[3], const unsigned block[3], void** params) { \
    hetcoll::Launch(grid, block, params, name);                                                   \
  }

namespace hetcoll {
struct Geometry {
  unsigned blocks, threads, block, thread;  // the last two are this thread's own
};
inline thread_local Geometry geometry{};

#define HETCOLL_SHARED static thread_local
HETCOLL_DEVICE unsigned BlockSize() { return geometry.threads; }
HETCOLL_DEVICE unsigned BlockIndex() { return geometry.block; }
HETCOLL_DEVICE unsigned ThreadInBlock() { return geometry.thread; }

HETCOLL_DEVICE U64 ThreadIndex() { return U64{geometry.block} * geometry.threads + geometry.thread; }
HETCOLL_DEVICE U64 ThreadCount() { return U64{geometry.blocks} * geometry.threads; }
HETCOLL_DEVICE bool LastInBlock() { return geometry.thread == geometry.threads - 1; }
HETCOLL_DEVICE unsigned Blocks() { return geometry.blocks; }
// The threads before this one have ended. No thread waits for a later one of its own launch.
HETCOLL_DEVICE void Barrier() {}

template <int... kIndex>
struct Indices {};
template <int kCount, int... kIndex>
struct MakeIndices : MakeIndices<kCount - 1, kCount - 1, kIndex...> {};
template <int... kIndex>
struct MakeIndices<0, kIndex...> {
  using Type = Indices<kIndex...>;
};

template <class... Arguments, int... kIndex>
void Call(void (*kernel)(Arguments...), void** params, Indices<kIndex...>) {
  kernel(*static_cast<Arguments*>(params[kIndex])...);
}

template <class... Arguments>
void Launch(const unsigned* grid, const unsigned* block, void** params, void (*kernel)(Arguments...)) {
  for (unsigned i = 0; i < grid[0]; ++i) {
    for (unsigned j = 0; j < block[0]; ++j) {
      geometry = {grid[0], block[0], i, j};
      Call(kernel, params, typename MakeIndices<sizeof...(Arguments)>::Type());
    }
  }
}
}  // namespace hetcoll

#endif

// ---- Between two looks at a word that others write, and arguments that are structs ----

#if defined(__CUDACC__)

#define HETCOLL_CONSTANT const __grid_constant__

namespace hetcoll {
constexpr unsigned kAbortEvery = 1024;  // looks at a word of memory between two at the abort word
constexpr unsigned kAbortTurns = 32;    // of these, one of which is a thread's: waits.h
HETCOLL_DEVICE void Relax() {}
}  // namespace hetcoll

#else

#define HETCOLL_CONSTANT const

#if !defined(__HIP__) && !defined(HETCOLL_FAKE)
#include <time.h>
#endif

namespace hetcoll {
#if defined(__HIP__)
[[maybe_unused]] constexpr unsigned kAbortEvery = 1024;
[[maybe_unused]] constexpr unsigned kAbortTurns = 32;
HETCOLL_DEVICE void Relax() { __builtin_amdgcn_s_sleep(1); }
#elif defined(HETCOLL_FAKE)
constexpr unsigned kAbortEvery = 16;
constexpr unsigned kAbortTurns = 1;
HETCOLL_DEVICE void Relax() { __nanosleep(20); }
#else
constexpr unsigned kAbortEvery = 16;
constexpr unsigned kAbortTurns = 1;  // threads run one after another
// Ranks share processors here, perhaps with much else. Who yields runs again last of all; who slept runs next.
HETCOLL_DEVICE void Relax() {
  const timespec pause{0, 20'000};
  nanosleep(&pause, nullptr);
}
#endif
}  // namespace hetcoll

#endif
