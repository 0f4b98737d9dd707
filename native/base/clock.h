// Time and waiting, as cheap as the processor offers them.
#pragma once

#include <chrono>
#include <cstdint>

namespace hetcoll {

inline std::int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

inline constexpr std::int64_t kForever = INT64_MAX;

// The deadline `seconds` from now; a negative or huge number means never.
inline std::int64_t DeadlineNs(double seconds) {
  return seconds < 0 || seconds > 1e9 ? kForever : NowNs() + static_cast<std::int64_t>(seconds * 1e9);
}

inline void CpuRelax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

}  // namespace hetcoll
