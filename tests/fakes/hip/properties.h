// Structures of hip_runtime_api.h, by name where something is said.
#pragma once

#include <cstddef>

namespace fake::hip {

// hipDeviceProp_tR0600
struct Properties {
  char name[256];
  char uuid[16];
  char luid[8];
  unsigned luid_mask;
  std::size_t total_memory, shared_per_block;
  int registers, warp_size;
  std::size_t pitch;
  int threads_per_block, block[3], grid[3], clock;
  std::size_t constant;
  int major, minor;
  std::size_t alignment, pitch_alignment;
  int overlap, multiprocessors, timeout, integrated, maps_host_memory, mode;
  int textures[40];
  std::size_t surface_alignment;
  int concurrent_kernels, ecc, bus, device, domain, tcc, engines, unified, memory_clock, bus_width, l2, persisting;
  int threads_per_multiprocessor, priorities, l1, local_l1;
  std::size_t shared_per_multiprocessor;
  int registers_per_multiprocessor, managed, multi_board, board, native_atomics, ratio, pageable, concurrent_managed;
  int preemption, host_pointers, cooperative, cooperative_multi;
  std::size_t shared_optin;
  int page_tables, direct_managed, blocks_per_multiprocessor, window;
  std::size_t reserved_shared;
  int registers_host, sparse, read_only, timeline, pools, rdma;
  unsigned rdma_flush;
  int rdma_order;
  unsigned pool_handles;
  int deferred, ipc_events, clusters, function_pointers, reserved[63], hip_reserved[32];
  char arch[256];
  std::size_t shared_max;
  int instruction_clock;
  unsigned features;
  unsigned *memory_flush, *register_flush;
  int unmatched[4], large_bar, revision;
};
static_assert(offsetof(Properties, arch) == 1160 && sizeof(Properties) == 1472, "as hip_runtime_api.h has it");

struct PointerAttributes {  // hipPointerAttribute_t
  int type, device;
  void *device_pointer, *host_pointer;
  int managed;
  unsigned flags;
};

struct Handle {  // hipIpcMemHandle_t, hipIpcEventHandle_t: passed by value
  char bytes[64];
};

}  // namespace fake::hip
