// Pinned memory through which pieces pass between links and a device's memory.
//
// An Inlet has what links have brought. Its room comes back when the device has copied it, which needs no peer: so all
// peers share one. What lies in an Outlet waits for a peer: so each FIFO has its own, and none holds up others. Several
// copies are under way at once, and of small ones many have one mark.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <utility>

#include "base/copier.h"

namespace hetcoll {

// Memory that is taken and given back in one order.
class Ring {
 public:
  explicit Ring(std::span<std::byte> memory) : memory_(memory) {}

  // Free bytes in one piece, `most` at most; none where all is taken.
  std::span<std::byte> Room(std::size_t most) const {
    const std::size_t at = taken_ % memory_.size();
    return memory_.subspan(at, std::min({most, memory_.size() - at, memory_.size() - (taken_ - returned_)}));
  }
  void Take(std::size_t n) { taken_ += n; }
  void Return(std::size_t n) { returned_ += n; }
  std::size_t size() const { return memory_.size(); }

 private:
  std::span<std::byte> memory_;
  std::size_t taken_ = 0;
  std::size_t returned_ = 0;
};

class Inlet {
 public:
  Inlet(Copier& copier, std::span<std::byte> memory) : copier_(copier), ring_(memory) {}

  // Where up to `most` bytes of what comes may be written; nothing where there is no room now.
  std::span<std::byte> Room(std::size_t most);
  // The first n bytes of that go to `dst`.
  void Land(std::byte* dst, std::size_t n);
  // Of all that was to land so far; 0: nothing ever was. It passes once that has been copied.
  std::uint64_t Mark();
  bool Passed(std::uint64_t mark) { return copier_.Passed(Way::kIn, mark); }
  // What has not begun never does.
  void Clear();
  // Begins what was kept for a longer copy; whether anything has ended.
  bool Poll();
  bool Busy() const { return !under_way_.empty() || unmarked_ > 0; }

 private:
  void Begin();
  void Free();

  struct Stretch {
    std::uint64_t mark;
    std::size_t nbytes;
  };
  Copier& copier_;
  Ring ring_;
  std::byte* dst_ = nullptr;  // of a copy that is not begun yet: more may follow where it ends
  const std::byte* src_ = nullptr;
  std::size_t nbytes_ = 0;
  std::size_t unmarked_ = 0;
  std::uint64_t last_ = 0;
  std::deque<Stretch> under_way_;
};

class Outlet {
 public:
  Outlet(Copier& copier, std::span<std::byte> memory) : copier_(copier), ring_(memory) {}

  // Begins to copy of n bytes as many as there is room for; how many.
  std::size_t Begin(const std::byte* src, std::size_t n);
  // The same for all of them, to memory of the caller's.
  void BeginTo(std::byte* to, const std::byte* src, std::size_t n);
  // Behind what was begun; see `Front`.
  void Mark();
  // Of what was begun first, what is left; nothing where it has not been copied yet, or not marked.
  std::span<const std::byte> Front();
  void Pop(std::size_t n);
  void Clear();
  bool Busy() const { return !segments_.empty(); }

 private:
  struct Segment {
    const std::byte* at;
    std::size_t nbytes;
    std::uint64_t mark;
    bool ours;  // in the ring
  };
  Copier& copier_;
  Ring ring_;
  std::deque<Segment> segments_;
  std::size_t unmarked_ = 0;        // segments
  std::size_t unmarked_bytes_ = 0;  // of them
};

}  // namespace hetcoll
