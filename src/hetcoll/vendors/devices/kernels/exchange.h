// The all-reduce of medium messages among GPUs of one host, in one kernel a rank: for what is too large for words that
// carry their own number (oneshot.h) and too small for copy engines, which take some ten microseconds to get going.
//
// Every rank has a ring of slots for each block, in memory that all devices have mapped. A block puts its chunks into
// its own slots, as far ahead as there are slots, and takes the chunks of the same block of every peer; block b of one
// rank waits for block b of the others and for nothing else. A slot has a `ready` word, which its owner writes, and an
// `empty` word for each reader. The words are numbers of the block's chunks, which go on from call to call.
//
// Operands are combined in rank order on every rank, so all get the same bits.
#pragma once

#include "devices/kernels/arguments.h"
#include "devices/kernels/reduce.h"
#include "devices/kernels/rings.h"

namespace hetcoll {

constexpr unsigned kWord = 8;  // U64s from one word to the next: a cache line

HETCOLL_DEVICE U64* ReadyWord(const Exchange& x, int owner, unsigned slot) {
  return x.words[owner] + (U64{BlockIndex()} * x.slots + slot) * (1 + kOneshotRanks) * kWord;
}
HETCOLL_DEVICE U64* EmptyWord(const Exchange& x, int owner, unsigned slot, int reader) {
  return ReadyWord(x, owner, slot) + (1 + reader) * kWord;
}
HETCOLL_DEVICE char* Slot(const Exchange& x, int owner, unsigned slot) {
  return x.rings[owner] + (U64{BlockIndex()} * x.slots + slot) * x.slot_bytes;
}

// One thread for each peer waits for that peer's word, and the block for all of them. `at` names a peer's word.
template <class At>
HETCOLL_DEVICE bool AwaitPeers(const Exchange& x, U64 number, At at) {
  HETCOLL_SHARED unsigned stop;
  if (ThreadInBlock() == 0) stop = 0;
  Barrier();
  for (int peer = static_cast<int>(ThreadInBlock()); peer < x.size; peer += static_cast<int>(BlockSize())) {
    if (peer != x.rank && !AwaitWord(x.abort, at(peer), number)) stop = 1;
  }
  Barrier();
  const bool go = stop == 0;
  Barrier();  // before `stop` is used again
  return go;
}

// The chunk [begin, end) of all ranks into dst, from the slots of the peers.
template <class Type, class Op>
HETCOLL_DEVICE void Combine(const Exchange& x, unsigned slot, U64 begin, U64 end) {
  using T = typename Type::Storage;
  constexpr unsigned kElements = Pack<T>::kElements, kDeep = kElements > 8 ? 1 : kElements == 8 ? 2 : 4;
  const U64 packs = (end - begin + kElements - 1) / kElements;
  for (U64 first = ThreadInBlock(); first < packs; first += kDeep * BlockSize()) {
    typename Type::Value total[kDeep][kElements] = {};
    for (int rank = 0; rank < x.size; ++rank) {
      Pack<T> pack[kDeep];
      HETCOLL_UNROLL
      for (unsigned d = 0; d < kDeep; ++d) {
        const U64 i = first + d * BlockSize();
        if (i >= packs) continue;
        pack[d] = rank == x.rank ? ReadPack<T>(x.src, begin, end, i) : LoadPeers<T>(Slot(x, rank, slot) + i * kPack);
      }
      HETCOLL_UNROLL
      for (unsigned d = 0; d < kDeep; ++d) {
        if (first + d * BlockSize() >= packs) continue;
        HETCOLL_UNROLL
        for (unsigned e = 0; e < kElements; ++e) {
          const auto value = Type::Widen(pack[d].element[e]);
          total[d][e] = rank == 0 ? value : Op::Combine(total[d][e], value);
        }
      }
    }
    HETCOLL_UNROLL
    for (unsigned d = 0; d < kDeep; ++d) {
      const U64 i = first + d * BlockSize();
      if (i >= packs) continue;
      Pack<T> result;
      HETCOLL_UNROLL
      for (unsigned e = 0; e < kElements; ++e) {
        if constexpr (Op::kAverages) {
          if (x.divisor > 1) total[d][e] = Type::Divide(total[d][e], x.divisor);
        }
        result.element[e] = Type::Settle(total[d][e]);
      }
      WritePack<T>(x.dst, begin, end, i, result);
    }
  }
}

template <class Type, class Op>
HETCOLL_DEVICE void ExchangeAll(const Exchange& x) {
  using T = typename Type::Storage;
  const U64 elements = x.chunk_bytes / sizeof(T), step = elements * Blocks();
  const U64 chunks = x.count <= elements * BlockIndex() ? 0 : (x.count - elements * BlockIndex() + step - 1) / step;
  const U64 before = x.state[BlockIndex()];
  const auto end_of = [&](U64 begin) { return begin + elements < x.count ? begin + elements : x.count; };
  Barrier();  // all have read the state that one will write
  U64 sent = 0;
  for (U64 taken = 0; taken < chunks; ++taken) {
    for (; sent < chunks && sent < taken + x.slots; ++sent) {
      const U64 number = before + sent + 1, begin = elements * BlockIndex() + sent * step, end = end_of(begin);
      const auto slot = static_cast<unsigned>((number - 1) % x.slots);
      const auto empty = [&](int peer) { return EmptyWord(x, x.rank, slot, peer); };
      if (number > x.slots && !AwaitPeers(x, number - x.slots, empty)) return;
      const U64 packs = (end - begin + Pack<T>::kElements - 1) / Pack<T>::kElements;
      for (U64 i = ThreadInBlock(); i < packs; i += BlockSize()) {
        Store<kPack>(Slot(x, x.rank, slot) + i * kPack, ReadPack<T>(x.src, begin, end, i));
      }
      Barrier();
      if (ThreadInBlock() == 0) PublishRelease(ReadyWord(x, x.rank, slot), number);
    }
    const U64 number = before + taken + 1, begin = elements * BlockIndex() + taken * step;
    const auto slot = static_cast<unsigned>((number - 1) % x.slots);
    if (!AwaitPeers(x, number, [&](int peer) { return ReadyWord(x, peer, slot); })) return;
    Combine<Type, Op>(x, slot, begin, end_of(begin));
    Barrier();
    for (int peer = static_cast<int>(ThreadInBlock()); peer < x.size; peer += static_cast<int>(BlockSize())) {
      if (peer != x.rank) PublishRelease(EmptyWord(x, peer, slot, x.rank), number);
    }
  }
  if (ThreadInBlock() == 0) x.state[BlockIndex()] = before + chunks;
}

}  // namespace hetcoll

#define HETCOLL_EXCHANGE(dtype, op)                                                      \
  HETCOLL_KERNEL exchange_##dtype##_##op(HETCOLL_CONSTANT hetcoll::Exchange arguments) { \
    using Type = hetcoll::type_##dtype;                                                  \
    hetcoll::ExchangeAll<Type, Type::op>(arguments);                                     \
  }                                                                                      \
  HETCOLL_ENTRY(exchange_##dtype##_##op)
