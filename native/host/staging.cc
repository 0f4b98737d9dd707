#include "host/staging.h"

namespace hetcoll {
namespace {

constexpr std::size_t kMostCopy = std::size_t{256} << 10;  // the next one is filled meanwhile
constexpr std::size_t kMarkBytes = std::size_t{128} << 10;

}  // namespace

std::span<std::byte> Inlet::Room(std::size_t most) {
  const std::size_t wanted = std::min({most, kMostCopy, ring_.size() / 2});
  const std::span<std::byte> room = ring_.Room(wanted);
  if (room.size() == wanted) return room;  // to ask the driver takes half as long as to copy
  Free();
  return ring_.Room(wanted);
}

void Inlet::Free() {
  for (; !under_way_.empty() && Passed(under_way_.front().mark); under_way_.pop_front()) {
    ring_.Return(under_way_.front().nbytes);
  }
}

void Inlet::Land(std::byte* dst, std::size_t n) {
  if (n == 0) return;
  const std::byte* src = ring_.Room(n).data();
  ring_.Take(n);
  const bool follows = dst == dst_ + nbytes_ && src == src_ + nbytes_ && nbytes_ < kMarkBytes;
  if (nbytes_ == 0 || !follows) {
    Begin();
    dst_ = dst;
    src_ = src;
  }
  nbytes_ += n;
  unmarked_ += n;
  if (unmarked_ >= std::min(kMarkBytes, ring_.size() / 4)) Mark();
}

void Inlet::Begin() {
  if (nbytes_ > 0) copier_.Copy(Way::kIn, dst_, src_, nbytes_);
  nbytes_ = 0;
}

std::uint64_t Inlet::Mark() {
  Begin();
  if (unmarked_ > 0) {
    last_ = copier_.Mark(Way::kIn);
    under_way_.push_back({last_, unmarked_});
    unmarked_ = 0;
  }
  return last_;
}

bool Inlet::Poll() {
  Mark();
  const std::size_t before = under_way_.size();
  Free();
  return under_way_.size() < before;
}

void Inlet::Clear() {
  nbytes_ = unmarked_ = 0;
  under_way_.clear();
}

std::size_t Outlet::Begin(const std::byte* src, std::size_t n) {
  const std::span<std::byte> room = ring_.Room(std::min({n, kMostCopy, ring_.size() / 2}));
  if (room.empty()) return 0;
  ring_.Take(room.size());
  BeginTo(room.data(), src, room.size());
  segments_.back().ours = true;
  if (unmarked_bytes_ >= kMarkBytes) Mark();
  return room.size();
}

void Outlet::BeginTo(std::byte* to, const std::byte* src, std::size_t n) {
  copier_.Copy(Way::kOut, to, src, n);
  segments_.push_back({to, n, 0, false});
  ++unmarked_;
  unmarked_bytes_ += n;
}

void Outlet::Mark() {
  if (unmarked_ == 0) return;
  const std::uint64_t mark = copier_.Mark(Way::kOut);
  std::for_each(segments_.end() - static_cast<std::ptrdiff_t>(unmarked_), segments_.end(),
                [&](Segment& segment) { segment.mark = mark; });
  unmarked_ = unmarked_bytes_ = 0;
}

std::span<const std::byte> Outlet::Front() {
  if (segments_.empty() || segments_.front().mark == 0) return {};
  const Segment& front = segments_.front();
  if (!copier_.Passed(Way::kOut, front.mark)) return {};
  return {front.at, front.nbytes};
}

void Outlet::Pop(std::size_t n) {
  Segment& front = segments_.front();
  front.at += n;
  front.nbytes -= n;
  if (front.ours) ring_.Return(n);
  if (front.nbytes == 0) segments_.pop_front();
}

void Outlet::Clear() {
  for (const Segment& segment : segments_) {
    if (segment.ours) ring_.Return(segment.nbytes);
  }
  segments_.clear();
  unmarked_ = unmarked_bytes_ = 0;
}

}  // namespace hetcoll
