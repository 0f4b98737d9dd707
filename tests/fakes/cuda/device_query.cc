// libcuda: what devices there are and what they say of themselves.
#include <cstdlib>
#include <cstring>

#include "driver.h"
#include "memory.h"

using namespace fake;
using namespace fake::cuda;

namespace {

// By the numbers of CUdevice_attribute; 0 for whatever is not here, which the driver would have.
int attribute(const Device& device, int which) {
  int arch = std::atoi(settings().arch.c_str() + 3);  // "sm_90"
  switch (which) {
    case 1:  // MAX_THREADS_PER_BLOCK
    case 2:  // MAX_BLOCK_DIM_X
    case 3:
      return 1024;
    case 4:
      return 64;
    case 5:  // MAX_GRID_DIM_X
      return 2147483647;
    case 6:
    case 7:
      return 65535;
    case 8:   // MAX_SHARED_MEMORY_PER_BLOCK
    case 97:  // ..._OPTIN
      return 49152;
    case 9:
      return 65536;
    case 10:  // WARP_SIZE
      return 32;
    case 12:
    case 82:
      return 65536;
    case 13:
    case 36:
      return 1000000;
    case 16:  // MULTIPROCESSOR_COUNT
      return 4;
    case 37:
      return 512;
    case 38:
      return 1 << 20;
    case 33:  // PCI_BUS_ID
      return static_cast<int>(kVendor.bus) + device.physical;
    case 39:
      return 2048;
    case 40:  // ASYNC_ENGINE_COUNT
      return 2;
    case 75:
      return arch / 10;
    case 76:
      return arch % 10;
    case 81:
      return 102400;
    case 106:
      return 16;
    case 19:   // CAN_MAP_HOST_MEMORY
    case 31:   // CONCURRENT_KERNELS
    case 41:   // UNIFIED_ADDRESSING
    case 78:   // STREAM_PRIORITIES_SUPPORTED
    case 83:   // MANAGED_MEMORY
    case 89:   // CONCURRENT_MANAGED_ACCESS
    case 90:   // COMPUTE_PREEMPTION_SUPPORTED
    case 91:   // CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
    case 99:   // HOST_REGISTER_SUPPORTED
    case 115:  // MEMORY_POOLS_SUPPORTED
    case 116:  // GPU_DIRECT_RDMA_SUPPORTED
    case 125:  // IPC_EVENT_SUPPORTED
      return 1;
    case 117:  // GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS: by the host, and as a stream operation
      return 3;
    case 92:  // CAN_USE_STREAM_MEM_OPS_V1 and its kin
    case 93:
    case 94:
    case 98:  // CAN_FLUSH_REMOTE_WRITES
    case 122:
    case 123:
      return settings().stream_waits;
    case 124:  // DMA_BUF_SUPPORTED
      return settings().dmabuf;
    case 134:  // HOST_NUMA_ID
      return 0;
    default:
      return 0;
  }
}

}  // namespace

FAKE_API cuDeviceGetCount(int* count) {
  BEGIN();
  *count = static_cast<int>(devices().size());
  return kOk;
}

FAKE_API cuDeviceGet(CUdevice* device, int ordinal) {
  BEGIN();
  if (!device_at(ordinal)) return kInvalidDevice;
  *device = ordinal;
  return kOk;
}

FAKE_API cuDeviceGetName(char* name, int length, CUdevice ordinal) {
  BEGIN();
  if (!device_at(ordinal)) return kInvalidDevice;
  std::strncpy(name, kVendor.device_name, static_cast<std::size_t>(length));
  if (length > 0) name[length - 1] = 0;
  return kOk;
}

FAKE_API cuDeviceGetUuid_v2(char* uuid, CUdevice ordinal) {
  BEGIN();
  Device* device = device_at(ordinal);
  if (!device) return kInvalidDevice;
  device->uuid(uuid);
  return kOk;
}

FAKE_API cuDeviceGetPCIBusId(char* text, int length, CUdevice ordinal) {
  BEGIN();
  Device* device = device_at(ordinal);
  if (!device) return kInvalidDevice;
  std::string id = device->bus_id();
  if (static_cast<std::size_t>(length) <= id.size()) return kInvalidValue;
  std::memcpy(text, id.c_str(), id.size() + 1);
  return kOk;
}

FAKE_API cuDeviceGetByPCIBusId(CUdevice* ordinal, const char* text) {
  BEGIN();
  for (auto& device : devices()) {
    if (strcasecmp(device->bus_id().c_str(), text) != 0) continue;
    *ordinal = device->ordinal;
    return kOk;
  }
  return kInvalidDevice;
}

FAKE_API cuDeviceTotalMem_v2(std::size_t* nbytes, CUdevice ordinal) {
  BEGIN();
  if (!device_at(ordinal)) return kInvalidDevice;
  *nbytes = settings().memory;
  return kOk;
}

FAKE_API cuDeviceGetAttribute(int* value, int which, CUdevice ordinal) {
  BEGIN();
  Device* device = device_at(ordinal);
  if (!device) return kInvalidDevice;
  if (which < 1 || which > 200) return kInvalidValue;
  *value = attribute(*device, which);
  return kOk;
}

FAKE_API cuDeviceCanAccessPeer(int* can, CUdevice ordinal, CUdevice peer) {
  BEGIN();
  if (!device_at(ordinal) || !device_at(peer)) return kInvalidDevice;
  *can = settings().peer && ordinal != peer;
  return kOk;
}

FAKE_API cuDeviceGetP2PAttribute(int* value, int which, CUdevice source, CUdevice destination) {
  BEGIN();
  if (!device_at(source) || !device_at(destination) || source == destination) return kInvalidDevice;
  *value = which == 1 ? 0 : settings().peer;
  return kOk;
}
