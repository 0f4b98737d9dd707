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
constexpr std::size_t kRow = std::size_t{64} << 10;  // bytes of a table's row: so blocks end together
constexpr std::size_t kMostRows = 64;                // that are left out where a table ends
constexpr unsigned kThreads = 256, kBlocks = 264;    // of a launch: a quarter of a GPU's threads

}  // namespace

void MoveTable::Use(std::span<Move> rows) {
  rows_ = rows;
  free_ = rows.size();
}

std::pair<std::span<const Move>, std::size_t> MoveTable::Add(std::span<const Move> moves) {
  const auto take = [&](std::size_t n) {
    next_ = (next_ + n) % rows_.size();
    free_ -= n;
    unmarked_ += n;
  };
  const std::size_t end = rows_.size() - next_;
  if (end < kMostRows && end <= free_) take(end);  // a launch's rows lie behind each other
  const std::size_t first = next_, room = std::min(free_, rows_.size() - first);
  std::size_t moved = 0, n = 0;
  for (; moved < moves.size(); ++moved) {
    const auto [dst, src, nbytes] = moves[moved];
    if (n + (nbytes + kRow - 1) / kRow > room) break;
    for (std::size_t at = 0; at < nbytes; at += kRow) {
      rows_[first + n++] = {static_cast<std::byte*>(dst) + at, static_cast<const std::byte*>(src) + at,
                            std::min(kRow, nbytes - at)};
    }
  }
  if (n > 0) take(n);
  return {rows_.subspan(first, n), moved};
}

void MoveTable::Mark(std::uint64_t mark) {
  if (unmarked_ > 0) marked_.emplace_back(mark, unmarked_);
  unmarked_ = 0;
}

void MoveTable::Pass(std::uint64_t mark) {
  for (; !marked_.empty() && marked_.front().first <= mark; marked_.pop_front()) free_ += marked_.front().second;
}

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

void DeviceCopier::UseKernels(DeviceFunction few, DeviceFunction many, std::span<Move> table) {
  few_ = few;
  many_ = many;
  table_.Use(table);
  kernels_.store(true, std::memory_order_release);
}

void DeviceCopier::CopyEach(Way way, std::span<const Move> moves) {
  if (!kernels_.load(std::memory_order_acquire) || moves.size() <= kFew) return Copier::CopyEach(way, moves);
  const Current current(*driver_);
  Line& line = LineOf(way);
  line.begun = true;
  short_.clear();
  for (const Move& move : moves) {
    if (move.n >= kLong) {
      driver_->Copy(move.dst, move.src, move.n, line.stream);
    } else if (move.n > 0) {
      short_.push_back(move);
    }
  }
  for (std::span<const Move> rest = short_; !rest.empty();) {
    const std::size_t n = std::min(rest.size(), Pieces::kMost);
    if (way == Way::kIn && rest.size() > n) {
      if (const auto [rows, moved] = table_.Add(rest); moved > 0) {
        LaunchMany(rows, line.stream);
        rest = rest.subspan(moved);
        continue;
      }
    }
    LaunchFew(rest.first(n), line.stream);  // also where the table has no room: nothing here waits
    rest = rest.subspan(n);
  }
}

void DeviceCopier::LaunchMany(std::span<const Move> rows, DeviceStream stream) {
  const Move* table = rows.data();
  auto count = static_cast<unsigned>(rows.size());
  void* params[] = {&table, &count};
  driver_->Launch(many_, std::min(count, kBlocks), kThreads, params, stream);
}

void DeviceCopier::LaunchFew(std::span<const Move> moves, DeviceStream stream) {
  Pieces pieces;
  std::copy(moves.begin(), moves.end(), pieces.piece);
  pieces.count = static_cast<unsigned>(moves.size());
  pieces.blocks = std::max(1u, kBlocks / pieces.count);
  void* params[] = {&pieces};
  driver_->Launch(few_, pieces.blocks * std::min(pieces.count, kBlocks), kThreads, params, stream);
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
  if (way == Way::kIn) table_.Mark(line.marks);
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
  if (way == Way::kIn) table_.Pass(line.passed);
  return mark <= line.passed;
}

void DeviceCopier::CheckFree(DeviceStream user) {
  if (!driver_->Capturing(user)) return;
  throw Fault(FaultKind::kSystem, -1, "it is captured into a graph, and no graph takes one-sided messages");
}

Gate DeviceCopier::Recorded(DeviceStream user) {
  std::unique_ptr<Event> event = SpareEvent();
  driver_->Record(event->get(), user);
  if (driver_->Done(event->get())) {
    std::lock_guard lock(spare_mutex_);
    spare_.push_back(std::move(event));
    return nullptr;
  }
  return [driver = driver_, waited = std::shared_ptr<Event>(std::move(event))] {
    const Current current(*driver);
    return driver->Done(waited->get());
  };
}

std::unique_ptr<Event> DeviceCopier::SpareEvent() {
  std::lock_guard lock(spare_mutex_);
  if (spare_.empty()) return std::make_unique<Event>(driver_);
  std::unique_ptr<Event> event = std::move(spare_.back());
  spare_.pop_back();
  return event;
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
