// From a bound plan to a list of actions: streams, and events only where two streams touch the same memory.
#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <string>
#include <tuple>

#include "gpu/queue.h"

namespace hetcoll {
namespace {

struct Touch {
  Area area;
  std::size_t begin;
  std::size_t end;
  bool writes;
  std::uint8_t stream;
  std::uint32_t when;  // position on its stream, from 1 on
};

class Compiler {
 public:
  Compiler(DeviceProgram& program, const BoundPlan& plan, Signals signals)
      : program_(program), plan_(plan), signals_(signals) {}

  // What comes next is of a step of this level.
  void Begin(std::uint32_t level) {
    if (level < level_) throw PlanError("plan: wanted an order of rising levels");
    level_ = level;
  }

  void Step(const BoundStep& s, std::uint16_t edge, std::size_t slot_bytes) {
    const Place src{static_cast<Area>(s.src_buf), s.src_off};
    const Place dst{static_cast<Area>(s.dst_buf), s.dst_off};
    const Place codes{Area::kScratch, s.codes};  // of a compressed message
    switch (s.op) {
      case Op::kSend:
        if (s.wire == 0) return SendFrom(src, s.len, edge);
        Touches(kWorkLane, std::array{Read(src, s.len), Write(codes, s.wire)});
        Add({.step = DeviceStep::kEncode, .stream = kWorkLane, .dst = codes, .src = src, .n = s.len});
        Done(kWorkLane);
        return SendFrom(codes, s.wire, edge);
      case Op::kRecv:
        if (s.wire == 0) return Receive(dst, s.len, edge);
        Receive(codes, s.wire, edge);
        Touches(kWorkLane, std::array{Read(codes, s.wire), Write(dst, s.len)});
        Add({.step = DeviceStep::kDecode, .stream = kWorkLane, .dst = dst, .src = codes, .n = s.len});
        return Done(kWorkLane);
      case Op::kRecvReduce: {
        if (s.wire > 0) {
          Receive(codes, s.wire, edge);
          Touches(kWorkLane, std::array{Read(codes, s.wire), Read(src, s.len), Write(dst, s.len)});
          Add({.step = DeviceStep::kDecodeAdd,
               .stream = kWorkLane,
               .dst = dst,
               .src = src,
               .other = codes,
               .n = s.len});
          return Done(kWorkLane);
        }
        if (Near(edge)) {  // what came is in this GPU's memory already
          const std::uint8_t lane = Turn(kInLanes, receives_);
          Touches(lane, std::array{Read(src, s.len), Write(dst, s.len)});
          Add({.step = DeviceStep::kWaitReady, .stream = lane, .edge = edge});
          Add({.step = DeviceStep::kReduceIn, .stream = lane, .edge = edge, .dst = dst, .src = src, .n = s.len});
          return Tell(DeviceStep::kGrant, lane, edge);
        }
        const Place staged{Area::kStaging, slot_bytes * (stagings_++ % kStagedMessages)};
        Receive(staged, s.len, edge);
        Touches(kWorkLane, std::array{Read(staged, s.len), Read(src, s.len), Write(dst, s.len)});
        Add({.step = DeviceStep::kReduce, .stream = kWorkLane, .dst = dst, .src = src, .other = staged, .n = s.len});
        return Done(kWorkLane);
      }
      case Op::kCopy:
        Touches(kWorkLane, std::array{Read(src, s.len), Write(dst, s.len)});
        Add({.step = DeviceStep::kCopy, .stream = kWorkLane, .dst = dst, .src = src, .n = s.len});
        return Done(kWorkLane);
      case Op::kReduce:
        Touches(kWorkLane, std::array{Read(src, s.len), Write(dst, s.len)});
        Add({.step = DeviceStep::kReduce, .stream = kWorkLane, .dst = dst, .src = dst, .other = src, .n = s.len});
        return Done(kWorkLane);
      case Op::kScale:
        Touches(kWorkLane, std::array{Write(dst, s.len)});
        Add({.step = DeviceStep::kScale, .stream = kWorkLane, .dst = dst, .n = s.len});
        return Done(kWorkLane);
      case Op::kLocal:
        return;  // see Local
      case Op::kRound: {
        const Place lost{Area::kResidual, s.codes * sizeof(float)};  // no other step of the plan has these
        Touches(kWorkLane, std::array{Read(src, s.len), Write(dst, s.len)});
        Add({.step = DeviceStep::kRound, .stream = kWorkLane, .dst = dst, .src = src, .other = lost, .n = s.len});
        return Done(kWorkLane);
      }
    }
  }

  void Local(const BoundStep& s, const BoundLocal& local) {
    LocalAction action{local.kind, local.root, {}, {}, {}, true};
    std::vector<Touch> touches;
    const auto part = [&](Buf buf, std::size_t off, std::size_t n, bool writes) -> LocalPart {
      if (buf == Buf::kNone || n == 0) return {};
      const Place at{static_cast<Area>(buf), off};
      touches.push_back(Named(at, n, writes));
      return {at, n};
    };
    action.src = part(s.src_buf, s.src_off, s.len, false);
    action.dst = part(s.dst_buf, s.dst_off, s.len, true);
    const bool collects = local.kind == Collective::kAllgather || local.kind == Collective::kGather;
    const std::size_t sent = local.kind == Collective::kAlltoall ? local.parts.size() / 2 : local.parts.size();
    for (const BoundPart& p : local.parts) {
      action.parts.push_back(part(p.buf, p.off, p.len, collects || action.parts.size() >= sent));
      const LocalPart& first = action.parts.front();
      const LocalPart& last = action.parts.back();
      action.even &= p.len > 0 && last.n == first.n && last.at.area == first.at.area &&
                     last.at.offset == first.at.offset + first.n * (action.parts.size() - 1);
    }
    if (touches.empty()) return;  // nothing to do, on all members alike
    Touches(kLocalLane, touches);
    Add({.step = DeviceStep::kLocal, .stream = kLocalLane, .edge = static_cast<std::uint16_t>(program_.locals.size())});
    program_.locals.push_back(std::move(action));
    Done(kLocalLane);
  }

  // What it touches is touched by nothing else of the call.
  void Messages(std::uint16_t kernel) { Add({.step = DeviceStep::kMessages, .stream = kWorkLane, .edge = kernel}); }

 private:
  static std::uint8_t Turn(DeviceLane first, unsigned& turns) {
    return static_cast<std::uint8_t>(first + turns++ % kCopyLanes);
  }

  bool Near(std::uint16_t edge) const { return program_.near.contains(edge); }

  void SendFrom(const Place& src, std::size_t n, std::uint16_t edge) {
    const std::uint8_t lane = signals_ == Signals::kApart ? std::uint8_t{kOutLanes} : Turn(kOutLanes, sends_);
    Touches(lane, std::array{Read(src, n)});
    Add({.step = DeviceStep::kWaitCredit, .stream = lane, .edge = edge});
    Add({.step = DeviceStep::kCopyOut, .stream = lane, .edge = edge, .src = src, .n = n});
    Tell(DeviceStep::kPublish, lane, edge);
  }

  void Receive(const Place& dst, std::size_t n, std::uint16_t edge) {
    const std::uint8_t lane = Turn(kInLanes, receives_);
    Touches(lane, std::array{Write(dst, n)});
    Add({.step = DeviceStep::kWaitReady, .stream = lane, .edge = edge});
    Add({.step = DeviceStep::kCopyIn, .stream = lane, .edge = edge, .dst = dst, .n = n});
    Tell(DeviceStep::kGrant, lane, edge);
  }

  // SEND and RECV may be the same memory: then the smaller is this rank's part of the larger.
  Touch Named(const Place& at, std::size_t n, bool writes) const {
    Touch t{at.area, at.offset, at.offset + n, writes, 0, 0};
    if (!plan_.may_alias || (at.area != Area::kSend && at.area != Area::kRecv)) return t;
    const Area larger = plan_.send_bytes > plan_.recv_bytes ? Area::kSend : Area::kRecv;
    if (at.area != larger) {
      t.begin += plan_.part_off;
      t.end += plan_.part_off;
    }
    t.area = larger;
    return t;
  }
  Touch Read(const Place& at, std::size_t n) const { return Named(at, n, false); }
  Touch Write(const Place& at, std::size_t n) const { return Named(at, n, true); }

  // What comes next on `stream` touches this memory: wait for those on other streams that it must not overtake.
  void Touches(std::uint8_t stream, std::span<const Touch> touches) {
    std::array<std::uint32_t, kDeviceLanes> last{};
    for (const Touch& t : touches) {
      for (const Touch& before : touched_) {
        const bool meet = before.area == t.area && before.begin < t.end && t.begin < before.end;
        if (meet && (before.writes || t.writes)) last[before.stream] = std::max(last[before.stream], before.when);
      }
    }
    for (std::uint8_t other = 0; other < kDeviceLanes; ++other) {
      if (other != stream && last[other] > waited_[stream][other]) Follow(stream, other, last[other]);
    }
    for (Touch t : touches) {
      t.stream = stream;
      t.when = position_[stream] + 1;
      touched_.push_back(t);
    }
  }

  void Follow(std::uint8_t stream, std::uint8_t other, std::uint32_t when) {
    Event& event = recorded_.at({other, when});
    if (!event.used) {
      event.used = true;
      program_.actions[event.action].event = program_.events++;
    }
    Add({.step = DeviceStep::kWaitEvent, .stream = stream, .event = program_.actions[event.action].event});
    for (std::size_t third = 0; third < waited_.size(); ++third) {  // what `other` had waited for is over as well
      waited_[stream][third] = std::max(waited_[stream][third], event.had_waited[third]);
    }
    waited_[stream][other] = when;
  }

  void Add(const DeviceAction& action) {
    program_.all_local &= action.stream == kLocalLane;
    program_.actions.push_back(action);
    program_.actions.back().level = level_;
    program_.used[action.stream] = true;
  }

  // What was done on `stream` is over: the peer is told, on the lane of signals or there.
  void Tell(DeviceStep step, std::uint8_t stream, std::uint16_t edge) {
    Done(stream);
    const bool there = signals_ == Signals::kApart || (signals_ == Signals::kFull && step == DeviceStep::kGrant);
    if (!there) Follow(kSignalLane, stream, position_[stream]);
    Add({.step = step, .stream = there ? stream : std::uint8_t{kSignalLane}, .edge = edge});
  }

  // A place where others may wait for what `stream` has done so far; dropped at the end where nobody does.
  void Done(std::uint8_t stream) {
    recorded_[{stream, ++position_[stream]}] = {program_.actions.size(), false, waited_[stream]};
    Add({.step = DeviceStep::kRecord, .stream = stream, .event = kNobody});
  }

 public:
  static constexpr std::uint32_t kNobody = ~std::uint32_t{0};

 private:
  using Positions = std::array<std::uint32_t, kDeviceLanes>;
  struct Event {
    std::size_t action;
    bool used;
    Positions had_waited;
  };

  DeviceProgram& program_;
  const BoundPlan& plan_;
  const Signals signals_;
  unsigned stagings_ = 0;
  unsigned sends_ = 0;
  unsigned receives_ = 0;
  std::uint32_t level_ = 0;
  Positions position_{};
  std::array<Positions, kDeviceLanes> waited_{};  // [stream][other]: position of `other` that `stream` comes after
  std::vector<Touch> touched_;
  std::map<std::pair<std::uint8_t, std::uint32_t>, Event> recorded_;
};

}  // namespace

DeviceProgram::DeviceProgram(const BoundPlan& plan, std::span<const std::uint32_t> order,
                             std::span<const std::uint16_t> steps_edges, std::size_t slot_bytes, Signals signals,
                             const std::set<std::uint16_t>& near_edges, std::span<const std::uint32_t> levels,
                             std::span<const MessagesPlace> kernels)
    : near(near_edges), scratch_bytes(plan.scratch_bytes) {
  const std::size_t steps = plan.steps.size();
  if (order.size() != steps || steps_edges.size() != steps || (!levels.empty() && levels.size() != steps)) {
    throw PlanError("plan: an order and an edge for each of " + std::to_string(steps) + " steps wanted");
  }
  Compiler compiler(*this, plan, signals);
  std::uint16_t kernel = 0;
  const auto lead = [&](std::size_t place) {  // what comes before the step of this place
    for (; kernel < kernels.size() && kernels[kernel].before <= place; ++kernel) {
      if (!levels.empty()) compiler.Begin(kernels[kernel].level);
      compiler.Messages(kernel);
    }
  };
  for (std::size_t place = 0; place < steps; ++place) {
    lead(place);
    const std::uint32_t index = order[place];
    const BoundStep& s = plan.steps.at(index);
    if (!levels.empty()) compiler.Begin(levels[index]);
    if (s.op == Op::kLocal) {
      const auto local = std::find_if(plan.locals.begin(), plan.locals.end(),
                                      [&](const BoundLocal& each) { return each.step == index; });
      compiler.Local(s, *local);
      continue;
    }
    if (s.len == 0) continue;  // on both ends alike
    const bool talks = s.op <= Op::kRecvReduce;
    if (talks && s.len > slot_bytes) {
      throw PlanError("plan: a message of " + std::to_string(s.len) + " bytes does not fit a slot of " +
                      std::to_string(slot_bytes));
    }
    if (talks) edges.insert(steps_edges[index]);
    compiler.Step(s, talks ? steps_edges[index] : std::uint16_t{0}, slot_bytes);
  }
  lead(steps);
  if (kernel < kernels.size()) throw PlanError("plan: wanted kernels of messages at rising places among its steps");
  all_small = kernel > 0 && actions.size() == kernel;
  alone = edges.size() == 1 && !used[kWorkLane] && !used[kLocalLane];
  std::erase_if(actions,
                [](const DeviceAction& a) { return a.step == DeviceStep::kRecord && a.event == Compiler::kNobody; });
}

DeviceProgram DeviceQueue::Compile(const BoundPlan& plan, std::span<const std::uint32_t> order,
                                   std::span<const std::uint16_t> edges, Signals signals,
                                   std::span<const MessagesPlace> kernels) const {
  bool proxied = false;
  std::set<std::uint16_t> near;
  for (std::size_t i = 0; i < std::min(edges.size(), plan.steps.size()); ++i) {
    const bool talks = plan.steps[i].op <= Op::kRecvReduce;  // other steps have no edge, whatever its number here
    if (!talks || edges[i] >= edges_.size()) continue;
    proxied |= edges_[edges[i]].proxy != nullptr;
    if (edges_[edges[i]].near) near.insert(edges[i]);
  }
  if (signals == Signals::kTogether && proxied) signals = Signals::kFull;
  return {plan, order, edges, slot_bytes_, signals, near, {}, kernels};
}

void DeviceProgram::Part(std::span<const std::size_t> sends, std::span<const std::size_t> recvs) {
  const auto part = [&](Place& place) {
    if (place.area != Area::kSend && place.area != Area::kRecv) return;
    const std::span<const std::size_t> begins = place.area == Area::kSend ? sends : recvs;
    const auto next = std::upper_bound(begins.begin(), begins.end(), place.offset);  // empty messages have no actions
    const std::size_t before = place.area == Area::kSend ? 0 : sends.size();
    place.area = static_cast<Area>(static_cast<std::size_t>(Area::kMessages) + before +
                                   static_cast<std::size_t>(next - begins.begin()) - 1);
    place.offset -= *(next - 1);
  };
  for (DeviceAction& a : actions) {
    const bool reads = a.step == DeviceStep::kCopyOut || a.step == DeviceStep::kCopy;
    if (reads) part(a.src);
    if (a.step == DeviceStep::kCopyIn || a.step == DeviceStep::kCopy) part(a.dst);
  }
  for (LocalAction& local : locals) {
    for (LocalPart& p : local.parts) {
      if (p.n > 0) part(p.at);
    }
  }
}

DeviceProgram CaptureRecipe::Program(std::size_t slot_bytes) const {
  std::vector<std::uint32_t> order(plan.steps.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return std::pair(levels[a], plan.steps[a].op) < std::pair(levels[b], plan.steps[b].op);
  });
  std::vector<MessagesPlace> placed = kernels;
  for (MessagesPlace& kernel : placed) {
    const auto higher = std::partition_point(order.begin(), order.end(),
                                             [&](std::uint32_t step) { return levels[step] < kernel.level; });
    kernel.before = static_cast<std::uint32_t>(higher - order.begin());
  }
  DeviceProgram program(plan, order, edges, slot_bytes, Signals::kFull, near, levels, placed);
  if (!sends.empty() || !recvs.empty()) program.Part(sends, recvs);
  return program;
}

}  // namespace hetcoll
