// Control sockets of links over verbs that are reset while both ends live: made again, and nothing is lost or comes
// twice. Part of hetcoll_verbs_test.

#include <random>

#include "mender.h"
#include "verbs_harness.h"

namespace hetcoll::testing {
namespace {

std::uint64_t Made(Job& job) {
  std::uint64_t made = 0;
  for (int r = 0; r < job.size(); ++r) made += job.engine(r).reconnects();
  return made;
}

bool AnyLost(Job& job, bool all = false) {
  bool some = false, every = true;
  for (int r = 0; r < job.size(); ++r) {
    for (int peer = 0; peer < job.size(); ++peer) {
      for (int channel = 0; peer != r && channel < kChannels; ++channel) {
        const bool lost = job.engine(r).IsLost({peer, channel, 0});
        some |= lost;
        every &= lost;
      }
    }
  }
  return all ? every : some;
}

// Resets what there is, and waits until all ends have another one.
void ResetAndWait(Job& job, const std::string& what) {
  const auto ends = static_cast<std::uint64_t>(job.size() * (job.size() - 1) * kChannels);
  const std::uint64_t before = Made(job);
  ResetAll();
  CHECK(Within(kPatience, [&] { return Made(job) >= before + ends && !AnyLost(job); }), "%s: %d of %d ends",
        what.c_str(), int(Made(job) - before), int(ends));
}

void PullAll(Job& job, int rails) {
  for (int nic = 0; nic < job.size() * rails; ++nic) job.fabric().Change(nic, [](FakeNic& n) { n.down = true; });
}

// Of a link that rests, only the keeper notices. The next socket carries all when the rails are gone, and when it has
// been reset as well.
void Resting() {
  for (int rails = 1; rails <= 2; ++rails) {
    Job job({.size = 3, .over = Over::kVerbs, .rails = rails, .loopback = true});
    Mender mender(job, 0, 1);
    Settle(job);
    for (int turn = 0; turn < 3; ++turn) {
      ResetAndWait(job, "resting");
      Rounds(job, 2, 20011, "resting");
    }
    for (int r = 0; r < 3; ++r) {
      CHECK(Events(job.engine(r)).empty() && Counter(job.engine(r), "tcp_bytes") == 0, "rails know nothing of it");
    }
    PullAll(job, rails);
    Rounds(job, 2, 20011, "no rails");
    ResetAndWait(job, "no rails");
    Rounds(job, 2, 20011, "no rails any more");
    CHECK(Counter(job.engine(0), "tcp_bytes") > 0, "%s", Links(job.engine(0)).c_str());
  }
}

// While a rail is tried again both ends agree on that over the socket. A rail has ten tries: so few turns.
void BesideRecovery() {
  std::uint64_t made = 0;
  for (int turn = 0; turn < 8; ++turn) {
    const int rails = 1 + turn % 2;
    const std::string what = std::to_string(rails) + " rails, turn " + std::to_string(turn);
    Job job({.size = 2,
             .over = Over::kVerbs,
             .rails = rails,
             .fault = "reset=150,seed=" + std::to_string(turn),
             .recovery_ns = kSoonNs,
             .fabric = {.threaded = true},
             .loopback = true});
    Mender mender(job, 4, static_cast<unsigned>(turn));
    Settle(job);
    const std::uint64_t before = Made(job);
    for (const int bad : {0, rails}) {  // of either end
      LoseARail(job, bad, what);
      RoundsUntilRecovered(job, Counter(job.engine(0), "lost_rails"), 20011, what);
    }
    made += Made(job) - before;
    CHECK(job.fabric().complaints().empty(), "queues held");
  }
  CHECK(made > 40, "only %d were made again", int(made));
}

// Without rails it carries the frames, and is reset within the handshake, headers and payload: the bytes until a reset
// are drawn anew each time. Either both ends reset it, or one; connections that are to take its place break, too.
void CarryingFrames() {
  struct Kind {
    const char* fault;
    std::vector<std::size_t> counts;
  };
  const Kind kinds[] = {{"reset=300", {0, 1, 300}},
                        {"reset=7000,rank=1", {1, 500, 20011}},
                        {"reset=60000,short=0.3,delay=0.02", {1, 500, 20011}}};
  unsigned seed = 0;
  std::uint64_t made = 0, found = 0;
  for (const Integrity integrity : {Integrity::kOff, Integrity::kAll}) {
    for (const auto& [reset, counts] : kinds) {
      const std::string fault = std::string(reset) + ",seed=" + std::to_string(++seed);
      Job job({.size = 3, .over = Over::kVerbs, .rails = 2, .fault = fault, .integrity = integrity, .loopback = true});
      Mender mender(job, seed % 2 == 0 ? 0 : 4, seed);
      Settle(job);
      PullAll(job, 2);
      for (const std::size_t count : counts) {
        Allreduce(job, RingAllreduce, DType::kFloat32, count, fault.c_str());
        Allreduce(job, DirectAllreduce, DType::kBfloat16, count, fault.c_str());
        Allreduce(job, ScratchAllreduce, DType::kInt8, count, fault.c_str());
      }
      CHECK(Counter(job.engine(0), "links_over_tcp") > 0, "%s", Links(job.engine(0)).c_str());
      made += Made(job);
      for (int r = 0; r < 3; ++r) found += job.engine(r).integrity().spoiled.get();
    }
  }
  CHECK(made > 300, "only %d sockets were made again", int(made));
  CHECK(found == 0, "%d were spoiled", int(found));
}

// A link whose rails never worked is one over TCP. Its senders write over their memory as soon as they may.
void NeverARail() {
  for (const Integrity integrity : {Integrity::kOff, Integrity::kAll}) {
    Job job({.size = 2,
             .over = Over::kVerbs,
             .fault = "reset=50000,seed=2",
             .prepare = [](Fabric& fabric) { fabric.nic(0).down = true; },
             .integrity = integrity,
             .loopback = true});
    Mender mender(job, 3, 2);
    Settle(job);
    for (int round = 0; round < 4; ++round) {
      job.Run([&](int rank, Engine& e) {
        const auto shape = BindMessage(e, 2, rank, 1 - rank, rank == 0, 300000);
        Bytes data(300000, rank == 0 ? static_cast<std::byte>(round + 1) : std::byte{0});
        CHECK(RunToEnd(e, shape, data.data(), data.data()) == Outcome::kDone, "%s", e.failure().text.c_str());
        if (rank == 0) std::fill(data.begin(), data.end(), std::byte{0xee});
        CHECK(rank == 0 || data == Bytes(300000, static_cast<std::byte>(round + 1)), "round %d", round);
      });
      Rounds(job, 1, 20011, "never a rail");
    }
    CHECK(Links(job.engine(0)).find("\"path\":\"tcp\"") != std::string::npos && Counter(job.engine(0), "frames") == 0,
          "%s", Links(job.engine(0)).c_str());
    CHECK(Made(job) > 10, "only %d sockets were made again", int(Made(job)));
  }
}

// Who has handed over what it sends leaves when the peer has it: until then it says that this is not so.
void TakenWhileThereIsNone() {
  Job job({.size = 2, .over = Over::kVerbs, .loopback = true});
  Settle(job);
  PullAll(job, 1);
  const auto send = BindMessage(job.engine(0), 2, 0, 1, true, 1000);
  const auto recv = BindMessage(job.engine(1), 2, 1, 0, false, 1000);
  const Bytes data(1000, std::byte{7});
  const auto receive = [&] {
    Bytes came(1000);
    CHECK(RunToEnd(job.engine(1), recv, nullptr, came.data()) == Outcome::kDone && came == data, "it came");
  };
  CHECK(RunToEnd(job.engine(0), send, data.data(), nullptr) == Outcome::kDone, "the rail is found dead");
  receive();
  ResetAll();
  CHECK(Within(kPatience, [&] { return AnyLost(job, true); }), "all are lost");
  CHECK(RunToEnd(job.engine(0), send, data.data(), nullptr) == Outcome::kDone, "it is taken");
  CHECK(job.engine(0).Undelivered()[1] >= 1000, "%d bytes", int(job.engine(0).Undelivered()[1]));
  Mender mender(job, 0, 1);
  CHECK(Within(kPatience, [&] { return job.engine(0).Undelivered().empty(); }), "it is delivered");
  receive();
}

// A peer that ends is gone at once, though its socket was mended before and others are.
void Ending() {
  for (const bool rails : {true, false}) {
    Job job({.size = 2, .over = Over::kVerbs, .loopback = true});
    Mender mender(job, 0, 1);
    Settle(job);
    if (!rails) PullAll(job, 1);
    Rounds(job, 1, 20011, "before");
    ResetAndWait(job, "before");
    job.Run([&](int rank, Engine& e) {
      if (rank == 1) {
        SleepMs(20);
        return e.Close();
      }
      const auto shape = BindMessage(e, 2, 0, 1, false, 1000);
      Bytes buffer(1000);
      CHECK(RunToEnd(e, shape, nullptr, buffer.data()) == Outcome::kFailed, "nothing comes");
      const Failure f = e.failure();
      CHECK(f.kind == FaultKind::kPeerGone && f.peer == 1, "%d: %s", int(f.kind), f.text.c_str());
      CHECK(f.text.find("the peer closed the connection") != std::string::npos, "%s", f.text.c_str());
    });
  }
}

// What nobody can make again is an error of calls that need the link, which names the edge; of nobody who rests.
void ForGood() {
  for (const bool rails : {true, false}) {
    Job job({.size = 2, .over = Over::kVerbs, .loopback = true});
    Settle(job);
    if (!rails) PullAll(job, 1);
    Rounds(job, 1, 20011, "before");
    ResetAll();
    CHECK(Within(kPatience, [&] { return AnyLost(job, true); }), "all are lost");
    if (rails) Rounds(job, 1, 20011, "rails carry all the while");
    for (int r = 0; r < 2; ++r) {
      for (const LostSocket& l : job.engine(r).TakeLost()) {
        CHECK(!l.held && !l.spoiled && !l.why.empty(), "%s", l.why.c_str());
        job.engine(r).GiveUpSocket(l.id, "nobody is there");
      }
    }
    SleepMs(250);  // more than two turns of the keeper
    CHECK(!job.engine(0).failed() && !job.engine(1).failed(), "%s", job.engine(0).failure().text.c_str());
    EndsForGood(job, "nobody is there");
  }
}

// Whatever is spoiled of what goes over it, in the handshake or of frames, comes once more, over another socket. Where
// that is of no use it is an error that names the edge.
void Spoiling() {
  for (const std::uint64_t byte : {1, 100, 700, 5000, 60000, 150000}) {
    const std::string fault = "corrupt=" + std::to_string(byte);
    Job job({.size = 2, .over = Over::kVerbs, .fault = fault, .integrity = Integrity::kAll, .loopback = true});
    Mender mender(job, 0, 1);
    Settle(job);
    PullAll(job, 1);
    Rounds(job, 4, 20011, fault);
    Rounds(job, 2, 11, fault);
    std::uint64_t spoiled = 0, resent = 0;
    for (int r = 0; r < 2; ++r) {
      spoiled += job.engine(r).integrity().spoiled.get();
      resent += job.engine(r).integrity().resent.get();
    }
    CHECK(spoiled > 0 && resent == spoiled, "%s: %d were spoiled, %d came again", fault.c_str(), int(spoiled),
          int(resent));
  }
  for (const bool mended : {false, true}) {
    Job job({.size = 2,
             .over = Over::kVerbs,
             .fault = "corrupt=30000,corrupt_every=30000,rank=1",
             .integrity = Integrity::kAll,
             .loopback = mended,
             .sockets = true});
    Mender mender(job, 0, 1);
    Settle(job);
    PullAll(job, 1);
    job.Run([&](int rank, Engine& e) {
      const auto shape = BindAllreduce(e, 2, rank, RingAllreduce, DType::kInt64, 20011);
      Outcome outcome = Outcome::kDone;
      for (const std::int64_t start = NowNs(); outcome == Outcome::kDone && Seconds(start) < kPatience;) {
        Bytes buffer = Input(rank, 20011, DType::kInt64);
        outcome = RunToEnd(e, shape, buffer.data(), buffer.data());
        if (outcome == Outcome::kDone) {
          CHECK(buffer == Sum(2, 20011, DType::kInt64), "wrong numbers on rank %d", rank);
        }
      }
      CHECK(outcome == Outcome::kFailed, "it goes on");
      if (rank != 0) return;
      const Failure f = e.failure();
      CHECK(f.kind == FaultKind::kCorrupt && f.peer == 1, "%d, %d: %s", int(f.kind), f.peer, f.text.c_str());
      CHECK(f.text.find("what rank 1 sent over TCP beside RDMA was spoiled on the way") != std::string::npos, "%s",
            f.text.c_str());
      CHECK((f.text.find("for the 9th time") != std::string::npos) == mended, "%s", f.text.c_str());
      job.engine(1).Halt(FaultKind::kAborted, 0, "told");
    });
  }
}

template <void (*run)()>
void IfMayReset() {
  if (MayReset()) run();
}

constexpr Scenario kScenarios[] = {
    {"reset: resting", IfMayReset<Resting>},
    {"reset: recovering", IfMayReset<BesideRecovery>},
    {"reset: frames", IfMayReset<CarryingFrames>},
    {"reset: never a rail", IfMayReset<NeverARail>},
    {"reset: taken", IfMayReset<TakenWhileThereIsNone>},
    {"reset: ending", IfMayReset<Ending>},
    {"reset: for good", IfMayReset<ForGood>},
    {"reset: spoiling", Spoiling},
};

}  // namespace

std::span<const Scenario> MendingScenarios() { return kScenarios; }

}  // namespace hetcoll::testing
