#include "gpu/lanes.h"

#include <algorithm>
#include <utility>

namespace hetcoll {

DeviceLanes::DeviceLanes(std::shared_ptr<Driver> driver, int priority)
    : driver_(std::move(driver)), priority_(priority), start_(driver_) {}

DeviceEvent DeviceLanes::EventAt(std::uint32_t index) {
  while (events_.size() <= index) events_.emplace_back(driver_);
  return events_[index].get();
}

void DeviceLanes::Fork(const std::array<bool, kDeviceLanes>& used, DeviceStream user) {
  driver_->Record(start_.get(), user);
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    if (!used[i]) continue;
    if (!made(i)) lanes_[i].emplace(driver_, priority_);
    driver_->WaitEvent(start_.get(), lanes_[i]->stream.get());
  }
}

bool DeviceLanes::Idle() const {
  return std::all_of(lanes_.begin(), lanes_.end(),
                     [&](const auto& lane) { return !lane || driver_->Idle(lane->stream.get()); });
}

}  // namespace hetcoll
