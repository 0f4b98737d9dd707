// Plans on the streams of GPUs that share a host.

#include "gpus.h"

namespace hetcoll::testing {

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
  const BoundPlan big(Plan(DirectAllreduce(2, 0), 2), 0, DType::kInt32, 5000, 5000, std::span<const std::size_t>{},
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
