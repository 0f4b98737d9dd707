// The last calls of a communicator: what they were, and when they began and ended here. Always on.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/clock.h"

namespace hetcoll {

// A counter that runs at one rate on all cores, read in a few instructions; its unit is its own. See `TickClock`.
inline std::uint64_t Ticks() {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
  std::uint64_t now;
  asm volatile("mrs %0, cntvct_el0" : "=r"(now));
  return now;
#else
  return static_cast<std::uint64_t>(NowNs());
#endif
}

// From ticks to NowNs: by how many of both have passed since it was made.
class TickClock {
 public:
  void Now() {
    const std::uint64_t ticks = Ticks() - ticks_;
    if (ticks > 0) rate_ = static_cast<double>(NowNs() - ns_) / static_cast<double>(ticks);
  }
  std::int64_t Ns(std::uint64_t ticks) const {
    return ns_ + static_cast<std::int64_t>(static_cast<double>(static_cast<std::int64_t>(ticks - ticks_)) * rate_);
  }

 private:
  std::uint64_t ticks_ = Ticks();
  std::int64_t ns_ = NowNs();
  double rate_ = 0;
};

// A call as it was recorded. `end_ns` is 0 while it runs, and where the host does not see the end of it, on a GPU.
struct CallRecord {
  std::uint64_t number;
  int shape;
  std::int64_t begin_ns;  // of NowNs
  std::int64_t end_ns;
};

// Calls by number, from 1 on. Written by one thread at a time, read by any.
class FlightRecorder {
  struct alignas(32) Entry {  // which makes its place a shift of its number
    std::atomic<std::uint64_t> begin{0};
    std::atomic<std::uint64_t> end{0};  // before `begin`: of the call that had this place before
    std::atomic<int> shape{0};
  };

 public:
  // By which a call that ends finds its place, unless another call has it by then.
  class Mark {
   public:
    void End() const {
      Entry* const entry = entry_;
      if (entry->begin.load(std::memory_order_relaxed) == begin_) [[likely]] {
        entry->end.store(Ticks(), std::memory_order_relaxed);
      }
    }

   private:
    friend FlightRecorder;
    Entry* entry_ = nullptr;
    std::uint64_t begin_ = 0;
  };

  std::uint64_t count() const { return count_.load(std::memory_order_acquire); }
  void Begin(int shape, Mark& mark) {
    const std::uint64_t number = count_.load(std::memory_order_relaxed) + 1;
    Entry& entry = entries_[number % kEntries];
    const std::uint64_t begin = Ticks();
    mark.entry_ = &entry;
    mark.begin_ = begin;
    entry.shape.store(shape, std::memory_order_relaxed);
    entry.begin.store(begin, std::memory_order_relaxed);
    count_.store(number, std::memory_order_release);
  }
  int Find(std::uint64_t number) const {  // -1 where it is to come, or long ago
    const std::uint64_t now = count();
    if (number == 0 || number > now || now - number >= kEntries) return -1;
    return entries_[number % kEntries].shape.load(std::memory_order_relaxed);
  }
  // The last ones, at most so many, the oldest first. One that is overwritten meanwhile is left out.
  std::vector<CallRecord> Last(std::size_t most, const TickClock& clock) const {
    std::vector<CallRecord> found;
    const std::uint64_t now = count();
    for (std::uint64_t number = now - std::min<std::uint64_t>({now, most, kEntries - 1}) + 1; number <= now; ++number) {
      const Entry& entry = entries_[number % kEntries];
      const std::uint64_t begin = entry.begin.load(std::memory_order_relaxed);
      const std::uint64_t end = entry.end.load(std::memory_order_relaxed);
      const CallRecord record{number, entry.shape.load(std::memory_order_relaxed), clock.Ns(begin),
                              end < begin ? 0 : clock.Ns(end)};
      std::atomic_thread_fence(std::memory_order_acquire);
      if (count() - number < kEntries - 1) found.push_back(record);
    }
    return found;
  }

 private:
  static constexpr std::uint64_t kEntries = 1024;
  std::atomic<std::uint64_t> count_{0};
  std::array<Entry, kEntries> entries_{};
};

}  // namespace hetcoll
