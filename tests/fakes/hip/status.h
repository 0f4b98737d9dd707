// hipError_t as functions return it.
#pragma once

#include "errors.h"

namespace fake::hip {

// The numbers are the CUDA driver's but for those that HIP lacks. The last one that was no success stays with the
// thread (hipGetLastError). Returned in a register, as an int is.
struct Status {
  int code;
  Status(Error error);  // NOLINT: functions return errors
};

}  // namespace fake::hip

#define FAKE_API extern "C" __attribute__((visibility("default"))) ::fake::hip::Status
