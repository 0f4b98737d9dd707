// What goes wrong on links: operations that do not match, bytes that nobody sent, and HETCOLL_FAULT.

#include <sys/socket.h>
#include <unistd.h>

#include <mutex>
#include <optional>
#include <random>
#include <string_view>

#include "harness.h"
#include "mender.h"

namespace hetcoll::testing {

// Ranks that do not call the same get an error instead of each other's data.
void Mismatches() {
  struct Case {
    const char* what;
    DType dtype;
    std::size_t count;
  };
  for (const Over over : kAllLinks) {
    for (const Case& c : {Case{"type", DType::kInt32, 64}, Case{"count", DType::kFloat32, 65},
                          Case{"much longer", DType::kFloat32, 300000}}) {
      Job job({.size = 2, .over = over});
      std::atomic<int> mismatches{0};
      job.Run([&](int rank, Engine& e) {
        const std::size_t count = rank == 0 ? 64 : c.count;
        const DType dtype = rank == 0 ? DType::kFloat32 : c.dtype;
        const auto shape = BindAllreduce(e, 2, rank, RingAllreduce, dtype, count);
        Bytes in = Input(rank, count, dtype), out(in.size());
        const auto task = e.Submit(shape, in.data(), out.data());
        Outcome outcome = Outcome::kPending;
        for (const std::int64_t start = NowNs();  // what one rank has seen, the other may wait for in vain
             outcome == Outcome::kPending && mismatches == 0 && Seconds(start) < kPatience;) {
          outcome = e.Drive(*task, DeadlineNs(0.05));
        }
        CHECK(outcome != Outcome::kDone, "%s: rank %d got something", c.what, rank);
        mismatches += e.failure().kind == FaultKind::kMismatch && e.failure().peer == 1 - rank;
      });
      CHECK(mismatches > 0, "%s: nobody saw it", c.what);
    }
    Job job({.size = 2, .over = over});
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

// Bytes that no correct peer sends, and a stream that ends too early.
void Garbage() {
  std::mt19937 random(7);
  for (int round = 0; round < 60; ++round) {
    const std::size_t length = random() % 200;
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) std::abort();
    Engine e({0, 2, 1, 0, 20e-6, false});
    e.AttachTcp(1, 0, std::vector{pair[0]});
    e.AttachTcp(1, 1, std::vector{dup(pair[0])});
    Bytes bytes(length);
    for (std::byte& b : bytes) b = static_cast<std::byte>(random());
    if (write(pair[1], bytes.data(), length) < 0) std::abort();
    shutdown(pair[1], SHUT_WR);
    const auto shape = BindAllreduce(e, 2, 0, RingAllreduce, DType::kFloat32, 1000);
    Bytes buffer = Input(0, 1000, DType::kFloat32);
    CHECK(RunToEnd(e, shape, buffer.data(), buffer.data()) == Outcome::kFailed, "%zu bytes of garbage", length);
    const FaultKind kind = e.failure().kind;
    // The stamp is looked at first; what is shorter than a header is an early end.
    CHECK(kind == (length < 32 ? FaultKind::kPeerGone : FaultKind::kCorrupt), "%zu bytes: %s", length,
          e.failure().text.c_str());
    close(pair[1]);
  }
}

void HarmlessFaults() {
  const char* faults[] = {"delay=0.3", "short=0.8,seed=5", "reorder=0.5", "delay=0.1,short=0.5,reorder=0.2,seed=3"};
  for (const char* fault : faults) {
    for (const Over over : kAllLinks) {
      Job job({.size = 3, .over = over, .stripes = 2, .ring_bytes = 16384, .fault = fault});
      for (const std::size_t count : {0, 1, 5, 3001}) {
        Allreduce(job, RingAllreduce, DType::kComplex128, count, fault);
        Allreduce(job, DirectAllreduce, DType::kBfloat16, count, fault);
        Allreduce(job, ScratchAllreduce, DType::kInt8, count, fault);
      }
      Job sleepy({.size = 2, .over = over, .ring_bytes = 16384, .spin_seconds = 0, .fault = fault});
      Allreduce(sleepy, RingAllreduce, DType::kFloat32, 20011, fault);
    }
  }
}

// What no transport may do: never a wrong result, and somebody sees it, by an error or by waiting in vain.
void HarmfulFaults() {
  constexpr int kOps = 4;
  constexpr std::size_t kCount = 3001;
  for (const Over over : kAllLinks) {
    for (const char* kind : {"duplicate", "drop", "close"}) {
      for (int message = 1; message <= 5; ++message) {
        const std::string fault = std::string(kind) + "=" + std::to_string(message) + ",rank=1";
        Job job({.size = 3, .over = over, .fault = fault});
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
        CHECK(seen == 3, "%s: seen by %d ranks (links %d)", fault.c_str(), seen.load(), int(over));
      }
    }
  }
}

// The stream of a connection ends in the middle of a frame, for good: what came of it is used on no rank, and somebody
// names the other end. Sockets that could be made again are not, since an end in order is the peer's.
void TruncatedFrames() {
  constexpr std::size_t kCount = 60'001;
  for (const Integrity integrity : {Integrity::kOff, Integrity::kAll}) {
    for (const bool tls : {false, true}) {
      for (const int stripes : {1, 2}) {
        for (const int byte : {1, 31, 33, 1000, 65'000, 200'000, 400'000}) {
          const std::string fault = "truncate=" + std::to_string(byte) + ",rank=1";
          Job job({.size = 3,
                   .over = Over::kTcp,
                   .stripes = stripes,
                   .fault = fault,
                   .integrity = integrity,
                   .loopback = stripes == 2,
                   .tls = tls});
          std::optional<Mender<Engine>> mender;
          if (stripes == 2) mender.emplace(job, 0, 1);
          std::atomic<int> seen{0};
          std::atomic<bool> over{false};
          job.Run([&](int rank, Engine& e) {
            const auto shape = BindAllreduce(e, 3, rank, RingAllreduce, DType::kFloat32, kCount);
            for (int i = 0; i < 8; ++i) {
              Bytes buffer = Input(rank, kCount, DType::kFloat32);
              if (RunToEnd(e, shape, buffer.data(), buffer.data()) == Outcome::kDone) {
                CHECK(buffer == Sum(3, kCount, DType::kFloat32), "%s: wrong data on rank %d", fault.c_str(), rank);
                continue;
              }
              ++seen;
              if (!over.exchange(true)) {  // what the control plane does: the others hear of it
                CHECK(e.failure().kind == FaultKind::kPeerGone && e.failure().peer == 1, "%s: %s", fault.c_str(),
                      e.failure().text.c_str());
                for (int other = 0; other < 3; ++other) job.engine(other).Halt(FaultKind::kAborted, rank, "told");
              }
              break;
            }
          });
          CHECK(seen == 3, "%s over %d stripes: seen by %d ranks", fault.c_str(), stripes, seen.load());
        }
      }
    }
  }
}

void FaultSpecs() {
  const FaultSpec spec = FaultSpec::Parse(
      "delay=0.25,short=1,reorder=1e-3,duplicate=2,drop=3,close=4,corrupt=7,corrupt_every=8,truncate=9,rank=5,seed=6");
  CHECK(spec.delay == 0.25 && spec.cut == 1 && spec.reorder == 1e-3 && spec.duplicate == 2 && spec.drop == 3 &&
            spec.close == 4 && spec.corrupt == 7 && spec.corrupt_every == 8 && spec.truncate == 9 && spec.rank == 5 &&
            spec.seed == 6 && spec.any(),
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

}  // namespace hetcoll::testing
