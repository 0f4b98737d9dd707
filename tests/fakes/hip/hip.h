// What the files of the stand-in libamdhip64 share: the current device, and how calls begin.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device.h"
#include "errors.h"
#include "settings.h"
#include "status.h"

using hipStream_t = void*;

namespace standin::hip {

Error begin(const char* function);
Error current_device(Device** device);
Error stream_argument(hipStream_t handle, Stream** stream);

#define BEGIN() \
  if (::standin::Error begun = ::standin::hip::begin(__func__)) return begun
#define DEVICE(name)                 \
  ::standin::Device* name = nullptr; \
  if (::standin::Error found = ::standin::hip::current_device(&name)) return found
#define STREAM(name, handle)         \
  ::standin::Stream* name = nullptr; \
  if (::standin::Error found = ::standin::hip::stream_argument(handle, &name)) return found

}  // namespace standin::hip
