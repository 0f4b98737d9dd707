// What a kernel does while a peer does not come.
#pragma once

#include "devices/kernels/arguments.h"
#include "devices/kernels/platform.h"

namespace hetcoll {

constexpr unsigned kTogether = 32;  // threads in a row that look at the host's memory at once

// Whether a thread, by its number in the launch, does so at this look: at one in `every` it is the turn of one group in
// `turns`. If all asked at once, a call would last until tens of thousands of threads had their answer. By then the
// peer's threads would ask as well, so that all calls in a row would take hundreds of microseconds (seen on H200s).
HETCOLL_DEVICE bool IsTurn(U64 thread, unsigned looks, unsigned every, unsigned turns) {
  return looks % every == 0 && (looks / every + thread / kTogether) % turns == 0;
}

// Between looks at a word that `peer` writes, counted from 1: whether to give up. Now and then it also says for whom it
// waits, since a replay of a graph begins and ends without a word to the host, which clears the byte and looks again.
// What comes in time never gets so far.
HETCOLL_DEVICE bool GivesUp(unsigned* abort, int peer, unsigned looks) {
  constexpr unsigned kAwaited = 32;  // bytes behind the abort word there is one for each rank of the host
  if (!IsTurn(ThreadIndex(), looks, kAbortEvery, kAbortTurns)) return false;
  StoreRelaxed(reinterpret_cast<unsigned char*>(abort) + kAwaited + peer, static_cast<unsigned char>(1));
  return LoadRelaxed(abort) != 0;
}

}  // namespace hetcoll
