#include "gpu/queue.h"

#include <algorithm>

#include "gpu/capture.h"

namespace hetcoll {

DeviceQueue::DeviceQueue(std::shared_ptr<Driver> driver, int priority, std::byte* staging, std::size_t slot_bytes)
    : driver_(std::move(driver)),
      lanes_((driver_->Activate(), driver_), priority),
      staging_(staging),
      slot_bytes_(slot_bytes),
      kernel_(driver_),
      local_(driver_),
      pulled_(driver_),
      captured_(driver_),
      user_calls_(driver_) {}

DeviceQueue::~DeviceQueue() = default;

std::uint16_t DeviceQueue::AddEdge(SlotEdge edge) {
  edges_.push_back(std::move(edge));
  return static_cast<std::uint16_t>(edges_.size() - 1);
}

void DeviceQueue::SetCapture(std::unique_ptr<DeviceCapture> capture) { capture_ = std::move(capture); }

void DeviceQueue::Enqueue(const DeviceShape& shape, const std::byte* send, std::byte* recv, std::byte* scratch,
                          std::uint64_t signature, DeviceStream user, bool join, bool capturing, std::byte* residual) {
  const Bases bases{{const_cast<std::byte*>(send), recv, scratch, staging_, residual}, {}};
  Enqueue(shape, bases, {&signature, 1}, user, join, capturing);
}

void DeviceQueue::EnqueueGroup(const DeviceShape& shape, std::span<std::byte* const> buffers,
                               std::span<const std::uint64_t> signatures, DeviceStream user, bool join,
                               bool capturing) {
  Enqueue(shape, {{}, buffers}, signatures, user, join, capturing);
}

void DeviceQueue::Enqueue(const DeviceShape& shape, Bases bases, std::span<const std::uint64_t> signatures,
                          DeviceStream user, bool join, bool capturing) {
  const Current current(*driver_);
  ++calls_;
  if (capturing) FollowCaptured(user);
  if (shape.program.all_small) {
    for (const MessagesKernel& kernel : shape.messages) RunMessages(kernel, bases, user, capturing);
    if (capturing) EndCaptured(user);
    return;
  }
  if (shape.program.all_local) return EnqueueLocal(shape, bases, user, capturing);
  if (capturing) {
    const bool pulls = shape.program.pulls;
    if (capture_ == nullptr || (shape.recipe == nullptr && !pulls))
      throw PlanError("a program of copies needs SetCapture and a recipe to be captured");
    bases.areas[static_cast<std::size_t>(Area::kStaging)] = capture_->staging();
    capture_->Enqueue(pulls ? shape.program : shape.recipe->Program(slot_bytes_), pulls ? 1 : shape.recipe->lag, user,
                      [&](const DeviceAction& action, std::byte* slot, DeviceLanes& lanes) {
                        Work(shape, action, bases, slot, lanes);
                      });
    return EndCaptured(user);
  }
  if (join && shape.p2p && shape.program.alone) return EnqueueAlone(shape, bases, signatures, user);
  Begin(shape, user);
  for (const DeviceAction& action : shape.program.actions) {
    Run(shape, action, bases, signatures, lanes_[action.stream]);
  }
  for (std::size_t i = 0; i < kDeviceLanes; ++i) {
    if (!shape.program.used[i]) continue;
    driver_->Record(lanes_.end(i), lanes_[i]);
    ended_[i] = true;
  }
  if (shape.program.pulls) driver_->Record(pulled_.get(), lanes_[kSignalLane]);
  is_joined_ = false;
  if (join) JoinLanes(user);
}

// The library itself orders its calls on different streams.
void DeviceQueue::EnqueueLocal(const DeviceShape& shape, const Bases& bases, DeviceStream user, bool capturing) {
  for (const LocalAction& local : shape.program.locals) RunLocal(shape, local, bases, user);
  if (capturing) return EndCaptured(user);
  driver_->Record(local_.get(), user);
  user_calls_.Pass(user);
}

// On the user's own stream, whose order is all that it needs: who waits for one peer waits for no other, and as few
// streams as can be wait at a time. That messages of an edge come one after another is for `Idle` and `Join` to know;
// slots would keep them apart by themselves.
void DeviceQueue::EnqueueAlone(const DeviceShape& shape, const Bases& bases, std::span<const std::uint64_t> signatures,
                               DeviceStream user) {
  SlotEdge& edge = edges_[*shape.program.edges.begin()];
  if (!edge.last) edge.last.emplace(driver_);
  if (edge.last_stream != user) driver_->WaitEvent(edge.last->get(), user);
  for (const DeviceAction& action : shape.program.actions) {
    const bool between_streams = action.step == DeviceStep::kWaitEvent || action.step == DeviceStep::kRecord;
    if (!between_streams) Run(shape, action, bases, signatures, user);
  }
  driver_->Record(edge.last->get(), user);  // now: see EnqueueKernel
  edge.last_stream = user;
}

// What this call's streams do comes after the user's work so far, and after the last call: the two share staging
// memory, and scratch.
void DeviceQueue::Begin(const DeviceShape& shape, DeviceStream user) {
  if (!is_joined_ || joined_ != user) JoinLanes(user);
  lanes_.Fork(shape.program.used, user);
}

namespace {

// That of the message of which `a` copies a piece.
std::uint64_t SignatureOf(const DeviceAction& a, std::span<const std::uint64_t> signatures) {
  const Place& place = a.step == DeviceStep::kCopyOut ? a.src : a.dst;
  return signatures[place.area < Area::kMessages ? 0 : place.message()];
}

}  // namespace

// Before the stream gets to it, so that a thread is awake by then.
void DeviceQueue::Expect(const DeviceShape& shape, SlotEdge& edge, std::size_t n, std::uint64_t signature) {
  if (edge.proxy == nullptr) return;
  if (edge.call != calls_) {
    edge.call = calls_;
    edge.begun = edge.messages;
  }
  const std::uint64_t step = shape.p2p ? edge.messages : edge.messages - edge.begun;
  edge.proxy->Post({edge.messages, signature + kNumberStep * step, n});
}

void DeviceQueue::Run(const DeviceShape& shape, const DeviceAction& a, const Bases& bases,
                      std::span<const std::uint64_t> signatures, DeviceStream stream) {
  SlotEdge* edge = a.edge < edges_.size() ? &edges_[a.edge] : nullptr;
  const std::uint64_t number = edge == nullptr ? 0 : edge->messages;
  switch (a.step) {
    case DeviceStep::kWaitCredit:
      if (number >= edge->slots.count) {
        driver_->WaitValue(edge->slots.Credit(number), number + 1 - edge->slots.count, stream);
      }
      break;
    case DeviceStep::kWaitReady:
      driver_->WaitValue(edge->slots.Ready(number), number + 1, stream);
      break;
    case DeviceStep::kCopyOut:
      Expect(shape, *edge, a.n, SignatureOf(a, signatures));
      driver_->Copy(edge->slots.At(number), bases.At(a.src), a.n, stream);
      break;
    case DeviceStep::kCopyIn:
      Expect(shape, *edge, a.n, SignatureOf(a, signatures));
      driver_->Copy(bases.At(a.dst), edge->slots.At(number), a.n, stream);
      break;
    case DeviceStep::kReduceIn:
      Work(shape, a, bases, edge->slots.At(number), lanes_);
      break;
    case DeviceStep::kPublish:
      driver_->WriteValue(edge->slots.Ready(number), number + 1, stream);
      ++edge->messages;
      break;
    case DeviceStep::kGrant:
      driver_->WriteValue(edge->slots.Credit(number), number + 1, stream);
      ++edge->messages;
      break;
    default:
      Work(shape, a, bases, nullptr, lanes_);
      break;
  }
}

// What needs no peer; `slot` is what is copied into or out of, or reduced.
void DeviceQueue::Work(const DeviceShape& shape, const DeviceAction& a, const Bases& bases, std::byte* slot,
                       DeviceLanes& lanes) {
  const auto at = [&](const Place& p) { return bases.At(p); };
  const DeviceStream stream = lanes[a.stream];
  switch (a.step) {
    case DeviceStep::kWaitEvent:
      driver_->WaitEvent(lanes.EventAt(a.event), stream);
      break;
    case DeviceStep::kRecord:
      driver_->Record(lanes.EventAt(a.event), stream);
      break;
    case DeviceStep::kCopy:
      driver_->Copy(at(a.dst), at(a.src), a.n, stream);
      break;
    case DeviceStep::kCopyOut:
      driver_->Copy(slot, at(a.src), a.n, stream);
      break;
    case DeviceStep::kCopyIn:
      driver_->Copy(at(a.dst), slot, a.n, stream);
      break;
    case DeviceStep::kPull:
      driver_->Copy(at(a.dst), a.peer, a.n, stream);
      break;
    case DeviceStep::kReduce:
    case DeviceStep::kReduceIn: {
      void* dst = at(a.dst);
      const void* x = at(a.src);
      const void* y = a.step == DeviceStep::kReduceIn ? slot : at(a.other);
      unsigned long long count = a.n / shape.item;
      void* params[] = {&dst, &x, &y, &count};
      Launch(shape.reduce, a.n, params, stream);
      break;
    }
    case DeviceStep::kRound: {
      void* dst = at(a.dst);
      const void* src = at(a.src);
      void* lost = bases.areas[static_cast<std::size_t>(Area::kResidual)] == nullptr ? nullptr : at(a.other);
      unsigned long long count = a.n / shape.item;
      void* params[] = {&dst, &src, &lost, &count};
      Launch(shape.codec.round, a.n, params, stream);
      break;
    }
    case DeviceStep::kEncode:
    case DeviceStep::kDecode: {
      void* dst = at(a.dst);
      const void* src = at(a.src);
      unsigned long long count = a.n / shape.item;
      void* params[] = {&dst, &src, &count};
      Launch(a.step == DeviceStep::kEncode ? shape.codec.encode : shape.codec.decode, a.n, params, stream);
      break;
    }
    case DeviceStep::kDecodeAdd: {
      void* dst = at(a.dst);
      const void* x = at(a.src);
      const void* wire = at(a.other);
      unsigned long long count = a.n / shape.item;
      void* params[] = {&dst, &x, &wire, &count};
      Launch(shape.codec.add, a.n, params, stream);
      break;
    }
    case DeviceStep::kMessages:
      RunMessages(shape.messages[a.edge], bases, stream, &lanes != &lanes_);
      break;
    case DeviceStep::kLocal:
      RunLocal(shape, shape.program.locals[a.edge], bases, stream);
      break;
    case DeviceStep::kScale: {
      void* dst = at(a.dst);
      unsigned long long count = a.n / shape.item;
      unsigned divisor = shape.divisor;
      void* params[] = {&dst, &dst, &count, &divisor};
      Launch(shape.scale, a.n, params, stream);
      break;
    }
    default:
      throw PlanError("a program's signals are not its work");
  }
}

// `Local` in plan/ir.py says who has src, dst and parts. What is not reduced moves as bytes.
void DeviceQueue::RunLocal(const DeviceShape& shape, const LocalAction& local, const Bases& bases,
                           DeviceStream stream) {
  constexpr int kBytes = 1;  // ncclUint8
  if (island_ == nullptr) throw PlanError("plan: a local step needs an island");
  VendorCollectives& island = *island_;
  const auto at = [&](const LocalPart& p) { return p.n == 0 ? nullptr : bases.At(p.at); };
  const auto count = [&](const LocalPart& p) { return p.n / shape.item * shape.local.elements; };
  const auto& [dtype, op, elements] = shape.local;
  const bool root = local.root == place_;
  const auto for_parts = [&](auto&& call) {
    island.Group([&] {
      for (int m = 0; m < members_; ++m) {
        const LocalPart& part = local.parts[static_cast<std::size_t>(m)];
        if (part.n > 0) call(m, part);
      }
    });
  };
  const auto copy = [&](std::byte* to, const std::byte* from, std::size_t n) {
    if (to != from) driver_->Copy(to, from, n, stream);
  };
  switch (local.kind) {
    case Collective::kAllreduce:
      return island.AllReduce(at(local.src), at(local.dst), count(local.src), dtype, op, stream);
    case Collective::kReduce:
      return island.Reduce(at(local.src), root ? at(local.dst) : nullptr, count(local.src), dtype, op, local.root,
                           stream);
    case Collective::kBroadcast: {
      const LocalPart& mine = root ? local.src : local.dst;
      return island.Broadcast(at(mine), at(mine), mine.n, kBytes, local.root, stream);
    }
    case Collective::kAllgather:
      if (local.even) return island.AllGather(at(local.src), at(local.parts[0]), local.src.n, kBytes, stream);
      return for_parts([&](int m, const LocalPart& part) {
        island.Broadcast(m == place_ ? at(local.src) : at(part), at(part), part.n, kBytes, m, stream);
      });
    case Collective::kReduceScatter:
      if (local.even) {
        return island.ReduceScatter(at(local.parts[0]), at(local.dst), count(local.dst), dtype, op, stream);
      }
      return for_parts([&](int m, const LocalPart& part) {
        island.Reduce(at(part), m == place_ ? at(local.dst) : nullptr, count(part), dtype, op, m, stream);
      });
    case Collective::kGather:
      if (!root) return island.Send(at(local.src), local.src.n, kBytes, local.root, stream);
      return for_parts([&](int m, const LocalPart& part) {
        if (m == place_) return copy(at(part), at(local.src), part.n);
        island.Recv(at(part), part.n, kBytes, m, stream);
      });
    case Collective::kScatter:
      if (!root) return island.Recv(at(local.dst), local.dst.n, kBytes, local.root, stream);
      return for_parts([&](int m, const LocalPart& part) {
        if (m == place_) return copy(at(local.dst), at(part), part.n);
        island.Send(at(part), part.n, kBytes, m, stream);
      });
    case Collective::kAlltoall: {
      const std::size_t members = static_cast<std::size_t>(members_);
      if (local.parts.size() % (2 * members) != 0) throw PlanError("plan: a local all-to-all of other members");
      return island.Group([&] {
        for (std::size_t i = 0; i < local.parts.size(); ++i) {
          const LocalPart& part = local.parts[i];
          const int member = static_cast<int>(i % members);
          if (part.n == 0) continue;
          if (i < local.parts.size() / 2) {
            island.Send(at(part), part.n, kBytes, member, stream);
          } else {
            island.Recv(at(part), part.n, kBytes, member, stream);
          }
        }
      });
    }
    default:
      throw PlanError("plan: a local step of an unknown kind");
  }
}

void DeviceQueue::SetIsland(std::unique_ptr<VendorCollectives> island, int place, int members) {
  island_ = std::move(island);
  place_ = place;
  members_ = members;
}

void DeviceQueue::Launch(const DeviceKernel& kernel, std::size_t n, void** params, DeviceStream stream) {
  const std::size_t blocks = (n + kernel.per_block - 1) / kernel.per_block;
  const unsigned grid = static_cast<unsigned>(std::clamp<std::size_t>(blocks, 1, kernel.most_blocks));
  driver_->Launch(kernel.function, grid, kernel.block, params, stream);
}

}  // namespace hetcoll
