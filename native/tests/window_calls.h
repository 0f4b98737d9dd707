// What the tests of one-sided messages share: windows, devices, random pieces against a model.
#pragma once

#include <algorithm>
#include <memory>
#include <random>

#include "fake_copier.h"
#include "harness.h"

namespace hetcoll::testing {

constexpr std::uint32_t kWindow = 3;

// Pieces of two memories of n bytes each, that do not overlap there.
inline std::vector<Piece> RandomPieces(std::mt19937& random, std::size_t n) {
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

inline bool Wait(Engine& e, const std::shared_ptr<Transfer>& transfer) {
  return e.Drive(*transfer, DeadlineNs(kPatience)) == Outcome::kDone;
}

// A rank's device, and the pinned memory that it has.
struct Device {
  std::shared_ptr<FakeCopier> copier;
  Bytes pinned;
};

inline Device UseDevice(Engine& e, std::size_t pinned, std::uint64_t fails = 0, std::chrono::milliseconds slow = {}) {
  Device device{std::make_shared<FakeCopier>(fails, slow), Bytes(pinned)};
  e.ServeWindows();
  e.AskWindows([&](auto& windows) { windows.UseCopier(device.copier, device.pinned); });
  return device;
}

inline void Serve(Engine& e, Bytes& window, std::size_t signals = 1, bool device = false) {
  e.ServeWindows();
  e.AskWindows([&](auto& windows) {
    windows.Add(kWindow, device ? FakeCopier::Far(window.data()) : window.data(), window.size(), signals, device);
  });
}

inline auto Put(Engine& e, int peer, const Bytes& src, const std::vector<Piece>& pieces, int signal,
                const Where& where = {}) {
  const std::byte* at = where.device ? FakeCopier::Far(src.data()) : src.data();
  return e.AskWindows([&](auto& windows) { return windows.Put(kWindow, peer, at, pieces, signal, where); });
}

inline auto PutFrom(Engine& e, int peer, const std::byte* device, const std::vector<Piece>& pieces, int signal) {
  return e.AskWindows(
      [&](auto& windows) { return windows.Put(kWindow, peer, device, pieces, signal, {true, nullptr}); });
}

inline auto Get(Engine& e, int peer, Bytes& dst, const std::vector<Piece>& pieces, const Where& where = {}) {
  std::byte* at = where.device ? FakeCopier::Far(dst.data()) : dst.data();
  return e.AskWindows([&](auto& windows) { return windows.Get(kWindow, peer, at, pieces, where); });
}

inline bool Close(Engine& e) {
  e.AskWindows([&](auto& windows) { windows.Close(kWindow); });
  const std::int64_t until = DeadlineNs(kPatience);
  while (NowNs() < until) {
    if (e.AskWindows([](auto& windows) { return windows.Settled(kWindow); })) return true;
    std::this_thread::yield();
  }
  return false;
}

// Devices see each other's windows.
inline void SeeEachOther(Job& job, std::vector<Bytes>& windows, const std::vector<int>& ranks) {
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
inline void Exchange(const JobOptions& options, const char* what, unsigned devices = 0, bool see = false) {
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

}  // namespace hetcoll::testing
