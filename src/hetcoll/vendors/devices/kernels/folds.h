// Folds of what a rank gives and gets, for HETCOLL_CHECK of calls that a graph captured: see gpu/folds.py, and
// runtime/checksums.py for what a fold proves.
#pragma once

#include "devices/kernels/arguments.h"
#include "devices/kernels/reduce.h"

namespace hetcoll {

// How a part is folded: as what is only moved, as a reduction of this number (hetcoll/types.py), or as sums that round,
// which have the number of means.
constexpr unsigned kMoved = 255, kRounding = 4;

constexpr unsigned kFoldThreads = 256;  // in a block, at most

template <class T>
constexpr bool kIsPair = false;
template <class T>
constexpr bool kIsPair<Pair<T>> = true;
template <class Type>
constexpr bool kIsTruth = false;
template <>
constexpr bool kIsTruth<type_bool> = true;

// ---- How elements are folded: each as a Value, and these in any order ----

struct Moves {
  using Value = unsigned;
  static constexpr bool kFolds = false, kRounds = false;
};

template <class T>
HETCOLL_DEVICE double Magnitude(T x) {
  const auto wide = static_cast<double>(x);
  return wide < 0 ? -wide : wide;
}
template <class T>
HETCOLL_DEVICE double Magnitude(Pair<T> x) {
  return Magnitude(x.real) + Magnitude(x.imaginary);
}

struct Rounds {
  using Value = double;
  static constexpr bool kFolds = true, kRounds = true;
  template <class T>
  HETCOLL_DEVICE Value Of(unsigned, T x) {
    return static_cast<double>(x);
  }
  template <class T>
  HETCOLL_DEVICE Value Of(unsigned, Pair<T> x) {
    return static_cast<double>(x.real) + static_cast<double>(x.imaginary);
  }
  HETCOLL_DEVICE Value Combine(unsigned, Value a, Value b) { return a + b; }
};

// The largest and the smallest of floats, which are exact.
struct Extremes {
  using Value = double;
  static constexpr bool kFolds = true, kRounds = false;
  HETCOLL_DEVICE Value Of(unsigned, double x) { return x; }
  HETCOLL_DEVICE Value Combine(unsigned op, Value a, Value b) {
    return op == 2 ? Max::Combine(a, b) : Min::Combine(a, b);
  }
};

// Of integers and truths.
template <class Type>
struct Exactly {
  using Value = typename Type::Storage;
  static constexpr bool kFolds = true, kRounds = false;
  // What makes truths of elements makes one of a single element, too.
  HETCOLL_DEVICE Value Of(unsigned op, Value x) {
    return kIsTruth<Type> || (op >= 5 && op <= 7) ? static_cast<Value>(x != 0) : x;
  }
  HETCOLL_DEVICE Value Combine(unsigned op, Value a, Value b) {
    switch (op) {
      case 0:
        return Type::sum::Combine(a, b);
      case 1:
        return Type::prod::Combine(a, b);
      case 2:
        return Type::max::Combine(a, b);
      case 3:
        return Type::min::Combine(a, b);
      case 5:
        return Type::land::Combine(a, b);
      case 6:
        return Type::lor::Combine(a, b);
      case 7:
        return Type::lxor::Combine(a, b);
      case 8:
        return Type::band::Combine(a, b);
      case 9:
        return Type::bor::Combine(a, b);
      default:
        return Type::bxor::Combine(a, b);
    }
  }
};

template <class V>
HETCOLL_DEVICE U64 ToBits(V x) {
  if constexpr (kIsFloat<V>) {
    return BitCast<U64>(x);
  } else {
    return static_cast<U64>(x);
  }
}
template <class V>
HETCOLL_DEVICE V FromBits(U64 bits) {
  if constexpr (kIsFloat<V>) {
    return BitCast<V>(bits);
  } else {
    return static_cast<V>(bits);
  }
}

template <class T>
HETCOLL_DEVICE bool IsFinite(T x) {
  if constexpr (kIsFloat<T>) {
    return x - x == 0;
  } else {
    return true;
  }
}
template <class T>
HETCOLL_DEVICE bool IsFinite(Pair<T> x) {
  return IsFinite(x.real) && IsFinite(x.imaginary);
}

// One to one for each `index`, so that a word that changes changes the sum of all.
HETCOLL_DEVICE U64 Mix(U64 word, U64 index) {
  U64 x = word + (index + 1) * 0x9e3779b97f4a7c15ull;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return x ^ x >> 31;
}

// ---- Folds ----

// What a thread has seen, which has one lane.
template <class V>
struct Seen {
  U64 hash, odd, first;
  double size, most;
  V value;
  bool any;
};

template <class How, class V>
HETCOLL_DEVICE void Join(unsigned op, Seen<V>& to, V value) {
  if constexpr (How::kFolds) to.value = to.any ? How::Combine(op, to.value, value) : value;
  to.any = true;
}

// A pack, of which `elements` count.
template <class Type, class How>
HETCOLL_DEVICE void Take(unsigned op, Seen<typename How::Value>& seen, const Pack<typename Type::Storage>& pack,
                         U64 number, U64 elements) {
  U64 word[2];
  HETCOLL_MEMCPY(word, &pack, sizeof word);
  seen.hash += Mix(word[0], 2 * number) + Mix(word[1], 2 * number + 1);
  HETCOLL_UNROLL
  for (unsigned e = 0; e < Pack<typename Type::Storage>::kElements; ++e) {
    if (e >= elements) break;
    const auto x = Type::Widen(pack.element[e]);
    if (!IsFinite(x) && seen.odd++ == 0) seen.first = number * Pack<typename Type::Storage>::kElements + e;
    if constexpr (How::kRounds) {
      const double size = Magnitude(x);
      seen.size += size;
      seen.most = size > seen.most ? size : seen.most;
    }
    if constexpr (How::kFolds) Join<How>(op, seen, How::Of(op, x));
  }
}

template <class Type>
HETCOLL_DEVICE Pack<typename Type::Storage> LoadSome(const char* from, U64 elements) {
  using T = typename Type::Storage;
  using P = Pack<T>;
  const auto address = reinterpret_cast<U64>(from);
  if (elements >= P::kElements) {
    if (address % kPack == 0) return Load<P, kPack>(from);
    return address % alignof(T) == 0 ? Load<P, alignof(T)>(from) : Load<P, 1>(from);
  }
  P pack{};
  HETCOLL_UNROLL
  for (unsigned e = 0; e < P::kElements; ++e) {
    if (e < elements) pack.element[e] = Load<T, 1>(from + e * sizeof(T));
  }
  return pack;
}

// The block's record, of its threads'; by one thread.
template <class How>
HETCOLL_DEVICE void Gather(unsigned op, const Seen<typename How::Value>* all, Record& to) {
  U64 hash = 0, odd = 0, first = ~U64{0};
  double most = 0;
  for (unsigned lane = 0; lane < kFoldLanes; ++lane) {
    Seen<typename How::Value> found{};
    for (unsigned i = lane; i < BlockSize(); i += kFoldLanes) {
      const Seen<typename How::Value>& seen = all[i];
      hash += seen.hash;
      odd += seen.odd;
      first = seen.first < first ? seen.first : first;
      most = seen.most > most ? seen.most : most;
      found.size += seen.size;
      if (seen.any) Join<How>(op, found, seen.value);
    }
    to.lane[lane] = ToBits(found.value);
    to.size[lane] = ToBits(found.size);
  }
  to.hash = hash;
  to.odd = odd;
  to.first = first;
  to.most = ToBits(most);
}

// The part's record, of its blocks', each of which others have written. Lane l of block b is empty where there is no
// pack b * threads + l.
template <class How>
HETCOLL_DEVICE void GatherBlocks(unsigned op, const Record* all, unsigned blocks, U64 packs, Record& to) {
  using V = typename How::Value;
  U64 hash = 0, odd = 0, first = ~U64{0};
  double most = 0;
  for (unsigned b = 0; b < blocks; ++b) {
    const U64 its_first = LoadRelaxed(&all[b].first);
    const auto its_most = FromBits<double>(LoadRelaxed(&all[b].most));
    hash += LoadRelaxed(&all[b].hash);
    odd += LoadRelaxed(&all[b].odd);
    first = its_first < first ? its_first : first;
    most = its_most > most ? its_most : most;
  }
  for (unsigned lane = 0; lane < kFoldLanes; ++lane) {
    Seen<V> found{};
    for (unsigned b = 0; b < blocks && U64{b} * BlockSize() + lane < packs; ++b) {
      found.size += FromBits<double>(LoadRelaxed(&all[b].size[lane]));
      Join<How>(op, found, FromBits<V>(LoadRelaxed(&all[b].lane[lane])));
    }
    to.lane[lane] = ToBits(found.value);
    to.size[lane] = ToBits(found.size);
  }
  to.hash = hash;
  to.odd = odd;
  to.first = first;
  to.most = ToBits(most);
}

template <class Type, class How>
HETCOLL_DEVICE void FoldPart(const Fold& a) {
  using T = typename Type::Storage;
  constexpr U64 kElements = Pack<T>::kElements;
  HETCOLL_SHARED Seen<typename How::Value> all[kFoldThreads];
  const unsigned part = BlockIndex() / a.blocks, block = BlockIndex() % a.blocks;
  const U64 begin = a.offsets[part], count = a.offsets[part + 1] - begin, packs = (count + kElements - 1) / kElements;
  const char* from = a.from + begin * sizeof(T);
  Seen<typename How::Value> seen{};
  seen.first = ~U64{0};
  for (U64 p = U64{block} * BlockSize() + ThreadInBlock(); p < packs; p += U64{a.blocks} * BlockSize()) {
    const U64 left = count - p * kElements;
    Take<Type, How>(a.op, seen, LoadSome<Type>(from + p * kPack, left), p, left);
  }
  all[ThreadInBlock()] = seen;
  Barrier();
  if (!LastInBlock()) return;
  if (a.blocks == 1) return Gather<How>(a.op, all, a.to[part]);
  const Record* partial = a.partial + part * a.blocks;
  Gather<How>(a.op, all, a.partial[BlockIndex()]);
  Fence();
  if (FetchAdd(a.tickets + part, 1) != a.blocks - 1) return;
  Fence();
  GatherBlocks<How>(a.op, partial, a.blocks, packs, a.to[part]);
  StoreRelaxed(a.tickets + part, 0u);
}

// Calls `then` with how elements of the type are folded by `op`.
template <class Type, class Then>
HETCOLL_DEVICE void ByOp(unsigned op, const Then& then) {
  if (op == kMoved) {
    then(Moves{});
  } else if (op == kRounding) {
    if constexpr (!kIsTruth<Type>) then(Rounds{});
  } else if constexpr (kIsFloat<typename Type::Value>) {
    then(Extremes{});
  } else if constexpr (!kIsPair<typename Type::Value>) {
    then(Exactly<Type>{});
  }
}

template <class Type>
HETCOLL_DEVICE void FoldParts(const Fold& a) {
  ByOp<Type>(a.op, [&](auto how) { FoldPart<Type, decltype(how)>(a); });
}

}  // namespace hetcoll
