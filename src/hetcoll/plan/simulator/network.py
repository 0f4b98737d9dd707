"""A set of plans as a network of nodes: lanes, deps and messages. Refuses whatever is wrong in form."""

from __future__ import annotations

from collections.abc import Sequence

from ...types import Collective
from ..ir import P2P_CHANNEL, Buf, Op, Plan, Span
from ..symmetry import Symmetry, everyone
from .loans import join_loans
from .local import check_local, join, writes
from .node import RECEIVES, Node, follows, lengths, only_in_place, wrong

LANES = 32
CHANNELS = 3
NEEDS = {  # op -> (has src, has dst, has peer)
    Op.SEND: (True, False, True),
    Op.RECV: (False, True, True),
    Op.RECV_REDUCE: (True, True, True),
    Op.COPY: (True, True, False),
    Op.REDUCE: (True, True, False),
    Op.SCALE: (False, True, False),
    Op.ROUND: (True, True, False),
}


def network(plans: Sequence[Plan], apart: bool = False, symmetry: Symmetry | None = None) -> list[list[Node]]:
    """The steps as nodes, joined to their lanes, deps and messages. Raises for whatever is wrong in form.

    `apart` leaves out deps that only input and output in the same memory ask for. With `symmetry` the plans are those
    of the ranks that stand for all, and so are the other ends of messages.
    """
    symmetry = symmetry or everyone(len(plans))
    nodes: list[list[Node]] = []
    sends: dict[tuple[int, int, int], list[Node]] = {}
    recvs: dict[tuple[int, int, int], list[Node]] = {}
    locals: dict[int, list[Node]] = {rank: [] for rank in range(len(plans))}
    count, parts = 0, set[tuple[int, ...]]()
    for rank, plan in enumerate(plans):
        _check_header(plans, rank, len(symmetry.orbits) * symmetry.times)
        heads: dict[int, Node] = {}
        row: list[Node] = []
        for i, step in enumerate(plan.steps):
            _check_step(plan, i, parts)
            kept = [d for d in step.deps if not (apart and only_in_place(plan, plan.steps[d], step))]
            deps = [(row[d], follows(plan, plan.steps[d], step)) for d in kept]
            away = 0 if step.peer < 0 else symmetry.home(step.peer)[1]
            node = Node(rank, i, step, heads.get(step.lane), deps, count, away=away)
            count += 1
            heads[step.lane] = node
            row.append(node)
            if step.op is Op.SEND:  # under the name that the receiver's stand-in has for it
                sends.setdefault((*symmetry.fifo(rank, step.peer), step.channel), []).append(node)
            elif step.op in RECEIVES:
                recvs.setdefault((step.peer, rank, step.channel), []).append(node)
            elif step.op is Op.LOCAL:
                locals[rank].append(node)
        nodes.append(row)
    for number, fifo in enumerate(sorted(sends.keys() | recvs.keys())):
        _match(plans, symmetry, fifo, number, sends.get(fifo, []), recvs.get(fifo, []))
    join(plans, locals)
    join_loans(plans, nodes)
    return nodes


def _check_header(plans: Sequence[Plan], rank: int, size: int) -> None:
    plan, first = plans[rank], plans[0]
    if (plan.rank, plan.size) != (rank, size):
        raise wrong(plan, None, f"is plan {rank} of {size}")
    same = ["collective", "algorithm", "root", "credits", "apart", "pieces", "islands", "compress", "stretches"]
    same += ["redundant", "ordered", "equal"]
    if plan.collective is not Collective.P2P:
        same += ["send_units", "recv_units"]
    for name in same:
        if getattr(plan, name) != getattr(first, name):
            raise wrong(plan, None, f"{name} is {getattr(plan, name)}, but {getattr(first, name)} on rank 0")
    if plan.islands and sorted(r for island in plan.islands for r in island) != list(range(plan.size)):
        raise wrong(plan, None, f"islands {plan.islands} do not hold each rank once")


def _check_step(plan: Plan, i: int, checked: set[tuple[int, ...]]) -> None:
    """`checked`: the parts of LOCAL steps that were, for what memory; members may have the very same."""
    step = plan.steps[i]
    if step.op is Op.LOCAL:
        check_local(plan, i)
    elif step.local is not None or (step.src is not None, step.dst is not None, step.peer >= 0) != NEEDS[step.op]:
        raise wrong(plan, i, f"wanted (src, dst, peer) to be {NEEDS[step.op]}")
    if (step.compressed or step.op is Op.ROUND) and not plan.compress:
        raise wrong(plan, i, "is for compressed edges, and the plan has none")
    if step.compressed and step.peer < 0:
        raise wrong(plan, i, "is no message, but compressed")
    if step.peer >= plan.size or step.peer == plan.rank:
        raise wrong(plan, i, "wanted another rank as peer")
    if not (0 <= step.lane < LANES and 0 <= step.channel < CHANNELS):
        raise wrong(plan, i, f"lane or channel {step.channel} out of range")
    if step.peer >= 0 and (step.channel == P2P_CHANNEL) != (plan.collective is Collective.P2P):
        raise wrong(plan, i, f"channel {step.channel} is not for {plan.collective.label}")
    for d in step.deps:
        if not (0 <= d < i and plan.steps[d].lane != step.lane):
            raise wrong(plan, i, f"wanted deps to be earlier steps of other lanes, got {d}")
    parts = step.local.parts if step.local else ()
    these = (id(parts), plan.rank == plan.root, plan.scratch_copies, plan.scratch_like)
    for span in (step.src, step.dst, *(parts if these not in checked else ())):
        if span is not None:
            _check_span(plan, i, span)
    checked.add(these)
    if any(span.buf is Buf.SEND for span in writes(step)):
        raise wrong(plan, i, "writes the caller's input")
    if step.src is not None and step.dst is not None and lengths(plan, step.src) != lengths(plan, step.dst):
        raise wrong(plan, i, "src and dst differ in length")


def _check_span(plan: Plan, i: int, span: Span) -> None:
    units = plan.units(span.buf)
    if not (0 <= span.start < span.start + span.count <= units):
        raise wrong(plan, i, f"{span} is outside the {units} units of its buffer")
    if span.buf is Buf.SCRATCH:
        one = plan.units(plan.scratch_like)
        if span.start // one != (span.start + span.count - 1) // one:
            raise wrong(plan, i, f"{span} crosses the end of a copy of {one} units")
    absent = {Collective.REDUCE: Buf.RECV, Collective.GATHER: Buf.RECV, Collective.SCATTER: Buf.SEND}
    if plan.rank != plan.root and absent.get(plan.collective) is span.buf:
        raise wrong(plan, i, f"only the root has {span}")


def _match(
    plans: Sequence[Plan],
    symmetry: Symmetry,
    fifo: tuple[int, int, int],
    number: int,
    sends: list[Node],
    recvs: list[Node],
) -> None:
    """Pair the messages of one FIFO: same number, one lane at each end, same lengths."""
    name = f"the channel {fifo[2]} from rank {fifo[0]} to rank {fifo[1]}"
    for k in range(max(len(sends), len(recvs))):
        if k >= len(recvs) or k >= len(sends):
            left = (sends if k < len(sends) else recvs)[k]
            problem = f"{name} carries {len(sends)} messages but {len(recvs)} are received"
            raise wrong(plans[left.rank], left.index, problem)
        send, recv = sends[k], recvs[k]
        for end, first in ((send, sends[0]), (recv, recvs[0])):
            if end.step.lane != first.step.lane:
                raise wrong(plans[end.rank], end.index, f"{name} is used by lane {first.step.lane} too")
        if send.step.compressed != recv.step.compressed:
            raise wrong(plans[recv.rank], recv.index, f"{name} is compressed at one end only")
        send.other, recv.other, send.fifo, recv.fifo = recv, send, number, number
        src = send.step.src
        if recv.away and src is not None:
            src = symmetry.span(src, recv.away)
        went = lengths(plans[send.rank], src, fifo[0])
        came = lengths(plans[recv.rank], recv.step.dst)
        if went != came:
            raise wrong(plans[recv.rank], recv.index, f"wanted a message as long as {came}, got {went} on {name}")
