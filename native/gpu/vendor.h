// The collectives of NCCL, which RCCL has under the same names (nccl.h, "Collective Communication Operations"): each is
// enqueued on a stream and runs among the ranks of one island. Opened and set up by src/hetcoll/vendors/ccl/.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/driver.h"

namespace hetcoll {

class VendorCollectives {
 public:
  // `handle` is the ncclComm_t. A Fault where a function is missing.
  VendorCollectives(const DriverFunctions& functions, std::uintptr_t handle);

  // Counts are elements; types and reductions are ncclDataType_t and ncclRedOp_t. Faults carry the library's error.
  void AllReduce(const void* send, void* recv, std::size_t count, int dtype, int op, DeviceStream stream);
  void ReduceScatter(const void* send, void* recv, std::size_t recv_count, int dtype, int op, DeviceStream stream);
  void AllGather(const void* send, void* recv, std::size_t send_count, int dtype, DeviceStream stream);
  void Broadcast(const void* send, void* recv, std::size_t count, int dtype, int root, DeviceStream stream);
  void Reduce(const void* send, void* recv, std::size_t count, int dtype, int op, int root, DeviceStream stream);
  void Send(const void* send, std::size_t count, int dtype, int peer, DeviceStream stream);
  void Recv(void* recv, std::size_t count, int dtype, int peer, DeviceStream stream);

  // What `calls` makes is one operation. Where one of them throws, the group ends all the same: an open one is the
  // thread's, and would hold up whatever communicator the thread calls next.
  template <class Calls>
  void Group(Calls&& calls) {
    Check(group_start_(), "ncclGroupStart");
    try {
      calls();
    } catch (...) {
      group_end_();
      throw;
    }
    Check(group_end_(), "ncclGroupEnd");
  }

 private:
  void Check(int code, const char* function) const;

  void* comm_;
  int (*all_reduce_)(const void*, void*, std::size_t, int, int, void*, void*);
  int (*reduce_scatter_)(const void*, void*, std::size_t, int, int, void*, void*);
  int (*all_gather_)(const void*, void*, std::size_t, int, void*, void*);
  int (*broadcast_)(const void*, void*, std::size_t, int, int, void*, void*);
  int (*reduce_)(const void*, void*, std::size_t, int, int, int, void*, void*);
  int (*send_)(const void*, std::size_t, int, int, void*, void*);
  int (*recv_)(void*, std::size_t, int, int, void*, void*);
  int (*group_start_)();
  int (*group_end_)();
  const char* (*error_)(int);
  const char* (*last_error_)(void*);
};

}  // namespace hetcoll
