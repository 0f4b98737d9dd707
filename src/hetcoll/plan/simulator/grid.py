"""The cells of memory: what lies between two points at which a span of any rank begins or ends.

Units are a common denominator, of which there may be any number; cells are as few as the plans need. Buffers that a
rank's share is a part of are cut alike on all ranks, and a share is cut where it lies in them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...types import WHOLE, Collective
from ..ir import Buf, Plan, Span
from ..symmetry import Symmetry

_ALIKE = (Collective.GATHER, Collective.SCATTER, Collective.ALLTOALL)  # messages may bring a part of any share to any


class Grid:
    """One rank's part of it. `points` are the units at which the cells of SEND and RECV begin, and the ends."""

    def __init__(self, plan: Plan, larger: Sequence[int], numbers: dict[int, int]) -> None:
        self._like, self._whole = plan.scratch_like, plan.units(plan.scratch_like)
        place, small = plan.place, min(plan.send_units, plan.recv_units)
        first, last = numbers[place], numbers[place + small]
        smaller = [at - place for at in larger[first : last + 1]]
        inside = {at: i for i, at in enumerate(smaller)}
        self.mine = slice(first, last)
        if plan.send_units == plan.recv_units:
            self.points, self._numbers = (larger, larger), (numbers, numbers)
        elif plan.send_units > plan.recv_units:
            self.points, self._numbers = (larger, smaller), (numbers, inside)
        else:
            self.points, self._numbers = (smaller, larger), (inside, numbers)
        self.copies = plan.scratch_copies

    def cells(self, buf: Buf) -> int:
        """How many there are of a buffer."""
        if buf is Buf.SCRATCH:
            return self.copies * self.cells(self._like)
        return len(self.points[buf]) - 1

    def where(self, span: Span) -> tuple[int, int]:
        """The first cell of a span in its buffer, and the one behind its last."""
        if span.buf is not Buf.SCRATCH:
            number = self._numbers[span.buf]
            return number[span.start], number[span.start + span.count]
        copy, start = divmod(span.start, self._whole)
        number, before = self._numbers[self._like], copy * self.cells(self._like)
        return before + number[start], before + number[start + span.count]


def grids(plans: Sequence[Plan], symmetry: Symmetry | None = None) -> list[Grid]:
    """The grid of each rank; with `symmetry`, of those that stand for all."""
    first = plans[0]
    if first.collective is Collective.P2P:  # each rank has units of its own
        return [_even(plan) for plan in plans]
    if first.stretches > 1:  # units of different stretches may be alike
        return [_even(first)] * len(plans)
    units = max(first.send_units, first.recv_units)
    points = {0, units}
    for plan in plans:
        points.update(plan.points()[plan.send_units < plan.recv_units])
    larger_one = Buf.RECV if first.send_units < first.recv_units else Buf.SEND
    block = symmetry.blocks[larger_one] if symmetry is not None and symmetry.blocks else 1
    if symmetry is not None and block > 1:  # cut all parts of a block alike
        part = block // symmetry.times
        inner = {(point // block * block, point % part) for point in points - {units}} | {(0, 0)}
        points.update(point for begin, at in inner for point in range(begin + at, begin + block, part))
    if first.collective not in WHOLE:
        share = first.pieces
        inside = {point % share for point in points} if first.collective in _ALIKE else {0}
        points.update(begin + at for begin in range(0, units, share) for at in inside)
    larger = sorted(points)
    numbers = {at: i for i, at in enumerate(larger)}
    return [Grid(plan, larger, numbers) for plan in plans]


def _even(plan: Plan) -> Grid:
    larger = range(max(plan.send_units, plan.recv_units) + 1)
    return Grid(plan, larger, {at: at for at in larger})
