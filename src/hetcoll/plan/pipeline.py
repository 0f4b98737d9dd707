"""Pipelining: plans whose messages are cut into pieces that fit a slot.

The engine streams a message of any length through a channel's slots by itself. A device cannot: what it does is
enqueued before it runs, one operation a piece. `pipelined` therefore draws the pieces into the plan. Every piece is the
whole algorithm on a part of the data, and a lane runs all pieces of its first step, then all of its second: pieces of
different steps overlap as far as lanes, deps and messages allow, and what `simulator.check` proves of a plan it proves
of its pieces. Steps of one batch (`Plan.batches`) take turns: else who owns two parts of the data, and shares each with
another rank, would keep the second one waiting for all of the first, and that one its own next part, and so on.

    cuts = ramp(length, slot // smallest)                           small at both ends, to fill and drain quickly
    plan = pipelined(plans, cuts)[rank]

`pieces` says how many parts of which size there are, and how they are aligned.

Examples
--------
>>> ramp(16, 4)
(0, 1, 3, 6, 9, 13, 15, 16)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, zip_longest
from typing import NamedTuple

import numpy as np

from ..errors import ArgumentError
from ..types import WHOLE, Collective
from .ir import Local, Op, Plan, Span, Step
from .simulator import follows
from .steps import Ints

Parts = tuple[Span | None, ...]


def ramp(length: int, most: int) -> tuple[int, ...]:
    """Cuts of `length` parts into pieces of 1, 2, 4, ... and at most `most` parts, then down again to 1.

    Returns
    -------
    Rising offsets from 0 to `length`. One and two parts stay one piece, where `most` allows it.
    """
    if length < 1 or most < 1:
        raise ArgumentError(f"wanted at least one part, and one in a piece, got {length} and {most}")
    rise: list[int] = []
    size = 1
    while size < most and 2 * (sum(rise) + size) + size <= length:
        rise.append(size)
        size *= 2
    middle = length - 2 * sum(rise)
    pieces = -(-middle // most)
    level = [middle * (i + 1) // pieces - middle * i // pieces for i in range(pieces)]
    return (0, *accumulate([*rise, *level, *reversed(rise)]))


def share_units(plan: Plan) -> int:
    """Units of what lies in one piece in a buffer: a share, or all of it where it is not cut by rank."""
    return max(1, plan.send_units, plan.recv_units) if plan.collective in WHOLE else plan.pieces


def pipelined(plans: Sequence[Plan], cuts: Sequence[int], most: int | None = None) -> list[Plan]:
    """The plans of all ranks with every message cut into pieces.

    Parameters
    ----------
    plans
        Of all ranks, in rank order, or of those that stand for all (`Symmetry`); those of a barrier carry nothing
        and stay as they are.
    cuts
        Rising offsets from 0 to the number of parts, one piece between two of them (see `ramp`). Each unit is cut into
        that many units. Piece i is a stretch of the whole buffer where buffers are not cut by rank (all-reduce,
        broadcast, reduce), else a stretch of every share.
    most
        Parts of a piece that a message holds. Messages of longer pieces are cut again, where LOCAL steps stay whole: a
        vendor's library wants longer pieces than a slot holds.

    Raises
    ------
    ArgumentError
        `cuts` does not rise from 0.
    """
    if len(cuts) < 2 or cuts[0] != 0 or any(a >= b for a, b in pairwise(cuts)):
        raise ArgumentError(f"wanted rising cuts from 0 on, got {tuple(cuts)}")
    longest, shared = longest_message(plans), _Shared()
    return [_pipelined(plan, cuts, most, longest, shared).plan for plan in plans]


class Pieces(NamedTuple):
    """A plan in pieces. `origins` has four rows: of each step the one that it was, the number of the piece, that of the
    share of it, and that of the message of this."""

    plan: Plan
    origins: Ints


def in_pieces(plan: Plan, cuts: Sequence[int], most: int, longest: int) -> Pieces:
    """One rank's, where the longest message of all ranks has so many units."""
    return _pipelined(plan, cuts, most, longest, _Shared())


def longest_message(plans: Sequence[Plan]) -> int:
    """Units of the longest message, of which shares go one by one."""
    longest = 1
    for columns in (plan.columns for plan in plans):
        counts = np.where(columns.src[0] < 0, columns.dst[2], columns.src[2])[columns.peer >= 0]
        longest = max(longest, int(counts.max(initial=0)))
    return min(share_units(plans[0]), longest)


class _Shared:
    """What `_cut` makes of the parts of LOCAL steps, once where the members of an island have the very same ones."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int, int], list[Parts]] = {}

    def rows(self, plan: Plan, parts: Parts, begin: int, end: int, n: int) -> list[Parts]:
        key = (id(parts), begin, end)  # the plans keep them
        if key not in self._rows:
            self._rows[key] = list(zip_longest(*(_cut(plan, part, begin, end, n) for part in parts)))
        return self._rows[key]


def _pipelined(plan: Plan, cuts: Sequence[int], most: int | None, longest: int, shared: _Shared) -> Pieces:
    if cuts[-1] == 1 or plan.collective is Collective.BARRIER:
        return Pieces(plan, np.stack([np.arange(len(plan.steps)), *[np.zeros(len(plan.steps), np.int64)] * 3]))
    n = cuts[-1]
    most = (most or n) * longest
    steps: list[Step] = []
    origins: list[tuple[int, int, int, int]] = []
    pieces: dict[int, list[list[list[int]]]] = {}  # of each old step, of each piece, of each share: its new steps
    for together in _batches(plan) if len(cuts) > 2 else ([i] for i in range(len(plan.steps))):
        pieces.update((old, []) for old in together)
        # Of the steps that one piece of another became, a share follows its own, if it may, else the last.
        waits = {
            old: [(pieces[d], follows(plan, plan.steps[d], plan.steps[old])) for d in plan.steps[old].deps]
            for old in together
        }
        for k, (begin, end) in enumerate(pairwise(cuts)):
            for old in together:
                step = plan.steps[old]
                mine: list[list[int]] = []
                for i, (src, dst, local) in enumerate(_piece(plan, step, begin, end, n, shared)):
                    messages = _messages(step, src, dst, most)
                    mine.append(list(range(len(steps), len(steps) + len(messages))))
                    befores = [first[k][i] if follow else first[k][-1][-1:] for first, follow in waits[old]]
                    for j, (part, into) in enumerate(messages):
                        deps = {one[j] if len(one) == len(messages) else one[-1] for one in befores}
                        after = tuple(sorted(deps)) if deps else ()
                        steps.append(
                            Step(step.op, step.lane, part, into, step.peer, step.channel, after, local, step.compressed)
                        )
                        origins.append((old, k, i, j))
                pieces[old].append(mine)
    made = replace(
        plan,
        steps=tuple(steps),
        send_units=plan.send_units * n,
        recv_units=plan.recv_units * n,
        pieces=plan.pieces if plan.collective in WHOLE else plan.pieces * n,
        batches=(),
    )
    return Pieces(made, np.array(origins, np.int64).reshape(-1, 4).T)


def _batches(plan: Plan) -> list[list[int]]:
    """The steps in an order, those together whose pieces take turns: the plan's batches, and LOCAL steps of which only
    the first waits.

    Else all pieces of one would be through before the first of the next, which is ready no later. The members of an
    island batch alike, since the same LOCAL steps wait on all of them.
    """
    batches: list[list[int]] = []
    last: list[int] | None = None  # batch of LOCAL steps
    ends, turns = {first: first + count for first, count in plan.batches}, 0
    for i, step in enumerate(plan.steps):
        if i < turns:
            continue
        if step.op is Op.LOCAL and not step.deps and last is not None:
            last.append(i)
            continue
        turns = ends.get(i, i + 1)
        batches.append([*range(i, turns)])
        if step.op is Op.LOCAL:
            last = batches[-1]
    return batches


def _piece(
    plan: Plan, step: Step, begin: int, end: int, n: int, shared: _Shared
) -> list[tuple[Span | None, Span | None, Local | None]]:
    """What the parts [begin, end) of n are of a step: of one for each share that its longest span touches, src, dst and
    what it is of a vendor's collective."""
    local, spans = step.local, (_cut(plan, step.src, begin, end, n), _cut(plan, step.dst, begin, end, n))
    if local is None:
        return [(src, dst, None) for src, dst in zip_longest(*spans)] or [(step.src, step.dst, None)]
    rows = zip_longest(*spans, shared.rows(plan, local.parts, begin, end, n) if local.parts else ())
    nothing = (None,) * len(local.parts)
    return [(src, dst, replace(local, parts=row or nothing)) for src, dst, row in rows] or [(step.src, step.dst, local)]


def _cut(plan: Plan, span: Span | None, begin: int, end: int, n: int) -> list[Span]:
    """What the parts [begin, end) of n are of a span: one span for each share that it touches."""
    if span is None:
        return []
    share = share_units(plan)
    spans = []
    unit, last = span.start, span.start + span.count
    while unit < last:
        stop = min(last, (unit // share + 1) * share)
        start = unit // share * share * n + begin * share + unit % share * (end - begin)
        spans.append(Span(span.buf, start, (stop - unit) * (end - begin)))
        unit = stop
    return spans


def _messages(step: Step, src: Span | None, dst: Span | None, most: int) -> list[tuple[Span | None, Span | None]]:
    """These, or where they are of a message of more than `most` units, those of several."""
    span = src or dst
    if step.peer < 0 or span is None or span.count <= most:
        return [(src, dst)]
    cuts = [span.count * i // -(-span.count // most) for i in range(-(-span.count // most) + 1)]
    return [(_part(src, a, b), _part(dst, a, b)) for a, b in pairwise(cuts)]


def _part(span: Span | None, begin: int, end: int) -> Span | None:
    return None if span is None else Span(span.buf, span.start + begin, end - begin)
