// One-sided messages: random pieces against a model, windows that close under way, and peers that leave; of memory that
// a device alone may touch, too.

#include <algorithm>
#include <memory>
#include <random>

#include "fake_copier.h"
#include "harness.h"

namespace hetcoll::testing {
namespace {

constexpr std::uint32_t kWindow = 3;

// Pieces of two memories of n bytes each, that do not overlap there.
std::vector<Piece> RandomPieces(std::mt19937& random, std::size_t n) {
  std::vector<Piece> out;
  const std::size_t most = random() % 3 == 0 ? 200'000 : 3000;
  for (std::size_t there = random() % 100; there < n;) {
    const std::size_t nbytes = std::min<std::size_t>(1 + random() % most, n - there);
    out.push_back({random() % (n - nbytes + 1), there, nbytes});
    there += nbytes + (random() % 2 == 0 ? 0 : random() % 5000);
  }
  std::shuffle(out.begin(), out.end(), random);
  if (random() % 4 == 0) out.resize(1);
  return out;
}

bool Wait(Engine& e, const std::shared_ptr<Transfer>& transfer) {
  return e.Drive(*transfer, DeadlineNs(kPatience)) == Outcome::kDone;
}

// A rank's device, and the pinned memory that it has.
struct Device {
  std::shared_ptr<FakeCopier> copier;
  Bytes pinned;
};

Device UseDevice(Engine& e, std::size_t pinned, std::uint64_t fails = 0, std::chrono::milliseconds slow = {}) {
  Device device{std::make_shared<FakeCopier>(fails, slow), Bytes(pinned)};
  e.ServeWindows();
  e.AskWindows([&](auto& windows) { windows.UseCopier(device.copier, device.pinned); });
  return device;
}

void Serve(Engine& e, Bytes& window, std::size_t signals = 1, bool device = false) {
  e.ServeWindows();
  e.AskWindows([&](auto& windows) {
    windows.Add(kWindow, device ? FakeCopier::Far(window.data()) : window.data(), window.size(), signals, device);
  });
}

auto Put(Engine& e, int peer, const Bytes& src, const std::vector<Piece>& pieces, int signal, const Where& where = {}) {
  const std::byte* at = where.device ? FakeCopier::Far(src.data()) : src.data();
  return e.AskWindows([&](auto& windows) { return windows.Put(kWindow, peer, at, pieces, signal, where); });
}

auto PutFrom(Engine& e, int peer, const std::byte* device, const std::vector<Piece>& pieces, int signal) {
  return e.AskWindows(
      [&](auto& windows) { return windows.Put(kWindow, peer, device, pieces, signal, {true, nullptr}); });
}

auto Get(Engine& e, int peer, Bytes& dst, const std::vector<Piece>& pieces, const Where& where = {}) {
  std::byte* at = where.device ? FakeCopier::Far(dst.data()) : dst.data();
  return e.AskWindows([&](auto& windows) { return windows.Get(kWindow, peer, at, pieces, where); });
}

bool Close(Engine& e) {
  e.AskWindows([&](auto& windows) { windows.Close(kWindow); });
  const std::int64_t until = DeadlineNs(kPatience);
  while (NowNs() < until) {
    if (e.AskWindows([](auto& windows) { return windows.Settled(kWindow); })) return true;
    std::this_thread::yield();
  }
  return false;
}

// Devices see each other's windows.
void SeeEachOther(Job& job, std::vector<Bytes>& windows, const std::vector<int>& ranks) {
  for (const int rank : ranks) {
    for (const int peer : ranks) {
      if (peer == rank) continue;
      const Bytes& theirs = windows[static_cast<std::size_t>(peer)];
      job.engine(rank).AskWindows([&](auto& w) {
        w.See(kWindow, peer, {FakeCopier::Far(theirs.data()), theirs.size()});
        w.IsSeen(kWindow, peer);
      });
    }
  }
}

// Every rank puts into its own part of every window and gets it back, several at once.
// The ranks of bits in `devices` have a device: its memory are their windows, and what they put or get in turn. Where
// they `see` each other's, they put out of their own, whose second half nobody writes.
void Exchange(const JobOptions& options, const char* what, unsigned devices = 0, bool see = false) {
  std::vector<Device> made;  // outlive the engines
  Job job(options);
  const int size = job.size();
  constexpr std::size_t kPart = 400'000;
  constexpr int kRounds = 4;
  const std::size_t half = kPart * static_cast<std::size_t>(size);
  std::vector<Bytes> windows(static_cast<std::size_t>(size), Bytes(see ? 2 * half : half));
  std::vector<int> seeing;
  const auto has = [&](int rank) { return (devices >> rank & 1) != 0; };
  for (int r = 0; r < size; ++r) {
    if (has(r)) made.push_back(UseDevice(job.engine(r), std::size_t{32768} * static_cast<std::size_t>(size)));
    Serve(job.engine(r), windows[static_cast<std::size_t>(r)], 1, has(r));
    if (has(r) && see) seeing.push_back(r);
  }
  SeeEachOther(job, windows, seeing);
  std::vector<std::vector<Bytes>> model(static_cast<std::size_t>(size));  // by owner and writer
  for (auto& parts : model) parts.assign(static_cast<std::size_t>(size), Bytes(kPart));
  job.Run([&](int rank, Engine& e) {
    std::mt19937 random(static_cast<unsigned>(rank) + 5);
    for (int round = 0; round < kRounds; ++round) {
      std::vector<std::shared_ptr<Transfer>> works;
      std::vector<Bytes> sources, got(static_cast<std::size_t>(size), Bytes(kPart));
      std::vector<std::vector<Piece>> asked;
      for (int peer = 0; peer < size; ++peer)
        sources.push_back(Pattern(kPart, static_cast<unsigned>(31 * rank + peer)));
      for (int peer = 0; peer < size; ++peer) {
        const auto p = static_cast<std::size_t>(peer);
        std::vector<Piece> pieces = RandomPieces(random, kPart);
        Bytes& mine = model[p][static_cast<std::size_t>(rank)];
        for (Piece& piece : pieces) {
          std::memcpy(mine.data() + piece.there, sources[p].data() + piece.here, piece.nbytes);
          piece.there += kPart * static_cast<std::size_t>(rank);
        }
        const bool on_device = has(rank) && (round + peer) % 2 == 0;
        if (on_device && see) {
          std::byte* own = windows[static_cast<std::size_t>(rank)].data() + half + kPart * p;
          std::memcpy(own, sources[p].data(), kPart);
          works.push_back(PutFrom(e, peer, FakeCopier::Far(own), pieces, 0));
        } else {
          works.push_back(Put(e, peer, sources[p], pieces, 0, {on_device, nullptr}));
        }
        std::vector<Piece> back;  // of what was put just now: requests are done in their order
        for (const Piece& piece : pieces) back.push_back({piece.there % kPart, piece.there, piece.nbytes});
        asked.push_back(back);
        works.push_back(Get(e, peer, got[p], back, {has(rank) && (round + peer) % 3 != 0, nullptr}));
      }
      for (auto& work : works) CHECK(Wait(e, work), "%s: %s", what, e.failure().text.c_str());
      for (std::size_t p = 0; p < asked.size(); ++p) {
        const Bytes& want = model[p][static_cast<std::size_t>(rank)];
        for (const Piece& piece : asked[p]) {
          CHECK(std::memcmp(got[p].data() + piece.here, want.data() + piece.here, piece.nbytes) == 0, "%s: got", what);
        }
      }
    }
    const auto all = static_cast<std::uint64_t>(kRounds * size);
    const auto arrived = e.AskWindows([&](auto& w) { return w.Expect(kWindow, 0, all); });
    CHECK(Wait(e, arrived), "%s: signals: %s", what, e.failure().text.c_str());
    const auto direct = e.AskWindows([](auto& w) { return w.counts().direct; });
    CHECK((direct > 0) == (see && has(rank)), "%s: %zu bytes from device to device", what, std::size_t{direct});
  });
  for (std::size_t r = 0; r < windows.size(); ++r) {
    for (std::size_t writer = 0; writer < windows.size(); ++writer) {
      CHECK(std::memcmp(windows[r].data() + kPart * writer, model[r][writer].data(), kPart) == 0,
            "%s: the window of rank %zu, written by %zu", what, r, writer);
    }
  }
}

}  // namespace

void OneSided() {
  Exchange({.size = 3}, "shm");
  Exchange({.size = 2, .ring_bytes = 4096}, "shm, small");
  Exchange({.size = 3, .over = Over::kTcp}, "tcp");
  Exchange({.size = 2, .over = Over::kTcp, .stripes = 3, .integrity = Integrity::kAll}, "tcp, checked");
  Exchange({.size = 2, .over = Over::kVerbs}, "verbs");
  Exchange({.size = 2, .over = Over::kTcp, .fault = "delay=0.2,short=0.5"}, "tcp, delayed");
}

// A put does not reach what a get before it is still to read.
void OrderedRequests() {
  for (const Over over : {Over::kShm, Over::kTcp}) {
    Job job({.size = 2, .over = over, .ring_bytes = 4096});
    constexpr std::size_t kBytes = std::size_t{1} << 20;
    Bytes window = Pattern(kBytes, 1), unused(16), got(kBytes);
    const Bytes before = window, src = Pattern(kBytes, 2);
    Serve(job.engine(0), window);
    Serve(job.engine(1), unused);
    std::vector<Piece> pieces;
    for (std::size_t at = 0; at < kBytes; at += 16384) pieces.push_back({at, at, 16384});
    const auto get = Get(job.engine(1), 0, got, pieces);
    std::reverse(pieces.begin(), pieces.end());
    const auto put = Put(job.engine(1), 0, src, pieces, 0);
    CHECK(Wait(job.engine(1), get) && Wait(job.engine(1), put), "in time");
    CHECK(got == before, "got what was put later");
    CHECK(window == src, "put");
  }
}

// A window is closed, and its memory fenced, while pieces for it and from it are on their way.
void ClosingWindows() {
  for (const Over over : {Over::kShm, Over::kTcp}) {
    Job job({.size = 2, .over = over});
    constexpr std::size_t kBytes = std::size_t{8} << 20;
    Bytes window = Pattern(kBytes, 1), unused(16);
    Serve(job.engine(0), window);
    Serve(job.engine(1), unused);
    Engine &owner = job.engine(0), &other = job.engine(1);
    const Bytes before = window, src = Pattern(kBytes, 2);
    Bytes got(kBytes);
    std::vector<Piece> pieces;
    for (std::size_t at = 0; at < kBytes; at += 16384) pieces.push_back({at, at, 16384});
    const auto get = Get(other, 0, got, pieces);
    const auto put = Put(other, 0, src, pieces, 0);
    const auto expected = owner.AskWindows([&](auto& w) { return w.Expect(kWindow, 0, 1); });
    owner.AskWindows([&](auto& w) { w.Close(kWindow); });
    const Bytes closed = window;
    CHECK(owner.Drive(*expected, DeadlineNs(kPatience)) == Outcome::kFailed || expected->refused == 0, "expected");
    const bool whole = Wait(other, get);
    CHECK(whole ? got == before : get->refused == static_cast<int>(Refusal::kClosed), "what was got");
    const bool through = Wait(other, put);
    CHECK(through || put->refused == static_cast<int>(Refusal::kClosed), "refused %d", put->refused);
    CHECK(window == closed, "written after it was closed");
    const auto late = Put(other, 0, src, {{0, 0, 100}}, 0);
    CHECK(!Wait(other, late) && late->refused == static_cast<int>(Refusal::kClosed), "late: %d", late->refused);
    const auto counts = owner.AskWindows([](auto& w) { return w.counts(); });
    CHECK(counts.refused >= 1 && !owner.failed() && !other.failed(), "counted %zu", std::size_t{counts.refused});
    // Who asks for what is not there does not bring the owner down.
    const auto outside = Get(owner, 1, got, {{0, 10, 7}});
    CHECK(!Wait(owner, outside) && outside->refused == static_cast<int>(Refusal::kOutside), "outside");
    const auto put_outside = Put(owner, 1, src, {{0, 0, 4}, {0, ~std::uint64_t{0}, 2}}, 0);
    CHECK(!Wait(owner, put_outside) && put_outside->refused == static_cast<int>(Refusal::kOutside), "overflow");
    CHECK(Wait(owner, Put(owner, 1, src, {{0, 0, 16}}, 0)), "inside");
  }
}

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

// A put out of a window that has another number than the one that it goes to, and a get of one that this rank has not.
void UnlikeWindows() {
  constexpr std::uint32_t kOwn = 7, kFar = 11;
  std::vector<Device> made;  // outlive the engines
  Job job({.size = 2});
  std::vector<Bytes> windows{Pattern(4096, 1), Pattern(4096, 2)};
  for (int r = 0; r < 2; ++r) {
    made.push_back(UseDevice(job.engine(r), std::size_t{64} << 10));
    job.engine(r).AskWindows([&](auto& w) {
      w.Add(r == 0 ? kFar : kOwn, FakeCopier::Far(windows[static_cast<std::size_t>(r)].data()), 4096, 1, true);
    });
  }
  Engine &owner = job.engine(0), &other = job.engine(1);
  const Bytes theirs = windows[0], mine = windows[1];
  const auto put = [&](std::uint64_t at) {
    const std::vector<Piece> pieces{{at, at, 100}};
    return other.AskWindows(
        [&](auto& w) { return w.Put(kFar, 0, FakeCopier::Far(windows[1].data()), pieces, 0, {true, nullptr, kOwn}); });
  };
  const auto direct = [&] { return owner.AskWindows([](auto& w) { return w.counts().direct; }); };
  CHECK(Wait(other, put(0)) && direct() == 0, "through the host");
  owner.AskWindows([&](auto& w) { w.See(kOwn, 1, {FakeCopier::Far(windows[1].data()), 4096}); });
  other.AskWindows([&](auto& w) { w.IsSeen(kOwn, 0); });
  CHECK(Wait(other, put(100)) && direct() == 100, "from one device to the other");
  Bytes got(4096);
  const std::vector<Piece> pieces{{50, 1000, 500}};
  const auto get = [&] {
    return other.AskWindows([&](auto& w) { return w.Get(kFar, 0, FakeCopier::Far(got.data()), pieces, {true}); });
  };
  CHECK(Wait(other, get()) && direct() == 100, "got through the host");
  other.AskWindows([&](auto& w) { w.See(kFar, 0, {FakeCopier::Far(windows[0].data()), 4096}); });
  CHECK(Wait(other, get()) && direct() == 600, "got from one device to the other");
  CHECK(std::equal(got.begin() + 50, got.begin() + 550, theirs.begin() + 1000), "what was got");
  CHECK(std::equal(mine.begin(), mine.begin() + 200, windows[0].begin()), "what was put");
  // Who is told to read what it does not see any more says so, and goes on.
  owner.AskWindows([&](auto& w) { w.See(kOwn, 1, {}); });
  const auto unseen = put(200);
  CHECK(!Wait(other, unseen) && unseen->refused == static_cast<int>(Refusal::kOutside), "unseen: %d", unseen->refused);
  CHECK(std::equal(theirs.begin() + 200, theirs.end(), windows[0].begin() + 200), "written");
  CHECK(!owner.failed() && !other.failed(), "both go on");
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

// What is not to be touched yet holds up what comes after it to the same rank, and nothing else.
void GatedTransfers() {
  std::vector<Device> devices;
  Job job({.size = 3});
  constexpr std::size_t kBytes = 100'000;
  std::vector<Bytes> windows(3, Bytes(kBytes));
  for (int r = 0; r < 3; ++r) {
    devices.push_back(UseDevice(job.engine(r), std::size_t{256} << 10));
    Serve(job.engine(r), windows[static_cast<std::size_t>(r)], 1, true);
  }
  Bytes src(kBytes);
  const Bytes later = Pattern(kBytes, 4), data = Pattern(kBytes, 5);
  Engine& e = job.engine(0);
  std::atomic<bool> open = false;
  const std::vector<Piece> all{{0, 0, kBytes}};
  const Where gated{true, [&] { return open.load(); }};
  const std::vector works{Put(e, 1, src, all, 0, gated), Put(e, 0, src, all, 0, gated)};
  Bytes got(kBytes), own(kBytes);
  const std::vector gets{Get(e, 1, got, all, {true, nullptr}), Get(e, 0, own, all)};
  CHECK(Wait(e, Put(e, 2, data, all, 0, {true, nullptr})), "to another rank");
  CHECK(Wait(job.engine(2), Put(job.engine(2), 0, data, all, 0)), "of another rank");
  for (const auto& work : works) CHECK(work->state == Pending::State::kRunning, "begun too early");
  for (const auto& work : gets) CHECK(work->state == Pending::State::kRunning, "out of order");
  src = later;
  open = true;
  for (const auto& work : works) CHECK(Wait(e, work), "put: %s", e.failure().text.c_str());
  for (const auto& work : gets) CHECK(Wait(e, work), "got: %s", e.failure().text.c_str());
  CHECK(got == later && own == later && windows[1] == later, "what the stream made of it");
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

// Who leaves after it was answered is not missed; who leaves while it is needed is.
void LeavingWindows() {
  for (const Over over : {Over::kShm, Over::kTcp}) {
    Job job({.size = 3, .over = over});
    std::vector<Bytes> windows(3, Bytes(1 << 16));
    for (int r = 0; r < 3; ++r) Serve(job.engine(r), windows[static_cast<std::size_t>(r)]);
    const Bytes src = Pattern(1 << 16, 9);
    CHECK(Wait(job.engine(1), Put(job.engine(1), 0, src, {{0, 0, src.size()}}, 0)), "put");
    job.engine(1).Close();
    for (const int r : {0, 2}) job.engine(r).PeerLeft(1);
    CHECK(Wait(job.engine(2), Put(job.engine(2), 0, src, {{0, 0, src.size()}}, 0)), "between those who are left");
    CHECK(!job.engine(0).failed() && !job.engine(2).failed(), "%s", job.engine(0).failure().text.c_str());
    const auto lost = Put(job.engine(0), 1, src, {{0, 0, src.size()}}, 0);
    CHECK(job.engine(0).Drive(*lost, DeadlineNs(kPatience)) == Outcome::kFailed, "it is gone");
    CHECK(job.engine(0).failure().kind == FaultKind::kPeerGone && job.engine(0).failure().peer == 1, "%s",
          job.engine(0).failure().text.c_str());
  }
}

}  // namespace hetcoll::testing
