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
`simulator` proves plans; ``native/plan/plan.cc`` reads `Plan.encode`.

Examples
--------
>>> cut(10, 4)
(0, 2, 5, 7, 10)
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, repeat, starmap
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError
from ..types import Collective
from .steps import MOST_NUMBERS, Buf, Columns, Ints, Local, Numbers, Op, Span, Spans, Step, fresh, row_of

__all__ = [
    "HEADER", "MAGIC", "MOST_UNITS", "P2P_CHANNEL", "SPAN", "STEP", "Buf", "Builder", "Columns", "Local", "Op", "Plan",
    "Points", "Span", "Spans", "Step", "cut", "offsets",
]  # fmt: skip

MAGIC = 0x48435033  # "HCP3"
P2P_CHANNEL = 2  # of messages, which no collective has
HEADER = struct.Struct("<IHHIIIIIBBHII")
STEP = struct.Struct("<BBBBiiiiiiiIIII")
SPAN = struct.Struct("<iii")
MOST_UNITS = 1 << 30  # of a buffer, and of its copies in SCRATCH: kMostUnits in native/plan/plan.cc
assert (HEADER.size, STEP.size) == (40, 48)  # native/plan/plan.h asserts the same
_NO_SPANS = np.zeros((3, 0), np.int64)
_NOTHING = np.zeros(0, np.int64)
_ROW = struct.Struct("11q").pack  # of short rows NumPy takes longer
FEW = 24  # steps: so few are made faster one by one
Points = tuple[Sequence[int], Sequence[int]]
"""Units of SEND, and of RECV, in rising order: see `Plan.points`."""


@dataclass(slots=True, unsafe_hash=True)
class Plan:
    """What rank `rank` of `size` does for one collective. Never changed, as a `Step`: a rank may draw thousands.

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
    `batches`: the first of some steps of one lane that stand side by side, and how many there are: they do one thing
    for several parts of the data, whose pieces take turns (`pipeline`).
    """

    collective: Final[Collective]
    algorithm: Final[str]
    size: Final[int]
    rank: Final[int]
    send_units: Final[int]
    recv_units: Final[int]
    steps: Final[Sequence[Step]]
    root: Final[int] = 0
    scratch_copies: Final[int] = 0
    scratch_like: Final[Buf] = Buf.SEND
    credits: Final[int] = 0
    pieces: Final[int] = 1
    islands: Final[tuple[tuple[int, ...], ...]] = ()
    apart: Final[bool] = False
    compress: Final[bool] = False
    staged: Final[bool] = False
    stretches: Final[int] = 1
    redundant: Final[bool] = False
    ordered: Final[bool] = False
    equal: Final[bool] = False
    batches: Final[tuple[tuple[int, int], ...]] = ()
    _columns: Columns | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def columns(self) -> Columns:
        """The steps in columns."""
        if self._columns is None:
            self._columns = self.steps if isinstance(self.steps, Columns) else columns_of(self.steps)
        return self._columns

    @property
    def lanes(self) -> int:
        """The number of lanes."""
        return 1 + int(self.columns.lane.max(initial=-1))

    @property
    def edges(self) -> frozenset[tuple[int, int]]:
        """The (peer, channel) pairs that this rank talks over, in either direction."""
        _, _, peer, channel, _ = self.columns.fields
        talks = peer >= 0
        return frozenset(zip(peer[talks].tolist(), channel[talks].tolist(), strict=True))

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
        columns = self.columns
        buf, start, count = _wide(self, np.concatenate([columns.src, columns.dst, columns.parts], axis=1))
        kept, scratch = buf >= 0, buf == Buf.SCRATCH
        start = np.where(scratch, start % self.units(self.scratch_like), start) if scratch.any() else start
        start = start + begin * (np.where(scratch, self.scratch_like, buf) == small).astype(start.dtype)
        found = {0, max(send, recv), begin, end, *start[kept].tolist(), *(start + count)[kept].tolist()}
        larger = tuple(sorted(found))
        smaller = tuple(point - begin for point in larger if begin <= point <= end)
        return (smaller, larger) if small is Buf.SEND else (larger, smaller)

    @property
    def island(self) -> tuple[int, ...]:
        """The members of this rank's island, in order."""
        return next((island for island in self.islands if self.rank in island), (self.rank,))

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
        units, place, columns = (self.send_units, self.recv_units), self.place, self.columns
        src, dst, parts = columns.src, columns.dst, columns.parts if columns.locals else _NO_SPANS
        if points is not None:
            names = _Names(self, points)
            units, place = names.units, names.place
            src, dst, parts = map(names.numbered, (src, dst, parts))
        op, lane, peer, channel, compressed = columns.fields
        rows = np.zeros((STEP.size // 4, len(op)), np.int64)
        rows[1], rows[2:5], rows[5:8], rows[8], rows[9] = peer, src, dst, columns.ends[:-1], np.diff(columns.ends)
        if columns.locals:
            places = {rank: at for at, rank in enumerate(self.island)}
            found = [(local.kind, places.get(local.root, -1), len(local.parts)) for local in columns.locals.values()]
            channel, at = channel.copy(), [*columns.locals]
            channel[at], rows[1, at], rows[11, at] = np.array(found).T
            rows[10] = np.cumsum(rows[11]) - rows[11]
        if ((op | lane | channel) >> 8).any():
            raise ArgumentError(f"wanted operations, lanes and channels of 0 to 255 in a plan, got lane {lane.max()}")
        rows[0] = op | lane << 8 | channel << 16 | compressed << 24
        head = HEADER.pack(
            MAGIC, 1 + int(lane.max(initial=-1)), self.collective, len(op), len(columns.deps), *units,
            self.scratch_copies, self.scratch_like, self.apart | self.staged << 1 | self.redundant << 2, self.credits,
            parts.shape[1], place,
        )  # fmt: skip
        return head + _words(rows.T, columns.deps, parts.T)


def _words(*arrays: Numbers) -> bytes:
    """As the engine reads them, in 32 bits each."""
    found = b""
    for numbers in arrays:
        if numbers.size and not -(1 << 31) <= numbers.min() <= numbers.max() < 1 << 31:
            raise ArgumentError(f"wanted numbers of 32 bits in a plan, got {numbers.min()} to {numbers.max()}")
        found += numbers.astype("<i4").tobytes()
    return found


def _wide(plan: Plan, units: Numbers) -> Numbers:
    """Numbers of units, as Python's integers where there are more than NumPy's hold."""
    return units.astype(np.object_) if max(map(plan.units, Buf)) >= MOST_NUMBERS else units


class _Names:
    """The numbers by which the engine knows a plan's units where it is to know them by the plan's points."""

    def __init__(self, plan: Plan, points: Points) -> None:
        self._plan, self._like, self._whole = plan, plan.scratch_like, plan.units(plan.scratch_like)
        self._points = [_wide(plan, np.array(each)) for each in points]
        self.units = len(points[0]) - 1, len(points[1]) - 1
        larger = self._points[Buf.SEND if plan.send_units > plan.recv_units else Buf.RECV]
        self.place = int(np.searchsorted(larger, plan.place))

    def numbered(self, spans: Numbers) -> Numbers:
        """Spans, in units that lie between two points."""
        buf, start, count = _wide(self._plan, spans)
        found = np.zeros(spans.shape, np.int64)
        found[0] = buf
        scratch = buf == Buf.SCRATCH
        copy = np.where(scratch, start // self._whole, 0)
        start = start - copy * self._whole
        for each in (Buf.SEND, Buf.RECV):
            there = (buf == each) | (scratch if each is self._like else False)
            begin, end = (np.searchsorted(self._points[each], at[there]) for at in (start, start + count))
            found[1, there], found[2, there] = copy[there] * self.units[each] + begin, end - begin
        return found


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


def columns_of(steps: Sequence[Step]) -> Columns:
    """The columns of any steps."""
    rows, deps, ends, locals = [], list[int](), [0], dict[int, Local]()
    for i, s in enumerate(steps):
        src, dst = s.src, s.dst
        froms = (-1, 0, 0) if src is None else (src.buf, src.start, src.count)
        tos = (-1, 0, 0) if dst is None else (dst.buf, dst.start, dst.count)
        rows.append((s.op, s.lane, s.peer, s.channel, s.compressed, *froms, *tos))
        deps += s.deps
        ends.append(len(deps))
        if s.local is not None:
            locals[i] = s.local
    try:
        table: Numbers = np.frombuffer(b"".join(starmap(_ROW, rows)), np.int64).reshape(-1, 11).T
    except struct.error:
        table = np.array(rows, np.object_).reshape(-1, 11).T
    made = Columns(table[:5].astype(np.int64), table[5:8], table[8:], np.array(deps, np.int64), np.array(ends), locals)
    made._steps = tuple(steps)
    return made


@dataclass(slots=True)
class Builder:
    """Collects steps; `add` returns the index to name in later `deps`."""

    lanes: array[int] = field(default_factory=partial(array, "i"), init=False)  # of each step
    _waited: dict[tuple[int, int], int] = field(default_factory=dict, init=False)  # by lane and other lane: the last
    # step of the other that the lane has waited for
    _many: list[Columns] = field(default_factory=list, init=False)
    _single: list[Step] = field(default_factory=list, init=False)  # since then

    @property
    def steps(self) -> Sequence[Step]:
        """All of them, so far."""
        if not self._many:
            return tuple(self._single)
        self._fold()
        return Columns.joined(self._many)

    def _fold(self) -> None:
        if self._single:
            self._many.append(columns_of(self._single))
            self._single = []

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
        kept = self._fresh(lane, deps) if deps else ()
        self._single.append(Step(op, lane, src, dst, peer, channel, kept, local, compressed))
        self.lanes.append(lane)
        return len(self.lanes) - 1

    def _fresh(self, lane: int, deps: Iterable[int | None]) -> tuple[int, ...]:
        """The deps that are left."""
        lanes = self.lanes
        kept: tuple[int, ...] = ()
        for d in deps:
            if d is not None and d >= 0 and (other := lanes[d]) != lane and d > self._waited.get((lane, other), -1):
                kept += (d,)
        if kept:
            if len(kept) > 1:
                kept = tuple(sorted(set(kept)))
            for d in kept:
                self._waited[lane, lanes[d]] = d
        return kept

    def add_many(
        self,
        op: Op,
        lane: int,
        src: Spans | Span | None = None,
        dst: Spans | Span | None = None,
        peer: Ints | int = -1,
        channel: int = 0,
        deps: Iterable[Ints | int | None] = (),
        compressed: NDArray[np.bool_] | bool = False,
    ) -> Ints:
        """Append steps of one lane, and return their indices. What is an array has a row for each of them; in deps -1
        stands there for "nothing to wait for"."""
        froms, tos = 0 if src is None else src.start, 0 if dst is None else dst.start
        n, first = np.broadcast(peer, compressed, froms, tos).size, len(self.lanes)
        if n < FEW:
            waits = [np.broadcast_to(d, n).tolist() for d in deps if d is not None]
            sources = src.each(n) if isinstance(src, Spans) else repeat(src, n)
            targets = dst.each(n) if isinstance(dst, Spans) else repeat(dst, n)
            peers, codes = np.broadcast_to(peer, n).tolist(), np.broadcast_to(compressed, n).tolist()
            afters = zip(*waits, strict=True) if waits else repeat((), n)
            for a, b, to, after, code in zip(sources, targets, peers, afters, codes, strict=True):
                self.add(op, lane, a, b, to, channel, after, None, code)
            return np.arange(first, first + n)
        values = (op, lane, peer, channel, compressed, *row_of(src), *row_of(dst))
        wide = any(isinstance(value, np.ndarray) and value.dtype == np.object_ for value in values)
        table: Numbers = np.empty((len(values), n), np.object_ if wide else np.int64)
        for row, value in enumerate(values):
            table[row] = value
        at, waits = [_NOTHING], [_NOTHING]
        for d in (d for d in deps if d is not None):  # the first step waits for what all wait for
            at.append(np.arange(n) if isinstance(d, np.ndarray) else np.zeros(1, np.int64))
            waits.append(np.broadcast_to(d, at[-1].shape))
        return self.add_table(table, np.concatenate(at), np.concatenate(waits))

    def add_table(self, table: Numbers, at: Ints, deps: Ints) -> Ints:
        """Append steps of any lanes, whose fields, src and dst are the rows of `table`, and return their indices. The
        step in column ``at[i]`` waits for ``deps[i]``, or for nothing if that is -1."""
        first, n = len(self.lanes), table.shape[1]
        self._fold()
        fields = table[:5].astype(np.int64, copy=False)
        self.lanes.frombytes(fields[1].astype(np.intc).tobytes())
        at, deps = fresh(at[deps >= 0] + first, deps[deps >= 0], self.lanes, self._waited)
        ends = np.zeros(n + 1, np.int64)
        np.cumsum(np.bincount(at - first, minlength=n), out=ends[1:])
        self._many.append(Columns(fields, table[5:8], table[8:], deps, ends, {}))
        return np.arange(first, first + n)
