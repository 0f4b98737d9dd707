// Puts that NICs write straight into windows: nothing is copied, calls keep their order, rails die. Part of
// hetcoll_verbs_test.

#include <array>
#include <atomic>

#include "verbs_windowed.h"

namespace hetcoll::testing {
namespace {

// From one registered window into another nothing is copied but requests and answers; out of other memory all is copied
// once, by who puts it.
void PutsAreNotCopied() {
  for (const unsigned devices : {0, 1, 2, 4, 7}) {
    const char* fault = devices < 4 ? "" : "short=0.5,delay=0.1";
    Windowed both({.rails = 2, .fault = fault, .fabric = {.threaded = true, .overtake = true}}, devices);
    Engine &from = both.engine(0), &to = both.engine(1);
    const std::vector<Piece> pieces = Shuffled(3);
    const std::uint64_t staged = Counter(from, "staged_bytes"), copied = Counter(to, "copied_bytes");
    CHECK(Wait(from, both.Put(0, both.windows[0].data(), pieces)), "%s", both.Failures().c_str());
    CHECK(both.windows[1] == both.windows[0], "put");
    CHECK(to.AskWindows([](Windows& w) { return w.Signal(kWindow, 0); }) == 1, "signal");
    CHECK(Counter(from, "direct_bytes") == kBytes && Counter(from, "zero_copy_bytes") == kBytes, "%zu, %zu",
          std::size_t(Counter(from, "direct_bytes")), std::size_t(Counter(from, "zero_copy_bytes")));
    constexpr std::size_t kRequest = 32 + 24 * kPieces;  // its head, and a run for each piece
    CHECK(Changed(from, "staged_bytes", staged) == kRequest, "%zu", std::size_t(Changed(from, "staged_bytes", staged)));
    CHECK(Changed(to, "copied_bytes", copied) == kRequest, "%zu", std::size_t(Changed(to, "copied_bytes", copied)));

    const Bytes other = Pattern(kBytes, 9);
    CHECK(Wait(from, both.Put(0, other.data(), pieces)), "%s", both.Failures().c_str());
    CHECK(both.windows[1] == other, "put");
    CHECK(Counter(from, "direct_bytes") == 2 * kBytes, "straight to its place");
    CHECK(Changed(from, "staged_bytes", staged) == 2 * kRequest + kBytes, "one copy");
    CHECK(Changed(to, "copied_bytes", copied) == 2 * kRequest, "and no other");
    const auto counts = to.AskWindows([](Windows& w) { return w.counts(); });
    CHECK(counts.bytes == 2 * kBytes && counts.pieces == 2 * kPieces && counts.puts == 2, "counted");
    for (int r = 0; r < 2; ++r) CHECK(both.registered(r).End(), "nobody needs it any more");
  }
}

// Nor are puts whose counts are read late, but for those that turn out to be short: these ask nobody. What is put comes
// from a device's memory or from the host's, registered or not; and puts keep their order.
void LatePutsAreNotCopied() {
  for (const unsigned devices : {1, 3, 5}) {
    const char* fault = devices < 4 ? "" : "short=0.5,delay=0.1";
    Windowed both({.rails = 2, .fault = fault, .fabric = {.threaded = true, .overtake = true}}, devices);
    Engine &from = both.engine(0), &to = both.engine(1);
    Bytes pinned = Pattern(kBytes, 5), other = Pattern(kBytes, 6);
    Registered memory(both.job(), 0, 2, pinned);
    std::uint64_t arrived = 0;
    for (const Bytes* source : {&both.windows[0], &pinned, &other}) {
      const bool device = source == &both.windows[0], copied = source == &other;
      const std::byte* src = device ? both.At(0, source->data()) : source->data();
      for (const std::uint64_t count : {kBytes, kPieceBytes * 4, kPieceBytes * 4 - 1, std::size_t{1}, std::size_t{0}}) {
        Bytes want = both.windows[1];
        const Bytes before = Pattern(kPieceBytes, static_cast<unsigned>(count));
        std::memcpy(want.data(), before.data(), kPieceBytes);
        std::memcpy(want.data(), source->data(), count);
        std::memcpy(want.data() + kBytes - kPieceBytes, before.data(), kPieceBytes);
        const std::uint64_t direct = Counter(from, "direct_bytes"), zero = Counter(from, "zero_copy_bytes");
        const std::uint64_t staged = Counter(from, "staged_bytes");
        std::atomic<bool> there{false};
        std::uint64_t word = ~std::uint64_t{0};
        const Where host{}, late{device, [&] { return there.load(); }, {}, {&word, 1}};
        std::vector<std::shared_ptr<Transfer>> puts;
        from.AskWindows([&](Windows& w) {
          const auto put = [&](const std::byte* at, const Piece& piece, const Where& where) {
            puts.push_back(w.Put(kWindow, 1, at, std::array{piece}, 0, where));
          };
          put(before.data(), {0, 0, kPieceBytes}, host);
          put(src, {0, 0, kBytes}, late);
          put(before.data(), {0, kBytes - kPieceBytes, kPieceBytes}, host);
        });
        word = count;
        there.store(true);
        for (const auto& put : puts) CHECK(Wait(from, put), "%s", both.Failures().c_str());
        CHECK(both.windows[1] == want, "what %zu bytes are", std::size_t{count});
        CHECK(to.AskWindows([](Windows& w) { return w.Signal(kWindow, 0); }) == (arrived += 3), "signals");
        const std::uint64_t placed = count < kPieceBytes * 4 ? 0 : count;
        CHECK(Changed(from, "direct_bytes", direct) == placed, "%zu bytes straight to their place, of %zu",
              std::size_t(Changed(from, "direct_bytes", direct)), std::size_t{count});
        if (placed == 0) continue;
        CHECK(Changed(from, "zero_copy_bytes", zero) == (copied ? 0 : count), "%zu bytes from where they lie, of %zu",
              std::size_t(Changed(from, "zero_copy_bytes", zero)), std::size_t{count});
        CHECK(Changed(from, "staged_bytes", staged) == 3 * 32 + 2 * kPieceBytes + (copied ? count : 0),
              "%zu bytes staged", std::size_t(Changed(from, "staged_bytes", staged)));
      }
    }
    CHECK(memory.End() && both.registered(0).End() && both.registered(1).End(), "nobody needs it any more");
  }
}

// Nor is what is got into registered memory; other memory is written by its processor.
void GetsAreNotCopied() {
  for (const unsigned devices : {0, 1, 2, 4, 7}) {
    const char* fault = devices < 4 ? "" : "short=0.5,delay=0.1";
    Windowed both({.rails = 2, .fault = fault, .fabric = {.threaded = true, .overtake = true}}, devices);
    Engine &owner = both.engine(0), &asks = both.engine(1);
    const std::vector<Piece> pieces = Shuffled(3);
    const std::uint64_t staged = Counter(owner, "staged_bytes"), copied = Counter(asks, "copied_bytes");
    const std::uint64_t asked = Counter(asks, "staged_bytes"), told = Counter(owner, "copied_bytes");
    CHECK(Wait(asks, both.Get(1, both.windows[1].data(), pieces)), "%s", both.Failures().c_str());
    CHECK(both.windows[1] == both.windows[0], "got");
    CHECK(Counter(owner, "direct_bytes") == kBytes && Counter(owner, "zero_copy_bytes") == kBytes, "%zu, %zu",
          std::size_t(Counter(owner, "direct_bytes")), std::size_t(Counter(owner, "zero_copy_bytes")));
    constexpr std::size_t kRequest = 32 + 24 * kPieces + sizeof(Placement);
    CHECK(Changed(asks, "staged_bytes", asked) == kRequest && Changed(owner, "copied_bytes", told) == kRequest,
          "asked");
    CHECK(Changed(owner, "staged_bytes", staged) == 4 && Changed(asks, "copied_bytes", copied) == 4, "a status");

    Bytes other(kBytes);
    CHECK(Wait(asks, both.Get(1, other.data(), pieces)), "%s", both.Failures().c_str());
    CHECK(other == both.windows[0], "got");
    CHECK(Counter(owner, "direct_bytes") == kBytes && Changed(asks, "copied_bytes", copied) == kBytes + 8, "one copy");
    const std::vector<Piece> twice{{0, 0, kBytes / 2}, {100, kBytes / 2, kBytes / 2}};
    Bytes want = both.windows[1];
    for (const Piece& p : twice) std::memcpy(want.data() + p.here, both.windows[0].data() + p.there, p.nbytes);
    CHECK(Wait(asks, both.Get(1, both.windows[1].data(), twice)), "%s", both.Failures().c_str());
    CHECK(both.windows[1] == want && Counter(owner, "direct_bytes") == kBytes, "pieces that overlap");
    for (int r = 0; r < 2; ++r) {
      CHECK(Within(kPatience, [&] { return both.IsSettled(r) && both.registered(r).End(); }),
            "nobody needs it any more");
    }
  }
}

// Puts and gets of the same bytes are done one after another, whichever way each goes, and so are pieces that overlap.
void InOrder(unsigned devices) {
  Windowed both({.rails = 3, .fabric = {.threaded = true, .overtake = true}}, devices);
  const Bytes before = both.windows[1];
  std::vector<Bytes> sources;
  Bytes got(8 * kBytes);  // registered: what is got is read where it lies, and written where it goes
  Registered memory(both.job(), 0, 3, got, both.Has(0));
  std::vector<std::shared_ptr<Transfer>> works;
  for (unsigned i = 0; i < 8; ++i) sources.push_back(Pattern(kBytes, 20 + i));
  const std::vector<Piece> all{{0, 0, kBytes}};
  const std::vector<Piece> few{{0, kBytes - 1000, 1000}};  // not asked for
  for (unsigned i = 0; i < 8; ++i) {
    works.push_back(both.Get(0, got.data() + i * kBytes, all));
    works.push_back(both.Put(0, sources[i].data(), few));
    works.push_back(both.Put(0, sources[i].data(), Shuffled(i)));
    works.push_back(both.Put(0, before.data(), few));
  }
  for (const auto& work : works) CHECK(Wait(both.engine(0), work), "%s", both.Failures().c_str());
  for (unsigned i = 0; i < 8; ++i) {
    Bytes want = i == 0 ? before : sources[i - 1];
    if (i > 0) std::copy_n(before.begin(), 1000, want.end() - 1000);
    CHECK(std::memcmp(got.data() + i * kBytes, want.data(), kBytes) == 0, "what was got before put %u", i);
  }
  CHECK(memory.End(), "nobody needs it any more");
  CHECK(Counter(both.engine(1), "direct_bytes") == 8 * kBytes, "%zu",
        std::size_t(Counter(both.engine(1), "direct_bytes")));
  CHECK(Counter(both.engine(0), "direct_bytes") == 8 * kBytes, "%zu",
        std::size_t(Counter(both.engine(0), "direct_bytes")));
  const std::vector<Piece> twice{{0, 0, kBytes / 2}, {kBytes / 2, 100, kBytes / 2 - 100}, {7, 300, 50'000}};
  CHECK(Wait(both.engine(0), both.Put(0, sources[0].data(), twice)), "%s", both.Failures().c_str());
  Bytes want = both.windows[1];
  for (const Piece& p : twice) std::memcpy(want.data() + p.there, sources[0].data() + p.here, p.nbytes);
  CHECK(both.windows[1] == want, "pieces that overlap");
  CHECK(Counter(both.engine(0), "direct_bytes") == 8 * kBytes, "those go one after another");
}

void PutsKeepTheirOrder() {
  for (const unsigned devices : {0, 3}) InOrder(devices);
}

// Whichever rail dies, at either end, and all of them: every put is right, and later ones are written by the rails that
// came back.
void PutsWhileRailsDie() {
  for (const int rails : {1, 2}) {
    for (unsigned turn = 0; turn < 8; ++turn) {
      const std::string what = std::to_string(rails) + " rails, turn " + std::to_string(turn);
      Windowed both({.rails = rails,
                     .recovery_ns = kSoonNs,
                     .fabric = {.threaded = true, .overtake = true, .resends = true, .seed = turn + 1}},
                    (turn + static_cast<unsigned>(rails)) % 4);
      for (int k = 0; k < (turn % 2 == 0 ? 1 : rails); ++k) {  // one, or all
        both.job().fabric().Change(static_cast<int>(turn / 2 % 2) * rails + k, [&](FakeNic& nic) {
          nic.fail_after = 5 + 11 * static_cast<int>(turn);
          nic.fail_delivered = turn >= 4;
        });
      }
      std::uint64_t direct = 0;
      const auto lost = [&] { return Counter(both.engine(0), "lost_rails"); };
      for (unsigned round = 0; (round < 6 || lost() == 0) && round < 600; ++round) {
        for (const int from : {0, 1}) {
          const Bytes src = Pattern(kBytes, 40 * turn + 2 * round + static_cast<unsigned>(from));
          Bytes& own = both.windows[static_cast<std::size_t>(from)];
          if (both.Has(from)) own = src;
          const std::uint64_t all = kBytes;
          const Where late{.device = true, .late = {&all, 1}};
          std::shared_ptr<Transfer> put;
          if (both.Has(from) && round % 2 == 1) {
            put = both.engine(from).AskWindows([&](Windows& w) {
              return w.Put(kWindow, 1 - from, both.At(from, own.data()), std::array{Piece{0, 0, kBytes}}, 0, late);
            });
          } else {
            put = both.Put(from, both.Has(from) ? own.data() : src.data(), Shuffled(round));
          }
          CHECK(Wait(both.engine(from), put), "%s: %s", what.c_str(), both.Failures().c_str());
          CHECK(both.windows[static_cast<std::size_t>(1 - from)] == src, "%s: round %u from %d", what.c_str(), round,
                from);
          const auto get = both.Get(from, both.windows[static_cast<std::size_t>(from)].data(), Shuffled(round + 9));
          CHECK(Wait(both.engine(from), get), "%s: %s", what.c_str(), both.Failures().c_str());
          CHECK(both.windows[static_cast<std::size_t>(from)] == src, "%s: round %u to %d", what.c_str(), round, from);
        }
      }
      CHECK(lost() > 0, "%s", what.c_str());
      const auto whole = [&] { return Links(both.engine(0)).find("\"down\"") == std::string::npos; };
      CHECK(Within(kPatience, whole), "%s: %s", what.c_str(), Links(both.engine(0)).c_str());
      direct = Counter(both.engine(0), "direct_bytes");
      const Bytes src = Pattern(kBytes, 7);
      CHECK(Wait(both.engine(0), both.Put(0, src.data(), Shuffled(5))) && both.windows[1] == src, "%s", what.c_str());
      CHECK(Changed(both.engine(0), "direct_bytes", direct) == kBytes, "%s: straight again", what.c_str());
      for (int r = 0; r < 2; ++r) {
        CHECK(Within(kPatience, [&] { return both.IsSettled(r) && both.registered(r).End(); }), "%s: in use",
              what.c_str());
      }
      CHECK(both.job().fabric().complaints().empty(), "%s", what.c_str());
    }
  }
}

// Both put at the same time, out of memory that is not registered, while all cables are cut, one after another, and
// plugged in again.
void BothPutWhileCablesAreCut() {
  for (unsigned turn = 0; turn < 12; ++turn) {
    const std::string what = "turn " + std::to_string(turn);
    Windowed both({.rails = 2,
                   .recovery_ns = kSoonNs,
                   .fabric = {.threaded = true, .overtake = true, .resends = true, .seed = turn + 1}});
    std::atomic<bool> over{false};
    std::atomic<int> rounds{0};
    std::thread cutter([&] {
      std::mt19937 random(turn);
      for (int cut = 0; cut < 3; ++cut) {
        const int at = rounds.load() + 2;
        static_cast<void>(Within(kPatience, [&] { return rounds.load() >= at || over; }));
        for (const int nic : {static_cast<int>(random() % 2) * 2, static_cast<int>(random() % 2) * 2 + 1}) {
          both.job().fabric().Change(nic, [&](FakeNic& n) {
            n.fail_after = static_cast<std::int64_t>(random() % 100);
            n.fail_delivered = random() % 2 == 0;
          });
        }
        for (const std::int64_t start = NowNs(); Seconds(start) < 0.05 && !over;) Nap();
        for (int n = 0; n < 4; ++n) both.job().fabric().Change(n, Repair);
      }
      over = true;
    });
    both.job().Run([&](int rank, Engine& e) {
      for (unsigned round = 0; !over; ++round) {
        const Bytes src = Pattern(kBytes, 40 * turn + 2 * round + static_cast<unsigned>(rank));
        const auto put = both.Put(rank, src.data(), Shuffled(round));
        const bool done = Wait(e, put);
        CHECK(done, "%s: round %u of rank %d: %s; %s; %s", what.c_str(), round, rank, both.Failures().c_str(),
              e.AskWindows([](Windows& w) { return w.Describe(); }).c_str(), Links(e).c_str());
        if (!done) {
          over = true;
          return;
        }
        ++rounds;
      }
    });
    cutter.join();
    if (both.engine(0).failed()) return;
  }
}

// What is checked goes through rings, and is checked there.
void CheckedPuts() {
  for (const unsigned turn : {0, 1, 2, 3}) {
    const Integrity integrity = turn % 2 == 0 ? Integrity::kSampled : Integrity::kAll;
    Windowed both({.rails = 2, .recovery_ns = kSoonNs, .integrity = integrity}, turn < 2 ? 0 : 3);
    const std::vector<Piece> pieces = Shuffled(1);
    for (unsigned round = 0; round < 4; ++round) {
      const Bytes src = Pattern(kBytes, round);
      CHECK(Wait(both.engine(0), both.Put(0, src.data(), pieces)), "%s", both.Failures().c_str());
      CHECK(both.windows[1] == src, "put");
    }
    const std::uint64_t direct = Counter(both.engine(0), "direct_bytes");
    const std::uint64_t checked = both.engine(1).integrity().checked_bytes.get();
    CHECK(integrity == Integrity::kAll ? direct == 0 : direct > 3 * kBytes, "%zu", std::size_t{direct});
    CHECK(checked >= (integrity == Integrity::kAll ? 4 * kBytes : 4 * kBytes / 128), "%zu", std::size_t{checked});
  }
}

constexpr Scenario kScenarios[] = {
    {"windows", PutsAreNotCopied},
    {"windows: late counts", LatePutsAreNotCopied},
    {"windows: gets", GetsAreNotCopied},
    {"windows: order", PutsKeepTheirOrder},
    {"windows: rails die", PutsWhileRailsDie},
    {"windows: cables", BothPutWhileCablesAreCut},
    {"windows: checked", CheckedPuts},
};

}  // namespace

std::span<const Scenario> WindowScenarios() { return kScenarios; }

}  // namespace hetcoll::testing
