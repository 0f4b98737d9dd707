// Signals and waits as kernels of one thread: for graphs, whose nodes find a replay's number in memory, and for devices
// whose streams cannot write or wait for a value (`base` is then a word that stays 0). Words may be the host's memory.
#pragma once

#include "devices/kernels/platform.h"

// *counter = *base + offset, and all that the stream has written before is visible to who reads it.
HETCOLL_KERNEL bump(unsigned long long* counter, const unsigned long long* base, unsigned long long offset) {
  if (hetcoll::ThreadIndex() == 0) hetcoll::StoreRelease(counter, hetcoll::LoadRelaxed(base) + offset);
}
HETCOLL_ENTRY(bump)

// Ends when *counter >= *base + offset, or when *abort, a word of mapped memory, is not 0.
HETCOLL_KERNEL await(const unsigned long long* counter, const unsigned long long* base, unsigned long long offset,
                     const unsigned* abort) {
  if (hetcoll::ThreadIndex() != 0) return;
  const unsigned long long wanted = hetcoll::LoadRelaxed(base) + offset;
  for (unsigned looks = 1; hetcoll::LoadAcquire(counter) < wanted; ++looks) {
    if (looks % hetcoll::kAbortEvery == 0 && hetcoll::LoadRelaxed(abort) != 0) return;
    hetcoll::Relax();
  }
}
HETCOLL_ENTRY(await)
