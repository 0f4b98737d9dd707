"""The steps of a plan, one by one and in columns.

A step is an object to whoever draws one or looks at it. Plans of many peers have 65,000, nearly all of them like their
neighbours but for a peer and a unit: those are drawn, compared and encoded as `Columns`, and are objects only where
somebody looks.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import pairwise, starmap
from typing import Any, ClassVar, Final, overload

import numpy as np
from numpy.typing import NDArray

from ..types import Collective

MOST_NUMBERS = 1 << 61  # units from which on NumPy's integers do not do
Ints = NDArray[np.int64]
Numbers = NDArray[Any]
"""Units: of int64, or Python's own integers where some do not fit."""


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


@dataclass(slots=True, unsafe_hash=True)
class Local:
    """Which collective a LOCAL step is. All members of the rank's island take part, also those it gives nothing to do.
    Never changed, as a `Step`.

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

    kind: Final[Collective]
    root: Final[int] = -1
    parts: Final[tuple[Span | None, ...]] = ()

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
class Spans:
    """A span for each of several steps: an array has one for each, a number is that of all."""

    buf: Buf | Ints
    start: Numbers
    count: Numbers | int = 1

    @classmethod
    def of(cls, spans: Sequence[Span]) -> Spans:
        """These spans."""
        buf, start, count = _table([row_of(span) for span in spans], 3)
        return cls(buf.astype(np.int64), start, count)

    def each(self, n: int) -> list[Span]:
        """Those of `n` steps."""
        columns = (np.broadcast_to(x, n).tolist() for x in (self.buf, self.start, self.count))
        return [Span(_BUFS[buf], start, count) for buf, start, count in zip(*columns, strict=True)]


@dataclass(eq=False)
class Columns(Sequence[Step]):
    """Steps, and what each has in the same row of an array.

    Parameters
    ----------
    fields
        A row each for op, lane, peer, channel and whether it is compressed; a column for each step.
    src, dst
        Three rows: buffer, which is -1 where there is no span, start and count.
    deps, ends
        Step i waits for ``deps[ends[i] : ends[i + 1]]``.
    locals
        By step.
    """

    PEER: ClassVar = 2  # the row of `fields`

    fields: Ints
    src: Numbers
    dst: Numbers
    deps: Ints
    ends: Ints
    locals: dict[int, Local]

    @property
    def lane(self) -> Ints:
        """Of each step."""
        lane: Ints = self.fields[1]
        return lane

    @property
    def peer(self) -> Ints:
        """Of each step."""
        peer: Ints = self.fields[self.PEER]
        return peer

    @classmethod
    def joined(cls, parts: Sequence[Columns]) -> Columns:
        """The steps of all parts; their deps are numbers of steps of the whole already."""
        steps, waits, ends, locals = 0, 0, [_NONE], dict[int, Local]()
        for part in parts:
            ends.append(part.ends[1:] + waits)
            locals |= {steps + i: local for i, local in part.locals.items()}
            steps, waits = steps + len(part), waits + len(part.deps)
        rows = zip(*((part.fields, part.src, part.dst, part.deps) for part in parts), strict=True)
        fields, src, dst, deps = (np.concatenate(each, axis=-1) for each in rows)
        return cls(fields, src, dst, deps, np.concatenate(ends), locals)

    @cached_property
    def parts(self) -> Numbers:
        """The spans of LOCAL steps, as in `src`, one step's after another's."""
        return _table([row_of(part) for local in self.locals.values() for part in local.parts], 3)

    @cached_property
    def _steps(self) -> tuple[Step, ...]:
        """As objects."""
        ops, lanes, peers, channels, compressed = self.fields.tolist()
        deps = self.deps.tolist()
        after = [tuple(deps[a:b]) if a < b else () for a, b in pairwise(self.ends.tolist())]
        locals = map(self.locals.get, range(len(self))) if self.locals else [None] * len(self)
        rows = zip(
            ops, lanes, _spans(self.src), _spans(self.dst), peers, channels, after, locals, compressed, strict=True
        )
        return tuple(
            [
                Step(_OPS[op], lane, src, dst, peer, channel, deps, local, bool(codes))
                for op, lane, src, dst, peer, channel, deps, local, codes in rows
            ]
        )

    def __len__(self) -> int:
        return len(self.fields[0])

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps)

    @overload
    def __getitem__(self, at: int) -> Step: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Step, ...]: ...
    def __getitem__(self, at: int | slice) -> Step | tuple[Step, ...]:
        return self._steps[at]

    def __eq__(self, other: object) -> bool:
        return self._steps == (other._steps if isinstance(other, Columns) else other)

    def __hash__(self) -> int:
        return hash(self._steps)


_NONE = np.zeros(1, np.int64)
_OPS, _BUFS = tuple(Op), tuple(Buf)  # an enum's members are slow to look up


def row_of(span: Spans | Span | None) -> tuple[Any, Any, Any]:
    """Buffer, start and count, as in `Columns`."""
    return (-1, 0, 0) if span is None else (span.buf, span.start, span.count)


def _table(rows: Sequence[tuple[int, ...]], width: int) -> Numbers:
    """An array of these columns."""
    pack = struct.Struct(f"{width}q").pack  # of short rows NumPy takes longer
    try:
        return np.frombuffer(b"".join(starmap(pack, rows)), np.int64).reshape(-1, width).T
    except struct.error:
        return np.array(rows, np.object_).reshape(-1, width).T


def table_of(first: Ints | int, *others: Numbers) -> Numbers:
    """An array of these rows; a number is the same in all columns."""
    table = np.empty((1 + len(others), others[0].size), np.result_type(*others))  # np.stack takes longer
    for row, cells in enumerate((first, *others)):
        table[row] = cells
    return table


def _spans(table: Numbers) -> list[Span | None]:
    return [None if buf < 0 else Span(_BUFS[buf], start, count) for buf, start, count in table.T.tolist()]


def distinct(numbers: Numbers) -> tuple[Numbers, Ints]:
    """The numbers that are there, rising, and where each first is. np.unique does the same, but imports masked arrays,
    which takes longer than to draw a plan."""
    order = np.argsort(numbers, kind="stable")
    rising, first = numbers[order], np.ones(order.size, np.bool_)
    first[1:] = rising[1:] != rising[:-1]
    return rising[first], order[first]


def fresh(at: Ints, deps: Ints, lanes: array[int], waited: dict[tuple[int, int], int]) -> tuple[Ints, Ints]:
    """Which steps wait for which, where step ``at[i]`` was to wait for ``deps[i]``: in order, each once, and without
    what its own lane does, or an earlier step of that has waited for. `waited` has the last one by lane and other lane.

    No variable holds a view of `lanes`: who looks at a thread's frames, as a report of its calls does, keeps variables
    alive, and an array that has a view cannot grow.
    """
    order = np.lexsort((deps, at))
    at, deps = at[order], deps[order]
    left = np.ones(at.shape, np.bool_)
    left[1:] = (np.diff(at) != 0) | (np.diff(deps) != 0)
    edges = np.frombuffer(lanes, np.intc)[at].astype(np.int64) << 32 | np.frombuffer(lanes, np.intc)[deps]
    for edge in distinct(edges)[0].tolist():
        lane, other = edge >> 32, edge & 0xFFFFFFFF
        these = np.flatnonzero(edges == edge)
        if lane == other:
            left[these] = False
            continue
        steps, waits = at[these], deps[these]
        last = np.maximum.accumulate(np.append(waited.get((lane, other), -1), waits))
        left[these] &= waits > last[np.searchsorted(steps, steps)]
        waited[lane, other] = int(last[-1])
    return at[left], deps[left]
