// How far calls have come: who waits for their ends, and who asks for them.
#include <algorithm>

#include "gpu/capture.h"
#include "gpu/queue.h"

namespace hetcoll {

void DeviceQueue::Join(DeviceStream user) {
  if (driver_->Capturing(user)) return FollowCaptured(user);
  JoinLanes(user);
  driver_->WaitEvent(kernel_.get(), user);  // what ran on streams of the user's is joined where others wait for it
  driver_->WaitEvent(local_.get(), user);
  for (const SlotEdge& edge : edges_) {
    if (edge.last) driver_->WaitEvent(edge.last->get(), user);
  }
  for (const auto& [ring, end] : rings_) driver_->WaitEvent(end.last->get(), user);
}

void DeviceQueue::JoinLanes(DeviceStream user) {
  for (std::size_t i = 0; i < kDeviceLanes; ++i) {
    if (ended_[i]) driver_->WaitEvent(lanes_.end(i), user);
  }
  joined_ = user;
  is_joined_ = true;
}

bool DeviceQueue::Idle() {
  const Current current(*driver_);
  return driver_->Done(kernel_.get()) && driver_->Done(local_.get()) &&
         std::all_of(edges_.begin(), edges_.end(),
                     [&](const SlotEdge& edge) { return !edge.last || driver_->Done(edge.last->get()); }) &&
         std::all_of(rings_.begin(), rings_.end(),
                     [&](const auto& r) { return driver_->Done(r.second.last->get()); }) &&
         lanes_.Idle() && (capture_ == nullptr || !capture_->Busy());
}

std::uint64_t DeviceQueue::Passed() {
  const Current current(*driver_);
  return user_calls_.Count();
}

bool DeviceQueue::Capturing(DeviceStream user) {
  const Current current(*driver_);
  return driver_->Capturing(user);
}

// Calls share their state, so they come one after another in a graph as well, whatever streams it is captured on. On
// one stream they do so by themselves: an edge past all that lies between two calls would make branches of a chain.
void DeviceQueue::FollowCaptured(DeviceStream user) {
  if (captured_in_ == 0 || captured_on_ == user) return;
  if (driver_->Capture(user) == captured_in_) driver_->WaitEvent(captured_.get(), user);
}

void DeviceQueue::EndCaptured(DeviceStream user) {
  driver_->Record(captured_.get(), user);
  captured_in_ = driver_->Capture(user);
  captured_on_ = user;
}

}  // namespace hetcoll
