// What the files of the fake libcuda share. Types are the driver's own in size; names of its enumerations' values
// are in cuda.h of the CUDA toolkit, which this does not need.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device.h"
#include "errors.h"
#include "settings.h"

#define FAKE_API extern "C" __attribute__((visibility("default"))) int

using CUdeviceptr = unsigned long long;
using CUdevice = int;
using CUstream = void*;

namespace fake::cuda {

struct Context {
  Device* device = nullptr;
  bool primary = true;
};

// Counts the call; whether it may be made.
Error begin(const char* function);

Context* current();  // of this thread; null when there is none
void set_current(Context* context);
Context* primary(Device& device);
bool known_context(const void* handle);

// The current context's device, unless it has failed.
Error current_device(Device** device);
// The stream of a handle (null: the current context's default stream).
Error stream_argument(CUstream handle, Stream** stream);

// What every function begins with, and most go on with.
#define BEGIN() \
  if (::fake::Error begun = ::fake::cuda::begin(__func__)) return begun
#define DEVICE(name)                 \
  ::fake::Device* name = nullptr; \
  if (::fake::Error found = ::fake::cuda::current_device(&name)) return found
#define STREAM(name, handle)         \
  ::fake::Stream* name = nullptr; \
  if (::fake::Error found = ::fake::cuda::stream_argument(handle, &name)) return found

}  // namespace fake::cuda
