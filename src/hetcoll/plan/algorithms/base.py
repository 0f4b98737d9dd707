"""What an algorithm is: a function that draws one rank's plan, and its entry in the table.

An algorithm takes a `Draft` (who I am, on which host, which root, whether to average) and adds steps to it. Lanes run
beside each other, steps in a lane one after another; `after` names the steps of other lanes whose data a step needs or
destroys. What messages already order needs no `after`: a reply that was computed from what I sent cannot come before I
sent it.

Examples
--------
A user's own algorithm, the whole of it (`tests/plan/test_algorithms.py` runs it):

>>> @register(Collective.BROADCAST, "star")                                               # doctest: +SKIP
... def star(p: Draft) -> None:
...     for peer in p.others():
...         if p.rank == p.root:
...             p.send(0, inp(), peer)
...     if p.rank != p.root:
...         p.recv(0, out(), p.root)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from ...errors import ArgumentError
from ...types import REDUCING, Collective
from ..costs import COSTS, LEVELS, Cost, Groups, Hosts, Levels, groups_of, one_group
from ..ir import Buf, Builder, Local, Op, Plan, Span, Spans, cut
from ..steps import Ints

After = Iterable[int | None]
Afters = Iterable[Ints | int | None]
Many = Spans | Span  # one for each step, or the same of all
SEND, RECV, RECV_REDUCE, LOCAL = Op.SEND, Op.RECV, Op.RECV_REDUCE, Op.LOCAL  # members of an enum are slow to look up
_INP, _OUT, _TMP = Buf


def inp(start: int = 0, count: int = 1) -> Span:
    """`count` units of the caller's input (SEND). Never written."""
    return Span(_INP, start, count)


def out(start: int = 0, count: int = 1) -> Span:
    """`count` units of the caller's output (RECV). In place it is the same memory as the input."""
    return Span(_OUT, start, count)


def tmp(start: int = 0, count: int = 1) -> Span:
    """`count` units of the communicator's scratch memory."""
    return Span(_TMP, start, count)


def each(make: Callable[[Any], Span], start: Ints, count: Ints | int = 1) -> Spans:
    """A span of `make` for each of several steps."""
    return Spans(make(0).buf, start, count)


@dataclass(slots=True, kw_only=True)
class Draft(Builder):
    """A plan in the making. `units` counts only where buffers are not cut by rank, `pieces` where they are."""

    collective: Collective
    algorithm: str
    size: int
    rank: int
    hosts: Hosts
    there: Groups
    root: int = 0
    average: bool = False
    units: int = 1
    pieces: int = 1
    scratch_copies: int = 0
    scratch_like: Buf = Buf.SEND
    credits: int = 0
    apart: bool = False
    islands: Hosts = ()
    compress: bool = False
    slow: frozenset[int] = frozenset()  # the ranks to and from which everything is compressed
    stretches: int = 1
    cores: int = 2
    staged: bool = False
    redundant: bool = False
    ordered: bool = False
    equal: bool = False
    batches: list[tuple[int, int]] = field(default_factory=list)

    def others(self) -> list[int]:
        """Every rank but this one, in order."""
        return [*range(self.rank), *range(self.rank + 1, self.size)]

    def after_me(self) -> list[int]:
        """The others from rank + 1 on, round the ring: whom to send to, so that nobody is everybody's first."""
        return [(self.rank + d) % self.size for d in range(1, self.size)]

    def before_me(self) -> list[int]:
        """The others from rank - 1 down, round the ring: whose message comes first when they send in `after_me`."""
        return [(self.rank - d) % self.size for d in range(1, self.size)]

    def send(self, lane: int, src: Span, peer: int, *, channel: int = 0, after: After = ()) -> int:
        """Send `src` to `peer`. Like the next four it gives the step's index, to be named in a later `after`."""
        return self.add(SEND, lane, src, None, peer, channel, after, None, peer in self.slow)

    def recv(self, lane: int, dst: Span, peer: int, *, channel: int = 0, after: After = ()) -> int:
        """Receive into `dst` what `peer` sends next on this channel, which has as many units."""
        return self.add(RECV, lane, None, dst, peer, channel, after, None, peer in self.slow)

    def recv_reduce(self, lane: int, dst: Span, src: Span, peer: int, *, channel: int = 0, after: After = ()) -> int:
        """Receive from `peer` and write the reduction of that and `src` to `dst`, which may be `src`."""
        return self.add(RECV_REDUCE, lane, src, dst, peer, channel, after, None, peer in self.slow)

    # The same of many steps of one lane, at once: a plan may have 65,000. Each gives their indices.

    def ring(self, sign: int) -> Ints:
        """As `after_me`, or with -1 `before_me`, for these."""
        return (self.rank + sign * np.arange(1, self.size)) % self.size

    def sends(self, lane: int, src: Many, peer: Ints | int, *, channel: int = 0, after: Afters = ()) -> Ints:
        """Each `send`, from `src` to `peer`."""
        codes = np.isin(peer, [*self.slow]) if self.slow else False
        return self.add_many(SEND, lane, src, None, peer, channel, after, codes)

    def recvs(self, lane: int, dst: Many, peer: Ints | int, *, channel: int = 0, after: Afters = ()) -> Ints:
        """Each `recv`, from `peer` to `dst`."""
        codes = np.isin(peer, [*self.slow]) if self.slow else False
        return self.add_many(RECV, lane, None, dst, peer, channel, after, codes)

    def recv_reduces(
        self, lane: int, dst: Many, src: Many, peer: Ints | int, *, channel: int = 0, after: Afters = ()
    ) -> Ints:
        """Each `recv_reduce`."""
        codes = np.isin(peer, [*self.slow]) if self.slow else False
        return self.add_many(RECV_REDUCE, lane, src, dst, peer, channel, after, codes)

    def copies(self, lane: int, dst: Many, src: Many, *, after: Afters = ()) -> Ints:
        """Each `copy`."""
        return self.add_many(Op.COPY, lane, src, dst, deps=after)

    def roundeds(self, lane: int, dst: Spans, src: Spans, steps: Ints | int | None, peers: Ints) -> tuple[Spans, Ints]:
        """As `rounded`, of a span for each of `peers`, at the same place in `dst` and `src`."""
        ready = np.full(peers.size, -1 if steps is None else steps)
        if not self.slow:
            return src, ready
        far, size = np.isin(peers, [*self.slow]), np.broadcast_to(src.count, peers.shape)
        froms, tos = (Spans(each.buf, src.start[far], size[far]) for each in (src, dst))
        ready[far] = self.add_many(Op.ROUND, lane, froms, tos, deps=[ready[far]])
        return Spans(np.where(far, dst.buf, src.buf), src.start, src.count), ready

    def copy(self, lane: int, dst: Span, src: Span, *, after: After = ()) -> int:
        """Copy `src` to `dst`, which may be the same memory: then nothing is moved."""
        return self.add(Op.COPY, lane, src=src, dst=dst, deps=after)

    def reduce(self, lane: int, dst: Span, src: Span, *, after: After = ()) -> int:
        """Reduce `src` into `dst`."""
        return self.add(Op.REDUCE, lane, src=src, dst=dst, deps=after)

    def local(
        self,
        lane: int,
        kind: Collective,
        *,
        src: Span | None = None,
        dst: Span | None = None,
        root: int = -1,
        parts: Iterable[Span | None] = (),
        after: After = (),
    ) -> int:
        """The vendor's collective `kind` inside this rank's island, from `src` to `dst`; see `hetcoll.plan.Local`."""
        last = {self.lanes[step]: step for step in sorted(s for s in after if s is not None)} if after else {}
        return self.add(LOCAL, lane, src, dst, deps=last.values(), local=Local(kind, root, tuple(parts)))

    def scaled(self, lane: int, dst: Span, reduced: int | None) -> int | None:
        """The step after which `dst` is final: a division when the collective averages, else `reduced` itself."""
        return self.add(Op.SCALE, lane, dst=dst, deps=[reduced]) if self.average else reduced

    def rounded(
        self, lane: int, dst: Span, src: Span, step: int | None, peers: Iterable[int]
    ) -> tuple[Span, int | None]:
        """What may be sent to all `peers` in place of `src`, which is there after `step`, and the step after which it
        is there: `src` itself where none of these edges is compressed."""
        if self.slow.isdisjoint(peers):
            return src, step
        return dst, self.add(Op.ROUND, lane, src=src, dst=dst, deps=[step])

    def finish(self) -> Plan:
        """The plan of the steps so far. `Algorithm.build` calls it."""
        send_units, recv_units = _units(self.collective, self.size, self.units, self.pieces)
        return Plan(
            self.collective, self.algorithm, self.size, self.rank, send_units, recv_units, self.steps,
            self.root, self.scratch_copies, self.scratch_like, self.credits, self.pieces, self.islands,
            self.apart, self.compress, self.staged, self.stretches, self.redundant, self.ordered,
            self.equal, tuple(self.batches),
        )  # fmt: skip


def _units(collective: Collective, size: int, units: int, pieces: int) -> tuple[int, int]:
    """Into how many units SEND and RECV are cut. The same on all ranks, also where a rank lacks one of the two."""
    match collective:
        case Collective.ALLGATHER | Collective.GATHER:
            return pieces, size * pieces
        case Collective.REDUCE_SCATTER | Collective.SCATTER:
            return size * pieces, pieces
        case Collective.ALLTOALL:
            return size * pieces, size * pieces
        case Collective.BARRIER:
            return 1, 1
        case _:
            return units, units


class Rounds(NamedTuple):
    """Of each message the numbers of rounds that are over when it goes: `lanes` of as many messages of a lane, and
    `hops` in which what came is sent on."""

    lanes: Ints
    hops: Ints


class Likeness(Enum):
    """How ranks do alike."""

    TURN = "turn"  # rank r does what rank 0 does, all peers r further round the ring; not in order, nor compressed
    SWAP = "swap"  # among a power of two it does with ``r ^ d`` in place of d, from which it gets what it sends there
    STAR = "star"  # who is not the root has one message, with the root, and nothing comes before it


class Algorithm(NamedTuple):
    """One entry of the table; what it takes stands in `hetcoll.plan.costs`.

    `supports` says for which numbers of ranks it can draw. `compresses`: it rounds whatever it sends between hosts
    where the draft says `compress`. `stretches`: into how many it cuts a buffer of so many bytes where the ranks of a
    host have so many cores, if a plan has so many units; see `cut` and `stretched`. `ordered`: it reduces every element
    in the order of ranks where the draft says so. `equal`: for shares of one length, and so not for forms with counts.
    `flat`: what this one runs among the islands. `likeness`: how ranks, or islands of one size, do alike, so that few
    plans say what all do. `rounds`: when each of its messages goes, the same at both ends; what is no message has any
    numbers.
    """

    name: str
    collective: Collective
    draw: Callable[[Draft], None]
    supports: Callable[[int], bool] = bool  # any number of ranks
    compresses: bool = False
    stretches: Callable[[int, int], int] | None = None
    ordered: bool = False
    equal: bool = False
    flat: Algorithm | None = None
    likeness: Likeness | None = None
    rounds: Callable[[Plan], Rounds] | None = None

    @property
    def cost(self) -> Callable[[int], Cost] | None:
        """What it takes of so many ranks, if it states that."""
        return COSTS.get(self.collective, {}).get(self.name)

    @property
    def levels(self) -> Callable[[Hosts], Levels] | None:
        """What it takes inside these hosts and between them, if it is made for several."""
        return LEVELS.get(self.collective, {}).get(self.name)

    def cut(self, nbytes: int, cores: int, size: int) -> int:
        """Into how many stretches `size` ranks cut a buffer: each has a unit for every rank, with an offset."""
        if self.stretches is None or size == 1:  # one rank copies the whole, if anything
            return 1
        return max(1, min(self.stretches(nbytes, cores), _MOST_STRETCHED // size))

    def build(
        self,
        size: int,
        rank: int,
        *,
        root: int = 0,
        scale: bool = False,
        logical: bool = False,
        hosts: Hosts | None = None,
        compress: bool = False,
        groups: Hosts = (),
        stretches: int = 1,
        cores: int = 2,
        ordered: bool = False,
    ) -> Plan:
        """The plan of `rank` among `size`.

        `scale` divides the result by `size` (AVG). `logical`: one rank, too, makes 0 or 1 of its elements (LAND, LOR,
        LXOR); several do by reducing. `hosts` are the ranks of each host, by default one; all ranks must
        give the same. `compress`: the edges between them are compressed, or those between `groups`, where these are
        larger than hosts. `cores`: those that the ranks of a host share, dealt to them in turn. `ordered`: reductions
        are in the order of ranks.

        Raises
        ------
        ArgumentError
            `rank` or `root` is not a rank, or the algorithm does not support `size`, or
            cannot compress, or does not reduce in the order of ranks.
        """
        if not (0 <= rank < size and 0 <= root < size):
            raise ArgumentError(f"rank and root must lie in 0..{size - 1}, got rank {rank} and root {root}")
        if not self.supports(size):
            raise ArgumentError(f"{self.collective.label} by {self.name} does not support {size} ranks")
        if compress and not self.compresses:
            raise ArgumentError(f"{self.collective.label} by {self.name} compresses no edges")
        ordered = ordered and self.collective in REDUCING
        if ordered and not self.ordered:
            raise ArgumentError(f"{self.collective.label} by {self.name} does not reduce in the order of ranks")
        there = groups_of(hosts) if hosts else one_group(size)
        if there.size != size:
            raise ArgumentError(f"wanted hosts that hold each of {size} ranks once, got {hosts}")
        hosts = there.ranks
        compress, slow = compress and len(hosts) > 1, frozenset[int]()
        if compress:
            slow = frozenset(range(size)).difference(*(group for group in groups or hosts if rank in group))
        draft = Draft(
            collective=self.collective, algorithm=self.name, size=size, rank=rank, hosts=hosts, there=there, root=root,
            average=scale, compress=compress, slow=slow, stretches=stretches, cores=cores, equal=self.equal,
            ordered=ordered, redundant=ordered,  # one NaN: whose it was depends on who is first in an instruction
        )  # fmt: skip
        if size > 1:
            self.draw(draft)
        elif self.collective not in (Collective.BROADCAST, Collective.BARRIER):
            draft.copy(0, out(), inp())
            if logical:  # reduced with itself, an element is 0 or whether it is not 0; with that, it is the latter
                draft.scratch_copies = 1
                draft.copy(0, tmp(), out())
                draft.reduce(0, tmp(), tmp())
                draft.reduce(0, out(), tmp())
        return draft.finish()


_MOST_STRETCHED = 1 << 15  # units
_GRAIN = 16  # elements, which most types have at least a cache line of

ALGORITHMS: dict[Collective, dict[str, Algorithm]] = {}


def power_of_two(size: int) -> bool:
    return size >= 1 and size & (size - 1) == 0


def register(
    collective: Collective, name: str, *, supports: Callable[[int], bool] = bool,
    cost: Callable[[int], Cost] | None = None, levels: Callable[[Hosts], Levels] | None = None,
    compresses: bool = False, stretches: Callable[[int, int], int] | None = None, ordered: bool = False,
    equal: bool = False, likeness: Likeness | None = None, rounds: Callable[[Plan], Rounds] | None = None,
) -> Callable[[Callable[[Draft], None]], Callable[..., Plan]]:  # fmt: skip
    """Enter a drawing function into the table under `name`; it is replaced by the `build` of its entry.

    `cost` and `levels` are rows for `hetcoll.plan.costs`, which has those of the library's own: what it takes by the
    number of ranks, or by the ranks of each host. Without one it is taken only by name, never by itself.
    """

    def enter(draw: Callable[[Draft], None]) -> Callable[..., Plan]:
        entry = Algorithm(
            name, collective, draw, supports, compresses, stretches, ordered, equal, likeness=likeness, rounds=rounds
        )
        if ALGORITHMS.setdefault(collective, {}).setdefault(name, entry) is not entry:
            raise ArgumentError(f"{collective.label} has an algorithm called {name} already")
        if cost is not None:
            COSTS.setdefault(collective, {})[name] = cost
        if levels is not None:
            LEVELS.setdefault(collective, {})[name] = levels
        return entry.build

    return enter


def stretched(count: int, size: int, stretches: int) -> tuple[int, ...]:
    """Where each unit begins when `count` elements are cut into stretches of `size` units: rising offsets.

    All units are as long as one another but those of the last stretch, among which what is left is cut evenly.
    """
    length = count // (size * stretches) // _GRAIN * _GRAIN
    last = length * size * (stretches - 1)
    starts = [length * unit for unit in range(size * (stretches - 1))]
    return (*starts, *(last + at for at in cut(count - last, size)))


def known(collective: Collective) -> dict[str, Algorithm]:
    """The entries for a collective, or a form of one with counts, by their names."""
    plain = collective.plain
    table = ALGORITHMS.get(plain, {})
    return table if collective is plain else {name: entry for name, entry in table.items() if not entry.equal}


def find(collective: Collective, name: str) -> Algorithm:
    """The entry called `name`.

    Raises
    ------
    ArgumentError
        There is none; says which there are.
    """
    found = ALGORITHMS.get(collective.plain, {}).get(name)
    if found is None or (found.equal and collective is not collective.plain):
        there = ", ".join(sorted(known(collective))) or "none"
        raise ArgumentError(f"no algorithm {name!r} for {collective.label}: there are {there}")
    return found
