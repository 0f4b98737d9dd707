// The streams of a queue, and events between them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "gpu/driver.h"

namespace hetcoll {

// Lanes, by what they do. There are two for each direction of copies, which take turns: a stream that waits for a value
// in host memory leaves its copy engine idle for some microseconds before the next copy (seen on H200s: 5 to 7 us of
// the 73 that 3 MiB take), and meanwhile the other one copies. A signal in the same stream would wait for that one as
// well, so signals have a stream of their own, but for messages, whose copies take no turns (Signals).
inline constexpr unsigned kCopyLanes = 2;
enum DeviceLane : std::uint8_t {
  kOutLanes,                            // fill slots
  kInLanes = kOutLanes + kCopyLanes,    // empty slots
  kSignalLane = kInLanes + kCopyLanes,  // says that slots are full, and that they are empty
  kWorkLane,                            // reductions, and copies inside the GPU
  kLocalLane,                           // what the vendor's library does
};
inline constexpr unsigned kDeviceLanes = kLocalLane + 1;

class DeviceLanes {
 public:
  DeviceLanes(std::shared_ptr<Driver> driver, std::vector<DeviceStream> streams);

  DeviceStream operator[](std::size_t lane) const { return streams_[lane]; }
  DeviceEvent EventAt(std::uint32_t index);

  // The lanes in use begin after what is on `user` now.
  void Fork(const std::array<bool, kDeviceLanes>& used, DeviceStream user);
  DeviceEvent end(std::size_t lane) const { return ends_[lane].get(); }

 private:
  std::shared_ptr<Driver> driver_;
  std::vector<DeviceStream> streams_;
  std::vector<Event> events_;
  Event start_;
  std::vector<Event> ends_;  // of each lane's last call
};

}  // namespace hetcoll
