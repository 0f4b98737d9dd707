// From units to bytes: a plan at the counts of one call. It takes one look at each step, dep and part; what it takes
// several steps to know is left to the passes (passes.cc).
#include <algorithm>
#include <string>

#include "plan/plan.h"

namespace hetcoll {
namespace {

// Messages above this are larger than a core's share of the last-level cache on most machines: what is stored once and
// not read again by the plan goes around the cache.
constexpr std::size_t kStreamBytes = std::size_t{12} << 20;

// Of the messages that this rank sends.
Use UseOf(const Plan& plan) {
  const auto has = [&plan](Op op) {
    return std::any_of(plan.steps.begin(), plan.steps.end(),
                       [op](const StepRecord& s) { return s.op == std::uint8_t(op); });
  };
  const std::uint16_t kind = plan.head.collective;
  if (kind == kPointToPoint) return has(Op::kSend) && has(Op::kRecv) ? Use::kExchanged : Use::kLone;
  switch (Collective{std::uint8_t(kind)}) {
    case Collective::kAllgather:
    case Collective::kAlltoall:
      return Use::kExchanged;
    case Collective::kAllreduce:
    case Collective::kReduceScatter:
    case Collective::kReduce:
      return Use::kSummed;
    default:
      return Use::kStored;
  }
}

void CheckTable(std::span<const std::size_t> table, std::uint32_t units, std::size_t count) {
  if (table.empty()) return;
  if (table.size() != units + 1u || !std::is_sorted(table.begin(), table.end()) || table.back() > count) {
    throw PlanError("plan: " + std::to_string(units + 1u) + " rising offsets up to " + std::to_string(count) +
                    " were wanted");
  }
}

// Where the units of the three buffers begin.
class Layout {
 public:
  struct Bytes {
    std::size_t off;
    std::size_t len;
  };

  Layout(const PlanHeader& head, std::size_t item, std::size_t send_count, std::size_t recv_count,
         std::span<const std::size_t> send_table, std::span<const std::size_t> recv_table)
      : item_(item),
        ends_{{{send_count, head.send_units, send_table}, {recv_count, head.recv_units, recv_table}}},
        like_(head.scratch_like) {
    for (const End& end : ends_) CheckTable(end.table, end.units, end.count);
    copy_bytes_ = head.scratch_copies == 0 ? 0 : Offset(like_, ends_[like_].units);
  }

  std::size_t copy_bytes() const { return copy_bytes_; }  // of one copy in SCRATCH

  // Of SEND (0) or RECV (1).
  std::size_t Offset(std::size_t buf, std::uint32_t unit) const {
    const End& end = ends_[buf];
    return (end.table.empty() ? CutOffset(end.count, end.units, unit) : end.table[unit]) * item_;
  }

  Bytes Of(const SpanRecord& s) const {
    if (s.buf < 0) return {0, 0};
    const auto start = static_cast<std::uint32_t>(s.start);
    const auto count = static_cast<std::uint32_t>(s.count);
    const bool scratch = s.buf == static_cast<int>(Buf::kScratch);
    const std::size_t buf = scratch ? like_ : static_cast<std::size_t>(s.buf);
    const std::uint32_t copy = scratch ? start / ends_[like_].units : 0, unit = start - copy * ends_[buf].units;
    const std::size_t begin = Offset(buf, unit);
    return {copy * copy_bytes_ + begin, Offset(buf, unit + count) - begin};
  }

 private:
  struct End {
    std::size_t count;
    std::uint32_t units;
    std::span<const std::size_t> table;  // or empty: the even cut
  };
  std::size_t item_;
  std::array<End, 2> ends_;
  std::size_t like_;
  std::size_t copy_bytes_ = 0;
};

BoundStep Resolve(const StepRecord& r, const Layout& layout, bool skip_empty) {
  BoundStep s;
  s.op = static_cast<Op>(r.op);
  s.channel = r.channel;
  s.peer = s.op == Op::kLocal ? -1 : r.peer;
  const Layout::Bytes src = layout.Of(r.src), dst = layout.Of(r.dst);
  s.src_buf = static_cast<Buf>(r.src.buf);
  s.dst_buf = static_cast<Buf>(r.dst.buf);
  s.src_off = src.off;
  s.dst_off = dst.off;
  s.len = r.dst.buf >= 0 ? dst.len : src.len;
  if (r.src.buf >= 0 && src.len != s.len) throw PlanError("plan: a step's spans differ in length");
  if (s.op <= Op::kRecvReduce && s.len == 0 && skip_empty) {
    s.op = Op::kCopy;  // of nothing
    s.peer = -1;
    if (r.dst.buf >= 0) {
      s.src_buf = s.dst_buf;
      s.src_off = s.dst_off;
    } else {
      s.dst_buf = s.src_buf;
      s.dst_off = s.src_off;
    }
  }
  return s;
}

BoundLocal ResolveLocal(const Plan& plan, std::uint32_t index, const Layout& layout) {
  const StepRecord& r = plan.steps[index];
  BoundLocal local{index, static_cast<Collective>(r.channel), r.peer, {}};
  for (std::uint32_t k = 0; k < r.part_count; ++k) {
    const SpanRecord& part = plan.parts[r.part_begin + k];
    const Layout::Bytes bytes = layout.Of(part);
    local.parts.push_back({static_cast<Buf>(part.buf), bytes.off, bytes.len});
  }
  return local;
}

}  // namespace

BoundPlan::BoundPlan(const Plan& plan, DType dtype, std::size_t send_count, std::size_t recv_count,
                     std::span<const std::size_t> send_table, std::span<const std::size_t> recv_table, bool skip_empty,
                     const Codec* codec) {
  const std::size_t item = ItemSize(dtype);
  const PlanHeader& h = plan.head;
  const Layout layout(h, item, send_count, recv_count, send_table, recv_table);
  may_lend = h.credits == 0;
  apart = (h.flags & kApart) != 0;
  staged = (h.flags & kStaged) != 0;
  use = UseOf(plan);
  scratch_bytes = layout.copy_bytes() * h.scratch_copies;
  send_bytes = send_count * item;
  recv_bytes = recv_count * item;
  may_alias = h.collective != kPointToPoint;
  if (may_alias && h.send_units != h.recv_units) part_off = layout.Offset(h.send_units > h.recv_units ? 0 : 1, h.place);

  steps.reserve(plan.steps.size());
  for (const StepRecord& r : plan.steps) {
    const auto index = static_cast<std::uint32_t>(steps.size());
    BoundStep& s = steps.emplace_back(Resolve(r, layout, skip_empty));
    if (r.compressed != 0 || s.op == Op::kRound) {
      if (codec == nullptr) throw PlanError("plan: it compresses, and no format for this type was given");
      Compress(s, s.len / item, *codec);
    }
    if (s.op == Op::kLocal) locals.push_back(ResolveLocal(plan, index, layout));
  }

  // Where ranks share caches, all their buffers are in them or none.
  const std::size_t sharers = staged ? static_cast<std::size_t>(plan.size) : 1;
  NumberMessages(plan);
  BindDeps(plan);
  OrderLanes(plan);
  MarkReaders(plan, std::max(send_bytes, recv_bytes) * sharers > kStreamBytes);
  MarkAnswers(plan);
  MarkMutual(plan);
  if (staged) MarkGiven();
  if (staged && locals.empty() && codec == nullptr) PackScratch();
}

// Codes lie in scratch, behind what the plan has there, and are never written again in a run.
void BoundPlan::Compress(BoundStep& s, std::size_t items, const Codec& codec) {
  s.block = true;
  if (s.op == Op::kRound) {
    s.codes = residuals;
    residuals += items;
    return;
  }
  s.wire = codec.Bytes(items);
  s.codes = scratch_bytes;
  scratch_bytes += (s.wire + 63) / 64 * 64;
  if (s.op != Op::kSend) return;
  compressed_before += s.len;
  compressed_after += s.wire;
}

std::size_t BoundPlan::nbytes() const {
  std::size_t found = sizeof *this + steps.capacity() * sizeof(BoundStep) + deps.capacity() * sizeof(BoundDep) +
                      (order.capacity() + lane_begin.capacity()) * sizeof(std::uint32_t) +
                      locals.capacity() * sizeof(BoundLocal);
  for (const BoundLocal& local : locals) found += local.parts.capacity() * sizeof(BoundPart);
  return found;
}

}  // namespace hetcoll
