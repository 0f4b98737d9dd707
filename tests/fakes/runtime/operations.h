// What streams do besides kernels: copies, fills, waiting for and writing values, host functions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device.h"
#include "errors.h"

namespace fake {

enum class Direction { kAny, kHostToDevice, kDeviceToHost, kDeviceToDevice };
enum class Compare : unsigned { kGreaterOrEqual = 0, kEqual = 1, kAnd = 2, kNor = 3 };

// Copies on the stream. Pageable host memory behaves as with a driver: a source is read before the call returns, a
// destination is complete when it does. A range that runs over the end of an allocation is kInvalidValue.
Error copy(Stream* stream, std::uintptr_t destination, std::uintptr_t source, std::size_t nbytes, Direction direction);
// The same, complete on return.
Error copy_and_wait(Stream* stream, std::uintptr_t destination, std::uintptr_t source, std::size_t nbytes,
                    Direction direction);
// `count` elements of `width` (1, 2, 4) bytes.
Error fill(Stream* stream, std::uintptr_t destination, std::uint32_t value, std::size_t width, std::size_t count);

// `width` is 4 or 8 bytes. The mask is HIP's; all ones elsewhere.
Error wait_value(Stream* stream, std::uintptr_t address, std::uint64_t value, Compare compare, std::uint64_t mask,
                 std::size_t width);
Error write_value(Stream* stream, std::uintptr_t address, std::uint64_t value, std::size_t width);

// Of the one thread that runs host functions: a driver starts it with its devices.
void start_host_thread();
Error host_function(Stream* stream, void (*function)(void*), void* argument);

// Frees when the stream gets there.
Error release_in_order(Stream* stream, std::uintptr_t base);

// Whether the device may touch [address, address + nbytes): its own memory, a peer's, or host memory that it knows.
bool reaches(const Device& device, std::uintptr_t address, std::size_t nbytes);

}  // namespace fake
