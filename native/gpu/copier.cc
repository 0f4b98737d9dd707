#include "gpu/copier.h"

#include "transport/transport.h"

namespace hetcoll {

DeviceCopier::DeviceCopier(std::shared_ptr<Driver> driver, const std::array<DeviceStream, 2>& streams)
    : driver_(std::move(driver)) {
  for (std::size_t i = 0; i < streams.size(); ++i) lines_[i].stream = streams[i];
}

void DeviceCopier::Copy(Way way, void* dst, const void* src, std::size_t n) {
  const Current current(*driver_);
  Line& line = LineOf(way);
  line.begun = true;
  driver_->Copy(dst, src, n, line.stream);
}

std::uint64_t DeviceCopier::Mark(Way way) {
  Line& line = LineOf(way);
  if (!line.begun) return line.marks;
  const Current current(*driver_);
  if (line.spare.empty()) line.spare.emplace_back(driver_);
  driver_->Record(line.spare.back().get(), line.stream);
  line.under_way.emplace_back(++line.marks, std::move(line.spare.back()));
  line.spare.pop_back();
  line.begun = false;
  return line.marks;
}

bool DeviceCopier::Passed(Way way, std::uint64_t mark) {
  Line& line = LineOf(way);
  if (mark <= line.passed) return true;
  const Current current(*driver_);
  while (!line.under_way.empty() && driver_->Done(line.under_way.front().second.get())) {
    line.passed = line.under_way.front().first;
    line.spare.push_back(std::move(line.under_way.front().second));
    line.under_way.pop_front();
  }
  return mark <= line.passed;
}

void DeviceCopier::CheckFree(DeviceStream user) {
  if (!driver_->Capturing(user)) return;
  throw Fault(FaultKind::kSystem, -1, "it is captured into a graph, and no graph takes one-sided messages");
}

Gate DeviceCopier::Recorded(DeviceStream user) {
  auto event = std::make_shared<Event>(driver_);
  driver_->Record(event->get(), user);
  if (driver_->Done(event->get())) return nullptr;
  return [driver = driver_, event] {
    const Current current(*driver);
    return driver->Done(event->get());
  };
}

Gate DeviceCopier::After(DeviceStream user) {
  const Current current(*driver_);
  CheckFree(user);
  return Recorded(user);
}

std::string DeviceCopier::Failure() {
  try {
    const Current current(*driver_);
    driver_->Idle(LineOf(Way::kIn).stream);
    return "";
  } catch (const Fault& fault) {
    return fault.what();
  }
}

Gate DeviceCopier::Wait(std::uint64_t* word, std::uint64_t value, DeviceStream user) {
  const Current current(*driver_);
  CheckFree(user);
  driver_->WaitValue(word, value, user);
  return Recorded(user);
}

}  // namespace hetcoll
