// What many threads copy together.
#pragma once

#include "devices/kernels/arguments.h"
#include "devices/kernels/reduce.h"

namespace hetcoll {

// Of a piece, in units at addresses that are multiples of their size: what thread `first` of `step` copies.
template <class Unit>
HETCOLL_DEVICE void CopyUnits(const Piece& piece, unsigned first, unsigned step) {
  constexpr unsigned kDeep = 4, kUnit = sizeof(Unit);  // units under way
  const U64 units = piece.nbytes / kUnit;
  U64 at = first;
  for (; at + U64{kDeep - 1} * step < units; at += U64{kDeep} * step) {
    Unit unit[kDeep];
    HETCOLL_UNROLL
    for (unsigned d = 0; d < kDeep; ++d) unit[d] = Load<Unit, kUnit>(piece.from + (at + U64{d} * step) * kUnit);
    HETCOLL_UNROLL
    for (unsigned d = 0; d < kDeep; ++d) Store<kUnit>(piece.to + (at + U64{d} * step) * kUnit, unit[d]);
  }
  for (; at < units; at += step) Store<kUnit>(piece.to + at * kUnit, Load<Unit, kUnit>(piece.from + at * kUnit));
}

HETCOLL_DEVICE void CopyPiece(const Piece& piece, unsigned first, unsigned step) {
  const U64 all = reinterpret_cast<U64>(piece.to) | reinterpret_cast<U64>(piece.from) | piece.nbytes;
  if (all % 16 == 0) return CopyUnits<Pack<unsigned>>(piece, first, step);
  if (all % 4 == 0) return CopyUnits<unsigned>(piece, first, step);
  CopyUnits<unsigned char>(piece, first, step);
}

}  // namespace hetcoll
