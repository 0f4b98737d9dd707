"""Any algorithm among islands: one member of each runs it, and a vendor's collectives bring the members together.

Islands split a buffer over their members, as in `islands`. The common refinement of all splits are the *atoms*: each
has one owner on every island, and its owners run the algorithm on it among themselves, as ranks 0, 1, ... of as many as
there are islands. So ring, tree, halving and what users write need no drawing of their own here, and every member's
links carry a part at a time. Islands of equal size have an atom a member; of other sizes, whoever owns several atoms
does each of its steps once for each.

Whatever order proves the algorithm alone proves this one, too: every event of it happens for all atoms, in their
order, before its next event does. A FIFO carries message 0 of all atoms that it serves, then message 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from math import lcm

from ...errors import ArgumentError
from ...types import WHOLE, Collective
from ..ir import Buf, Op, Plan, Span, Step
from .base import Algorithm, Draft, inp, out, tmp
from .islands import ISLANDS, Make, Regions, Split

AMONG = (
    Collective.ALLREDUCE, Collective.ALLGATHER, Collective.REDUCE_SCATTER, Collective.BROADCAST, Collective.REDUCE,
)  # fmt: skip
"""The collectives whose algorithms run among islands; others have one way there, that of `islands`."""


@lru_cache(maxsize=256)
def among(entry: Algorithm) -> Algorithm:
    """`entry` among islands, which are the `hosts` of `Algorithm.build`.

    Raises
    ------
    ArgumentError
        Its collective is none of `AMONG`. `build` raises it where `entry` does not support as many islands.
    """
    if entry.collective not in AMONG:
        raise ArgumentError(f"{entry.collective.label} among islands has one way: that of `islands`")
    return Algorithm(entry.name, entry.collective, partial(_draw, entry), turns=entry.turns)


def _draw(entry: Algorithm, p: Draft) -> None:
    if len(p.hosts) == 1:
        ISLANDS[p.collective].draw(p)
        return
    if not entry.supports(len(p.hosts)):
        raise ArgumentError(f"{entry.collective.label} by {entry.name} does not support {len(p.hosts)} islands")
    home = next(i for i, island in enumerate(p.hosts) if p.root in island)
    here = next(i for i, island in enumerate(p.hosts) if p.rank in island)
    later = p.collective is Collective.REDUCE and len(p.hosts[home]) > 1  # the root's mates add to it after this
    flat = entry.build(len(p.hosts), here, root=home, scale=p.average and not later)
    p.credits, p.redundant, p.scratch_like = flat.credits, flat.redundant, flat.scratch_like
    (_Whole if p.collective in WHOLE else _Shares)(p, flat).draw()


@dataclass(frozen=True, slots=True)
class Atom:
    """[start, stop) of a region or whole buffer of `_Steps.common` parts; `owners` has a rank for each island."""

    start: int
    stop: int
    owners: tuple[int, ...]


@lru_cache(maxsize=8)
def _atoms(hosts: tuple[tuple[int, ...], ...]) -> tuple[Atom, ...]:
    sizes = set(map(len, hosts))
    common = lcm(*sizes)
    cuts = sorted({common * j // k for k in sizes for j in range(k + 1)})
    return tuple(Atom(a, b, tuple(island[a * len(island) // common] for island in hosts)) for a, b in pairwise(cuts))


class _Steps:
    """What both kinds of buffers have in common: the steps of `flat`, each for every atom of this rank."""

    def __init__(self, p: Draft, flat: Plan) -> None:
        self.p, self.flat = p, flat
        self.common = lcm(*map(len, p.hosts))
        self.atoms = [atom for atom in _atoms(p.hosts) if p.rank in atom.owners]
        self.lane = flat.lanes  # of LOCAL steps; what comes last has the next
        self.done: list[list[list[int]]] = []  # the steps that each step of `flat` has become, for each atom

    def draw(self) -> None:
        raise NotImplementedError

    def spans(self, atom: Atom, span: Span | None) -> list[Span]:
        """Those of an atom that `span` of the flat plan stands for."""
        raise NotImplementedError

    def regions(self, span: Span) -> Iterable[int]:
        """The regions in which it lies; 0 of a whole buffer."""
        raise NotImplementedError

    def run(self, ready: dict[int, int] | None = None, *, skip: int | None = None) -> None:
        """Add all steps. What reads SEND in a region comes after the step that `ready` has for it. `skip`: copies from
        SEND to RECV are done by that step."""
        ready, waits = ready or {}, dict[int, int]()
        for step in self.flat.steps:
            if skip is not None and step.op is Op.COPY and step.src and step.src.buf is Buf.SEND:
                self.done.append([[skip]] * len(self.atoms))
                waits[step.lane] = skip
                continue
            after = [waits.pop(step.lane, None)]
            for span in (step.src, step.dst):
                if span is not None and span.buf is not Buf.SCRATCH:
                    after += [ready[region] for region in self.regions(span) if region in ready]
            self._each(step, after)

    def _each(self, step: Step, after: list[int | None]) -> None:
        """`step` for each atom, after those that it depends on for the same atom. Where it lies in several regions, it
        is a step for each."""
        rows = [(self.spans(atom, step.src), self.spans(atom, step.dst)) for atom in self.atoms]
        done: list[list[int]] = [[] for _ in rows]
        for part in range(max(map(len, rows[0]))):
            for i, (atom, row) in enumerate(zip(self.atoms, rows, strict=True)):
                src, dst = (spans[part] if spans else None for spans in row)
                peer = atom.owners[step.peer] if step.peer >= 0 else -1
                deps = [*after, *(d for dep in step.deps for d in self.done[dep][i])]
                done[i].append(
                    self.p.add(step.op, step.lane, src=src, dst=dst, peer=peer, channel=step.channel, deps=deps)
                )
        self.done.append(done)

    def writers(self, region: int) -> list[int]:
        """The steps that write RECV in a region."""
        return [
            new
            for step, done in zip(self.flat.steps, self.done, strict=True)
            if step.dst is not None and step.dst.buf is Buf.RECV and region in self.regions(step.dst)
            for steps in done
            for new in steps
        ]


class _Whole(_Steps):
    """All-reduce, broadcast and reduce: an atom is a stretch of the buffer, in as many units as the flat plan has."""

    def __init__(self, p: Draft, flat: Plan) -> None:
        super().__init__(p, flat)
        self.at = Split(p, parts=flat.send_units)
        self.held: Make = inp  # where SEND of the flat plan is
        self.into: Make = out  # where RECV is
        self.shift = 0  # copies of SCRATCH that are in use here

    def spans(self, atom: Atom, span: Span | None) -> list[Span]:
        if span is None:
            return []
        n, each = self.flat.send_units, atom.stop - atom.start
        copy, start = divmod(span.start, n) if span.buf is Buf.SCRATCH else (0, span.start)
        begin, count = atom.start * n + start * each, span.count * each
        if span.buf is Buf.SCRATCH:
            return [tmp((self.shift + copy) * self.at.units + begin, count)]
        return [(self.held if span.buf is Buf.SEND else self.into)(begin, count)]

    def regions(self, span: Span) -> Iterable[int]:
        return (0,)

    def draw(self) -> None:
        p, at = self.p, self.at
        p.scratch_copies = self.flat.scratch_copies
        if p.collective is Collective.REDUCE:
            self._reduce()
            return
        mine = at.intervals(out)[at.j]
        first: int | None = None
        if at.k > 1 and p.collective is Collective.ALLREDUCE:
            first, self.held = p.local(self.lane, Collective.REDUCE_SCATTER, dst=mine, parts=at.intervals(inp)), out
        elif at.k > 1 and p.rank == p.root:
            p.local(self.lane, Collective.BROADCAST, root=p.root, src=inp(0, at.units))
        elif at.k > 1 and at.i == at.home:
            first, self.held = p.local(self.lane, Collective.BROADCAST, root=p.root, dst=out(0, at.units)), out
        self.run({0: first} if first is not None else {})
        if at.k > 1 and (p.collective is Collective.ALLREDUCE or at.i != at.home):
            parts = at.intervals(out)
            p.local(self.lane, Collective.ALLGATHER, src=mine, parts=parts, after=self.writers(0))

    def _reduce(self) -> None:
        """As in `islands`: the root's island adds up to its members' intervals, and reduces to the root."""
        p, at = self.p, self.at
        if at.k > 1:
            self.shift = 1
            p.scratch_copies += 1
        if at.i != at.home:
            ready = {}
            if at.k > 1:
                mine, self.held = at.intervals(tmp)[at.j], tmp
                ready[0] = p.local(self.lane, Collective.REDUCE_SCATTER, dst=mine, parts=at.intervals(inp))
            self.run(ready)
            return
        if at.k > 1:
            self.into = tmp
        self.run()
        if at.k == 1:
            return
        reduced: int | None = None
        before = [step for done in self.done for steps in done for step in steps]
        for j, (term, result) in enumerate(zip(at.intervals(inp), at.intervals(out), strict=True)):
            src = at.intervals(tmp)[j] if j == at.j else term
            dst = result if p.rank == p.root else None
            reduced = p.local(self.lane, Collective.REDUCE, root=p.root, src=src, dst=dst, after=before)
        if p.rank == p.root:
            p.scaled(self.lane + 1, out(0, at.units), reduced)


class _Shares(_Steps):
    """All-gather and reduce-scatter: a share of the flat plan is an island's region, and an atom a stretch of it."""

    def __init__(self, p: Draft, flat: Plan) -> None:
        super().__init__(p, flat)
        self.at = Regions(p, parts=flat.pieces)
        self.larger = Buf.RECV if p.collective is Collective.ALLGATHER else Buf.SEND
        self.scatters = self.larger is Buf.SEND and self.at.k > 1

    def regions(self, span: Span) -> Iterable[int]:
        if span.buf is not self.larger:
            return (self.at.i,)
        each = self.flat.pieces
        return range(span.start // each, (span.start + span.count - 1) // each + 1)

    def spans(self, atom: Atom, span: Span | None) -> list[Span]:
        if span is None:
            return []
        each, size, at = self.flat.pieces, self.p.size * self.at.pieces, self.at
        buf, copy, start, large = span.buf, 0, span.start, span.buf is self.larger
        if buf is Buf.SCRATCH:
            large = self.flat.scratch_like is self.larger
            copy, start = divmod(start, self.flat.units(self.flat.scratch_like))
        if not large:
            start += at.i * each
        found: list[Span] = []
        for u in range(start // each, (start + span.count - 1) // each + 1):
            a, b = max(start, u * each) - u * each, min(start + span.count, (u + 1) * each) - u * each
            found.append(self._place(atom, buf, copy, u, range(a, b), large=large, whole=size))
        return found

    def _place(self, atom: Atom, buf: Buf, copy: int, u: int, units: range, *, large: bool, whole: int) -> Span:
        """Units of the flat share `u` in a buffer, of which SCRATCH has several copies."""
        members, at = self.p.hosts[u], self.at
        k, each = len(members), self.flat.pieces
        length = (atom.stop - atom.start) * k
        share, begin = divmod(atom.start * k * each, at.pieces)
        begin, count = begin + units.start * length, len(units) * length
        wide = members[share] * at.pieces + begin  # in a buffer of all shares
        if buf is Buf.SCRATCH and self.scatters:  # the first copy has what is added up inside
            return tmp((copy + 1) * whole + wide, count)
        if buf is Buf.SCRATCH:
            return tmp(copy * whole + wide, count) if large else tmp(copy * at.pieces + begin, count)
        if buf is Buf.SEND and self.scatters:
            return out(begin, count) if u == at.i else tmp(wide, count)
        return Span(buf, wide if large else begin, count)

    def draw(self) -> None:
        p, at = self.p, self.at
        p.scratch_copies = self.flat.scratch_copies
        if p.collective is Collective.ALLGATHER:
            self._allgather()
            return
        if self.scatters:
            p.scratch_copies += 1
            p.scratch_like = Buf.SEND
        ready: dict[int, int] = {}
        for region in self._order(Buf.SEND, first=True) if self.scatters else ():
            for parts in at.rows(inp, region, merge=True):
                part = parts[at.j]
                dst = None if part is None else tmp(part.start, part.count)
                if region == at.i:
                    dst = out(0, at.pieces)
                ready[region] = p.local(self.lane, Collective.REDUCE_SCATTER, dst=dst, parts=parts)
        self.run(ready)

    def _allgather(self) -> None:
        p, at = self.p, self.at
        own = None
        if at.k > 1:
            shares = [at.share(out, mate) for mate in at.mates]
            own = p.local(self.lane, Collective.ALLGATHER, src=inp(0, at.pieces), parts=shares)
        self.run(skip=own)
        for region in self._order(Buf.RECV, first=False) if at.k > 1 else ():
            if region != at.i:
                came = self.writers(region)
                for parts in at.rows(out, region, merge=True):
                    p.local(self.lane, Collective.ALLGATHER, src=parts[at.j], parts=parts, after=came)

    def _order(self, buf: Buf, *, first: bool) -> list[int]:
        """The regions by the first, or last, step that touches them in `buf`: the same on all members."""
        at: dict[int, int] = {}
        for i, step in enumerate(self.flat.steps):
            for span in (step.src, step.dst):
                for region in self.regions(span) if span is not None and span.buf is buf else ():
                    at.setdefault(region, i)
                    at[region] = at[region] if first else i
        return sorted(at, key=lambda region: (at[region], region))
