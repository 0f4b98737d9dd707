// libamdhip64: initialisation, devices, errors.
#include <dlfcn.h>
#include <strings.h>

#include <cstdlib>
#include <cstring>

#include "access.h"
#include "hip.h"
#include "memory.h"
#include "operations.h"
#include "properties.h"

namespace fake::hip {
namespace {

thread_local int device_ordinal = 0;

}  // namespace

Error begin(const char* function) {
  if (Error error = enter(function)) return error;
  static const bool any = [] {  // HIP initialises itself at the first call
    if (!devices().empty()) start_host_thread();
    return !devices().empty();
  }();
  return any ? kOk : kNoDevice;
}

Error current_device(Device** device) {
  *device = device_at(device_ordinal);
  return static_cast<Error>((*device)->fault.load());
}

Error stream_argument(hipStream_t handle, Stream** stream) {
  *stream = stream_of(*device_at(device_ordinal), handle);
  if (!*stream) return kInvalidHandle;
  return static_cast<Error>((*stream)->device->fault.load());
}

namespace {

// By the numbers of hipDeviceAttribute_t; 0 for whatever is not here, which the runtime would have.
int attribute(const Device& device, int which) {
  switch (which) {
    case 2:  // AsyncEngineCount
      return 2;
    case 3:      // CanMapHostMemory
    case 4:      // CanUseHostPointerForRegisteredMem
    case 8:      // ConcurrentKernels
    case 24:     // ManagedMemory
    case 78:     // StreamPrioritiesSupported
    case 85:     // UnifiedAddressing
    case 88:     // MemoryPoolsSupported
    case 90:     // HostRegisterSupported
    case 10016:  // FineGrainSupport
      return 1;
    case 10011:  // IsLargeBar
      return settings().large_bar;
    case 5:
      return 2100000;
    case 19:  // L2CacheSize
      return 4 << 20;
    case 23:  // ComputeCapabilityMajor: gfx942 is 9.4
      return settings().arch[3] - '0';
    case 61:
      return settings().arch[4] - '0';
    case 25:
      return 16;
    case 26:  // MaxBlockDimX, Y, Z
    case 27:
    case 28:
    case 56:  // MaxThreadsPerBlock
      return 1024;
    case 29:
      return 2147483647;
    case 30:
    case 31:
      return 65535;
    case 57:
      return 2048;
    case 63:  // MultiprocessorCount
    case 10015:
      return 4;
    case 67:  // PciBusId
      return static_cast<int>(kVendor.bus) + device.physical;
    case 74:
    case 75:
      return 49152;
    case 87:  // WarpSize
      return static_cast<int>(kVendor.warp);
    case 93:  // DmaBufSupported
      return settings().dmabuf;
    case 10013:  // CanUseStreamWaitValue
      return settings().stream_waits;
    default:
      return 0;
  }
}

}  // namespace
}  // namespace fake::hip

using namespace fake;
using namespace fake::hip;

extern "C" __attribute__((visibility("default"))) const DriverAccess* fake_driver() {
  static const DriverAccess access = driver_access(current_device);
  return &access;
}

FAKE_API hipInit(unsigned flags) {
  BEGIN();
  return flags == 0 ? kOk : kInvalidValue;
}

FAKE_API hipDriverGetVersion(int* version) {
  if (Error error = enter(__func__)) return error;
  *version = 70000000;  // 7.0.0
  return kOk;
}

FAKE_API hipRuntimeGetVersion(int* version) { return hipDriverGetVersion(version); }

FAKE_API hipGetProcAddress(const char* name, void** function, int, std::uint64_t, int* status) {
  static void* const self = [] {
    Dl_info info;
    dladdr(reinterpret_cast<const void*>(&begin), &info);
    return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }();
  *function = std::strncmp(name, "hip", 3) == 0 ? dlsym(self, name) : nullptr;
  if (status) *status = *function ? 0 : 1;
  return *function ? kOk : kNotFound;
}

FAKE_API hipGetDeviceCount(int* count) {
  *count = 0;
  BEGIN();
  *count = static_cast<int>(devices().size());
  return kOk;
}

FAKE_API hipSetDevice(int ordinal) {
  BEGIN();
  if (!device_at(ordinal)) return kInvalidDevice;
  device_ordinal = ordinal;
  return kOk;
}

FAKE_API hipGetDevice(int* ordinal) {
  BEGIN();
  *ordinal = device_ordinal;
  return kOk;
}

FAKE_API hipDeviceGet(int* device, int ordinal) {
  BEGIN();
  *device = ordinal;
  return device_at(ordinal) ? kOk : kInvalidDevice;
}

FAKE_API hipDeviceReset() {
  BEGIN();
  Device* device = device_at(device_ordinal);
  synchronize_device(*device);
  device->fault = kOk;
  return kOk;
}

FAKE_API hipDeviceSynchronize() {
  BEGIN();
  DEVICE(device);
  return synchronize_device(*device);
}

FAKE_API hipDeviceGetName(char* name, int length, int ordinal) {
  BEGIN();
  if (!device_at(ordinal) || length < 1) return kInvalidDevice;
  std::strncpy(name, kVendor.device_name, static_cast<std::size_t>(length));
  name[length - 1] = 0;
  return kOk;
}

FAKE_API hipDeviceGetUuid(char* uuid, int ordinal) {
  BEGIN();
  Device* device = device_at(ordinal);
  if (!device) return kInvalidDevice;
  device->uuid(uuid);
  return kOk;
}

FAKE_API hipDeviceTotalMem(std::size_t* nbytes, int ordinal) {
  BEGIN();
  if (!device_at(ordinal)) return kInvalidDevice;
  *nbytes = settings().memory;
  return kOk;
}

FAKE_API hipDeviceGetPCIBusId(char* text, int length, int ordinal) {
  BEGIN();
  Device* device = device_at(ordinal);
  if (!device) return kInvalidDevice;
  std::string id = device->bus_id();
  if (static_cast<std::size_t>(length) <= id.size()) return kInvalidValue;
  std::memcpy(text, id.c_str(), id.size() + 1);
  return kOk;
}

FAKE_API hipDeviceGetByPCIBusId(int* ordinal, const char* text) {
  BEGIN();
  for (auto& device : devices()) {
    if (strcasecmp(device->bus_id().c_str(), text) != 0) continue;
    *ordinal = device->ordinal;
    return kOk;
  }
  return kInvalidValue;
}

FAKE_API hipDeviceGetAttribute(int* value, int which, int ordinal) {
  BEGIN();
  Device* device = device_at(ordinal);
  if (!device) return kInvalidDevice;
  *value = attribute(*device, which);
  return kOk;
}

FAKE_API hipGetDevicePropertiesR0600(Properties* properties, int ordinal) {
  BEGIN();
  Device* device = device_at(ordinal);
  if (!device) return kInvalidDevice;
  *properties = {};
  Properties& p = *properties;
  std::strncpy(p.name, kVendor.device_name, sizeof p.name - 1);
  device->uuid(p.uuid);
  std::strncpy(p.arch, settings().arch.c_str(), sizeof p.arch - 1);
  p.total_memory = settings().memory;
  p.shared_per_block = 49152;
  p.warp_size = attribute(*device, 87);
  p.threads_per_block = 1024;
  p.threads_per_multiprocessor = 2048;
  for (int& size : p.block) size = 1024;
  p.grid[0] = 2147483647;
  p.grid[1] = p.grid[2] = 65535;
  p.major = attribute(*device, 23);
  p.minor = attribute(*device, 61);
  p.multiprocessors = attribute(*device, 63);
  p.bus = attribute(*device, 67);
  p.l2 = attribute(*device, 19);
  p.maps_host_memory = p.concurrent_kernels = p.unified = p.managed = p.host_pointers = 1;
  p.large_bar = settings().large_bar;
  p.registers_host = p.ipc_events = 1;
  return kOk;
}

FAKE_API hipDeviceCanAccessPeer(int* can, int ordinal, int peer) {
  BEGIN();
  if (!device_at(ordinal) || !device_at(peer)) return kInvalidDevice;
  *can = settings().peer && ordinal != peer;
  return kOk;
}

FAKE_API hipDeviceGetP2PAttribute(int* value, int which, int source, int destination) {
  BEGIN();
  if (!device_at(source) || !device_at(destination) || source == destination) return kInvalidDevice;
  *value = which == 0 ? 0 : settings().peer;
  return kOk;
}

FAKE_API hipDeviceEnablePeerAccess(int peer, unsigned flags) {
  BEGIN();
  DEVICE(device);
  if (flags != 0) return kInvalidValue;
  if (!device_at(peer)) return kInvalidDevice;
  if (!settings().peer || peer == device->ordinal) return kPeerUnsupported;
  std::uint64_t bit = 1ull << peer;
  return device->peers.fetch_or(bit) & bit ? kPeerAlreadyEnabled : kOk;
}

FAKE_API hipDeviceDisablePeerAccess(int peer) {
  BEGIN();
  DEVICE(device);
  if (!device_at(peer)) return kInvalidDevice;
  std::uint64_t bit = 1ull << peer;
  return device->peers.fetch_and(~bit) & bit ? kOk : kPeerNotEnabled;
}

FAKE_API hipDeviceGetStreamPriorityRange(int* least, int* greatest) {
  BEGIN();
  if (least) *least = 1;
  if (greatest) *greatest = -1;
  return kOk;
}
