// Copies of many pieces, that copy engines would begin one after another, some microseconds each: from memory of any
// device that this one sees.
#pragma once

#include "devices/kernels/arguments.h"
#include "devices/kernels/reduce.h"

namespace hetcoll {

// Of a piece, in units of kUnit bytes at addresses that are multiples of it: what thread `first` of `step` copies.
template <unsigned kUnit>
HETCOLL_DEVICE void CopyUnits(const Piece& piece, unsigned first, unsigned step) {
  struct Unit {
    unsigned char byte[kUnit];
  };
  constexpr unsigned kDeep = 4;  // under way
  const U64 units = piece.nbytes / kUnit;
  for (U64 at = first; at < units; at += U64{kDeep} * step) {
    Unit unit[kDeep];
    HETCOLL_UNROLL
    for (unsigned d = 0; d < kDeep; ++d) {
      if (at + d * step < units) unit[d] = Load<Unit, kUnit>(piece.from + (at + d * step) * kUnit);
    }
    HETCOLL_UNROLL
    for (unsigned d = 0; d < kDeep; ++d) {
      if (at + d * step < units) Store<kUnit>(piece.to + (at + d * step) * kUnit, unit[d]);
    }
  }
}

HETCOLL_DEVICE void CopyPiece(const Piece& piece, unsigned first, unsigned step) {
  const U64 all = reinterpret_cast<U64>(piece.to) | reinterpret_cast<U64>(piece.from) | piece.nbytes;
  if (all % 16 == 0) return CopyUnits<16>(piece, first, step);
  if (all % 4 == 0) return CopyUnits<4>(piece, first, step);
  CopyUnits<1>(piece, first, step);
}

}  // namespace hetcoll

HETCOLL_KERNEL pieces(HETCOLL_CONSTANT hetcoll::Pieces arguments) {
  using namespace hetcoll;
  const unsigned each = arguments.blocks;
  for (unsigned i = BlockIndex() / each; i < arguments.count; i += Blocks() / each) {
    CopyPiece(arguments.piece[i], BlockIndex() % each * BlockSize() + ThreadInBlock(), each * BlockSize());
  }
}
HETCOLL_ENTRY(pieces)
