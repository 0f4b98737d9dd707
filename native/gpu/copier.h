// A GPU's copies for one-sided messages, on streams of their own, and what these have to do with streams of users.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/copier.h"
#include "gpu/driver.h"

namespace hetcoll {

class DeviceCopier final : public Copier {
 public:
  // `streams`, by Way, are nobody else's: nothing on them waits.
  DeviceCopier(std::shared_ptr<Driver> driver, const std::array<DeviceStream, 2>& streams);

  void Copy(Way way, void* dst, const void* src, std::size_t n) override;
  void CopyEach(Way way, std::span<const Move> moves) override;
  std::uint64_t Mark(Way way) override;
  bool Passed(Way way, std::uint64_t mark) override;

  // From now on this kernel (devices/kernels/pieces.h) makes the shorter ones of CopyEach.
  void UseKernel(DeviceFunction kernel) { kernel_.store(kernel, std::memory_order_release); }

  // For any thread, beside the above. What is on `user` now, or nothing where that is done; a Fault where `user` is
  // captured into a graph, which would not do it again.
  Gate After(DeviceStream user);
  // What comes on `user` from now on waits until this word of pinned memory holds `value` or more; when it does not any
  // more.
  Gate Wait(std::uint64_t* word, std::uint64_t value, DeviceStream user);
  // What the device has failed with, or nothing.
  std::string Failure();

 private:
  struct Line {
    DeviceStream stream;
    std::deque<std::pair<std::uint64_t, Event>> under_way;
    std::vector<Event> spare;
    std::uint64_t marks = 0;
    std::uint64_t passed = 0;
    bool begun = false;  // something, since the last mark
  };
  Line& LineOf(Way way) { return lines_[static_cast<std::size_t>(way)]; }
  void CheckFree(DeviceStream user);
  Gate Recorded(DeviceStream user);

  std::shared_ptr<Driver> driver_;
  std::atomic<DeviceFunction> kernel_ = nullptr;
  std::array<Line, 2> lines_;
};

}  // namespace hetcoll
