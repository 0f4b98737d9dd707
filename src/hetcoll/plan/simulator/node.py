"""What the simulator's parts share: the nodes of a network, and what is wrong with a plan."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import PlanError
from ...types import Collective
from ..ir import Buf, Op, Plan, Span, Step

RECEIVES = (Op.RECV, Op.RECV_REDUCE)


def wrong(plan: Plan, step: int | None, problem: str) -> PlanError:
    """What is wrong with a plan, or with one of its steps."""
    where = f"{plan.collective.label} by {plan.algorithm}, rank {plan.rank} of {plan.size}"
    if step is not None:
        where += f", step {step} ({plan.steps[step]})"
    return PlanError(f"{where}: {problem}", plan.rank, step)


@dataclass(slots=True)
class Node:
    """A step of one rank, its place in the network, and how far it has come."""

    rank: int
    index: int
    step: Step
    before: Node | None  # the previous step of its lane
    deps: list[tuple[Node, bool]]  # and whether this step may follow it element by element
    id: int
    other: Node | None = None  # the other end of its message, or what stands for it
    away: int = 0  # how many strides further than this rank that is
    fifo: int = -1  # the number of its message's FIFO
    group: tuple[Node, ...] = ()  # a LOCAL step on all members of the island, in its order
    sources: tuple[Node, ...] = ()  # of these, the ones whose data it gets
    onward: Node | None = None  # the send by which what this one lends may be lent on: see loans.py
    lent: Node | None = None  # the send whose memory this one may lend on
    met: bool = False  # without slots: a send whose message was received, though what it lent may still be read
    done: int = 0  # pieces
    full: int = 0  # bit set of the nodes that end before this one begins; a send begins when it may be handed over; see
    # `Symmetry.bits` for where ranks stand for others: then these are what the rank itself sees
    over: int = 0  # bit set of the nodes that have ended when this one has
    paced: int = 0  # bit set of the nodes of which each element is done before the same element of this one
    hops: int = 0

    def __str__(self) -> str:
        return f"{self.index} ({self.step})"


def only_in_place(plan: Plan, first: Step, second: Step) -> bool:
    """Whether `second` depends on `first` only where the plan's input and output are the same memory.

    ``native/plan/passes.cc`` has the same rule.
    """
    hazards = _hazards(first, second)
    if any(meet(x, y) for x, y in hazards):
        return False
    return any(meet(_in_place(plan, x), _in_place(plan, y)) for x, y in hazards)


def follows(plan: Plan, first: Step, second: Step) -> bool:
    """Whether `second`, which depends on `first`, may follow it element by element instead of as a whole.

    It may when every hazard between them is about one and the same span. Vendor libraries show no elements before all
    are done. ``native/plan/passes.cc`` has the same rule.
    """
    spans = [(_in_place(plan, x), _in_place(plan, y)) for x, y in _hazards(first, second)]
    meeting = [(x, y) for x, y in spans if meet(x, y)]
    return bool(meeting) and all(x == y for x, y in meeting)


def _hazards(first: Step, second: Step) -> list[tuple[Span, Span]]:
    """What both touch, where one of them writes; nothing where a vendor's library is one of them."""
    if Op.LOCAL in (first.op, second.op):
        return []
    pairs = ((first.dst, second.src), (first.src, second.dst), (first.dst, second.dst))
    return [(x, y) for x, y in pairs if x is not None and y is not None]


def meet(x: Span, y: Span) -> bool:
    return x.buf is y.buf and x.start < y.start + y.count and y.start < x.start + x.count


def _in_place(plan: Plan, span: Span) -> Span:
    """The span as it is named in place, where the smaller of SEND and RECV is this rank's part of the other."""
    if span.buf is Buf.SCRATCH:
        return span
    larger = Buf.SEND if plan.send_units > plan.recv_units else Buf.RECV
    shift = plan.send_units != plan.recv_units and span.buf is not larger
    return Span(larger, span.start + shift * plan.rank * min(plan.send_units, plan.recv_units), span.count)


_ITS_PART = ((Collective.ALLGATHER, Buf.SEND), (Collective.REDUCE_SCATTER, Buf.RECV))


def named_by_rank(plan: Plan) -> set[Buf]:
    """The buffers whose spans have names in `lengths` that depend on whose they are: each rank may have another
    scratch."""
    kind = plan.collective
    found = {buf for buf in (Buf.SEND, Buf.RECV) if kind is Collective.ALLTOALL or (kind, buf) in _ITS_PART}
    return found | {Buf.SCRATCH}


def lengths(plan: Plan, span: Span | None, rank: int | None = None) -> list[tuple[int, ...]]:
    """How long a span is, as a name: spans of the same name are of the same length, whatever the counts are.

    `rank`: whose it is, if not of the plan's own rank. A tuple for each share that it touches; of what consists of
    stretches, one for what lies in all but the last.
    """
    assert span is not None
    buf, start = span.buf, span.start
    if buf is Buf.SCRATCH:
        buf = plan.scratch_like
        start %= plan.units(buf)
    me, kind, n, end = plan.rank if rank is None else rank, plan.collective, plan.pieces, start + span.count
    by_share = (Collective.ALLTOALL, Collective.GATHER, Collective.SCATTER, Collective.BARRIER, Collective.P2P)
    if kind in by_share or plan.equal:
        shares = ((u // n, max(start - u, 0), min(end - u, n)) for u in range(start // n * n, end, n))
        if kind is not Collective.ALLTOALL or plan.equal:
            return [(a, b) for _, a, b in shares]
        return [(me, share, a, b) if buf is Buf.SEND else (share, me, a, b) for share, a, b in shares]
    if (kind, buf) in _ITS_PART:
        return [(0, me * n + start, me * n + end)]
    alike = plan.units(buf) // plan.stretches * (plan.stretches - 1)  # those of all stretches but the last
    if end <= alike:
        return [(end - start,)]
    return [(max(0, alike - start), max(start, alike), end)]
