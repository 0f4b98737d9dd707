"""Any algorithm among islands: one member of each runs it, and a vendor's collectives bring the members together.

Islands split a buffer over their members, as in `islands`, and the owners of an atom run the algorithm on it among
themselves (`atoms`). So ring, tree, halving and what users write need no drawing of their own here, and every member's
links carry a part at a time.
"""

from __future__ import annotations

from functools import lru_cache, partial

import numpy as np

from ...errors import ArgumentError
from ...types import WHOLE, Collective
from ..ir import Buf, Plan
from ..steps import Ints, distinct
from .atoms import AMONG, Shares, Steps, Whole, atoms_of
from .base import Algorithm, Draft, inp, out, tmp
from .islands import ISLANDS, Split
from .regions import Regions


@lru_cache(maxsize=256)
def among(entry: Algorithm) -> Algorithm:
    """`entry` among islands, which are the `hosts` of `Algorithm.build`.

    Raises
    ------
    ArgumentError
        Its collective is none of `AMONG`, or it is for shares of one length. `build` raises it where `entry` does not
        support as many islands.
    """
    if entry.collective not in AMONG:
        raise ArgumentError(f"{entry.collective.label} among islands has one way: that of `islands`")
    if entry.equal:
        raise ArgumentError(f"{entry.collective.label} by {entry.name} is for shares of one length, not among islands")
    return Algorithm(entry.name, entry.collective, partial(_draw, entry), flat=entry)


def _draw(entry: Algorithm, p: Draft) -> None:
    if len(p.hosts) == 1:
        ISLANDS[p.collective].draw(p)
        return
    if not entry.supports(len(p.hosts)):
        raise ArgumentError(f"{entry.collective.label} by {entry.name} does not support {len(p.hosts)} islands")
    home, here = p.there.of[p.root], p.there.of[p.rank]
    later = p.collective is Collective.REDUCE and len(p.hosts[home]) > 1  # the root's mates add to it after this
    flat = entry.build(len(p.hosts), here, root=home, scale=p.average and not later)
    p.credits, p.redundant, p.scratch_like = flat.credits, flat.redundant, flat.scratch_like
    (_Whole if p.collective in WHOLE else _Shares)(p, flat).draw()


class _Inside(Steps):
    """LOCAL steps bring regions together: `ready` has the last one of each."""

    ready: Ints

    def run(self, *, skip: int | None = None) -> None:
        """As of all `Steps`: what one of the flat plan has become is a batch."""
        super().run(skip=skip)
        many = np.flatnonzero(self.count > 1)
        self.p.batches += zip(self.begin[many].tolist(), self.count[many].tolist(), strict=True)

    def before(self) -> tuple[Ints, Ints, Ints]:
        rows = [self.regions(np.where(x[0] == Buf.SCRATCH, -1, x)) for x in (self.steps.src, self.steps.dst)]
        (steps, regions), a = map(np.concatenate, zip(*rows, strict=True)), len(self.atoms)
        return np.repeat(steps, a), np.tile(np.arange(a), steps.size), np.repeat(self.ready[regions], a)

    def writers(self) -> dict[int, list[int]]:
        """The steps that write RECV, by region: of what a step of the flat plan has become, which is of one lane, the
        last. There may be a thousand, of a thousand regions."""
        steps, regions = self.regions(np.where(self.steps.dst[0] == Buf.RECV, self.steps.dst, -1))
        found: dict[int, list[int]] = {region: [] for region in range(len(self.p.hosts))}
        last = self.begin[steps] + np.maximum(self.count[steps], 1) - 1
        for step, region in zip(last.tolist(), regions.tolist(), strict=True):
            found[region].append(step)
        return found


class _Whole(_Inside, Whole):
    def __init__(self, p: Draft, flat: Plan) -> None:
        super().__init__(p, flat, atoms_of(p.there), p.there.common)
        self.at, self.ready = Split(p, parts=flat.send_units), np.full(1, -1)

    def draw(self) -> None:
        p, at = self.p, self.at
        p.scratch_copies = self.flat.scratch_copies
        if p.collective is Collective.REDUCE:
            self._reduce()
            return
        mine = at.intervals(out)[at.j]
        first: int | None = None
        if at.k > 1 and p.collective is Collective.ALLREDUCE:
            first, self.held = (
                p.local(self.lane, Collective.REDUCE_SCATTER, dst=mine, parts=at.intervals(inp)),
                Buf.RECV,
            )
        elif at.k > 1 and p.rank == p.root:
            p.local(self.lane, Collective.BROADCAST, root=p.root, src=inp(0, at.units))
        elif at.k > 1 and at.i == at.home:
            first, self.held = p.local(self.lane, Collective.BROADCAST, root=p.root, dst=out(0, at.units)), Buf.RECV
        self.ready[0] = -1 if first is None else first
        self.run()
        if at.k > 1 and (p.collective is Collective.ALLREDUCE or at.i != at.home):
            parts = at.intervals(out)
            p.local(self.lane, Collective.ALLGATHER, src=mine, parts=parts, after=self.writers()[0])

    def _reduce(self) -> None:
        """As in `islands`: the root's island adds up to its members' intervals, and reduces to the root."""
        p, at = self.p, self.at
        if at.k > 1:
            self.shift = 1
            p.scratch_copies += 1
        if at.i != at.home:
            if at.k > 1:
                mine, self.held = at.intervals(tmp)[at.j], Buf.SCRATCH
                self.ready[0] = p.local(self.lane, Collective.REDUCE_SCATTER, dst=mine, parts=at.intervals(inp))
            self.run()
            return
        if at.k > 1:
            self.into = Buf.SCRATCH
        self.run()
        if at.k == 1:
            return
        reduced: int | None = None
        before = range(len(p.lanes))
        for j, (term, result) in enumerate(zip(at.intervals(inp), at.intervals(out), strict=True)):
            src = at.intervals(tmp)[j] if j == at.j else term
            dst = result if p.rank == p.root else None
            reduced = p.local(self.lane, Collective.REDUCE, root=p.root, src=src, dst=dst, after=before)
        if p.rank == p.root:
            p.scaled(self.lane + 1, out(0, at.units), reduced)


class _Shares(_Inside, Shares):
    def __init__(self, p: Draft, flat: Plan) -> None:
        super().__init__(p, flat, atoms_of(p.there), p.there.common)
        self.at, self.ready = Regions(p, parts=flat.pieces), np.full(len(p.hosts), -1)

    def draw(self) -> None:
        p, at = self.p, self.at
        p.scratch_copies = self.flat.scratch_copies
        if p.collective is Collective.ALLGATHER:
            self._allgather()
            return
        if self.scatters:
            p.scratch_copies += 1
            p.scratch_like = Buf.SEND
        for region in self._order(Buf.SEND, first=True) if self.scatters else ():
            for parts in at.rows(inp, region, merge=True):
                part = parts[at.j]
                dst = None if part is None else tmp(part.start, part.count)
                if region == at.i:
                    dst = out(0, at.pieces)
                self.ready[region] = p.local(self.lane, Collective.REDUCE_SCATTER, dst=dst, parts=parts)
        self.run()

    def _allgather(self) -> None:
        p, at = self.p, self.at
        own = None
        if at.k > 1:
            own = p.local(self.lane, Collective.ALLGATHER, src=inp(0, at.pieces), parts=at.shares(out))
        self.run(skip=own)
        writers = self.writers()
        for region in self._order(Buf.RECV, first=False) if at.k > 1 else ():
            if region != at.i:
                came = writers[region]
                for parts in at.rows(out, region, merge=True):
                    p.local(self.lane, Collective.ALLGATHER, src=parts[at.j], parts=parts, after=came)

    def _order(self, buf: Buf, *, first: bool) -> list[int]:
        """The regions by the first, or last, step that touches them in `buf`: the same on all members."""
        rows = [self.regions(np.where(x[0] == buf, x, -1)) for x in (self.steps.src, self.steps.dst)]
        steps, regions = map(np.concatenate, zip(*rows, strict=True))
        at = np.full(len(self.p.hosts), len(self.steps) if first else -1)
        (np.minimum if first else np.maximum).at(at, regions, steps)
        found = distinct(regions)[0]
        order: list[int] = found[np.lexsort((found, at[found]))].tolist()
        return order
