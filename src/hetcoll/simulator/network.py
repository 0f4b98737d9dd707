"""A set of plans as a network of nodes: lanes, deps and messages. Refuses whatever is wrong in form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import HetcollError
from ..plan import Buf, Op, Plan, Span, Step
from ..types import Collective

LANES = 31
CHANNELS = 3
P2P_CHANNEL = 2
NEEDS = {  # op -> (has src, has dst, has peer)
    Op.SEND: (True, False, True),
    Op.RECV: (False, True, True),
    Op.RECV_REDUCE: (True, True, True),
    Op.COPY: (True, True, False),
    Op.REDUCE: (True, True, False),
    Op.SCALE: (False, True, False),
}
RECEIVES = (Op.RECV, Op.RECV_REDUCE)


class PlanError(HetcollError, AssertionError):
    """A set of plans is wrong: says which rank and step, what was wanted and what was found."""

    def __init__(self, plan: Plan, step: int | None, problem: str) -> None:
        where = f"{plan.collective.label} by {plan.algorithm}, rank {plan.rank} of {plan.size}"
        if step is not None:
            where += f", step {step} ({plan.steps[step]})"
        super().__init__(f"{where}: {problem}")
        self.rank = plan.rank
        self.step = step


@dataclass(slots=True)
class Node:
    """A step of one rank, its place in the network, and how far it has come."""

    rank: int
    index: int
    step: Step
    before: Node | None  # the previous step of its lane
    deps: list[tuple[Node, bool]]  # and whether this step may follow it element by element
    id: int
    other: Node | None = None  # the other end of its message
    done: int = 0  # pieces
    full: int = 0  # bit set of the nodes that end before this one begins
    paced: int = 0  # bit set of the nodes of which each element is done before the same element of this one
    hops: int = 0

    def __str__(self) -> str:
        return f"{self.index} ({self.step})"


def follows(plan: Plan, first: Step, second: Step) -> bool:
    """Whether `second`, which depends on `first`, may follow it element by element instead of as a whole.

    It may when every hazard between them is about one and the same span. ``native/engine/plan.cc`` has the same rule.
    """
    same = False
    for x, y in ((first.dst, second.src), (first.src, second.dst), (first.dst, second.dst)):
        if x is None or y is None:
            continue
        (buf, start), (other, begin) = _inplace_name(plan, x), _inplace_name(plan, y)
        if buf is not other or start >= begin + y.count or begin >= start + x.count:
            continue
        if (start, x.count) != (begin, y.count):
            return False
        same = True
    return same


def _inplace_name(plan: Plan, span: Span) -> tuple[Buf, int]:
    """Buffer and first unit in place, where the smaller of SEND and RECV is this rank's part of the other."""
    if span.buf is Buf.SCRATCH:
        return span.buf, span.start
    larger = Buf.SEND if plan.send_units > plan.recv_units else Buf.RECV
    shift = plan.send_units != plan.recv_units and span.buf is not larger
    return larger, span.start + shift * plan.rank * min(plan.send_units, plan.recv_units)


def network(plans: Sequence[Plan]) -> list[list[Node]]:
    """The steps as nodes, joined to their lanes, deps and messages. Raises for whatever is wrong in form."""
    nodes: list[list[Node]] = []
    sends: dict[tuple[int, int, int], list[Node]] = {}
    recvs: dict[tuple[int, int, int], list[Node]] = {}
    count = 0
    for rank, plan in enumerate(plans):
        _check_header(plans, rank)
        heads: dict[int, Node] = {}
        row: list[Node] = []
        for i, step in enumerate(plan.steps):
            _check_step(plan, i)
            deps = [(row[d], follows(plan, plan.steps[d], step)) for d in step.deps]
            node = Node(rank, i, step, heads.get(step.lane), deps, count)
            count += 1
            heads[step.lane] = node
            row.append(node)
            if step.op is Op.SEND:
                sends.setdefault((rank, step.peer, step.channel), []).append(node)
            elif step.op in RECEIVES:
                recvs.setdefault((step.peer, rank, step.channel), []).append(node)
        nodes.append(row)
    for fifo in sorted(sends.keys() | recvs.keys()):
        _match(plans, fifo, sends.get(fifo, []), recvs.get(fifo, []))
    return nodes


def _check_header(plans: Sequence[Plan], rank: int) -> None:
    plan, first = plans[rank], plans[0]
    if (plan.rank, plan.size) != (rank, len(plans)):
        raise PlanError(plan, None, f"is plan {rank} of {len(plans)}")
    same = ["collective", "algorithm", "root", "credits", "pieces"]
    if plan.collective is not Collective.P2P:
        same += ["send_units", "recv_units"]
    for name in same:
        if getattr(plan, name) != getattr(first, name):
            raise PlanError(plan, None, f"{name} is {getattr(plan, name)}, but {getattr(first, name)} on rank 0")


def _check_step(plan: Plan, i: int) -> None:
    step = plan.steps[i]
    if step.op not in NEEDS:
        raise PlanError(plan, i, "cannot be simulated")
    if (step.src is not None, step.dst is not None, step.peer >= 0) != NEEDS[step.op]:
        raise PlanError(plan, i, f"wanted (src, dst, peer) to be {NEEDS[step.op]}")
    if step.peer >= plan.size or step.peer == plan.rank:
        raise PlanError(plan, i, "wanted another rank as peer")
    if not (0 <= step.lane < LANES and 0 <= step.channel < CHANNELS):
        raise PlanError(plan, i, f"lane or channel {step.channel} out of range")
    if step.peer >= 0 and (step.channel == P2P_CHANNEL) != (plan.collective is Collective.P2P):
        raise PlanError(plan, i, f"channel {step.channel} is not for {plan.collective.label}")
    for d in step.deps:
        if not (0 <= d < i and plan.steps[d].lane != step.lane):
            raise PlanError(plan, i, f"wanted deps to be earlier steps of other lanes, got {d}")
    for span in (step.src, step.dst):
        if span is not None:
            _check_span(plan, i, span)
    if step.dst is not None and step.dst.buf is Buf.SEND:
        raise PlanError(plan, i, "writes the caller's input")
    if step.src is not None and step.dst is not None and _lengths(plan, step.src) != _lengths(plan, step.dst):
        raise PlanError(plan, i, "src and dst differ in length")


def _check_span(plan: Plan, i: int, span: Span) -> None:
    units = plan.units(span.buf)
    if not (0 <= span.start < span.start + span.count <= units):
        raise PlanError(plan, i, f"{span} is outside the {units} units of its buffer")
    if span.buf is Buf.SCRATCH:
        one = plan.units(plan.scratch_like)
        if span.start // one != (span.start + span.count - 1) // one:
            raise PlanError(plan, i, f"{span} crosses the end of a copy of {one} units")
    absent = {Collective.REDUCE: Buf.RECV, Collective.GATHER: Buf.RECV, Collective.SCATTER: Buf.SEND}
    if plan.rank != plan.root and absent.get(plan.collective) is span.buf:
        raise PlanError(plan, i, f"only the root has {span}")


def _match(plans: Sequence[Plan], fifo: tuple[int, int, int], sends: list[Node], recvs: list[Node]) -> None:
    """Pair the messages of one FIFO: same number, one lane at each end, same lengths."""
    name = f"the channel {fifo[2]} from rank {fifo[0]} to rank {fifo[1]}"
    for k in range(max(len(sends), len(recvs))):
        if k >= len(recvs) or k >= len(sends):
            left = (sends if k < len(sends) else recvs)[k]
            problem = f"{name} carries {len(sends)} messages but {len(recvs)} are received"
            raise PlanError(plans[left.rank], left.index, problem)
        send, recv = sends[k], recvs[k]
        for end, first in ((send, sends[0]), (recv, recvs[0])):
            if end.step.lane != first.step.lane:
                raise PlanError(plans[end.rank], end.index, f"{name} is used by lane {first.step.lane} too")
        send.other, recv.other = recv, send
        went, came = _lengths(plans[send.rank], send.step.src), _lengths(plans[recv.rank], recv.step.dst)
        if went != came:
            raise PlanError(plans[recv.rank], recv.index, f"wanted a message as long as {came}, got {went} on {name}")


def _lengths(plan: Plan, span: Span | None) -> list[tuple[int, ...]]:
    """The length of each unit, as a name: units of the same name are of the same length, whatever the counts are."""
    assert span is not None
    buf, units = span.buf, range(span.start, span.start + span.count)
    if buf is Buf.SCRATCH:
        buf = plan.scratch_like
        units = range(span.start % plan.units(buf), span.start % plan.units(buf) + span.count)
    me, kind, n = plan.rank, plan.collective, plan.pieces
    if kind is Collective.ALLTOALL:
        return [(me, u // n, u % n) if buf is Buf.SEND else (u // n, me, u % n) for u in units]
    if kind in (Collective.GATHER, Collective.SCATTER, Collective.BARRIER, Collective.P2P):
        return [(u % n,) for u in units]
    if (kind, buf) in ((Collective.ALLGATHER, Buf.SEND), (Collective.REDUCE_SCATTER, Buf.RECV)):
        return [(me * n + u,) for u in units]
    return [(u,) for u in units]
