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
