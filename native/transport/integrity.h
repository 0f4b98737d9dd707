// HETCOLL_INTEGRITY: which bytes a link puts under a checksum.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace hetcoll {

enum class Integrity : std::uint8_t { kOff = 0, kSampled = 1, kAll = 2 };

// What kSampled checks besides headers. Over TCP the first of each kSmallOf messages of up to kSmall bytes, and 1 byte
// of kSampleOf of others: more than this costs more than 1 % of a call's instructions (benchmarks/integrity.py). Over
// verbs all of those messages, and 1 byte of kFramesOf.
inline constexpr std::size_t kSmall = std::size_t{1} << 10;
inline constexpr std::size_t kSmallOf = 16;
inline constexpr std::size_t kSampleOf = 256;
inline constexpr std::size_t kFramesOf = 64;

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
    resent += other.resent.get();
  }

  Count checked_bytes;  // that came and had the right checksum
  Count spoiled;        // headers and pieces that had another one
  Count resent;         // of those, what came right when it was sent again
};

// What is to be had of a link that spoils now and then. One that spoils more than this within so long is not to be
// relied on: every spoiled piece costs a new connection, or a rail.
class Spoils {
 public:
  static constexpr std::size_t kMost = 8;
  static constexpr std::int64_t kWithinNs = 60'000'000'000;

  // One more; whether there are too many.
  bool Add(std::int64_t now) {
    std::erase_if(when_, [now](std::int64_t then) { return now - then > kWithinNs; });
    when_.push_back(now);
    return when_.size() > kMost;
  }
  std::string Times() const { return ", for the " + std::to_string(when_.size()) + "th time within a minute"; }

 private:
  std::vector<std::int64_t> when_;
};

}  // namespace hetcoll
