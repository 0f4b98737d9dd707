#include "gpu/capture.h"

#include <algorithm>
#include <atomic>
#include <utility>

namespace hetcoll {

DeviceCapture::DeviceCapture(std::shared_ptr<Driver> driver, const DriverFunctions& kernels, std::byte* staging,
                             const CaptureWords& words)
    : driver_(std::move(driver)), signals_(kernels), lanes_(driver_, 0), staging_(staging), words_(words) {
  if (!signals_.wanted()) throw PlanError("captured programs need kernels that signal");
}

bool DeviceCapture::Taken(DeviceStream user) {
  const Current current(*driver_);
  const std::uint64_t mine = driver_->Capture(user);
  for (std::size_t i = 0; i < kDeviceLanes; ++i) {
    if (!lanes_.made(i)) continue;
    const std::uint64_t its = driver_->Capture(lanes_[i]);
    if (its != 0 && its != mine) return true;
  }
  return false;
}

DeviceEvent DeviceCapture::EventAt(std::uint32_t index) {
  while (events_.size() <= index) events_.emplace_back(driver_);
  return events_[index].get();
}

void DeviceCapture::Enqueue(const DeviceProgram& program, std::uint32_t lag, DeviceStream user, const Work& work) {
  for (auto& [number, edge] : edges_) edge.next = 0;
  level_ = 0;
  tells_ = {};
  told_ = {};
  after_ = {};
  used_events_ = 0;
  std::uint64_t* const ended = words_.begun + 1;
  signals_.Write(*driver_, words_.begun, words_.begun, 1, user);
  lanes_.Fork(program.used, user);
  for (const DeviceAction& action : program.actions) {
    Order(action, lag);
    Run(action, work);
  }
  for (std::size_t i = 0; i < kDeviceLanes; ++i) {
    if (!program.used[i]) continue;
    driver_->Record(lanes_.end(i), lanes_[i]);
    driver_->WaitEvent(lanes_.end(i), user);
  }
  signals_.Write(*driver_, ended, ended, 1, user);
}

void DeviceCapture::Order(const DeviceAction& a, std::uint32_t lag) {
  if (a.level != level_) {
    for (std::size_t i = 0; i < kDeviceLanes; ++i) {
      if (!tells_[i]) continue;
      told_[i].push_back({level_, used_events_});
      driver_->Record(EventAt(used_events_++), lanes_[i]);
    }
    tells_ = {};
    level_ = a.level;
  }
  if (a.Waits()) {
    const bool meets = a.step == DeviceStep::kLocal || a.step == DeviceStep::kMessages;
    const std::uint32_t least = meets ? 1 : lag;
    for (std::size_t i = 0; i < kDeviceLanes; ++i) {
      const auto lower = [&](const Told& told) { return told.level + least <= level_; };
      const auto end = std::partition_point(told_[i].begin(), told_[i].end(), lower);
      const auto count = static_cast<std::size_t>(end - told_[i].begin());
      std::size_t& after = after_[a.stream][i];
      if (i == a.stream || count <= after) continue;
      driver_->WaitEvent(EventAt(told_[i][count - 1].event), lanes_[a.stream]);
      after = count;
    }
  }
  if (a.Tells()) tells_[a.stream] = true;
}

void DeviceCapture::Run(const DeviceAction& a, const Work& work) {
  const DeviceStream stream = lanes_[a.stream];
  const bool talks = a.step == DeviceStep::kCopyOut || a.step == DeviceStep::kCopyIn ||
                     a.step == DeviceStep::kReduceIn || (a.step < DeviceStep::kLocal && (a.Waits() || a.Tells()));
  if (!talks) return work(a, nullptr, lanes_);
  Edge& edge = edges_.at(a.edge);
  std::uint64_t* const ready = edge.slots.Ready(edge.next);
  std::uint64_t* const credit = edge.slots.Credit(edge.next);
  switch (a.step) {
    case DeviceStep::kWaitCredit:
      return signals_.Wait(*driver_, credit, ready, 0, stream);
    case DeviceStep::kWaitReady:
      return signals_.Wait(*driver_, ready, credit, 1, stream);
    case DeviceStep::kPublish:
      ++edge.next;
      return signals_.Write(*driver_, ready, ready, 1, stream);
    case DeviceStep::kGrant:
      ++edge.next;
      return signals_.Write(*driver_, credit, credit, 1, stream);
    default:
      return work(a, edge.slots.At(edge.next), lanes_);
  }
}

bool DeviceCapture::Busy() const {
  const auto load = [](const std::uint64_t* word) {
    return std::atomic_ref(const_cast<std::uint64_t&>(*word)).load(std::memory_order_acquire);
  };
  return load(words_.seen + 1) != load(words_.seen);  // `ended` first: it is never ahead
}

}  // namespace hetcoll
