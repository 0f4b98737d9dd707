// Pinned host memory through which bytes of a GPU's memory go to and from the control socket while a link has no rail.
// One piece each way at a time: the copy is faster than the network.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "base/copier.h"
#include "transport/transport.h"

namespace hetcoll {

class BounceBuffer {
 public:
  // `pinned` is nobody else's. What the copier throws becomes a Fault that says to or from which peer bytes went.
  BounceBuffer(std::shared_ptr<Copier> copier, std::span<std::byte> pinned, int peer)
      : copier_(std::move(copier)), pinned_(pinned), peer_(peer) {}

  // The longest piece.
  std::size_t most() const { return pinned_.size() / 2; }
  // The first bytes of frame `seq`, n at most, which lie at `from` in the GPU's memory: where the host has them, and in
  // n how many; null until they are copied. They stay there until the next call.
  const std::byte* Out(std::uint64_t seq, const std::byte* from, std::size_t& n);
  // Nothing is wanted any more of what was begun: a rail takes it.
  void Forget() { out_.begun = false; }
  // Copies bytes to the GPU's memory, n at most: whether they are there, and in n how many. Asked again for the same
  // ones until then.
  bool In(std::byte* to, const std::byte* from, std::size_t& n);
  // Whether a copy is under way, of whose end nobody is told.
  bool busy() const { return out_.begun || in_.begun; }

 private:
  struct Piece {
    bool begun = false;
    std::uint64_t seq = 0;
    std::size_t nbytes = 0;
    std::uint64_t mark = 0;
  };

  void Begin(Way way, Piece& piece, void* dst, const void* src, std::size_t n);
  bool Ended(Way way, Piece& piece);
  [[noreturn]] void Refused(Way way, const Fault& fault) const;

  std::shared_ptr<Copier> copier_;
  std::span<std::byte> pinned_;
  int peer_;
  Piece out_;
  Piece in_;
};

}  // namespace hetcoll
