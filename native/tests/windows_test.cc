// One-sided messages: random pieces against a model, windows that close under way, and peers that leave.

#include <algorithm>
#include <random>

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

void Serve(Engine& e, Bytes& window, std::size_t signals = 1) {
  e.ServeWindows();
  e.AskWindows([&](auto& windows) {
    windows.Add(kWindow, window.data(), window.size(), signals);
    return true;
  });
}

auto Put(Engine& e, int peer, const Bytes& src, const std::vector<Piece>& pieces, int signal) {
  return e.AskWindows([&](auto& windows) { return windows.Put(kWindow, peer, src.data(), pieces, signal); });
}

auto Get(Engine& e, int peer, Bytes& dst, const std::vector<Piece>& pieces) {
  return e.AskWindows([&](auto& windows) { return windows.Get(kWindow, peer, dst.data(), pieces); });
}

// Every rank puts into its own part of every window and gets it back, several at once.
void Exchange(const JobOptions& options, const char* what) {
  Job job(options);
  const int size = job.size();
  constexpr std::size_t kPart = 400'000;
  constexpr int kRounds = 4;
  std::vector<Bytes> windows(static_cast<std::size_t>(size), Bytes(kPart * static_cast<std::size_t>(size)));
  for (int r = 0; r < size; ++r) Serve(job.engine(r), windows[static_cast<std::size_t>(r)]);
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
        works.push_back(Put(e, peer, sources[p], pieces, 0));
        std::vector<Piece> back;  // of what was put just now: requests are done in their order
        for (const Piece& piece : pieces) back.push_back({piece.there % kPart, piece.there, piece.nbytes});
        asked.push_back(back);
        works.push_back(Get(e, peer, got[p], back));
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
    CHECK(Same(got, before), "got what was put later");
    CHECK(Same(window, src), "put");
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
    owner.AskWindows([&](auto& w) {
      w.Close(kWindow);
      return true;
    });
    const Bytes closed = window;
    CHECK(owner.Drive(*expected, DeadlineNs(kPatience)) == Outcome::kFailed || expected->refused == 0, "expected");
    const bool whole = Wait(other, get);
    CHECK(whole ? Same(got, before) : get->refused == static_cast<int>(Refusal::kClosed), "what was got");
    const bool through = Wait(other, put);
    CHECK(through || put->refused == static_cast<int>(Refusal::kClosed), "refused %d", put->refused);
    CHECK(Same(window, closed), "written after it was closed");
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
