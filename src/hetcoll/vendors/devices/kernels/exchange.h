// Collectives of medium messages among GPUs of one host, in one kernel a rank: for what is too large for words that
// carry their own number (oneshot.h) and too small for copy engines, which take some ten microseconds to get going.
//
// Every rank has a ring of slots for each block, in memory that all devices have mapped. A block puts its messages into
// its own slots and takes the messages of the same block of every peer; block b of one rank waits for block b of the
// others and for nothing else. A slot has a `ready` word, which its owner writes, and an `empty` word for each reader.
// The words are numbers of the block's messages, which go on from call to call.
//
// A message is a chunk of the data. What a rank takes it reduces, or puts side by side; where src is cut by rank
// (reduce-scatter, all-to-all, scatter), a message has a chunk for each peer, who takes its own. Of two shots a rank
// reduces its part of a chunk, and its next message is the result: with n ranks of N bytes it reads 2 (n - 1) N / n,
// where one shot reads (n - 1) N.
//
// Where a root takes all, or gives all, only those write that a peer takes from, and only those wait for them. But each
// rank counts every message and gives every peer's slot back, also one that nobody wrote: so whoever writes next finds
// that all have passed the message whose slot it takes, whoever had written that.
//
// Operands are combined in rank order, so all ranks get the same bits: floats of 16 and 8 bits in float32, rounded once
// or, where the order counts, after each operand, as by messages between two ranks.
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
// Where message `number` of a rank's block lies.
HETCOLL_DEVICE unsigned SlotOf(const Exchange& x, U64 number) { return static_cast<unsigned>((number - 1) % x.slots); }
HETCOLL_DEVICE char* Slot(const Exchange& x, int owner, U64 number) {
  return x.rings[owner] + (U64{BlockIndex()} * x.slots + SlotOf(x, number)) * x.slot_bytes;
}

// One thread for each peer among the `ranks` from `first` on waits for that peer's word, and the block for all of them.
// `at` names a peer's word.
template <class At>
HETCOLL_DEVICE bool AwaitPeers(const Exchange& x, int first, int ranks, U64 number, At at) {
  HETCOLL_SHARED unsigned stop;
  if (ThreadInBlock() == 0) stop = 0;
  Barrier();
  for (int peer = first + static_cast<int>(ThreadInBlock()); peer < first + ranks;
       peer += static_cast<int>(BlockSize())) {
    if (peer != x.rank && !AwaitWord(x.abort, peer, at(peer), number)) stop = 1;
  }
  Barrier();
  const bool go = stop == 0;
  Barrier();  // before `stop` is used again
  return go;
}

// The steps of a message: its slot is free; it lies there; those of the peers that this rank takes from are there; it
// needs no peer's any more. False: the call was aborted.
HETCOLL_DEVICE bool AwaitEmpty(const Exchange& x, U64 number) {
  const auto at = [&](int peer) { return EmptyWord(x, x.rank, SlotOf(x, number), peer); };
  return number <= x.slots || AwaitPeers(x, 0, x.size, number - x.slots, at);
}
HETCOLL_DEVICE void Publish(const Exchange& x, U64 number) {
  Barrier();
  if (ThreadInBlock() == 0) PublishRelease(ReadyWord(x, x.rank, SlotOf(x, number)), number);
}
HETCOLL_DEVICE bool AwaitReady(const Exchange& x, U64 number) {
  return AwaitPeers(x, x.first, x.sources, number, [&](int peer) { return ReadyWord(x, peer, SlotOf(x, number)); });
}
HETCOLL_DEVICE void GiveBack(const Exchange& x, U64 number) {
  Barrier();
  for (int peer = static_cast<int>(ThreadInBlock()); peer < x.size; peer += static_cast<int>(BlockSize())) {
    if (peer != x.rank) PublishRelease(EmptyWord(x, peer, SlotOf(x, number), x.rank), number);
  }
}

// The elements [begin, end) of the data, in packs.
struct Chunk {
  U64 begin, end;
  unsigned packs;
};

// Part r of n parts begins with this pack.
HETCOLL_DEVICE unsigned PartOf(const Chunk& chunk, int r, int n) {
  return chunk.packs * static_cast<unsigned>(r) / static_cast<unsigned>(n);
}
HETCOLL_DEVICE int OwnerOf(const Chunk& chunk, unsigned pack, int n) {
  return static_cast<int>(((pack + 1) * static_cast<unsigned>(n) - 1) / chunk.packs);
}

// What a block does: its chunks are every Blocks()th of the data.
struct Share {
  U64 elements, step, chunks;
};

template <class T>
HETCOLL_DEVICE Share ShareOf(const Exchange& x) {
  const U64 elements = x.chunk_bytes / sizeof(T), step = elements * Blocks(), first = elements * BlockIndex();
  return {elements, step, x.count <= first ? 0 : (x.count - first + step - 1) / step};
}
template <class T>
HETCOLL_DEVICE Chunk ChunkAt(const Exchange& x, const Share& share, U64 t) {
  const U64 begin = share.elements * BlockIndex() + t * share.step;
  const U64 end = begin + share.elements < x.count ? begin + share.elements : x.count;
  return {begin, end, static_cast<unsigned>((end - begin + Pack<T>::kElements - 1) / Pack<T>::kElements)};
}

// A chunk into a message, but for the packs [from, to).
template <class T>
HETCOLL_DEVICE void Put(const Exchange& x, U64 number, const Chunk& chunk, unsigned from, unsigned to) {
  for (unsigned i = ThreadInBlock(); i < chunk.packs; i += BlockSize()) {
    if (i >= from && i < to) continue;
    Store<kPack>(Slot(x, x.rank, number) + U64{i} * kPack, ReadPack<T>(x.src, chunk.begin, chunk.end, i));
  }
}

// Where src is cut by rank: the element of it that begins what this rank keeps, and where in a message of `owner`,
// which has a chunk for each of its peers, this rank's lies.
HETCOLL_DEVICE U64 OwnPart(const Exchange& x) { return x.cut ? x.rank * x.count : 0; }
HETCOLL_DEVICE const char* PartFrom(const Exchange& x, int owner, U64 number) {
  const unsigned part = x.cut ? static_cast<unsigned>(x.rank - (x.rank > owner)) * x.chunk_bytes : 0;
  return Slot(x, owner, number) + part;
}

// A chunk for each peer into a message.
template <class T>
HETCOLL_DEVICE void PutParts(const Exchange& x, U64 number, const Chunk& chunk) {
  const unsigned packs = chunk.packs * static_cast<unsigned>(x.size - 1);
  for (unsigned at = ThreadInBlock(); at < packs; at += BlockSize()) {
    const unsigned part = at / chunk.packs, i = at % chunk.packs;
    const U64 first = (part + (static_cast<int>(part) >= x.rank)) * x.count;
    Store<kPack>(Slot(x, x.rank, number) + U64{part} * x.chunk_bytes + U64{i} * kPack,
                 ReadPack<T>(x.src, first + chunk.begin, first + chunk.end, i));
  }
}

// The packs [from, to) of all ranks into dst, from the peers' messages, and into message `result`, unless it is 0.
template <class Type, class Op>
HETCOLL_DEVICE void Combine(const Exchange& x, U64 number, const Chunk& chunk, unsigned from, unsigned to, U64 result) {
  using T = typename Type::Storage;
  const U64 own = OwnPart(x);
  constexpr unsigned kElements = Pack<T>::kElements, kDeep = kElements > 8 ? 1 : kElements == 8 ? 2 : 4;
  for (unsigned first = from + ThreadInBlock(); first < to; first += kDeep * BlockSize()) {
    typename Type::Value total[kDeep][kElements] = {};
    for (int rank = 0; rank < x.size; ++rank) {
      Pack<T> pack[kDeep];
      HETCOLL_UNROLL
      for (unsigned d = 0; d < kDeep; ++d) {
        const unsigned i = first + d * BlockSize();
        if (i >= to) continue;
        pack[d] = rank == x.rank ? ReadPack<T>(x.src, own + chunk.begin, own + chunk.end, i)
                                 : LoadPeers<T>(PartFrom(x, rank, number) + U64{i} * kPack);
      }
      HETCOLL_UNROLL
      for (unsigned d = 0; d < kDeep; ++d) {
        if (first + d * BlockSize() >= to) continue;
        HETCOLL_UNROLL
        for (unsigned e = 0; e < kElements; ++e) {
          const auto value = Type::Widen(pack[d].element[e]);
          total[d][e] = rank == 0 ? value : Op::Combine(total[d][e], value);
          if (x.rounds) total[d][e] = Type::Widen(Type::Settle(total[d][e]));
        }
      }
    }
    HETCOLL_UNROLL
    for (unsigned d = 0; d < kDeep; ++d) {
      const unsigned i = first + d * BlockSize();
      if (i >= to) continue;
      Pack<T> pack;
      HETCOLL_UNROLL
      for (unsigned e = 0; e < kElements; ++e) {
        if constexpr (Op::kAverages) {
          if (x.divisor > 1) total[d][e] = Type::Divide(total[d][e], x.divisor);
        }
        pack.element[e] = Type::Settle(total[d][e]);
      }
      WritePack<T>(x.dst, chunk.begin, chunk.end, i, pack);
      if (result != 0) Store<kPack>(Slot(x, x.rank, result) + U64{i} * kPack, pack);
    }
  }
}

// The peers' parts of a chunk into dst, from their results.
template <class T>
HETCOLL_DEVICE void Collect(const Exchange& x, U64 result, const Chunk& chunk) {
  constexpr unsigned kDeep = 4;
  for (unsigned first = ThreadInBlock(); first < chunk.packs; first += kDeep * BlockSize()) {
    Pack<T> pack[kDeep];
    int owner[kDeep];
    HETCOLL_UNROLL
    for (unsigned d = 0; d < kDeep; ++d) {
      const unsigned i = first + d * BlockSize();
      owner[d] = i < chunk.packs ? OwnerOf(chunk, i, x.size) : x.rank;
      if (owner[d] != x.rank) pack[d] = LoadPeers<T>(Slot(x, owner[d], result) + U64{i} * kPack);
    }
    HETCOLL_UNROLL
    for (unsigned d = 0; d < kDeep; ++d) {
      const unsigned i = first + d * BlockSize();
      if (owner[d] != x.rank) WritePack<T>(x.dst, chunk.begin, chunk.end, i, pack[d]);
    }
  }
}

// A chunk of every source into its place in dst, from the peers' messages.
template <class T>
HETCOLL_DEVICE void Gather(const Exchange& x, U64 number, const Chunk& chunk) {
  constexpr unsigned kDeep = 4;
  const U64 own = OwnPart(x);
  const unsigned packs = chunk.packs * x.sources;
  for (unsigned first = ThreadInBlock(); first < packs; first += kDeep * BlockSize()) {
    Pack<T> pack[kDeep];
    HETCOLL_UNROLL
    for (unsigned d = 0; d < kDeep; ++d) {
      const unsigned at = first + d * BlockSize(), i = at % chunk.packs;
      if (at >= packs) continue;
      const int rank = x.first + static_cast<int>(at / chunk.packs);
      pack[d] = rank == x.rank ? ReadPack<T>(x.src, own + chunk.begin, own + chunk.end, i)
                               : LoadPeers<T>(PartFrom(x, rank, number) + U64{i} * kPack);
    }
    HETCOLL_UNROLL
    for (unsigned d = 0; d < kDeep; ++d) {
      const unsigned at = first + d * BlockSize();
      if (at >= packs) continue;
      const U64 begin = at / chunk.packs * x.count;
      WritePack<T>(x.dst, begin + chunk.begin, begin + chunk.end, at % chunk.packs, pack[d]);
    }
  }
}

// All chunks through messages of their own, of which `take` takes what this rank is to have; they go as far ahead as
// there are slots. False: the call was aborted.
template <class T, class Take>
HETCOLL_DEVICE bool Pass(const Exchange& x, const Share& share, U64 before, Take take) {
  U64 sent = 0;
  for (U64 taken = 0; taken < share.chunks; ++taken) {
    for (; x.gives && sent < share.chunks && sent < taken + x.slots; ++sent) {
      if (!AwaitEmpty(x, before + sent + 1)) return false;
      const Chunk chunk = ChunkAt<T>(x, share, sent);
      x.cut ? PutParts<T>(x, before + sent + 1, chunk) : Put<T>(x, before + sent + 1, chunk, 0, 0);
      Publish(x, before + sent + 1);
    }
    if (!AwaitReady(x, before + taken + 1)) return false;
    if (x.sources > 0) take(before + taken + 1, ChunkAt<T>(x, share, taken));
    GiveBack(x, before + taken + 1);
  }
  return true;
}

// Chunks go one ahead of what is reduced, and that goes one ahead of what is collected. The messages are chunk 0,
// chunk 1, result 0, chunk 2, result 1, and so on. A slot was used four messages before, or more: every peer takes that
// one before it needs anything of this step. So nobody waits in a circle. False: the call was aborted.
template <class Type, class Op>
HETCOLL_DEVICE bool TwoShot(const Exchange& x, const Share& share, U64 before) {
  using T = typename Type::Storage;
  const auto chunk_number = [&](U64 t) { return before + (t == 0 ? 1 : 2 * t); };
  const auto result_number = [&](U64 t) { return before + (t + 1 < share.chunks ? 2 * t + 3 : 2 * t + 2); };
  U64 sent = 0;
  for (U64 t = 0; t <= share.chunks; ++t) {
    for (; sent < share.chunks && sent < t + 2; ++sent) {
      if (!AwaitEmpty(x, chunk_number(sent))) return false;
      const Chunk chunk = ChunkAt<T>(x, share, sent);
      Put<T>(x, chunk_number(sent), chunk, PartOf(chunk, x.rank, x.size), PartOf(chunk, x.rank + 1, x.size));
      Publish(x, chunk_number(sent));
    }
    if (t < share.chunks) {
      const U64 number = chunk_number(t), result = result_number(t);
      if (!AwaitReady(x, number) || !AwaitEmpty(x, result)) return false;
      const Chunk chunk = ChunkAt<T>(x, share, t);
      const unsigned from = PartOf(chunk, x.rank, x.size), to = PartOf(chunk, x.rank + 1, x.size);
      Combine<Type, Op>(x, number, chunk, from, to, result);
      Publish(x, result);
      GiveBack(x, number);
    }
    if (t > 0) {
      if (!AwaitReady(x, result_number(t - 1))) return false;
      Collect<T>(x, result_number(t - 1), ChunkAt<T>(x, share, t - 1));
      GiveBack(x, result_number(t - 1));
    }
  }
  return true;
}

// `pass` does a block's share behind its messages so far, and says whether it was not aborted.
template <class T, class Do>
HETCOLL_DEVICE void DoShare(const Exchange& x, Do pass) {
  const Share share = ShareOf<T>(x);
  const U64 before = x.state[BlockIndex()];
  Barrier();  // all have read the state that one will write
  if (!pass(share, before)) return;
  if (ThreadInBlock() == 0) x.state[BlockIndex()] = before + (x.two_shot ? 2 : 1) * share.chunks;
}

template <class Type, class Op>
HETCOLL_DEVICE void ExchangeAll(const Exchange& x) {
  using T = typename Type::Storage;
  DoShare<T>(x, [&](const Share& share, U64 before) {
    if (x.two_shot) return TwoShot<Type, Op>(x, share, before);
    return Pass<T>(x, share, before,
                   [&](U64 number, const Chunk& chunk) { Combine<Type, Op>(x, number, chunk, 0, chunk.packs, 0); });
  });
}

template <class T>
HETCOLL_DEVICE void GatherAll(const Exchange& x) {
  DoShare<T>(x, [&](const Share& share, U64 before) {
    return Pass<T>(x, share, before, [&](U64 number, const Chunk& chunk) { Gather<T>(x, number, chunk); });
  });
}

}  // namespace hetcoll

#define HETCOLL_EXCHANGE(dtype, op)                                                      \
  HETCOLL_KERNEL exchange_##dtype##_##op(HETCOLL_CONSTANT hetcoll::Exchange arguments) { \
    using Type = hetcoll::type_##dtype;                                                  \
    hetcoll::ExchangeAll<Type, Type::op>(arguments);                                     \
  }                                                                                      \
  HETCOLL_ENTRY(exchange_##dtype##_##op)

#define HETCOLL_GATHER(bytes, type)                                                                                    \
  HETCOLL_KERNEL gather_##bytes(HETCOLL_CONSTANT hetcoll::Exchange arguments) { hetcoll::GatherAll<type>(arguments); } \
  HETCOLL_ENTRY(gather_##bytes)
