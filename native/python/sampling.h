// HETCOLL_CHECK=sampled: which calls are checked.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/types.h"

namespace hetcoll {

class Sampling {
 public:
  // From here on `IsDue` counts. Before other threads call. `mixed`: some ranks have no GPU, and what they do for a
  // call among GPUs, and for its check, is what counts on all.
  void Begin(bool mixed) {
    on_ = true;
    mixed_ = mixed;
  }

  // Whether a call that reduces so many bytes of each rank is to be checked: then it is for the slow path, where the
  // count begins anew. All ranks come to the same answer, since each of these calls is counted once, by what it has in
  // common.
  bool IsDue(int collective, std::size_t nbytes, bool on_gpu) {
    if (!on_) [[likely]]
      return false;
    const nanobind::ft_lock_guard lock(mutex_);
    return Count(collective, nbytes, on_gpu);
  }

  // The same for the slow path.
  bool TakeDue(int collective, std::size_t nbytes, bool on_gpu) {
    if (!on_) return false;
    const nanobind::ft_lock_guard lock(mutex_);
    const bool due = Count(collective, nbytes, on_gpu);
    if (due) called_ = 0;
    return due;
  }

  // As before `TakeDue`, which said `due`: the call was refused here, and the other ranks have never heard of it.
  void Return(int collective, std::size_t nbytes, bool on_gpu, bool due) {
    if (!on_ || !Reduces(collective)) return;
    const nanobind::ft_lock_guard lock(mutex_);
    const Costs& costs = CostsOf(on_gpu);
    if (due) {
      called_ += EnoughFor(costs, nbytes);
    } else {
      called_ -= std::min(called_, costs.call + costs.call_byte * nbytes);
    }
  }

 private:
  // Picoseconds: what a call takes at least, and a check at most, and each for a byte.
  struct Costs {
    std::uint64_t call, call_byte, check, check_byte;
  };
  static constexpr Costs kOnHost{1'500'000, 50, 2'000'000'000, 10'000};
  static constexpr Costs kOnGpu{3'000'000, 2, 2'000'000'000, 20};

  static bool Reduces(int collective) {
    const auto kind = static_cast<Collective>(collective);
    return kind == Collective::kAllreduce || kind == Collective::kReduceScatter || kind == Collective::kReduce;
  }

  const Costs& CostsOf(bool on_gpu) const { return on_gpu && !mixed_ ? kOnGpu : kOnHost; }

  // What calls take that pay for a check: checks take less than a hundredth of it.
  static std::uint64_t EnoughFor(const Costs& costs, std::size_t nbytes) {
    return 100 * (costs.check + costs.check_byte * nbytes);
  }

  bool Count(int collective, std::size_t nbytes, bool on_gpu) {
    if (!Reduces(collective)) return false;
    const Costs& costs = CostsOf(on_gpu);
    if (called_ >= EnoughFor(costs, nbytes)) return true;
    called_ += costs.call + costs.call_byte * nbytes;
    return false;
  }

  bool on_ = false;
  bool mixed_ = false;
  nanobind::ft_mutex mutex_;
  std::uint64_t called_ = 0;  // since a call was checked: picoseconds that calls took at least
};

}  // namespace hetcoll
