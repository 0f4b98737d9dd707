// What kernels share that pass packs through slots of mapped memory: exchange.h, messages.h.
#pragma once

#include "devices/kernels/reduce.h"
#include "devices/kernels/waits.h"

namespace hetcoll {

// Waits until the word of `peer` has reached `number`. False: the call was aborted.
HETCOLL_DEVICE bool AwaitWord(unsigned* abort, int peer, const U64* word, U64 number) {
  for (unsigned looks = 1; LoadAcquire(word) < number; ++looks) {
    if (GivesUp(abort, peer, looks)) return false;
    Relax();
  }
  return true;
}

// Pack `i` of the elements [begin, end) of memory at any address; what is past the end is 0.
template <class T>
HETCOLL_DEVICE Pack<T> ReadPack(const void* from, U64 begin, U64 end, U64 i) {
  constexpr unsigned kElements = Pack<T>::kElements;
  const U64 first = begin + i * kElements;
  const auto* at = static_cast<const char*>(from) + first * sizeof(T);
  if (first + kElements <= end && reinterpret_cast<U64>(at) % kPack == 0) return Load<Pack<T>, kPack>(at);
  Pack<T> pack{};
  HETCOLL_UNROLL
  for (unsigned e = 0; e < kElements; ++e) {
    if (first + e < end) pack.element[e] = Load<T, 1>(at + e * sizeof(T));
  }
  return pack;
}

template <class T>
HETCOLL_DEVICE void WritePack(void* to, U64 begin, U64 end, U64 i, const Pack<T>& pack) {
  constexpr unsigned kElements = Pack<T>::kElements;
  const U64 first = begin + i * kElements;
  auto* at = static_cast<char*>(to) + first * sizeof(T);
  if (first + kElements <= end && reinterpret_cast<U64>(at) % kPack == 0) return Store<kPack>(at, pack);
  HETCOLL_UNROLL
  for (unsigned e = 0; e < kElements; ++e) {
    if (first + e < end) Store<1>(at + e * sizeof(T), pack.element[e]);
  }
}

// A pack that a peer has written: not from a cache.
template <class T>
HETCOLL_DEVICE Pack<T> LoadPeers(const char* from) {
  U64 half[2];
  LoadRelaxedPair(from, half);
  Pack<T> pack;
  HETCOLL_MEMCPY(&pack, half, sizeof(pack));
  return pack;
}

}  // namespace hetcoll
