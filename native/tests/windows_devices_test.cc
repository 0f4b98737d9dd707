// One-sided messages of memory that a device alone may touch.

#include <array>
#include <atomic>

#include "window_calls.h"

namespace hetcoll::testing {

void OneSidedOfDevices() {
  Exchange({.size = 3}, "shm, devices", 7);
  Exchange({.size = 3}, "shm, a device beside others", 2);
  Exchange({.size = 2, .ring_bytes = 4096}, "shm, small, a device", 1);
  Exchange({.size = 3}, "shm, devices that see each other", 7, true);
  Exchange({.size = 3, .over = Over::kTcp}, "tcp, two devices that see each other", 5, true);
  Exchange({.size = 3, .over = Over::kTcp}, "tcp, devices", 5);
  Exchange({.size = 2, .over = Over::kTcp, .stripes = 3, .integrity = Integrity::kAll}, "tcp, checked, devices", 3);
  Exchange({.size = 2, .over = Over::kVerbs}, "verbs, devices", 3);
  Exchange({.size = 2, .over = Over::kTcp, .fault = "delay=0.2,short=0.5"}, "tcp, delayed, devices", 3);
}

// Two ranks whose devices see each other's windows, and take long for each copy.
struct TwoSlowDevices {
  std::vector<Device> made;  // outlive the engines
  Job job{JobOptions{.size = 2}};
  std::vector<Bytes> windows{Pattern(4096, 1), Pattern(4096, 2)};

  TwoSlowDevices() {
    for (int r = 0; r < 2; ++r) {
      made.push_back(UseDevice(job.engine(r), std::size_t{64} << 10, 0, std::chrono::milliseconds(100)));
      Serve(job.engine(r), windows[static_cast<std::size_t>(r)], 1, true);
    }
    SeeEachOther(job, windows, {0, 1});
  }
};

// Whoever serves sleeps when nothing happens for a while: not while a device copies, which tells nobody.
void SlowDevices() {
  TwoSlowDevices both;
  Job& job = both.job;
  std::vector<Bytes>& windows = both.windows;
  Bytes got(4096);
  const auto put = PutFrom(job.engine(1), 0, FakeCopier::Far(windows[1].data()), {{0, 1000, 100}}, 0);
  int looks = 0;
  const auto copies = [&](auto& w) { return w.counts().direct > 0 && w.Signal(kWindow, 0) == 0; };
  while (put->state.load() == Pending::State::kRunning && looks == 0) {
    job.engine(0).AskWindows([&](auto& w) {
      if (!copies(w)) return;
      CHECK(w.Silent(), "it sleeps while a device copies");
      ++looks;
    });
    std::this_thread::yield();
  }
  CHECK(looks > 0 && Wait(job.engine(1), put), "a put that the owner reads");
  CHECK(Wait(job.engine(1), Get(job.engine(1), 0, got, {{0, 0, 4096}}, {true, nullptr})), "a get that is read");
  CHECK(got == windows[0], "what was got");
}

// The next put is begun while a device still copies the one before.
void PutsBehindEachOther() {
  TwoSlowDevices both;
  Job& job = both.job;
  std::vector<Bytes>& windows = both.windows;
  const Bytes before = windows[1];
  std::vector<std::shared_ptr<Transfer>> puts;
  for (const std::uint64_t at : {0, 1000, 2000}) {
    puts.push_back(PutFrom(job.engine(1), 0, FakeCopier::Far(windows[1].data()), {{at, at, 1000}}, 0));
  }
  std::uint64_t begun = 0;
  while (job.engine(0).AskWindows([](auto& w) { return w.Signal(kWindow, 0); }) == 0) {
    begun = std::max(begun, job.engine(0).AskWindows([](auto& w) { return w.counts().direct; }));
    std::this_thread::yield();
  }
  CHECK(begun == 3000, "%zu bytes of 3000 were begun before the first copy had ended", std::size_t{begun});
  for (const auto& put : puts) CHECK(Wait(job.engine(1), put), "put");
  CHECK(std::equal(before.begin(), before.begin() + 3000, windows[0].begin()), "what was put");
}

// How much a put has is read when what comes before it is there: by slots, by an owner that reads, from the host's
// memory, and to the own window.
void LateCounts() {
  constexpr std::uint64_t kItem = 4;
  enum { kSlots, kSeen, kHost };
  for (const auto kind : {kSlots, kSeen, kHost}) {
    TwoSlowDevices both;
    Engine& e = both.job.engine(1);
    const Bytes other = Pattern(4096, 5), own = both.windows[1];
    const Bytes& from = kind == kSeen ? both.windows[1] : other;
    const bool device = kind != kHost;
    const std::byte* src = device ? FakeCopier::Far(from.data()) : from.data();
    const auto put = [&](int peer, const std::uint64_t& word, Gate after) {
      const Where where{device, std::move(after), {}, {&word, kItem}};
      return e.AskWindows(
          [&](auto& w) { return w.Put(kWindow, peer, src, std::array{Piece{0, 2000, 400}}, 0, where); });
    };
    for (const int peer : {0, 1}) {
      Bytes want = both.windows[static_cast<std::size_t>(peer)];
      std::uint64_t arrived = 0;
      for (const std::uint64_t count : {0, 25, 100}) {
        std::atomic<bool> there = false;
        std::uint64_t word = ~std::uint64_t{0};
        const auto late = put(peer, word, [&] { return there.load(); });
        word = count;
        there.store(true);
        CHECK(Wait(e, late), "a put of %zu: %s", std::size_t{count}, e.failure().text.c_str());
        std::memcpy(want.data() + 2000, (kind == kSeen ? own : other).data(), count * kItem);
        CHECK(both.windows[static_cast<std::size_t>(peer)] == want, "what %zu elements are", std::size_t{count});
        CHECK(both.job.engine(peer).AskWindows([](auto& w) { return w.Signal(kWindow, 0); }) == ++arrived, "a signal");
      }
    }
    const std::uint64_t word = 101;
    const Bytes before = both.windows[0];
    CHECK(!Wait(e, put(0, word, nullptr)), "more than there is room for");
    CHECK(e.failure().text.starts_with("a put to rank 0: its late count is 101, and 100 was the most"), "%s",
          e.failure().text.c_str());
    CHECK(both.windows[0] == before, "more than there was room for was written");
  }
}

// A window is closed while a device reads it or writes it, by either rank.
void ClosingSeenWindows() {
  constexpr std::size_t kBytes = std::size_t{4} << 20, kPiece = 4096;
  for (const int closes : {0, 1}) {
    std::vector<Device> made;  // outlive the engines
    Job job({.size = 2});
    const Bytes before[] = {Pattern(kBytes, 1), Pattern(kBytes, 2)};
    std::vector<Bytes> windows{before[0], before[1]};
    for (int r = 0; r < 2; ++r) {
      made.push_back(UseDevice(job.engine(r), std::size_t{256} << 10));
      Serve(job.engine(r), windows[static_cast<std::size_t>(r)], 1, true);
    }
    SeeEachOther(job, windows, {0, 1});
    std::vector<Piece> pieces;  // none follows the one before
    for (std::size_t at = kBytes; at > 0; at -= kPiece) pieces.push_back({at - kPiece, at - kPiece, kPiece});
    Engine& other = job.engine(1);
    Bytes got(kBytes);
    const auto get = Get(other, 0, got, pieces, {true, nullptr});
    const auto put = PutFrom(other, 0, FakeCopier::Far(windows[1].data()), pieces, 0);
    const auto outside = PutFrom(other, 0, FakeCopier::Far(windows[1].data()), {{0, kBytes - 1, 2}}, 0);
    CHECK(Close(job.engine(closes)), "settled");
    const auto c = static_cast<std::size_t>(closes);
    const Bytes closed = windows[c];
    if (closes == 1) std::fill(windows[1].begin(), windows[1].end(), std::byte{7});  // whose it is again
    const bool read = Wait(other, get), whole = Wait(other, put);
    CHECK(read || get->refused == static_cast<int>(Refusal::kClosed), "get: refused %d", get->refused);
    CHECK(whole || put->refused == static_cast<int>(Refusal::kClosed), "put: refused %d", put->refused);
    CHECK(!read || got == before[0], "what was got is not what was there before");
    CHECK(closes == 1 || windows[0] == closed, "written after it was closed");
    CHECK(closes == 0 || (read && whole && windows[0] == before[1]), "read after it was closed");
    CHECK(!Wait(other, outside) && outside->refused > 0, "outside");
    CHECK(!job.engine(0).failed() && !other.failed(), "both go on");
  }
}

// A window of the host's memory that its rank's own device reads or writes is closed once that is over.
void ClosingUnderOwnDevice() {
  for (const bool gets : {false, true}) {
    Device device;
    Job job({.size = 2});
    Engine& e = job.engine(0);
    device = UseDevice(e, std::size_t{64} << 10, 0, std::chrono::milliseconds(100));
    Bytes window = Pattern(4096, 1), other = Pattern(4096, 2);
    const Bytes put = other, got = window;
    Serve(e, window);
    const auto work =
        gets ? Get(e, 0, other, {{0, 0, 4096}}, {true, nullptr}) : Put(e, 0, other, {{0, 0, 4096}}, 0, {true, nullptr});
    CHECK(Close(e), "settled");
    const Bytes closed = window;
    std::fill(window.begin(), window.end(), std::byte{7});  // whose it is again
    CHECK(Wait(e, work) || work->refused == static_cast<int>(Refusal::kClosed), "refused %d", work->refused);
    CHECK(work->refused != 0 || (gets ? other == got : closed == put), "a copy that was begun");
    CHECK(window == Bytes(4096, std::byte{7}), "written after it was closed");
  }
}

// As ClosingWindows, of a device's memory: what is got may be on its way from there.
void ClosingDevices() {
  for (const Over over : {Over::kShm, Over::kTcp}) {
    Device device, peers;
    Job job({.size = 2, .over = over});
    constexpr std::size_t kBytes = std::size_t{8} << 20;
    Bytes window = Pattern(kBytes, 1), unused(16);
    Engine &owner = job.engine(0), &other = job.engine(1);
    device = UseDevice(owner, std::size_t{256} << 10);
    peers = UseDevice(other, std::size_t{256} << 10);
    std::vector<std::uint64_t> words(2, 5);
    Serve(owner, window, 2, true);
    Serve(other, unused);
    owner.AskWindows([&](auto& w) { w.Show(kWindow, words.data()); });
    CHECK(std::atomic_ref(words[1]).load() == 0, "a word");
    const Bytes before = window, src = Pattern(kBytes, 2);
    Bytes got(kBytes);
    std::vector<Piece> pieces;
    for (std::size_t at = 0; at < kBytes; at += 16384) pieces.push_back({at, at, 16384});
    const auto get = Get(other, 0, got, pieces, {true, nullptr});
    const auto put = Put(other, 0, src, pieces, 1, {true, nullptr});
    CHECK(Close(owner), "settled");
    CHECK(std::atomic_ref(words[0]).load() > 1000 && std::atomic_ref(words[1]).load() > 1000, "streams wait");
    const Bytes closed = window;
    const bool whole = Wait(other, get);
    CHECK(whole ? got == before : get->refused == static_cast<int>(Refusal::kClosed), "what was got");
    const bool through = Wait(other, put);
    CHECK(through || put->refused == static_cast<int>(Refusal::kClosed), "refused %d", put->refused);
    CHECK(window == closed, "written after it was closed");
    CHECK(!owner.failed() && !other.failed(), "%s", owner.failure().text.c_str());
  }
}

// A copy that fails ends the engine, and who waits is told once nothing is copied any more.
void FailingDevices() {
  for (const std::uint64_t fails : {1, 2, 17}) {
    Device device;
    constexpr std::size_t kBytes = std::size_t{1} << 20;
    Bytes window(kBytes), unused(16), got(kBytes), src(kBytes);
    std::vector<std::uint64_t> words(1);
    Job job({.size = 2});  // the peer's engine reads its memory until it is told
    device = UseDevice(job.engine(0), std::size_t{64} << 10, fails);
    Serve(job.engine(0), window, 1, true);
    Serve(job.engine(1), unused);
    job.engine(0).AskWindows([&](auto& w) { w.Show(kWindow, words.data()); });
    static_cast<void>(Put(job.engine(1), 0, src, {{0, 0, kBytes / 2}}, 0));  // more copies than go well
    const auto put = Put(job.engine(0), 1, src, {{0, 0, 16}}, -1, {true, nullptr});
    const auto get = Get(job.engine(0), 0, got, {{0, 0, kBytes}});
    const auto expected = job.engine(0).AskWindows([&](auto& w) { return w.Expect(kWindow, 0, 1); });
    CHECK(!Wait(job.engine(0), expected), "it failed");
    for (const auto& work : {put, get}) {  // they may have been before
      Wait(job.engine(0), work);
      CHECK(work->state != Pending::State::kRunning, "told");
    }
    const std::int64_t until = DeadlineNs(kPatience);
    while (std::atomic_ref(words[0]).load() < 1000 && NowNs() < until) std::this_thread::yield();
    CHECK(std::atomic_ref(words[0]).load() > 1000, "streams wait");
    CHECK(job.engine(0).failure().kind == FaultKind::kSystem, "%s", job.engine(0).failure().text.c_str());
    CHECK(job.engine(0).failure().text.find("the copy failed") != std::string::npos, "named");
  }
}

}  // namespace hetcoll::testing
