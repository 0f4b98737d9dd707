// What the files of the stand-in libamdhip64 share: HIP's status, the current device, and how calls begin.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device.h"
#include "errors.h"
#include "settings.h"

using hipStream_t = void*;

namespace standin::hip {

// hipError_t as it is returned: the numbers are the runtime's but for those that HIP lacks. The last one that was no
// success stays with the thread (hipGetLastError). Returned in a register, as an int is.
struct Status {
  int code;
  Status(Error error);  // NOLINT: functions return errors
};

Error begin(const char* function);
Error current_device(Device** device);
Error stream_argument(hipStream_t handle, Stream** stream);

#define STANDIN_API extern "C" __attribute__((visibility("default"))) ::standin::hip::Status
#define BEGIN() \
  if (::standin::Error begun = ::standin::hip::begin(__func__)) return begun
#define DEVICE(name)                 \
  ::standin::Device* name = nullptr; \
  if (::standin::Error found = ::standin::hip::current_device(&name)) return found
#define STREAM(name, handle)         \
  ::standin::Stream* name = nullptr; \
  if (::standin::Error found = ::standin::hip::stream_argument(handle, &name)) return found

}  // namespace standin::hip
