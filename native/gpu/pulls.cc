// Programs whose ranks read each other's memory: nothing goes through a slot, so that copy engines do all of it.
//
// Only its own streams write a rank's memory. So after a failure, when streams are let go, none writes into what
// another rank has taken back.
#include <algorithm>

#include "gpu/capture.h"
#include "gpu/queue.h"

namespace hetcoll {
namespace {

// Each pull waits on one of these, and its `credit` comes behind it: there is one for each peer, not many pieces.
constexpr std::array<std::uint8_t, 2 * kCopyLanes> kPullLanes{kOutLanes, kInLanes, kOutLanes + 1, kInLanes + 1};

// What waits for peers comes after all that tells the peers that wait for the same: first all `ready` words, then pulls
// and their `credit` words, then the waits for the others' `credit`. So it ends even where all lanes share a queue.
constexpr std::uint32_t kTell = 0, kPulling = 1, kLast = 2;

}  // namespace

DeviceProgram::DeviceProgram(std::span<const std::uint16_t> readers, std::span<const Pull> all,
                             const std::optional<OwnPart>& own, bool aside)
    : all_local(false), pulls(true) {
  const auto add = [&](DeviceAction action, std::uint32_t level) {
    action.level = level;
    used[action.stream] = true;
    actions.push_back(action);
  };
  for (const std::uint16_t edge : readers) {
    add({.step = DeviceStep::kPublish, .stream = kSignalLane, .edge = edge}, kTell);
    edges.insert(edge);
  }
  if (own) {
    add({.step = DeviceStep::kCopy,
         .stream = kWorkLane,
         .dst = {Area::kRecv, own->dst},
         .src = {Area::kSend, own->src},
         .n = own->n},
        kTell);
  }
  const Area area = aside ? Area::kScratch : Area::kRecv;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Pull& pull = all[i];
    const std::uint8_t lane = kPullLanes[i % kPullLanes.size()];
    add({.step = DeviceStep::kWaitReady, .stream = lane, .edge = pull.edge}, kPulling);
    add({.step = DeviceStep::kPull, .stream = lane, .dst = {area, pull.offset}, .n = pull.n, .peer = pull.peer},
        kPulling);
    add({.step = DeviceStep::kGrant, .stream = lane, .edge = pull.edge}, kPulling);
    edges.insert(pull.edge);
    if (aside) scratch_bytes = std::max(scratch_bytes, pull.offset + pull.n);
  }
  for (std::uint8_t lane = 0; lane < kDeviceLanes; ++lane) {  // so the end of one lane is the end of all
    if (!used[lane] || lane == kSignalLane) continue;
    add({.step = DeviceStep::kRecord, .stream = lane, .event = events}, kPulling);
    add({.step = DeviceStep::kWaitEvent, .stream = kSignalLane, .event = events++}, kPulling);
  }
  for (const std::uint16_t edge : readers) {
    add({.step = DeviceStep::kWaitCredit, .stream = kSignalLane, .edge = edge}, kLast);
  }
  if (!aside) return;
  for (const Pull& pull : all) {
    add({.step = DeviceStep::kCopy,
         .stream = kSignalLane,
         .dst = {Area::kRecv, pull.offset},
         .src = {Area::kScratch, pull.offset},
         .n = pull.n},
        kLast);
  }
}

bool DeviceQueue::PullsDone() {
  const Current current(*driver_);
  return driver_->Done(pulled_.get()) && (capture_ == nullptr || !capture_->Busy());
}

}  // namespace hetcoll
