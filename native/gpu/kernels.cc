// Calls that one kernel does, or a few: all-reduces and messages of few bytes.
#include <cstring>

#include "gpu/queue.h"

namespace hetcoll {

void DeviceQueue::EnqueueKernel(const KernelShape& shape, const std::byte* send, std::byte* recv, DeviceStream user,
                                bool capturing) {
  const Current current(*driver_);
  if (capturing) {
    FollowCaptured(user);
  } else if (kernel_stream_ != user) {
    driver_->WaitEvent(kernel_.get(), user);
  }
  kernel_arguments_ = capturing ? shape.captured : shape.arguments;
  std::memcpy(kernel_arguments_.data(), &recv, sizeof recv);
  std::memcpy(kernel_arguments_.data() + sizeof recv, &send, sizeof send);
  void* params[] = {kernel_arguments_.data()};
  driver_->Launch(shape.function, shape.blocks, shape.threads, params, user);
  if (capturing) return EndCaptured(user);
  driver_->Record(kernel_.get(), user);  // now, since the stream may be gone when the next call comes
  kernel_stream_ = user;
  user_calls_.Pass(user);
}

// On the user's own stream, or on a lane where copies run beside it.
void DeviceQueue::RunMessages(const MessagesKernel& kernel, const Bases& bases, DeviceStream stream, bool capturing) {
  if (!capturing) {
    for (const std::uint16_t ring : kernel.rings) {
      const auto found = rings_.find(ring);
      if (found != rings_.end() && found->second.stream != stream)
        driver_->WaitEvent(found->second.last->get(), stream);
    }
  }
  kernel_arguments_ = capturing ? kernel.captured : kernel.arguments;
  for (std::size_t i = 0; i < kernel.places.size(); ++i) {
    std::byte* const at = bases.At(kernel.places[i]);
    std::memcpy(kernel_arguments_.data() + i * kMessageStride, &at, sizeof at);
  }
  void* params[] = {kernel_arguments_.data()};
  driver_->Launch(kernel.function, kernel.blocks, kernel.threads, params, stream);
  if (capturing) return;
  driver_->Record(kernel.end->get(), stream);  // now: see EnqueueKernel
  for (const std::uint16_t ring : kernel.rings) rings_[ring] = {kernel.end, stream};
  user_calls_.Pass(stream);  // rings on a GPU have no words that the host could read
}

}  // namespace hetcoll
