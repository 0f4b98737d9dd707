"""Any algorithm among hosts: inside each, messages bring its ranks together, and some of them run it among the hosts.

There are two forms. Where the buffer is *split*, every rank of a host owns a part of it, adds up its mates' terms of
that, and runs the algorithm on it with the owners of the other hosts (`atoms`): so all ranks work, and each byte enters
and leaves a host once in each direction. The idea of aligned parts is that of hierarchical all-reduce (Jia et al.,
"Highly scalable deep learning training system with mixed-precision", 2018), made independent of equal host sizes. Where
a host is *led*, its first rank, or the root, does so for the whole buffer: fewer messages cross, and none is empty.

What the algorithm reads or writes in one step is one message inside, in the order in which it first reads or last
writes it. Mates run the same steps, so they agree on that order; and as the spans are the same, what arrives inside is
sent on between hosts, and the other way round, at the pace of elements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache, partial

import numpy as np

from ...errors import ArgumentError
from ...types import WHOLE, Collective
from ..ir import Buf, Op, Plan, Span, Spans
from ..steps import Ints, Numbers, distinct, row_of, table_of
from .atoms import AMONG, Atom, Placed, Shares, Steps, Whole, atoms_of, spread_out
from .base import Algorithm, Draft, each, inp, out, tmp


def runs_among(entry: Algorithm) -> bool:
    """Whether an algorithm is one that runs among hosts: not where it is made for several levels itself, for the ranks
    of one host, or for shares of one length."""
    return entry.collective in AMONG and not (entry.stretches or entry.levels or entry.equal)


@lru_cache(maxsize=256)
def among_hosts(entry: Algorithm, *, led: bool) -> Algorithm:
    """`entry` among the `hosts` of `Algorithm.build`, all of which it must support.

    `build` raises ArgumentError where it does not.
    """
    return Algorithm(entry.name, entry.collective, partial(_draw, entry, led), compresses=entry.compresses)


def _draw(entry: Algorithm, led: bool, p: Draft) -> None:
    if len(p.hosts) == 1:
        entry.draw(p)
        return
    if not entry.supports(len(p.hosts)):
        raise ArgumentError(f"{entry.collective.label} by {entry.name} does not support {len(p.hosts)} hosts")
    home, here = p.there.of[p.root], p.there.of[p.rank]
    alone = tuple((i,) for i in range(len(p.hosts)))
    flat = entry.build(len(p.hosts), here, root=home, scale=p.average, hosts=alone, compress=p.compress)
    p.credits, p.redundant = flat.credits, flat.redundant
    p.scratch_like, p.scratch_copies = flat.scratch_like, flat.scratch_copies
    leaders = tuple(p.root if i == home else host[0] for i, host in enumerate(p.hosts)) if led else ()
    common = 1 if led else p.there.common
    everyone = (Atom(0, 1, leaders),) if led else atoms_of(p.there)
    if p.collective in WHOLE:
        _Buffers(p, flat, everyone, common).draw()
    else:
        (_Led if led else _Split)(p, flat, everyone, common).draw()


class _Inside(Steps):
    """Messages inside the host bring its atoms together, in the four lanes behind those of the flat plan."""

    def __init__(self, p: Draft, flat: Plan, everyone: tuple[Atom, ...], common: int) -> None:
        super().__init__(p, flat, everyone, common)
        k, j = len(self.mates), self.mates.index(p.rank)
        self.after = [self.mates[(j + d) % k] for d in range(1, k)]  # whom to send to
        self.earlier = [self.mates[(j - d) % k] for d in range(1, k)]  # whose messages come in that order
        self.came = np.full((0, len(self.atoms)), -1)  # by unit of SEND in the flat plan: what brings atoms together

    def of(self, mates: Iterable[int]) -> tuple[list[Atom], Ints]:
        """The atoms that these own, and who owns each."""
        owned: dict[int, list[Atom]] = {mate: [] for mate in self.mates}
        for atom in self.everyone:
            owned[atom.owners[self.here]].append(atom)
        found = [(atom, mate) for mate in mates for atom in owned[mate]]
        return [atom for atom, _ in found], np.array([mate for _, mate in found], np.int64)

    def hold(self) -> None:
        """A copy of SCRATCH has what is added up inside: the first one of the flat plan, where sums grow in place."""
        shares = self.flat.send_units != self.flat.recv_units
        self.shift = 0 if _grows(self.flat, self.here * self.flat.pieces if shares else 0) else 1
        self.p.scratch_copies = max(1, self.flat.scratch_copies + self.shift)

    def before(self) -> tuple[Ints, Ints, Ints]:
        """What writes RECV comes after what reads the same of SEND anyway, as in place they are the same memory."""
        (which, start, count), a = self.steps.src, len(self.atoms)
        row, nth = spread_out(np.where((which == Buf.SEND) & (len(self.came) > 0), count, 0))
        return np.repeat(row, a), np.tile(np.arange(a), row.size), self.came[start[row] + nth].ravel()

    def read(self) -> Numbers:
        """The spans of SEND in the order in which the flat plan first touches them, each unit once."""
        return _once(self.steps.src, Buf.SEND, last=False)[1]

    def written(self, taken: range = range(0)) -> tuple[Ints, Numbers]:
        """Which step wrote RECV last, and the spans of it, in that order; without units that are `taken`."""
        return _once(self.steps.dst, Buf.RECV, last=True, taken=taken)

    def deal(self, spans: Numbers) -> None:
        """Send mates what each owns of these spans of my input."""
        atoms, mates = self.of(self.after)
        terms = self.place(spans, atoms, Buf.SEND)
        self.p.sends(self.lane, Spans(*terms.spans), mates[terms.atom])

    def arrived(self, spans: Numbers, found: Placed, steps: Ints) -> None:
        """The last of these steps for a span and an atom brings it together."""
        a = len(self.atoms)
        last = np.full((spans.shape[1], a), -1)
        last[found.row, found.atom % a] = steps
        self.came = np.full((self.flat.send_units, a), -1)
        row, nth = spread_out(spans[2])
        self.came[spans[1][row] + nth] = last[row]

    def reduce(self) -> None:
        """Each atom's owner adds up what its mates give."""
        spans, a = self.read(), len(self.atoms)
        if not self.earlier:
            return
        self.deal(spans)
        if a:
            grown, given = (self.place(spans, self.atoms * len(self.earlier), buf) for buf in (None, Buf.SEND))
            turn = grown.atom // a  # the first mate's are added to what is given, others' to the sum
            total, mates = np.where(turn == 0, given.spans, grown.spans), np.array(self.earlier)[turn]
            self.arrived(spans, grown, self.p.recv_reduces(self.lane + 1, Spans(*grown.spans), Spans(*total), mates))

    def spread(self, spans: Numbers, after: tuple[Ints, Ints], to: Collection[int]) -> None:
        """Each atom's owner sends the mates in `to` these spans. `after`: the first step before each, by span
        and atom, and how many there are, one for each part of it or for all."""
        p, lane, mates, a = self.p, self.lane + 2, [mate for mate in self.after if mate in to], len(self.atoms)
        if mates and a:
            parts, (begin, each) = self.place(spans, self.atoms * len(mates)), after
            row, nth = parts.row, parts.nth()
            alike = (np.bincount(row, minlength=each.size) == each * a * len(mates))[row]
            at, more = spread_out(np.where(alike, 1, np.where(nth == 0, each[row], 0)))
            deps = begin[row[at], parts.atom[at] % a]
            deps = np.where(deps < 0, -1, deps + np.where(alike[at], nth[at], more) * a)
            table = np.zeros((11, row.size), parts.spans.dtype)
            for place, cells in enumerate((Op.SEND, lane, np.array(mates)[parts.atom // a], 1)):
                table[place] = cells
            table[5:8], table[8] = parts.spans, -1
            p.add_table(table, at, deps)
        if p.rank in to:
            atoms, owners = self.of(self.earlier)
            takes = self.place(spans, atoms, Buf.RECV)
            p.recvs(lane + 1, Spans(*takes.spans), owners[takes.atom], channel=1)

    def done(self, steps: Ints) -> tuple[Ints, Ints]:
        """For `spread`: what these steps of the flat plan have become."""
        several = self.count[steps] > 0
        begin = self.begin[steps][:, None] + np.where(several[:, None], np.arange(len(self.atoms)), 0)
        return begin, np.maximum(1, self.count[steps] // max(1, len(self.atoms)))


def _grows(flat: Plan, begin: int) -> bool:
    """Whether SCRATCH may be where SEND is, and RECV, which is there from unit `begin` on.

    What writes a unit of SCRATCH alone reads it of SEND; what writes it to RECV then alone reads it of SCRATCH.
    """
    scratch = {u for s in flat.steps if s.dst is not None and s.dst.buf is Buf.SCRATCH for u in units(s.dst)}
    reads, both = Counter[tuple[Buf, int]](), set[int]()
    for step in flat.steps:
        if step.src is not None:
            reads.update((step.src.buf, unit) for unit in units(step.src))
        if step.dst is None or step.op is Op.SCALE:
            continue
        at = begin if step.dst.buf is Buf.RECV else 0
        there = {at + unit for unit in units(step.dst)}
        if scratch.isdisjoint(there):
            continue
        if step.src is None or step.src.buf is Buf.RECV or set(units(step.src)) != there:
            return False
        both |= there if step.dst.buf is Buf.RECV else set()
    twice = any(reads[Buf.SEND, u] > 1 for u in scratch) or any(reads[Buf.SCRATCH, u] > 1 for u in both)
    return flat.scratch_like is Buf.SEND and not twice


def units(span: Span) -> range:
    return range(span.start, span.start + span.count)


def _once(spans: Numbers, buf: Buf, *, last: bool, taken: range = range(0)) -> tuple[Ints, Numbers]:
    """The runs of units that spans in `buf` hold first, or last, in order, and of which span each is a part."""
    row, nth = spread_out(np.where(spans[0] == buf, spans[2], 0))
    unit = spans[1][row] + nth
    _, at = distinct(unit[::-1] if last else unit)
    at = np.sort(unit.size - 1 - at if last else at)
    at = at[(unit[at] < taken.start) | (unit[at] >= taken.stop)]
    row, unit = row[at], unit[at]
    edge = np.flatnonzero((np.diff(row, prepend=-1) != 0) | (np.diff(unit, prepend=-2) != 1))
    return row[edge], table_of(buf, unit[edge], np.diff(edge, append=unit.size))


class _Buffers(_Inside, Whole):
    """All-reduce, broadcast and reduce, in both forms."""

    def draw(self) -> None:
        p, several = self.p, len(self.mates) > 1
        if p.collective is Collective.BROADCAST:
            self._broadcast()
            return
        if several:
            self.held = Buf.RECV
        if several and p.collective is Collective.REDUCE and p.rank != p.root:
            self.held = self.into = Buf.SCRATCH
            self.hold()
        self.reduce()
        self.run()
        steps, spans = self.written()
        self.spread(spans, self.done(steps), self.mates if p.collective is Collective.ALLREDUCE else [p.root])

    def _broadcast(self) -> None:
        """The root scatters; owners of all hosts then send their mates what they have, but not the root."""
        p = self.p
        if p.root not in self.mates:
            self.run()
            steps, spans = self.written()
            self.spread(spans, self.done(steps), self.mates)
            return
        spans = self.read()
        if p.rank == p.root:
            self.deal(spans)
        elif self.atoms:
            self.held = Buf.RECV
            mine = self.place(spans, self.atoms)
            self.arrived(spans, mine, p.recvs(self.lane + 1, Spans(*mine.spans), p.root))
        self.run()
        begin = self.came[spans[1]] if len(self.came) else np.full((spans.shape[1], len(self.atoms)), -1)
        self.spread(spans, (begin, np.ones(spans.shape[1], np.int64)), [mate for mate in self.mates if mate != p.root])


class _Split(_Inside, Shares):
    """All-gather and reduce-scatter, split."""

    def draw(self) -> None:
        p = self.p
        if p.collective is Collective.REDUCE_SCATTER:
            if self.scatters:
                self.hold()
                p.scratch_like = Buf.SEND
            self.reduce()
            self.run()
            return
        p.sends(self.lane + 2, inp(0, self.pieces), np.array(self.after, np.int64), channel=1)
        mates = np.array(self.earlier, np.int64)
        p.recvs(self.lane + 3, each(out, mates * self.pieces, self.pieces), mates, channel=1)
        self.run()
        own = range(self.here * self.flat.pieces, (self.here + 1) * self.flat.pieces)
        steps, spans = self.written(own)
        self.spread(spans, self.done(steps), self.mates)


class _Led(_Split):
    """All-gather and reduce-scatter, led: a leader that has mates holds whole regions, in RECV or SCRATCH."""

    def place(self, spans: Numbers, atoms: Sequence[Atom], buf: Buf | None = None) -> Placed:
        """Units of each share, as one where they lie side by side. All `atoms` are the same."""
        cut, alone, (sizes, firsts, members) = self.cut(spans), len(self.mates) == 1, self.members
        which = spans[0][cut.row]
        plain = ~cut.large & (buf is None and alone)  # a share of one rank alone
        piece, nth = spread_out(np.where(plain, 1, sizes[cut.region]))
        row, region, begin, length, copy = (x[piece] for x in cut[:5])
        scratch, simple = which[piece] == Buf.SCRATCH, plain[piece]
        if buf is not None:
            copy = copy * 0
        start = members[np.where(simple, 0, firsts[region] + nth)] * self.pieces + begin
        start = start + (copy + (scratch & (buf is None)) * self.shift) * self.p.size * self.pieces
        start = np.where(simple, copy * self.pieces + begin, start)
        edge = np.flatnonzero((np.diff(row, prepend=-1) != 0) | (start != np.append(-1, (start + length)[:-1])))
        held = Buf.RECV if self.larger is Buf.RECV else Buf.SCRATCH
        where = which[piece] if buf is None else np.full(piece.size, buf)
        if buf is None:
            where = np.where(simple | scratch | alone, where, held)
        found = np.stack([where[edge], start[edge], np.add.reduceat(length, edge) if edge.size else length])
        index, atom = np.repeat(np.arange(edge.size), len(atoms)), np.tile(np.arange(len(atoms)), edge.size)
        order = np.lexsort((index, atom, row[edge][index]))
        return Placed(row[edge][index[order]], atom[order], found[:, index[order]])

    def draw(self) -> None:
        leader = self.everyone[0].owners[self.here]
        if len(self.mates) == 1:
            self.run()
        elif self.p.collective is Collective.ALLGATHER:
            self._gather(leader)
        else:
            self._scatter(leader)

    def _scatter(self, leader: int) -> None:
        p, lane = self.p, self.lane + 2
        p.scratch_like = self.larger
        self.hold()
        self.reduce()
        self.run()
        if p.rank != leader:
            p.recv(lane + 1, out(0, self.pieces), leader, channel=1)
            return
        final = [step for index in self.written()[0].tolist() for step in self.made(index).tolist()]
        p.copy(lane, out(0, self.pieces), tmp(p.rank * self.pieces, self.pieces), after=final)
        for mate in self.after:
            p.send(lane, tmp(mate * self.pieces, self.pieces), mate, channel=1)

    def _gather(self, leader: int) -> None:
        p, lane, shares = self.p, self.lane, {mate: out(mate * self.pieces, self.pieces) for mate in self.mates}
        p.scratch_like = self.larger
        own = Span(self.larger, self.here * self.flat.pieces, self.flat.pieces)
        last = None
        if p.rank != leader:
            p.send(lane, inp(0, self.pieces), leader)
        else:
            last = p.copy(lane + 1, shares[p.rank], inp(0, self.pieces))
            for mate in self.earlier:
                last = p.recv(lane + 1, shares[mate], mate)
            self.came = np.full((self.flat.pieces, 1), last)
        self.run(skip=last)
        steps, spans = self.written(units(own))
        begin, counts = self.done(steps)
        if last is not None:
            begin = np.concatenate([[[last]], begin])
        spans = np.concatenate([np.array([row_of(own)]).T, spans], axis=1)
        self.spread(spans, (begin, np.append(1, counts)), self.mates)
