// What a kernel does while a peer does not come.
#pragma once

#include "devices/kernels/arguments.h"
#include "devices/kernels/platform.h"

namespace hetcoll {

// Between looks at a word that `peer` writes, counted from 1: whether to give up. Now and then it also says for whom it
// waits, since a replay of a graph begins and ends without a word to the host, which clears the byte and looks again.
// What comes in time never gets so far.
HETCOLL_DEVICE bool GivesUp(unsigned* abort, int peer, unsigned looks) {
  constexpr unsigned kAwaited = 32;  // bytes behind the abort word there is one for each rank of the host
  if (looks % kAbortEvery != 0) return false;
  StoreRelaxed(reinterpret_cast<unsigned char*>(abort) + kAwaited + peer, static_cast<unsigned char>(1));
  return LoadRelaxed(abort) != 0;
}

}  // namespace hetcoll
