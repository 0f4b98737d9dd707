// One put or get, as a rank asks for it: which bytes, from when on, and how it ended. See windows.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/copier.h"
#include "host/task.h"

namespace hetcoll {

// Why a request was not carried out.
enum class Refusal : int {
  kNone = 0,
  kClosed = 1,   // its owner has closed the window
  kOutside = 2,  // a piece is not inside it, or there is no such signal: who asked was told another size
};

// A part of a request: bytes of memory here and of the window there.
struct Piece {
  std::uint64_t here;
  std::uint64_t there;
  std::uint64_t nbytes;
};

// A put or a get of this rank, or its waiting for a signal.
struct Transfer : Pending {
  int peer = -1;
  std::byte* base = nullptr;  // of a get: where its pieces go
  bool device = false;        // that is not the host's memory
  std::vector<Piece> pieces;  // of a get
  std::int64_t window = -1;   // of what a device reads of the other rank's part of it
  bool asks = false;          // whether what it puts may be written, until that is answered
  bool exposes = false;       // of a get: where its pieces go may be written
  std::uint64_t through = 0;  // requests' messages up to its last one, or to that which asks; 0: not sent yet
};

// How many elements of a put there are, of so many bytes each: a word of the host's memory, which a device may write.
struct Late {
  const std::uint64_t* word = nullptr;
  std::uint64_t item = 1;
};

// Of a put's source, or of what a get fills.
struct Where {
  bool device = false;
  Gate after = nullptr;  // neither is touched before this is true; empty: it is
  // Of a device's: the window of this rank that it is a part of, where that has another number than the peer's.
  std::optional<std::uint32_t> window{};
  // Of a put of one piece, where this rank has a device: its length is the most, and this says it once `after` is true.
  Late late{};
};

void End(Transfer& transfer, Refusal refusal);

}  // namespace hetcoll
