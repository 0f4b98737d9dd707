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
from itertools import groupby, zip_longest

import numpy as np

from ...errors import ArgumentError
from ...types import WHOLE, Collective
from ..ir import Buf, Op, Plan, Span, Spans, Step
from .atoms import AMONG, Atom, Shares, Steps, Whole, atoms_of
from .base import Algorithm, Draft, inp, out, tmp


def runs_among(entry: Algorithm) -> bool:
    """Whether an algorithm is one that runs among hosts: not where it is made for several levels itself, or for the
    ranks of one host."""
    return entry.collective in AMONG and not (entry.stretches or entry.levels)


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
        self.of = {mate: [atom for atom in everyone if atom.owners[self.here] == mate] for mate in self.mates}
        self.came: dict[int, list[int]] = {}  # by unit of SEND in the flat plan: what brings it together, by atom

    def hold(self) -> None:
        """A copy of SCRATCH has what is added up inside: the first one of the flat plan, where sums grow in place."""
        shares = self.flat.send_units != self.flat.recv_units
        self.shift = 0 if _grows(self.flat, self.here * self.flat.pieces if shares else 0) else 1
        self.p.scratch_copies = max(1, self.flat.scratch_copies + self.shift)

    def given(self, atom: Atom, span: Span) -> list[Span]:
        """Those of this rank's own input that a span of SEND stands for."""
        raise NotImplementedError

    def before(self, i: int, step: Step) -> Iterable[int]:
        """What writes RECV comes after what reads the same of SEND anyway, as in place they are the same memory."""
        if step.src is None or step.src.buf is not Buf.SEND:
            return ()
        return {self.came[unit][i] for unit in units(step.src) if unit in self.came}

    def read(self) -> list[Span]:
        """The spans of SEND in the order in which the flat plan first touches them, each unit once."""
        return _once(step.src for step in self.flat.steps if step.src is not None and step.src.buf is Buf.SEND)

    def written(self, taken: Iterable[int] = ()) -> list[tuple[Span, int]]:
        """The spans of RECV, and which step wrote each last, in that order; without units that are `taken`."""
        seen, found = set(taken), list[tuple[Span, int]]()
        for index, step in reversed([*enumerate(self.flat.steps)]):
            if step.dst is not None and step.dst.buf is Buf.RECV:
                found += [(span, index) for span in reversed(_fresh(step.dst, seen))]
        return found[::-1]

    def reduce(self) -> None:
        """Each atom's owner adds up what its mates give."""
        p, lane, spans = self.p, self.lane, self.read()
        terms = [
            (term, mate)
            for span in spans
            for mate in self.after
            for atom in self.of[mate]
            for term in self.given(atom, span)
        ]
        if terms:
            p.sends(lane, Spans.of([term for term, _ in terms]), np.array([mate for _, mate in terms]))
        sums, begin = list[tuple[Span, Span, int]](), len(p.lanes)
        for span in spans if self.atoms else ():
            total = [self.given(atom, span) for atom in self.atoms]
            grown = [self.spans(atom, span) for atom in self.atoms]
            for mate in self.earlier:
                last = list[int]()
                for row in zip(grown, total, strict=True):
                    sums += ((dst, src, mate) for dst, src in zip(*row, strict=True))
                    last.append(begin + len(sums) - 1)
                total = grown
                self.came |= dict.fromkeys(units(span), last)
        if sums:
            into, own, mates = zip(*sums, strict=True)
            p.recv_reduces(lane + 1, Spans.of(into), Spans.of(own), np.array(mates))

    def spread(self, rows: Sequence[tuple[Span, Sequence[Sequence[int | None]]]], to: Collection[int]) -> None:
        """Each atom's owner sends the mates in `to` the spans of these rows, which come after their steps."""
        p, lane, mates = self.p, self.lane + 2, [mate for mate in self.after if mate in to]
        gives = list[tuple[Span, int, Sequence[int | None]]]()
        for span, steps in rows:
            parts = [self.spans(atom, span) for atom in self.atoms]
            afters = [
                [each[i : i + 1] if len(found) == len(each) else each for i in range(len(found))]
                for found, each in zip(parts, steps, strict=False)
            ]
            for mate in mates:
                for found, after in zip(parts, afters, strict=True):
                    gives += ((part, mate, each) for part, each in zip(found, after, strict=True))
        if gives:
            spans, peers, waits = zip(*gives, strict=True)
            columns = zip_longest(*waits)
            deps = [np.array([-1 if step is None else step for step in column]) for column in columns]
            p.sends(lane, Spans.of(spans), np.array(peers), channel=1, after=deps)
        takes = [
            (span, mate)
            for whole, _ in (rows if p.rank in to else ())
            for mate in self.earlier
            for atom in self.of[mate]
            for span in self.taken(atom, whole)
        ]
        if takes:
            p.recvs(lane + 1, Spans.of([span for span, _ in takes]), np.array([mate for _, mate in takes]), channel=1)

    def taken(self, atom: Atom, span: Span) -> list[Span]:
        """Where another's atom belongs here."""
        raise NotImplementedError


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


def _fresh(span: Span, seen: set[int]) -> list[Span]:
    """The runs of units in `span` that are not yet among the `seen`, to which they are added."""
    new = [unit for unit in units(span) if unit not in seen]
    seen.update(new)
    runs = [[unit for _, unit in run] for _, run in groupby(enumerate(new), key=lambda pair: pair[1] - pair[0])]
    return [Span(span.buf, run[0], len(run)) for run in runs]


def _once(spans: Iterable[Span]) -> list[Span]:
    seen = set[int]()
    return [run for span in spans for run in _fresh(span, seen)]


class _Buffers(_Inside, Whole):
    """All-reduce, broadcast and reduce, in both forms."""

    def given(self, atom: Atom, span: Span) -> list[Span]:
        return [self.stretch(inp, atom, span)]

    def taken(self, atom: Atom, span: Span) -> list[Span]:
        return [self.stretch(out, atom, span)]

    def draw(self) -> None:
        p, several = self.p, len(self.mates) > 1
        if p.collective is Collective.BROADCAST:
            self._broadcast()
            return
        if several:
            self.held = out
        if several and p.collective is Collective.REDUCE and p.rank != p.root:
            self.held = self.into = tmp
            self.hold()
        self.reduce()
        self.run()
        rows = [(span, self.done[index]) for span, index in self.written()]
        self.spread(rows, self.mates if p.collective is Collective.ALLREDUCE else [p.root])

    def _broadcast(self) -> None:
        """The root scatters; owners of all hosts then send their mates what they have, but not the root."""
        p, lane = self.p, self.lane
        if p.root not in self.mates:
            self.run()
            self.spread([(span, self.done[index]) for span, index in self.written()], self.mates)
            return
        spans = self.read()
        if p.rank != p.root:
            self.held = out
        for span in spans:
            if p.rank == p.root:
                for mate in self.after:
                    for atom in self.of[mate]:
                        p.send(lane, self.stretch(inp, atom, span), mate)
            else:
                last = [p.recv(lane + 1, self.stretch(out, atom, span), p.root) for atom in self.atoms]
                self.came |= dict.fromkeys(units(span), last)
        self.run()
        rows = [(span, [[step] for step in self.came.get(span.start, [None] * len(self.atoms))]) for span in spans]
        self.spread(rows, [mate for mate in self.mates if mate != p.root])


class _Split(_Inside, Shares):
    """All-gather and reduce-scatter, split."""

    def given(self, atom: Atom, span: Span) -> list[Span]:
        return [inp(*self.wide(atom, u, units)) for u, units in self.parts(span)[2]]

    def taken(self, atom: Atom, span: Span) -> list[Span]:
        return [out(*self.wide(atom, u, units)) for u, units in self.parts(span)[2]]

    def draw(self) -> None:
        p = self.p
        if p.collective is Collective.REDUCE_SCATTER:
            if self.scatters:
                self.hold()
                p.scratch_like = Buf.SEND
            self.reduce()
            self.run()
            return
        for mate in self.after:
            p.send(self.lane + 2, inp(0, self.pieces), mate, channel=1)
        for mate in self.earlier:
            p.recv(self.lane + 3, out(mate * self.pieces, self.pieces), mate, channel=1)
        self.run()
        own = range(self.here * self.flat.pieces, (self.here + 1) * self.flat.pieces)
        self.spread([(span, self.done[index]) for span, index in self.written(own)], self.mates)


class _Led(_Split):
    """All-gather and reduce-scatter, led: a leader that has mates holds whole regions, in RECV or SCRATCH."""

    def given(self, atom: Atom, span: Span) -> list[Span]:
        return self.runs(Buf.SEND, span)

    def taken(self, atom: Atom, span: Span) -> list[Span]:
        return self.runs(Buf.RECV, span)

    def runs(self, buf: Buf, span: Span, copy: int = 0) -> list[Span]:
        """Its units of each share in `copy` of a buffer of all shares; as one where they lie side by side."""
        each, found = self.pieces, list[Span]()
        for u, units in self.parts(span)[2]:
            for start in (member * each + units.start for member in self.p.hosts[u]):
                if found and found[-1].start + found[-1].count == start + copy * self.p.size * each:
                    found[-1] = Span(buf, found[-1].start, found[-1].count + len(units))
                else:
                    found.append(Span(buf, start + copy * self.p.size * each, len(units)))
        return found

    def spans(self, atom: Atom, span: Span | None) -> list[Span]:
        if span is None:
            return []
        copy, large, rows = self.parts(span)
        alone, scratch = len(self.mates) == 1, span.buf is Buf.SCRATCH
        if alone and not large:
            return [Span(span.buf, copy * self.pieces + units.start, len(units)) for _, units in rows]
        held = Buf.RECV if self.larger is Buf.RECV else Buf.SCRATCH
        return self.runs(span.buf if alone or scratch else held, span, copy + (self.shift if scratch else 0))

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
        final = [step for _, index in self.written() for steps in self.done[index] for step in steps]
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
            self.came = {unit: [last] for unit in range(self.flat.pieces)}
        self.run(skip=last)
        rows = [(span, self.done[index]) for span, index in self.written(units(own))]
        self.spread([(own, [[last]]), *rows], self.mates)
