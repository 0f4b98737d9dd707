"""Sets of plans in which ranks do the same as others, but for which ranks and units they do it with.

`turning` finds such a set of plans, and compares every plan with the one that stands for it: nothing is believed. Then
a few ranks stand for all. What another rank does is what its stand-in does, moved on: `Turn` says how.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from ...types import ROOTED, WHOLE, Collective
from ..ir import Buf, Local, Plan, Span, Step


class Turn(NamedTuple):
    """A set of plans that stays the same where all ranks are moved on, `each` ranks at a time, `times` times round.

    Units move with them, in `blocks` of so many units of each buffer, by one part in `times`; in blocks of 1 they stay.
    """

    each: int
    times: int
    blocks: tuple[int, int, int]

    def move(self, rank: int, strides: int) -> int:
        """The rank so many strides further."""
        return (rank + strides * self.each) % (self.times * self.each)

    def ranks(self, rank: int) -> range:
        """A rank that stands for others, and these."""
        return range(rank, self.each * self.times, self.each)

    def unit(self, buf: Buf, unit: int, strides: int) -> int:
        """Where a unit has moved to."""
        block = self.blocks[buf]
        first = unit // block * block
        return first + (unit - first + strides * (block // self.times)) % block

    def span(self, span: Span, strides: int) -> Span:
        """Where a span has moved to. One of whole blocks stays, as a set of units."""
        start = span.start if self.stays(span) else self.unit(span.buf, span.start, strides)
        return Span(span.buf, start, span.count)

    def bits(self, nodes: int, strides: int, each: int) -> int:
        """A bit set of nodes, as a rank sees it from which the rank whose set it is lies so many strides further.

        The first `each` bits are the nodes of the ranks from where one sees them, the next ones those a stride further.
        """
        strides %= self.times
        if strides == 0 or nodes == 0:
            return nodes
        low = (self.times - strides) * each
        return (nodes & (1 << low) - 1) << strides * each | nodes >> low

    def units(self, buf: Buf, unit: int) -> list[int]:
        """Where a unit is after each number of strides."""
        block = self.blocks[buf]
        first = unit // block * block
        at, part = unit - first, block // self.times
        return [first + (at + strides * part) % block for strides in range(self.times)]

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

    def stays(self, span: Span) -> bool:
        """Whether it consists of whole blocks, and so has the same units wherever it is moved."""
        block = self.blocks[span.buf]
        return block > 1 and span.start % block == 0 and span.count % block == 0


def alone(size: int) -> Turn:
    """Each rank stands for itself."""
    return Turn(size, 1, (1, 1, 1))


def turning(plans: Sequence[Plan]) -> Turn:
    """How the plans turn, by as few ranks as they do. Each plan is asked for, one after another, and not kept."""
    size, first = len(plans), plans[0]
    if first.collective in ROOTED or first.collective is Collective.P2P:
        return alone(size)
    stand = _Stand(first)
    for each in range(1, size // 2 + 1):
        if size % each == 0 and stand.resembles(other := plans[each]) and _together(first, each):
            for blocks in _blocks(first, size // each):
                turn = Turn(each, size // each, blocks)
                if stand.turned(turn) and stand.fits(other, 1):
                    return turn if _all_fit(plans, turn, stand) else alone(size)
    return alone(size)


def _all_fit(plans: Sequence[Plan], turn: Turn, stand: _Stand) -> bool:
    for rank in range(turn.each):
        if rank > 0:
            stand = _Stand(plans[rank])
            if not stand.turned(turn):
                return False
        for strides in range(1, turn.times):
            other = plans[rank + strides * turn.each]
            if not stand.resembles(other) or not stand.fits(other, strides):
                return False
    return True


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


_SAME = attrgetter("op", "lane", "channel", "deps", "compressed")
_SRC, _DST, _PEER = attrgetter("src"), attrgetter("dst"), attrgetter("peer")
_START, _COUNT, _BUF = attrgetter("start"), attrgetter("count"), attrgetter("buf")
_HEADER = attrgetter(*(name for name in Plan.__dataclass_fields__ if name not in ("rank", "steps")))


class _Stand:
    """A plan that stands for others, in columns to compare theirs with: there may be millions of steps."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._header, self._same = _HEADER(plan), list(map(_SAME, plan.steps))

    def resembles(self, other: Plan) -> bool:
        """Whether `other` is alike but for peers and spans."""
        return list(map(_SAME, other.steps)) == self._same and _HEADER(other) == self._header

    def turned(self, turn: Turn) -> bool:
        """Let it stand for those that `fits` is asked for; whether its spans stay in one piece."""
        plan = self._plan
        spans, peers = _spans(plan), list(map(_PEER, plan.steps))
        rests = [*(peer < 0 for peer in (*peers, *peers)), *[True] * (len(spans) - 2 * len(peers))]
        self._turn, self._locals, self._peers = turn, _locals(plan), peers
        self._none = [span is None for span in spans]
        self._starts = list[tuple[int, int, int, int]]()
        for span, rest in zip(spans, rests, strict=True):
            if span is not None:
                block = 1 if rest and turn.stays(span) else turn.blocks[span.buf]
                at, part = span.start % block, block // turn.times
                if block > 1 and at % part + span.count > part:
                    return False
                self._starts.append((span.start - at, at, part, block))
        kept = [span for span in spans if span is not None]
        self._counts, self._bufs = list(map(_COUNT, kept)), list(map(_BUF, kept))
        return True

    def fits(self, other: Plan, strides: int) -> bool:
        """Whether `other`, which resembles this plan, is this plan, moved on by so many strides."""
        size, turn = self._plan.size, self._turn
        if other.rank != turn.move(self._plan.rank, strides):
            return False
        by = strides * turn.each
        if [peer if peer < 0 else (peer + by) % size for peer in self._peers] != list(map(_PEER, other.steps)):
            return False
        spans = _spans(other)
        kept = [span for span in spans if span is not None]
        starts = [first + (at + strides * part) % block for first, at, part, block in self._starts]
        if starts != list(map(_START, kept)) or [span is None for span in spans] != self._none:
            return False
        if list(map(_COUNT, kept)) != self._counts or list(map(_BUF, kept)) != self._bufs:
            return False
        moved = [(i, kind, root if root < 0 else turn.move(root, strides), n) for i, kind, root, n in self._locals]
        return moved == _locals(other)


def _spans(plan: Plan) -> list[Span | None]:
    parts = [part for step in plan.steps if step.local is not None for part in step.local.parts]
    return [*map(_SRC, plan.steps), *map(_DST, plan.steps), *parts]


def _locals(plan: Plan) -> list[tuple[int, Collective, int, int]]:
    """The LOCAL steps: which, what, the root, and the number of parts."""
    locals = [(i, step.local) for i, step in enumerate(plan.steps) if step.local is not None]
    return [(i, local.kind, local.root, len(local.parts)) for i, local in locals]
