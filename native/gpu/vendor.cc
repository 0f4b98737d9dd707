#include "gpu/vendor.h"

#include <string>

#include "transport/transport.h"

namespace hetcoll {
VendorCollectives::VendorCollectives(const DriverFunctions& functions, std::uintptr_t handle)
    : comm_(reinterpret_cast<void*>(handle)) {
  const auto take = [&](const char* name, auto& pointer) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(Find(functions, name));
  };
  take("ncclAllReduce", all_reduce_);
  take("ncclReduceScatter", reduce_scatter_);
  take("ncclAllGather", all_gather_);
  take("ncclBroadcast", broadcast_);
  take("ncclReduce", reduce_);
  take("ncclSend", send_);
  take("ncclRecv", recv_);
  take("ncclGroupStart", group_start_);
  take("ncclGroupEnd", group_end_);
  take("ncclGetErrorString", error_);
  take("ncclGetLastError", last_error_);
}

void VendorCollectives::Check(int code, const char* function) const {
  if (code == 0) return;
  const char* detail = last_error_(comm_);
  std::string text = std::string(function) + ": " + error_(code);
  if (detail != nullptr && *detail != '\0') text += std::string(" (") + detail + ")";
  throw Fault(FaultKind::kSystem, -1, text);
}

void VendorCollectives::AllReduce(const void* send, void* recv, std::size_t count, int dtype, int op,
                                  DeviceStream stream) {
  Check(all_reduce_(send, recv, count, dtype, op, comm_, stream), "ncclAllReduce");
}

void VendorCollectives::ReduceScatter(const void* send, void* recv, std::size_t recv_count, int dtype, int op,
                                      DeviceStream stream) {
  Check(reduce_scatter_(send, recv, recv_count, dtype, op, comm_, stream), "ncclReduceScatter");
}

void VendorCollectives::AllGather(const void* send, void* recv, std::size_t send_count, int dtype,
                                  DeviceStream stream) {
  Check(all_gather_(send, recv, send_count, dtype, comm_, stream), "ncclAllGather");
}

void VendorCollectives::Broadcast(const void* send, void* recv, std::size_t count, int dtype, int root,
                                  DeviceStream stream) {
  Check(broadcast_(send, recv, count, dtype, root, comm_, stream), "ncclBroadcast");
}

void VendorCollectives::Reduce(const void* send, void* recv, std::size_t count, int dtype, int op, int root,
                               DeviceStream stream) {
  Check(reduce_(send, recv, count, dtype, op, root, comm_, stream), "ncclReduce");
}

void VendorCollectives::Send(const void* send, std::size_t count, int dtype, int peer, DeviceStream stream) {
  Check(send_(send, count, dtype, peer, comm_, stream), "ncclSend");
}

void VendorCollectives::Recv(void* recv, std::size_t count, int dtype, int peer, DeviceStream stream) {
  Check(recv_(recv, count, dtype, peer, comm_, stream), "ncclRecv");
}

}  // namespace hetcoll
