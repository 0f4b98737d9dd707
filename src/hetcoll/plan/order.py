"""The order in which a rank enqueues the steps of a plan on its device.

A device may run all streams of a process one operation after another, because streams share hardware queues
(CUDA_DEVICE_MAX_CONNECTIONS, GPU_MAX_HW_QUEUES), and a waiting operation blocks whatever shares its queue. So each rank
must enqueue what its peers need before what it waits for from them. Orders that are cut out of one order of the steps
of *all* ranks, in which everything comes after what it waits for, have that property: run one operation after another
on each rank, the global order itself is a way to the end; and since plans are Kahn networks, every other way ends too.
With more queues than one, less waits. `simulator.serialisable` proves an order without relying on this argument.

So a step has a level. It is above those of its lane's earlier steps and of its deps, and by `LAG` above those of what
other ranks do for it: the send of the message that it receives, the receive that empties the slot that it fills. The
members of an island have their LOCAL steps on one level each, which is no lower than that of an earlier one.

A rank draws no other rank's plan for that: levels follow from the *flat* plans, of one rank for each island, or of as
few as say what all do (`likeness` and `rounds` of `Algorithm`). Each step of a flat plan gets a start. A message of it,
the n-th of all pieces and of all parts that islands share (`Atom`), has the level ``start + PACE * n``, as if one rank
did it for all parts; whoever has some leaves some numbers out, which wrongs nobody. A receive starts `LAG` after its
send. The next step of a lane starts after all numbers of the last one, so that sends of a lane are
`PACE` apart, and the slot of one is filled again, `SLOTS` messages later, at a level that is above it by ``PACE * SLOTS
>= 2 * LAG``. What needs a step starts after it, not after all of its numbers, so pieces overlap. A LOCAL step comes
before whatever needs it on any member, for any part, and after all that it needs there. What else a rank does, which
concerns no other, comes as soon as it can.

Where an algorithm says in which round each message goes, it starts at a level that leaves enough for all rounds before;
then nothing of the others is drawn. `Flat.starts` refuses rounds that come too early for what is drawn.

Starts exist for all plans that need no credits: there a message may be one event, and every event of it may happen for
all pieces and parts, one after another, before the next does. Of others, that overwrite what they send, the starts are
tried; most have some.

A graph's nodes run in any order that its edges allow, so a captured plan has edges for it
(``native/gpu/capture.h``). A step that waits for a message or a slot comes after all that its rank tells its peers at
levels that are lower by the lag, and a LOCAL step after all of that at lower levels. Then nothing gets stuck, on any
number of queues. Suppose something did: take the lowest level, a, at which a step waits for a message or a slot in
vain, and the first, of level b, of the LOCAL steps that do. What the first waits for has a level of at most a - lag.
Its rank is held up by something that waits and does not come after it: a LOCAL step of that level or a lower one. So
b <= a - lag. What the LOCAL step at b waits for is the same one on another rank, which is held up by something that
waits, too: but a later LOCAL step comes after it, as does whatever waits at b + lag or above, and nothing waits at a
lower level.

Kernels that carry small messages (`gpu.plans`) are as LOCAL steps: each meets those of its own level on other ranks,
and no other step of its rank that meets any has that level. What they send may wait until a ring is empty, so for
kernels of lower levels.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import combinations, pairwise
from math import lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..types import ROOTED, WHOLE, Collective
from .algorithms.base import Algorithm, Likeness, power_of_two
from .costs import Groups, Hosts, groups_of
from .flat import LAG, PACE, Flat, Numbers, receives
from .ir import Buf, Op, Plan
from .pieces import Cut, Lengths
from .pipeline import Pieces, in_pieces, share_units
from .simulator.node import wrong
from .steps import Columns, Ints, distinct

MANY = 64
"""Islands from which on `Algorithm.rounds` say when messages go: of fewer, all plans do, by which they go earlier."""
_LOCAL = Op.LOCAL  # members are slow to look up


class Ordered(NamedTuple):
    """A rank's plan in pieces, the order in which it enqueues its steps, and their levels."""

    plan: Plan
    order: tuple[int, ...]
    levels: tuple[int, ...]


class Frame:
    """What a rank needs of the others' plans to cut its `own` into pieces and to order it.

    Parameters
    ----------
    own
        Drawn by `entry` among `islands`, of which there may be as many as ranks.
    scale, groups
        As it was drawn with (`Algorithm.build`).
    """

    def __init__(self, own: Plan, entry: Algorithm, islands: Hosts, *, scale: bool = False, groups: Hosts = ()) -> None:
        self.own, self._there, self._islands = own, groups_of(islands), islands
        self._here, self._home = self._there.of[own.rank], self._there.of[own.root]
        self._made = bool(own.islands) and entry.flat is None  # for islands: others run among them
        self._cuts, n = [0], len(own.steps)  # where atoms begin
        self._step, self._share, self._atom = np.full(n, -1), *np.zeros((2, n), np.int64)
        self._flat: Flat | None = None
        if self._made and own.collective is Collective.ALLTOALL:  # rank r meets (k - r) mod n in round k
            self._step = np.where(own.columns.peer < 0, -1, (own.rank + own.columns.peer) % own.size)
        elif len(islands) > 1:
            self._flat, self._mine = self._draw(entry, scale, groups)
            if self._flat.plans[self._mine] is own:
                self._step = np.arange(n)
            else:
                common = self._there.common
                self._cuts = sorted({common * j // k for k in {*map(len, islands)} for j in range(k)})
                self._match(self._flat.plans[self._mine].columns)

    def _draw(self, entry: Algorithm, scale: bool, groups: Hosts) -> tuple[Flat, int]:
        """The flat plans, and which of these is my island's."""
        own, m, of = self.own, len(self._islands), self._there.of
        flat = entry.flat or entry
        later = own.collective is Collective.REDUCE and len(self._islands[self._home]) > 1  # scaled by the root alone
        alike = not (own.ordered or own.compress or own.collective in ROOTED)
        holds = {Likeness.TURN: alike, Likeness.SWAP: alike and power_of_two(m), Likeness.STAR: True}
        likeness = flat.likeness if flat.likeness is not None and holds[flat.likeness] else None
        rounds = flat.rounds if likeness is None and m >= MANY else None
        if likeness is Likeness.STAR:
            drawn = sorted({self._home, self._here})
        else:
            drawn = [*range(m)] if likeness is None and rounds is None else [self._here]
        hosts = tuple((i,) for i in range(m)) if self._made else None
        groups = tuple(tuple(sorted({of[r] for r in group})) for group in groups)
        alone = flat is entry and all(island == (r,) for r, island in enumerate(self._islands))  # then mine is one
        plans = [
            own
            if alone and i == own.rank
            else flat.build(
                m, i, root=self._home, scale=scale and not later, ordered=own.ordered, compress=own.compress,
                hosts=hosts, groups=groups,
            )
            for i in drawn
        ]  # fmt: skip
        when = None if rounds is None else rounds(plans[0])
        return Flat(plans, likeness=likeness, rounds=when), drawn.index(self._here)

    def _match(self, flat: Columns) -> None:
        """Find which step of the flat plan each of mine is, by its place in the lane, and for messages of which share
        and atom: of those that both ranks own, the first one begins where the later of their intervals does."""
        op, lane, peer, _, _ = self.own.columns.fields
        head = np.arange(len(op))
        for first, count in self.own.batches:
            head[first : first + count] = first
        steps = np.flatnonzero((head == np.arange(len(op))) & (op != _LOCAL))
        others = np.arange(len(flat))
        if self.own.collective is Collective.ALLGATHER and len(self._islands[self._here]) > 1:
            others = others[(flat.fields[0] != Op.COPY) | (flat.src[0] != Buf.SEND)]  # the library does these
        for number in range(int(lane.max()) + 1):
            mine, theirs = steps[lane[steps] == number], others[flat.lane[others] == number]
            self._step[mine[: len(theirs)]] = theirs[: len(mine)]
        self._step = self._step[head]
        messages = np.flatnonzero(peer >= 0)
        sizes, members = np.array([*map(len, self._islands)]), np.concatenate(self._islands)
        of, place = np.zeros((2, self.own.size), np.int64)
        of[members] = np.repeat(np.arange(sizes.size), sizes)
        place[members] = np.arange(members.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        where, own_place = of[peer[messages]], int(place[self.own.rank])
        found = self._step[messages]
        bad = (found < 0) | (flat.fields[0][found] != op[messages]) | (flat.peer[found] != where)
        if bad.any():
            raise wrong(self.own, int(messages[bad][0]), "is no step of the flat plan")
        order = np.lexsort((messages, peer[messages], head[messages]))
        begins = np.flatnonzero(np.diff(head[messages][order] * self.own.size + peer[messages][order], prepend=-1))
        counts = np.diff(begins, append=len(order))
        nth, total = np.arange(len(order)) - np.repeat(begins, counts), np.repeat(counts, counts)
        assert self._flat is not None
        at = messages[order]
        each = np.maximum(total // self._flat.shares_of(self._mine)[self._step[at]], 1)
        place = place[peer[at]] * self.own.size + sizes[of[peer[at]]]  # of which few differ
        places, mine = distinct(place)[0], self._first_atom(own_place, len(self._islands[self._here]))
        firsts = np.array([max(mine, self._first_atom(*divmod(x, self.own.size))) for x in places.tolist()], np.int64)
        self._share[at], self._atom[at] = nth // each, nth % each + firsts[np.searchsorted(places, place)]

    def _first_atom(self, place: int, size: int) -> int:
        """Of those that member `place` of an island of `size` owns."""
        return bisect_left(self._cuts, self._there.common * place // size)

    @cached_property
    def lengths(self) -> Lengths:
        """Of the plans of all ranks."""
        own, sizes = self.own, [*map(len, self._islands)]
        apart = own.collective in (Collective.GATHER, Collective.SCATTER) and len(sizes) > 1  # none but the root's has
        inside = lcm(*map(len, own.islands))
        return Lengths(share_units(own), self._longest(), inside, min(sizes) > 1 and not apart)

    def _longest(self) -> int:
        """Units of the longest message of any rank. The first atom is as long as any."""
        if self._flat is None:
            return 1
        own, common, sizes = self.own, self._there.common, [*map(len, self._islands)]
        at_home, others = sizes[self._home], sizes[: self._home] + sizes[self._home + 1 :]
        if self._made and own.collective in ROOTED:  # it cuts for the two islands of a message
            if own.collective in WHOLE:
                return common // min(max(k, at_home) for k in others)
            return max(min(common, common * k // at_home) for k in others)
        return self._flat.longest * common // max(sizes) * (1 if own.collective in WHOLE else max(sizes))

    def levels(self, pieces: Pieces, made: Cut) -> Ints:
        """Those of the steps of `own` in pieces."""
        old, piece, share, part = pieces.origins
        columns = pieces.plan.columns
        local, peer = (columns.fields[0] == _LOCAL).tolist(), columns.peer
        deps, ends = columns.deps.tolist(), columns.ends.tolist()
        parts = max(-(-(b - a) // made.most) for a, b in pairwise(made.at))
        numbers = Numbers(len(made.at) - 1, len(self._cuts), parts)
        (start, shares), each = self._starts(numbers), numbers.each
        known, begins, pace = self._step[old] >= 0, start[old], shares[old]
        number = ((piece * pace + self._share[old] + share) * numbers.atoms + self._atom[old]) * numbers.parts + part
        level = np.where(peer >= 0, begins + PACE * number, 0).tolist()
        first = (begins + PACE * piece * pace * each).tolist()  # on any member, for any part
        last = (begins + PACE * ((piece + 1) * pace * each - 1)).tolist()
        limit = self._limits(columns, known, first)
        before, least = _lane_before(columns.lane), (PACE * piece * each).tolist()
        for i in np.flatnonzero(peer < 0).tolist():
            after, earlier = deps[ends[i] : ends[i + 1]], before[i]
            if not local[i]:
                level[i] = 1 + max((level[d] for d in (*after, earlier) if d >= 0), default=-1)
                continue
            ready = max((1 + (last[d] if known[d] else level[d]) for d in after), default=0)
            ready = max(ready, level[earlier] if earlier >= 0 else 0)
            level[i] = limit.get(i, max(ready, least[i]))
            if level[i] < ready:
                raise wrong(pieces.plan, i, "is needed before what it waits for")
        return self._checked(pieces.plan, np.array(level, np.int64), np.array(before, np.int64))

    def _starts(self, numbers: Numbers) -> tuple[Ints, Ints]:
        """Of the steps of `own`, and how many shares their steps of the flat plan touch."""
        shares = np.ones(len(self._step), np.int64)
        if self._flat is not None:
            starts, shares = self._flat.starts(numbers, self._mine), self._flat.shares_of(self._mine)
            return starts[self._step], shares[self._step]
        lag = np.where(receives(self.own.columns.fields[0]), LAG, 0)
        return 1 + PACE * numbers.pieces * numbers.each * self._step + lag, shares

    def _limits(self, columns: Columns, known: NDArray[np.bool_], first: list[int]) -> dict[int, int]:
        """The highest level of LOCAL steps that others, or later ones, are needed by."""
        op, waits = columns.fields[0], np.repeat(np.arange(len(columns)), np.diff(columns.ends))
        needed = (op[columns.deps] == _LOCAL) & known[waits]
        limit: dict[int, int] = {}
        for dep, step in zip(columns.deps[needed].tolist(), waits[needed].tolist(), strict=True):
            limit[dep] = min(limit.get(dep, first[step]), first[step] - 1)
        lowest = None
        for i in reversed(columns.locals):
            lowest = min((x for x in (lowest, limit.get(i)) if x is not None), default=None)
            if lowest is not None:
                limit[i] = lowest
        return limit

    def _checked(self, plan: Plan, level: Ints, before: Ints) -> Ints:
        """`level`, which rises along lanes and deps."""
        columns = plan.columns
        waits, local = np.repeat(np.arange(len(level)), np.diff(columns.ends)), columns.fields[0] == _LOCAL
        short = (before >= 0) & (level + local <= level[before])
        short[waits[level[waits] <= level[columns.deps]]] = True
        if short.any():
            raise wrong(plan, int(np.flatnonzero(short)[0]), "has a level no higher than what it waits for")
        return level


def joined(groups: Hosts, islands: Hosts) -> Hosts:
    """`groups` for plans among `islands`. A message of a flat plan stands for those of all ranks of two islands, so all
    of these are compressed or none. Where groups cut islands, two are in one if all their ranks that share an atom are.
    """
    of = Groups(groups).of
    if all(len({of[rank] for rank in island}) == 1 for island in islands):
        return groups
    return (*islands, *((*a, *b) for a, b in combinations(islands, 2) if all(of[r] == of[s] for r, s in _owners(a, b))))


def _owners(a: Sequence[int], b: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Pairs of ranks of two islands that own parts of one atom."""
    for i, rank in enumerate(a):
        for j in range(len(b) * i // len(a), -(-len(b) * (i + 1) // len(a))):
            yield rank, b[j]


def _lane_before(lanes: Ints) -> list[int]:
    """For each step the one before it in its lane, or -1."""
    steps, before = np.argsort(lanes, kind="stable"), np.full(len(lanes), -1)
    same = np.diff(lanes[steps]) == 0
    before[steps[1:][same]] = steps[:-1][same]
    found: list[int] = before.tolist()
    return found


def ordered(frame: Frame, made: Cut) -> Ordered:
    """What the rank of `frame` does, in pieces."""
    pieces = in_pieces(frame.own, made.at, made.most, frame.lengths.longest)
    levels, (op, lane, *_) = frame.levels(pieces, made), pieces.plan.columns.fields
    return Ordered(pieces.plan, tuple(np.lexsort((lane, op, levels)).tolist()), tuple(levels.tolist()))
