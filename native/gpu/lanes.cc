#include "gpu/lanes.h"

#include <utility>

#include "plan/plan.h"

namespace hetcoll {

DeviceLanes::DeviceLanes(std::shared_ptr<Driver> driver, std::vector<DeviceStream> streams)
    : driver_(std::move(driver)), streams_(std::move(streams)), start_(driver_) {
  if (streams_.size() != kDeviceLanes) throw PlanError("a GPU queue needs a stream for each of its lanes");
  for (unsigned i = 0; i < kDeviceLanes; ++i) ends_.emplace_back(driver_);
}

DeviceEvent DeviceLanes::EventAt(std::uint32_t index) {
  while (events_.size() <= index) events_.emplace_back(driver_);
  return events_[index].get();
}

void DeviceLanes::Fork(const std::array<bool, kDeviceLanes>& used, DeviceStream user) {
  driver_->Record(start_.get(), user);
  for (std::size_t i = 0; i < streams_.size(); ++i) {
    if (used[i]) driver_->WaitEvent(start_.get(), streams_[i]);
  }
}

}  // namespace hetcoll
