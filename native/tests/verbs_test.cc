// The verbs transport over fake devices: striping, credits, and every way in which rails are known to die. Meant to be
// run under ASan, UBSan and TSan as well. `hetcoll_verbs_test [NAME]` runs the scenarios whose names begin so.

#include <string_view>

#include "verbs_harness.h"

namespace hetcoll::testing {

namespace {

// ---- When all is well ----

void Connect() {
  Job job({.size = 3, .over = Over::kVerbs, .rails = 2});
  Settle(job);
  for (int r = 0; r < 3; ++r) {
    CHECK(Links(job.engine(r)).find("\"path\":\"verbs\"") != std::string::npos, "%s", Links(job.engine(r)).c_str());
    CHECK(Counter(job.engine(r), "links_over_tcp") == 0 && Counter(job.engine(r), "links") == 6, "links");
    CHECK(Events(job.engine(r)).empty() && !job.engine(r).has_news(), "nothing to tell");
  }
}

// Frames overtake each other between rails; sizes on both sides of every threshold.
void Overtaking() {
  for (std::uint32_t seed = 1; seed <= 4; ++seed) {
    Job job({.size = 2,
             .over = Over::kVerbs,
             .rails = 3,
             .ring_bytes = 32 << 10,
             .fabric = {.threaded = true, .overtake = true, .seed = seed}});
    for (const std::size_t count : {1, 100, 3001, 60013}) Allreduce(job, RingAllreduce, DType::kFloat32, count, "over");
    CHECK(job.fabric().bytes(1) > 0 && job.fabric().bytes(2) > 0, "all rails were used");
  }
}

// Many more small messages than places, to a peer that does not look; grants and immediates pass their wrap.
void Depth() {
  constexpr int kMessages = 3000;
  for (const std::size_t nbytes : {0, 8, 5000}) {
    Job job({.size = 2, .over = Over::kVerbs, .ring_bytes = 16 << 10});
    job.Run([&](int rank, Engine& e) {
      const auto shape = BindMessage(e, 2, rank, 1 - rank, rank == 0, nbytes);
      Bytes buffer(nbytes + 1, std::byte{1});
      if (rank == 1) {
        CHECK(Within(kPatience, [&] { return Counter(job.engine(0), "waits") > 0; }), "it has to wait");
      }
      for (int i = 0; i < kMessages; ++i) {
        buffer[0] = rank == 0 ? static_cast<std::byte>(i) : std::byte{0};
        CHECK(RunToEnd(e, shape, buffer.data(), buffer.data()) == Outcome::kDone, "%s", e.failure().text.c_str());
        if (rank == 1 && nbytes > 0) CHECK(buffer[0] == static_cast<std::byte>(i), "message %d", i);
      }
    });
    CHECK(Counter(job.engine(0), "credits") < 20, "no more grants than needed");
    // One for each quarter of the ring, or of its places.
    const std::uint64_t most = nbytes > 1000 ? kMessages * 5000 / 4096 : kMessages / 16 + 20;
    CHECK(Counter(job.engine(1), "credits") <= most, "%d", int(Counter(job.engine(1), "credits")));
    CHECK(job.fabric().complaints().empty(), "queues held");
  }
}

// A slow NIC gets less, and what it gets is measured.
void Shares() {
  Job job({.size = 2, .over = Over::kVerbs, .rails = 2, .ring_bytes = 1 << 20, .fabric = {.threaded = true}});
  Settle(job);
  for (int rank = 0; rank < 2; ++rank) {
    job.fabric().Change(2 * rank, [](FakeNic& nic) { nic.ns_per_byte = 25; });
    job.fabric().Change(2 * rank + 1, [](FakeNic& nic) { nic.ns_per_byte = 100; });
  }
  // So slow that what a processor does for a byte, under a sanitizer and beside others, is little beside it.
  // It takes a while to find out, and longer where the fake devices' own thread is kept from running.
  constexpr std::size_t kBytes = 2 << 20;
  std::string seen;
  const auto until = [&](auto&& shared) {
    bool so = false;
    for (const std::int64_t start = NowNs(); !so && Seconds(start) < kPatience;) {
      const std::uint64_t before[] = {job.fabric().bytes(0), job.fabric().bytes(1)};
      job.Run([&](int rank, Engine& e) {
        const auto shape = BindMessage(e, 2, rank, 1 - rank, rank == 0, kBytes);
        Bytes buffer(kBytes);
        CHECK(RunToEnd(e, shape, buffer.data(), buffer.data()) == Outcome::kDone, "%s", e.failure().text.c_str());
      });
      const double first = static_cast<double>(job.fabric().bytes(0) - before[0]);
      const double second = static_cast<double>(job.fabric().bytes(1) - before[1]);
      so = shared(first, second);
      seen += std::to_string(first / second) + " ";
    }
    CHECK(so, "%s: %s", seen.c_str(), Links(job.engine(0)).c_str());
  };
  until([](double fast, double slow) { return fast > 2.5 * slow && slow > 0; });
  // What was slow for a time is found out again, though it was given little.
  for (int rank = 0; rank < 2; ++rank) {
    job.fabric().Change(2 * rank, [](FakeNic& nic) { nic.ns_per_byte = 1500; });
  }
  // One of its eight frames is what a message may always give it.
  until([](double slow, double fast) { return fast > 5 * slow; });
  for (int rank = 0; rank < 2; ++rank) {
    job.fabric().Change(2 * rank, [](FakeNic& nic) { nic.ns_per_byte = 25; });
  }
  until([](double fast, double slow) { return fast > 2.5 * slow && slow > 0; });
}

// A rail that carries one frame, and then nothing more, holds nobody up: room is granted late, but the frame is
// confirmed before the window behind it is full.
void LoneFrames() {
  Job job({.size = 2, .over = Over::kVerbs, .rails = 2, .ring_bytes = 1 << 20, .fabric = {.threaded = true}});
  Settle(job);
  for (int n = 0; n < 4; ++n) job.fabric().Change(n, [](FakeNic& nic) { nic.ns_per_byte = 5; });
  constexpr int kRounds = 700;
  job.Run([&](int rank, Engine& e) {
    Bytes buffer(200'000);  // a frame for either rail
    for (int i = 0; i < 2 * kRounds; ++i) {
      // Then there and back, so that the first rail always has room.
      const auto shape = BindMessage(e, 2, rank, 1 - rank, (rank + i) % 2 == 0, i == 0 ? buffer.size() : 8);
      const Outcome outcome = RunToEnd(e, shape, buffer.data(), buffer.data());
      CHECK(outcome == Outcome::kDone, "message %d on rank %d: %s", i, rank, Links(e).c_str());
      if (outcome != Outcome::kDone) return;
    }
  });
}

// A rate is that of the time in which a rail was busy; where that is never long enough, there is none.
void Rates() {
  Job job({.size = 2, .over = Over::kVerbs, .rails = 2, .ring_bytes = 64 << 10, .fabric = {.threaded = true}});
  const std::int64_t start = NowNs();
  Settle(job);
  Rounds(job, 30, 100003, "rates");
  std::vector<double> rates;
  const std::string links = Links(job.engine(0));
  const std::string name = "\"megabytes_per_second\":";
  for (std::size_t at = 0; (at = links.find(name, at)) != std::string::npos; at += name.size()) {
    if (links[at + name.size()] != 'n') rates.push_back(std::atof(links.c_str() + at + name.size()));
  }
  // A sample is of 256 KiB, and took no longer than all of this.
  for (const double rate : rates) CHECK(rate * 1e6 * Seconds(start) > 256 << 10, "%g MB/s", rate);
  CHECK(Counter(job.engine(0), "lost_rails") == 0, "%s", links.c_str());
}

// A device that drops what it says to have delivered: nobody takes the next frame for it.
void Skipping() {
  Job job({.size = 2, .over = Over::kVerbs});
  Settle(job);
  job.Run([&](int rank, Engine& e) {
    const auto shape = BindMessage(e, 2, rank, 1 - rank, rank == 0, 100);
    Bytes buffer(100);
    if (rank == 0) job.fabric().Change(0, [](FakeNic& nic) { nic.skip_after = 3; });
    Outcome outcome = Outcome::kDone;
    for (int i = 0; i < 6 && outcome == Outcome::kDone; ++i) {
      outcome = RunToEnd(e, shape, buffer.data(), buffer.data());
    }
    if (rank == 0) return;
    CHECK(outcome == Outcome::kFailed && e.failure().kind == FaultKind::kCorrupt, "%s", e.failure().text.c_str());
    CHECK(e.failure().text.find("a frame was skipped") != std::string::npos, "%s", e.failure().text.c_str());
  });
}

// Registered memory is sent from where it lies and written where it is wanted, and cannot be taken away meanwhile.
void ZeroCopy() {
  for (const char* fault : {"", "short=0.5,delay=0.1"}) {
    Job job({.size = 2,
             .over = Over::kVerbs,
             .rails = 2,
             .ring_bytes = 64 << 10,
             .fault = fault,
             .fabric = {.threaded = true}});
    constexpr std::size_t kCount = 65536;
    const Bytes want = Sum(2, kCount, DType::kInt64);
    std::uint64_t direct = 0;
    job.Run([&](int rank, Engine& e) {
      Bytes buffer = Input(rank, kCount, DType::kInt64);
      Registered memory(job, rank, 2, buffer);
      const auto shape = BindAllreduce(e, 2, rank, RingAllreduce, DType::kInt64, kCount);
      for (int round = 0; round < 8; ++round) {
        const Bytes in = Input(rank, kCount, DType::kInt64);
        std::copy(in.begin(), in.end(), buffer.begin());
        CHECK(RunToEnd(e, shape, buffer.data(), buffer.data()) == Outcome::kDone, "%s", e.failure().text.c_str());
        CHECK(buffer == want, "round %d", round);
      }
      CHECK(Counter(e, "zero_copy_bytes") == 8 * buffer.size(), "%zu", std::size_t(Counter(e, "zero_copy_bytes")));
      CHECK(Counter(e, "staged_bytes") == 0, "nothing was copied");
      CHECK(memory.End(), "nobody needs it any more");
      const Bytes in = Input(rank, kCount, DType::kInt64);
      std::copy(in.begin(), in.end(), buffer.begin());
      CHECK(RunToEnd(e, shape, buffer.data(), buffer.data()) == Outcome::kDone, "%s", e.failure().text.c_str());
      CHECK(buffer == want && Counter(e, "staged_bytes") == buffer.size(), "all was copied");
    });
    // Half of what moves is reduced where it lands. Of the rest, what the peer was late for is copied.
    for (int rank = 0; rank < 2; ++rank) direct += Counter(job.engine(rank), "direct_bytes");
    CHECK(direct > 0 && direct <= 2 * 8 * kCount * 8 / 2, "%zu bytes", std::size_t(direct));
  }
}

// A message to a receiver that waits is written straight to its destination, whatever the sender's memory is.
void Direct() {
  constexpr std::size_t kBytes = 1 << 20;
  for (const bool lent : {false, true}) {
    Job job({.size = 2, .over = Over::kVerbs, .rails = 2, .ring_bytes = 256 << 10, .fabric = {.threaded = true}});
    if (lent) Settle(job);  // else it waits already while the link is being made
    job.Run([&](int rank, Engine& e) {
      const auto shape = BindMessage(e, 2, rank, 1 - rank, rank == 0, kBytes);
      Bytes buffer = Input(rank == 0 ? 5 : 6, kBytes, DType::kUint8);
      Registered memory(job, rank, 2, buffer);
      if (!lent && rank == 0) memory.End();
      if (rank == 0) CHECK(Within(kPatience, [&] { return Counter(e, "clear_to_sends") > 0; }), "the receiver waits");
      CHECK(RunToEnd(e, shape, buffer.data(), buffer.data()) == Outcome::kDone, "%s", e.failure().text.c_str());
      CHECK(buffer == Input(5, kBytes, DType::kUint8), "rank %d", rank);
      CHECK(memory.End(), "it is over");
    });
    CHECK(Counter(job.engine(0), "direct_bytes") == kBytes, "%zu", std::size_t(Counter(job.engine(0), "direct_bytes")));
    CHECK(Counter(job.engine(0), "zero_copy_bytes") == (lent ? kBytes : 0), "lent");
  }
}

// A failed engine lets go of the users' memory before it says so.
void Fencing() {
  for (const bool sends : {false, true}) {
    Job job({.size = 2, .over = Over::kVerbs, .rails = 2, .fabric = {.threaded = true}});
    Settle(job);
    Engine& e = job.engine(0);
    Bytes buffer(100000);
    Registered memory(job, 0, 2, buffer);
    const auto shape = BindMessage(e, 2, 0, 1, sends, buffer.size());
    const auto task = e.Submit(shape, buffer.data(), buffer.data());
    CHECK(e.Drive(*task, DeadlineNs(0.1)) == Outcome::kPending, "nobody answers");
    CHECK(!memory.End(), "it is in use");
    e.Halt(FaultKind::kTimeout, 1, "too late");
    CHECK(e.Drive(*task, DeadlineNs(kPatience)) == Outcome::kFailed, "it is over");
    CHECK(memory.End(), "it was let go");
    // The peer goes on for now: over TCP, which keeps what nobody takes, and where nobody answers.
    const auto other = BindMessage(job.engine(1), 2, 1, 0, !sends, buffer.size());
    Bytes theirs(buffer.size(), std::byte{9});
    buffer.assign(buffer.size(), std::byte{1});
    const Outcome alone = RunToEnd(job.engine(1), other, theirs.data(), theirs.data(), sends ? 0.3 : kPatience);
    CHECK(alone == (sends ? Outcome::kPending : Outcome::kDone), "nobody is there: %s", Links(job.engine(1)).c_str());
    CHECK(buffer == Bytes(buffer.size(), std::byte{1}), "nobody wrote");
    job.engine(0).Close();
    CHECK(RunToEnd(job.engine(1), other, theirs.data(), theirs.data()) == Outcome::kFailed, "and then it is gone");
    CHECK(job.engine(1).failure().kind == FaultKind::kPeerGone, "%s", job.engine(1).failure().text.c_str());
  }
}

// ---- When it cannot be made ----

void Handshake() {
  struct Case {
    const char* what;
    void (*spoil)(FakeNic&);
    const char* told;
  };
  const Case cases[] = {
      {"no memory for rings", [](FakeNic& nic) { nic.registrations_left = 0; }, "ulimit -l"},
      {"no memory for the second link", [](FakeNic& nic) { nic.registrations_left = 3; }, "ulimit -l"},
      {"no queue pairs", [](FakeNic& nic) { nic.queue_pairs_left = 0; }, "no queue pair"},
      {"link down", [](FakeNic& nic) { nic.down = true; }, "to RTR"},
      {"bytes change on the way", [](FakeNic& nic) { nic.corrupt = true; }, "what came was not what was sent"},
      {"nothing arrives", [](FakeNic& nic) { nic.fail_after = 0; }, "IBV_WC_RETRY_EXC_ERR"},
      {"post_send refuses", [](FakeNic& nic) { nic.refuse_after = 0; }, "post_send"},
  };
  for (const Case& c : cases) {
    for (int rails = 1; rails <= 2; ++rails) {
      // Rank 0's first NIC is bad from the start: the links are made at once.
      Job job({.size = 2, .over = Over::kVerbs, .rails = rails, .prepare = [&](Fabric& f) { f.Change(0, c.spoil); }});
      Settle(job);
      Allreduce(job, RingAllreduce, DType::kInt32, 20011, c.what);
      const std::string told = Events(job.engine(0)) + Events(job.engine(1));
      CHECK(told.find(c.told) != std::string::npos, "%s: %s", c.what, told.c_str());
      CHECK(told.find("fake0-0") != std::string::npos, "%s: the device is named: %s", c.what, told.c_str());
      const std::uint64_t over_tcp = Counter(job.engine(0), "links_over_tcp");
      CHECK(rails == 2 ? over_tcp == 0 : over_tcp > 0, "%s: %s", c.what, Links(job.engine(0)).c_str());
      CHECK(over_tcp == Counter(job.engine(1), "links_over_tcp"), "%s: both think so", c.what);
    }
  }
}

constexpr Scenario kScenarios[] = {
    {"connect", Connect},   {"overtaking", Overtaking}, {"depth", Depth},       {"shares", Shares},
    {"skipping", Skipping}, {"rates", Rates},           {"zerocopy", ZeroCopy}, {"direct", Direct},
    {"fencing", Fencing},   {"handshake", Handshake},   {"lone", LoneFrames},
};

}  // namespace

int Main(std::string_view prefix) {
  std::vector<Scenario> all(std::begin(kScenarios), std::end(kScenarios));
  for (const auto& more : {DyingScenarios(), RecoveryScenarios(), CauseScenarios(), IntegrityScenarios(),
                           MendingScenarios(), WindowScenarios(), WindowEndScenarios()})
    all.insert(all.end(), more.begin(), more.end());
  return Play(all, prefix);
}

}  // namespace hetcoll::testing

int main(int argc, char** argv) { return hetcoll::testing::Main(argc > 1 ? argv[1] : ""); }
