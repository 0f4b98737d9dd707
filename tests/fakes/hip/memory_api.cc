// libamdhip64: memory, copies, and what pointers are.
#include <cstring>

#include "hip.h"
#include "memory.h"
#include "operations.h"
#include "properties.h"

using namespace fake;
using namespace fake::hip;

namespace {

Memory& memory() { return Memory::instance(); }

std::uintptr_t number(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

Error drain() {  // freeing waits for whatever still runs
  Device* device = nullptr;
  if (Error error = current_device(&device)) return error;
  return synchronize_device(*device);
}

Error allocate(void** out, Kind kind, std::size_t nbytes, unsigned flags = 0) {
  Device* device = nullptr;
  if (Error error = current_device(&device)) return error;
  {
    std::lock_guard lock(state_mutex());
    if (Error error = refuse_any_capture()) return error;
  }
  if (Error error = may_synchronize(*device)) return error;
  std::uintptr_t base = 0;
  *out = nullptr;
  if (nbytes == 0) return kOk;  // as malloc(0) may
  Error error = memory().allocate(kind, device->ordinal, nbytes, flags, settings().memory, &base);
  if (error == kOk) *out = reinterpret_cast<void*>(base);
  return error;
}

Error free_block(std::uintptr_t base, Kind kind) {
  if (base == 0) return kOk;
  Error failed = drain();  // it is freed all the same
  Error error = memory().release(base, kind);
  return failed != kOk ? failed : error;
}

Direction direction_of(int kind) {
  switch (kind) {
    case 1:
      return Direction::kHostToDevice;
    case 2:
      return Direction::kDeviceToHost;
    case 3:
      return Direction::kDeviceToDevice;
    default:
      return Direction::kAny;
  }
}

}  // namespace

FAKE_API hipMemGetInfo(std::size_t* available, std::size_t* total) {
  BEGIN();
  DEVICE(device);
  *total = settings().memory;
  *available = *total - memory().used(device->ordinal);
  return kOk;
}

FAKE_API hipMalloc(void** out, std::size_t nbytes) {
  BEGIN();
  return allocate(out, Kind::kDevice, nbytes);
}

FAKE_API hipExtMallocWithFlags(void** out, std::size_t nbytes, unsigned flags) {
  BEGIN();
  if (flags == 2) return nbytes == 8 ? allocate(out, Kind::kSignal, nbytes) : kInvalidValue;
  return flags == 0 || flags == 1 || flags == 3 ? allocate(out, Kind::kDevice, nbytes, flags) : kInvalidValue;
}

FAKE_API hipMallocManaged(void** out, std::size_t nbytes, unsigned flags) {
  BEGIN();
  return flags == 1 || flags == 2 ? allocate(out, Kind::kManaged, nbytes) : kInvalidValue;
}

FAKE_API hipFree(void* address) {
  BEGIN();
  Kind kind = memory().find(number(address)).kind;
  return free_block(number(address), kind == Kind::kSignal ? kind : Kind::kDevice);
}

FAKE_API hipHostMalloc(void** out, std::size_t nbytes, unsigned flags) {
  BEGIN();
  return allocate(out, Kind::kPinned, nbytes, flags);
}

FAKE_API hipHostAlloc(void** out, std::size_t nbytes, unsigned flags) {
  BEGIN();
  return allocate(out, Kind::kPinned, nbytes, flags);
}

FAKE_API hipHostFree(void* address) {
  BEGIN();
  return free_block(number(address), Kind::kPinned);
}

FAKE_API hipHostRegister(void* address, std::size_t nbytes, unsigned flags) {
  BEGIN();
  DEVICE(device);
  if (Error error = may_synchronize(*device)) return error;
  return memory().register_host(number(address), nbytes, device->ordinal, flags);
}

FAKE_API hipHostUnregister(void* address) {
  BEGIN();
  Error failed = drain();
  Error error = memory().unregister_host(number(address));
  return failed != kOk ? failed : error;
}

FAKE_API hipHostGetDevicePointer(void** out, void* address, unsigned flags) {
  BEGIN();
  Block block = memory().find(number(address));
  if (flags != 0 || (block.kind != Kind::kPinned && block.kind != Kind::kRegistered)) return kInvalidValue;
  *out = address;
  return kOk;
}

FAKE_API hipHostGetFlags(unsigned* flags, void* address) {
  BEGIN();
  Block block = memory().find(number(address));
  if (block.kind != Kind::kPinned && block.kind != Kind::kRegistered) return kInvalidValue;
  *flags = block.flags;
  return kOk;
}

FAKE_API hipMemGetAddressRange(void** base, std::size_t* nbytes, void* address) {
  BEGIN();
  Block block = memory().find(number(address));
  if (block.kind == Kind::kPageable) return kNotFound;
  if (base) *base = reinterpret_cast<void*>(block.base);
  if (nbytes) *nbytes = block.size;
  return kOk;
}

FAKE_API hipMemPtrGetInfo(void* address, std::size_t* nbytes) {
  BEGIN();
  Block block = memory().find(number(address));
  *nbytes = block.size;
  return block.kind == Kind::kPageable ? kInvalidValue : kOk;
}

FAKE_API hipMemGetHandleForAddressRange(void* handle, void* address, std::size_t nbytes, int type, unsigned long long) {
  BEGIN();
  if (type != 1) return kInvalidValue;
  if (!settings().dmabuf) return kNotSupported;
  return memory().export_file(number(address), nbytes, static_cast<int*>(handle));
}

FAKE_API hipIpcGetMemHandle(char* handle, void* address) {
  BEGIN();
  return memory().export_handle(number(address), handle);
}

FAKE_API hipIpcOpenMemHandle(void** out, Handle handle, unsigned flags) {
  BEGIN();
  DEVICE(device);
  if (flags > 1) return kInvalidValue;
  std::uintptr_t base = 0;
  Error error = memory().import_handle(handle.bytes, device->ordinal, &base);
  if (error == kOk) *out = reinterpret_cast<void*>(base);
  return error;
}

FAKE_API hipIpcCloseMemHandle(void* address) {
  BEGIN();
  Error failed = drain();
  Error error = memory().close_imported(number(address));
  return failed != kOk ? failed : error;
}

FAKE_API hipPointerGetAttributes(PointerAttributes* attributes, const void* address) {
  BEGIN();
  Block block = memory().find(number(address));
  if (block.kind == Kind::kPageable) return kInvalidValue;  // as CUDA before version 11, says HIP's documentation
  bool host = block.kind == Kind::kPinned || block.kind == Kind::kRegistered || block.kind == Kind::kSignal;
  bool managed = block.kind == Kind::kManaged;
  auto* pointer = const_cast<void*>(address);
  *attributes = {host ? 1 : managed ? 3 : 2,          block.device, pointer,
                 host || managed ? pointer : nullptr, managed,      block.flags};
  return kOk;
}

FAKE_API hipPointerGetAttribute(void* data, int which, void* address) {
  BEGIN();
  Block block = memory().find(number(address));
  if (block.kind == Kind::kPageable) return kInvalidValue;
  PointerAttributes all{};
  if (Error error = static_cast<Error>(hipPointerGetAttributes(&all, address).code)) return error;
  auto put = [data](auto value) {
    std::memcpy(data, &value, sizeof value);
    return kOk;
  };
  switch (which) {
    case 2:
      return put(all.type);
    case 3:
      return put(all.device_pointer);
    case 4:
      return put(all.host_pointer);
    case 7:
      return put(static_cast<unsigned long long>(block.id));
    case 8:
      return put(static_cast<int>(all.managed));
    case 9:
      return put(all.device);
    case 11:
      return put(block.base);
    case 12:
      return put(block.size);
    case 13:
      return put(1);
    default:
      return kInvalidValue;
  }
}

FAKE_API hipMemcpy(void* to, const void* from, std::size_t nbytes, int kind) {
  BEGIN();
  STREAM(stream, nullptr);
  return copy_and_wait(stream, number(to), number(from), nbytes, direction_of(kind));
}

FAKE_API hipMemcpyAsync(void* to, const void* from, std::size_t nbytes, int kind, hipStream_t handle) {
  BEGIN();
  STREAM(stream, handle);
  return copy(stream, number(to), number(from), nbytes, direction_of(kind));
}

FAKE_API hipMemcpyWithStream(void* to, const void* from, std::size_t nbytes, int kind, hipStream_t handle) {
  BEGIN();
  STREAM(stream, handle);
  return copy_and_wait(stream, number(to), number(from), nbytes, direction_of(kind));
}

#define COPY(suffix, to_type, from_type, direction)                                                       \
  FAKE_API hipMemcpy##suffix##Async(to_type to, from_type from, std::size_t nbytes, hipStream_t handle) { \
    BEGIN();                                                                                              \
    STREAM(stream, handle);                                                                               \
    return copy(stream, number(to), number(from), nbytes, Direction::direction);                          \
  }
COPY(HtoD, void*, const void*, kHostToDevice)
COPY(DtoH, void*, void*, kDeviceToHost)
COPY(DtoD, void*, void*, kDeviceToDevice)
#undef COPY

FAKE_API hipMemcpyPeerAsync(void* to, int, const void* from, int, std::size_t nbytes, hipStream_t handle) {
  BEGIN();
  STREAM(stream, handle);
  return copy(stream, number(to), number(from), nbytes, Direction::kDeviceToDevice);
}

FAKE_API hipMemset(void* to, int value, std::size_t nbytes) {
  BEGIN();
  STREAM(stream, nullptr);
  if (Error error = fill(stream, number(to), static_cast<unsigned char>(value), 1, nbytes)) return error;
  return synchronize_stream(stream);
}

FAKE_API hipMemsetAsync(void* to, int value, std::size_t nbytes, hipStream_t handle) {
  BEGIN();
  STREAM(stream, handle);
  return fill(stream, number(to), static_cast<unsigned char>(value), 1, nbytes);
}

FAKE_API hipMallocAsync(void** out, std::size_t nbytes, hipStream_t handle) {
  BEGIN();
  STREAM(stream, handle);
  {
    std::lock_guard lock(state_mutex());
    if (stream->capture) return kNotSupported;  // memory nodes are not among what graphs do here
  }
  std::uintptr_t base = 0;
  Error error = memory().allocate(Kind::kPool, stream->device->ordinal, nbytes, 0, settings().memory, &base);
  if (error == kOk) *out = reinterpret_cast<void*>(base);
  return error;
}

FAKE_API hipFreeAsync(void* address, hipStream_t handle) {
  BEGIN();
  STREAM(stream, handle);
  return release_in_order(stream, number(address));
}
