// A libamdhip64 over the CUDA driver: memory, streams, events, signals, graphs, modules. Handles and addresses are
// CUDA's own.
#include <cstring>

#include "cuda.h"

using namespace posing;
using fake::hip::Handle;
using fake::hip::PointerAttributes;

namespace {

constexpr int kInvalidValue = 1;
constexpr int kNotSupported = 801;
constexpr int kHostMemory = 1;  // CU_MEMORYTYPE_HOST

struct Attribute {  // of CUpointer_attribute
  static constexpr int kType = 2, kDevicePointer = 3, kHostPointer = 4, kManaged = 8, kOrdinal = 9;
};

template <class Value>
Value of(Pointer address, int which) {
  Value value{};
  if (CU(cuPointerGetAttribute)(&value, which, address) != 0) value = {};
  return value;
}

int wait_for(int code, void* stream) { return code != 0 ? code : CU(cuStreamSynchronize)(stream); }

}  // namespace

FAKE_API hipMemGetInfo(std::size_t* available, std::size_t* total) {
  BEGIN();
  return status(CU(cuMemGetInfo_v2)(available, total));
}

FAKE_API hipMalloc(void** out, std::size_t nbytes) {
  BEGIN();
  *out = nullptr;
  return status(nbytes == 0 ? 0 : CU(cuMemAlloc_v2)(reinterpret_cast<Pointer*>(out), nbytes));
}

FAKE_API hipExtMallocWithFlags(void** out, std::size_t nbytes, unsigned flags) {
  BEGIN();
  if (flags != 2) return hipMalloc(out, nbytes);
  return status(nbytes == 8 ? CU(cuMemHostAlloc)(out, nbytes, 3) : kInvalidValue);  // memory for signals
}

FAKE_API hipMallocManaged(void** out, std::size_t nbytes, unsigned flags) {
  BEGIN();
  return status(CU(cuMemAllocManaged)(reinterpret_cast<Pointer*>(out), nbytes, flags));
}

FAKE_API hipFree(void* address) {
  BEGIN();
  if (address == nullptr) return status(0);
  const bool host = of<int>(number(address), Attribute::kType) == kHostMemory;
  return status(host ? CU(cuMemFreeHost)(address) : CU(cuMemFree_v2)(number(address)));
}

FAKE_API hipHostMalloc(void** out, std::size_t nbytes, unsigned flags) {
  BEGIN();
  *out = nullptr;
  return status(nbytes == 0 ? 0 : CU(cuMemHostAlloc)(out, nbytes, flags & 7));  // the others choose coherence, nodes
}

FAKE_API hipHostAlloc(void** out, std::size_t nbytes, unsigned flags) { return hipHostMalloc(out, nbytes, flags); }

FAKE_API hipHostFree(void* address) {
  BEGIN();
  return status(address == nullptr ? 0 : CU(cuMemFreeHost)(address));
}

FAKE_API hipHostRegister(void* address, std::size_t nbytes, unsigned flags) {
  BEGIN();
  return status(CU(cuMemHostRegister_v2)(address, nbytes, flags & 15));
}

FAKE_API hipHostUnregister(void* address) {
  BEGIN();
  return status(CU(cuMemHostUnregister)(address));
}

FAKE_API hipHostGetDevicePointer(void** out, void* address, unsigned flags) {
  BEGIN();
  return status(CU(cuMemHostGetDevicePointer_v2)(reinterpret_cast<Pointer*>(out), address, flags));
}

FAKE_API hipHostGetFlags(unsigned* flags, void* address) {
  BEGIN();
  return status(CU(cuMemHostGetFlags)(flags, address));
}

FAKE_API hipMemGetAddressRange(void** base, std::size_t* nbytes, void* address) {
  BEGIN();
  return status(CU(cuMemGetAddressRange_v2)(reinterpret_cast<Pointer*>(base), nbytes, number(address)));
}

FAKE_API hipMemGetHandleForAddressRange(void* handle, void* address, std::size_t nbytes, int type,
                                           unsigned long long flags) {
  BEGIN();
  return status(CU(cuMemGetHandleForAddressRange)(handle, number(address), nbytes, type, flags));
}

FAKE_API hipIpcGetMemHandle(char* handle, void* address) {
  BEGIN();
  return status(CU(cuIpcGetMemHandle)(handle, number(address)));
}

FAKE_API hipIpcOpenMemHandle(void** out, Handle handle, unsigned flags) {
  BEGIN();
  return status(CU(cuIpcOpenMemHandle_v2)(reinterpret_cast<Pointer*>(out), handle, flags));
}

FAKE_API hipIpcCloseMemHandle(void* address) {
  BEGIN();
  return status(CU(cuIpcCloseMemHandle)(number(address)));
}

FAKE_API hipPointerGetAttributes(PointerAttributes* attributes, const void* address) {
  BEGIN();
  const Pointer at = number(address);
  int type = 0;
  if (const int code = CU(cuPointerGetAttribute)(&type, Attribute::kType, at)) return status(code);
  const bool managed = of<unsigned>(at, Attribute::kManaged) != 0;
  *attributes = {managed ? 3 : type,
                 hip_ordinal(of<int>(at, Attribute::kOrdinal)),
                 reinterpret_cast<void*>(of<Pointer>(at, Attribute::kDevicePointer)),
                 of<void*>(at, Attribute::kHostPointer),
                 managed,
                 0};
  return status(0);
}

FAKE_API hipMemcpyAsync(void* to, const void* from, std::size_t nbytes, int, void* stream) {
  BEGIN();
  return status(nbytes == 0 ? 0 : CU(cuMemcpyAsync)(number(to), number(from), nbytes, stream));
}

FAKE_API hipMemcpyWithStream(void* to, const void* from, std::size_t nbytes, int, void* stream) {
  BEGIN();
  return status(wait_for(CU(cuMemcpyAsync)(number(to), number(from), nbytes, stream), stream));
}

FAKE_API hipMemcpy(void* to, const void* from, std::size_t nbytes, int kind) {
  return hipMemcpyWithStream(to, from, nbytes, kind, nullptr);
}

#define COPY(suffix, to_type, from_type)                                                               \
  FAKE_API hipMemcpy##suffix##Async(to_type to, from_type from, std::size_t nbytes, void* stream) { \
    BEGIN();                                                                                           \
    return status(CU(cuMemcpyAsync)(number(to), number(from), nbytes, stream));                        \
  }
COPY(HtoD, void*, const void*)
COPY(DtoH, void*, void*)
COPY(DtoD, void*, void*)
#undef COPY

FAKE_API hipMemsetAsync(void* to, int value, std::size_t nbytes, void* stream) {
  BEGIN();
  return status(CU(cuMemsetD8Async)(number(to), static_cast<unsigned char>(value), nbytes, stream));
}

FAKE_API hipMemset(void* to, int value, std::size_t nbytes) {
  BEGIN();
  return status(wait_for(CU(cuMemsetD8Async)(number(to), static_cast<unsigned char>(value), nbytes, nullptr), nullptr));
}

FAKE_API hipMallocAsync(void** out, std::size_t nbytes, void* stream) {
  BEGIN();
  return status(CU(cuMemAllocAsync)(reinterpret_cast<Pointer*>(out), nbytes, stream));
}

FAKE_API hipFreeAsync(void* address, void* stream) {
  BEGIN();
  return status(CU(cuMemFreeAsync)(number(address), stream));
}

// ---- Streams and events ----

FAKE_API hipStreamCreateWithPriority(void** out, unsigned flags, int priority) {
  BEGIN();
  return status(CU(cuStreamCreateWithPriority)(out, flags, priority));
}

FAKE_API hipStreamCreateWithFlags(void** out, unsigned flags) { return hipStreamCreateWithPriority(out, flags, 0); }

FAKE_API hipStreamCreate(void** out) { return hipStreamCreateWithPriority(out, 0, 0); }

// Calls that CUDA's driver has with the same arguments.
#define SAME(hip, cuda, parameters, ...)  \
  FAKE_API hip parameters {            \
    BEGIN();                              \
    return status(CU(cuda)(__VA_ARGS__)); \
  }
SAME(hipStreamDestroy, cuStreamDestroy_v2, (void* stream), stream)
SAME(hipStreamQuery, cuStreamQuery, (void* stream), stream)
SAME(hipStreamSynchronize, cuStreamSynchronize, (void* stream), stream)
SAME(hipStreamGetPriority, cuStreamGetPriority, (void* stream, int* priority), stream, priority)
SAME(hipStreamGetFlags, cuStreamGetFlags, (void* stream, unsigned* flags), stream, flags)
SAME(hipStreamWaitEvent, cuStreamWaitEvent, (void* stream, void* event, unsigned flags), stream, event, flags)
SAME(hipEventCreateWithFlags, cuEventCreate, (void** out, unsigned flags), out, flags & 7)
SAME(hipEventCreate, cuEventCreate, (void** out), out, 0)
SAME(hipEventDestroy, cuEventDestroy_v2, (void* event), event)
SAME(hipEventRecord, cuEventRecord, (void* event, void* stream), event, stream)
SAME(hipEventQuery, cuEventQuery, (void* event), event)
SAME(hipEventSynchronize, cuEventSynchronize, (void* event), event)
SAME(hipEventElapsedTime, cuEventElapsedTime_v2, (float* ms, void* start, void* end), ms, start, end)
SAME(hipIpcGetEventHandle, cuIpcGetEventHandle, (char* out, void* event), out, event)
SAME(hipIpcOpenEventHandle, cuIpcOpenEventHandle, (void** out, Handle handle), out, handle)
SAME(hipStreamWriteValue32, cuStreamWriteValue32_v2, (void* stream, void* address, std::uint32_t value, unsigned flags),
     stream, number(address), value, flags)
SAME(hipStreamWriteValue64, cuStreamWriteValue64_v2, (void* stream, void* address, std::uint64_t value, unsigned flags),
     stream, number(address), value, flags)
SAME(hipLaunchHostFunc, cuLaunchHostFunc, (void* stream, void (*function)(void*), void* argument), stream, function,
     argument)
SAME(hipStreamBeginCapture, cuStreamBeginCapture_v2, (void* stream, int mode), stream, mode)
SAME(hipStreamEndCapture, cuStreamEndCapture, (void* stream, void** graph), stream, graph)
SAME(hipStreamIsCapturing, cuStreamIsCapturing, (void* stream, int* state), stream, state)
SAME(hipStreamGetCaptureInfo, cuStreamGetCaptureInfo_v2, (void* stream, int* state, unsigned long long* id), stream,
     state, reinterpret_cast<std::uint64_t*>(id), nullptr, nullptr, nullptr)
SAME(hipThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, (int* mode), mode)
SAME(hipGraphInstantiateWithFlags, cuGraphInstantiateWithFlags, (void** out, void* graph, unsigned long long flags),
     out, graph, flags)
SAME(hipGraphInstantiate, cuGraphInstantiateWithFlags, (void** out, void* graph, void**, char*, std::size_t), out,
     graph, 0)
SAME(hipGraphGetNodes, cuGraphGetNodes, (void* graph, void** nodes, std::size_t* count), graph, nodes, count)
SAME(hipGraphLaunch, cuGraphLaunch, (void* graph, void* stream), graph, stream)
SAME(hipGraphExecDestroy, cuGraphExecDestroy, (void* graph), graph)
SAME(hipGraphDestroy, cuGraphDestroy, (void* graph), graph)
SAME(hipModuleLoadData, cuModuleLoadData, (void** out, const void* image), out, image)
SAME(hipModuleLoadDataEx, cuModuleLoadData, (void** out, const void* image, unsigned, int*, void**), out, image)
SAME(hipModuleUnload, cuModuleUnload, (void* module), module)
SAME(hipModuleGetFunction, cuModuleGetFunction, (void** out, void* module, const char* name), out, module, name)
SAME(hipModuleGetGlobal, cuModuleGetGlobal_v2, (void** out, std::size_t* nbytes, void* module, const char* name),
     reinterpret_cast<Pointer*>(out), nbytes, module, name)
SAME(hipFuncGetAttribute, cuFuncGetAttribute, (int* value, int which, void* function), value, which, function)
SAME(hipModuleOccupancyMaxActiveBlocksPerMultiprocessor, cuOccupancyMaxActiveBlocksPerMultiprocessor,
     (int* blocks, void* function, int threads, std::size_t shared), blocks, function, threads, shared)
SAME(hipModuleLaunchKernel, cuLaunchKernel,
     (void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
      void* stream, void** parameters, void** extra),
     function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra)
#undef SAME

// CUDA compares all bits, and cyclically where HIP does not: no word of ours comes near to where that differs.
FAKE_API hipStreamWaitValue32(void* stream, void* address, std::uint32_t value, unsigned flags, std::uint32_t mask) {
  BEGIN();
  if (mask != ~std::uint32_t{0}) return status(kNotSupported);
  return status(CU(cuStreamWaitValue32_v2)(stream, number(address), value, flags));
}

FAKE_API hipStreamWaitValue64(void* stream, void* address, std::uint64_t value, unsigned flags, std::uint64_t mask) {
  BEGIN();
  if (mask != ~std::uint64_t{0}) return status(kNotSupported);
  return status(CU(cuStreamWaitValue64_v2)(stream, number(address), value, flags));
}
