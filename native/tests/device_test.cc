// Plans on the streams of GPUs that share a host.

#include <numeric>

#include "gpus.h"

namespace hetcoll::testing {
namespace {

// Rank 0 of three, of which rank 2 is on another host, sums with `peer`, and moves some of it inside its GPU. The edge
// to the other host is the queue's first one: no step but a message may be taken for a user of it.
void SignalLanes(Gpus& gpus, int peer, bool ahead, bool captured, bool two, const char* what) {
  gpus.Edge(0, 0, 2, 0);
  BoundPlan plan(Plan(ScratchAllreduce(2, 0), 2), DType::kInt32, 10, 10, std::span<const std::size_t>{},
                 std::span<const std::size_t>{});
  std::vector<std::uint32_t> order(plan.steps.size());
  std::iota(order.begin(), order.end(), 0u);
  std::vector<std::uint16_t> edges;
  for (const BoundStep& s : plan.steps) {
    const bool sends = s.op == Op::kSend;
    edges.push_back(s.op <= Op::kRecvReduce ? gpus.Edge(0, sends ? 0 : peer, sends ? peer : 0, s.channel) : 0);
  }
  CHECK(std::ranges::count(edges, 0) > 1, "steps without an edge");
  const auto used = captured ? CaptureRecipe{plan, edges, order, 1, {}, {}}.Program(Gpus::kSlotBytes).used
                             : gpus.queues[0]->Compile(plan, order, edges, ahead).used;
  CHECK(used[kSignalLane], what);
  CHECK(used[kGrantLane] == two, what);
}

}  // namespace

void SignalsOfPrograms() {
  Gpus gpus(3, 3, 1, false, {0, 0, 1});
  SignalLanes(gpus, 1, true, false, false, "collectives inside a host have one stream for signals");
  SignalLanes(gpus, 1, false, false, true, "messages have one for each direction");
  SignalLanes(gpus, 1, true, true, true, "captured calls have one for each direction");
  SignalLanes(gpus, 2, true, false, true, "what goes between hosts has one for each direction");
}

void GpusOfOneHost() {
  struct Setting {
    int queues;
    bool late;
  };
  const Setting settings[] = {{6, false}, {8, true}, {1, false}, {2, true}};
  std::minstd_rand random(7);
  for (const Setting& s : settings) {
    for (const int size : {2, 3}) {
      Gpus host(size, s.queues, 11, s.late);
      for (const std::size_t count : {std::size_t{1}, std::size_t{7}, std::size_t{250}}) {
        Reduce(host, RingAllreduce, count, random, "ring");
        Reduce(host, DirectAllreduce, count, random, "direct");
        Reduce(host, ScratchAllreduce, count, random, "scratch");
      }
    }
  }
  Gpus host(2, 3, 1, false);
  const BoundPlan big(Plan(DirectAllreduce(2, 0), 2), DType::kInt32, 5000, 5000, std::span<const std::size_t>{},
                      std::span<const std::size_t>{});
  const std::vector<std::uint32_t> order{0, 1, 2, 3};
  const std::vector<std::uint16_t> edges(4, 0);
  bool refused = false;
  try {
    DeviceProgram(big, order, edges, 1024, false);
  } catch (const PlanError&) {
    refused = true;
  }
  CHECK(refused, "a message larger than a slot");
}

}  // namespace hetcoll::testing
