// Memory without an array around it: what XLA hands to the handler (xla.cc), and what the benchmark measures with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/types.h"

namespace hetcoll {

struct Memory {
  static constexpr std::int32_t kCpu = 1, kCuda = 2, kRocm = 10;  // DLDeviceType, dlpack.h

  std::byte* data = nullptr;
  std::size_t count = 0;
  DType dtype = DType::kUint8;
  std::int32_t device_type = kCpu;
  std::int32_t device = 0;
  std::optional<std::uintptr_t> stream{};  // of a GPU, on which its work is; the fast path wants one
};

}  // namespace hetcoll
