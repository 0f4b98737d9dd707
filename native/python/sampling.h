// HETCOLL_CHECK=sampled: which calls are checked.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>

#include "base/types.h"

namespace hetcoll {

class Sampling {
 public:
  // From here on `IsDue` counts. Before other threads call.
  void Begin() { on_ = true; }

  // Whether a call that reduces so many bytes of each rank is to be checked: then it is for the slow path, where the
  // count begins anew. All ranks come to the same answer, since each of these calls is counted once, by what it has in
  // common. Checks take less than a hundredth of what calls take, where a call takes no less than 1.5 us and 0.05 ns a
  // byte, and a check no more than 2 ms and 10 ns a byte.
  bool IsDue(int collective, std::size_t nbytes) {
    if (!on_) [[likely]]
      return false;
    const nanobind::ft_lock_guard lock(mutex_);
    return Count(collective, nbytes);
  }

  // The same for the slow path.
  bool TakeDue(int collective, std::size_t nbytes) {
    if (!on_) return false;
    const nanobind::ft_lock_guard lock(mutex_);
    const bool due = Count(collective, nbytes);
    if (due) called_ = 0;
    return due;
  }

 private:
  bool Count(int collective, std::size_t nbytes) {
    const auto kind = static_cast<Collective>(collective);
    if (kind != Collective::kAllreduce && kind != Collective::kReduceScatter && kind != Collective::kReduce) {
      return false;
    }
    constexpr std::uint64_t kOneOf = 100;
    constexpr std::uint64_t kCall = 150'000, kCallByte = 5, kCheck = 200'000'000, kCheckByte = 1000;  // ns / 100
    if (called_ >= kOneOf * (kCheck + kCheckByte * nbytes)) return true;
    called_ += kCall + kCallByte * nbytes;
    return false;
  }

  bool on_ = false;
  nanobind::ft_mutex mutex_;
  std::uint64_t called_ = 0;  // since a call was checked: hundredths of a ns that calls took at least
};

}  // namespace hetcoll
