// HETCOLL_INTEGRITY: which bytes a link puts under a checksum.
#pragma once

#include <atomic>
#include <cstdint>

namespace hetcoll {

enum class Integrity : std::uint8_t { kOff = 0, kSampled = 1, kAll = 2 };

// Written by one thread at a time, read by any.
class Count {
 public:
  Count() = default;
  Count(const Count& other) : value_(other.get()) {}
  Count& operator=(const Count&) = delete;
  void operator+=(std::uint64_t n) { value_.store(get() + n, std::memory_order_relaxed); }
  std::uint64_t get() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> value_{0};
};

struct IntegrityCounts {
  void operator+=(const IntegrityCounts& other) {
    checked_bytes += other.checked_bytes.get();
    spoiled += other.spoiled.get();
  }

  Count checked_bytes;  // that came and had the right checksum
  Count spoiled;        // headers and pieces that had another one
};

}  // namespace hetcoll
