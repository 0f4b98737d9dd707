// What a fake driver lends to the fake collectives of its vendor (nccl/), which put their kernels on its
// streams: found by name, as `fake_driver`.
#pragma once

#include <cstdint>
#include <vector>

#include "device.h"
#include "errors.h"
#include "queue.h"

namespace fake {

struct DriverAccess {
  Error (*current)(Device** device);                // of the calling thread
  Stream* (*stream)(Device& device, void* handle);  // null: there is none
  CompletionPtr (*last)(Stream* stream);            // of what the stream holds so far; null when nothing
  Error (*enqueue)(Stream* stream, const char* name, Body body, std::vector<CompletionPtr> after, CompletionPtr* done);
  bool (*reaches)(const Device& device, std::uintptr_t address, std::size_t nbytes);
  Error (*allocate)(Device& device, std::size_t nbytes, std::uintptr_t* base);
  Error (*release)(Device& device, std::uintptr_t base);
};

DriverAccess driver_access(Error (*current)(Device**));

}  // namespace fake

extern "C" const fake::DriverAccess* fake_driver();
