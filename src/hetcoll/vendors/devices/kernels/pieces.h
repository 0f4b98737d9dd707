// Copies of many pieces, that copy engines would begin one after another, some microseconds each: from memory of any
// device that this one sees.
#pragma once

#include "devices/kernels/arguments.h"
#include "devices/kernels/copy.h"

HETCOLL_KERNEL pieces(HETCOLL_CONSTANT hetcoll::Pieces arguments) {
  using namespace hetcoll;
  const unsigned each = arguments.blocks;
  for (unsigned i = BlockIndex() / each; i < arguments.count; i += Blocks() / each) {
    CopyPiece(arguments.piece[i], BlockIndex() % each * BlockSize() + ThreadInBlock(), each * BlockSize());
  }
}
HETCOLL_ENTRY(pieces)

// The same of any number, in memory that the device sees. A row of the host's memory takes its time: the next one is
// read meanwhile.
HETCOLL_KERNEL pieces_of_table(const void* table, unsigned count) {
  using namespace hetcoll;
  const auto* rows = static_cast<const Piece*>(table);
  unsigned i = BlockIndex();
  if (i >= count) return;
  for (Piece piece = rows[i];;) {
    const unsigned next = i + Blocks();
    const Piece then = rows[next < count ? next : i];
    CopyPiece(piece, ThreadInBlock(), BlockSize());
    if (next >= count) return;
    i = next;
    piece = then;
  }
}
HETCOLL_ENTRY(pieces_of_table)
