// What it takes several steps to know, one small pass for each: none looks at every pair of steps, so that plans of a
// thousand ranks are bound as fast, a step, as those of two. In what is said about time, n is steps, deps and ranks.
#include <algorithm>
#include <limits>
#include <map>

#include "plan/plan.h"

namespace hetcoll {
namespace {

bool SameSpan(const SpanRecord& a, const SpanRecord& b) {
  return a.buf >= 0 && a.buf == b.buf && a.start == b.start && a.count == b.count;
}

bool Overlaps(const SpanRecord& a, const SpanRecord& b) {
  return a.buf >= 0 && a.buf == b.buf && a.start < b.start + b.count && b.start < a.start + a.count;
}

// SEND and RECV may be the same memory. In place, the smaller of the two is this rank's part of the larger (NCCL's
// convention), so a span of either has one name in the larger one's units.
SpanRecord InPlaceName(SpanRecord s, const PlanHeader& head) {
  if (s.buf != 0 && s.buf != 1) return s;
  const bool send_is_larger = head.send_units > head.recv_units;
  const int larger = send_is_larger ? 0 : 1;
  if (head.send_units != head.recv_units && s.buf != larger) s.start += static_cast<std::int32_t>(head.place);
  s.buf = larger;
  return s;
}

// A number for each (peer, channel), of those below Fifos.
std::size_t Fifo(const BoundStep& s) { return static_cast<std::size_t>(s.peer) * kLinkChannels + s.channel; }
std::size_t Fifos(const Plan& plan) { return static_cast<std::size_t>(plan.size) * kLinkChannels; }

// That a step reads the span of units `span`, or writes it. In order, those of a span are together, step by step, and
// of a step that does both the reading comes first.
struct SpanTouch {
  std::uint64_t span;
  std::uint64_t turn;  // twice its step, and 1 more where it writes
  auto operator<=>(const SpanTouch&) const = default;
  std::uint32_t step() const { return static_cast<std::uint32_t>(turn / 2); }
  bool writes() const { return turn % 2 != 0; }
};

std::uint64_t Name(const SpanRecord& s) {
  return std::uint64_t(s.start) << 33 | std::uint64_t(s.count) << 2 | std::uint64_t(s.buf);
}

std::vector<SpanTouch> TouchesOf(const Plan& plan) {
  std::size_t spans = 0;
  for (const StepRecord& r : plan.steps) spans += std::size_t{r.src.buf >= 0} + std::size_t{r.dst.buf >= 0};
  std::vector<SpanTouch> touches;
  touches.reserve(spans);
  for (std::uint64_t i = 0; i < plan.steps.size(); ++i) {
    const StepRecord& r = plan.steps[i];
    if (r.src.buf >= 0) touches.push_back({Name(r.src), 2 * i});
    if (r.dst.buf >= 0) touches.push_back({Name(r.dst), 2 * i + 1});
  }
  std::sort(touches.begin(), touches.end());
  return touches;
}

// Which turn touched each byte of a buffer last. A span without bytes touches whatever it lies inside: so a byte is
// what lies between two places, both of which can be touched.
class LastTouch {
 public:
  static constexpr std::size_t kNever = std::numeric_limits<std::size_t>::max();

  // The last turn that touched any of it, or kNever. `len` is more than 0.
  std::size_t Of(std::size_t off, std::size_t len) {
    std::size_t last = kNever;
    const std::size_t end = End(off, len);
    for (auto at = From(Begin(off, len)); at != pieces_.end() && at->first < end; ++at) {
      if (last == kNever || at->second.turn > last) last = at->second.turn;
    }
    return last;
  }

  // Turns never go back. Of all pieces that it covers it makes one: asking for a span before touching it takes O(log n)
  // on average, however many pieces it has.
  void Set(std::size_t off, std::size_t len, std::size_t turn) {
    const std::size_t begin = Begin(off, len), end = End(off, len);
    auto at = From(begin);
    if (at != pieces_.end() && at->first == begin && at->second.end == end) {
      at->second.turn = turn;
      return;
    }
    if (at != pieces_.end() && at->first < begin) {
      const Piece whole = at->second;
      at->second.end = begin;
      at = pieces_.emplace_hint(std::next(at), begin, whole);
    }
    while (at != pieces_.end() && at->second.end <= end) at = pieces_.erase(at);
    if (at != pieces_.end() && at->first < end) {
      const Piece rest = at->second;
      at = pieces_.emplace_hint(pieces_.erase(at), end, rest);
    }
    pieces_.emplace_hint(at, begin, Piece{end, turn});
  }

 private:
  struct Piece {
    std::size_t end;
    std::size_t turn;
  };

  // Place p has the number 2p, the byte behind it 2p + 1.
  static std::size_t Begin(std::size_t off, std::size_t len) { return 2 * off + (len > 0 ? 1 : 0); }
  static std::size_t End(std::size_t off, std::size_t len) { return 2 * (off + len) + (len > 0 ? 0 : 1); }

  // The first piece that ends behind `begin`.
  std::map<std::size_t, Piece>::iterator From(std::size_t begin) {
    auto at = pieces_.upper_bound(begin);
    if (at == pieces_.begin() || std::prev(at)->second.end <= begin) return at;
    return std::prev(at);
  }

  std::map<std::size_t, Piece> pieces_;  // by where they begin; none overlap
};

bool MayBeGiven(const BoundStep& s) { return s.op == Op::kSend && !s.block && s.src_buf == Buf::kScratch && s.len > 0; }

// For each send that may be given: the last step before it in its plan, or else the first one behind it, that touches
// what it sends; as many as there are steps where none does. O(n log n).
std::vector<std::uint32_t> Neighbours(const std::vector<BoundStep>& steps, bool behind) {
  std::vector<std::uint32_t> found(steps.size(), static_cast<std::uint32_t>(steps.size()));
  LastTouch touched;
  for (std::size_t turn = 0; turn < steps.size(); ++turn) {
    const std::size_t index = behind ? steps.size() - 1 - turn : turn;
    const BoundStep& s = steps[index];
    if (MayBeGiven(s)) {
      const std::size_t last = touched.Of(s.src_off, s.len);
      if (last != LastTouch::kNever) found[index] = static_cast<std::uint32_t>(behind ? steps.size() - 1 - last : last);
    }
    if (s.src_buf == Buf::kScratch) touched.Set(s.src_off, s.len, turn);
    if (s.dst_buf == Buf::kScratch) touched.Set(s.dst_off, s.len, turn);
  }
  return found;
}

// Of a step that touches what `sent` sends: whether it writes that, all of it, and reads none of it.
bool Writes(const BoundStep& t, const BoundStep& sent) {
  const bool adds = t.op == Op::kReduce || t.op == Op::kScale;  // to what is there
  const bool reads =
      t.src_buf == Buf::kScratch && t.src_off < sent.src_off + sent.len && sent.src_off < t.src_off + t.len;
  return !adds && !reads && t.dst_off == sent.src_off && t.len == sent.len;
}

}  // namespace

// The number of each message on its FIFO. O(n).
void BoundPlan::NumberMessages(const Plan& plan) {
  std::array<std::vector<std::uint32_t>, 2> messages;  // so far: received, sent
  for (auto& each : messages) each.resize(Fifos(plan));
  for (BoundStep& s : steps) {
    if (s.op <= Op::kRecvReduce) s.number = kNumberStep * messages[s.op == Op::kSend ? 1 : 0][Fifo(s)]++;
  }
}

// Which deps can be followed element by element, and which are there for calls in place alone. O(n).
void BoundPlan::BindDeps(const Plan& plan) {
  deps.reserve(plan.deps.size());
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const StepRecord& r = plan.steps[i];
    steps[i].dep_begin = static_cast<std::uint32_t>(deps.size());
    for (std::uint32_t d = 0; d < r.dep_count; ++d) {
      const std::uint32_t on = plan.deps[r.dep_begin + d];
      const StepRecord& q = plan.steps[on];
      bool same = false;
      bool skewed = false;
      bool anyway = false;
      const auto hazard = [&](const SpanRecord& x, const SpanRecord& y) {
        const SpanRecord a = InPlaceName(x, plan.head), b = InPlaceName(y, plan.head);
        same |= SameSpan(a, b);
        skewed |= Overlaps(a, b) && !SameSpan(a, b);
        anyway |= Overlaps(x, y);
      };
      hazard(q.dst, r.src);
      hazard(q.src, r.dst);
      hazard(q.dst, r.dst);
      const bool local = r.op == std::uint8_t(Op::kLocal) || q.op == std::uint8_t(Op::kLocal);
      deps.push_back({on, same && !skewed && !local, apart && (same || skewed) && !anyway && !local});
    }
    steps[i].dep_end = static_cast<std::uint32_t>(deps.size());
  }
}

// Lane by lane, in the order of the plan. O(n).
void BoundPlan::OrderLanes(const Plan& plan) {
  lane_begin.assign(plan.head.lanes + 1u, 0);
  for (const StepRecord& r : plan.steps) ++lane_begin[r.lane + 1u];
  for (std::size_t lane = 1; lane < lane_begin.size(); ++lane) lane_begin[lane] += lane_begin[lane - 1];
  std::vector<std::uint32_t> next = lane_begin;
  order.resize(plan.steps.size());
  for (std::uint32_t i = 0; i < plan.steps.size(); ++i) order[next[plan.steps[i].lane]++] = i;
}

// Who reads what a step writes. A sum that is sent is fused with the first send of it by another lane that waits, no
// later than the next step that writes the span. What nobody else reads, at any time, is stored around the caches where
// the buffers are `large`. O(n log n): between two writes of a span, each reader is looked at once.
void BoundPlan::MarkReaders(const Plan& plan, bool large) {
  const std::vector<SpanTouch> touches = TouchesOf(plan);
  const auto fuses = [&](std::uint32_t i, std::uint32_t j) {
    const StepRecord& r = plan.steps[i];
    const StepRecord& t = plan.steps[j];
    return steps[i].op == Op::kRecvReduce && steps[j].op == Op::kSend && r.lane != t.lane && t.dep_count > 0 &&
           !steps[i].block && !steps[j].block;
  };
  for (auto begin = touches.begin(); begin != touches.end();) {
    const auto end = std::find_if(begin, touches.end(), [&](const SpanTouch& t) { return t.span != begin->span; });
    const auto readers = std::count_if(begin, end, [](const SpanTouch& t) { return !t.writes(); });
    for (auto at = begin; at != end; ++at) {
      if (!at->writes()) continue;
      BoundStep& s = steps[at->step()];
      auto next = at + 1;
      while (next != end && !next->writes() && !fuses(at->step(), next->step())) ++next;
      const bool fused = next != end && !next->writes();
      if (fused) s.fuse = static_cast<std::int32_t>(next->step());
      const bool itself = at != begin && (at - 1)->step() == at->step();
      s.stream_stores = large && readers == (fused ? 1 : 0) + (itself ? 1 : 0) && s.dst_buf == Buf::kRecv;
    }
    begin = end;
  }
}

// Whoever reduces what we sent may leave the result where it lies, if that goes back to us. Our place is then taken
// until we have read it; so we must be able to read it whatever else waits: it is the first message on its channel, and
// its receive is the first step of its lane and waits for nothing. O(n).
void BoundPlan::MarkAnswers(const Plan& plan) {
  std::vector<std::int16_t> channels(static_cast<std::size_t>(plan.size), -1);  // of each peer's answer
  for (std::size_t lane = 0; lane + 1 < lane_begin.size(); ++lane) {
    if (lane_begin[lane] == lane_begin[lane + 1]) continue;
    const BoundStep& answer = steps[order[lane_begin[lane]]];
    if (answer.op != Op::kRecv || answer.number != 0 || answer.block || answer.dep_begin != answer.dep_end) continue;
    std::int16_t& channel = channels[static_cast<std::size_t>(answer.peer)];
    if (channel < 0) channel = static_cast<std::int16_t>(answer.channel);
  }
  for (BoundStep& s : steps) {
    if (s.op == Op::kSend && !s.block) s.back = channels[static_cast<std::size_t>(s.peer)];
  }
}

// Sends to whom the plan also receives from, on the same channel. O(n).
void BoundPlan::MarkMutual(const Plan& plan) {
  std::vector<bool> receives(Fifos(plan));
  for (const BoundStep& s : steps) {
    if (s.op == Op::kRecv || s.op == Op::kRecvReduce) receives[Fifo(s)] = true;
  }
  for (BoundStep& s : steps) {
    if (s.op == Op::kSend && (s.back < 0 || s.back == static_cast<std::int16_t>(s.channel)))
      s.mutual = receives[Fifo(s)];
  }
}

// What is written to a place in scratch and read by one send only, before the place is written again or never. Steps
// that touch the same place depend on each other in the order that they have in the plan, or both read. O(n log n).
void BoundPlan::MarkGiven() {
  const std::vector<std::uint32_t> before = Neighbours(steps, false), behind = Neighbours(steps, true);
  for (std::size_t i = 0; i < steps.size(); ++i) {
    BoundStep& s = steps[i];
    s.gives = MayBeGiven(s) && before[i] < steps.size() && Writes(steps[before[i]], s) &&
              (behind[i] == steps.size() || Writes(steps[behind[i]], s));
  }
}

// What no step touches takes no room: a plan that uses a few places again and again would keep it from the heap.
// O(n log n).
void BoundPlan::PackScratch() {
  constexpr std::size_t kPage = 4096;
  const auto each = [this](auto&& visit) {
    for (BoundStep& s : steps) {
      if (s.src_buf == Buf::kScratch) visit(s.src_off, s.len);
      if (s.dst_buf == Buf::kScratch) visit(s.dst_off, s.len);
    }
  };
  std::map<std::size_t, std::size_t> ends;  // by where each span begins
  each([&](std::size_t off, std::size_t len) {
    std::size_t& end = ends[off];
    end = std::max(end, off + len);
  });
  std::size_t end = 0, gaps = 0;  // so far, and whole pages among them
  std::map<std::size_t, std::size_t> before;
  for (const auto& [off, until] : ends) {
    gaps += off > end ? (off - end) / kPage * kPage : 0;
    before[off] = gaps;
    end = std::max(end, until);
  }
  each([&](std::size_t& off, std::size_t) { off -= before.at(off); });
  scratch_bytes = end - gaps;
}

}  // namespace hetcoll
