"""Sets of plans in which ranks do the same as others, but for which ranks and units they do it with.

Then a few ranks stand for all, in proofs, forecasts and orders alike. What another rank does is what its stand-in does,
moved on: `Symmetry` says how. `symmetry_of` finds it, and compares every plan with the one that stands for it: nothing
is believed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from ..types import ROOTED, WHOLE, Collective
from .ir import Buf, Columns, Local, Plan, Span, Step
from .steps import MOST_NUMBERS, Numbers


@dataclass(frozen=True)
class Symmetry:
    """A set of plans that stays the same where all ranks are moved on, each by a place or more of its orbit.

    The first rank of an orbit stands for those that follow, each of them one stride further; all orbits are of one
    length, and ranks that are in none exchange no messages with these. Units move with them, in `blocks` of so many
    units of each buffer, by one part in `times`; in blocks of 1 they stay, and without blocks only their number counts.
    """

    orbits: tuple[Sequence[int], ...]
    blocks: tuple[int, int, int] | None = None

    @property
    def times(self) -> int:
        """How many ranks are in an orbit."""
        return len(self.orbits[0])

    @cached_property
    def standing(self) -> tuple[int, ...]:
        """The ranks that stand for all."""
        return tuple(orbit[0] for orbit in self.orbits)

    @cached_property
    def _places(self) -> dict[int, tuple[Sequence[int], int]]:
        return {rank: (orbit, strides) for orbit in self.orbits for strides, rank in enumerate(orbit)}

    @cached_property
    def table(self) -> NDArray[np.int64]:
        """The orbits, a row each."""
        return np.array(self.orbits, np.int64)

    @cached_property
    def index(self) -> NDArray[np.int64]:
        """For each rank its row and its column in `table`."""
        index = np.zeros((2, self.table.max() + 1), np.int64)
        index[:, self.table] = np.indices(self.table.shape)
        return index

    def home(self, rank: int) -> tuple[int, int]:
        """The rank that stands for `rank`, and how many strides further this is."""
        orbit, strides = self._places[rank]
        return orbit[0], strides

    def orbit(self, rank: int) -> Sequence[int]:
        """All ranks for which the same one stands as for `rank`."""
        return self._places[rank][0]

    def move(self, rank: int, strides: int) -> int:
        """The rank so many strides further."""
        orbit, at = self._places[rank]
        return orbit[(at + strides) % len(orbit)]

    def fifo(self, rank: int, peer: int) -> tuple[int, int]:
        """From whom to whom a message goes that `rank` sends to `peer`, as the one who stands for `peer` gets it."""
        into, strides = self.home(peer)
        return self.move(rank, -strides), into

    def units(self, buf: Buf, unit: int) -> list[int]:
        """Where a unit is after each number of strides."""
        block = self.blocks[buf] if self.blocks else 1
        first = unit // block * block
        at, part = unit - first, block // self.times
        return [first + (at + strides * part) % block for strides in range(self.times)]

    def span(self, span: Span, strides: int) -> Span:
        """Where a span has moved to. One of whole blocks stays, as a set of units."""
        block = self.blocks[span.buf] if self.blocks else 1
        if block > 1 and span.start % block == 0 and span.count % block == 0:
            return span
        first = span.start // block * block
        return Span(span.buf, first + (span.start - first + strides * (block // self.times)) % block, span.count)

    def bits(self, nodes: int, strides: int, each: int) -> int:
        """A bit set of nodes, as a rank sees it from which the rank whose set it is lies so many strides further.

        The first `each` bits are the nodes of the ranks from where one sees them, the next ones those a stride further.
        """
        strides %= self.times
        if strides == 0 or nodes == 0:
            return nodes
        low = (self.times - strides) * each
        high = nodes >> low
        # The smaller part is taken out of the larger one: such sets are large, and so is a copy.
        rest = nodes & (1 << low) - 1 if strides > self.times // 2 else nodes - (high << low)
        return rest << strides * each | high if rest else high

    def step(self, step: Step, strides: int) -> Step:
        """What a rank so many strides further does in its place."""

        def moved(span: Span | None) -> Span | None:
            return None if span is None else self.span(span, strides)

        peer = step.peer if step.peer < 0 else self.move(step.peer, strides)
        local = step.local
        if local is not None:
            root = local.root if local.root < 0 else self.move(local.root, strides)
            local = Local(local.kind, root, tuple(map(moved, local.parts)))
        return replace(step, src=moved(step.src), dst=moved(step.dst), peer=peer, local=local)


def everyone(size: int) -> Symmetry:
    """Each rank stands for itself."""
    return Symmetry(tuple((rank,) for rank in range(size)), (1, 1, 1))


def symmetry_of(plans: Sequence[Plan]) -> Symmetry:
    """How the plans of all ranks turn, by as few ranks as they do. Each is asked for, one after another, and not
    kept."""
    size, first = len(plans), plans[0]
    if first.collective in ROOTED or first.collective is Collective.P2P:
        return everyone(size)
    for each in (each for each in range(1, size // 2 + 1) if size % each == 0 and _together(first, each)):
        other = plans[each]
        for blocks in _blocks(first, size // each):
            symmetry = Symmetry(tuple(range(rank, size, each) for rank in range(each)), blocks)
            if Stand(first, symmetry).fits(other, 1):
                return (
                    symmetry if all(_all_fit(plans, symmetry, orbit) for orbit in symmetry.orbits) else everyone(size)
                )
    return everyone(size)


def _all_fit(plans: Sequence[Plan], symmetry: Symmetry, orbit: Sequence[int]) -> bool:
    stand = Stand(plans[orbit[0]], symmetry)
    return all(stand.fits(plans[rank], strides) for strides, rank in enumerate(orbit) if strides > 0)


def _together(plan: Plan, each: int) -> bool:
    """Whether islands move as a whole: those of the ranks that stand for all have no others, and are moved on to the
    islands of the rest, member by member."""
    islands = set(plan.islands)
    for island in plan.islands:
        if len({rank // each for rank in island}) > 1:
            return False
        if tuple((rank + each) % plan.size for rank in island) not in islands:
            return False
    return True


def _blocks(plan: Plan, times: int) -> Iterator[tuple[int, int, int]]:
    """In which blocks the units may turn: shares with their ranks; a buffer that is not cut by rank as a whole, in a
    block for each stretch, in blocks of as many units as it turns times, or not at all."""
    send, recv = plan.send_units, plan.recv_units
    whole = plan.collective in WHOLE
    larger = sorted({recv // plan.stretches, times, 1}, reverse=True) if whole else [max(send, recv)]
    for block in larger:
        if block == 1 or (block % times == 0 and max(send, recv) % block == 0):
            both = (block if send >= recv else 1, block if recv >= send else 1)
            yield (*both, both[plan.scratch_like])


_HEADER = attrgetter(*(each.name for each in fields(Plan) if each.compare and each.name not in ("rank", "steps")))


class Stand:
    """A plan that stands for others, to compare theirs with: there may be millions of steps."""

    def __init__(self, plan: Plan, symmetry: Symmetry) -> None:
        self._plan, self._symmetry, self._header, self._columns = plan, symmetry, _HEADER(plan), plan.columns
        peers = self._columns.peer
        self._messages = peers >= 0
        self._peer_orbits, self._peer_at = symmetry.index[:, peers]
        self._locals, self._spans = _locals(self._columns), self._all_spans(self._columns)
        self._whole = symmetry.blocks is None or self._cut(symmetry.blocks)

    def _cut(self, blocks: tuple[int, int, int]) -> bool:
        """Find where in its block each span is; whether all stay in one piece. What is no message may be of whole
        blocks: then it stays."""
        times, (bufs, starts, counts) = self._symmetry.times, self._spans
        block = np.array([*blocks, 1], self._spans.dtype)[bufs.astype(np.int64)]
        rest = np.ones(len(bufs), np.bool_)
        rest[: 2 * len(self._messages)] = np.tile(~self._messages, 2)
        block = np.where(rest & (starts % block == 0) & (counts % block == 0), 1, block)
        self._at: Numbers = starts % block
        self._part, self._block = block // times, block
        self._first = starts - self._at
        return not bool(np.any((block > 1) & (self._at % np.maximum(self._part, 1) + counts > self._part)))

    def fits(self, other: Plan, strides: int) -> bool:
        """Whether `other` is this plan, moved on by so many strides, and this one stays in one piece wherever it is
        moved."""
        symmetry, mine = self._symmetry, self._columns
        if not self._whole or other.rank != symmetry.move(self._plan.rank, strides) or _HEADER(other) != self._header:
            return False
        theirs, fields, spans = other.columns, mine.fields.copy(), self._spans.copy()
        moved = symmetry.table[self._peer_orbits, (self._peer_at + strides) % symmetry.times]
        fields[Columns.PEER] = np.where(self._messages, moved, mine.peer)
        if symmetry.blocks is not None:
            spans[1] = self._first + (self._at + strides * self._part) % self._block
        pairs = ((fields, theirs.fields), (mine.deps, theirs.deps), (mine.ends, theirs.ends))
        if not all(np.array_equal(a, b) for a, b in (*pairs, (spans, self._all_spans(theirs)))):
            return False
        roots = [(i, kind, root if root < 0 else symmetry.move(root, strides), n) for i, kind, root, n in self._locals]
        return roots == _locals(theirs)

    def _all_spans(self, columns: Columns) -> Numbers:
        """Of a plan, those of the parts of LOCAL steps last, in three rows as `Columns` has them."""
        spans = np.concatenate([columns.src, columns.dst, columns.parts], axis=1)
        if self._symmetry.blocks is None:
            spans[0], spans[1] = spans[0] < 0, 0
        return spans.astype(np.object_) if max(map(self._plan.units, Buf)) >= MOST_NUMBERS else spans


def _locals(columns: Columns) -> list[tuple[int, Collective, int, int]]:
    """The LOCAL steps: which, what, the root, and the number of parts."""
    return [(i, local.kind, local.root, len(local.parts)) for i, local in columns.locals.items()]
