#include "transport/verbs/inbox.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "transport/verbs/read_back.h"

namespace hetcoll {

// The place for a frame; null where it is here already.
Inbox::Arrival* Inbox::Take(const Frame& frame) {
  if (frame.seq >= due_ + kWindow) throw Fault(FaultKind::kCorrupt, peer_, "verbs: a frame from the future");
  Arrival& a = At(frame.seq);
  const bool again = frame.seq >= due_ && a.present;
  if (again && !a.landed && (a.rail == nullptr || !a.rail->alive())) {  // the first may never be there
    a.present = false;
  } else if (again || frame.seq < due_) {
    ++twice_;
    return nullptr;
  }
  end_ = std::max(end_, frame.seq + 1);
  if (!awaited_.empty()) counts_.resent += std::erase(awaited_, frame.seq);
  a.present = true;
  a.frame = frame;
  return &a;
}

void Inbox::Await(std::uint64_t seq) {
  if (seq == kNoSeq) {
    for (seq = due_; seq < end_ && At(seq).present;) ++seq;
  }
  if (seq >= due_ && !At(seq).present) awaited_.push_back(seq);  // else it had come before
}

void Inbox::Arrived(Rail& rail, std::uint64_t index, const Frame& frame, const std::byte* payload, bool lands) {
  Arrival* a = Take(frame);
  if (a == nullptr && device_) return again_.push_back({&rail, index, rail.nic().read_back().begun()});
  if (a == nullptr) return rail.Release(index, true);  // the peer may be waiting for that, to go on
  if (device_ && (frame.flags & kFrameDirect) == 0) {
    throw Fault(FaultKind::kCorrupt, peer_, "verbs: a frame for a GPU's memory came elsewhere");
  }
  a->payload = payload;
  a->rail = &rail;
  a->nic = &rail.nic();
  a->index = index;
  a->reads = lands ? rail.nic().read_back().begun() : 0;
  a->landed = !lands;
}

void Inbox::Arrived(const Frame& frame, std::unique_ptr<std::byte[]> payload) {
  Arrival* a = Take(frame);
  tcp_end_ = std::max(tcp_end_, frame.seq + 1);
  if (a == nullptr) return;
  a->payload = payload.get();
  a->copy = std::move(payload);
  a->rail = nullptr;
  a->nic = nullptr;
  a->landed = true;
}

View Inbox::Peek(const Message& m, std::size_t at, std::size_t n) {
  Arrival& a = At(due_);
  if (!open_) {
    if (a.frame.signature != m.signature || a.frame.total != m.total) {
      throw WrongFrame(m, a.frame.signature, a.frame.total, peer_);
    }
    if (a.frame.nbytes > m.total - at) throw Fault(FaultKind::kCorrupt, peer_, "verbs: a frame is too long");
    open_ = true;
    taken_ = 0;
  }
  if ((a.frame.flags & kFrameDirect) != 0) {
    if (direct_ == nullptr || direct_signature_ != m.signature)
      throw Fault(FaultKind::kCorrupt, peer_, "verbs: a frame came uninvited");
    a.payload = direct_ + at - taken_;
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

bool Inbox::Land(const Nic& nic, std::uint64_t answered, std::uint64_t begun) {
  bool more = false;
  for (std::uint64_t seq = due_; seq < end_; ++seq) {
    Arrival& a = At(seq);
    if (!a.present || a.landed || a.nic != &nic) continue;
    a.landed = a.reads < answered;
    more |= a.reads >= begun;
  }
  std::erase_if(again_, [&](const Again& again) {
    if (&again.rail->nic() != &nic) return false;
    more |= again.reads >= begun;
    if (again.reads >= answered) return false;
    again.rail->Release(again.index, true);
    return true;
  });
  return more;
}

void Inbox::Forget(const Nic& nic) {
  for (std::uint64_t seq = due_; seq < end_; ++seq) {
    Arrival& a = At(seq);
    if (a.present && !a.landed && a.nic == &nic) a.present = false;
  }
  std::erase_if(again_, [&](const Again& again) { return &again.rail->nic() == &nic; });
}

void Inbox::MakeRoom() {
  for (std::uint64_t seq = due_ + 1; seq < end_; ++seq) {
    Arrival& a = At(seq);
    if (!a.present || !a.landed || a.rail == nullptr) continue;
    Rail* rail = a.rail;
    Copy(a);
    rail->Release(a.index, true);
  }
}

void Inbox::Leave(const Rail& rail) {
  for (std::uint64_t seq = due_; seq < end_; ++seq) {
    if (At(seq).present && At(seq).rail == &rail) Copy(At(seq));
  }
  std::erase_if(again_, [&](const Again& again) { return again.rail == &rail; });  // it comes once more
}

void Inbox::Copy(Arrival& a) {
  if ((a.frame.flags & kFrameDirect) == 0) {
    a.copy = std::make_unique<std::byte[]>(a.frame.nbytes);
    std::memcpy(a.copy.get(), a.payload, a.frame.nbytes);
    a.payload = a.copy.get();
  }
  a.rail = nullptr;
}

}  // namespace hetcoll
