#include "transport/verbs/rail.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>

#include "base/clock.h"

namespace hetcoll {
namespace {

constexpr std::size_t kAlign = 64;
constexpr std::size_t kFrameAt = kAlign - sizeof(Frame);  // so that payload is aligned
constexpr std::uint32_t kKindShift = 30;
constexpr std::uint32_t kCountMask = (1u << kKindShift) - 1;
constexpr std::uint32_t kPlaceBits = 22;
constexpr std::uint32_t kCheckMask = (1u << (kKindShift - kPlaceBits)) - 1;
static_assert(kLargestRing / kAlign == std::size_t{1} << kPlaceBits);
constexpr std::uint32_t kRailBits = 3;  // of a rail's number
static_assert(kMaxRails <= 1 << kRailBits);
constexpr std::uint32_t kSignalEvery = 16;
constexpr std::size_t kMeasured = std::size_t{32} << 10;  // no more is sent without a signal, for the rate to be known
constexpr std::size_t kSample = std::size_t{256} << 10;

std::size_t SlotBytes(std::size_t n) { return kAlign + (n + kAlign - 1) / kAlign * kAlign; }

}  // namespace

// ---- Sending ----

Frame* Rail::Slot(std::size_t n) {
  // Grants keep a part of the send queue to themselves.
  if (posted_ - credited_ == kRailDepth || sq_posted_ - sq_done_ >= kSendDepth - 2 * kRailDepth) return nullptr;
  const std::size_t need = SlotBytes(n);
  const std::size_t offset = pos_ % memory_.ring_bytes;
  place_ = offset + need > memory_.ring_bytes ? pos_ + (memory_.ring_bytes - offset) : pos_;
  if (place_ + need - freed_ > memory_.ring_bytes) return nullptr;
  return reinterpret_cast<Frame*>(memory_.staging + place_ % memory_.ring_bytes + kFrameAt);
}

void Rail::Post(Frame* frame, const std::byte* payload, std::uint32_t lkey, const Target* target) {
  const std::size_t offset = place_ % memory_.ring_bytes;
  const std::uint32_t nbytes = frame->nbytes;
  if (checks_) frame->check = frame->Sum();
  pos_ = place_ + SlotBytes(nbytes);
  flights_[posted_ % kRailDepth] = {frame->seq, pos_};
  ibv::Sge sge[2] = {{reinterpret_cast<std::uintptr_t>(frame), sizeof(Frame), staging_mr_->lkey},
                     {reinterpret_cast<std::uintptr_t>(payload), nbytes, lkey}};
  ibv::SendWr wr{};
  ibv::SendWr body{};
  wr.num_sge = nbytes > 0 ? 2 : 1;
  if (target != nullptr) {
    wr.num_sge = 1;
    body.sg_list = &sge[1];
    body.num_sge = 1;
    body.opcode = ibv::kWrRdmaWrite;
    body.remote_addr = target->address;
    body.rkey = target->rkey;
    counters_.direct_bytes += nbytes;
  } else if (payload == reinterpret_cast<const std::byte*>(frame + 1)) {
    sge[0].length += nbytes;
    wr.num_sge = 1;
  }
  wr.sg_list = sge;
  wr.opcode = ibv::kWrRdmaWriteWithImm;
  wr.imm_data = htonl(kData << kKindShift | (static_cast<std::uint32_t>(posted_) & kCheckMask) << kPlaceBits |
                      static_cast<std::uint32_t>(offset / kAlign));
  wr.remote_addr = remote_.ring + offset + kFrameAt;
  wr.rkey = remote_.rkey;
  // Memory that a device owns cannot be inlined: the processor would have to read it.
  if (sge[0].length <= inline_bytes_ && wr.num_sge == 1) {
    wr.send_flags = ibv::kSendInline;
    ++counters_.inlined;
  }
  ++posted_;
  ++counters_.frames;
  counters_.bytes += nbytes;
  bytes_posted_ += nbytes;
  PostSend(wr, bytes_posted_ - bytes_signalled_ >= kMeasured, target != nullptr ? &body : nullptr);
}

void Rail::PostImmediate(Kind kind, std::uint32_t bits, bool signalled) {
  ibv::SendWr wr{};
  wr.opcode = ibv::kWrRdmaWriteWithImm;
  wr.imm_data = htonl(kind << kKindShift | bits);
  wr.remote_addr = remote_.ring;
  wr.rkey = remote_.rkey;
  PostSend(wr, signalled);
}

void Rail::PostControl(std::uint32_t flags) {
  Frame* frame = Slot(0);
  if (frame == nullptr) return Kill(Name() + ": no room for a control frame");
  *frame = {0, 0, kNoSeq, 0, flags};
  Post(frame, reinterpret_cast<std::byte*>(frame + 1), staging_lkey());
}

void Rail::PostLost(int rail, std::uint32_t life) {
  PostImmediate(kLost, (life << kRailBits | static_cast<std::uint32_t>(rail)) & kCountMask, false);
}

Rail::Counters& Rail::Counters::operator+=(const Counters& more) {
  frames += more.frames;
  bytes += more.bytes;
  received += more.received;
  credits += more.credits;
  signalled += more.signalled;
  inlined += more.inlined;
  direct_bytes += more.direct_bytes;
  return *this;
}

bool Rail::Drained() {
  if (sq_done_ != sq_posted_ && sq_signalled_ != sq_posted_) PostEmpty();
  PollSend();
  return sq_done_ == sq_posted_;
}

void Rail::PostSend(ibv::SendWr& wr, bool signalled, ibv::SendWr* before) {
  if (!alive()) return;
  if (before != nullptr) {
    before->wr_id = ++sq_posted_;
    before->next = &wr;
  }
  wr.wr_id = ++sq_posted_;
  if (signalled || sq_posted_ - sq_signalled_ >= kSignalEvery) {
    wr.send_flags |= ibv::kSendSignaled;
    if (!Busy()) {
      busy_since_ns_ = NowNs();
      busy_bytes_ = bytes_signalled_;
    }
    sq_signalled_ = sq_posted_;
    sent_before_[sq_posted_ % kSendDepth] = bytes_signalled_ = bytes_posted_;
    ++counters_.signalled;
  }
  ibv::SendWr* bad = nullptr;
  const int error = qp_->context->ops.post_send(qp_.get(), before != nullptr ? before : &wr, &bad);
  if (error != 0) Kill(Name() + ": post_send: " + std::strerror(error));
}

void Rail::PollSend() {
  constexpr int kBatch = 8;
  ibv::Wc wcs[kBatch];
  int n;
  do {
    n = qp_->context->ops.poll_cq(send_cq_.get(), kBatch, wcs);
    if (n < 0) Kill(Name() + ": poll_cq: " + std::strerror(n < -1 ? -n : EIO));
    for (int i = 0; i < n; ++i) {
      if (wcs[i].status != ibv::WcStatus::kSuccess) return Failed(wcs[i], "send");
      sq_done_ = wcs[i].wr_id;
      bytes_done_ = sent_before_[sq_done_ % kSendDepth];
    }
  } while (n == kBatch);
  if (Busy() && bytes_done_ >= busy_bytes_ + kSample) Measure();
}

void Rail::Watch(std::int64_t now) {
  constexpr std::int64_t kLookEvery = 200'000'000;  // a process that was stopped has not been watching
  constexpr std::int64_t kAskAfter = 50'000'000;
  constexpr std::int64_t kLeastPatience = 1'000'000'000;
  if (!alive()) return;
  PollSend();
  const std::int64_t passed = std::min(now - watched_ns_, kLookEvery);
  watched_ns_ = now;
  if (sq_done_ == sq_posted_ || sq_done_ != watched_done_) {
    watched_done_ = sq_done_;
    quiet_ns_ = 0;
    return;
  }
  quiet_ns_ += passed;
  if (quiet_ns_ >= kAskAfter && !Busy()) PostEmpty();
  const NicInfo& nic = nic_.info();
  const std::int64_t patience = std::max(kLeastPatience, 2 * (nic.retries + 1) * (std::int64_t{4096} << nic.timeout));
  if (quiet_ns_ > patience) {
    Kill(Name() + ": no completion for " + std::to_string(patience / 1'000'000) +
         " ms: the device has stalled, or does not say that " + LikelyCause(ibv::WcStatus::kRetryExcErr));
  }
}

// What the NIC does while it always has something to do: that does not depend on how often we look.
void Rail::Measure() {
  const std::int64_t now = NowNs();
  const double rate = static_cast<double>(bytes_done_ - busy_bytes_) /
                      static_cast<double>(std::max<std::int64_t>(now - busy_since_ns_, 1));
  bytes_per_ns_ += (rate - bytes_per_ns_) * (measured_ ? 0.25 : 1);
  measured_ = true;
  measured_ns_ = now;
  busy_since_ns_ = now;
  busy_bytes_ = bytes_done_;
}

double Rail::hoped_bytes_per_ns(std::int64_t now) const {
  constexpr double kMostDoublings = 10;  // one each second
  if (!measured_) return bytes_per_ns_;
  return bytes_per_ns_ * std::exp2(std::min(static_cast<double>(now - measured_ns_) * 1e-9, kMostDoublings));
}

// ---- Receiving ----

void Rail::PostRecvs() {
  ibv::RecvWr* bad = nullptr;
  const int error = qp_->context->ops.post_recv(qp_.get(), recv_wrs_.data(), &bad);
  if (error != 0) Kill(Name() + ": post_recv: " + std::strerror(error));
}

void Rail::PollRecv(RailListener& listener) {
  constexpr int kBatch = 8;
  ibv::Wc wcs[kBatch];
  int n;
  do {
    n = qp_->context->ops.poll_cq(recv_cq_.get(), kBatch, wcs);
    if (n < 0) Kill(Name() + ": poll_cq: " + std::strerror(n < -1 ? -n : EIO));
    for (int i = 0; i < n; ++i) {
      if (wcs[i].status != ibv::WcStatus::kSuccess) {
        PollSend();  // the cause, if it is there
        return Failed(wcs[i], "receive");
      }
      if (wcs[i].opcode != ibv::kWcRecvRdmaWithImm || (wcs[i].wc_flags & ibv::kWcWithImm) == 0) {
        Corrupt("a message without an immediate came");
      }
      if (++spent_recvs_ == kRepost) {
        spent_recvs_ = 0;
        PostRecvs();
      }
      Receive(ntohl(wcs[i].imm_data), listener);
      if (!alive()) return;
    }
  } while (n == kBatch);
  if (grant_due_ && n >= 0) Grant();
}

void Rail::Receive(std::uint32_t imm, RailListener& listener) {
  const std::uint32_t bits = imm & kCountMask;
  switch (static_cast<Kind>(imm >> kKindShift)) {
    case kCredit:
      return Credit(bits, listener);
    case kLost:
      return listener.OnLost(static_cast<int>(bits & ((1u << kRailBits) - 1)), bits >> kRailBits);
    case kEmpty:
      empty_came_ = true;
      return;
    case kData:
      break;
  }
  const std::size_t offset = std::size_t{bits & ((1u << kPlaceBits) - 1)} * kAlign;
  if (bits >> kPlaceBits != (arrived_ & kCheckMask)) Corrupt("a frame was skipped");
  if (arrived_ - granted_ == kRailDepth || offset + kAlign > memory_.ring_bytes) Corrupt("a frame outside of the ring");
  const std::byte* payload = memory_.ring + offset + kAlign;
  Frame frame;
  std::memcpy(&frame, payload - sizeof frame, sizeof frame);
  if (checks_ && frame.check != frame.Sum()) return listener.OnSpoiled(*this, nullptr);
  if (frame.nbytes > memory_.ring_bytes - offset - kAlign) Corrupt("a frame outside of the ring");
  if ((frame.flags & kFrameChecked) != 0 && Crc32c(0, payload, frame.nbytes) != frame.body) {
    // What comes twice was sent from memory that its sender may have written to since the first came.
    if (!listener.Has(frame)) return listener.OnSpoiled(*this, &frame);
    frame.flags &= ~kFrameChecked;
  }
  sizes_[arrived_ % kRailDepth] = static_cast<std::uint32_t>(SlotBytes(frame.nbytes));
  ++counters_.received;
  listener.OnFrame(*this, arrived_++, frame, payload);
}

void Rail::Release(std::uint64_t index, bool at_once) {
  released_.set(index % kRailDepth);
  while (consumed_ < arrived_ && released_.test(consumed_ % kRailDepth)) {
    released_.reset(consumed_ % kRailDepth);
    ungranted_bytes_ += sizes_[consumed_++ % kRailDepth];
  }
  if (at_once || consumed_ - granted_ >= kRailDepth / 4 || ungranted_bytes_ >= memory_.ring_bytes / 4) Grant();
}

void Rail::Grant() {
  if (consumed_ == granted_ || !alive()) return;
  grant_due_ = sq_posted_ - sq_done_ >= kSendDepth - kRepost;
  if (grant_due_) {
    PollSend();
    if (sq_posted_ - sq_done_ >= kSendDepth - kRepost) return;
    grant_due_ = false;
  }
  granted_ = consumed_;
  ungranted_bytes_ = 0;
  ++counters_.credits;
  PostImmediate(kCredit, static_cast<std::uint32_t>(granted_) & kCountMask, false);
}

void Rail::Credit(std::uint32_t bits, RailListener& listener) {
  const std::uint32_t more = (bits - static_cast<std::uint32_t>(credited_)) & kCountMask;
  if (more > posted_ - credited_) Corrupt("room was granted that nobody uses");
  for (std::uint32_t i = 0; i < more; ++i) {
    const Flight& flight = flights_[credited_++ % kRailDepth];
    freed_ = flight.end;
    listener.OnDelivered(flight.seq);
  }
}

void Rail::Arm() {
  if (armed_ || !alive()) return;
  armed_ = true;
  const int error = qp_->context->ops.req_notify_cq(recv_cq_.get(), 0);
  if (error != 0) Kill(Name() + ": req_notify_cq: " + std::strerror(error));
}

}  // namespace hetcoll
