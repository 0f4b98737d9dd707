#include "host/task.h"

#include <algorithm>

#include "base/team.h"

namespace hetcoll {
namespace {

// A copy or reduction in place moves this much a turn, which is a whole number of blocks of codes; of a long one so
// many times as much, as what is looked at in between matters less.
constexpr std::size_t kLocalBytes = std::size_t{64} << 10;
constexpr std::size_t kMostLocalBytes = std::size_t{1} << 20;
constexpr std::size_t kFarBytes = std::size_t{64} << 10;  // shorter summands are read one page after the other

const char* Name(Op op) {
  switch (op) {
    case Op::kSend:
      return "send to";
    case Op::kRecv:
      return "receive from";
    case Op::kRecvReduce:
      return "receive and reduce from";
    default:
      return "local step";
  }
}

}  // namespace

Task::Task(const Shape& shape)
    : bound_(shape.bound),
      kernels_(shape.kernels),
      codec_(shape.codec),
      divisor_(shape.divisor),
      p2p_(shape.p2p),
      shape_id_(shape.id),
      item_(ItemSize(shape.dtype)),
      steps_(shape.bound.steps) {}

void Task::Prepare(Links& links, const void* send, void* recv, std::uint64_t signature, float* residual) {
  // SEND is only ever read unless it is RECV as well.
  base_ = {static_cast<std::byte*>(const_cast<void*>(send)), static_cast<std::byte*>(recv), nullptr};
  signature_ = signature;
  residual_ = residual;
  apart_ = bound_.apart && Apart();
  begun = lends_ = false;
  state.store(State::kRunning, std::memory_order_relaxed);
  for (BoundStep& s : steps_) {
    s.done = s.posted = s.coded = 0;
    s.until = 0;
    s.complete = false;
  }
  const auto& lanes = bound_.lane_begin;
  lanes_left_ = 0;
  for (std::size_t lane = 0; lane + 1 < lanes.size(); ++lane) {
    heads_[lane] = lanes[lane];
    lanes_left_ += lanes[lane] < lanes[lane + 1];
  }
  if (!p2p_) return;
  tickets_.resize(steps_.size());
  for (std::uint32_t i : bound_.order) {
    BoundStep& s = steps_[i];
    if (s.op == Op::kSend) tickets_[i] = links.tx(s.peer, s.channel).tickets++;
    if (s.op == Op::kRecv) tickets_[i] = links.rx(s.peer, s.channel).tickets++;
    s.number = kNumberStep * tickets_[i];
  }
}

bool Task::Apart() const {
  const std::byte *s = base_[0], *r = base_[1];
  return s + bound_.send_bytes <= r || r + bound_.recv_bytes <= s;
}

bool Task::Pass(Links& links) {
  bool moved = false;
  for (std::size_t lane = 0; lane + 1 < bound_.lane_begin.size(); ++lane) moved |= AdvanceLane(links, lane);
  return moved || (lends_ && TakeBack(links));
}

bool Task::AdvanceLane(Links& links, std::size_t lane) {
  const std::uint32_t end = bound_.lane_begin[lane + 1];
  bool moved = false;
  while (heads_[lane] < end) {
    const std::uint32_t index = bound_.order[heads_[lane]];
    BoundStep& s = steps_[index];
    std::size_t limit = s.len;
    if (!s.complete) {  // a send may have been finished by the reduction that it was fused with
      const bool any = Limit(s, limit) && Move(links, index, limit);
      moved |= any;
      if (!s.complete) return PostAhead(links, lane) || moved;
    }
    if (++heads_[lane] == end) --lanes_left_;
  }
  return moved;
}

bool Task::Limit(const BoundStep& s, std::size_t& limit) const {
  for (std::uint32_t d = s.dep_begin; d < s.dep_end; ++d) {
    const BoundDep& dep = bound_.deps[d];
    const BoundStep& on = steps_[dep.step];
    if (on.complete || (dep.in_place_only && apart_)) continue;
    if (!dep.follows || s.len == 0) return false;  // an empty step has no elements to follow
    limit = std::min(limit, on.done / item_ * item_);
  }
  if (s.block && limit < s.len) limit -= limit % (kCodecBlock * item_);
  return limit > s.done || s.len == 0;
}

bool Task::Move(Links& links, std::uint32_t index, std::size_t limit) {
  BoundStep& s = steps_[index];
  if (p2p_ && s.peer >= 0) {
    const std::uint32_t turn =
        s.op == Op::kSend ? links.tx(s.peer, s.channel).serving : links.rx(s.peer, s.channel).serving;
    if (turn != tickets_[index]) return false;
  }
  bool moved = false;
  switch (s.op) {
    case Op::kSend:
      moved = s.wire > 0 ? SendCodes(links, s, limit) : MoveSend(links, s, limit);
      break;
    case Op::kRecv:
      moved = s.wire > 0 ? RecvCodes(links, s, limit) : MoveRecv(links, s, limit);
      break;
    case Op::kRecvReduce:
      moved = s.wire > 0 ? RecvCodes(links, s, limit) : MoveRecvReduce(links, s, index, limit);
      break;
    default:
      moved = MoveLocal(s, limit);
  }
  if (moved && s.complete && p2p_ && s.peer >= 0) {
    ++(s.op == Op::kSend ? links.tx(s.peer, s.channel).serving : links.rx(s.peer, s.channel).serving);
  }
  return moved;
}

bool Task::MoveSend(Links& links, BoundStep& s, std::size_t limit) {
  Port<SendEnd>& port = links.tx(s.peer, s.channel);
  const bool posted = Post(links, s, limit);
  if (!posted && s.len == 0) return false;
  const std::uint64_t returned = port.taken - port.end->Lent();
  const std::size_t free = s.posted - std::min<std::uint64_t>(s.posted, s.until - std::min(s.until, returned));
  const bool moved = free > s.done || posted;
  s.done = free;
  s.complete = s.done == s.len;
  lends_ |= port.keeps && free < s.posted;
  return moved;
}

// Hands bytes to the transport. Whether it took any, or an empty message.
bool Task::Post(Links& links, BoundStep& s, std::size_t limit) {
  if (limit <= s.posted && s.len > 0) return false;
  Port<SendEnd>& port = links.tx(s.peer, s.channel);
  Message m = MessageOf(s);
  if (m.use == Use::kLone) {
    m.mutual = links.rx(s.peer, s.channel).waits();
    if (m.mutual) m.use = Use::kExchanged;
  }
  const std::ptrdiff_t n = port.end->Push(m, s.posted, Src(s) + s.posted, limit - s.posted);
  if (n == kWouldBlock) return false;
  s.posted += static_cast<std::size_t>(n);
  s.until = port.taken += static_cast<std::uint64_t>(n);
  port.through += s.posted == s.len;
  links.Touch(port);
  return n > 0 || s.len == 0;
}

// Where on a lane the next send stands that was not handed over as a whole, when from `at` on there are none but sends
// that were, and are still read where they lie: those behind them need not wait for that. Else 0.
std::uint32_t Task::Ahead(std::size_t lane, std::uint32_t at) const {
  const std::uint32_t end = bound_.lane_begin[lane + 1];
  for (const std::uint32_t head = heads_[lane]; !p2p_ && at < end; ++at) {
    const BoundStep& s = steps_[bound_.order[at]];
    if (s.op != Op::kSend || s.wire > 0 || s.len == 0) return 0;
    if (s.posted < s.len) return at > head ? at : 0;
  }
  return 0;
}

// Nothing but such sends may go ahead, and none is done before its turn: whoever waits for a step relies on all before
// it on its lane.
bool Task::PostAhead(Links& links, std::size_t lane) {
  bool moved = false;
  for (std::uint32_t at = heads_[lane]; (at = Ahead(lane, at)) > 0;) {
    BoundStep& s = steps_[bound_.order[at]];
    std::size_t limit = s.len;
    if (!Limit(s, limit)) return moved;
    moved |= Post(links, s, limit);
    if (s.posted < s.len) return moved;
  }
  return moved;
}

bool Task::MoveRecv(Links& links, BoundStep& s, std::size_t limit) {
  Port<RecvEnd>& port = links.rx(s.peer, s.channel);
  const std::ptrdiff_t n = port.end->Pull(MessageOf(s), s.done, Dst(s) + s.done, limit - s.done, Streams(s));
  if (n == kWouldBlock) return false;
  s.done += static_cast<std::size_t>(n);
  s.complete = s.done == s.len;
  port.taken += static_cast<std::uint64_t>(n);
  port.through += s.complete;
  links.Touch(port);
  return true;
}

bool Task::MoveRecvReduce(Links& links, BoundStep& s, std::uint32_t index, std::size_t limit) {
  Port<RecvEnd>& port = links.rx(s.peer, s.channel);
  const View v = port.end->Peek(MessageOf(s), s.done, limit - s.done);
  if (v.n == kWouldBlock) return false;
  const std::size_t n = static_cast<std::size_t>(v.n) / item_ * item_;
  if (n == 0 && s.len > 0) return false;  // less than an element has arrived
  if (n > 0) {
    std::byte* dst = Dst(s) + s.done;
    const std::byte* src = Src(s) + s.done;
    const Sweep cached = n >= kFarBytes && port.end->Far() ? Sweep::kPages : Sweep::kPlain;
    const Sweep sweep = Streams(s) ? Sweep::kAround : cached;
    const auto share = [&](const auto& work) {
      if (Team* team = port.end->team()) return team->Share(n, work);
      work(std::size_t{0}, n);
    };
    bool its_turn = false;
    if (std::byte* slot = s.fuse < 0 ? nullptr : FuseSlot(links, s, index, v.data, n, its_turn)) {
      BoundStep& next = steps_[static_cast<std::size_t>(s.fuse)];
      share([&](std::size_t at, std::size_t end) {
        const std::size_t items = (end - at) / item_;
        if (next.gives) return kernels_->reduce(slot + at, src + at, v.data + at, items, cached);
        kernels_->reduce2(dst + at, slot + at, src + at, v.data + at, items, sweep);
      });
      Port<SendEnd>& out = links.tx(next.peer, next.channel);
      out.end->Commit(MessageOf(next), next.posted, n);
      next.until = out.taken += n;
      next.posted += n;
      out.through += next.posted == next.len;
      if (its_turn && next.done == s.done) {
        next.done = next.posted;
        next.complete = next.done == next.len;
      }
      links.Touch(out);
    } else {
      const Sweep kept = s.fuse < 0 ? sweep : cached;  // step `fuse` is about to read it
      share([&](std::size_t at, std::size_t end) {
        kernels_->reduce(dst + at, src + at, v.data + at, (end - at) / item_, kept);
      });
    }
  }
  port.end->Consume(n);
  s.done += n;
  s.complete = s.done == s.len;
  port.taken += n;
  port.through += s.complete;
  links.Touch(port);
  return true;
}

// Whether this send heads its lane, so that it is its turn, or only sends are ahead that were posted: see PostAhead.
bool Task::MayPost(std::uint32_t target, bool& its_turn) const {
  for (std::size_t lane = 0; lane + 1 < bound_.lane_begin.size(); ++lane) {
    for (std::uint32_t at = heads_[lane]; at < bound_.lane_begin[lane + 1]; ++at) {
      its_turn = at == heads_[lane];
      if (bound_.order[at] == target) return true;
      const BoundStep& s = steps_[bound_.order[at]];
      if (s.op != Op::kSend || s.wire > 0 || s.len == 0 || s.posted < s.len) break;
    }
  }
  return false;
}

// The slot of the send that follows this reduction, if that send may be posted, has kept up, waits for nothing else,
// and its transport has room: then the sum is written to both places in one pass.
std::byte* Task::FuseSlot(Links& links, const BoundStep& s, std::uint32_t index, const std::byte* from, std::size_t n,
                          bool& its_turn) {
  const auto target = static_cast<std::uint32_t>(s.fuse);
  BoundStep& next = steps_[target];
  if (next.posted != s.done || next.complete || !MayPost(target, its_turn)) return nullptr;
  for (std::uint32_t d = next.dep_begin; d < next.dep_end; ++d) {
    const BoundDep& dep = bound_.deps[d];
    if (dep.step != index && !steps_[dep.step].complete) return nullptr;
  }
  const bool answers = next.peer == s.peer && next.number == 0;
  return links.tx(next.peer, next.channel)
      .end->Reserve(Src(next) + next.posted, n, answers || next.gives ? from : nullptr);
}

bool Task::MoveLocal(BoundStep& s, std::size_t limit) {
  std::byte* dst = Dst(s) + s.done;
  const std::byte* src = s.src_buf == Buf::kNone ? dst : Src(s) + s.done;
  const bool nothing = s.op == Op::kCopy && src == dst;
  const std::size_t turn = std::clamp(s.len / 8, kLocalBytes, kMostLocalBytes) / kLocalBytes * kLocalBytes;
  const std::size_t n = nothing ? limit - s.done : std::min(limit - s.done, turn);
  if (n > 0 && !nothing) {
    if (s.op == Op::kCopy) CopyBytes(dst, src, n, Streams(s) ? Sweep::kAround : Sweep::kPlain);
    if (s.op == Op::kReduce) kernels_->reduce(dst, dst, src, n / item_, Sweep::kPlain);
    if (s.op == Op::kScale) kernels_->scale(dst, n / item_, divisor_);
    if (s.op == Op::kRound) {
      codec_->round(dst, src, residual_ == nullptr ? nullptr : residual_ + s.codes + s.done / item_, n / item_);
    }
  }
  s.done += n;
  s.complete = s.done == s.len;
  return true;
}

void Task::End(State how) {
  if (snapshot != nullptr) {
    if (how == State::kDone) CopyBytes(snapshot, base_[static_cast<std::size_t>(Buf::kRecv)], bound_.recv_bytes);
    snapshot = nullptr;
  }
  keepalive.reset();
  state.store(how, std::memory_order_release);
}

std::string Task::Describe() const {
  std::string out;
  std::size_t complete = 0;
  for (const BoundStep& s : steps_) complete += s.complete;
  out = std::to_string(complete) + " of " + std::to_string(steps_.size()) + " steps done";
  ForEachBlocked([&](const BoundStep& s) {
    if (s.peer < 0) return;
    out += "; " + std::string(Name(s.op)) + " rank " + std::to_string(s.peer) + " at byte " + std::to_string(s.done) +
           " of " + std::to_string(s.len);
  });
  return out;
}

}  // namespace hetcoll
