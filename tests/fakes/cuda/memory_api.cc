// libcuda: memory, copies, and what pointers are.
#include <cstring>

#include "driver.h"
#include "memory.h"
#include "operations.h"

using namespace fake;
using namespace fake::cuda;

namespace {

Memory& memory() { return Memory::instance(); }

// Freeing waits for whatever still runs, on every driver.
Error drain() {
  Device* device = nullptr;
  Error error = current_device(&device);
  return error == kOk ? synchronize_device(*device) : error;
}

Error allocate(CUdeviceptr* out, Kind kind, std::size_t nbytes, unsigned flags = 0) {
  Device* device = nullptr;
  if (Error error = current_device(&device)) return error;
  {
    std::lock_guard lock(state_mutex());
    if (Error error = refuse_any_capture()) return error;
  }
  if (Error error = may_synchronize(*device)) return error;
  std::uintptr_t base = 0;
  Error error = memory().allocate(kind, device->ordinal, nbytes, flags, settings().memory, &base);
  if (error == kOk) *out = base;
  return error;
}

Error free_block(std::uintptr_t base, Kind kind) {
  Error failed = drain();  // it is freed all the same
  Error error = memory().release(base, kind);
  return failed != kOk ? failed : error;
}

}  // namespace

FAKE_API cuMemGetInfo_v2(std::size_t* available, std::size_t* total) {
  BEGIN();
  DEVICE(device);
  *total = settings().memory;
  *available = *total - memory().used(device->ordinal);
  return kOk;
}

FAKE_API cuMemAlloc_v2(CUdeviceptr* out, std::size_t nbytes) {
  BEGIN();
  return allocate(out, Kind::kDevice, nbytes);
}

FAKE_API cuMemAllocManaged(CUdeviceptr* out, std::size_t nbytes, unsigned flags) {
  BEGIN();
  if (flags != 1 && flags != 2) return kInvalidValue;
  return allocate(out, Kind::kManaged, nbytes);
}

FAKE_API cuMemFree_v2(CUdeviceptr address) {
  BEGIN();
  return address == 0 ? kOk : free_block(address, Kind::kDevice);
}

FAKE_API cuMemAllocHost_v2(void** out, std::size_t nbytes) {
  BEGIN();
  CUdeviceptr address = 0;
  Error error = allocate(&address, Kind::kPinned, nbytes);
  *out = reinterpret_cast<void*>(address);
  return error;
}

FAKE_API cuMemHostAlloc(void** out, std::size_t nbytes, unsigned flags) {
  BEGIN();
  CUdeviceptr address = 0;
  Error error = flags > 7 ? kInvalidValue : allocate(&address, Kind::kPinned, nbytes, flags);
  *out = reinterpret_cast<void*>(address);
  return error;
}

FAKE_API cuMemFreeHost(void* address) {
  BEGIN();
  return free_block(reinterpret_cast<std::uintptr_t>(address), Kind::kPinned);
}

FAKE_API cuMemHostRegister_v2(void* address, std::size_t nbytes, unsigned flags) {
  BEGIN();
  DEVICE(device);
  if (flags > 15) return kInvalidValue;
  if (Error error = may_synchronize(*device)) return error;
  return memory().register_host(reinterpret_cast<std::uintptr_t>(address), nbytes, device->ordinal, flags);
}

FAKE_API cuMemHostUnregister(void* address) {
  BEGIN();
  Error failed = drain();
  Error error = memory().unregister_host(reinterpret_cast<std::uintptr_t>(address));
  return failed != kOk ? failed : error;
}

FAKE_API cuMemHostGetDevicePointer_v2(CUdeviceptr* out, void* address, unsigned flags) {
  BEGIN();
  Block block = memory().find(reinterpret_cast<std::uintptr_t>(address));
  if (flags != 0 || (block.kind != Kind::kPinned && block.kind != Kind::kRegistered)) return kInvalidValue;
  *out = reinterpret_cast<CUdeviceptr>(address);
  return kOk;
}

FAKE_API cuMemHostGetFlags(unsigned* flags, void* address) {
  BEGIN();
  Block block = memory().find(reinterpret_cast<std::uintptr_t>(address));
  if (block.kind != Kind::kPinned) return kInvalidValue;
  *flags = block.flags;
  return kOk;
}

FAKE_API cuMemGetAddressRange_v2(CUdeviceptr* base, std::size_t* nbytes, CUdeviceptr address) {
  BEGIN();
  Block block = memory().find(address);
  if (block.kind == Kind::kPageable) return kNotFound;
  if (base) *base = block.base;
  if (nbytes) *nbytes = block.size;
  return kOk;
}

FAKE_API cuMemGetHandleForAddressRange(void* handle, CUdeviceptr address, std::size_t nbytes, int type,
                                       unsigned long long flags) {
  BEGIN();
  if (type != 1 || flags > 1) return kInvalidValue;  // DMA_BUF_FD
  if (!settings().dmabuf) return kNotSupported;
  return memory().export_file(address, nbytes, static_cast<int*>(handle));
}

FAKE_API cuIpcGetMemHandle(char* handle, CUdeviceptr address) {
  BEGIN();
  return memory().export_handle(address, handle);
}

struct IpcHandle {  // passed by value
  char bytes[kHandleBytes];
};

FAKE_API cuIpcOpenMemHandle_v2(CUdeviceptr* out, IpcHandle handle, unsigned flags) {
  BEGIN();
  DEVICE(device);
  if (flags > 1) return kInvalidValue;
  std::uintptr_t base = 0;
  Error error = memory().import_handle(handle.bytes, device->ordinal, &base);
  if (error == kOk) *out = base;
  return error;
}

FAKE_API cuIpcCloseMemHandle(CUdeviceptr address) {
  BEGIN();
  Error failed = drain();
  Error error = memory().close_imported(address);
  return failed != kOk ? failed : error;
}

namespace {

// One attribute of a pointer, written with its own size; kInvalidValue where the pointer has none.
Error pointer_attribute(void* data, int which, const Block& block, CUdeviceptr address) {
  bool host = block.kind == Kind::kPinned || block.kind == Kind::kRegistered;
  bool none = block.kind == Kind::kPageable;
  auto put = [data](auto value) {
    std::memcpy(data, &value, sizeof value);
    return kOk;
  };
  if (which == 13) return put(static_cast<int>(!none));  // MAPPED
  if (none) return kInvalidValue;
  switch (which) {
    case 1:  // CONTEXT
      return put(static_cast<void*>(primary(*device_at(block.device))));
    case 2:  // MEMORY_TYPE
      return put(host ? 1u : 2u);
    case 3:  // DEVICE_POINTER
      return put(address);
    case 4:  // HOST_POINTER
      return host || block.kind == Kind::kManaged ? put(address) : kInvalidValue;
    case 7:   // BUFFER_ID
    case 20:  // MEMORY_BLOCK_ID
      return put(static_cast<unsigned long long>(block.id));
    case 8:  // IS_MANAGED
      return put(static_cast<int>(block.kind == Kind::kManaged));
    case 9:  // DEVICE_ORDINAL
      return put(block.device);
    case 10:  // IS_LEGACY_CUDA_IPC_CAPABLE
      return put(static_cast<int>(block.kind == Kind::kDevice));
    case 11:  // RANGE_START_ADDR
    case 19:
      return put(static_cast<CUdeviceptr>(block.base));
    case 12:  // RANGE_SIZE
    case 18:
      return put(block.size);
    case 14:  // ALLOWED_HANDLE_TYPES
      return put(0ull);
    case 15:  // IS_GPU_DIRECT_RDMA_CAPABLE
      return put(static_cast<int>(block.kind == Kind::kDevice));
    case 16:  // ACCESS_FLAGS: read and write
      return put(3);
    case 17:  // MEMPOOL_HANDLE
      return put(static_cast<void*>(nullptr));
    default:
      return kInvalidValue;
  }
}

std::size_t attribute_bytes(int which) {
  switch (which) {
    case 2:
    case 8:
    case 9:
    case 10:
    case 13:
    case 15:
    case 16:
      return 4;
    default:
      return 8;
  }
}

}  // namespace

FAKE_API cuPointerGetAttribute(void* data, int which, CUdeviceptr address) {
  BEGIN();
  return pointer_attribute(data, which, memory().find(address), address);
}

FAKE_API cuPointerGetAttributes(unsigned count, const int* which, void** data, CUdeviceptr address) {
  BEGIN();
  Block block = memory().find(address);
  for (unsigned i = 0; i < count; ++i) {
    if (pointer_attribute(data[i], which[i], block, address) == kOk) continue;
    std::memset(data[i], 0, attribute_bytes(which[i]));
    if (which[i] == 9) std::memset(data[i], 0xFE, 4);  // CU_DEVICE_INVALID is -2
    if (which[i] == 9) *static_cast<int*>(data[i]) = -2;
  }
  return kOk;
}

FAKE_API cuPointerSetAttribute(const void*, int which, CUdeviceptr address) {
  BEGIN();
  if (which != 6) return kInvalidValue;  // SYNC_MEMOPS, which copies here need not heed: they are in order
  return memory().find(address).on_device() ? kOk : kInvalidValue;
}

#define COPY(suffix, destination_type, source_type, direction)                                                       \
  FAKE_API cuMemcpy##suffix##_v2(destination_type destination, source_type source, std::size_t nbytes) {             \
    BEGIN();                                                                                                         \
    STREAM(stream, nullptr);                                                                                         \
    return copy_and_wait(stream, (std::uintptr_t)destination, (std::uintptr_t)source, nbytes, Direction::direction); \
  }                                                                                                                  \
  FAKE_API cuMemcpy##suffix##Async_v2(destination_type destination, source_type source, std::size_t nbytes,          \
                                      CUstream handle) {                                                             \
    BEGIN();                                                                                                         \
    STREAM(stream, handle);                                                                                          \
    return copy(stream, (std::uintptr_t)destination, (std::uintptr_t)source, nbytes, Direction::direction);          \
  }
COPY(HtoD, CUdeviceptr, const void*, kHostToDevice)
COPY(DtoH, void*, CUdeviceptr, kDeviceToHost)
COPY(DtoD, CUdeviceptr, CUdeviceptr, kDeviceToDevice)
#undef COPY

FAKE_API cuMemcpy(CUdeviceptr destination, CUdeviceptr source, std::size_t nbytes) {
  BEGIN();
  STREAM(stream, nullptr);
  return copy_and_wait(stream, destination, source, nbytes, Direction::kAny);
}

FAKE_API cuMemcpyAsync(CUdeviceptr destination, CUdeviceptr source, std::size_t nbytes, CUstream handle) {
  BEGIN();
  STREAM(stream, handle);
  return copy(stream, destination, source, nbytes, Direction::kAny);
}

FAKE_API cuMemcpyPeer(CUdeviceptr destination, void*, CUdeviceptr source, void*, std::size_t nbytes) {
  BEGIN();
  STREAM(stream, nullptr);
  return copy_and_wait(stream, destination, source, nbytes, Direction::kDeviceToDevice);
}

FAKE_API cuMemcpyPeerAsync(CUdeviceptr destination, void*, CUdeviceptr source, void*, std::size_t nbytes,
                           CUstream handle) {
  BEGIN();
  STREAM(stream, handle);
  return copy(stream, destination, source, nbytes, Direction::kDeviceToDevice);
}

#define FILL(bits, type)                                                                                     \
  FAKE_API cuMemsetD##bits##_v2(CUdeviceptr destination, type value, std::size_t count) {                    \
    BEGIN();                                                                                                 \
    STREAM(stream, nullptr);                                                                                 \
    return fill(stream, destination, value, bits / 8, count);                                                \
  }                                                                                                          \
  FAKE_API cuMemsetD##bits##Async(CUdeviceptr destination, type value, std::size_t count, CUstream handle) { \
    BEGIN();                                                                                                 \
    STREAM(stream, handle);                                                                                  \
    return fill(stream, destination, value, bits / 8, count);                                                \
  }
FILL(8, unsigned char)
FILL(16, unsigned short)
FILL(32, unsigned)
#undef FILL

// Stream-ordered allocation: of one pool a device, which has no handles for other processes.
FAKE_API cuMemAllocAsync(CUdeviceptr* out, std::size_t nbytes, CUstream handle) {
  BEGIN();
  STREAM(stream, handle);
  {
    std::lock_guard lock(state_mutex());
    if (stream->capture) return kNotSupported;  // memory nodes are not among what graphs do here
  }
  std::uintptr_t base = 0;
  Error error = memory().allocate(Kind::kPool, stream->device->ordinal, nbytes, 0, settings().memory, &base);
  if (error == kOk) *out = base;
  return error;
}

FAKE_API cuMemAllocFromPoolAsync(CUdeviceptr* out, std::size_t nbytes, void*, CUstream handle) {
  return cuMemAllocAsync(out, nbytes, handle);
}

FAKE_API cuMemFreeAsync(CUdeviceptr address, CUstream handle) {
  BEGIN();
  STREAM(stream, handle);
  return release_in_order(stream, address);
}

FAKE_API cuDeviceGetDefaultMemPool(void** pool, CUdevice ordinal) {
  BEGIN();
  *pool = device_at(ordinal);
  return *pool ? kOk : kInvalidDevice;
}

FAKE_API cuDeviceGetMemPool(void** pool, CUdevice ordinal) { return cuDeviceGetDefaultMemPool(pool, ordinal); }

FAKE_API cuMemPoolGetAttribute(void*, int, void* value) {
  BEGIN();
  std::memset(value, 0, 8);
  return kOk;
}

FAKE_API cuMemPoolSetAttribute(void*, int, void*) {
  BEGIN();
  return kOk;
}
