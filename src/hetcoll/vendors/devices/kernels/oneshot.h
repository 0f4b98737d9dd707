// The all-reduce of small messages among GPUs of one host, in one kernel a rank. A rank puts its data into one area
// that all read, or into one of each reader, 4 bytes of data and the call's number to a word, and takes every peer's
// words as soon as they bear the number: the 8 bytes of a word arrive together, so that nothing else need be waited for
// (NCCL calls such a protocol LL).
//
// Calls alternate between the halves of an area. A rank that writes for call n has seen words of call n - 1 from every
// peer; a peer wrote those after it had ended call n - 2, which was the last to read what is now overwritten.
//
// Operands are combined in rank order on every rank, floats of 16 and 8 bits in float32, and rounded once or after each
// operand. There is one NaN. So all ranks get the same bits, whatever their vendors.
#pragma once

#include "devices/kernels/arguments.h"
#include "devices/kernels/reduce.h"
#include "devices/kernels/waits.h"

namespace hetcoll {

// Numbers come back after 2^32 calls. A word of that age would pass for new, so that once in so many calls a rank
// writes all words of its areas.
constexpr unsigned kSweepEvery = 1u << 16;

// What a thread takes at a time: whole words and whole elements.
template <class T>
struct Item {
  static constexpr unsigned kBytes = sizeof(T) < 4 ? 4 : sizeof(T), kWords = kBytes / 4, kElements = kBytes / sizeof(T);
  union {
    T element[kElements];
    unsigned word[kWords];
  };
};

// Item `i` of x.src; elements past the end are left as they are.
template <class T>
HETCOLL_DEVICE void ReadItem(const Oneshot& x, U64 i, Item<T>& item) {
  const auto* from = static_cast<const char*>(x.src) + i * Item<T>::kBytes;
  HETCOLL_UNROLL
  for (unsigned e = 0; e < Item<T>::kElements; ++e) {
    if (i * Item<T>::kElements + e < x.count) item.element[e] = Load<T, 1>(from + e * sizeof(T));
  }
}

// Waits until the word, which was `word` when last looked at, bears the number. False: the call was aborted.
HETCOLL_DEVICE bool Await(const Oneshot& x, int rank, const U64* at, unsigned number, U64& word) {
  for (unsigned looks = 1; static_cast<unsigned>(word >> 32) != number; ++looks) {
    if (GivesUp(x.abort, rank, looks)) return false;
    Relax();
    word = LoadRelaxed(at);
  }
  return true;
}

template <class T>
HETCOLL_DEVICE void Publish(const Oneshot& x, unsigned number, U64 half) {
  constexpr unsigned kWords = Item<T>::kWords;
  const U64 items = (x.count + Item<T>::kElements - 1) / Item<T>::kElements;
  const U64 stamp = U64{number} << 32;
  for (U64 i = ThreadIndex(); i < items; i += ThreadCount()) {
    Item<T> item{};
    ReadItem(x, i, item);
    for (unsigned c = 0; c < x.copies; ++c) {
      HETCOLL_UNROLL
      for (unsigned w = 0; w < kWords; ++w) StoreRelaxed(x.to[c] + half + i * kWords + w, stamp | item.word[w]);
    }
  }
  if (number % kSweepEvery > 1) return;  // both halves have their turn
  for (U64 i = items * kWords + ThreadIndex(); i < x.words; i += ThreadCount()) {
    for (unsigned c = 0; c < x.copies; ++c) StoreRelaxed(x.to[c] + half + i, stamp);
  }
}

template <class Type, class Op>
HETCOLL_DEVICE void Finish(const Oneshot& x, U64 i, typename Type::Value* total) {
  using T = typename Type::Storage;
  auto* to = static_cast<char*>(x.dst) + i * Item<T>::kBytes;
  HETCOLL_UNROLL
  for (unsigned e = 0; e < Item<T>::kElements; ++e) {
    if constexpr (Op::kAverages) {
      if (x.divisor > 1) total[e] = Type::Divide(total[e], x.divisor);
    }
    if (i * Item<T>::kElements + e < x.count) {
      Store<1>(to + e * sizeof(T), Type::Settle(total[e]));
    }
  }
}

// Item `i` of all ranks into item `i` of dst. Peers are asked four at a time. False: the call was aborted.
template <class Type, class Op>
HETCOLL_DEVICE bool Gather(const Oneshot& x, unsigned number, U64 half, U64 i) {
  using T = typename Type::Storage;
  constexpr unsigned kWords = Item<T>::kWords, kAtOnce = 4;
  typename Type::Value total[Item<T>::kElements] = {};
  for (int first = 0; first < x.size; first += kAtOnce) {
    U64 word[kAtOnce][kWords];
    HETCOLL_UNROLL
    for (unsigned k = 0; k < kAtOnce; ++k) {
      const int rank = first + static_cast<int>(k);
      HETCOLL_UNROLL
      for (unsigned w = 0; w < kWords; ++w) {
        if (rank < x.size && rank != x.rank) word[k][w] = LoadRelaxed(x.from[rank] + half + i * kWords + w);
      }
    }
    HETCOLL_UNROLL
    for (unsigned k = 0; k < kAtOnce; ++k) {
      const int rank = first + static_cast<int>(k);
      if (rank >= x.size) break;
      Item<T> item{};
      if (rank == x.rank) {
        ReadItem(x, i, item);
      } else {
        HETCOLL_UNROLL
        for (unsigned w = 0; w < kWords; ++w) {
          if (!Await(x, rank, x.from[rank] + half + i * kWords + w, number, word[k][w])) return false;
          item.word[w] = static_cast<unsigned>(word[k][w]);
        }
      }
      HETCOLL_UNROLL
      for (unsigned e = 0; e < Item<T>::kElements; ++e) {
        const auto value = Type::Widen(item.element[e]);
        total[e] = rank == 0 ? value : Op::Combine(total[e], value);
        if (x.rounds) total[e] = Type::Widen(Type::Settle(total[e]));
      }
    }
  }
  Finish<Type, Op>(x, i, total);
  return true;
}

template <class Type, class Op>
HETCOLL_DEVICE void AllReduce(const Oneshot& x) {
  using T = typename Type::Storage;
  const unsigned number = LoadRelaxed(x.state) + 1;
  const U64 half = U64{number % 2} * x.words;
  const U64 items = (x.count + Item<T>::kElements - 1) / Item<T>::kElements;
  Publish<T>(x, number, half);
  for (U64 i = ThreadIndex(); i < items; i += ThreadCount()) {
    if (!Gather<Type, Op>(x, number, half, i)) break;
  }
  // The last block to end advances the number for the next call, when all have read it.
  Barrier();
  if (LastInBlock() && FetchAdd(x.state + 1, 1) == Blocks() - 1) {
    StoreRelaxed(x.state + 1, 0u);
    StoreRelaxed(x.state, number);
  }
}

}  // namespace hetcoll

#define HETCOLL_ONESHOT(dtype, op)                                                     \
  HETCOLL_KERNEL oneshot_##dtype##_##op(HETCOLL_CONSTANT hetcoll::Oneshot arguments) { \
    using Type = hetcoll::type_##dtype;                                                \
    hetcoll::AllReduce<Type, Type::op>(arguments);                                     \
  }                                                                                    \
  HETCOLL_ENTRY(oneshot_##dtype##_##op)
