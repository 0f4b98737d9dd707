"""The plan: a collective as data.

A plan is what one rank does: steps over a few lanes. A lane runs its steps in order; lanes run beside each other.
Steps name *units*, not bytes: a buffer of `count` elements is cut into its plan's number of units by `cut`, when the
plan is launched, so one plan serves every size.

Rules that make a set of plans (one a rank) a Kahn network, whose result does not depend on timing:

* a (source, destination, channel) triple is a FIFO, matched by order, written by one lane and read by one lane;
* `deps` are data hazards (read after write, write after read, write after write) between lanes of the same rank;
* plans are written as if the input and output buffers were the same memory, so the same plan is right in place.

Where a step and one it depends on touch the very same span, the engine lets the second follow the first at the pace of
elements instead of whole steps: that is what pipelines a ring or a tree, and why a plan needs no pieces of its own.
`simulator.py` proves plans; ``native/engine/plan.cc`` reads `Plan.encode`.

Examples
--------
>>> cut(10, 4)
(0, 2, 5, 7, 10)
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from .types import Collective

MAGIC = 0x48435031  # "HCP1"
HEADER = struct.Struct("<IHHIIIIIHH")
STEP = struct.Struct("<BBHiiiiiiiII")
assert (HEADER.size, STEP.size) == (32, 40)  # native/engine/plan.h asserts the same


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


@dataclass(frozen=True, slots=True)
class Span:
    """`count` units of `buf` from unit `start` on.

    SCRATCH consists of whole copies of the buffer that `Plan.scratch_like` names: unit `k * units + i` is unit `i`
    of copy `k`. A span never crosses from one copy into the next.
    """

    buf: Buf
    start: int
    count: int = 1

    def __str__(self) -> str:
        return f"{self.buf.name.lower()}[{self.start}:{self.start + self.count}]"


@dataclass(frozen=True, slots=True)
class Step:
    """One step. `deps` are indices into the same plan's steps."""

    op: Op
    lane: int
    src: Span | None = None
    dst: Span | None = None
    peer: int = -1
    channel: int = 0
    deps: tuple[int, ...] = ()

    def __str__(self) -> str:
        parts = [f"{self.lane}:{self.op.name.lower()}"]
        if self.src is not None:
            parts.append(str(self.src))
        if self.dst is not None:
            parts.append(f"-> {self.dst}")
        if self.peer >= 0:
            parts.append(f"peer {self.peer}" + (f" channel {self.channel}" if self.channel else ""))
        if self.deps:
            parts.append("after " + ",".join(map(str, self.deps)))
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Plan:
    """What rank `rank` of `size` does for one collective.

    `send_units` and `recv_units` are the numbers of units that the user's buffers are cut into. SCRATCH is
    `scratch_copies` copies of `scratch_like`. `credits` is the least number of slots a channel needs; 0 means that
    the plan completes even when every send waits for its receive. Where a buffer consists of shares, one for each rank
    or message, every share is cut into `pieces` units.
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

    @property
    def lanes(self) -> int:
        return 1 + max((step.lane for step in self.steps), default=-1)

    @property
    def edges(self) -> frozenset[tuple[int, int]]:
        """The (peer, channel) pairs that this rank talks over, in either direction."""
        return frozenset((step.peer, step.channel) for step in self.steps if step.peer >= 0)

    def units(self, buf: Buf) -> int:
        """The number of units in `buf`."""
        if buf is Buf.SCRATCH:
            return self.scratch_copies * self.units(self.scratch_like)
        return self.send_units if buf is Buf.SEND else self.recv_units

    def dump(self) -> str:
        """The plan for people, a line a step."""
        head = f"{self.collective.label} by {self.algorithm}: rank {self.rank} of {self.size}"
        return "\n".join([head, *(f"{i:3d}  {step}" for i, step in enumerate(self.steps))])

    def encode(self) -> bytes:
        """The fixed little-endian records that the engine loads: header, steps, then all deps."""
        deps: list[int] = []
        rows: list[bytes] = []
        for step in self.steps:
            src = (-1, 0, 0) if step.src is None else (step.src.buf, step.src.start, step.src.count)
            dst = (-1, 0, 0) if step.dst is None else (step.dst.buf, step.dst.start, step.dst.count)
            row = (step.op, step.lane, step.channel, step.peer, *src, *dst, len(deps), len(step.deps))
            rows.append(STEP.pack(*row))
            deps.extend(step.deps)
        head = HEADER.pack(
            MAGIC, self.lanes, self.collective, len(self.steps), len(deps), self.send_units, self.recv_units,
            self.scratch_copies, self.scratch_like, self.credits,
        )  # fmt: skip
        return head + b"".join(rows) + struct.pack(f"<{len(deps)}I", *deps)


def cut(count: int, units: int) -> tuple[int, ...]:
    """Where each unit of a buffer of `count` elements begins, and the end: `units + 1` offsets.

    Unit i is [i*count//units, (i+1)*count//units): sizes differ by at most one, and some are empty when count < units.
    The same rule is in ``native/engine/plan.cc``; ``tests/test_plan.py`` holds them equal.
    """
    return tuple(i * count // units for i in range(units + 1))


@dataclass(slots=True)
class Builder:
    """Collects steps; `add` returns the index to name in later `deps`."""

    steps: list[Step] = field(default_factory=list)

    def add(
        self,
        op: Op,
        lane: int,
        *,
        src: Span | None = None,
        dst: Span | None = None,
        peer: int = -1,
        channel: int = 0,
        deps: Iterable[int | None] = (),
    ) -> int:
        """Append a step. `None` among the deps stands for "nothing to wait for"; same-lane deps are dropped."""
        kept = tuple(sorted({d for d in deps if d is not None and self.steps[d].lane != lane}))
        self.steps.append(Step(op, lane, src, dst, peer, channel, kept))
        return len(self.steps) - 1
