#include "transport/verbs/outbox.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>

#include "base/clock.h"
#include "kernels/kernels.h"

namespace hetcoll {
namespace {

constexpr std::size_t kFragment = std::size_t{128} << 10;
constexpr std::size_t kVerbsLendBytes = std::size_t{16} << 10;  // shorter messages are copied: waiting would cost more
constexpr std::size_t kSpread = std::size_t{8} << 10;           // shorter frames take the first rail
constexpr double kPatience = 2;
constexpr std::size_t kTcpFrames = 32;  // that the peer may have to keep

}  // namespace

Outbox::Outbox(const Rails& rails, ControlSocket& control_socket, Regions& regions, std::size_t ring_bytes, int peer,
               BounceBuffer* bounce, Integrity integrity)
    : rails_(rails),
      control_socket_(control_socket),
      regions_(regions),
      peer_(peer),
      bounce_(bounce),
      device_(bounce != nullptr),
      checks_(integrity != Integrity::kOff),
      sample_(integrity),
      fragment_(std::min({kFragment, ring_bytes / 4, device_ ? bounce->most() : kFragment})),
      kept_(device_ ? kWindow : 0) {
  for (const auto& rail : rails_) nics_ |= 1u << rail->nic().index();
}

Outbox::~Outbox() { DeliveredBefore(next_); }

// The peer's clear-to-send to a message of a GPU, the next one of this link; null before it is here.
const ClearToSend* Outbox::Wanted(const Message& m) const {
  const ClearToSend& next = clear_to_sends_[messages_ % kClearToSends];
  if (next.number != messages_) return nullptr;
  if (next.signature == m.signature && next.total != m.total) {
    throw Fault(FaultKind::kMismatch, peer_,
                "the peer wants a message of " + std::to_string(next.total) + " bytes, " + std::to_string(m.total) +
                    " were to be sent");
  }
  if (next.signature != m.signature) throw WrongFrame(m, next.signature, next.total, peer_);
  return &next;
}

void Outbox::Invited(const ClearToSend& clear_to_send) {
  if (device_) {
    taken_ = std::max(taken_, std::min(clear_to_send.taken, next_));
    for (std::uint64_t seq = oldest_; seq < taken_; ++seq) {
      // What is on its way once more reads from here, and writes there: that must be over first.
      if (At(seq).lost || !At(seq).again) Delivered(seq);
    }
  }
  ClearToSend& place = clear_to_sends_[(device_ ? clear_to_send.number : counters_.clear_to_sends) % kClearToSends];
  ++counters_.clear_to_sends;
  const bool late = device_ && place.number != UINT64_MAX && place.number > clear_to_send.number;  // sent twice
  if (!late) place = clear_to_send;
}

std::ptrdiff_t Outbox::Push(const Message& m, std::size_t at, const std::byte* data, std::size_t n) {
  if (device_ && Wanted(m) == nullptr) return kWouldBlock;
  n = std::min(n, fragment_);
  // All of a message or nothing: what was lent must be what was taken last.
  Region* region = nullptr;
  if (device_ || (m.may_lend && (m.total >= kVerbsLendBytes || m.into != nullptr)))
    region = regions_.Find(data - at, m.total, nics_);
  if (device_ && region == nullptr) throw Fault(FaultKind::kSystem, -1, "verbs: a GPU's memory is not registered");
  if (m.device && region == nullptr) return kOutOfReach;
  Frame* frame = nullptr;
  Rail* rail = Pick(n, frame);
  if (rail == nullptr) return kWouldBlock;
  const std::byte* payload = data;
  if (region == nullptr) {
    std::byte* place = reinterpret_cast<std::byte*>(frame + 1);
    CopyBytes(place, data, n);
    payload = place;
  }
  Send(*rail, frame, payload, region, m, at, n);
  return static_cast<std::ptrdiff_t>(n);
}

std::byte* Outbox::Reserve(const std::byte* data, std::size_t n) {
  if (n > fragment_ || regions_.Find(data, n, nics_) != nullptr) return nullptr;  // that will be lent
  reserved_rail_ = Pick(n, reserved_);
  return reserved_rail_ == nullptr ? nullptr : reinterpret_cast<std::byte*>(reserved_ + 1);
}

void Outbox::Commit(const Message& m, std::size_t at, std::size_t n) {
  Send(*reserved_rail_, reserved_, reinterpret_cast<std::byte*>(reserved_ + 1), nullptr, m, at, n);
}

// The rail that will be through with it first, of those that have room. None, if that takes much longer than to wait
// for room on another: the receiver, who needs frames in order, would wait for the slow one.
Rail* Outbox::Pick(std::size_t n, Frame*& frame) {
  if (next_ - oldest_ == kWindow) return nullptr;
  const bool spread = n >= kSpread && rails_.size() > 1;
  const std::int64_t now = spread ? NowNs() : 0;
  Rail* best = nullptr;
  double wait = 0;
  double least = std::numeric_limits<double>::infinity();  // with or without room
  for (const auto& rail : rails_) {
    if (spread && rail->alive()) rail->PollSend();
    if (!rail->alive()) continue;
    Frame* slot = rail->Slot(n);
    if (!spread) {
      if (slot == nullptr) continue;
      frame = slot;
      return rail.get();
    }
    const double expected = static_cast<double>(rail->queued() + n) / rail->hoped_bytes_per_ns(now);
    least = std::min(least, expected);
    if (slot == nullptr || (best != nullptr && expected >= wait)) continue;
    best = rail.get();
    frame = slot;
    wait = expected;
  }
  if (best != nullptr && wait <= kPatience * least) return best;
  ++counters_.full;
  return nullptr;
}

void Outbox::Send(Rail& rail, Frame* frame, const std::byte* payload, Region* region, const Message& m, std::size_t at,
                  std::size_t n) {
  const bool waits = region != nullptr && !m.answered;
  *frame = {m.signature, m.total, next_, static_cast<std::uint32_t>(n), waits ? kFrameLent : 0};
  const bool checked = checks_ && !device_ && Check(*frame, payload, region);
  std::optional<Target> target;
  const auto write_to = [&](const auto& allowed) {
    target = {allowed.address + at, allowed.rkeys[rail.number()]};
    frame->flags |= kFrameDirect;
  };
  if (device_) {
    write_to(*Wanted(m));
  } else if (m.into != nullptr) {
    if (n > 0 && !checked) write_to(*m.into);
  } else if (m.total >= kInviteBytes && counters_.clear_to_sends > 0 && !checked) {
    for (std::size_t i = 1; i <= kClearToSends; ++i) {  // it is the latest one, most often
      const ClearToSend& clear_to_send = clear_to_sends_[(counters_.clear_to_sends - i) % kClearToSends];
      if (clear_to_send.signature != m.signature || clear_to_send.total != m.total) continue;
      write_to(clear_to_send);
      break;
    }
  }
  At(next_) = {frame, payload, region, pushed_, at, messages_, static_cast<std::uint8_t>(rail.number()),
               false, false,   false};
  ++next_;
  pushed_ += n;
  if (at + n == m.total) ++messages_;
  std::uint32_t lkey = rail.staging_lkey();
  if (region != nullptr) {
    lkey = region->lkey[static_cast<std::size_t>(rail.nic().index())];
    ++region->uses;
    counters_.lent_bytes += n;
  } else {
    counters_.copied_bytes += n;
  }
  rail.Post(frame, region != nullptr ? region->Seen(payload) : payload, lkey, target ? &*target : nullptr);
}

// Gives a frame a checksum of its payload, if it is to have one. Such a frame is not written straight to its
// destination: what was spoiled is not to get there. A device's memory is not the processor's to read; what a bounce
// buffer has of it is.
bool Outbox::Check(Frame& frame, const std::byte* payload, const Region* region) {
  if ((region != nullptr && !region->on_host) || !sample_.Take(frame.total, frame.nbytes)) return false;
  frame.flags |= kFrameChecked;
  frame.body = Crc32c(0, payload, frame.nbytes);
  return true;
}

std::ptrdiff_t Outbox::PushOverTcp(const Message& m, std::size_t at, const std::byte* data, std::size_t n) {
  if (m.device) return kOutOfReach;
  n = std::min(n, fragment_);
  if (next_ - oldest_ == kWindow || !TcpHasRoom()) return kWouldBlock;
  if (device_ && (data = bounce_->Out(next_, data, n)) == nullptr) return kWouldBlock;
  Frame frame{m.signature, m.total, next_, static_cast<std::uint32_t>(n), 0};
  if (checks_) static_cast<void>(Check(frame, data, nullptr));
  SendOverTcp(frame, data);
  At(next_) = {nullptr, nullptr, nullptr, pushed_, at, messages_, kOverTcp, false, false, false};
  ++next_;
  pushed_ += n;
  if (at + n == m.total) ++messages_;
  return static_cast<std::ptrdiff_t>(n);
}

bool Outbox::TcpHasRoom() const {
  return over_tcp_ < kTcpFrames && control_socket_.Flush() && !control_socket_.ended();
}

void Outbox::SendOverTcp(Frame frame, const std::byte* payload) {
  control_socket_.SendFrame(frame, payload);
  ++over_tcp_;
  counters_.tcp_bytes += frame.nbytes;
}

void Outbox::Delivered(std::uint64_t seq) {
  if (seq < oldest_ || seq >= next_ || At(seq).delivered) return;
  Sent& sent = At(seq);
  sent.delivered = true;
  lost_ -= sent.lost;
  over_tcp_ -= sent.rail == kOverTcp;
  if (sent.region != nullptr) --sent.region->uses;
  while (oldest_ < next_ && At(oldest_).delivered) ++oldest_;
}

std::size_t Outbox::Lent() {
  lent_seq_ = std::max(lent_seq_, oldest_);
  while (lent_seq_ < next_ && (At(lent_seq_).delivered || At(lent_seq_).region == nullptr)) ++lent_seq_;
  return lent_seq_ == next_ ? 0 : pushed_ - At(lent_seq_).before;
}

void Outbox::Answered(std::uint64_t messages) {
  while (oldest_ < next_ && At(oldest_).message < messages) Delivered(oldest_);
}

void Outbox::Keep() {
  for (std::uint64_t seq = oldest_; seq < next_; ++seq) {
    Sent& sent = At(seq);
    if (!sent.delivered && sent.region != nullptr) Keep(sent, seq);
  }
}

void Outbox::Keep(Sent& sent, std::uint64_t seq) {
  if (IsCopied(sent)) return;
  sent.kept = std::make_shared_for_overwrite<std::byte[]>(sent.frame->nbytes);
  if (sent.region->on_host) {
    std::memcpy(sent.kept.get(), sent.payload, sent.frame->nbytes);
    return HasKept(sent);
  }
  regions_.copier->Copy(Way::kOut, sent.kept.get(), sent.payload, sent.frame->nbytes);
  copies_.push_back({regions_.copier->Mark(Way::kOut), seq, sent.kept});
}

void Outbox::HasKept(Sent& sent) {
  sent.payload = sent.kept.get();
  --sent.region->uses;
  sent.region = nullptr;
}

void Outbox::PollCopies() {
  for (; !copies_.empty() && regions_.copier->Passed(Way::kOut, copies_.front().mark); copies_.pop_front()) {
    const std::uint64_t seq = copies_.front().seq;
    if (seq >= oldest_ && !At(seq).delivered && IsCopied(At(seq))) HasKept(At(seq));
  }
}

void Outbox::Lost(const Rail& rail) {
  for (std::uint64_t seq = oldest_; seq < next_; ++seq) {
    Sent& sent = At(seq);
    if (sent.rail != rail.number() || sent.delivered || sent.lost) continue;
    if (seq < taken_) {
      Delivered(seq);
      continue;
    }
    sent.lost = true;
    ++lost_;
    if (!device_) continue;
    Frame& kept = kept_[seq % kWindow];
    kept = *sent.frame;
    sent.frame = &kept;
  }
  resend_from_ = oldest_;
  if (device_) recovered_ = next_;
}

void Outbox::Resend(bool over_tcp) {
  PollCopies();
  for (resend_from_ = std::max(resend_from_, oldest_); lost_ > 0 && resend_from_ < next_; ++resend_from_) {
    Sent& sent = At(resend_from_);
    if (sent.delivered || !sent.lost) continue;
    if (IsCopied(sent)) return;  // the memory may be needed as soon as that is over
    Rail* best = nullptr;
    Frame* frame = nullptr;
    for (const auto& rail : rails_) {
      if (!rail->alive() || (best != nullptr && rail->queued() >= best->queued())) continue;
      Frame* slot = rail->Slot(sent.frame->nbytes);
      if (slot == nullptr) continue;
      best = rail.get();
      frame = slot;
    }
    if (best == nullptr && over_tcp && ResendOverTcp(sent)) continue;
    if (best == nullptr) return;
    *frame = *sent.frame;
    // The receiver may be through with the first one, and its memory be used again. Where the memory is a GPU's, there
    // is no other place: see `resending`.
    if (!device_) frame->flags &= ~kFrameDirect;
    sent.frame = frame;
    sent.rail = static_cast<std::uint8_t>(best->number());
    sent.lost = false;
    sent.again = true;
    --lost_;
    ++counters_.resent;
    const auto nic = static_cast<std::size_t>(best->nic().index());
    const ClearToSend& clear_to_send = clear_to_sends_[sent.message % kClearToSends];
    const Target target{clear_to_send.address + sent.at, clear_to_send.rkeys[best->number()]};
    if (sent.region != nullptr) {
      best->Post(frame, sent.region->Seen(sent.payload), sent.region->lkey[nic], device_ ? &target : nullptr);
    } else {  // the dead rail's staging memory may soon be a new one's
      std::memcpy(frame + 1, sent.payload, frame->nbytes);
      sent.payload = reinterpret_cast<std::byte*>(frame + 1);
      best->Post(frame, sent.payload, best->staging_lkey());
    }
  }
}

bool Outbox::ResendOverTcp(Sent& sent) {
  if (!TcpHasRoom()) return false;
  Frame frame = *sent.frame;
  if (!device_ && sent.region != nullptr && !sent.region->on_host) {
    Keep(sent, frame.seq);
    return false;
  }
  frame.flags &= kFrameChecked;
  if (device_) {
    std::size_t n = frame.nbytes;
    const std::byte* payload = bounce_->Out(frame.seq, sent.payload, n);
    if (payload == nullptr) return false;
    if (checks_) static_cast<void>(Check(frame, payload, nullptr));
    SendOverTcp(frame, payload);
  } else {
    SendOverTcp(frame, sent.payload);
  }
  if (sent.region != nullptr) --sent.region->uses;
  sent.frame = nullptr;
  sent.payload = nullptr;
  sent.region = nullptr;
  sent.rail = kOverTcp;
  sent.lost = false;
  sent.again = true;
  --lost_;
  ++counters_.resent;
  return true;
}

bool Outbox::Uses(const Rail& rail) const {
  for (std::uint64_t seq = oldest_; seq < next_; ++seq) {
    const Sent& sent = At(seq);
    if (!sent.delivered && (rail.Stages(sent.frame) || rail.Stages(sent.payload))) return true;
  }
  return false;
}

void Outbox::DeliveredBefore(std::uint64_t seq) {
  for (std::uint64_t s = oldest_; s < std::min(seq, next_); ++s) Delivered(s);
}

}  // namespace hetcoll
