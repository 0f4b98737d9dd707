// How lost rails of the verbs transport come back, and all the ways in which they fail again. Part of
// hetcoll_verbs_test.

#include "verbs_harness.h"

namespace hetcoll::testing {
namespace {

// A cable is pulled in the middle of calls, of either rank or both, and put back later; again and again. The rail
// carries its part again, in the calls that went on meanwhile; who is idle takes it up as well.
void Recovering() {
  for (const bool threaded : {false, true}) {
    const bool idle = !threaded;
    Job job({.size = 2,
             .over = Over::kVerbs,
             .rails = 2,
             .ring_bytes = 64u << 10,
             .recovery_ns = kSoonNs,
             .fabric = {.threaded = threaded, .overtake = threaded}});
    Settle(job);
    std::uint64_t before = 0;
    for (int turn = 0; turn < 4; ++turn) {
      const std::string what = "turn " + std::to_string(turn);
      const int bad = turn % 2 * 2 + turn / 2;  // either rail, at either end
      LoseARail(job, bad, what);
      // Of the link that lost its rail last, and maybe of others.
      const std::uint64_t want = Counter(job.engine(0), "lost_rails");
      if (idle) {
        CHECK(Within(kPatience,
                     [&] {
                       return Links(job.engine(0)).find("\"down\"") == std::string::npos &&
                              Links(job.engine(1)).find("\"down\"") == std::string::npos;
                     }),
              "%s: %s %s", what.c_str(), Links(job.engine(0)).c_str(), Links(job.engine(1)).c_str());
      } else {
        RoundsUntilRecovered(job, want, 20011, what);
      }
      before = job.fabric().bytes(bad);
      const auto carries = [&] { return job.fabric().bytes(bad) > before; };
      CHECK(RoundsUntil(job, 20011, what, carries), "%s: it carries something", what.c_str());
    }
    CHECK(Counter(job.engine(0), "links_over_tcp") == 0, "%s", Links(job.engine(0)).c_str());
    const std::string told = Events(job.engine(0));
    CHECK(told.find("took up a lost rail again, 2 in use") != std::string::npos, "%s", told.c_str());
    CHECK(job.fabric().complaints().empty(), "queues held");
  }
}

// Registered memory is sent from and written to all the while, by rails that die and come back; where there is only
// one, TCP carries it meanwhile.
void RecoveringDirect(int rails) {
  Job job({.size = 2,
           .over = Over::kVerbs,
           .rails = rails,
           .ring_bytes = 256 << 10,
           .recovery_ns = kSoonNs,
           .fabric = {.threaded = true, .resends = true}});
  Settle(job);
  constexpr std::size_t kCount = (1 << 20) / 8;
  std::atomic<bool> enough{false};
  std::thread cables([&] {
    for (int n = 0; n < 2 * rails; ++n) {
      job.fabric().Change(n, [](FakeNic& nic) { nic.down = true; });
      CHECK(Within(kPatience, [&] { return Links(job.engine(0)).find("\"down\"") != std::string::npos; }), "cut");
      job.fabric().Change(n, Repair);
      CHECK(Within(kPatience, [&] { return Links(job.engine(0)).find("\"down\"") == std::string::npos; }), "back");
      CHECK(Within(kPatience, [&] { return Links(job.engine(1)).find("\"down\"") == std::string::npos; }), "back");
    }
    enough = true;
  });
  std::atomic<int> more[2] = {0, 0};
  job.Run([&](int rank, Engine& e) {
    Bytes buffer = Input(rank, kCount, DType::kInt64);
    const Bytes want = Sum(2, kCount, DType::kInt64);
    Registered memory(job, rank, rails, buffer);
    const auto shape = BindAllreduce(e, 2, rank, RingAllreduce, DType::kInt64, kCount);
    for (int round = 0;; ++round) {
      if (rank == 0) more[round % 2] = enough ? -round - 1 : round + 1;  // rank 1 may be a round behind, no more
      const Bytes in = Input(rank, kCount, DType::kInt64);
      std::copy(in.begin(), in.end(), buffer.begin());
      CHECK(RunToEnd(e, shape, buffer.data(), buffer.data()) == Outcome::kDone, "%s", e.failure().text.c_str());
      CHECK(buffer == want, "round %d", round);
      if (e.failed() || more[round % 2] == -round - 1) break;
    }
    CHECK(memory.End(), "nobody needs it any more");
  });
  cables.join();
  CHECK(Counter(job.engine(0), "recovered_rails") >= 2 * static_cast<unsigned>(rails), "%s",
        Links(job.engine(0)).c_str());
  CHECK(Counter(job.engine(0), "staged_bytes") == 0, "nothing was copied");
}

void RecoveringDirect() {
  RecoveringDirect(2);
  RecoveringDirect(1);
}

// All cables of a link are pulled at once, in the middle of calls, and put back: it goes over TCP and comes back from
// there, again and again. Who is idle does so as well.
void Returning() {
  for (int rails = 1; rails <= 2; ++rails) {
    for (const bool threaded : {false, true}) {
      Job job({.size = 2,
               .over = Over::kVerbs,
               .rails = rails,
               .ring_bytes = 64u << 10,
               .recovery_ns = kSoonNs,
               .fabric = {.threaded = threaded, .overtake = threaded}});
      Settle(job);
      const auto tell = [&] { return Links(job.engine(0)) + Links(job.engine(1)); };
      for (int turn = 0; turn < 4; ++turn) {
        const std::string what = std::to_string(rails) + " rails, turn " + std::to_string(turn);
        const std::uint64_t tcp = Counter(job.engine(0), "tcp_bytes");
        const auto all = [&](const std::function<void(FakeNic&)>& change) {
          for (int k = 0; k < rails; ++k) job.fabric().Change(turn % 2 * rails + k, change);  // at either end
        };
        all([](FakeNic& nic) { nic.down_from = nic.bytes + 30000; });
        const auto over_tcp = [&] { return Counter(job.engine(0), "tcp_bytes") >= tcp + 100'000; };
        CHECK(RoundsUntil(job, 20011, what, over_tcp), "%s: %s", what.c_str(), tell().c_str());
        CHECK(Counter(job.engine(0), "links_over_tcp") > 0, "%s: %s", what.c_str(), tell().c_str());
        all(Repair);
        const auto back = [&] { return tell().find("\"down\"") == std::string::npos; };
        if (turn >= 2) {
          CHECK(Within(kPatience, back), "%s: %s", what.c_str(), tell().c_str());
        }
        RoundsUntil(job, 20011, what, back);
        CHECK(back() && Counter(job.engine(0), "links_over_tcp") == 0, "%s: %s", what.c_str(), tell().c_str());
        const std::uint64_t before = Counter(job.engine(0), "tcp_bytes");
        const std::uint64_t carried = Counter(job.engine(0), "bytes");
        Rounds(job, 4, 20011, what);
        CHECK(Counter(job.engine(0), "tcp_bytes") == before, "%s: nothing goes over TCP any more", what.c_str());
        CHECK(Counter(job.engine(0), "bytes") > carried, "%s: but over rails", what.c_str());
      }
      const std::string told = Events(job.engine(0));
      CHECK(told.find("going on over TCP") != std::string::npos, "%s", told.c_str());
      CHECK(told.find("took up a lost rail again, 1 in use") != std::string::npos, "%s", told.c_str());
      CHECK(job.fabric().complaints().empty(), "queues held");
    }
  }
}

// Many messages one way, which the receiver takes late: those that went by rails that died, over TCP, and by rails that
// came back come in the order in which they were sent.
void Order() {
  constexpr int kMessages = 120;
  Job job(
      {.size = 2, .over = Over::kVerbs, .ring_bytes = 64u << 10, .recovery_ns = kSoonNs, .fabric = {.threaded = true}});
  Settle(job);
  const auto size = [](int i) { return static_cast<std::size_t>(1 + i * 977 % 50'000); };
  std::atomic<bool> done{false};
  std::thread cables([&] {
    for (int n = 0; !done; n = 1 - n) {
      job.fabric().Change(n, [](FakeNic& nic) { nic.down = true; });
      SleepMs(3);
      job.fabric().Change(n, Repair);
      SleepMs(10);
    }
  });
  const auto both = [&] {
    return Counter(job.engine(0), "tcp_bytes") > 0 && Counter(job.engine(0), "recovered_rails") > 0;
  };
  const std::int64_t start = NowNs();
  for (int turn = 0; turn < 10 || (!both() && Seconds(start) < kPatience); ++turn) {
    job.Run([&](int rank, Engine& e) {
      std::vector<Bytes> buffers;
      std::vector<std::shared_ptr<Task>> tasks;
      for (int i = 0; i < kMessages; ++i) {
        buffers.emplace_back(size(i), rank == 0 ? static_cast<std::byte>(i + turn) : std::byte{0});
        if (rank == 1 && i % 40 == 0) SleepMs(15);  // until then the sender has as much under way as it may
        const auto shape = BindMessage(e, 2, rank, 1 - rank, rank == 0, size(i));
        tasks.push_back(e.Submit(shape, buffers.back().data(), buffers.back().data()));
      }
      for (const auto& task : tasks) {
        CHECK(e.Drive(*task, DeadlineNs(kPatience)) == Outcome::kDone, "rank %d: %s", rank, e.failure().text.c_str());
      }
      for (int i = 0; rank == 1 && i < kMessages; ++i) {
        CHECK(buffers[static_cast<std::size_t>(i)] == Bytes(size(i), static_cast<std::byte>(i + turn)), "message %d",
              i);
      }
    });
  }
  done = true;
  cables.join();
  CHECK(both(), "%s", Links(job.engine(0)).c_str());
}

// Whatever goes wrong with a new rail, at either end, the calls go on, and once it is mended the rail comes back.
void RecoveringInVain() {
  struct Case {
    const char* what;
    void (*spoil)(FakeNic&);
    const char* why;
  };
  const Case cases[] = {
      {"still down", [](FakeNic& nic) { nic.down = true; }, "to RTR"},
      {"no queue pairs", [](FakeNic& nic) { nic.queue_pairs_left = 0; }, "no queue pair"},
      {"no registrations", [](FakeNic& nic) { nic.registrations_left = 0; }, "registering"},
      {"one registration", [](FakeNic& nic) { nic.registrations_left = 1; }, "registering"},
      {"bytes change", [](FakeNic& nic) { nic.corrupt = true; }, "what came was not what was sent"},
      {"post_send refuses", [](FakeNic& nic) { nic.refuse_after = 0; }, "post_send"},
      {"the probe fails", [](FakeNic& nic) { nic.fail_after = 0; }, "IBV_WC_RETRY_EXC_ERR"},
      {"the probe fails late",
       [](FakeNic& nic) {
         nic.fail_after = 0;
         nic.fail_delivered = true;
       },
       "IBV_WC_RETRY_EXC_ERR"},
  };
  for (const Case& c : cases) {
    for (int end = 0; end < 2; ++end) {
      const std::string what = c.what + std::string(" at rank ") + std::to_string(end);
      Job job({.size = 2, .over = Over::kVerbs, .rails = 2, .recovery_ns = kSoonNs, .fabric = {.threaded = true}});
      Settle(job);
      // Every new queue pair finds the device like that.
      const int bad = 2 * end + 1;
      std::atomic<bool> mended{false};
      job.fabric().Change(bad, [&](FakeNic& nic) {
        c.spoil(nic);
        nic.down = true;
      });
      Rounds(job, 2, 20011, what);
      const auto tell = [&] { return Links(job.engine(0)) + Links(job.engine(1)); };
      CHECK(Within(kPatience, [&] { return Counter(job.engine(0), "lost_rails") > 0; }), "%s", tell().c_str());
      std::thread spoiler([&] {
        while (!mended) {
          job.fabric().Change(bad, [&](FakeNic& nic) {
            const bool refuses = nic.registrations_left == 0;  // the next one of a try that has made one
            Repair(nic);
            c.spoil(nic);
            if (refuses) nic.registrations_left = 0;
          });
          SleepMs(1);
        }
      });
      const auto told = [&] {
        return tell().find(c.why) != std::string::npos && Counter(job.engine(0), "rail_tries") > 1;
      };
      CHECK(RoundsUntil(job, 20011, what, told), "%s: %s", what.c_str(), tell().c_str());
      mended = true;
      spoiler.join();
      job.fabric().Change(bad, Repair);
      // The rails of links over this device that were in use when it broke.
      RoundsUntilRecovered(job, 1, 20011, what);
      CHECK(Counter(job.engine(0), "links_over_tcp") == 0, "%s", tell().c_str());
      CHECK(job.fabric().complaints().empty(), "%s", what.c_str());
    }
  }
}

// However often it was tried in vain, it is tried again, after pauses that grow no more: had they always doubled, the
// last of so many tries would come after half a minute.
void TryingForEver() {
  Job job({.size = 2, .over = Over::kVerbs, .rails = 2, .recovery_ns = kSoonNs, .fabric = {.threaded = true}});
  Settle(job);
  job.fabric().Change(1, [](FakeNic& nic) { nic.down = true; });
  const auto tries = [&] { return Counter(job.engine(0), "rail_tries"); };
  const auto lost = [&] { return Counter(job.engine(0), "lost_rails"); };
  const auto often = [&] { return lost() > 0 && tries() > 15 * lost(); };
  CHECK(RoundsUntil(job, 20011, "in vain", often), "%d tries", int(tries()));
  job.fabric().Change(1, Repair);
  RoundsUntilRecovered(job, lost(), 20011, "after so many tries");
}

// A rail that did not work when its link was made is tried as one that was lost: it carries its part from then on.
void LateRails() {
  for (const int bad : {1, 3}) {
    Job job({.size = 2,
             .over = Over::kVerbs,
             .rails = 2,
             .recovery_ns = kSoonNs,
             .fabric = {.threaded = true},
             .prepare = [&](Fabric& f) { f.Change(bad, [](FakeNic& nic) { nic.down = true; }); }});
    Settle(job);
    Rounds(job, 2, 20011, "without it");
    CHECK(job.fabric().bytes(bad) == 0, "it is down");
    CHECK(Counter(job.engine(0), "lost_rails") == 0, "it was never in use");
    job.fabric().Change(bad, Repair);
    RoundsUntilRecovered(job, 1, 20011, "a rail that came late");
    const std::uint64_t before = job.fabric().bytes(bad);
    const auto carries = [&] { return job.fabric().bytes(bad) > before; };
    CHECK(RoundsUntil(job, 20011, "with it", carries), "it carries something");
  }
}

// The rest of the rails die, or an end leaves, while a new rail is on its way.
void RecoveringTooLate() {
  for (int at = 0; at < 12; ++at) {
    Job job({.size = 2, .over = Over::kVerbs, .rails = 2, .recovery_ns = kSoonNs, .fabric = {.threaded = true}});
    Settle(job);
    job.fabric().Change(1, [](FakeNic& nic) { nic.down = true; });
    Rounds(job, 2, 20011, "too late");
    CHECK(Within(kPatience, [&] { return Counter(job.engine(0), "lost_rails") > 0; }), "%s",
          Links(job.engine(0)).c_str());
    job.fabric().Change(1, [](FakeNic& nic) { nic.down = false; });
    SleepMs(at * 25);
    if (at % 3 == 2) continue;  // everybody leaves
    job.fabric().Change(at % 3 == 0 ? 0 : 2, [](FakeNic& nic) { nic.down = true; });
    Rounds(job, 4, 20011, "too late");
  }
}

constexpr Scenario kScenarios[] = {
    {"recovering", Recovering}, {"again", RecoveringDirect}, {"vain", RecoveringInVain}, {"tireless", TryingForEver},
    {"laterails", LateRails},   {"late", RecoveringTooLate}, {"returning", Returning},   {"order", Order},
};

}  // namespace

std::span<const Scenario> RecoveryScenarios() { return kScenarios; }

}  // namespace hetcoll::testing
