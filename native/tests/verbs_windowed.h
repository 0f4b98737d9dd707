// Two ranks whose windows NICs write, of the host's memory and of devices', which no processor may touch.
#pragma once

#include <algorithm>
#include <random>

#include "verbs_harness.h"

namespace hetcoll::testing {

inline constexpr std::uint32_t kWindow = 3;
inline constexpr std::size_t kPieceBytes = 16384;
inline constexpr std::size_t kPieces = 96;
inline constexpr std::size_t kBytes = kPieceBytes * kPieces;

inline bool Wait(Engine& e, const std::shared_ptr<Transfer>& transfer) {
  return e.Drive(*transfer, DeadlineNs(kPatience)) == Outcome::kDone;
}

// Two ranks with a window each, which is registered; others are told so, and put what they like. The ranks of bits in
// `devices` have a device: all that they name is its memory.
class Windowed {
 public:
  explicit Windowed(const JobOptions& options, unsigned devices = 0)
      : devices_(devices), job_(OverVerbs(options)), windows{Pattern(kBytes, 1), Pattern(kBytes, 2)} {
    for (int r = 0; r < 2; ++r) {
      Bytes& window = windows[static_cast<std::size_t>(r)];
      registered_.push_back(std::make_unique<Registered>(job_, r, options.rails, window, Has(r)));
      Engine& e = engine(r);
      e.ServeWindows();
      if (Has(r)) e.UseCopier(copiers_.emplace_back(std::make_shared<FakeCopier>()), pinned_.emplace_back(kPinned));
      e.AskWindows([&](Windows& w) {
        w.Add(kWindow, At(r, window.data()), window.size(), 1, Has(r));
        w.Place(kWindow, 1 - r);
      });
    }
    Settle(job_);
  }
  ~Windowed() {
    for (int r = 0; r < 2; ++r) engine(r).Close();
    for (auto& each : registered_) each->End();
  }
  Windowed(const Windowed&) = delete;
  Windowed& operator=(const Windowed&) = delete;

  Job& job() { return job_; }
  Engine& engine(int rank) { return job_.engine(rank); }
  bool Has(int rank) const { return (devices_ >> rank & 1) != 0; }
  // Memory as that rank names it.
  std::byte* At(int rank, const std::byte* memory) const {
    return Has(rank) ? FakeCopier::Far(memory) : const_cast<std::byte*>(memory);
  }
  Registered& registered(int rank) { return *registered_[static_cast<std::size_t>(rank)]; }
  std::shared_ptr<Transfer> Put(int from, const std::byte* src, std::span<const Piece> pieces, int signal = 0) {
    const Where where{.device = Has(from)};
    return engine(from).AskWindows(
        [&](Windows& w) { return w.Put(kWindow, 1 - from, At(from, src), pieces, signal, where); });
  }
  std::shared_ptr<Transfer> Get(int to, std::byte* dst, std::span<const Piece> pieces) {
    const Where where{.device = Has(to)};
    return engine(to).AskWindows([&](Windows& w) { return w.Get(kWindow, 1 - to, At(to, dst), pieces, where); });
  }
  bool IsSettled(int rank) {
    return engine(rank).AskWindows([](Windows& w) { return w.Settled(kWindow); });
  }
  std::string Failures() { return engine(0).failure().text + " " + engine(1).failure().text; }

 private:
  static JobOptions OverVerbs(JobOptions options) {
    options.size = 2;
    options.over = Over::kVerbs;
    options.ring_bytes = 64 << 10;
    return options;
  }

  static constexpr std::size_t kPinned = std::size_t{256} << 10;

  unsigned devices_;
  std::deque<Bytes> pinned_;  // these outlive the engines
  std::vector<std::shared_ptr<FakeCopier>> copiers_;
  Job job_;

 public:
  std::vector<Bytes> windows;

 private:
  std::vector<std::unique_ptr<Registered>> registered_;
};

// All of a window, in any order.
inline std::vector<Piece> Shuffled(unsigned seed) {
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < kPieces; ++i) pieces.push_back({i * kPieceBytes, i * kPieceBytes, kPieceBytes});
  std::mt19937 random(seed);
  std::shuffle(pieces.begin(), pieces.end(), random);
  return pieces;
}

inline std::uint64_t Changed(Engine& e, const char* name, std::uint64_t before) { return Counter(e, name) - before; }

}  // namespace hetcoll::testing
