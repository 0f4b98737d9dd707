"""The plan: a collective as data.

A plan is what one rank does: steps over a few lanes. A lane runs its steps in order; lanes run beside each other.
Steps name *units*, not bytes: a buffer of `count` elements is cut into its plan's number of units by `cut`, when the
plan is launched, so one plan serves every size. Units are a common denominator and cost nothing: there may be any
number of them, and what a rank keeps are the `points` at which its own spans begin and end.

Rules that make a set of plans (one a rank) a Kahn network, whose result does not depend on timing:

* a (source, destination, channel) triple is a FIFO, matched by order, written by one lane and read by one lane;
* a compressed message carries nothing but what a ROUND step of the very same span has made, or a compressed message
  has brought: then its codes lose nothing, and whoever keeps what it sent has what the others got;
* `deps` are data hazards (read after write, write after read, write after write) between lanes of the same rank;
* plans are written as if the input and output buffers were the same memory, so the same plan is right in place.

Where a step and one it depends on touch the very same span, the engine lets the second follow the first at the pace of
elements instead of whole steps: that is what pipelines a ring or a tree, and why a plan needs no pieces of its own.
`simulator.py` proves plans; ``native/plan/plan.cc`` reads `Plan.encode`.

Examples
--------
>>> cut(10, 4)
(0, 2, 5, 7, 10)
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import accumulate
from typing import Final

from ..types import Collective

MAGIC = 0x48435033  # "HCP3"
P2P_CHANNEL = 2  # of messages, which no collective has
HEADER = struct.Struct("<IHHIIIIIBBHII")
STEP = struct.Struct("<BBBBiiiiiiiIIII")
SPAN = struct.Struct("<iii")
MOST_UNITS = 1 << 30  # of a buffer, and of its copies in SCRATCH: kMostUnits in native/plan/plan.cc
assert (HEADER.size, STEP.size) == (40, 48)  # native/plan/plan.h asserts the same
Points = tuple[Sequence[int], Sequence[int]]
"""Units of SEND, and of RECV, in rising order: see `Plan.points`."""


class Buf(IntEnum):
    """Which memory a span lies in."""

    SEND = 0
    RECV = 1
    SCRATCH = 2


class Op(IntEnum):
    """What a step does. There are no fused operations: fusing is the engine's business."""

    SEND = 0  # src -> peer
    RECV = 1  # peer -> dst
    RECV_REDUCE = 2  # dst = src (+) what the peer sent; src may be dst
    COPY = 3  # dst = src
    REDUCE = 4  # dst = dst (+) src
    SCALE = 5  # dst = dst / number of ranks (AVG)
    LOCAL = 6  # a vendor collective inside the island
    ROUND = 7  # dst = src as a compressed edge carries it, with what was lost at the last call added first


@dataclass(slots=True, unsafe_hash=True)
class Span:
    """`count` units of `buf` from unit `start` on. Never changed, as a `Step`.

    SCRATCH consists of whole copies of the buffer that `Plan.scratch_like` names: unit `k * units + i` is unit `i`
    of copy `k`. A span never crosses from one copy into the next.
    """

    buf: Final[Buf]
    start: Final[int]
    count: Final[int] = 1

    def __str__(self) -> str:
        return f"{self.buf.name.lower()}[{self.start}:{self.start + self.count}]"


@dataclass(frozen=True, slots=True)
class Local:
    """Which collective a LOCAL step is. All members of the rank's island take part, also those it gives nothing to do.

    `root` is a rank, for a rooted collective. `parts` has one span, or None for nothing, for each member of the island
    in its order. Who has which spans:

    ==============  ============================================================================
    ALLREDUCE       src, dst on everyone
    REDUCE          src on everyone; dst on the root
    BROADCAST       src on the root; dst on the others
    ALLGATHER       src: what I give; parts: where I put what each member gives (mine may be src)
    REDUCE_SCATTER  parts: my terms of what each member gets; dst: what I get (may be my part)
    GATHER          src: what I give; parts on the root: where it puts what each member gives
    SCATTER         parts on the root: what it gives each member; dst: what I get
    ALLTOALL        parts: what I send to each member, then where I put what each sends; for several messages, either
                    half has a row of members for each
    ==============  ============================================================================

    Reductions are those of the call, except that of an average they are the sum. Vendor libraries have calls for equal
    parts that lie side by side in the order of members; everything else is a group of rooted calls.
    """

    kind: Collective
    root: int = -1
    parts: tuple[Span | None, ...] = ()

    def __str__(self) -> str:
        root = f" root {self.root}" if self.root >= 0 else ""
        parts = " of " + ",".join("-" if part is None else str(part) for part in self.parts) if self.parts else ""
        return self.kind.label + root + parts


@dataclass(slots=True, unsafe_hash=True)
class Step:
    """One step. `deps` are indices into the same plan's steps. LOCAL steps of a rank are all in one lane.

    Never changed: the type checker sees to it, as a plan may have 100,000 steps, and a frozen one takes 4 times as long
    to make.
    """

    op: Final[Op]
    lane: Final[int]
    src: Final[Span | None] = None
    dst: Final[Span | None] = None
    peer: Final[int] = -1
    channel: Final[int] = 0
    deps: Final[tuple[int, ...]] = ()
    local: Final[Local | None] = None
    compressed: Final[bool] = False

    @property
    def lends(self) -> bool:
        """Whether it is a send whose `src` a receiver may read where it lies: not where codes of it travel."""
        return self.op is Op.SEND and not self.compressed

    def __str__(self) -> str:
        parts = [f"{self.lane}:{self.op.name.lower()}"]
        if self.local is not None:
            parts.append(str(self.local))
        if self.src is not None:
            parts.append(str(self.src))
        if self.dst is not None:
            parts.append(f"-> {self.dst}")
        if self.peer >= 0:
            parts.append(f"peer {self.peer}" + (f" channel {self.channel}" if self.channel else ""))
        if self.compressed:
            parts.append("compressed")
        if self.deps:
            parts.append("after " + ",".join(map(str, self.deps)))
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Plan:
    """What rank `rank` of `size` does for one collective.

    `send_units` and `recv_units` are the numbers of units that the user's buffers are cut into. SCRATCH is
    `scratch_copies` copies of `scratch_like`. `credits` is the least number of slots a channel needs; 0 means that
    the plan completes even when every send waits for its receive. `apart` says that only calls in place need credits:
    where input and output are different memory, the plan needs none, and no deps but those that its memory then still
    asks for. Where a buffer consists of shares, one for each rank
    or message, every share is cut into `pieces` units. `islands` are the ranks of each island, in a plan with LOCAL
    steps. `compress`: some edges are compressed. `staged`: SCRATCH is to be where the other ranks of the host can read
    it, so what is sent from there is not copied. `stretches`: the buffer is cut into so many stretches of equal numbers
    of units, and the units of all but the last are as long as one another (`algorithms.base.stretched`). `redundant`:
    several ranks reduce the same elements, each for itself, and must get the same bits of a NaN, too. `ordered`: every
    element is reduced in the order of ranks, ((r0 + r1) + r2) + ... `equal`: all shares are of one length.
    """

    collective: Collective
    algorithm: str
    size: int
    rank: int
    send_units: int
    recv_units: int
    steps: tuple[Step, ...]
    root: int = 0
    scratch_copies: int = 0
    scratch_like: Buf = Buf.SEND
    credits: int = 0
    pieces: int = 1
    islands: tuple[tuple[int, ...], ...] = ()
    apart: bool = False
    compress: bool = False
    staged: bool = False
    stretches: int = 1
    redundant: bool = False
    ordered: bool = False
    equal: bool = False

    @property
    def lanes(self) -> int:
        """The number of lanes."""
        return 1 + max([step.lane for step in self.steps], default=-1)

    @property
    def edges(self) -> frozenset[tuple[int, int]]:
        """The (peer, channel) pairs that this rank talks over, in either direction."""
        return frozenset([(step.peer, step.channel) for step in self.steps if step.peer >= 0])

    def units(self, buf: Buf) -> int:
        """The number of units in `buf`."""
        if buf is Buf.SCRATCH:
            return self.scratch_copies * self.units(self.scratch_like)
        return self.send_units if buf is Buf.SEND else self.recv_units

    @property
    def place(self) -> int:
        """The unit of the larger of SEND and RECV at which the smaller one begins in place: this rank's share."""
        alike = self.send_units == self.recv_units or self.collective is Collective.P2P
        return 0 if alike else self.rank * min(self.send_units, self.recv_units)

    @property
    def crowded(self) -> bool:
        """Whether there are more units than the engine numbers: then `encode` needs `points`."""
        return max(self.send_units, self.recv_units, self.units(Buf.SCRATCH)) > MOST_UNITS

    def points(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The units of SEND and of RECV at which spans of this rank begin or end, and both ends: rising, each once.

        What shares memory in place, and what lies in copies of the other, is cut alike.
        """
        send, recv = self.send_units, self.recv_units
        small = Buf.SEND if send < recv else Buf.RECV
        begin, end = self.place, self.place + min(send, recv)
        found = {0, max(send, recv), begin, end}
        for step in self.steps:
            for span in (step.src, step.dst, *(() if step.local is None else step.local.parts)):
                if span is not None:
                    buf, start = span.buf, span.start
                    if buf is Buf.SCRATCH:
                        buf = self.scratch_like
                        start %= self.units(buf)
                    start += begin * (buf is small)
                    found.update((start, start + span.count))
        larger = tuple(sorted(found))
        smaller = tuple(point - begin for point in larger if begin <= point <= end)
        return (smaller, larger) if small is Buf.SEND else (larger, smaller)

    @property
    def island(self) -> tuple[int, ...]:
        """The members of this rank's island, in order."""
        return next((island for island in self.islands if self.rank in island), (self.rank,))

    def _place(self, rank: int) -> int:
        return self.island.index(rank) if rank in self.island else -1

    def dump(self) -> str:
        """The plan for people, a line a step."""
        head = f"{self.collective.label} by {self.algorithm}: rank {self.rank} of {self.size}"
        return "\n".join([head, *(f"{i:3d}  {step}" for i, step in enumerate(self.steps))])

    def encode(self, points: Points | None = None) -> bytes:
        """The fixed little-endian records that the engine loads: header, steps, all deps, then all parts.

        A LOCAL step has the number of its collective in `channel`, and its root's place in the island, or -1, in
        `peer`. With `points`, as the method gives them, what lies between two is one unit: the plan is to be bound to
        offsets of these points (`offsets`).
        """
        units, place, record = (self.send_units, self.recv_units), self.place, _record
        if points is not None:
            names = _Names(self, points)
            units, place, record = names.units, names.place, names.record
        deps: list[int] = []
        parts: list[Span | None] = []
        rows: list[bytes] = []
        for step in self.steps:
            mine = () if step.local is None else step.local.parts
            where = (step.channel, step.peer) if step.local is None else (step.local.kind, self._place(step.local.root))
            spans = (*record(step.src), *record(step.dst))
            channel, peer = where
            counts = (len(deps), len(step.deps), len(parts), len(mine))
            row = (step.op, step.lane, channel, step.compressed, peer, *spans, *counts)
            rows.append(STEP.pack(*row))
            deps.extend(step.deps)
            parts.extend(mine)
        head = HEADER.pack(
            MAGIC, self.lanes, self.collective, len(self.steps), len(deps), *units,
            self.scratch_copies, self.scratch_like, self.apart | self.staged << 1 | self.redundant << 2, self.credits,
            len(parts), place,
        )  # fmt: skip
        tail = [struct.pack(f"<{len(deps)}I", *deps), *[SPAN.pack(*record(part)) for part in parts]]
        return b"".join([head, *rows, *tail])


def _record(span: Span | None) -> tuple[int, int, int]:
    """A span as the engine knows it."""
    return (-1, 0, 0) if span is None else (span.buf, span.start, span.count)


class _Names:
    """The numbers by which the engine knows a plan's units where it is to know them by the plan's points."""

    def __init__(self, plan: Plan, points: Points) -> None:
        self._like, self._whole = plan.scratch_like, plan.units(plan.scratch_like)
        send, recv = ({at: i for i, at in enumerate(each)} for each in points)
        self._numbers = send, recv
        self.units = len(send) - 1, len(recv) - 1
        self.place = (send if plan.send_units > plan.recv_units else recv)[plan.place]

    def record(self, span: Span | None) -> tuple[int, int, int]:
        """As `_record`."""
        if span is None:
            return (-1, 0, 0)
        copy, start, buf = 0, span.start, span.buf
        if buf is Buf.SCRATCH:
            buf = self._like
            copy, start = divmod(start, self._whole)
        number = self._numbers[buf]
        begin, end = number[start], number[start + span.count]
        return (span.buf, copy * self.units[buf] + begin, end - begin)


def cut(count: int, units: int) -> tuple[int, ...]:
    """Where each unit of a buffer of `count` elements begins, and the end: `units + 1` offsets.

    Unit i is [i*count//units, (i+1)*count//units): sizes differ by at most one, and some are empty when count < units.
    The same rule is in ``native/plan/plan.cc``; ``tests/plan/test_plan.py`` holds them equal.
    """
    return tuple(i * count // units for i in range(units + 1))


def offsets(shares: Sequence[int], units: int, points: Sequence[int], grain: int = 1, equal: int = 1) -> list[int]:
    """Where some units begin: the element of each of `points` in a buffer of `shares`, of `units` units each.

    All in elements. Those on the borders of an even cut of a share into `equal` are multiples of `grain` in it, as long
    as one another except that the last ones are shorter or empty; others are rounded down to multiples. By default
    nothing is rounded: this is `cut`, share by share. A buffer that is not cut by rank is one share.
    """
    begins = [0, *accumulate(shares)]
    padded = [-(-count // (equal * grain)) * equal * grain for count in shares] + [0]
    found = []
    for point in points:
        share, unit = divmod(point, units)
        inside = padded[share] * unit // units // grain * grain
        found.append(begins[share] + (min(inside, shares[share]) if unit > 0 else 0))
    return found


@dataclass(slots=True)
class Builder:
    """Collects steps; `add` returns the index to name in later `deps`."""

    steps: list[Step] = field(default_factory=list)
    waited: dict[tuple[int, int], int] = field(default_factory=dict)  # (lane, other lane): its last step waited for

    def add(
        self,
        op: Op,
        lane: int,
        src: Span | None = None,
        dst: Span | None = None,
        peer: int = -1,
        channel: int = 0,
        deps: Iterable[int | None] = (),
        local: Local | None = None,
        compressed: bool = False,
    ) -> int:
        """Append a step. `None` among the deps stands for "nothing to wait for".

        Deps on the same lane, and on what an earlier step of this lane has waited for, are dropped.
        """
        steps = self.steps
        kept: tuple[int, ...] = ()
        for d in deps:
            if d is not None and (other := steps[d].lane) != lane and d > self.waited.get((lane, other), -1):
                kept += (d,)
        if kept:
            if len(kept) > 1:
                kept = tuple(sorted(set(kept)))
            for d in kept:
                self.waited[lane, steps[d].lane] = d
        steps.append(Step(op, lane, src, dst, peer, channel, kept, local, compressed))
        return len(steps) - 1
