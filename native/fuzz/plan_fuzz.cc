// Plans that Python hands over, and what binds them to the counts of a call: whatever is taken stays in its buffers.
#include <vector>

#include "harness.h"
#include "kernels/codecs.h"
#include "plan/plan.h"
#include "script.h"

namespace hetcoll::fuzz {
namespace {

constexpr testing::Algorithm kDrawn[] = {testing::RingAllreduce,   testing::DirectAllreduce, testing::ScratchAllreduce,
                                         testing::StagedAllreduce, testing::DirectBroadcast, testing::IslandAllreduce};

std::vector<std::size_t> Table(Script& script, std::uint32_t units, std::size_t count) {
  std::vector<std::size_t> table;
  if (!script.Flip() || units > 64) return table;
  for (std::uint32_t i = 0; i <= units; ++i) table.push_back(script.Below(count + 2));
  if (script.Flip()) std::sort(table.begin(), table.end());
  if (script.Below(8) == 1) table.pop_back();
  return table;
}

void HoldInside(const BoundPlan& bound, Buf buf, std::size_t off, std::size_t len) {
  if (buf == Buf::kNone) return;
  const std::size_t size = buf == Buf::kSend   ? bound.send_bytes
                           : buf == Buf::kRecv ? bound.recv_bytes
                                               : bound.scratch_bytes;
  Hold(off <= size && len <= size - off, "a step is outside of its buffer");
}

void Look(const BoundPlan& bound) {
  const std::size_t steps = bound.steps.size();
  for (const BoundStep& s : bound.steps) {
    HoldInside(bound, s.src_buf, s.src_off, s.len);
    HoldInside(bound, s.dst_buf, s.dst_off, s.len);
    if (s.wire > 0) HoldInside(bound, Buf::kScratch, s.codes, s.wire);
    Hold(s.fuse < static_cast<int>(steps) && s.dep_begin <= s.dep_end && s.dep_end <= bound.deps.size(),
         "a step's deps");
  }
  for (const BoundDep& dep : bound.deps) Hold(dep.step < steps, "a dep of no step");
  std::vector<bool> ordered(steps);
  for (const std::uint32_t step : bound.order) {
    Hold(step < steps && !ordered[step], "an order of other steps");
    ordered[step] = true;
  }
  Hold(bound.order.size() == steps && bound.lane_begin.back() == steps, "a step in no lane");
  for (const BoundLocal& local : bound.locals) {
    Hold(local.step < steps, "no local step");
    for (const BoundPart& part : local.parts) HoldInside(bound, part.buf, part.off, part.len);
  }
}

void Play(Script script) {
  const int size = 2 + static_cast<int>(script.Below(4));
  const auto type = static_cast<DType>(script.Below(kDTypes));
  std::vector<std::byte> encoded =
      kDrawn[script.Below(std::size(kDrawn))](size, static_cast<int>(script.Below(static_cast<std::size_t>(size))));
  const std::size_t send = script.Below(300), recv = script.Flip() ? send : script.Below(300);
  const bool skips = script.Flip(), compresses = script.Flip();
  while (!script.ended()) {
    // A word of a record, or its kinds and numbers.
    const std::size_t at = script.Below(encoded.size()),
                      n = std::min(encoded.size() - at, script.Flip() ? std::size_t{4} : std::size_t{1});
    const std::uint64_t value = script.Number(static_cast<std::uint64_t>(size));
    std::memcpy(encoded.data() + at / n * n, &value, n);
    if (script.Below(16) == 1) encoded.resize(at);
    if (encoded.empty()) return;
  }
  try {
    const Plan plan(encoded, size);
    const auto sends = Table(script, plan.head.send_units, send), recvs = Table(script, plan.head.recv_units, recv);
    const Codec* codec = compresses && type == DType::kFloat32 ? FindCodec(type, Format::kBf16) : nullptr;
    Look(BoundPlan(plan, type, send, recv, sends, recvs, skips, codec));
  } catch (const PlanError&) {
  }
}

}  // namespace
}  // namespace hetcoll::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  hetcoll::fuzz::Play({data, size});
  return 0;
}
