// Bytes that RDMA devices spoil on the way. Part of hetcoll_verbs_test.

#include "verbs_harness.h"

namespace hetcoll::testing {
namespace {

struct Counted {
  std::uint64_t checked = 0, spoiled = 0, resent = 0;
};

Counted CountedBy(Job& job) {
  Counted sum;
  for (int r = 0; r < job.size(); ++r) {
    const IntegrityCounts& counts = job.engine(r).integrity();
    sum.checked += counts.checked_bytes.get();
    sum.spoiled += counts.spoiled.get();
    sum.resent += counts.resent.get();
  }
  return sum;
}

// One byte of one frame, wherever it is: the rail is given up at both ends, and the frame comes by another one, or over
// TCP where there is none, and then the rail comes back.
void SpoiledFrames() {
  for (const int rails : {1, 2}) {
    for (const Integrity integrity : {Integrity::kAll, Integrity::kSampled}) {
      for (int turn = 0; turn < 6; ++turn) {
        const std::size_t count = integrity == Integrity::kAll ? 20011 : 60;  // of messages that are all checked
        const std::string what = std::to_string(rails) + " rails, turn " + std::to_string(turn);
        Job job({.size = 2,
                 .over = Over::kVerbs,
                 .rails = rails,
                 .recovery_ns = 1'000'000,
                 .fabric = {.threaded = turn % 2 == 1, .overtake = turn % 2 == 1},
                 .integrity = integrity});
        Settle(job);
        job.fabric().Change(turn % 2 * rails, [&](FakeNic& nic) {
          nic.corrupt_after = turn / 2;
          nic.corrupt_byte = std::size_t{turn / 2 % 3 == 0 ? 0u : turn / 2 % 3 == 1 ? 1u << 20 : 30u};
        });
        RoundsUntil(job, count, what, [&] { return CountedBy(job).spoiled > 0; });
        Rounds(job, 2, count, what);
        const Counted counted = CountedBy(job);
        CHECK(counted.spoiled == 1 && counted.resent == 1, "%s: %zu were spoiled, %zu came again", what.c_str(),
              std::size_t{counted.spoiled}, std::size_t{counted.resent});
        CHECK(counted.checked > 0, "%s", what.c_str());
        const int finder = 1 - turn % 2;
        const std::string told = Events(job.engine(finder));
        const std::string blamed = "what rank " + std::to_string(1 - finder) + " sent was spoiled on the way";
        CHECK(told.find("lost a rail") != std::string::npos && told.find(blamed) != std::string::npos, "%s: %s",
              what.c_str(), told.c_str());
        CHECK(Within(kPatience, [&] { return Counter(job.engine(0), "recovered_rails") == 1; }), "%s: %s", what.c_str(),
              Links(job.engine(0)).c_str());
        CHECK(job.fabric().complaints().empty(), "%s", what.c_str());
      }
    }
  }
}

// Of registered memory, too: what is checked is not written straight to its destination, the rest is.
void SpoiledDirectly() {
  for (const Integrity integrity : {Integrity::kAll, Integrity::kSampled, Integrity::kOff}) {
    Job job({.size = 2,
             .over = Over::kVerbs,
             .rails = 2,
             .ring_bytes = 1 << 20,
             .recovery_ns = 1'000'000,
             .integrity = integrity});
    Settle(job);
    constexpr std::size_t kCount = (2 << 20) / 8;
    const int rounds = integrity == Integrity::kSampled ? 16 : 8;
    const Bytes want = Sum(2, kCount, DType::kInt64);
    job.Run([&](int rank, Engine& e) {
      Bytes buffer = Input(rank, kCount, DType::kInt64);
      const Bytes in = buffer;
      Registered memory(job, rank, 2, buffer);
      const auto shape = BindAllreduce(e, 2, rank, RingAllreduce, DType::kInt64, kCount);
      for (int round = 0; round < rounds; ++round) {
        if (rank == 0 && round % 2 == 1 && integrity == Integrity::kAll) {
          job.fabric().Change(round / 2 % 2, [&](FakeNic& nic) { nic.corrupt_after = round; });
        }
        std::copy(in.begin(), in.end(), buffer.begin());
        CHECK(RunToEnd(e, shape, buffer.data(), buffer.data()) == Outcome::kDone, "%s", e.failure().text.c_str());
        CHECK(buffer == want, "round %d", round);
      }
      // What came before its rail was given up is sent again all the same, and needed until that is confirmed.
      CHECK(Within(kPatience, [&] { return memory.End(); }), "it is in use: %s", Links(e).c_str());
    });
    const Counted counted = CountedBy(job);
    const std::uint64_t direct = Counter(job.engine(0), "direct_bytes") + Counter(job.engine(1), "direct_bytes");
    if (integrity == Integrity::kAll) {
      CHECK(direct == 0, "%zu bytes were not checked", std::size_t{direct});
      CHECK(counted.spoiled > 0 && counted.spoiled == counted.resent, "%zu and %zu", std::size_t{counted.spoiled},
            std::size_t{counted.resent});
      CHECK(counted.spoiled <= 4, "%zu of 4", std::size_t{counted.spoiled});
    } else {
      CHECK(direct > 0, "nothing was written straight");
    }
    const double part = static_cast<double>(counted.checked) / (2.0 * rounds * (2 << 20));
    if (integrity == Integrity::kSampled) {
      CHECK(part > 1.0 / 200 && part < 1.0 / 20, "%g was checked", part);
    }
    if (integrity == Integrity::kOff) {
      CHECK(counted.checked == 0, "nothing is checked");
    }
  }
}

// What a lost rail had brought comes twice, over another or over TCP, from memory that its sender has written to
// meanwhile: in place a rank writes what it is sent back where it sent from, and may not have heard yet that the first
// came. That is nothing spoiled.
void OverwrittenFrames() {
  for (const bool over_tcp : {false, true}) {
    Job job({.size = 2, .over = Over::kVerbs, .rails = 2, .fabric = {.resends = true}, .integrity = Integrity::kAll});
    Settle(job);
    const std::uint64_t before = job.fabric().bytes(0);
    const auto stall = [&](int k, bool stalled) {
      job.fabric().Change(2 + k, [&](FakeNic& nic) { nic.stalled = stalled; });
    };
    for (const int k : {0, 1}) stall(k, true);  // what rank 1 confirms
    std::atomic<bool> it_came{false};
    job.Run([&](int rank, Engine& e) {
      Bytes buffer(16 << 10, static_cast<std::byte>(1 - rank));  // one frame, which is lent
      Registered memory(job, rank, 2, buffer);
      const auto shape = BindMessage(e, 2, rank, 1 - rank, rank == 0, buffer.size());
      if (rank == 1) {
        CHECK(RunToEnd(e, shape, nullptr, buffer.data()) == Outcome::kDone, "%s", e.failure().text.c_str());
        CHECK(buffer == Bytes(buffer.size(), std::byte{1}), "other bytes");
        if (!over_tcp) stall(job.fabric().bytes(0) > before ? 1 : 0, false);  // the one that did not bring it
        it_came = true;
      } else {
        const auto task = e.Submit(shape, buffer.data(), nullptr);
        while (!it_came && !e.failed()) CHECK(e.Drive(*task, DeadlineNs(0.01)) == Outcome::kPending, "it is lent");
        std::fill(buffer.begin(), buffer.end(), std::byte{2});
        CHECK(e.Drive(*task, DeadlineNs(kPatience)) == Outcome::kDone, "%s", e.failure().text.c_str());
      }
      // Rank 1 takes note of what comes again while it waits for what comes next.
      const auto next = BindMessage(e, 2, rank, 1 - rank, rank == 0, 1);
      CHECK(RunToEnd(e, next, buffer.data(), buffer.data()) == Outcome::kDone, "%s", e.failure().text.c_str());
      CHECK(Within(kPatience, [&] { return memory.End(); }), "it is in use: %s", Links(e).c_str());
    });
    const Counted counted = CountedBy(job);
    CHECK(counted.spoiled == 0, "%zu were spoiled: %s", std::size_t{counted.spoiled}, Events(job.engine(1)).c_str());
    CHECK(Counter(job.engine(0), "resent") > 0, "%s", Links(job.engine(0)).c_str());
    CHECK(!over_tcp || Counter(job.engine(0), "tcp_bytes") > 0, "%s", Links(job.engine(0)).c_str());
  }
}

// A device that always spoils is an error that names the edge.
void SpoilingForEver() {
  for (const int rails : {1, 2}) {
    Job job({.size = 2, .over = Over::kVerbs, .rails = rails, .recovery_ns = 1'000'000, .integrity = Integrity::kAll});
    Settle(job);
    std::atomic<bool> over{false};
    std::thread spoiler([&] {
      while (!over) {
        for (int k = 0; k < rails; ++k) {
          job.fabric().Change(rails + k, [](FakeNic& nic) {
            if (nic.corrupt_after < 0) nic.corrupt_after = 6;
          });
        }
        Nap();
      }
    });
    job.Run([&](int rank, Engine& e) {
      const auto shape = BindAllreduce(e, 2, rank, RingAllreduce, DType::kInt64, 20011);
      const Bytes want = Sum(2, 20011, DType::kInt64);
      Outcome outcome = Outcome::kDone;
      for (const std::int64_t start = NowNs(); outcome == Outcome::kDone && Seconds(start) < kPatience;) {
        Bytes buffer = Input(rank, 20011, DType::kInt64);
        outcome = RunToEnd(e, shape, buffer.data(), buffer.data());
        if (outcome == Outcome::kDone) {
          CHECK(buffer == want, "wrong numbers on rank %d", rank);
        }
      }
      CHECK(outcome == Outcome::kFailed, "it goes on");
      if (rank != 0) return;
      const Failure f = e.failure();
      CHECK(f.kind == FaultKind::kCorrupt && f.peer == 1, "%d, %d: %s", int(f.kind), f.peer, f.text.c_str());
      CHECK(f.text.find("what rank 1 sent was spoiled on the way") != std::string::npos &&
                f.text.find("for the 9th time") != std::string::npos,
            "%s", f.text.c_str());
      job.engine(1).Halt(FaultKind::kAborted, 0, "told");
    });
    over = true;
    spoiler.join();
  }
}

constexpr Scenario kScenarios[] = {
    {"spoiled", SpoiledFrames},
    {"directly", SpoiledDirectly},
    {"overwritten", OverwrittenFrames},
    {"forever", SpoilingForEver},
};

}  // namespace

std::span<const Scenario> IntegrityScenarios() { return kScenarios; }

}  // namespace hetcoll::testing
