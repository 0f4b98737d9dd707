// Plans that come in from outside: what is refused, and that no bytes at all can make the decoder or the binder step
// outside their memory. And what the binder finds out about steps: which answers come back, which sums are kept.

#include <random>

#include "harness.h"

namespace hetcoll::testing {
namespace {

bool Refused(const Encoded& encoded, int size) {
  try {
    Plan plan(encoded, size);
  } catch (const PlanError&) {
    return true;
  }
  return false;
}

// Every byte of a bound plan lies inside its buffer.
void CheckBounds(const BoundPlan& bound) {
  const auto inside = [&](Buf buf, std::size_t off, std::size_t len) {
    const std::size_t size = buf == Buf::kSend   ? bound.send_bytes
                             : buf == Buf::kRecv ? bound.recv_bytes
                                                 : bound.scratch_bytes;
    return buf == Buf::kNone || (off <= size && len <= size - off);
  };
  bool ok = true;
  for (const BoundStep& s : bound.steps) {
    ok &= inside(s.src_buf, s.src_off, s.len) && inside(s.dst_buf, s.dst_off, s.len);
    const bool reads = s.op != Op::kRecv && s.op != Op::kScale && s.op != Op::kLocal;
    const bool writes = s.op != Op::kSend && s.op != Op::kLocal;
    ok &= (!reads || s.src_buf != Buf::kNone) && (!writes || s.dst_buf != Buf::kNone);
  }
  for (const BoundLocal& local : bound.locals) {
    ok &= local.step < bound.steps.size() && bound.steps[local.step].op == Op::kLocal;
    for (const BoundPart& part : local.parts) ok &= inside(part.buf, part.off, part.len);
  }
  CHECK(ok, "a step outside its buffers");
}

// Of scratch that others read, only what steps touch takes room.
void CheckPacking() {
  constexpr std::uint32_t kUnits = 64;
  constexpr std::size_t kUnit = 3000;  // bytes, which are no whole pages
  for (const bool stage : {false, true}) {
    Draft p(2, 0, kUnits, kUnits);
    p.Scratch(2);
    if (stage) p.Stage();
    for (const int unit : {5, 6, 40, 64, 127}) p.Local(Op::kCopy, 0, Draft::Tmp(unit), Draft::In(unit % 64));
    p.Send(1, Draft::Tmp(40), 1, 0, {2});
    const BoundPlan bound(Plan(p.Encode(), 2), DType::kUint8, kUnits * kUnit, kUnits * kUnit, {}, {});
    CheckBounds(bound);
    const std::size_t all = 2 * kUnits * kUnit;
    CHECK(stage ? bound.scratch_bytes < 5 * (kUnit + 4096) : bound.scratch_bytes == all, "%zu", bound.scratch_bytes);
    CHECK(bound.steps[1].dst_off == bound.steps[0].dst_off + kUnit, "neighbours stay neighbours");
    CHECK(bound.steps[5].src_off == bound.steps[2].dst_off, "a place is one place");
    for (std::size_t i = 1; i < 5; ++i) {
      CHECK(bound.steps[i].dst_off >= bound.steps[i - 1].dst_off + kUnit, "place %zu overlaps", i);
    }
  }
}

// A message without bytes that is none becomes a copy inside one buffer: of another one its offset may be too large.
void CheckSkipped() {
  const std::size_t sent[] = {0, 100, 100}, received[] = {0, 0, 0};
  Draft p(2, 0, 2, 2);
  p.RecvReduce(0, Draft::Out(1), Draft::In(1), 1, 0);
  p.Send(0, Draft::In(1), 1, 0);
  const BoundPlan bound(Plan(p.Encode(), 2), DType::kFloat32, 100, 0, sent, received, true);
  CheckBounds(bound);
  for (const BoundStep& s : bound.steps) {
    CHECK(s.op == Op::kCopy && s.src_buf == s.dst_buf && s.src_off == s.dst_off, "a copy to its own place");
  }
}

// The plan with its first step changed.
template <class Change>
Encoded Broken(Encoded plan, Change change) {
  StepRecord step;
  std::byte* at = plan.data() + sizeof(PlanHeader);
  std::memcpy(&step, at, sizeof step);
  change(step);
  std::memcpy(at, &step, sizeof step);
  return plan;
}

// Reduces as usual, and counts how sums were stored.
const Kernels& Usual() { return *FindKernels(DType::kFloat32, ReduceOp::kSum); }
std::atomic<int> around{0}, through{0};
void Counted(void* dst, const void* a, const void* b, std::size_t count, Sweep sweep) {
  ++(sweep == Sweep::kAround ? around : through);
  Usual().reduce(dst, a, b, count, sweep);
}

Encoded DirectReduceScatter(int n, int r) {
  Draft p(n, r, static_cast<std::uint32_t>(n), static_cast<std::uint32_t>(n));
  p.Send(0, Draft::In(1 - r), 1 - r, 0);
  p.RecvReduce(1, Draft::Out(r), Draft::In(r), 1 - r, 0);
  return p.Encode();
}

}  // namespace

void CheckPlans() {
  CheckPacking();
  CheckSkipped();
  const Encoded good = RingAllreduce(3, 1);
  CHECK(!Refused(good, 3), "a good plan");
  CHECK(Refused(good, 2), "a peer beyond the last rank");
  CHECK(Refused(Encoded(good.begin(), good.begin() + 20), 3), "shorter than its header");
  CHECK(Refused(Encoded(good.begin(), good.end() - 1), 3), "cut short");
  const auto broken = [&](auto change) { return Broken(good, change); };
  CHECK(Refused(broken([](StepRecord& s) { s.op = 8; }), 3), "an unknown operation");
  CHECK(Refused(broken([](StepRecord& s) { s.lane = 40; }), 3), "a lane too many");
  CHECK(Refused(broken([](StepRecord& s) { s.channel = kLinkChannels; }), 3), "a channel too many");
  CHECK(Refused(broken([](StepRecord& s) { s.peer = -1; }), 3), "a send to nobody");
  CHECK(Refused(broken([](StepRecord& s) { s.src.buf = -1; }), 3), "a send of nothing");
  CHECK(Refused(broken([](StepRecord& s) { s.src.start = 3; }), 3), "a span behind the end");
  CHECK(Refused(broken([](StepRecord& s) { s.src.count = 0; }), 3), "a span of nothing");
  CHECK(Refused(broken([](StepRecord& s) { s.dep_count = 99; }), 3), "deps behind the end");

  // The answer to what is sent on channel 0 may come back in its place, where nothing else can be in its way.
  const auto backs = [](const Encoded& encoded, int size) {
    std::vector<int> found;
    for (const BoundStep& s : BoundPlan(Plan(encoded, size), DType::kInt16, 100, 100, {}, {}).steps) {
      if (s.op == Op::kSend) found.push_back(s.back);
    }
    return found;
  };
  CHECK((backs(DirectAllreduce(2, 0), 2) == std::vector{1, 1}), "direct, 2 ranks");
  CHECK((backs(DirectAllreduce(3, 0), 3) == std::vector{-1, 1, -1, 1}), "direct, 3 ranks: of the first to answer");
  CHECK((backs(ScratchAllreduce(2, 0), 2) == std::vector{-1}), "no first step of a lane");
  Draft waiting(2, 0, 2, 2);
  const int sent = waiting.Send(0, Draft::In(0), 1, 0);
  waiting.Recv(1, Draft::Out(1), 1, 1, {sent});
  CHECK(backs(waiting.Encode(), 2) == std::vector{-1}, "a receive that waits for the send");
  Draft second(2, 0, 2, 2);
  second.Send(0, Draft::In(0), 1, 0);
  second.Recv(1, Draft::Out(0), 1, 1);
  second.Recv(2, Draft::Out(1), 1, 1);
  CHECK(backs(second.Encode(), 2) == std::vector{1}, "the first message of a channel only");

  const Plan plan(good, 3);
  const std::vector<std::size_t> table{0, 4, 4, 10}, disordered{0, 5, 4, 10}, shorter{0, 10};
  const BoundPlan bound(plan, DType::kInt16, 10, 10, table, table);
  CheckBounds(bound);
  for (const auto& bad : {disordered, shorter, std::vector<std::size_t>{0, 4, 4, 11}}) {
    bool refused = false;
    try {
      BoundPlan(plan, DType::kInt16, 10, 10, bad, bad);
    } catch (const PlanError&) {
      refused = true;
    }
    CHECK(refused, "a table of offsets that fits neither plan nor buffer");
  }
}

// Sums larger than the caches go around them, but for those that a socket is about to be given.
void StoringSums() {
  constexpr std::size_t kCount = (16 << 20) / sizeof(float);
  const Kernels counted{Counted, Usual().reduce2, Usual().scale};
  for (const Algorithm algorithm : {DirectAllreduce, DirectReduceScatter}) {
    around = through = 0;
    Job job({.size = 2, .over = Over::kTcp});
    job.Run([&](int rank, Engine& e) {
      const auto shape = BindAllreduce(e, 2, rank, algorithm, DType::kFloat32, kCount);
      shape->kernels = &counted;
      const Bytes in = Input(rank, kCount, DType::kFloat32);
      Bytes out(in.size());
      CHECK(RunToEnd(e, shape, in.data(), out.data()) == Outcome::kDone, "%s", e.failure().text.c_str());
    });
    const bool sent = algorithm == DirectAllreduce;
    CHECK((sent ? around : through) == 0 && (sent ? through : around) > 0, "%d around, %d not", around.load(),
          through.load());
  }
}

void CheckLocals() {
  const Encoded good = IslandAllreduce(2, 1);
  const BoundPlan bound(Plan(good, 2), DType::kFloat32, 5, 5, {}, {});
  CheckBounds(bound);
  CHECK(bound.locals.size() == 3 && bound.steps[0].len == 12 && bound.steps[0].dst_off == 8, "the second half");
  const BoundLocal& scatter = bound.locals[0];
  CHECK(scatter.kind == Collective::kReduceScatter && scatter.root == -1 && scatter.parts.size() == 2, "its parts");
  CHECK(scatter.parts[0].len == 8 && scatter.parts[1].off == 8 && scatter.parts[1].len == 12, "cut like the buffer");
  CHECK(bound.locals[2].kind == Collective::kGather && bound.locals[2].root == 1, "its root");
  const auto broken = [&](auto change) { return Broken(good, change); };
  CHECK(Refused(broken([](StepRecord& s) { s.channel = 8; }), 2), "not a collective of islands");
  CHECK(Refused(broken([](StepRecord& s) { s.part_count = 5; }), 2), "parts behind the end");
  CHECK(Refused(broken([](StepRecord& s) { s.part_begin = 0xffffffff; }), 2), "parts far behind the end");
  CHECK(Refused(broken([](StepRecord& s) { s.peer = -2; }), 2), "no root");
  Encoded beyond = good;
  const SpanRecord part{0, 2, 1};
  std::memcpy(beyond.data() + beyond.size() - sizeof part, &part, sizeof part);
  CHECK(Refused(beyond, 2), "a part outside its buffer");
}

void FuzzPlans() {
  std::mt19937 random(20261120);
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  int bound_plans = 0;
  for (int round = 0; round < 20000; ++round) {
    const int size = 2 + static_cast<int>(below(3));
    const Algorithm algorithms[] = {RingAllreduce, DirectAllreduce, ScratchAllreduce, IslandAllreduce};
    Encoded plan = algorithms[below(4)](size, static_cast<int>(below(static_cast<std::size_t>(size))));
    for (std::size_t edits = below(4); edits > 0; --edits) {
      switch (below(4)) {
        case 0:
          plan[below(plan.size())] = static_cast<std::byte>(random());
          break;
        case 1: {  // a whole field, with the values that break arithmetic
          const std::uint32_t values[] = {0, 1, 2, 0x7fffffff, 0x80000000, 0xffffffff, 0x10000};
          std::memcpy(plan.data() + below(plan.size() / 4) * 4, &values[below(7)], 4);
          break;
        }
        case 2:  // a small step away
          plan[below(plan.size())] = static_cast<std::byte>(below(5));
          break;
        default:
          if (below(8) == 0) plan.resize(plan.size() - std::min<std::size_t>(below(60), plan.size() - 4));
      }
    }
    try {
      const Plan decoded(plan, size);
      const std::size_t send = below(1000), recv = below(4) == 0 ? below(1000) : send;
      CheckBounds(BoundPlan(decoded, static_cast<DType>(below(kDTypes)), send, recv, {}, {}, below(2) == 0));
      ++bound_plans;
    } catch (const PlanError&) {
    }
  }
  CHECK(bound_plans > 1000, "only %d of the mutants were bound", bound_plans);
}

}  // namespace hetcoll::testing
