// What the files of the fake libamdhip64 share: the current device, and how calls begin.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device.h"
#include "errors.h"
#include "settings.h"
#include "status.h"

using hipStream_t = void*;

namespace fake::hip {

Error begin(const char* function);
Error current_device(Device** device);
Error stream_argument(hipStream_t handle, Stream** stream);

#define BEGIN() \
  if (::fake::Error begun = ::fake::hip::begin(__func__)) return begun
#define DEVICE(name)                 \
  ::fake::Device* name = nullptr; \
  if (::fake::Error found = ::fake::hip::current_device(&name)) return found
#define STREAM(name, handle)         \
  ::fake::Stream* name = nullptr; \
  if (::fake::Error found = ::fake::hip::stream_argument(handle, &name)) return found

}  // namespace fake::hip
