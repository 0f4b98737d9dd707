// The streams of a queue, and events between them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
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

// A lane's stream is made when a program first uses it: a driver has few hardware queues, and what waits in one stream
// holds up whatever shares its queue.
class DeviceLanes {
 public:
  DeviceLanes(std::shared_ptr<Driver> driver, int priority);

  bool made(std::size_t lane) const { return lanes_[lane].has_value(); }
  // Of a lane that was made.
  DeviceStream operator[](std::size_t lane) const { return lanes_[lane]->stream.get(); }
  DeviceEvent EventAt(std::uint32_t index);

  // The lanes in use begin after what is on `user` now.
  void Fork(const std::array<bool, kDeviceLanes>& used, DeviceStream user);
  // Destroys what was made; nothing may be under way.
  void Drop() {
    for (auto& lane : lanes_) lane.reset();
  }
  // Whether all work on them is done. A Fault when the device has failed.
  bool Idle() const;
  DeviceEvent end(std::size_t lane) const { return lanes_[lane]->end.get(); }

 private:
  struct Lane {
    Lane(const std::shared_ptr<Driver>& driver, int priority) : stream(driver, priority), end(driver) {}
    Stream stream;
    Event end;  // of its last call
  };

  std::shared_ptr<Driver> driver_;
  int priority_;
  std::array<std::optional<Lane>, kDeviceLanes> lanes_;
  std::vector<Event> events_;
  Event start_;
};

}  // namespace hetcoll
