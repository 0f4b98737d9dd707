// Windows that NICs write or read, and what ends that: they are closed, a rank dies, a NIC does not see what it wrote.
// Part of hetcoll_verbs_test.

#include "verbs_windowed.h"

namespace hetcoll::testing {
namespace {

// The NICs of a rank stall in the middle of what is to come, so that it cannot end before they are told to go on.
void StallSoon(Job& job, int first) {
  for (int n = first; n < first + 2; ++n) {
    job.fabric().Change(n, [](FakeNic& nic) { nic.stalled_from = nic.bytes + 2 * kPieceBytes; });
  }
}

bool Stalled(Job& job, int first) {
  int stalled = 0;
  for (int n = first; n < first + 2; ++n) job.fabric().Change(n, [&](FakeNic& nic) { stalled += nic.stalled ? 1 : 0; });
  return stalled == 2;
}

void RepairBoth(Job& job, int first) {
  for (int n = first; n < first + 2; ++n) job.fabric().Change(n, Repair);
}

// A window that is closed while it is written is its owner's again when it has settled, and then written no more: the
// peer stops by itself, or it hangs and loses its rails.
void ClosedWhileWritten() {
  for (const unsigned turn : {0, 1, 2, 3}) {
    const bool hangs = turn % 2 != 0;
    Windowed both({.rails = 2, .recovery_ns = kSoonNs, .fabric = {.threaded = true}}, turn < 2 ? 0 : 3);
    StallSoon(both.job(), 0);
    const Bytes src = Pattern(kBytes, 9), before = both.windows[1];
    const auto put = both.Put(0, src.data(), Shuffled(1));
    CHECK(Within(kPatience, [&] { return Stalled(both.job(), 0); }), "under way");
    both.engine(1).AskWindows([](Windows& w) { w.Close(kWindow); });
    CHECK(!both.IsSettled(1) && !both.registered(1).End(), "NICs may write it");
    if (hangs) {
      both.engine(1).RevokeWindow(kWindow);
    } else {
      RepairBoth(both.job(), 0);
    }
    CHECK(Within(kPatience, [&] { return both.IsSettled(1); }), "%s", Links(both.engine(1)).c_str());
    CHECK(both.registered(1).End(), "nobody writes it");
    const Bytes closed = both.windows[1];
    CHECK(closed != before, "some of it came");
    RepairBoth(both.job(), 0);
    CHECK(!Wait(both.engine(0), put) && put->refused == static_cast<int>(Refusal::kClosed), "refused: %d, %s",
          put->refused, both.Failures().c_str());
    const auto late = both.Put(0, src.data(), Shuffled(2));
    CHECK(!Wait(both.engine(0), late) && late->refused == static_cast<int>(Refusal::kClosed), "late");
    CHECK(both.windows[1] == closed, "written after it was closed");
    CHECK((Counter(both.engine(1), "lost_rails") > 0) == hangs, "%s", Links(both.engine(1)).c_str());
    CHECK(Wait(both.engine(1), both.Put(1, src.data(), Shuffled(3))) && both.windows[0] == src, "the other way");
    CHECK(!both.engine(0).failed() && !both.engine(1).failed(), "%s", both.Failures().c_str());
  }
}

// A window that is closed while it is read is its owner's again when it has settled, and then read no more: who asked
// gets what was in it, also where it hung.
void ClosedWhileRead() {
  for (const unsigned turn : {0, 1, 2, 3}) {
    const bool hangs = turn % 2 != 0;
    Windowed both({.rails = 2, .recovery_ns = kSoonNs, .fabric = {.threaded = true, .resends = true}},
                  turn < 2 ? 0 : 3);
    StallSoon(both.job(), 2);
    const Bytes before = both.windows[1];
    const auto get = both.Get(0, both.windows[0].data(), Shuffled(1));
    CHECK(Within(kPatience, [&] { return Stalled(both.job(), 2); }), "under way");
    both.engine(1).AskWindows([](Windows& w) { w.Close(kWindow); });
    CHECK(!both.IsSettled(1) && !both.registered(1).End(), "NICs read it");
    if (hangs) {
      both.engine(1).RevokeWindow(kWindow);
    } else {
      RepairBoth(both.job(), 2);
    }
    CHECK(Within(kPatience, [&] { return both.IsSettled(1); }), "%s", Links(both.engine(1)).c_str());
    CHECK(both.registered(1).End(), "nobody reads it");
    std::fill(both.windows[1].begin(), both.windows[1].end(), std::byte{7});  // whose it is again
    RepairBoth(both.job(), 2);
    CHECK(Wait(both.engine(0), get), "refused: %d, %s", get->refused, both.Failures().c_str());
    CHECK(both.windows[0] == before, "what was in it");
    CHECK((Counter(both.engine(1), "lost_rails") > 0) == hangs, "%s", Links(both.engine(1)).c_str());
    CHECK(!both.engine(0).failed() && !both.engine(1).failed(), "%s", both.Failures().c_str());
  }
}

// A rank that dies while it writes, or is written, is named by the other, and nothing is written from then on.
void DyingWriters() {
  for (const unsigned turn : {0, 1, 2, 3}) {
    const bool writer = turn % 2 != 0;
    Windowed both({.rails = 2, .fabric = {.threaded = true}}, turn < 2 ? 0 : 3);
    for (int n = 0; n < 4; ++n) both.job().fabric().Change(n, [](FakeNic& nic) { nic.ns_per_byte = 20; });
    const Bytes src = Pattern(kBytes, 9);
    const std::uint64_t bytes = both.job().fabric().bytes(0);
    const auto put = both.Put(0, src.data(), Shuffled(1));
    CHECK(Within(kPatience, [&] { return both.job().fabric().bytes(0) > bytes + 2 * kPieceBytes; }), "under way");
    Engine &dies = both.engine(writer ? 0 : 1), &lives = both.engine(writer ? 1 : 0);
    dies.Close();
    CHECK(Within(kPatience, [&] { return lives.failed(); }), "it is noticed");
    CHECK(lives.failure().kind == FaultKind::kPeerGone && lives.failure().peer == (writer ? 0 : 1), "%s",
          lives.failure().text.c_str());
    CHECK(!Wait(both.engine(0), put), "it did not end");
    for (int r = 0; r < 2; ++r) {
      CHECK(Within(kPatience, [&] { return both.registered(r).End(); }), "rank %d: its memory is its own again", r);
    }
  }
}

// A NIC that cannot read back what it wrote into a device's memory is given up, and what it brought comes again.
void NotReadBack() {
  for (const int bad : {1, 2}) {
    Windowed both({.rails = 2, .fabric = {.threaded = true, .overtake = true}}, 3);
    for (int n = 2; n < 2 + bad; ++n) both.job().fabric().Change(n, [](FakeNic& nic) { nic.no_reads = true; });
    CHECK(Wait(both.engine(0), both.Put(0, both.windows[0].data(), Shuffled(1))), "%s", both.Failures().c_str());
    CHECK(both.windows[1] == both.windows[0], "put");
    const std::string links = Links(both.engine(1));
    CHECK(Counter(both.engine(1), "lost_rails") == static_cast<std::uint64_t>(bad), "%s", links.c_str());
    CHECK(links.find("reading back") != std::string::npos, "%s", links.c_str());
    CHECK((Counter(both.engine(0), "tcp_bytes") > 0) == (bad == 2), "%s", links.c_str());
  }
}

constexpr Scenario kScenarios[] = {
    {"windows: closed", ClosedWhileWritten},
    {"windows: read", ClosedWhileRead},
    {"windows: deaths", DyingWriters},
    {"windows: not read back", NotReadBack},
};

}  // namespace

std::span<const Scenario> WindowEndScenarios() { return kScenarios; }

}  // namespace hetcoll::testing
