"""The steps of an algorithm among groups of ranks: one member of each group runs them on a part of the buffer.

Groups split a buffer over their members. The common refinement of all splits are the *atoms*: each has one owner in
every group, and its owners run the algorithm on it among themselves, as ranks 0, 1, ... of as many as there are groups.
Groups of equal size have an atom a member; of other sizes, whoever owns several atoms does each step once for each.

Whatever order proves the algorithm alone proves this one, too: every event of it happens for all atoms, in their
order, before its next event does. A FIFO carries message 0 of all atoms that it serves, then message 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...types import Collective
from ..costs import Groups
from ..ir import Buf, Op, Plan
from ..steps import MOST_NUMBERS, Ints, Numbers, table_of
from .base import Draft

AMONG = (
    Collective.ALLREDUCE, Collective.ALLGATHER, Collective.REDUCE_SCATTER, Collective.BROADCAST, Collective.REDUCE,
)  # fmt: skip
"""The collectives whose algorithms run among islands or hosts; others have one way there."""


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
    sizes = {*map(len, groups)}
    cuts = sorted({common * j // k for k in sizes for j in range(k + 1)})
    places = [{k: a * k // common for k in sizes} for a in cuts[:-1]]
    owners = [tuple([group[place[len(group)]] for group in groups]) for place in places]
    return tuple(Atom(a, b, those) for (a, b), those in zip(pairwise(cuts), owners, strict=True))


class Placed(NamedTuple):
    """Spans that stand for some of the flat plan's: for which of these, and of the atoms, and where they are.

    They are in the order of the flat plan's spans, then of atoms, then of the parts of one.
    """

    row: Ints
    atom: Ints
    spans: Numbers

    def nth(self) -> Ints:
        """Of the spans of one row and atom, which one each is."""
        begins = np.ones(self.row.size, np.bool_)
        begins[1:] = (self.row[1:] != self.row[:-1]) | (self.atom[1:] != self.atom[:-1])
        nth: Ints = np.arange(self.row.size) - np.flatnonzero(begins)[np.cumsum(begins) - 1]
        return nth


def spread_out(counts: Ints) -> tuple[Ints, Ints]:
    """For each of so many of each row: its row, and its number among those of the row."""
    row = np.repeat(np.arange(counts.size), counts)
    return row, np.arange(row.size) - np.repeat(np.cumsum(counts) - counts, counts)


class Steps:
    """The steps of `flat`, each for every atom of this rank, of `everyone`'s; all atoms have `common` parts."""

    def __init__(self, p: Draft, flat: Plan, everyone: tuple[Atom, ...], common: int) -> None:
        self.p, self.flat, self.common, self.everyone = p, flat, common, everyone
        self.here = p.there.of[p.rank]
        self.atoms = [atom for atom in everyone if atom.owners[self.here] == p.rank]
        self.mates = p.hosts[self.here]
        self.lane = flat.lanes  # the first that it has not
        self.steps = flat.columns
        self.shift = 0  # copies of SCRATCH that are in use here
        self.begin, self.count = np.zeros((2, len(self.steps)), np.int64)  # of what each step of `flat` has become
        self.each = np.zeros(0, np.int64)  # spans of an atom in each step

    def place(self, spans: Numbers, atoms: Sequence[Atom], buf: Buf | None = None) -> Placed:
        """Those of `atoms` that spans of the flat plan stand for: where they are here, or in the caller's `buf`."""
        raise NotImplementedError

    def regions(self, spans: Numbers) -> tuple[Ints, Ints]:
        """Which of these spans lies in the region of which group; all in that of group 0 where buffers are whole."""
        raise NotImplementedError

    def before(self) -> tuple[Ints, Ints, Ints]:
        """What brings together what steps of the flat plan touch: the step, which atom of it, after which step."""
        raise NotImplementedError

    def bounds(self, atoms: Sequence[Atom]) -> tuple[Numbers, Numbers]:
        """Where atoms begin and end."""
        most = max(self.p.units, self.p.size * self.p.pieces) * (self.flat.scratch_copies + 2)
        number = np.int64 if most < MOST_NUMBERS else np.object_
        return np.array([atom.start for atom in atoms], number), np.array([atom.stop for atom in atoms], number)

    def run(self, *, skip: int | None = None) -> None:
        """Add all steps, each for every atom, after those that it depends on for the same atom. What lies in several
        regions, it is a step for each. `skip`: copies from SEND to RECV are done by that step."""
        flat, a, first = self.steps, len(self.atoms), len(self.p.lanes)
        op, lane, peer, channel, codes = flat.fields
        left = np.full(len(flat), skip is None) | (op != Op.COPY) | (flat.src[0] != Buf.SEND)
        self.begin[~left] = -1 if skip is None else skip
        if not a:
            return
        ends = [self.place(np.where(left, spans, _NOWHERE), self.atoms) for spans in (flat.src, flat.dst)]
        each = np.max([np.bincount(end.row, minlength=len(flat)) for end in ends], axis=0) // a
        self.count[:], self.each = each * a, each
        begin = np.cumsum(self.count) - self.count
        self.begin[left] = begin[left] + first
        of, nth = spread_out(self.count)
        owners = np.array([atom.owners for atom in self.atoms])
        peers = np.where(peer[of] >= 0, owners[nth % a, peer[of]], -1)
        wide = any(end.spans.dtype == np.object_ for end in ends)
        table = np.zeros((11, of.size), np.object_ if wide else np.int64)
        table[:5], table[[5, 8]] = (op[of], lane[of], peers, channel[of], codes[of]), -1
        for rows, end in zip((slice(5, 8), slice(8, 11)), ends, strict=True):
            table[rows, begin[end.row] + end.nth() * a + end.atom] = end.spans
        at, deps = map(np.concatenate, zip(*self._waits(left, skip), strict=True))
        self.p.add_table(table, at - first, deps)

    def _waits(self, left: NDArray[np.bool_], skip: int | None) -> Iterator[tuple[Ints, Ints]]:
        """Which steps wait for which: of several for one atom the first one is enough, as they are in one lane."""
        flat, a = self.steps, len(self.atoms)
        after = np.repeat(np.arange(len(flat)), np.diff(flat.ends))
        kept = left[after]
        after, on = after[kept], flat.deps[kept]
        row, nth = spread_out(np.where(left[on], self.count[on], a))  # what was skipped is one step for all atoms
        yield self.begin[after][row] + nth % a, self.begin[on][row] + np.where(left[on][row], nth, 0)
        for gone in np.flatnonzero(~left).tolist():
            later = np.flatnonzero(left & (flat.lane == flat.lane[gone]) & (np.arange(len(flat)) > gone))[:1]
            yield np.repeat(self.begin[later], a) + np.tile(np.arange(a), later.size), np.full(a * later.size, skip)
        steps, atoms, deps = self.before()
        kept = left[steps]
        yield self.begin[steps[kept]] + atoms[kept], deps[kept]

    def made(self, step: int) -> Ints:
        """What a step of the flat plan has become."""
        made: Ints = self.begin[step] + np.arange(max(1, self.count[step]) if self.atoms else 0)
        return made


_NOWHERE = np.array([[-1], [0], [0]])


class Whole(Steps):
    """All-reduce, broadcast and reduce: an atom is a stretch of the buffer, in as many units as the flat plan has."""

    def __init__(self, p: Draft, flat: Plan, everyone: tuple[Atom, ...], common: int) -> None:
        super().__init__(p, flat, everyone, common)
        self.units = p.units = common * flat.send_units
        self.held = Buf.SEND  # where SEND of the flat plan is
        self.into = Buf.RECV  # where RECV is

    def place(self, spans: Numbers, atoms: Sequence[Atom], buf: Buf | None = None) -> Placed:
        there = np.flatnonzero(spans[0] >= 0)
        row, atom = np.repeat(there, len(atoms)), np.tile(np.arange(len(atoms)), there.size)
        (begins, ends), (which, start, count), each = self.bounds(atoms), spans[:, row], self.flat.send_units
        copy = np.where(which == Buf.SCRATCH, start // each, 0)
        start, length = start - copy * each, (ends - begins)[atom]
        start = begins[atom] * each + start * length
        if buf is None:
            buf = np.array([self.held, self.into, Buf.SCRATCH])[which]
            start = start + np.where(which == Buf.SCRATCH, self.shift + copy, 0).astype(start.dtype) * self.units
        return Placed(row, atom, table_of(buf, start, count * length))

    def regions(self, spans: Numbers) -> tuple[Ints, Ints]:
        there = np.flatnonzero(spans[0] >= 0)
        return there, np.zeros_like(there)


class Shares(Steps):
    """All-gather and reduce-scatter: a share of the flat plan is a group's region, and an atom a stretch of it."""

    def __init__(self, p: Draft, flat: Plan, everyone: tuple[Atom, ...], common: int) -> None:
        super().__init__(p, flat, everyone, common)
        self.pieces = p.pieces = common * flat.pieces
        self.larger = Buf.RECV if p.collective is Collective.ALLGATHER else Buf.SEND
        self.scatters = self.larger is Buf.SEND and len(self.mates) > 1  # what is added up inside is in scratch
        self.shift = int(self.scatters)

    def regions(self, spans: Numbers) -> tuple[Ints, Ints]:
        cut = self.cut(spans)
        return cut.row, cut.region

    def cut(self, spans: Numbers) -> Cut:
        """Spans of the flat plan by region."""
        (which, start, count), each = spans, self.flat.pieces
        scratch, large = which == Buf.SCRATCH, which == self.larger
        units = self.flat.units(self.flat.scratch_like)
        copy = np.where(scratch, start // max(1, units), 0)
        large = np.where(scratch, self.flat.scratch_like is self.larger, large)
        start = start - copy * units + np.where(large, 0, self.here * each)
        first = start // each
        row, nth = spread_out(np.where(which < 0, 0, (start + count - 1) // each - first + 1))
        region = first[row] + nth
        begin = np.maximum(start[row] - region * each, 0)
        length = np.minimum((start + count)[row] - region * each, each) - begin
        return Cut(row, region, begin, length, copy[row], large[row])

    @cached_property
    def members(self) -> tuple[Ints, Ints, Ints]:
        """Of each group the size, and where it begins among all members; these."""
        sizes = np.array([len(group) for group in self.p.hosts])
        return sizes, np.cumsum(sizes) - sizes, np.concatenate(self.p.hosts)

    def place(self, spans: Numbers, atoms: Sequence[Atom], buf: Buf | None = None) -> Placed:
        cut, a = self.cut(spans), len(atoms)
        piece, atom = np.repeat(np.arange(cut.row.size), a), np.tile(np.arange(a), cut.row.size)
        order = np.lexsort((piece, atom, cut.row[piece]))
        piece, atom = piece[order], atom[order]
        (begins, ends), (sizes, firsts, members) = self.bounds(atoms), self.members
        row, region, begin, length, copy = (each[piece] for each in cut[:5])
        large = cut.large[piece]
        size, whole = sizes[region], self.p.size * self.pieces
        at = begins[atom] * size
        share = at // self.common
        rest = at - share * self.common
        each = (ends - begins)[atom] * size
        inner, count = rest * self.flat.pieces + begin * each, length * each
        copy, owner = (each.astype(inner.dtype) for each in (copy, members[firsts[region] + share.astype(np.int64)]))
        wide = owner * self.pieces + inner
        if buf is not None:
            return Placed(row, atom, table_of(buf, wide, count))
        which = spans[0][row].astype(np.int64)
        if not self.scatters:
            room = np.array([self.pieces, whole], inner.dtype)[large.astype(np.int64)]
            start = np.where(large, wide, inner) + copy * room
            return Placed(row, atom, table_of(which, start, count))
        scratch, given = which == Buf.SCRATCH, which == Buf.SEND
        start = np.where(
            scratch, (copy + self.shift) * whole + wide, np.where(given & (region != self.here), wide, inner)
        )
        start = np.where(~scratch & ~given & large, wide, start)
        which = np.where(given, np.where(region == self.here, Buf.RECV, Buf.SCRATCH), which)
        return Placed(row, atom, table_of(which, start, count))


class Cut(NamedTuple):
    """Spans of a flat plan, cut by region: of which span each is, its region and its units there; which copy of SCRATCH
    it is in, and whether that buffer has all regions."""

    row: Ints
    region: Ints
    begin: Ints
    length: Ints
    copy: Ints
    large: NDArray[np.bool_]
