// Copies that a device does between its memory and the host's, beside the engine. native/gpu has one for its drivers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

namespace hetcoll {

enum class Way : int { kIn = 0, kOut = 1 };  // to the device's memory, or out of it

// Whether what came before is done. Throws Fault.
using Gate = std::function<bool()>;

struct Move {
  void* dst;
  const void* src;
  std::size_t n;
};

// Copies of one way end in the order in which they were begun, and wait for nothing else. All of it throws Fault.
class Copier {
 public:
  virtual ~Copier() = default;
  Copier() = default;
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  // Begins one. Where a side is memory that is not pinned, it may be over on return.
  virtual void Copy(Way way, void* dst, const void* src, std::size_t n) = 0;
  // Begins several of the device's memory, which do not overlap.
  virtual void CopyEach(Way way, std::span<const Move> moves) {
    for (const Move& move : moves) Copy(way, move.dst, move.src, move.n);
  }
  // A number, above 0, for all that was begun this way so far.
  virtual std::uint64_t Mark(Way way) = 0;
  // Whether that has ended.
  virtual bool Passed(Way way, std::uint64_t mark) = 0;
};

}  // namespace hetcoll
