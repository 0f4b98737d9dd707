// Tokens of a mixture of experts, by counts that devices find (hetcoll.experts). A call is some of these kernels one
// after another, with a barrier of all ranks between them: nothing here waits. There are two blocks by turns, since a
// rank may fill the next one while another one still reads what came before. Where ranks read each other's these have
// rows for some of a rank's tokens, and a call has as many rounds as it takes for all. Elsewhere a block goes to each
// rank, with its rows alone, and sums come back likewise.
#pragma once

#include "devices/kernels/copy.h"
#include "devices/kernels/eighths.h"
#include "devices/kernels/sums.h"

namespace hetcoll {

// Where a block says how many tokens its rank has; and its rows, behind that.
HETCOLL_DEVICE U64 BlockCount(const Tokens& a) { return (U64{4} * a.most * a.columns + kPack - 1) / kPack * kPack; }
HETCOLL_DEVICE U64 BlockHead(const Tokens& a) { return BlockCount(a) + kPack; }

HETCOLL_DEVICE U64 Odd(const Tokens& a) { return a.state[0] % 2 != 0 ? a.odd : 0; }

// An id of a token of this rank: its expert, or -1.
HETCOLL_DEVICE int OwnId(const Tokens& a, U64 at) {
  if (at >= U64{a.tokens} * a.columns) return -1;
  const long long id = a.id_bytes == 8 ? Load<long long, 8>(a.ids + 8 * at) : Load<int, 4>(a.ids + 4 * at);
  return id >= 0 && id < static_cast<long long>(a.size) * a.experts ? static_cast<int>(id) : -1;
}

// The lowest of what `of` says of the ranks that have an expert of the token, above `last`; `size`: there is none.
template <class Ids, class Of>
HETCOLL_DEVICE unsigned NextOf(const Tokens& a, const Ids& id, int last, const Of& of) {
  unsigned next = a.size;
  for (unsigned j = 0; j < a.columns; ++j) {
    const int expert = id(j), found = expert < 0 ? -1 : static_cast<int>(of(expert / a.experts));
    if (found > last && static_cast<unsigned>(found) < next) next = found;
  }
  return next;
}

// Where the rows of this round are in a rank's parts: what an odd one has is read while an even one is written.
HETCOLL_DEVICE U64 Turn(const Tokens& a) { return a.first / a.room % 2 * a.room * a.stride; }

// Calls `each` with every rank and row of this round, in turn: which rank's, which of its tokens, where in the round.
template <class Each>
HETCOLL_DEVICE void ForRows(const Tokens& a, const Each& each) {
  const unsigned rows = a.most - a.first < a.room ? a.most - a.first : a.room;
  for (U64 i = BlockIndex(); i < U64{a.size} * rows; i += Blocks()) each(i / rows, a.first + i % rows, i % rows);
}

// A token as it travels.
template <class Type>
HETCOLL_DEVICE void PackRow(const Tokens& a, char* to, const char* from) {
  constexpr U64 kItem = sizeof(typename Type::Storage);
  if (a.fp8 == 0) return CopyPiece(Piece{to, from, a.hidden * kItem}, ThreadInBlock(), BlockSize());
  for (U64 group = ThreadInBlock(); group < a.hidden / kGroup; group += BlockSize()) {
    const float scale = EncodeGroup<Type>(to + group * kGroup, from + group * kGroup * kItem);
    Store<4>(to + a.hidden + 4 * group, scale);
  }
}

template <class Type>
HETCOLL_DEVICE void PackTokens(const Tokens& a) {
  const U64 odd = Odd(a), row = a.hidden * sizeof(typename Type::Storage), head = BlockHead(a);
  const auto via = [&](unsigned rank) { return a.via[rank]; };
  for (U64 s = BlockIndex(); s < a.room && a.first + s < a.tokens; s += Blocks()) {
    const U64 t = a.first + s;
    const auto id = [&](unsigned j) { return OwnId(a, t * a.columns + j); };
    for (unsigned b = NextOf(a, id, -1, via); b < a.blocks; b = NextOf(a, id, static_cast<int>(b), via)) {
      const U64 at = a.sent == nullptr ? s : a.sent[U64{b} * a.most + t];
      PackRow<Type>(a, a.to[b] + odd + head + at * a.packed, a.x + t * row);
    }
  }
  for (U64 i = ThreadIndex(); a.first == 0 && i < U64{a.most} * a.columns; i += ThreadCount()) {
    a.own[i] = OwnId(a, i);
    for (unsigned b = 0; b < a.blocks; ++b) Store<4>(a.to[b] + odd + 4 * i, a.own[i]);
  }
  for (U64 b = ThreadIndex(); b < a.blocks; b += ThreadCount()) Store<4>(a.to[b] + odd + BlockCount(a), a.tokens);
  if (a.blocks > 1) SystemFence();  // what comes next tells others, and some of it is the host's memory
}

// A block of threads for each rank: it numbers the tokens that go there, or those that came from there, as rows that
// follow each other, and says how many bytes that is: of a block, or of the sums that go back.
HETCOLL_DEVICE void NumberTokens(const Tokens& a) {
  HETCOLL_SHARED unsigned found[kMaxThreads];
  const unsigned rank = BlockIndex(), to = a.incoming != 0 ? a.rank : rank;
  const char* theirs = a.incoming != 0 ? a.from[rank] + Odd(a) : nullptr;
  const auto goes = [&](U64 t) {
    for (U64 i = t * a.columns; i < (t + 1) * a.columns; ++i) {
      const int id = theirs != nullptr ? Load<int, 4>(theirs + 4 * i) : OwnId(a, i);
      if (id >= 0 && static_cast<unsigned>(id) / a.experts == to) return true;
    }
    return false;
  };
  const U64 each = (a.most + BlockSize() - 1) / BlockSize();
  const U64 first = ThreadInBlock() * each, end = first + each < a.most ? first + each : a.most;
  unsigned count = 0;
  for (U64 t = first; t < end; ++t) count += goes(t) ? 1 : 0;
  found[ThreadInBlock()] = count;
  Barrier();
  unsigned number = 0;
  for (unsigned i = 0; i < ThreadInBlock(); ++i) number += found[i];
  unsigned* const rows = (a.incoming != 0 ? a.taken : a.sent) + U64{rank} * a.most;
  for (U64 t = first; t < end; ++t) {
    rows[t] = number;
    number += goes(t) ? 1 : 0;
  }
  if (!LastInBlock()) return;
  a.late[rank] = a.incoming != 0 ? number * a.stride : BlockHead(a) + number * a.packed;
  SystemFence();
}

// For each rank the ids of the tokens that go there, one behind the other as they are numbered; or, of `x`, weights.
HETCOLL_DEVICE void TellTokens(const Tokens& a) {
  for (U64 i = ThreadIndex(); i < U64{a.size} * a.tokens; i += ThreadCount()) {
    const U64 rank = i / a.tokens, first = i % a.tokens * a.columns;
    bool goes = false;
    for (unsigned j = 0; j < a.columns; ++j) {
      const int id = a.own[first + j];
      goes |= id >= 0 && static_cast<unsigned>(id) / a.experts == rank;
    }
    if (!goes) continue;
    char* to = a.to[rank] + U64{4} * a.sent[rank * a.most + i % a.tokens] * a.columns;
    for (unsigned j = 0; j < a.columns; ++j) {
      Store<4>(to + 4 * j, a.x == nullptr ? a.own[first + j] : Load<int, 4>(a.x + 4 * (first + j)));
    }
  }
  SystemFence();  // it is the host's memory
}

constexpr unsigned kIds = 8;  // that a thread reads at a time: each is a way to a peer's memory and back

struct Ids {
  int id[kIds];
};

// Some of the ids of a row, from one on; -1 behind the last.
HETCOLL_DEVICE Ids LoadIds(const Tokens& a, U64 row, unsigned first) {
  const char* at = a.from[row / a.most] + Odd(a) + 4 * (row % a.most * a.columns + first);
  Ids ids;
  HETCOLL_UNROLL
  for (unsigned i = 0; i < kIds; ++i) ids.id[i] = first + i < a.columns ? Load<int, 4>(at + 4 * i) : -1;
  return ids;
}

// Calls `each` with every expert from `lowest` on that a row names, once.
template <class Each>
HETCOLL_DEVICE void ForNamed(const Tokens& a, U64 row, int lowest, const Each& each) {
  for (unsigned first = 0; first < a.columns; first += kIds) {
    const Ids ids = LoadIds(a, row, first);
    HETCOLL_UNROLL
    for (unsigned i = 0; i < kIds; ++i) {
      bool again = ids.id[i] < lowest;
      HETCOLL_UNROLL
      for (unsigned k = 0; k < i; ++k) again |= ids.id[k] == ids.id[i];
      for (unsigned before = 0; before < first && !again; before += kIds) {
        const Ids earlier = LoadIds(a, row, before);
        HETCOLL_UNROLL
        for (unsigned k = 0; k < kIds; ++k) again |= earlier.id[k] == ids.id[i];
      }
      if (!again) each(ids.id[i]);
    }
  }
}

// A block of threads for each expert: it counts its tokens, by rank and row, and numbers them. A thread has some rows,
// and needs to know what those before it have found. Where rows are dense a block counts those of lower experts, too.
HETCOLL_DEVICE void PlaceTokens(const Tokens& a) {
  HETCOLL_SHARED unsigned found[kMaxThreads], lower[kMaxThreads];
  const U64 rows = U64{a.size} * a.most, each = (rows + BlockSize() - 1) / BlockSize();
  const U64 first = ThreadInBlock() * each, end = first + each < rows ? first + each : rows;
  const int lowest = static_cast<int>(a.rank * a.experts), mine = lowest + static_cast<int>(BlockIndex());
  unsigned count = 0, below = 0;
  for (U64 row = first; row < end; ++row) {
    ForNamed(a, row, lowest, [&](int expert) {
      count += expert == mine ? 1 : 0;
      below += expert < mine ? 1 : 0;
    });
  }
  found[ThreadInBlock()] = count;
  lower[ThreadInBlock()] = below;
  Barrier();
  unsigned number = 0;
  for (unsigned i = 0; i < ThreadInBlock(); ++i) number += found[i];
  U64 base = BlockIndex() * rows;
  if (a.dense != 0) {
    base = 0;
    for (unsigned i = 0; i < BlockSize(); ++i) base += lower[i];
  }
  for (U64 row = first; row < end; ++row) {
    bool named = false;  // again, it is the same token
    for (unsigned from = 0; from < a.columns; from += kIds) {
      const Ids ids = LoadIds(a, row, from);
      HETCOLL_UNROLL
      for (unsigned i = 0; i < kIds; ++i) {
        const bool local = ids.id[i] >= lowest && ids.id[i] < lowest + static_cast<int>(a.experts);
        if (from + i >= a.columns || (ids.id[i] != mine && (BlockIndex() != 0 || local))) continue;
        a.places[row * a.columns + from + i] = ids.id[i] == mine ? static_cast<int>(base + number) : -1;
        named |= ids.id[i] == mine;
      }
    }
    number += named ? 1 : 0;
  }
  if (!LastInBlock()) return;
  if (BlockIndex() == 0 && a.longest != nullptr) {
    unsigned longest = 0;
    for (unsigned rank = 0; rank < a.size; ++rank) {
      const auto tokens = Load<unsigned, 4>(a.from[rank] + Odd(a) + BlockCount(a));
      longest = tokens > longest ? tokens : longest;
    }
    *a.longest = longest;
  }
  if (a.id_bytes == 8) {
    Store<8>(a.counts + U64{8} * BlockIndex(), static_cast<U64>(number));
  } else {
    Store<4>(a.counts + U64{4} * BlockIndex(), number);
  }
}

// What a unit of a row is, to all places of its token.
template <unsigned kAlign, class Unit>
HETCOLL_DEVICE void ToPlaces(const Tokens& a, const int* places, U64 row, U64 at, const Unit& unit) {
  for (unsigned j = 0; j < a.columns; ++j) {
    if (places[j] >= 0) Store<kAlign>(a.received + static_cast<U64>(places[j]) * row + at, unit);
  }
}

template <class Type>
HETCOLL_DEVICE void SpreadRow(const Tokens& a, const int* places, const char* from) {
  using T = typename Type::Storage;
  const U64 row = a.hidden * sizeof(T);
  if (a.fp8 != 0) {
    for (U64 i = ThreadInBlock(); i < a.hidden / kCodes; i += BlockSize()) {
      ToPlaces<kPack>(a, places, row, i * sizeof(Eight<Type>), DecodeUnit<Type>(from, a.hidden, i));
    }
  } else if (row % kPack == 0) {
    for (U64 i = ThreadInBlock(); i < row / kPack; i += BlockSize()) {
      ToPlaces<kPack>(a, places, row, i * kPack, Load<Pack<T>, kPack>(from + i * kPack));
    }
  } else {
    for (U64 i = ThreadInBlock(); i < a.hidden; i += BlockSize()) {
      ToPlaces<sizeof(T)>(a, places, row, i * sizeof(T), Load<T, sizeof(T)>(from + i * sizeof(T)));
    }
  }
}

HETCOLL_DEVICE bool AnyPlace(const Tokens& a, const int* places) {
  bool any = false;
  for (unsigned j = 0; j < a.columns; ++j) any |= places[j] >= 0;
  return any;
}

// Each token is read once, whatever the number of its experts here. The last block ends the dispatch.
template <class Type>
HETCOLL_DEVICE void SpreadTokens(const Tokens& a) {
  const U64 skip = Odd(a) + BlockHead(a);
  ForRows(a, [&](U64 rank, U64 t, U64 s) {
    const int* places = a.places + (rank * a.most + t) * a.columns;
    const U64 at = a.taken == nullptr ? s : a.taken[rank * a.most + t];
    if (AnyPlace(a, places)) SpreadRow<Type>(a, places, a.from[rank] + skip + at * a.packed);
  });
  Barrier();
  if (!LastInBlock() || FetchAdd(a.state + 1, 1) != Blocks() - 1) return;
  a.state[1] = 0;
  a.state[0] = a.state[0] + 1;
}

template <class Type, class Terms>
HETCOLL_DEVICE void Sum(const Tokens& a, const char* array, char* to, const Terms& terms) {
  using T = typename Type::Storage;
  if ((reinterpret_cast<U64>(array) | a.hidden * sizeof(T)) % kPack == 0) {
    SumRow<Type, kPack / sizeof(T), kPack>(to, a.hidden, terms);
  } else {
    SumRow<Type, 1, 1>(to, a.hidden, terms);
  }
}

// What this rank's experts have made of each token that came, by weights, in the order of its ids.
template <class Type>
HETCOLL_DEVICE void WeighTokens(const Tokens& a) {
  const U64 nbytes = a.hidden * sizeof(typename Type::Storage), turn = Turn(a);
  ForRows(a, [&](U64 rank, U64 t, U64 s) {
    const int* places = a.places + (rank * a.most + t) * a.columns;
    if (!AnyPlace(a, places)) return;
    const char* weights = a.weights[rank] + t * a.columns * 4;
    const U64 at = a.taken == nullptr ? s : a.taken[rank * a.most + t];
    Sum<Type>(a, a.received, a.parts[rank] + turn + at * a.stride, [&](const auto& add) {
      for (unsigned j = 0; j < a.columns; ++j) {
        if (places[j] >= 0) add(a.received + static_cast<U64>(places[j]) * nbytes, Load<float, 4>(weights + 4 * j));
      }
    });
  });
  if (a.blocks > 1) SystemFence();
}

// What all ranks have made of this one's tokens, in the order of ranks.
template <class Type>
HETCOLL_DEVICE void SumTokens(const Tokens& a) {
  const U64 nbytes = a.hidden * sizeof(typename Type::Storage), turn = Turn(a);
  const auto itself = [](unsigned rank) { return rank; };
  for (U64 s = BlockIndex(); s < a.room && a.first + s < a.tokens; s += Blocks()) {
    const U64 t = a.first + s;
    const auto id = [&](unsigned j) { return a.own[t * a.columns + j]; };
    Sum<Type>(a, a.result, a.result + t * nbytes, [&](const auto& add) {
      for (unsigned p = NextOf(a, id, -1, itself); p < a.size; p = NextOf(a, id, static_cast<int>(p), itself)) {
        const U64 at = a.sent == nullptr ? s : a.sent[U64{p} * a.most + t];
        add(a.came[p] + turn + at * a.stride, 1.0f);
      }
    });
  }
}

}  // namespace hetcoll

HETCOLL_KERNEL place_tokens(HETCOLL_CONSTANT hetcoll::Tokens arguments) { hetcoll::PlaceTokens(arguments); }
HETCOLL_ENTRY(place_tokens)
HETCOLL_KERNEL number_tokens(HETCOLL_CONSTANT hetcoll::Tokens arguments) { hetcoll::NumberTokens(arguments); }
HETCOLL_ENTRY(number_tokens)
HETCOLL_KERNEL tell_tokens(HETCOLL_CONSTANT hetcoll::Tokens arguments) { hetcoll::TellTokens(arguments); }
HETCOLL_ENTRY(tell_tokens)

#define HETCOLL_TOKENS(dtype)                                                        \
  HETCOLL_KERNEL pack_tokens_##dtype(HETCOLL_CONSTANT hetcoll::Tokens arguments) {   \
    hetcoll::PackTokens<hetcoll::type_##dtype>(arguments);                           \
  }                                                                                  \
  HETCOLL_ENTRY(pack_tokens_##dtype)                                                 \
  HETCOLL_KERNEL spread_tokens_##dtype(HETCOLL_CONSTANT hetcoll::Tokens arguments) { \
    hetcoll::SpreadTokens<hetcoll::type_##dtype>(arguments);                         \
  }                                                                                  \
  HETCOLL_ENTRY(spread_tokens_##dtype)                                               \
  HETCOLL_KERNEL weigh_tokens_##dtype(HETCOLL_CONSTANT hetcoll::Tokens arguments) {  \
    hetcoll::WeighTokens<hetcoll::type_##dtype>(arguments);                          \
  }                                                                                  \
  HETCOLL_ENTRY(weigh_tokens_##dtype)                                                \
  HETCOLL_KERNEL sum_tokens_##dtype(HETCOLL_CONSTANT hetcoll::Tokens arguments) {    \
    hetcoll::SumTokens<hetcoll::type_##dtype>(arguments);                            \
  }                                                                                  \
  HETCOLL_ENTRY(sum_tokens_##dtype)
HETCOLL_TOKENS(float32)
HETCOLL_TOKENS(float16)
HETCOLL_TOKENS(bfloat16)
