"""The steps of an algorithm among groups of ranks: one member of each group runs them on a part of the buffer.

Groups split a buffer over their members. The common refinement of all splits are the *atoms*: each has one owner in
every group, and its owners run the algorithm on it among themselves, as ranks 0, 1, ... of as many as there are groups.
Groups of equal size have an atom a member; of other sizes, whoever owns several atoms does each step once for each.

Whatever order proves the algorithm alone proves this one, too: every event of it happens for all atoms, in their
order, before its next event does. A FIFO carries message 0 of all atoms that it serves, then message 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from ...types import Collective
from ..ir import Buf, Op, Plan, Span, Step
from .base import Draft, Groups, inp, out, tmp

AMONG = (
    Collective.ALLREDUCE, Collective.ALLGATHER, Collective.REDUCE_SCATTER, Collective.BROADCAST, Collective.REDUCE,
)  # fmt: skip
"""The collectives whose algorithms run among islands or hosts; others have one way there."""

Make = Callable[[int, int], Span]  # inp, out or tmp


@dataclass(frozen=True, slots=True)
class Atom:
    """[start, stop) of a region or whole buffer of as many parts as the groups' sizes have in common; `owners` has a
    rank for each group."""

    start: int
    stop: int
    owners: tuple[int, ...]


@lru_cache(maxsize=8)
def atoms_of(there: Groups) -> tuple[Atom, ...]:
    groups, common = there.ranks, there.common
    sizes = set(map(len, groups))
    cuts = sorted({common * j // k for k in sizes for j in range(k + 1)})
    return tuple(Atom(a, b, tuple(group[a * len(group) // common] for group in groups)) for a, b in pairwise(cuts))


class Steps:
    """The steps of `flat`, each for every atom of this rank, of `everyone`'s; all atoms have `common` parts."""

    def __init__(self, p: Draft, flat: Plan, everyone: tuple[Atom, ...], common: int) -> None:
        self.p, self.flat, self.common, self.everyone = p, flat, common, everyone
        self.here = p.there.of[p.rank]
        self.atoms = [atom for atom in everyone if atom.owners[self.here] == p.rank]
        self.mates = p.hosts[self.here]
        self.lane = flat.lanes  # the first that it has not
        self.done: list[list[list[int]]] = []  # the steps that each step of `flat` has become, for each atom

    def spans(self, atom: Atom, span: Span | None) -> list[Span]:
        """Those of an atom that `span` of the flat plan stands for."""
        raise NotImplementedError

    def regions(self, span: Span) -> Iterable[int]:
        """The groups in whose regions it lies; 0 of a whole buffer."""
        raise NotImplementedError

    def before(self, i: int, step: Step) -> Iterable[int]:
        """The steps that bring together, for the i-th atom, what a step of the flat plan touches."""
        raise NotImplementedError

    def run(self, *, skip: int | None = None) -> None:
        """Add all steps. `skip`: copies from SEND to RECV are done by that step."""
        waits = dict[int, int]()
        for step in self.flat.steps:
            if skip is not None and step.op is Op.COPY and step.src and step.src.buf is Buf.SEND:
                self.done.append([[skip]] * len(self.atoms))
                waits[step.lane] = skip
                continue
            self._each(step, waits.pop(step.lane, None))

    def _each(self, step: Step, first: int | None) -> None:
        """`step` for each atom, after those that it depends on for the same atom. Where it lies in several regions, it
        is a step for each."""
        rows = [(self.spans(atom, step.src), self.spans(atom, step.dst)) for atom in self.atoms]
        done: list[list[int]] = [[] for _ in rows]
        for part in range(max(map(len, rows[0])) if rows else 0):
            for i, (atom, row) in enumerate(zip(self.atoms, rows, strict=True)):
                src, dst = (spans[part] if spans else None for spans in row)
                peer = atom.owners[step.peer] if step.peer >= 0 else -1
                deps = [first, *self.before(i, step), *(d for dep in step.deps for d in self.done[dep][i])]
                done[i].append(
                    self.p.add(
                        step.op, step.lane, src=src, dst=dst, peer=peer, channel=step.channel, deps=deps,
                        compressed=step.compressed,
                    )
                )  # fmt: skip
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


class Whole(Steps):
    """All-reduce, broadcast and reduce: an atom is a stretch of the buffer, in as many units as the flat plan has."""

    def __init__(self, p: Draft, flat: Plan, everyone: tuple[Atom, ...], common: int) -> None:
        super().__init__(p, flat, everyone, common)
        self.units = p.units = common * flat.send_units
        self.held: Make = inp  # where SEND of the flat plan is
        self.into: Make = out  # where RECV is
        self.shift = 0  # copies of SCRATCH that are in use here

    def spans(self, atom: Atom, span: Span | None) -> list[Span]:
        if span is None:
            return []
        if span.buf is Buf.SCRATCH:
            copy, start = divmod(span.start, self.flat.send_units)
            found = self.stretch(tmp, atom, Span(span.buf, start, span.count))
            return [tmp((self.shift + copy) * self.units + found.start, found.count)]
        return [self.stretch(self.held if span.buf is Buf.SEND else self.into, atom, span)]

    def stretch(self, make: Make, atom: Atom, span: Span) -> Span:
        """What units of the flat plan are in a buffer of `p`."""
        each = atom.stop - atom.start
        return make(atom.start * self.flat.send_units + span.start * each, span.count * each)

    def regions(self, span: Span) -> Iterable[int]:
        return (0,)


class Shares(Steps):
    """All-gather and reduce-scatter: a share of the flat plan is a group's region, and an atom a stretch of it."""

    def __init__(self, p: Draft, flat: Plan, everyone: tuple[Atom, ...], common: int) -> None:
        super().__init__(p, flat, everyone, common)
        self.pieces = p.pieces = common * flat.pieces
        self.larger = Buf.RECV if p.collective is Collective.ALLGATHER else Buf.SEND
        self.scatters = self.larger is Buf.SEND and len(self.mates) > 1  # what is added up inside is in scratch
        self.shift = int(self.scatters)  # copies of SCRATCH that are in use here

    def regions(self, span: Span) -> Iterable[int]:
        if span.buf is not self.larger:
            return (self.here,)
        each = self.flat.pieces
        return range(span.start // each, (span.start + span.count - 1) // each + 1)

    def parts(self, span: Span) -> tuple[int, bool, list[tuple[int, range]]]:
        """Which copy of SCRATCH a span of the flat plan is in, whether of all regions, and its units by region."""
        each, copy, start, large = self.flat.pieces, 0, span.start, span.buf is self.larger
        if span.buf is Buf.SCRATCH:
            large = self.flat.scratch_like is self.larger
            copy, start = divmod(start, self.flat.units(self.flat.scratch_like))
        if not large:
            start += self.here * each
        regions = range(start // each, (start + span.count - 1) // each + 1)
        rows = [(u, range(max(start - u * each, 0), min(start + span.count - u * each, each))) for u in regions]
        return copy, large, rows

    def spans(self, atom: Atom, span: Span | None) -> list[Span]:
        if span is None:
            return []
        copy, large, rows = self.parts(span)
        return [self._place(atom, span.buf, copy, u, units, large=large) for u, units in rows]

    def wide(self, atom: Atom, u: int, units: range) -> tuple[int, int]:
        """Where units of the flat share `u` begin in a buffer of all shares, and how many they are there."""
        members = self.p.hosts[u]
        length = (atom.stop - atom.start) * len(members)
        share, begin = divmod(atom.start * len(members) * self.flat.pieces, self.pieces)
        return members[share] * self.pieces + begin + units.start * length, len(units) * length

    def _place(self, atom: Atom, buf: Buf, copy: int, u: int, units: range, *, large: bool) -> Span:
        """Units of the flat share `u` in a buffer, of which SCRATCH has several copies."""
        whole = self.p.size * self.pieces
        wide, count = self.wide(atom, u, units)
        begin = wide % self.pieces
        if buf is Buf.SCRATCH and self.scatters:
            return tmp((copy + self.shift) * whole + wide, count)
        if buf is Buf.SCRATCH:
            return tmp(copy * whole + wide, count) if large else tmp(copy * self.pieces + begin, count)
        if buf is Buf.SEND and self.scatters:
            return out(begin, count) if u == self.here else tmp(wide, count)
        return Span(buf, wide if large else begin, count)
