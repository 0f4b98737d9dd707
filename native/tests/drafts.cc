#include <algorithm>
#include <iterator>
#include <span>

#include "harness.h"

namespace hetcoll::testing {

std::vector<std::byte> Draft::Encode() const {
  PlanHeader head = head_;
  head.steps = static_cast<std::uint32_t>(steps_.size());
  head.deps = static_cast<std::uint32_t>(deps_.size());
  head.parts = static_cast<std::uint32_t>(parts_.size());
  const auto [smaller, larger] = std::minmax(head.send_units, head.recv_units);
  if (smaller != larger && head.collective != kPointToPoint) head.place = static_cast<std::uint32_t>(rank_) * smaller;
  std::vector<std::byte> out;
  const auto append = [&out](const auto& records) {
    const auto bytes = std::as_bytes(std::span(records));
    std::copy(bytes.begin(), bytes.end(), std::back_inserter(out));
  };
  append(std::span(&head, 1));
  append(steps_);
  append(deps_);
  append(parts_);
  return out;
}

int Draft::LocalStep(int lane, Collective kind, SpanRecord src, SpanRecord dst, int root,
                     std::initializer_list<SpanRecord> parts) {
  const int step = Add(Op::kLocal, lane, src, dst, root, static_cast<int>(kind), {});
  steps_.back().part_begin = static_cast<std::uint32_t>(parts_.size());
  steps_.back().part_count = static_cast<std::uint32_t>(parts.size());
  parts_.insert(parts_.end(), parts);
  return step;
}

int Draft::Add(Op op, int lane, SpanRecord src, SpanRecord dst, int peer, int channel,
               std::initializer_list<int> after) {
  const auto begin = static_cast<std::uint32_t>(deps_.size());
  for (int step : after) {
    if (step >= 0 && steps_[static_cast<std::size_t>(step)].lane != lane) {
      deps_.push_back(static_cast<std::uint32_t>(step));
    }
  }
  steps_.push_back({static_cast<std::uint8_t>(op), static_cast<std::uint8_t>(lane), static_cast<std::uint8_t>(channel),
                    compress_ && peer >= 0, peer, src, dst, begin, static_cast<std::uint32_t>(deps_.size()) - begin, 0,
                    0});
  head_.lanes = std::max<std::uint16_t>(head_.lanes, static_cast<std::uint16_t>(lane + 1));
  return static_cast<int>(steps_.size()) - 1;
}

Encoded IslandAllreduce(int n, int r) {
  Draft p(n, r, 2, 2);
  const int half = r % 2;
  p.LocalStep(0, Collective::kReduceScatter, Draft::kNone, Draft::Out(half), -1, {Draft::In(0), Draft::In(1)});
  p.LocalStep(0, Collective::kAllgather, Draft::Out(half), Draft::kNone, -1, {Draft::Out(0), Draft::Out(1)});
  p.LocalStep(0, Collective::kGather, Draft::kNone, Draft::kNone, 1, {});
  return p.Encode();
}

Encoded RingAllreduce(int n, int r) {
  Draft p(n, r, static_cast<std::uint32_t>(n), static_cast<std::uint32_t>(n));
  int grown = -1;
  for (int s = 1; s < n; ++s) {
    const int sent = (r - s + n) % n, got = (r - s - 1 + 2 * n) % n;
    p.Send(0, s == 1 ? Draft::In(sent) : Draft::Out(sent), (r + 1) % n, 0, {grown});
    grown = p.RecvReduce(1, Draft::Out(got), Draft::In(got), (r + n - 1) % n, 0);
  }
  int ready = grown;
  for (int s = 0; s < n - 1; ++s) {
    const int sent = (r - s + n) % n, got = (r - s - 1 + 2 * n) % n;
    p.Send(2, Draft::Out(sent), (r + 1) % n, 1, {ready});
    ready = p.Recv(3, Draft::Out(got), (r + n - 1) % n, 1);
  }
  return p.Encode();
}

Encoded DirectAllreduce(int n, int r) {
  Draft p(n, r, static_cast<std::uint32_t>(n), static_cast<std::uint32_t>(n));
  for (int d = 1; d < n; ++d) p.Send(0, Draft::In((r + d) % n), (r + d) % n, 0);
  int reduced = -1;
  for (int d = 1; d < n; ++d) {
    reduced = p.RecvReduce(1, Draft::Out(r), d == 1 ? Draft::In(r) : Draft::Out(r), (r - d + n) % n, 0);
  }
  for (int d = 1; d < n; ++d) p.Send(2, Draft::Out(r), (r + d) % n, 1, {reduced});
  for (int d = 1; d < n; ++d) p.Recv(3, Draft::Out((r - d + n) % n), (r - d + n) % n, 1);
  return p.Encode();
}

Encoded ScratchAllreduce(int n, int r) {
  Draft p(n, r, 1, 1);
  p.Scratch(static_cast<std::uint32_t>(n));
  for (int d = 1; d < n; ++d) p.Send(0, Draft::In(0), (r + d) % n, 0);
  int last = p.Local(Op::kCopy, 1, Draft::Tmp(r), Draft::In(0));
  for (int d = 1; d < n; ++d) last = p.Recv(1, Draft::Tmp((r - d + n) % n), (r - d + n) % n, 0);
  for (int i = 1; i < n; ++i) last = p.Local(Op::kReduce, 1, Draft::Tmp(0), Draft::Tmp(i));
  p.Local(Op::kCopy, 2, Draft::Out(0), Draft::Tmp(0), {last, n - 2});
  return p.Encode();
}

Encoded StagedAllreduce(int n, int r) {
  Draft p(n, r, static_cast<std::uint32_t>(n), static_cast<std::uint32_t>(n));
  p.Scratch(1);
  p.Stage();
  int copied = -1;
  for (int i = 0; i < n; ++i) copied = p.Local(Op::kCopy, 0, Draft::Tmp(i), Draft::In(i));
  for (int d = 1; d < n; ++d) p.Send(1, Draft::Tmp((r + d) % n), (r + d) % n, 0, {copied});
  int reduced = -1;
  for (int d = 1; d < n; ++d) {
    reduced = p.RecvReduce(2, Draft::Tmp(r), Draft::Tmp(r), (r - d + n) % n, 0, {copied});
  }
  for (int d = 1; d < n; ++d) p.Send(3, Draft::Tmp(r), (r + d) % n, 1, {reduced});
  for (int d = 1; d < n; ++d) p.Recv(4, Draft::Out((r - d + n) % n), (r - d + n) % n, 1);
  p.Local(Op::kCopy, 5, Draft::Out(r), Draft::Tmp(r), {reduced});
  return p.Encode();
}

Encoded DirectBroadcast(int n, int r) {
  Draft p(n, r, 1, 1);
  for (int peer = 1; r == 0 && peer < n; ++peer) p.Send(0, Draft::In(0), peer, 0);
  if (r > 0) p.Recv(0, Draft::Out(0), 0, 0);
  return p.Encode();
}

Encoded Message(int n, int r, int peer, bool sends) {
  Draft p(n, r, sends ? 1 : 0, sends ? 0 : 1, kPointToPoint);
  if (sends) {
    p.Send(0, Draft::In(0), peer, 2);
  } else {
    p.Recv(0, Draft::Out(0), peer, 2);
  }
  return p.Encode();
}

}  // namespace hetcoll::testing
