// libcuda: initialisation, devices, contexts, names of errors, and how callers find functions.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "access.h"
#include "driver.h"
#include "memory.h"
#include "operations.h"

namespace fake {

namespace cuda {
namespace {

std::atomic<bool> initialised{false};
thread_local std::vector<Context*> stack;

struct Contexts {
  std::mutex mutex;
  std::map<Device*, Context*> primaries;
  std::set<const void*> all;
};

Contexts& contexts() {
  static auto* const all = new Contexts;
  return *all;
}

Context* add(Device& device, bool primary) {
  auto context = std::make_unique<Context>();
  context->device = &device;
  context->primary = primary;
  contexts().all.insert(context.get());
  return context.release();
}

}  // namespace

Error begin(const char* function) {
  if (Error error = enter(function)) return error;
  return initialised ? kOk : kNotInitialized;
}

Context* current() { return stack.empty() ? nullptr : stack.back(); }

void set_current(Context* context) {
  if (!stack.empty()) stack.pop_back();
  if (context) stack.push_back(context);
}

Context* primary(Device& device) {
  std::lock_guard lock(contexts().mutex);
  Context*& context = contexts().primaries[&device];
  if (!context) context = add(device, true);
  return context;
}

bool known_context(const void* handle) {
  std::lock_guard lock(contexts().mutex);
  return contexts().all.count(handle) != 0;
}

Error current_device(Device** device) {
  Context* context = current();
  if (!context) return kInvalidContext;
  if (context->primary && context->device->retains == 0) return kInvalidContext;  // it was released
  *device = context->device;
  return static_cast<Error>(context->device->fault.load());
}

Error stream_argument(CUstream handle, Stream** stream) {
  if (reinterpret_cast<std::uintptr_t>(handle) <= 2) {
    Device* device = nullptr;
    if (Error error = current_device(&device)) return error;
    *stream = stream_of(*device, handle);
    return kOk;
  }
  if (devices().empty()) return kNoDevice;
  *stream = stream_of(*devices()[0], handle);
  if (!*stream) return kInvalidHandle;
  return static_cast<Error>((*stream)->device->fault.load());
}

namespace {

// The highest version that this library has, as the driver would answer for a caller as new.
void* find_symbol(const char* name) {
  static void* const self = [] {
    Dl_info info;
    dladdr(reinterpret_cast<const void*>(&begin), &info);
    return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }();
  if (std::strncmp(name, "cu", 2) != 0) return nullptr;
  for (const char* suffix : {"_v4", "_v3", "_v2", ""}) {
    if (void* found = dlsym(self, (std::string(name) + suffix).c_str())) return found;
  }
  return nullptr;
}

struct Named {
  int code;
  const char* name;
  const char* text;
};

const Named kErrors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {4, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
    {217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access is not supported between these two devices"},
    {220, "CUDA_ERROR_NVLINK_UNCORRECTABLE", "uncorrectable NVLink error detected during the execution"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {401, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {702, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"},
    {704, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
    {705, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "peer access has not been enabled"},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {710, "CUDA_ERROR_ASSERT", "device-side assert triggered"},
    {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped"},
    {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region"},
    {716, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {720, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", "too many blocks in cooperative launch"},
    {800, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
    {902, "CUDA_ERROR_STREAM_CAPTURE_MERGE", "operation would result in a merge of separate capture sequences"},
    {903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not ended in the same stream as it began"},
    {904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"},
    {905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "dependency created on uncaptured work in another stream"},
    {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "operation would make the legacy stream depend on a capturing one"},
    {907, "CUDA_ERROR_CAPTURED_EVENT", "operation not permitted on an event last recorded in a capturing stream"},
    {908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "attempt to terminate a thread-local capture from another thread"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

const Named* named(int code) {
  for (const Named& each : kErrors) {
    if (each.code == code) return &each;
  }
  return nullptr;
}

}  // namespace
}  // namespace cuda
}  // namespace fake

using namespace fake;
using namespace fake::cuda;

FAKE_API cuInit(unsigned flags) {
  if (Error error = enter(__func__)) return error;
  if (flags != 0) return kInvalidValue;
  if (settings().devices.empty()) return kNoDevice;
  devices();
  start_host_thread();
  initialised = true;
  return kOk;
}

FAKE_API cuDriverGetVersion(int* version) {
  if (Error error = enter(__func__)) return error;
  *version = 13000;
  return kOk;
}

FAKE_API cuGetErrorName(int code, const char** name) {
  const Named* found = named(code);
  *name = found ? found->name : nullptr;
  return found ? kOk : kInvalidValue;
}

FAKE_API cuGetErrorString(int code, const char** text) {
  const Named* found = named(code);
  *text = found ? found->text : nullptr;
  return found ? kOk : kInvalidValue;
}

// The newest signature that a caller of this version knows; versions matter here for one function only.
FAKE_API cuGetProcAddress_v2(const char* name, void** function, int version, std::uint64_t, int* status) {
  bool older = version < 12030 && std::strcmp(name, "cuStreamGetCaptureInfo") == 0;
  *function = find_symbol(older ? "cuStreamGetCaptureInfo_v2" : name);
  if (status) *status = *function ? 0 : 1;
  return *function || status ? kOk : kNotFound;
}

FAKE_API cuGetProcAddress(const char* name, void** function, int version, std::uint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}

FAKE_API cuGetExportTable(const void** table, const void*) {
  *table = nullptr;
  return kNotFound;
}

FAKE_API cuDevicePrimaryCtxRetain(void** context, CUdevice ordinal) {
  BEGIN();
  Device* device = device_at(ordinal);
  if (!device) return kInvalidDevice;
  std::lock_guard lock(state_mutex());
  ++device->retains;
  *context = primary(*device);
  return kOk;
}

FAKE_API cuDevicePrimaryCtxRelease_v2(CUdevice ordinal) {
  BEGIN();
  Device* device = device_at(ordinal);
  if (!device) return kInvalidDevice;
  std::lock_guard lock(state_mutex());
  if (device->retains == 0) return kInvalidContext;
  --device->retains;
  return kOk;
}

FAKE_API cuDevicePrimaryCtxReset_v2(CUdevice ordinal) {
  BEGIN();
  Device* device = device_at(ordinal);
  if (!device) return kInvalidDevice;
  synchronize_device(*device);
  device->fault = kOk;
  return kOk;
}

FAKE_API cuDevicePrimaryCtxGetState(CUdevice ordinal, unsigned* flags, int* active) {
  BEGIN();
  Device* device = device_at(ordinal);
  if (!device) return kInvalidDevice;
  *flags = 0;
  *active = device->retains > 0;
  return kOk;
}

FAKE_API cuDevicePrimaryCtxSetFlags_v2(CUdevice ordinal, unsigned) {
  BEGIN();
  return device_at(ordinal) ? kOk : kInvalidDevice;
}

FAKE_API cuCtxCreate_v4(void** out, void*, unsigned, CUdevice ordinal) {
  BEGIN();
  Device* device = device_at(ordinal);
  if (!device) return kInvalidDevice;
  std::lock_guard lock(contexts().mutex);
  Context* context = add(*device, false);
  stack.push_back(context);
  *out = context;
  return kOk;
}

FAKE_API cuCtxDestroy_v2(void* handle) {
  BEGIN();
  if (!known_context(handle) || static_cast<Context*>(handle)->primary) return kInvalidContext;
  synchronize_device(*static_cast<Context*>(handle)->device);
  if (current() == handle) stack.pop_back();
  std::lock_guard lock(contexts().mutex);
  contexts().all.erase(handle);
  std::unique_ptr<Context> owned(static_cast<Context*>(handle));
  return kOk;
}

FAKE_API cuCtxGetCurrent(void** context) {
  BEGIN();
  *context = current();
  return kOk;
}

FAKE_API cuCtxSetCurrent(void* context) {
  BEGIN();
  if (context && !known_context(context)) return kInvalidContext;
  set_current(static_cast<Context*>(context));
  return kOk;
}

FAKE_API cuCtxPushCurrent_v2(void* context) {
  BEGIN();
  if (!known_context(context)) return kInvalidContext;
  stack.push_back(static_cast<Context*>(context));
  return kOk;
}

FAKE_API cuCtxPopCurrent_v2(void** context) {
  BEGIN();
  if (stack.empty()) return kInvalidContext;
  if (context) *context = stack.back();
  stack.pop_back();
  return kOk;
}

FAKE_API cuCtxGetDevice(CUdevice* ordinal) {
  BEGIN();
  DEVICE(device);
  *ordinal = device->ordinal;
  return kOk;
}

FAKE_API cuCtxGetId(void* context, unsigned long long* id) {
  BEGIN();
  auto* wanted = context ? static_cast<Context*>(context) : current();
  if (!wanted || !known_context(wanted)) return kInvalidContext;
  *id = static_cast<unsigned long long>(wanted->device->physical) + 1;
  return kOk;
}

FAKE_API cuCtxSynchronize() {
  BEGIN();
  DEVICE(device);
  return synchronize_device(*device);
}

FAKE_API cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  BEGIN();
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return kOk;
}

FAKE_API cuCtxGetApiVersion(void*, unsigned* version) {
  BEGIN();
  *version = 3020;
  return kOk;
}

FAKE_API cuCtxGetFlags(unsigned* flags) {
  BEGIN();
  *flags = 0;
  return kOk;
}

FAKE_API cuCtxEnablePeerAccess(void* peer, unsigned flags) {
  BEGIN();
  DEVICE(device);
  if (flags != 0) return kInvalidValue;
  if (!known_context(peer)) return kInvalidContext;
  Device* other = static_cast<Context*>(peer)->device;
  if (!settings().peer || other == device) return kPeerUnsupported;
  std::uint64_t bit = 1ull << other->ordinal;
  return device->peers.fetch_or(bit) & bit ? kPeerAlreadyEnabled : kOk;
}

FAKE_API cuCtxDisablePeerAccess(void* peer) {
  BEGIN();
  DEVICE(device);
  if (!known_context(peer)) return kInvalidContext;
  std::uint64_t bit = 1ull << static_cast<Context*>(peer)->device->ordinal;
  return device->peers.fetch_and(~bit) & bit ? kOk : kPeerNotEnabled;
}

extern "C" __attribute__((visibility("default"))) const DriverAccess* fake_driver() {
  static const DriverAccess access = driver_access(current_device);
  return &access;
}
