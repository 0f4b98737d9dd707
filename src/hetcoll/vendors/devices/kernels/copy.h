// What many threads copy together.
#pragma once

#include "devices/kernels/arguments.h"
#include "devices/kernels/reduce.h"

namespace hetcoll {

// From unit `at` on, each `step`th, as many at a time as are under way together; then the rest with half as many.
template <class Unit, unsigned kDeep>
HETCOLL_DEVICE void CopyDeep(const Piece& piece, U64 at, unsigned step) {
  constexpr unsigned kUnit = sizeof(Unit);
  const U64 units = piece.nbytes / kUnit;
  for (; at + U64{kDeep - 1} * step < units; at += U64{kDeep} * step) {
    Unit unit[kDeep];
    HETCOLL_UNROLL
    for (unsigned d = 0; d < kDeep; ++d) unit[d] = Load<Unit, kUnit>(piece.from + (at + U64{d} * step) * kUnit);
    HETCOLL_UNROLL
    for (unsigned d = 0; d < kDeep; ++d) Store<kUnit>(piece.to + (at + U64{d} * step) * kUnit, unit[d]);
  }
  if constexpr (kDeep > 1) CopyDeep<Unit, kDeep / 2>(piece, at, step);
}

// Of a piece, in units at addresses that are multiples of their size: what thread `first` of `step` copies.
template <class Unit>
HETCOLL_DEVICE void CopyUnits(const Piece& piece, unsigned first, unsigned step) {
  CopyDeep<Unit, 4>(piece, first, step);
}

HETCOLL_DEVICE void CopyPiece(const Piece& piece, unsigned first, unsigned step) {
  const U64 all = reinterpret_cast<U64>(piece.to) | reinterpret_cast<U64>(piece.from) | piece.nbytes;
  if (all % 16 == 0) return CopyUnits<Pack<unsigned>>(piece, first, step);
  if (all % 4 == 0) return CopyUnits<unsigned>(piece, first, step);
  CopyUnits<unsigned char>(piece, first, step);
}

}  // namespace hetcoll
