#include "access.h"

#include "memory.h"
#include "operations.h"
#include "settings.h"

namespace fake {
namespace {

CompletionPtr last(Stream* stream) {
  std::lock_guard lock(state_mutex());
  return stream->last;
}

Error allocate(Device& device, std::size_t nbytes, std::uintptr_t* base) {
  return Memory::instance().allocate(Kind::kDevice, device.ordinal, nbytes, 0, settings().memory, base);
}

Error release(Device& device, std::uintptr_t base) {
  if (Error error = synchronize_device(device)) return error;
  return Memory::instance().release(base, Kind::kDevice);
}

}  // namespace

DriverAccess driver_access(Error (*current)(Device**)) {
  return {current, stream_of, last, enqueue, reaches, allocate, release};
}

}  // namespace fake
