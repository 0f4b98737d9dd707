// Rails that die under way, or do nothing any more, and ranks that leave: the others carry on, or TCP does.

#include <sys/mman.h>

#include <string_view>

#include "verbs_harness.h"

namespace hetcoll::testing {
namespace {

// Whichever request fails, delivered or not, on either side: the others carry on, or TCP does.
void Dying() {
  for (const bool threaded : {false, true}) {
    for (int rails = 1; rails <= 3; ++rails) {
      for (int at = 0; at < 40; at += (rails == 1 ? 2 : 5) * (threaded ? 3 : 1)) {
        const bool delivered = at % 4 == 2 || at % 4 == 3;
        Job job({.size = 2,
                 .over = Over::kVerbs,
                 .rails = rails,
                 .ring_bytes = rails == 1 ? 8u << 10 : 64u << 10,
                 .fabric = {.threaded = threaded}});
        Settle(job);
        // In turn of either rank; with several rails all but one die, one after another.
        for (int k = 0; k < std::max(1, rails - 1); ++k) {
          job.fabric().Change((at + k) % 2 * rails + k, [&](FakeNic& nic) {
            nic.fail_after = at + 7 * k;
            nic.fail_delivered = delivered;
            nic.down = false;
          });
        }
        const std::string what = std::to_string(rails) + " rails, request " + std::to_string(at) + " fails";
        const std::size_t count = rails == 1 ? 3001 : 20011;
        Rounds(job, 4 * rails, count, what);
        const auto lost = [&](int rank) { return Counter(job.engine(rank), "lost_rails"); };
        // Which rail carries how much is a matter of their pace: a device may get its fatal request only now.
        const std::uint64_t dead = static_cast<std::uint64_t>(std::max(1, rails - 1));
        const auto gone = [&] { return lost(0) >= dead; };
        CHECK(RoundsUntil(job, count, what, gone), "%s: %d", what.c_str(), int(lost(0)));
        CHECK(Within(kPatience, [&] { return lost(0) == lost(1); }), "%s: both know", what.c_str());
        const std::uint64_t over_tcp = Counter(job.engine(0), "links_over_tcp");
        CHECK(rails == 1 ? over_tcp > 0 : over_tcp == 0, "%s: %s", what.c_str(), Links(job.engine(0)).c_str());
        const std::string told = Events(job.engine(0));
        CHECK(told.find("lost a rail") != std::string::npos, "%s: %s", what.c_str(), told.c_str());
        CHECK(job.fabric().complaints().empty(), "%s", what.c_str());
      }
    }
  }
}

// A cable is pulled in the middle of a long transfer, from registered memory too; then the other one.
void Cables() {
  for (const bool registered : {false, true}) {
    Job job({.size = 2, .over = Over::kVerbs, .rails = 2, .ring_bytes = 256 << 10, .fabric = {.threaded = true}});
    Settle(job);
    for (int n = 0; n < 4; ++n) job.fabric().Change(n, [](FakeNic& nic) { nic.ns_per_byte = 2; });
    constexpr std::size_t kCount = (4 << 20) / 8;
    const Bytes want = Sum(2, kCount, DType::kInt64);
    for (const auto& [n, bytes] : {std::pair{0, 1u << 20}, {3, 3u << 20}}) {
      job.fabric().Change(n, [&](FakeNic& nic) { nic.down_from = nic.bytes + bytes; });
    }
    job.Run([&](int rank, Engine& e) {
      Bytes buffer = Input(rank, kCount, DType::kInt64);
      Registered memory(job, rank, 2, buffer);
      if (!registered) memory.End();
      const auto shape = BindAllreduce(e, 2, rank, RingAllreduce, DType::kInt64, kCount);
      for (int round = 0; round < 4; ++round) {
        const Bytes in = Input(rank, kCount, DType::kInt64);
        std::copy(in.begin(), in.end(), buffer.begin());
        CHECK(RunToEnd(e, shape, buffer.data(), buffer.data()) == Outcome::kDone, "%s", e.failure().text.c_str());
        CHECK(buffer == want, "round %d", round);
      }
      CHECK(memory.End(), "nobody needs it any more");
      CHECK(Counter(e, "links_over_tcp") >= 2, "%s", Links(e).c_str());
    });
    CHECK(Counter(job.engine(0), "resent") > 0, "something was sent again");
  }
}

// What a sender left behind when it went away to compute is sent again without it.
void Keeping() {
  for (int rails = 1; rails <= 2; ++rails) {
    Job job({.size = 2, .over = Over::kVerbs, .rails = rails});
    Settle(job);
    job.fabric().Change(0, [](FakeNic& nic) { nic.fail_after = 0; });
    std::atomic<bool> received{false};
    job.Run([&](int rank, Engine& e) {
      const auto shape = BindMessage(e, 2, rank, 1 - rank, rank == 0, 100);
      Bytes buffer(100, rank == 0 ? std::byte{7} : std::byte{0});
      CHECK(RunToEnd(e, shape, buffer.data(), buffer.data()) == Outcome::kDone, "rank %d, %d rails", rank, rails);
      if (rank == 1) {
        CHECK(buffer == Bytes(100, std::byte{7}), "it came");
        received = true;
        return;
      }
      CHECK(Within(kPatience, [&] { return received.load(); }), "without a call here");
    });
    CHECK(Counter(job.engine(0), "resent") == 1, "%s", Links(job.engine(0)).c_str());
  }
}

// A device that forgets what it was asked to send, even where no answer was asked for.
void Stalling() {
  for (int rails = 1; rails <= 2; ++rails) {
    Job job({.size = 2, .over = Over::kVerbs, .rails = rails});
    Settle(job);
    job.fabric().Change(0, [](FakeNic& nic) { nic.stalled = true; });
    std::atomic<bool> waiting{false};
    std::thread eye([&] { waiting = Within(kPatience, [&] { return !Settled(job.engine(0)); }); });
    const std::int64_t start = NowNs();
    Rounds(job, 2, 1000, "stalling");
    eye.join();
    CHECK(waiting, "for the device");
    CHECK(Within(kPatience, [&] { return Settled(job.engine(0)); }), "after");
    CHECK(Seconds(start) > 0.9, "took %.3f s", Seconds(start));
    const std::string told = Events(job.engine(0));
    CHECK(told.find("no completion for 1000 ms") != std::string::npos, "%s", told.c_str());
    CHECK((Counter(job.engine(0), "links_over_tcp") > 0) == (rails == 1), "%s", Links(job.engine(0)).c_str());
  }
}

// Whoever closes at once has sent what it sent: over a slow line, and where the last request fails.
void Closing() {
  for (const bool fails : {false, true}) {
    Job job({.size = 2, .over = Over::kVerbs, .ring_bytes = 1 << 20, .fabric = {.threaded = true}});
    Settle(job);
    job.fabric().Change(0, [&](FakeNic& nic) {
      nic.ns_per_byte = 100;
      if (fails) nic.fail_after = 1;
    });
    job.Run([&](int rank, Engine& e) {
      const auto shape = BindMessage(e, 2, rank, 1 - rank, rank == 0, 200000);
      Bytes buffer(200000, rank == 0 ? std::byte{7} : std::byte{0});
      if (rank == 1) SleepMs(50);
      CHECK(RunToEnd(e, shape, buffer.data(), buffer.data()) == Outcome::kDone, "%s", e.failure().text.c_str());
      if (rank == 0) return e.Close();
      CHECK(buffer == Bytes(200000, std::byte{7}), "it came");
      CHECK(RunToEnd(e, shape, nullptr, buffer.data()) == Outcome::kFailed, "nothing more comes");
      CHECK(e.failure().kind == FaultKind::kPeerGone, "%s", e.failure().text.c_str());
    });
  }
}

// Sleeping ranks are woken by what arrives, by a dying rail and by a peer that leaves, and by nothing else.
void Sleeping() {
  constexpr int kRounds = 10;
  for (int rails = 1; rails <= 2; ++rails) {
    Job job({.size = 3,
             .over = Over::kVerbs,
             .rails = rails,
             .spin_seconds = 0,
             .sleep_slice_ns = kForeverNs,
             .fabric = {.threaded = true}});
    Settle(job);
    job.Run([&](int rank, Engine& e) {
      const auto shape = BindAllreduce(e, 3, rank, RingAllreduce, DType::kInt32, 10007);
      for (int i = 0; i < kRounds; ++i) {
        if (rank == i % 3) SleepMs(5);
        if (rank == 0 && i == 5) job.fabric().Change(rails, [](FakeNic& nic) { nic.fail_after = 0; });
        Bytes buffer = Input(rank, 10007, DType::kInt32);
        CHECK(RunToEnd(e, shape, buffer.data(), buffer.data()) == Outcome::kDone, "round %d", i);
        CHECK(buffer == Sum(3, 10007, DType::kInt32), "round %d", i);
      }
    });
  }
}

constexpr Scenario kScenarios[] = {
    {"dying", Dying},       {"cables", Cables},   {"keeping", Keeping},
    {"stalling", Stalling}, {"closing", Closing}, {"sleeping", Sleeping},
};

}  // namespace

std::span<const Scenario> DyingScenarios() { return kScenarios; }

}  // namespace hetcoll::testing
