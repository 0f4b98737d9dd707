// One-sided messages: random pieces against a model, windows that close under way, and peers that leave.

#include <sys/eventfd.h>

#include "window_calls.h"

namespace hetcoll::testing {

void OneSided() {
  Exchange({.size = 3}, "shm");
  Exchange({.size = 2, .ring_bytes = 4096}, "shm, small");
  Exchange({.size = 3, .over = Over::kTcp}, "tcp");
  Exchange({.size = 10, .over = Over::kTcp}, "tcp, most of the time with little to say");
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

// The ends of a peer that says nothing: how many bytes it was sent, and how often somebody looked for some of its own.
struct Watched {
  std::size_t sent = 0;
  int looks = 0;
  int bell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);  // what poll() is to hear
  ~Watched() { close(bell); }
};
class WatchedSend final : public SendEnd {
 public:
  explicit WatchedSend(Watched& seen) : seen_(seen) {}
  std::ptrdiff_t Push(const struct hetcoll::Message&, std::size_t, const std::byte*, std::size_t n) override {
    seen_.sent += n;
    return static_cast<std::ptrdiff_t>(n);
  }

 private:
  Watched& seen_;
};
class WatchedRecv final : public RecvEnd {
 public:
  explicit WatchedRecv(Watched& seen) : seen_(seen) {}
  std::ptrdiff_t Pull(const struct hetcoll::Message&, std::size_t, std::byte*, std::size_t, bool) override {
    ++seen_.looks;
    return kWouldBlock;
  }
  View Peek(const struct hetcoll::Message&, std::size_t, std::size_t) override {
    ++seen_.looks;
    return {nullptr, kWouldBlock};
  }
  void Consume(std::size_t) override {}
  void AddPoll(std::vector<pollfd>& fds) const override { fds.push_back({seen_.bell, POLLIN, 0}); }
  bool Polled() const override { return true; }

 private:
  Watched& seen_;
};

// Over TCP each look is a call of the system. Who puts to one of many looks at none of them; who waits looks at those
// of whom something is due, or poll() says something.
void LooksAreFew() {
  constexpr int kSize = 12, kPeer = 3, kTalker = 7;
  std::array<Watched, kSize> seen;
  Links links(kSize);
  Windows windows(0, kSize, 1);
  for (int peer = 1; peer < kSize; ++peer) {
    Watched& peers = seen[static_cast<std::size_t>(peer)];
    for (const int channel : {kRequests, kAnswers}) {
      links.tx(peer, channel).end = std::make_unique<WatchedSend>(peers);
      links.rx(peer, channel).end = std::make_unique<WatchedRecv>(peers);
    }
  }
  const Bytes src = Pattern(1000, 1);
  const std::vector<Piece> pieces{{0, 0, src.size()}};
  const auto put = windows.Put(kWindow, kPeer, src.data(), pieces, 0);
  CHECK(windows.Push(links) && !windows.Push(links), "sent at once");
  for (const Watched& peer : seen) {
    const bool asked = &peer == &seen[kPeer];
    CHECK(peer.looks == 0 && (peer.sent > 0) == asked, "%d looks, %zu bytes", peer.looks, peer.sent);
  }
  const auto looked = [&] {
    std::vector<int> found;
    for (int peer = 1; peer < kSize; ++peer) {
      if (std::exchange(seen[static_cast<std::size_t>(peer)].looks, 0) > 0) found.push_back(peer);
    }
    return found;
  };
  CHECK(!windows.Pass(links) && looked().size() == kSize - 1, "at all, once");
  CHECK(!windows.Pass(links) && looked() == std::vector{kPeer}, "who owes an answer");
  CHECK(eventfd_write(seen[kTalker].bell, 1) == 0, "said");
  CHECK(!windows.Pass(links) && looked() == (std::vector{kPeer, kTalker}), "and who says something");
  windows.Drop();
  CHECK(put->state == Pending::State::kFailed, "dropped");
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

// The stream of who asks ends, at any byte: it has not left, and who waits for it is told.
void CutRequests() {
  constexpr int kPuts = 4;
  for (const Integrity integrity : {Integrity::kOff, Integrity::kSampled, Integrity::kAll}) {
    for (int byte = 1; byte < 260; ++byte) {
      const std::string fault = "truncate=" + std::to_string(byte) + ",rank=1";
      Job job({.size = 2, .over = Over::kTcp, .fault = fault, .integrity = integrity});
      Bytes window(64), unused(16);
      Serve(job.engine(0), window);
      Serve(job.engine(1), unused);
      const Bytes src = Pattern(8, 3);
      const auto expected = job.engine(0).AskWindows([&](auto& w) { return w.Expect(kWindow, 0, kPuts); });
      for (int i = 0; i < kPuts; ++i) {
        static_cast<void>(job.engine(1).Drive(*Put(job.engine(1), 0, src, {{0, 0, src.size()}}, 0), NowNs()));
      }
      CHECK(job.engine(0).Drive(*expected, DeadlineNs(kPatience)) == Outcome::kFailed, "%s: it came", fault.c_str());
      CHECK(job.engine(0).failure().kind == FaultKind::kPeerGone && job.engine(0).failure().peer == 1, "%s: %s",
            fault.c_str(), job.engine(0).failure().text.c_str());
    }
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
