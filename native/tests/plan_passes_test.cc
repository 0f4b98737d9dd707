// What the binder's passes find out about steps, against the same rules written as they are said: a look at every pair
// of steps. On random plans, which are no sensible ones. And that plans of many steps are bound by passes, not by
// pairs.

#include <algorithm>
#include <map>
#include <random>
#include <tuple>

#include "harness.h"

namespace hetcoll::testing {
namespace {

bool Same(const SpanRecord& a, const SpanRecord& b) {
  return a.buf >= 0 && a.buf == b.buf && a.start == b.start && a.count == b.count;
}

struct Sums {
  int fuse = -1;
  bool streams = false;
};

// Which send step i is fused with, and whether its result goes around the caches.
Sums SumsOf(const Plan& plan, const BoundPlan& bound, std::size_t i, bool large) {
  Sums found;
  const StepRecord& r = plan.steps[i];
  if (r.dst.buf < 0) return found;
  bool read = false, overwritten = false;
  for (std::size_t j = 0; j < plan.steps.size(); ++j) {
    const StepRecord& t = plan.steps[j];
    if (j == i) continue;
    if (Same(r.dst, t.src)) {
      const bool pair = bound.steps[i].op == Op::kRecvReduce && bound.steps[j].op == Op::kSend && r.lane != t.lane;
      const bool blocks = bound.steps[i].block || bound.steps[j].block;
      if (pair && !blocks && j > i && !overwritten && t.dep_count > 0 && found.fuse < 0) {
        found.fuse = static_cast<int>(j);
      } else {
        read = true;
      }
    }
    overwritten |= j > i && Same(r.dst, t.dst);
  }
  found.streams = large && !read && r.dst.buf == 1;
  return found;
}

// Whether step i may give away what it sends.
bool Gives(const BoundPlan& bound, std::size_t i) {
  enum class First { kNothing, kWrite, kOther };
  const BoundStep& s = bound.steps[i];
  const auto look = [&](auto begin, auto end) {
    const auto touched = [&](const BoundStep& t, Buf buf, std::size_t off) {
      return buf == Buf::kScratch && off < s.src_off + s.len && s.src_off < off + t.len;
    };
    for (auto t = begin; t != end; ++t) {
      if (touched(*t, t->src_buf, t->src_off)) return First::kOther;
      if (touched(*t, t->dst_buf, t->dst_off)) {
        const bool adds = t->op == Op::kReduce || t->op == Op::kScale;  // to what is there
        return !adds && t->dst_off == s.src_off && t->len == s.len ? First::kWrite : First::kOther;
      }
    }
    return First::kNothing;
  };
  const auto here = bound.steps.begin() + static_cast<std::ptrdiff_t>(i);
  return bound.staged && s.op == Op::kSend && !s.block && s.src_buf == Buf::kScratch && s.len > 0 &&
         look(here + 1, bound.steps.end()) != First::kOther &&
         look(std::make_reverse_iterator(here), bound.steps.rend()) == First::kWrite;
}

// On which channel the answer to step i may come in its place.
int Back(const Plan& plan, const BoundPlan& bound, const BoundStep& s) {
  if (s.op != Op::kSend || s.block) return -1;
  for (std::uint32_t lane = 0; lane < plan.head.lanes; ++lane) {
    const auto first =
        std::find_if(plan.steps.begin(), plan.steps.end(), [&](const StepRecord& r) { return r.lane == lane; });
    if (first == plan.steps.end()) continue;
    const BoundStep& t = bound.steps[static_cast<std::size_t>(first - plan.steps.begin())];
    const bool waits = first->dep_count > 0;
    if (t.op == Op::kRecv && t.peer == s.peer && t.number == 0 && !t.block && !waits) return t.channel;
  }
  return -1;
}

void Compare(const Plan& plan, const BoundPlan& bound, bool large) {
  std::map<std::tuple<bool, int, int>, std::uint64_t> messages;
  std::vector<std::uint32_t> order;
  for (std::uint32_t lane = 0; lane < plan.head.lanes; ++lane) {
    CHECK(bound.lane_begin[lane] == order.size(), "where lane %u begins", lane);
    for (std::uint32_t i = 0; i < plan.steps.size(); ++i) {
      if (plan.steps[i].lane == lane) order.push_back(i);
    }
  }
  CHECK(bound.order == order && bound.lane_begin.back() == order.size(), "the order");
  for (std::size_t i = 0; i < bound.steps.size(); ++i) {
    const BoundStep& s = bound.steps[i];
    const bool sends = s.op == Op::kSend;
    const auto received = [&](const BoundStep& t) {
      return (t.op == Op::kRecv || t.op == Op::kRecvReduce) && t.peer == s.peer && t.channel == s.channel;
    };
    if (s.op <= Op::kRecvReduce) {
      std::uint64_t& before = messages[std::tuple(sends, s.peer, int{s.channel})];
      CHECK(s.number == kNumberStep * before, "message of step %zu", i);
      ++before;
    }
    const Sums sums = SumsOf(plan, bound, i, large);
    CHECK(s.fuse == sums.fuse, "step %zu is fused with %d, not %d", i, s.fuse, sums.fuse);
    CHECK(s.stream_stores == sums.streams, "how step %zu stores", i);
    CHECK(s.back == Back(plan, bound, s), "step %zu: answered on %d", i, s.back);
    const bool mutual =
        sends && (s.back < 0 || s.back == s.channel) && std::any_of(bound.steps.begin(), bound.steps.end(), received);
    CHECK(s.mutual == mutual, "whether step %zu is mutual", i);
    CHECK(s.gives == Gives(bound, i), "whether step %zu gives", i);
  }
}

// Steps over few units, so that spans are often the same, overlap, or have no bytes.
Encoded RandomPlan(std::mt19937& random, int size, bool stage) {
  constexpr int kUnits = 5;
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  Draft p(size, 0, kUnits, kUnits);
  p.Scratch(1);
  if (stage) p.Stage();
  const int steps = 1 + below(24), lanes = 1 + below(4);
  for (int i = 0; i < steps; ++i) {
    if (below(16) == 0) p.Compress(below(2) == 0);
    const auto buf = [&] { return std::min(2, below(5)); };  // mostly scratch
    const int count = 1 + below(4) / 2;
    const SpanRecord x{buf(), below(kUnits - count + 1), count};
    const SpanRecord y = below(2) == 0 ? x : SpanRecord{buf(), x.start, x.count};  // as long, however cut
    const int lane = below(lanes), peer = 1 + below(size - 1), channel = below(2);
    const int after = below(3) == 0 ? -1 : below(i + 1) - 1;
    switch (below(5)) {
      case 0:
      case 1:
        p.Send(lane, x, peer, channel, {after});
        break;
      case 2:
        p.Recv(lane, x, peer, channel, {after});
        break;
      case 3:
        p.RecvReduce(lane, x, y, peer, channel, {after});
        break;
      default:
        p.Local(below(2) == 0 ? Op::kCopy : Op::kReduce, lane, x, y, {after});
    }
  }
  return p.Encode();
}

// A place is written, sent to all others, and written again; and so on.
Encoded ManySteps(int size, int rounds) {
  constexpr int kUnits = 64;
  Draft p(size, 0, kUnits, kUnits);
  p.Scratch(1);
  p.Stage();
  for (int k = 0; k < rounds; ++k) {
    const SpanRecord place = Draft::Tmp(k % kUnits);
    const int written = p.RecvReduce(1, place, Draft::In(k % kUnits), 1, 0);
    for (int peer = 1; peer < size; ++peer) p.Send(0, place, peer, 0, {written});
    p.Recv(2, Draft::Out(k % kUnits), 1 + k % (size - 1), 1);
  }
  return p.Encode();
}

}  // namespace

void ComparePasses() {
  std::mt19937 random(20261123);
  long fused = 0, given = 0, streamed = 0, back = 0, mutual = 0, compressed = 0;
  for (int round = 0; round < 6000; ++round) {
    const int size = 2 + round % 3;
    const Plan plan(RandomPlan(random, size, round % 4 > 0), size);
    const bool large = round % 5 == 0;
    const std::size_t count = large ? std::size_t{20} << 20 : random() % 12;
    const BoundPlan bound(plan, DType::kFloat32, count, count, {}, {}, round % 7 == 0,
                          FindCodec(DType::kFloat32, Format::kInt8));
    Compare(plan, bound, large);
    for (const BoundStep& s : bound.steps) {
      fused += s.fuse >= 0;
      given += s.gives;
      streamed += s.stream_stores;
      back += s.back >= 0;
      mutual += s.mutual;
      compressed += s.wire > 0;
    }
  }
  const long least = std::min({fused, given, streamed, back, mutual, compressed});
  CHECK(least > 100,
        "the random plans had %ld fused, %ld given, %ld streamed, %ld answered, %ld mutual, %ld compressed", fused,
        given, streamed, back, mutual, compressed);
}

// A look at every pair of so many steps takes more than half a minute, the passes a tenth of a second.
void BindManySteps() {
  const Plan plan(ManySteps(64, 4000), 64);
  CHECK(plan.steps.size() == 4000u * 65u, "%zu steps", plan.steps.size());
  const double start = ProcessorSeconds();
  const BoundPlan bound(plan, DType::kUint8, 64, 64, {}, {});
  const double took = ProcessorSeconds() - start;
  CHECK(took < 15, "%zu steps were bound in %.1f s", bound.steps.size(), took);
}

}  // namespace hetcoll::testing
