#include "plan/plan.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <tuple>

namespace hetcoll {
namespace {

// Messages above this are larger than a core's share of the last-level cache on most machines: what is stored once and
// not read again by the plan goes around the cache.
constexpr std::size_t kStreamBytes = std::size_t{12} << 20;

constexpr std::uint32_t kMostUnits = 1 << 15;  // of a buffer, and copies of it in SCRATCH: products fit 32 bits

bool SameSpan(const SpanRecord& a, const SpanRecord& b) {
  return a.buf >= 0 && a.buf == b.buf && a.start == b.start && a.count == b.count;
}

bool Overlaps(const SpanRecord& a, const SpanRecord& b) {
  return a.buf >= 0 && a.buf == b.buf && a.start < b.start + b.count && b.start < a.start + a.count;
}

// SEND and RECV may be the same memory. In place, the smaller of the two is this rank's part of the larger (NCCL's
// convention), so a span of either has one name in the larger one's units.
SpanRecord InPlaceName(SpanRecord s, const PlanHeader& head, int rank) {
  if (s.buf != 0 && s.buf != 1) return s;
  const bool send_is_larger = head.send_units > head.recv_units;
  const int larger = send_is_larger ? 0 : 1;
  const std::uint32_t smaller_units = send_is_larger ? head.recv_units : head.send_units;
  if (head.send_units != head.recv_units && s.buf != larger) s.start += rank * static_cast<std::int32_t>(smaller_units);
  s.buf = larger;
  return s;
}

void CheckHeader(const PlanHeader& head) {
  if (head.magic != kPlanMagic) throw PlanError("plan: wrong magic number");
  const std::uint32_t like = head.scratch_like == 0 ? head.send_units : head.recv_units;
  if (head.lanes > kMaxLanes || head.send_units > kMostUnits || head.recv_units > kMostUnits ||
      head.scratch_copies > kMostUnits || head.scratch_like > 1 || head.flags > (kApart | kStaged | kRedundant) ||
      (head.scratch_copies > 0 && like == 0)) {
    throw PlanError("plan: too many lanes, units or copies, or scratch like nothing");
  }
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

BoundPlan::BoundPlan(const Plan& plan, int rank, DType dtype, std::size_t send_count, std::size_t recv_count,
                     std::span<const std::size_t> send_table, std::span<const std::size_t> recv_table, bool skip_empty,
                     const Codec* codec) {
  const std::size_t item = ItemSize(dtype);
  const PlanHeader& h = plan.head;
  CheckTable(send_table, h.send_units, send_count);
  CheckTable(recv_table, h.recv_units, recv_count);
  auto offset = [&](int buf, std::uint32_t unit) -> std::size_t {
    const bool send = buf == 0;
    const auto table = send ? send_table : recv_table;
    if (!table.empty()) return table[unit] * item;
    return CutOffset(send ? send_count : recv_count, send ? h.send_units : h.recv_units, unit) * item;
  };
  may_lend = h.credits == 0;
  apart = (h.flags & kApart) != 0;
  staged = (h.flags & kStaged) != 0;
  use = UseOf(plan);
  const int like = static_cast<int>(h.scratch_like);
  const std::uint32_t like_units = like == 0 ? h.send_units : h.recv_units;
  const std::size_t like_bytes = h.scratch_copies == 0 ? 0 : offset(like, like_units);
  scratch_bytes = like_bytes * h.scratch_copies;
  send_bytes = send_count * item;
  recv_bytes = recv_count * item;
  may_alias = h.collective != kPointToPoint;
  const std::uint32_t part = static_cast<std::uint32_t>(rank) * std::min(h.send_units, h.recv_units);
  if (may_alias && h.send_units != h.recv_units) part_off = offset(h.send_units > h.recv_units ? 0 : 1, part);

  struct Bytes {
    std::size_t off;
    std::size_t len;
  };
  auto bytes = [&](const SpanRecord& s) -> Bytes {
    if (s.buf < 0) return {0, 0};
    const auto start = static_cast<std::uint32_t>(s.start);
    const auto count = static_cast<std::uint32_t>(s.count);
    if (s.buf != 2) {
      const std::size_t begin = offset(s.buf, start);
      return {begin, offset(s.buf, start + count) - begin};
    }
    const std::uint32_t unit = start % like_units;
    const std::size_t begin = offset(like, unit);
    return {start / like_units * like_bytes + begin, offset(like, unit + count) - begin};
  };

  std::map<std::tuple<bool, std::int32_t, std::uint16_t>, std::uint64_t> messages;  // so far, on each FIFO
  // Where ranks share caches, all their buffers are in them or none.
  const std::size_t sharers = staged ? static_cast<std::size_t>(plan.size) : 1;
  const bool large = std::max(send_bytes, recv_bytes) * sharers > kStreamBytes;
  steps.reserve(plan.steps.size());
  for (const StepRecord& r : plan.steps) {
    BoundStep s;
    s.op = static_cast<Op>(r.op);
    s.channel = r.channel;
    s.peer = s.op == Op::kLocal ? -1 : r.peer;
    const Bytes src = bytes(r.src);
    const Bytes dst = bytes(r.dst);
    s.src_buf = static_cast<Buf>(r.src.buf);
    s.dst_buf = static_cast<Buf>(r.dst.buf);
    s.src_off = src.off;
    s.dst_off = dst.off;
    s.len = r.dst.buf >= 0 ? dst.len : src.len;
    if (r.src.buf >= 0 && src.len != s.len) throw PlanError("plan: a step's spans differ in length");
    if (s.op <= Op::kRecvReduce && s.len == 0 && skip_empty) {
      s.op = Op::kCopy;  // of nothing
      s.peer = -1;
      s.src_buf = s.dst_buf = r.dst.buf >= 0 ? s.dst_buf : s.src_buf;
    }
    if (r.compressed != 0 || s.op == Op::kRound) {
      if (codec == nullptr) throw PlanError("plan: it compresses, and no format for this type was given");
      Compress(s, s.len / item, *codec);
    }
    if (s.op <= Op::kRecvReduce) s.number = kNumberStep * messages[{s.op == Op::kSend, r.peer, r.channel}]++;
    s.dep_begin = static_cast<std::uint32_t>(deps.size());
    for (std::uint32_t d = 0; d < r.dep_count; ++d) {
      const std::uint32_t on = plan.deps[r.dep_begin + d];
      const StepRecord& q = plan.steps[on];
      const auto name = [&](const SpanRecord& span) { return InPlaceName(span, h, rank); };
      bool same = false;
      bool skewed = false;
      bool anyway = false;
      const auto hazard = [&](const SpanRecord& x, const SpanRecord& y) {
        same |= SameSpan(name(x), name(y));
        skewed |= Overlaps(name(x), name(y)) && !SameSpan(name(x), name(y));
        anyway |= Overlaps(x, y);
      };
      hazard(q.dst, r.src);
      hazard(q.src, r.dst);
      hazard(q.dst, r.dst);
      const bool local = s.op == Op::kLocal || q.op == std::uint8_t(Op::kLocal);
      deps.push_back({on, same && !skewed && !local, apart && (same || skewed) && !anyway && !local});
    }
    s.dep_end = static_cast<std::uint32_t>(deps.size());
    if (s.op == Op::kLocal) {
      BoundLocal local{static_cast<std::uint32_t>(steps.size()), static_cast<Collective>(r.channel), r.peer, {}};
      for (std::uint32_t k = 0; k < r.part_count; ++k) {
        const SpanRecord& part = plan.parts[r.part_begin + k];
        const Bytes b = bytes(part);
        local.parts.push_back({static_cast<Buf>(part.buf), b.off, b.len});
      }
      locals.push_back(std::move(local));
    }
    steps.push_back(s);
  }

  for (std::size_t i = 0; i < steps.size(); ++i) {
    const StepRecord& r = plan.steps[i];
    if (r.dst.buf < 0) continue;
    bool read_later = false;
    bool overwritten = false;
    for (std::size_t j = 0; j < steps.size(); ++j) {
      const StepRecord& t = plan.steps[j];
      if (j == i) continue;
      if (SameSpan(r.dst, t.src)) {
        const bool pair = steps[i].op == Op::kRecvReduce && steps[j].op == Op::kSend && r.lane != t.lane;
        const bool next = j > i && !overwritten && t.dep_count > 0 && steps[i].fuse < 0;
        if (pair && next && !steps[i].block && !steps[j].block) {
          steps[i].fuse = static_cast<std::int32_t>(j);
        } else {
          read_later = true;
        }
      }
      overwritten |= j > i && SameSpan(r.dst, t.dst);
    }
    steps[i].stream_stores = large && !read_later && r.dst.buf == int(Buf::kRecv);
  }

  lane_begin.assign(h.lanes + 1u, 0);
  order.reserve(steps.size());
  for (std::uint32_t lane = 0; lane < h.lanes; ++lane) {
    for (std::uint32_t i = 0; i < plan.steps.size(); ++i) {
      if (plan.steps[i].lane == lane) order.push_back(i);
    }
    lane_begin[lane + 1] = static_cast<std::uint32_t>(order.size());
  }
  MarkAnswers();
  MarkMutual();
  if (staged) MarkGiven();
  if (staged && locals.empty() && codec == nullptr) PackScratch();
}

// What no step touches takes no room: a plan that uses a few places again and again would keep it from the heap.
void BoundPlan::PackScratch() {
  constexpr std::size_t kPage = 4096;
  const auto each = [this](auto&& visit) {
    for (BoundStep& s : steps) {
      if (s.src_buf == Buf::kScratch) visit(s.src_off, s.len);
      if (s.dst_buf == Buf::kScratch) visit(s.dst_off, s.len);
    }
  };
  std::map<std::size_t, std::size_t> ends;  // by where each span begins
  each([&](std::size_t off, std::size_t len) { ends[off] = std::max(ends[off], off + len); });
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

// Whoever reduces what we sent may leave the result where it lies, if that goes back to us. Our place is then taken
// until we have read it; so we must be able to read it whatever else waits: it is the first message on its channel, and
// its receive is the first step of its lane and waits for nothing.
void BoundPlan::MarkAnswers() {
  for (std::size_t lane = 0; lane + 1 < lane_begin.size(); ++lane) {
    if (lane_begin[lane] == lane_begin[lane + 1]) continue;
    const BoundStep& answer = steps[order[lane_begin[lane]]];
    if (answer.op != Op::kRecv || answer.number != 0 || answer.block || answer.dep_begin != answer.dep_end) continue;
    for (BoundStep& s : steps) {
      if (s.op == Op::kSend && !s.block && s.peer == answer.peer && s.back < 0)
        s.back = static_cast<std::int16_t>(answer.channel);
    }
  }
}

void BoundPlan::MarkMutual() {
  for (BoundStep& s : steps) {
    if (s.op != Op::kSend || (s.back >= 0 && s.back != static_cast<std::int16_t>(s.channel))) continue;
    s.mutual = std::any_of(steps.begin(), steps.end(), [&](const BoundStep& t) {
      return (t.op == Op::kRecv || t.op == Op::kRecvReduce) && t.peer == s.peer && t.channel == s.channel;
    });
  }
}

// What is written to a place in scratch and read by one send only, before the place is written again or never. Steps
// that touch the same place depend on each other in the order that they have in the plan, or both read.
void BoundPlan::MarkGiven() {
  enum class First { kNothing, kWrite, kOther };
  const auto first_of = [](const BoundStep& s, auto begin, auto end) {
    const auto touched = [&](const BoundStep& t, Buf buf, std::size_t off) {
      return buf == Buf::kScratch && off < s.src_off + s.len && s.src_off < off + t.len;
    };
    for (auto t = begin; t != end; ++t) {
      if (touched(*t, t->src_buf, t->src_off)) return First::kOther;
      if (touched(*t, t->dst_buf, t->dst_off)) {
        return t->dst_off == s.src_off && t->len == s.len ? First::kWrite : First::kOther;
      }
    }
    return First::kNothing;
  };
  for (std::size_t i = 0; i < steps.size(); ++i) {
    BoundStep& s = steps[i];
    const auto at = static_cast<std::ptrdiff_t>(i);
    s.gives = s.op == Op::kSend && !s.block && s.src_buf == Buf::kScratch && s.len > 0 &&
              first_of(s, steps.begin() + at + 1, steps.end()) != First::kOther &&
              first_of(s, std::make_reverse_iterator(steps.begin() + at), steps.rend()) == First::kWrite;
  }
}

}  // namespace hetcoll
