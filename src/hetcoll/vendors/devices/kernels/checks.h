// HETCOLL_CHECK of calls that a graph captured: what a rank gives and gets is folded, the ranks tell each other of it,
// and the folds are compared, at each replay. See gpu/replays.py.
#pragma once

#include "devices/kernels/folds.h"

namespace hetcoll {

enum Wrong : unsigned {
  kCame = 1,    // what rank `where` gave
  kFolded = 2,  // lane `where`: its fold, and that of what the ranks gave
  kDiffers = 3  // the results of this rank and of rank `where`, by their hashes
};

// ---- One block ----

struct Problem {
  U64 where, got, wanted;
  unsigned what;  // 0: none
};

template <class How>
HETCOLL_DEVICE void CompareLane(const Comparison& a, unsigned lane, Problem& found) {
  using V = typename How::Value;
  const V got = FromBits<V>(a.made->lane[lane]);
  V wanted = FromBits<V>(a.given->lane[lane]);
  double size = FromBits<double>(a.given->size[lane]), most = FromBits<double>(a.given->most);
  for (unsigned r = 1; r < a.size; ++r) {
    const Record& its = a.given[U64{r} * a.stride];
    wanted = How::Combine(a.op, wanted, FromBits<V>(its.lane[lane]));
    size += FromBits<double>(its.size[lane]);
    most += FromBits<double>(its.most);
  }
  bool wrong;
  if constexpr (How::kRounds) {
    wanted /= a.divisor;
    const double off = got - wanted;
    // Where even the fold of the magnitudes overflows nothing is known of the sum.
    wrong = IsFinite(size) && !((off < 0 ? -off : off) <= size / a.divisor * a.slope + a.floor);
    if (most > a.most) wrong = wrong && !a.whole && IsFinite(got);  // some element may be too large for its type
  } else {
    wrong = got != wanted;
  }
  if (wrong) found = {lane, ToBits(got), ToBits(wanted), kFolded};
}

template <class How>
HETCOLL_DEVICE Problem FindProblem(const Comparison& a) {
  Problem found{};
  if (a.op == kMoved) {
    for (unsigned i = ThreadInBlock(); i < a.parts && found.what == 0; i += BlockSize()) {
      const unsigned source = a.root < a.size ? a.root : i;
      const U64 wanted = a.given[U64{source} * a.stride].hash;
      if (a.made[i].hash != wanted) found = {source, a.made[i].hash, wanted, kCame};
    }
  }
  for (unsigned r = 0; r < a.size; ++r) {
    if (a.given[U64{r} * a.stride].odd != 0) return found;  // nothing is known of what was reduced
  }
  if constexpr (How::kFolds) {
    if (ThreadInBlock() < kFoldLanes) CompareLane<How>(a, ThreadInBlock(), found);
  }
  const U64 mine = a.same ? a.given[U64{a.rank} * a.stride + 1].hash : 0;
  for (unsigned r = ThreadInBlock(); a.same && r < a.size && found.what == 0; r += BlockSize()) {
    const U64 its = a.given[U64{r} * a.stride + 1].hash;
    if (its != mine) found = {r, mine, its, kDiffers};
  }
  return found;
}

// By one thread, when all is known of a replay.
HETCOLL_DEVICE void Tell(const Comparison& a, const Problem& wrong) {
  Findings* const to = a.to;
  const U64 replay = LoadRelaxed(&to->replays) + 1;
  U64 odd = 0, first = 0;
  for (unsigned p = 0; p < a.own_parts; ++p) {
    if (odd == 0) first = a.offsets[p] + a.own[p].first;
    odd += a.own[p].odd;
  }
  if (odd != 0 && LoadRelaxed(&to->odd_replay) == 0) {
    StoreRelaxed(&to->odd, odd);
    StoreRelaxed(&to->first, first);
    PublishRelease(&to->odd_replay, replay);
  }
  if (wrong.what != 0 && LoadRelaxed(&to->wrong_replay) == 0) {
    StoreRelaxed(&to->what, U64{wrong.what});
    StoreRelaxed(&to->where, wrong.where);
    StoreRelaxed(&to->got, wrong.got);
    StoreRelaxed(&to->wanted, wrong.wanted);
    PublishRelease(&to->wrong_replay, replay);
  }
  PublishRelease(&to->replays, replay);
}

template <class How>
HETCOLL_DEVICE void CompareParts(const Comparison& a) {
  HETCOLL_SHARED Problem all[kFoldThreads];
  all[ThreadInBlock()] = FindProblem<How>(a);
  Barrier();
  if (!LastInBlock()) return;
  Problem first{};
  for (unsigned i = 0; i < BlockSize(); ++i) {
    if (all[i].what != 0 && (first.what == 0 || all[i].what < first.what)) first = all[i];
  }
  Tell(a, first);
}

template <class Type>
HETCOLL_DEVICE void Compare(const Comparison& a) {
  ByOp<Type>(a.op, [&](auto how) { CompareParts<decltype(how)>(a); });
}

}  // namespace hetcoll

#define HETCOLL_CHECKS(dtype)                                                      \
  HETCOLL_KERNEL fold_##dtype(HETCOLL_CONSTANT hetcoll::Fold arguments) {          \
    hetcoll::FoldParts<hetcoll::type_##dtype>(arguments);                          \
  }                                                                                \
  HETCOLL_ENTRY(fold_##dtype)                                                      \
  HETCOLL_KERNEL compare_##dtype(HETCOLL_CONSTANT hetcoll::Comparison arguments) { \
    hetcoll::Compare<hetcoll::type_##dtype>(arguments);                            \
  }                                                                                \
  HETCOLL_ENTRY(compare_##dtype)
