#include "gpu/copier.h"

#include <algorithm>

#include "transport/transport.h"

namespace hetcoll {
namespace {

// As devices/kernels/arguments.h has it.
struct Pieces {
  static constexpr std::size_t kMost = 128;

  Move piece[kMost];
  unsigned count;
  unsigned blocks;
};
static_assert(sizeof(Pieces) == 24 * Pieces::kMost + 8);

constexpr std::size_t kLong = std::size_t{1} << 20;  // what a copy engine moves as fast
constexpr std::size_t kFew = 3;                      // moves that it begins as fast
constexpr unsigned kThreads = 512, kBlocks = 64;     // of a launch: half of a GPU

}  // namespace

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

void DeviceCopier::CopyEach(Way way, std::span<const Move> moves) {
  const DeviceFunction kernel = kernel_.load(std::memory_order_acquire);
  if (kernel == nullptr || moves.size() <= kFew) return Copier::CopyEach(way, moves);
  const Current current(*driver_);
  Line& line = LineOf(way);
  line.begun = true;
  Pieces pieces;
  const auto launch = [&] {
    if (pieces.count == 0) return;
    pieces.blocks = std::max(1u, kBlocks / pieces.count);
    void* params[] = {&pieces};
    driver_->Launch(kernel, pieces.blocks * std::min(pieces.count, kBlocks), kThreads, params, line.stream);
    pieces.count = 0;
  };
  pieces.count = 0;
  for (const Move& move : moves) {
    if (move.n == 0) continue;
    if (move.n >= kLong) {
      driver_->Copy(move.dst, move.src, move.n, line.stream);
      continue;
    }
    pieces.piece[pieces.count++] = move;
    if (pieces.count == Pieces::kMost) launch();
  }
  launch();
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
