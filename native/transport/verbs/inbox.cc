#include "transport/verbs/inbox.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace hetcoll {

// The place for a frame; null where it is here already.
Inbox::Arrival* Inbox::Take(const Frame& frame) {
  if (frame.seq >= due_ + kWindow) throw Fault(FaultKind::kCorrupt, peer_, "verbs: a frame from the future");
  if (frame.seq < due_ || At(frame.seq).present) {
    ++twice_;
    return nullptr;
  }
  end_ = std::max(end_, frame.seq + 1);
  Arrival& a = At(frame.seq);
  a.present = true;
  a.frame = frame;
  return &a;
}

void Inbox::Arrived(Rail& rail, std::uint64_t index, const Frame& frame, const std::byte* payload) {
  Arrival* a = Take(frame);
  if (a == nullptr) return rail.Release(index, false);
  a->payload = payload;
  a->rail = &rail;
  a->index = index;
}

void Inbox::Arrived(const Frame& frame, std::unique_ptr<std::byte[]> payload) {
  Arrival* a = Take(frame);
  if (a == nullptr) return;
  a->payload = payload.get();
  a->copy = std::move(payload);
  a->rail = nullptr;
}

View Inbox::Peek(const Message& m, std::size_t at, std::size_t n) {
  Arrival& a = At(due_);
  if (!open_) {
    if (a.frame.signature != m.signature || a.frame.total != m.total) {
      throw WrongFrame(m, a.frame.signature, a.frame.total, peer_);
    }
    if (a.frame.nbytes > m.total - at) throw Fault(FaultKind::kCorrupt, peer_, "verbs: a frame is too long");
    if ((a.frame.flags & kFrameDirect) != 0) {
      if (direct_ == nullptr) throw Fault(FaultKind::kCorrupt, peer_, "verbs: a frame came uninvited");
      a.payload = direct_ + at;
    }
    open_ = true;
    taken_ = 0;
  }
  return {a.payload + taken_, static_cast<std::ptrdiff_t>(std::min(n, a.frame.nbytes - taken_))};
}

void Inbox::Consume(std::size_t n) {
  Arrival& a = At(due_);
  taken_ += n;
  if (taken_ < a.frame.nbytes) return;
  open_ = false;
  a.present = false;
  a.copy.reset();
  ++due_;
  if (a.rail != nullptr) a.rail->Release(a.index, (a.frame.flags & kFrameLent) != 0);
}

std::uint64_t Inbox::missing() const {
  std::uint64_t seq = due_;
  while (seq < due_ + kWindow && At(seq).present) ++seq;
  return seq;
}

void Inbox::MakeRoom() {
  for (std::uint64_t seq = due_ + 1; seq < end_; ++seq) {
    Arrival& a = At(seq);
    if (!a.present || a.rail == nullptr) continue;
    if ((a.frame.flags & kFrameDirect) == 0) {
      a.copy = std::make_unique<std::byte[]>(a.frame.nbytes);
      std::memcpy(a.copy.get(), a.payload, a.frame.nbytes);
      a.payload = a.copy.get();
    }
    a.rail->Release(a.index, true);
    a.rail = nullptr;
  }
}

}  // namespace hetcoll
