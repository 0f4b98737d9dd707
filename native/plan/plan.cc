// Plans as they come in: every field is checked here, once, so that nothing that works on plans has to.
#include "plan/plan.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace hetcoll {
namespace {

// Of a buffer, and of all copies in SCRATCH: that numbers of units, and sums of two, fit 31 bits.
constexpr std::uint64_t kMostUnits = 1 << 30;

void CheckHeader(const PlanHeader& head) {
  if (head.magic != kPlanMagic) throw PlanError("plan: wrong magic number");
  const std::uint32_t like = head.scratch_like == 0 ? head.send_units : head.recv_units;
  if (head.lanes > kMaxLanes || head.send_units > kMostUnits || head.recv_units > kMostUnits ||
      std::uint64_t{head.scratch_copies} * like > kMostUnits || head.scratch_like > 1 ||
      head.flags > (kApart | kStaged | kRedundant) || (head.scratch_copies > 0 && like == 0)) {
    throw PlanError("plan: too many lanes, units or copies, or scratch like nothing");
  }
  const auto [smaller, larger] = std::minmax(head.send_units, head.recv_units);
  if (std::uint64_t{head.place} + smaller > larger) throw PlanError("plan: the smaller buffer is outside the larger");
}

void CheckSpan(const SpanRecord& s, bool needed, const PlanHeader& head, std::size_t step) {
  if (s.buf == -1 && !needed) return;
  const std::uint32_t like = head.scratch_like == 0 ? head.send_units : head.recv_units;
  const std::uint64_t units = s.buf == 0   ? head.send_units
                              : s.buf == 1 ? head.recv_units
                                           : std::uint64_t{head.scratch_copies} * like;
  const bool inside = s.buf >= 0 && s.buf <= 2 && s.start >= 0 && s.count >= 1 &&
                      std::uint64_t(s.start) + std::uint64_t(s.count) <= units;
  const bool one_copy =
      s.buf != 2 || (inside && std::uint32_t(s.start) / like == std::uint32_t(s.start + s.count - 1) / like);
  if (!inside || !one_copy) {
    throw PlanError("plan step " + std::to_string(step) + ": span missing or outside its buffer");
  }
}

}  // namespace

std::size_t CutOffset(std::size_t count, std::uint32_t units, std::uint32_t unit) {
  // 128-bit, so that count * unit cannot overflow.
  return static_cast<std::size_t>(static_cast<unsigned __int128>(count) * unit / units);
}

Plan::Plan(std::span<const std::byte> encoded, int size) : size(size) {
  if (encoded.size() < sizeof head) throw PlanError("plan: shorter than its header");
  std::memcpy(&head, encoded.data(), sizeof head);
  CheckHeader(head);
  const std::size_t want = sizeof head + sizeof(StepRecord) * head.steps + sizeof(std::uint32_t) * head.deps +
                           sizeof(SpanRecord) * head.parts;
  if (encoded.size() != want) throw PlanError("plan: wrong length");
  const std::byte* at = encoded.data() + sizeof head;
  const auto read = [&at](auto& records, std::size_t count) {
    records.resize(count);
    const std::size_t bytes = sizeof(records[0]) * count;
    if (bytes > 0) std::memcpy(records.data(), at, bytes);
    at += bytes;
  };
  read(steps, head.steps);
  read(deps, head.deps);
  read(parts, head.parts);
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const StepRecord& s = steps[i];
    const bool talks = s.op <= std::uint8_t(Op::kRecvReduce);
    const bool local = s.op == std::uint8_t(Op::kLocal);
    if (s.op > std::uint8_t(Op::kRound) || s.compressed > (talks ? 1 : 0) || s.lane >= head.lanes ||
        (!local && s.channel >= kLinkChannels) || (talks && (s.peer < 0 || s.peer >= size)) ||
        s.dep_begin > deps.size() || s.dep_count > deps.size() - s.dep_begin) {
      throw PlanError("plan step " + std::to_string(i) + ": field out of range");
    }
    const auto op = static_cast<Op>(s.op);
    CheckSpan(s.src, op != Op::kRecv && op != Op::kScale && !local, head, i);
    CheckSpan(s.dst, op != Op::kSend && !local, head, i);
    if (local) CheckLocal(s, i);
    for (std::uint32_t d = 0; d < s.dep_count; ++d) {
      if (deps[s.dep_begin + d] >= steps.size()) throw PlanError("plan step " + std::to_string(i) + ": unknown dep");
    }
  }
}

void Plan::CheckLocal(const StepRecord& s, std::size_t index) const {
  const bool inside = s.part_begin <= parts.size() && s.part_count <= parts.size() - s.part_begin;
  if (!inside || s.channel > std::uint16_t(Collective::kAlltoall) || s.peer < -1) {
    throw PlanError("plan step " + std::to_string(index) + ": no collective of an island");
  }
  for (std::uint32_t k = 0; k < s.part_count; ++k) CheckSpan(parts[s.part_begin + k], false, head, index);
}

std::size_t Plan::nbytes() const {
  return sizeof *this + steps.capacity() * sizeof(StepRecord) + deps.capacity() * sizeof(std::uint32_t) +
         parts.capacity() * sizeof(SpanRecord);
}

}  // namespace hetcoll
