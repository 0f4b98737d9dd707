// The CUDA driver's functions that a libamdhip64 over it needs, looked up in libcuda.so.1 at the first call.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../hip/properties.h"
#include "../hip/status.h"

namespace posing {

using Pointer = unsigned long long;  // CUdeviceptr
using IpcHandle = fake::hip::Handle;

// name as exported, arguments
#define POSING_CUDA(F)                                                                            \
  F(cuInit, (unsigned))                                                                           \
  F(cuDriverGetVersion, (int*))                                                                   \
  F(cuDeviceGetCount, (int*))                                                                     \
  F(cuDeviceGet, (int*, int))                                                                     \
  F(cuDeviceGetName, (char*, int, int))                                                           \
  F(cuDeviceGetUuid_v2, (char*, int))                                                             \
  F(cuDeviceGetPCIBusId, (char*, int, int))                                                       \
  F(cuDeviceGetByPCIBusId, (int*, const char*))                                                   \
  F(cuDeviceTotalMem_v2, (std::size_t*, int))                                                     \
  F(cuDeviceGetAttribute, (int*, int, int))                                                       \
  F(cuDeviceCanAccessPeer, (int*, int, int))                                                      \
  F(cuDeviceGetP2PAttribute, (int*, int, int, int))                                               \
  F(cuDevicePrimaryCtxRetain, (void**, int))                                                      \
  F(cuDevicePrimaryCtxReset_v2, (int))                                                            \
  F(cuCtxGetCurrent, (void**))                                                                    \
  F(cuCtxGetDevice, (int*))                                                                       \
  F(cuCtxSetCurrent, (void*))                                                                     \
  F(cuCtxSynchronize, ())                                                                         \
  F(cuCtxGetStreamPriorityRange, (int*, int*))                                                    \
  F(cuCtxEnablePeerAccess, (void*, unsigned))                                                     \
  F(cuCtxDisablePeerAccess, (void*))                                                              \
  F(cuMemGetInfo_v2, (std::size_t*, std::size_t*))                                                \
  F(cuMemAlloc_v2, (Pointer*, std::size_t))                                                       \
  F(cuMemAllocManaged, (Pointer*, std::size_t, unsigned))                                         \
  F(cuMemFree_v2, (Pointer))                                                                      \
  F(cuMemHostAlloc, (void**, std::size_t, unsigned))                                              \
  F(cuMemFreeHost, (void*))                                                                       \
  F(cuMemHostRegister_v2, (void*, std::size_t, unsigned))                                         \
  F(cuMemHostUnregister, (void*))                                                                 \
  F(cuMemHostGetDevicePointer_v2, (Pointer*, void*, unsigned))                                    \
  F(cuMemHostGetFlags, (unsigned*, void*))                                                        \
  F(cuMemGetAddressRange_v2, (Pointer*, std::size_t*, Pointer))                                   \
  F(cuMemGetHandleForAddressRange, (void*, Pointer, std::size_t, int, unsigned long long))        \
  F(cuIpcGetMemHandle, (char*, Pointer))                                                          \
  F(cuIpcOpenMemHandle_v2, (Pointer*, IpcHandle, unsigned))                                       \
  F(cuIpcCloseMemHandle, (Pointer))                                                               \
  F(cuPointerGetAttribute, (void*, int, Pointer))                                                 \
  F(cuMemcpyAsync, (Pointer, Pointer, std::size_t, void*))                                        \
  F(cuMemsetD8Async, (Pointer, unsigned char, std::size_t, void*))                                \
  F(cuMemAllocAsync, (Pointer*, std::size_t, void*))                                              \
  F(cuMemFreeAsync, (Pointer, void*))                                                             \
  F(cuStreamCreateWithPriority, (void**, unsigned, int))                                          \
  F(cuStreamDestroy_v2, (void*))                                                                  \
  F(cuStreamQuery, (void*))                                                                       \
  F(cuStreamGetCaptureInfo_v2, (void*, int*, std::uint64_t*, void**, const void**, std::size_t*)) \
  F(cuStreamSynchronize, (void*))                                                                 \
  F(cuStreamGetPriority, (void*, int*))                                                           \
  F(cuStreamGetFlags, (void*, unsigned*))                                                         \
  F(cuStreamWaitEvent, (void*, void*, unsigned))                                                  \
  F(cuEventCreate, (void**, unsigned))                                                            \
  F(cuEventDestroy_v2, (void*))                                                                   \
  F(cuEventRecord, (void*, void*))                                                                \
  F(cuEventQuery, (void*))                                                                        \
  F(cuEventSynchronize, (void*))                                                                  \
  F(cuEventElapsedTime_v2, (float*, void*, void*))                                                \
  F(cuIpcGetEventHandle, (char*, void*))                                                          \
  F(cuIpcOpenEventHandle, (void**, IpcHandle))                                                    \
  F(cuStreamWaitValue32_v2, (void*, Pointer, std::uint32_t, unsigned))                            \
  F(cuStreamWaitValue64_v2, (void*, Pointer, std::uint64_t, unsigned))                            \
  F(cuStreamWriteValue32_v2, (void*, Pointer, std::uint32_t, unsigned))                           \
  F(cuStreamWriteValue64_v2, (void*, Pointer, std::uint64_t, unsigned))                           \
  F(cuLaunchHostFunc, (void*, void (*)(void*), void*))                                            \
  F(cuStreamBeginCapture_v2, (void*, int))                                                        \
  F(cuStreamEndCapture, (void*, void**))                                                          \
  F(cuStreamIsCapturing, (void*, int*))                                                           \
  F(cuThreadExchangeStreamCaptureMode, (int*))                                                    \
  F(cuGraphInstantiateWithFlags, (void**, void*, unsigned long long))                             \
  F(cuGraphGetNodes, (void*, void**, std::size_t*))                                               \
  F(cuGraphLaunch, (void*, void*))                                                                \
  F(cuGraphExecDestroy, (void*))                                                                  \
  F(cuGraphDestroy, (void*))                                                                      \
  F(cuModuleLoadData, (void**, const void*))                                                      \
  F(cuModuleUnload, (void*))                                                                      \
  F(cuModuleGetFunction, (void**, void*, const char*))                                            \
  F(cuModuleGetGlobal_v2, (Pointer*, std::size_t*, void*, const char*))                           \
  F(cuFuncGetAttribute, (int*, int, void*))                                                       \
  F(cuOccupancyMaxActiveBlocksPerMultiprocessor, (int*, void*, int, std::size_t))                 \
  F(cuLaunchKernel,                                                                               \
    (void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**))

struct Cuda {
#define F(name, arguments) int(*name) arguments = nullptr;
  POSING_CUDA(F)
#undef F
};

// The driver, or null where there is none. Initialised.
const Cuda* cuda();

inline Pointer number(const void* address) { return reinterpret_cast<Pointer>(address); }

// A CUresult as hipError_t: the numbers are the same but for those that HIP lacks.
inline fake::hip::Status status(int code) { return static_cast<fake::Error>(code); }

// Makes the context of the thread's device current: NCCL and others look at that. An error code.
int activate();
int current_ordinal();              // as HIP counts
int cuda_ordinal(int hip_ordinal);  // as CUDA does, or -1
int hip_ordinal(int cuda_ordinal);

#define BEGIN() \
  if (int begun = ::posing::activate()) return ::posing::status(begun)
#define CU(name) ::posing::cuda()->name

}  // namespace posing
