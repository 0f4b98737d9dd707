// Ranks without a GPU among those with one: engines at one end of a slot or of a proxy, streams at the other.

#include <unistd.h>

#include "gpus.h"

namespace hetcoll::testing {
namespace {

constexpr std::uint64_t kDescriptor = 0x51a9;

struct Mixed {
  // `has_gpu` and `host` for each rank.
  Mixed(std::vector<bool> has_gpu, std::vector<int> host, int queues, bool late)
      : size(static_cast<int>(host.size())),
        gpu(std::move(has_gpu)),
        gpus(size, queues, 5, late, std::move(host), 1, "", false) {
    for (int r = 0; r < size; ++r) {
      engines.push_back(std::make_unique<Engine>(EngineOptions{r, size, 0x77, r, 20e-6, true}));
    }
    for (int a = 0; a < size; ++a) {
      for (int b = a + 1; b < size; ++b) {
        for (int channel = 0; channel < kChannels; ++channel) Link(a, b, channel);
      }
    }
  }

  bool Gpu(int rank) const { return gpu[static_cast<std::size_t>(rank)]; }
  Engine& engine(int rank) { return *engines[static_cast<std::size_t>(rank)]; }

  void Link(int a, int b, int channel) {
    if (!gpus.Apart(a, b) && Gpu(a) != Gpu(b)) {
      const int host = Gpu(a) ? b : a;
      const int device = Gpu(a) ? a : b;
      engine(host).AttachSlots(device, channel + kChannels, gpus.SlotsOf(host, host, device, channel),
                               gpus.SlotsOf(host, device, host, channel), 2);
    } else if (!(Gpu(a) && Gpu(b) && !gpus.Apart(a, b))) {
      const auto [mine, theirs] = SocketPairs(1);
      Attach(a, b, channel, mine);
      Attach(b, a, channel, theirs);
    }
  }

  void Attach(int rank, int peer, int channel, const std::vector<int>& fds) {
    if (Gpu(rank)) {
      gpus.proxies[static_cast<std::size_t>(rank)]->Connect(peer, channel, fds);
    } else {
      engine(rank).AttachTcp(peer, channel + (Gpu(peer) ? kChannels : 0), fds);
    }
  }

  // The plan of a rank without a GPU: on other channels where its peer has one.
  Encoded Moved(Encoded plan) const {
    PlanHeader head;
    std::memcpy(&head, plan.data(), sizeof head);
    for (std::uint32_t i = 0; i < head.steps; ++i) {
      std::byte* at = plan.data() + sizeof head + i * sizeof(StepRecord);
      StepRecord step;
      std::memcpy(&step, at, sizeof step);
      const bool talks = step.op <= std::uint8_t(Op::kRecvReduce);
      if (talks && Gpu(step.peer)) step.channel = static_cast<std::uint16_t>(step.channel + kChannels);
      std::memcpy(at, &step, sizeof step);
    }
    return plan;
  }

  int size;
  std::vector<bool> gpu;
  Gpus gpus;
  std::vector<std::unique_ptr<Engine>> engines;
};

// All-reduces of all ranks, one after another without waiting in between on GPUs.
void Reduce(Mixed& mixed, Algorithm algorithm, std::size_t count, std::minstd_rand& random, const char* what) {
  constexpr int kTurns = 3;
  Reduction call(mixed.gpus, algorithm, count, random, mixed.gpu);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < mixed.size; ++rank) {
    if (mixed.Gpu(rank)) continue;
    threads.emplace_back([&, rank] {
      const auto r = static_cast<std::size_t>(rank);
      Engine& e = mixed.engine(rank);
      const int plan = e.AddPlan(mixed.Moved(algorithm(mixed.size, rank)));
      const auto shape = e.Bind(plan, Reduction::kType, ReduceOp::kSum, count, count, {}, {}, kDescriptor, false, true);
      for (int turn = 0; turn < kTurns; ++turn) {
        const Outcome outcome = RunToEnd(e, shape, call.in[r].data(), call.out[r].data());
        CHECK(outcome == Outcome::kDone, "%s: rank %d: %s", what, rank, e.failure().text.c_str());
      }
    });
  }
  for (int turn = 0; turn < kTurns; ++turn) {
    for (int rank = 0; rank < mixed.size; ++rank) {
      if (!mixed.Gpu(rank)) continue;
      call.Enqueue(mixed.gpus, rank, mixed.engine(rank).Enter(0, kDescriptor, false), 0, false, true);
    }
  }
  for (std::thread& thread : threads) thread.join();
  for (int rank = 0; rank < mixed.size; ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    const std::int64_t start = NowNs();
    while (mixed.Gpu(rank) && !mixed.gpus.queues[r]->Idle() && Seconds(start) < kPatience) SleepMs(1);
    const Failure failure = mixed.gpus.proxies[r]->AwaitFailure(0);
    CHECK(call.out[r] == call.want, "%s: %d ranks, %zu elements, rank %d: %s", what, mixed.size, count, rank,
          failure.text.c_str());
  }
}

// Messages large and small, whose bytes several threads move.
void SlotsWithHelpers() {
  constexpr std::size_t kBytes = std::size_t{1} << 20;
  for (const unsigned helpers : {0u, 1u, 3u}) {
    const auto team = std::make_shared<Team>(helpers);
    Bytes bytes(2 * kBytes);
    std::vector<std::uint64_t> words(5 * kWordStride);
    const Slots slots{
        bytes.data(), words.data(), words.data() + 2 * kWordStride, kBytes, 2, words.data() + 4 * kWordStride, 1};
    const auto send = MakeSlotSend(slots, team);
    const auto recv = MakeSlotRecv(slots, team);
    CHECK(recv->team() == team.get(), "its reductions are shared as well");
    for (std::size_t turn = 0; turn < 60; ++turn) {
      const std::size_t total = turn % 5 == 0 ? kBytes : 1 + turn * 7919 % kBytes;
      const hetcoll::Message message{turn, total};
      const Bytes from = Pattern(total, static_cast<unsigned>(turn));
      Bytes to(total);
      for (std::size_t at = 0; at < total;) {
        at += static_cast<std::size_t>(send->Push(message, at, from.data() + at, total - at));
      }
      for (std::size_t at = 0; at < total;) {
        at += static_cast<std::size_t>(recv->Pull(message, at, to.data() + at, total - at, turn % 2 == 0));
      }
      CHECK(from == to, "%u helpers, %zu bytes", helpers, total);
    }
  }
}

// A stream that was let go of writes a slot's word like any other; its bytes must not pass for data. Kernels that were
// let go of, as by who leaves in order, wrote none: what is there is the data.
void SlotsAfterAnAbort() {
  std::vector<std::byte> bytes(2 * 64);
  std::vector<std::uint64_t> words(5 * kWordStride);
  const Slots slots{
      bytes.data(), words.data(), words.data() + 2 * kWordStride, 64, 2, words.data() + 4 * kWordStride, 1};
  const auto send = MakeSlotSend(slots, nullptr);
  const auto recv = MakeSlotRecv(slots, nullptr);
  const hetcoll::Message message{1, 64};
  std::array<std::byte, 64> out{};
  constexpr std::uint64_t kKernelsGone = 1;
  for (const std::uint64_t gone : {std::uint64_t{0}, kKernelsGone, kKernelsGone | hetcoll::kStreamsGone}) {
    const bool aborted = (gone & hetcoll::kStreamsGone) != 0;
    words[4 * kWordStride] = gone;
    const std::ptrdiff_t moved = aborted ? kWouldBlock : 64;
    if (aborted)
      slots.Publish(2);
    else
      CHECK(send->Push(message, 0, out.data(), 64) == 64, "a free slot");
    CHECK(recv->Pull(message, 0, out.data(), 64, false) == moved, "gone %d: a full slot", static_cast<int>(gone));
  }
  CHECK(send->Push(message, 0, out.data(), 64) == kWouldBlock, "a free slot after an abort");
}

}  // namespace

void GpusAndHosts() {
  SlotsWithHelpers();
  SlotsAfterAnAbort();
  struct Setting {
    std::vector<bool> gpu;
    std::vector<int> host;
    int queues;
    bool late;
  };
  const Setting settings[] = {
      {{true, false}, {0, 0}, 7, false},
      {{false, true}, {0, 1}, 1, false},
      {{true, false, true}, {0, 0, 0}, 2, true},
      {{true, false, false}, {0, 0, 0}, 1, true},
      {{true, false, true, false}, {0, 0, 1, 1}, 2, false},
  };
  std::minstd_rand random(7);
  for (const Setting& s : settings) {
    Mixed mixed(s.gpu, s.host, s.queues, s.late);
    for (const std::size_t count : {std::size_t{1}, std::size_t{7}, std::size_t{250}}) {
      Reduce(mixed, RingAllreduce, count, random, "ring of both");
      Reduce(mixed, DirectAllreduce, count, random, "direct of both");
      Reduce(mixed, ScratchAllreduce, count, random, "scratch of both");
    }
  }
}

}  // namespace hetcoll::testing
