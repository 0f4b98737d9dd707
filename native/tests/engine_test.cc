// The engine end to end: ranks are threads of this process, over one memfd segment or over socket pairs. Meant to be
// run under ASan, UBSan and TSan as well. `hetcoll_engine_test [NAME]` runs the scenarios whose names begin so.

#include <chrono>
#include <mutex>
#include <string_view>

#include "harness.h"

namespace hetcoll::testing {

void FuzzPlans();
void CheckPlans();

namespace {

constexpr double kPatience = 30;  // seconds until a scenario counts as hung

std::uint64_t Descriptor(Algorithm algorithm, DType dtype, std::size_t count) {
  return reinterpret_cast<std::uintptr_t>(algorithm) ^ (static_cast<std::uint64_t>(dtype) << 56) ^ count;
}

std::shared_ptr<Shape> BindAllreduce(Engine& e, int size, int rank, Algorithm algorithm, DType dtype,
                                     std::size_t count) {
  return e.Bind(e.AddPlan(algorithm(size, rank)), dtype, ReduceOp::kSum, count, count, {}, {},
                Descriptor(algorithm, dtype, count), false);
}

std::shared_ptr<Shape> BindMessage(Engine& e, int size, int rank, int peer, bool sends, std::size_t nbytes) {
  return e.Bind(e.AddPlan(Message(size, rank, peer, sends)), DType::kUint8, ReduceOp::kSum, sends ? nbytes : 0,
                sends ? 0 : nbytes, {}, {}, nbytes, true);
}

Outcome RunToEnd(Engine& e, const std::shared_ptr<Shape>& shape, const void* send, void* recv,
                 double seconds = kPatience) {
  std::shared_ptr<Task> pending;
  const Outcome outcome = e.RunPrompt(shape, send, recv, pending);
  return outcome == Outcome::kPending ? e.Drive(*pending, DeadlineNs(seconds)) : outcome;
}

double Seconds(std::int64_t since) { return static_cast<double>(NowNs() - since) * 1e-9; }

void SleepMs(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// One all-reduce on every rank, out of place and in place, against the sums.
void Allreduce(Job& job, Algorithm algorithm, DType dtype, std::size_t count, const char* what) {
  const Bytes want = Sum(job.size(), count, dtype);
  job.Run([&](int rank, Engine& e) {
    const auto shape = BindAllreduce(e, job.size(), rank, algorithm, dtype, count);
    const Bytes in = Input(rank, count, dtype);
    Bytes out(in.size());
    Outcome outcome = RunToEnd(e, shape, in.data(), out.data());
    CHECK(outcome == Outcome::kDone, "%s: type %d, count %zu: %s", what, int(dtype), count, e.failure().text.c_str());
    CHECK(out == want, "%s: type %d, count %zu, rank %d", what, int(dtype), count, rank);
    out = in;
    outcome = RunToEnd(e, shape, out.data(), out.data());
    CHECK(outcome == Outcome::kDone && out == want, "%s: in place, type %d, count %zu", what, int(dtype), count);
  });
}

void Types() {
  for (const bool tcp : {false, true}) {
    Job job({.size = 3, .tcp = tcp});
    for (int t = 0; t < kDTypes; ++t) {
      const auto dtype = static_cast<DType>(t);
      if (FindKernels(dtype, ReduceOp::kSum) == nullptr) continue;
      for (const std::size_t count : {0, 1, 2, 3, 4, 1009}) Allreduce(job, RingAllreduce, dtype, count, "ring");
      Allreduce(job, DirectAllreduce, dtype, 20011, "direct");
    }
  }
}

void Sizes() {
  const JobOptions links[] = {
      {.ring_bytes = 4096}, {.ring_bytes = 256 << 10}, {.tcp = true}, {.tcp = true, .stripes = 3}};
  for (JobOptions options : links) {
    for (options.size = 2; options.size <= 4; ++options.size) {
      Job job(options);
      for (const std::size_t count : {1, 11, 4099, 150001}) {
        Allreduce(job, RingAllreduce, DType::kFloat32, count, "ring");
        Allreduce(job, DirectAllreduce, DType::kInt64, count, "direct");
        Allreduce(job, ScratchAllreduce, DType::kFloat16, count, "scratch");
      }
    }
  }
  Job large({.size = 2, .ring_bytes = 1 << 20});
  Allreduce(large, DirectAllreduce, DType::kFloat32, (16 << 20) / 4 + 3, "larger than the cache");
}

// Many tasks submitted at once, of several shapes, finished by the user in another order.
void Flight() {
  constexpr int kTasks = 24;
  for (const bool tcp : {false, true}) {
    Job job({.size = 3, .tcp = tcp, .ring_bytes = 8192});
    job.Run([&](int rank, Engine& e) {
      const std::size_t counts[] = {5, 30011, 0, 777};
      std::vector<std::shared_ptr<Shape>> shapes;
      for (const std::size_t count : counts) {
        shapes.push_back(BindAllreduce(e, job.size(), rank, RingAllreduce, DType::kInt32, count));
      }
      std::vector<Bytes> buffers;
      std::vector<std::shared_ptr<Task>> tasks;
      for (int i = 0; i < kTasks; ++i) buffers.push_back(Input(rank, counts[i % 4], DType::kInt32));
      for (int i = 0; i < kTasks; ++i) {
        Bytes& buffer = buffers[static_cast<std::size_t>(i)];
        tasks.push_back(e.Submit(shapes[static_cast<std::size_t>(i % 4)], buffer.data(), buffer.data()));
      }
      for (int i = kTasks - 1; i >= 0; --i) {
        const auto at = static_cast<std::size_t>(i);
        CHECK(e.Drive(*tasks[at], DeadlineNs(kPatience)) == Outcome::kDone, "task %d", i);
        CHECK(buffers[at] == Sum(job.size(), counts[i % 4], DType::kInt32), "task %d of rank %d", i, rank);
      }
      CHECK(e.collectives() == kTasks, "%llu collectives", static_cast<unsigned long long>(e.collectives()));
      CHECK(e.History(1) == shapes[0]->id && e.History(kTasks + 1) == -1, "history");
    });
  }
}

// Point to point in a ring, both directions at once, many messages in order, beside collectives of another thread.
void Messages() {
  constexpr int kRounds = 20;
  for (const bool tcp : {false, true}) {
    Job job({.size = 3, .tcp = tcp, .ring_bytes = 8192});
    const int n = job.size();
    job.Run([&](int rank, Engine& e) {
      const int next = (rank + 1) % n, before = (rank + n - 1) % n;
      const auto send = BindMessage(e, n, rank, next, true, 20001);
      const auto recv = BindMessage(e, n, rank, before, false, 20001);
      const auto sum = BindAllreduce(e, n, rank, DirectAllreduce, DType::kFloat64, 501);
      std::thread beside([&] {
        for (int i = 0; i < kRounds; ++i) {
          Bytes buffer = Input(rank, 501, DType::kFloat64);
          CHECK(RunToEnd(e, sum, buffer.data(), buffer.data()) == Outcome::kDone, "collective %d", i);
          CHECK(buffer == Sum(n, 501, DType::kFloat64), "collective %d", i);
        }
      });
      std::vector<Bytes> out(kRounds), in(kRounds);
      std::vector<std::shared_ptr<Task>> tasks;
      for (std::size_t i = 0; i < kRounds; ++i) {
        out[i] = Input(rank + static_cast<int>(i), 20001, DType::kUint16);
        out[i].resize(20001);
        in[i].resize(20001);
        tasks.push_back(e.Submit(send, out[i].data(), nullptr));
        tasks.push_back(e.Submit(recv, nullptr, in[i].data()));
      }
      for (std::size_t i = tasks.size(); i-- > 0;) {
        CHECK(e.Drive(*tasks[i], DeadlineNs(kPatience)) == Outcome::kDone, "message %zu", i);
      }
      for (std::size_t i = 0; i < kRounds; ++i) {
        Bytes want = Input(before + static_cast<int>(i), 20001, DType::kUint16);
        want.resize(20001);
        CHECK(in[i] == want, "message %zu to rank %d", i, rank);
      }
      beside.join();
    });
  }
}

// Tasks that nobody waits for; others look on meanwhile.
void Background() {
  Job job({.size = 2, .ring_bytes = 8192});
  job.Run([&](int rank, Engine& e) {
    const auto shape = BindAllreduce(e, 2, rank, RingAllreduce, DType::kFloat32, 50021);
    for (int round = 0; round < 4; ++round) {
      Bytes buffer = Input(rank, 50021, DType::kFloat32);
      if (round == 2 && rank == 1) SleepMs(20);  // the engine's thread goes to sleep
      const auto task = e.Submit(shape, buffer.data(), buffer.data());
      e.DriveInBackground();
      const std::int64_t start = NowNs();
      while (task->state.load(std::memory_order_acquire) == Task::State::kRunning && Seconds(start) < kPatience) {
        static_cast<void>(e.Describe());
        SleepMs(1);
      }
      CHECK(task->state.load() == Task::State::kDone, "round %d: %s", round, e.Describe().c_str());
      CHECK(buffer == Sum(2, 50021, DType::kFloat32), "round %d", round);
    }
  });
}

// A rank that comes late wakes the others from their sleep: each wait takes about as long as it is late.
void Wakeups() {
  constexpr int kRounds = 10;
  for (const bool tcp : {false, true}) {
    Job job({.size = 3, .tcp = tcp, .ring_bytes = 8192, .spin_seconds = 0});
    const std::int64_t start = NowNs();
    job.Run([&](int rank, Engine& e) {
      const auto shape = BindAllreduce(e, 3, rank, RingAllreduce, DType::kInt32, 10007);
      for (int i = 0; i < kRounds; ++i) {
        if (rank == i % 3) SleepMs(5);
        Bytes buffer = Input(rank, 10007, DType::kInt32);
        CHECK(RunToEnd(e, shape, buffer.data(), buffer.data()) == Outcome::kDone, "round %d", i);
        CHECK(buffer == Sum(3, 10007, DType::kInt32), "round %d", i);
      }
    });
    // A lost doorbell costs the engine's longest sleep, 100 ms.
    CHECK(Seconds(start) < 0.1 * kRounds, "%.3f s for %d rounds (tcp %d)", Seconds(start), kRounds, tcp);
  }
}

void Failing() {
  for (const bool tcp : {false, true}) {
    Job job({.size = 2, .tcp = tcp});
    job.Run([&](int rank, Engine& e) {
      if (rank == 1) return;  // never calls it
      const auto shape = BindAllreduce(e, 2, rank, RingAllreduce, DType::kFloat32, 1000003);
      Bytes buffer = Input(rank, 1000003, DType::kFloat32);
      const auto first = e.Submit(shape, buffer.data(), buffer.data());
      const auto second = e.Submit(shape, buffer.data(), buffer.data());
      CHECK(e.Drive(*second, DeadlineNs(0.05)) == Outcome::kPending, "nobody answered");
      CHECK(e.Describe().find("rank 1") != std::string::npos, "%s", e.Describe().c_str());
      std::int64_t asked = 0;
      std::thread other([&] {
        SleepMs(20);
        asked = NowNs();
        e.Halt(FaultKind::kTimeout, 1, "first");
        e.Halt(FaultKind::kAborted, -1, "second");
      });
      CHECK(e.Drive(*first, DeadlineNs(kPatience)) == Outcome::kFailed, "failed by another thread");
      other.join();
      CHECK(Seconds(asked) < 0.5, "took %.3f s", Seconds(asked));
      CHECK(e.Drive(*second, DeadlineNs(kPatience)) == Outcome::kFailed, "the one behind it as well");
      CHECK(e.failure().text == "first" && e.failure().kind == FaultKind::kTimeout, "the first failure is kept");
      std::shared_ptr<Task> pending;
      CHECK(e.RunPrompt(shape, buffer.data(), buffer.data(), pending) == Outcome::kFailed, "and stays");
    });
  }
}

// A rank that leaves in order: what it sent before still arrives, what it did not send is an error that names it.
void Leaving() {
  for (const bool tcp : {false, true}) {
    Job job({.size = 3, .tcp = tcp});
    std::atomic<bool> left{false};
    job.Run([&](int rank, Engine& e) {
      if (rank == 2) return;
      const auto shape = BindMessage(e, 3, rank, 1 - rank, rank == 0, 5003);
      Bytes buffer(5003, std::byte{7});
      if (rank == 0) {
        CHECK(RunToEnd(e, shape, buffer.data(), nullptr) == Outcome::kDone, "sent");
        e.Close();
        left = true;
        return;
      }
      while (!left) SleepMs(1);
      e.PeerLeft(0);
      e.PeerLeft(2);
      Bytes in(5003);
      CHECK(RunToEnd(e, shape, nullptr, in.data()) == Outcome::kDone, "%s", e.failure().text.c_str());
      CHECK(in == buffer, "what was sent before the end");
      const std::int64_t start = NowNs();
      CHECK(RunToEnd(e, shape, nullptr, in.data()) == Outcome::kFailed, "nothing more comes");
      CHECK(e.failure().kind == FaultKind::kPeerGone && e.failure().peer == 0, "%s", e.failure().text.c_str());
      CHECK(Seconds(start) < 1, "took %.3f s", Seconds(start));
    });
  }
}

// Ranks that do not call the same get an error instead of each other's data.
void Mismatches() {
  struct Case {
    const char* what;
    DType dtype;
    std::size_t count;
  };
  for (const bool tcp : {false, true}) {
    for (const Case& c : {Case{"type", DType::kInt32, 64}, Case{"count", DType::kFloat32, 65},
                          Case{"much longer", DType::kFloat32, 300000}}) {
      Job job({.size = 2, .tcp = tcp});
      std::atomic<int> mismatches{0};
      job.Run([&](int rank, Engine& e) {
        const std::size_t count = rank == 0 ? 64 : c.count;
        const DType dtype = rank == 0 ? DType::kFloat32 : c.dtype;
        const auto shape = BindAllreduce(e, 2, rank, RingAllreduce, dtype, count);
        Bytes in = Input(rank, count, dtype), out(in.size());
        const Outcome outcome = RunToEnd(e, shape, in.data(), out.data(), 0.5);
        CHECK(outcome != Outcome::kDone, "%s: rank %d got something", c.what, rank);
        mismatches += e.failure().kind == FaultKind::kMismatch && e.failure().peer == 1 - rank;
      });
      CHECK(mismatches > 0, "%s: nobody saw it", c.what);
    }
    Job job({.size = 2, .tcp = tcp});
    job.Run([&](int rank, Engine& e) {
      const auto shape = BindMessage(e, 2, rank, 1 - rank, rank == 0, rank == 0 ? 100 : 200);
      Bytes buffer(200);
      if (rank == 0) {
        CHECK(RunToEnd(e, shape, buffer.data(), nullptr) == Outcome::kDone, "sent");
      } else {
        CHECK(RunToEnd(e, shape, nullptr, buffer.data()) == Outcome::kFailed, "a shorter message");
        CHECK(e.failure().kind == FaultKind::kMismatch, "%s", e.failure().text.c_str());
      }
    });
  }
}

// Memory that is lent instead of copied, written again as soon as each call is over.
void Lending() {
  for (const char* fault : {"", "short=0.5,delay=0.1", "duplicate=3,rank=7"}) {
    Job job({.size = 3, .ring_bytes = 16384, .fault = fault});
    for (const Algorithm algorithm : {RingAllreduce, DirectAllreduce, ScratchAllreduce}) {
      constexpr std::size_t kCount = 65537;
      const Bytes want = Sum(3, kCount, DType::kInt64);
      job.Run([&](int rank, Engine& e) {
        const auto shape = BindAllreduce(e, 3, rank, algorithm, DType::kInt64, kCount);
        const Bytes in = Input(rank, kCount, DType::kInt64);
        std::byte* buffers[] = {e.heap()->Allocate(in.size()), e.heap()->Allocate(in.size())};
        for (int round = 0; round < 4; ++round) {
          std::byte* recv = buffers[round % 2];  // in place every other time
          std::memcpy(buffers[0], in.data(), in.size());
          CHECK(RunToEnd(e, shape, buffers[0], recv) == Outcome::kDone, "%s", e.failure().text.c_str());
          CHECK(std::memcmp(recv, want.data(), want.size()) == 0, "%s: round %d, rank %d", fault, round, rank);
        }
        for (std::byte* buffer : buffers) e.heap()->Free(buffer, in.size());
      });
    }
  }
}

void HarmlessFaults() {
  const char* faults[] = {"delay=0.3", "short=0.8,seed=5", "reorder=0.5", "delay=0.1,short=0.5,reorder=0.2,seed=3"};
  for (const char* fault : faults) {
    for (const bool tcp : {false, true}) {
      Job job({.size = 3, .tcp = tcp, .stripes = 2, .ring_bytes = 16384, .fault = fault});
      for (const std::size_t count : {0, 1, 5, 3001}) {
        Allreduce(job, RingAllreduce, DType::kComplex128, count, fault);
        Allreduce(job, DirectAllreduce, DType::kBfloat16, count, fault);
        Allreduce(job, ScratchAllreduce, DType::kInt8, count, fault);
      }
      Job sleepy({.size = 2, .tcp = tcp, .ring_bytes = 16384, .spin_seconds = 0, .fault = fault});
      Allreduce(sleepy, RingAllreduce, DType::kFloat32, 20011, fault);
    }
  }
}

// What no transport may do: never a wrong result, and somebody sees it, by an error or by waiting in vain.
void HarmfulFaults() {
  constexpr int kOps = 4;
  constexpr std::size_t kCount = 3001;
  for (const bool tcp : {false, true}) {
    for (const char* kind : {"duplicate", "drop", "close"}) {
      for (int message = 1; message <= 5; ++message) {
        const std::string fault = std::string(kind) + "=" + std::to_string(message) + ",rank=1";
        Job job({.size = 3, .tcp = tcp, .fault = fault});
        std::atomic<int> seen{0};
        std::atomic<bool> over{false};
        job.Run([&](int rank, Engine& e) {
          const auto shape = BindAllreduce(e, 3, rank, RingAllreduce, DType::kFloat32, kCount);
          for (int i = 0; i < kOps; ++i) {
            Bytes buffer = Input(rank, kCount, DType::kFloat32);
            if (RunToEnd(e, shape, buffer.data(), buffer.data(), 1) == Outcome::kDone) {
              CHECK(buffer == Sum(3, kCount, DType::kFloat32), "%s: wrong data on rank %d", fault.c_str(), rank);
              continue;
            }
            ++seen;
            if (!over.exchange(true)) {  // what the control plane does: the others hear of it
              const FaultKind found = e.failure().kind;
              CHECK(found != FaultKind::kSystem && found != FaultKind::kAborted, "%s: %s", fault.c_str(),
                    e.failure().text.c_str());
              for (int other = 0; other < 3; ++other) job.engine(other).Halt(FaultKind::kAborted, rank, "told");
            }
            break;
          }
        });
        CHECK(seen == 3, "%s: seen by %d ranks (tcp %d)", fault.c_str(), seen.load(), tcp);
      }
    }
  }
}

void FaultSpecs() {
  const FaultSpec spec = FaultSpec::Parse("delay=0.25,short=1,reorder=1e-3,duplicate=2,drop=3,close=4,rank=5,seed=6");
  CHECK(spec.delay == 0.25 && spec.cut == 1 && spec.reorder == 1e-3 && spec.duplicate == 2 && spec.drop == 3 &&
            spec.close == 4 && spec.rank == 5 && spec.seed == 6 && spec.any(),
        "all fields");
  CHECK(!FaultSpec::Parse("").any() && !FaultSpec::Parse("seed=3,rank=0").any(), "nothing goes wrong");
  for (const char* text : {"delay", "delay=", "delay=2", "delay=-0.1", "delay=nan", "delay=x", "short=0.1x", "drop=0",
                           "drop=-1", "close=1.5", "rank=-1", "seed=", "late=1", ",", "delay=0.1;short=0.2"}) {
    bool refused = false;
    try {
      FaultSpec::Parse(text);
    } catch (const std::invalid_argument& error) {
      refused = std::string_view(error.what()).find("wanted") == 0;
    }
    CHECK(refused, "'%s' was read", text);
  }
}

struct Scenario {
  const char* name;
  void (*run)();
};

constexpr Scenario kScenarios[] = {
    {"plans", CheckPlans}, {"fuzz", FuzzPlans},          {"types", Types},           {"sizes", Sizes},
    {"flight", Flight},    {"messages", Messages},       {"background", Background}, {"wakeups", Wakeups},
    {"failing", Failing},  {"leaving", Leaving},         {"mismatches", Mismatches}, {"faultspecs", FaultSpecs},
    {"lending", Lending},  {"harmless", HarmlessFaults}, {"harmful", HarmfulFaults},
};

}  // namespace

int Main(std::string_view prefix) {
  for (const Scenario& scenario : kScenarios) {
    if (!std::string_view(scenario.name).starts_with(prefix)) continue;
    const std::int64_t start = NowNs();
    scenario.run();
    std::printf("%-12s %6.2f s\n", scenario.name, Seconds(start));
    std::fflush(stdout);
  }
  std::printf("%ld passed, %ld failed\n", passed.load(), failed.load());
  return failed > 0 || passed == 0;
}

}  // namespace hetcoll::testing

int main(int argc, char** argv) { return hetcoll::testing::Main(argc > 1 ? argv[1] : ""); }
