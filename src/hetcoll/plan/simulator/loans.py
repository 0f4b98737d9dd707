"""Memory that is lent on: where plans are `staged`, a sum that is only sent on stays where its first summand lies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..ir import Buf, Op, Plan, Span
from .local import reads, writes
from .node import Node, meet


def join_loans(plans: Sequence[Plan], nodes: list[list[Node]]) -> None:
    """Join each send whose memory the receiver may use for a sum to the send of that sum.

    The first one may then be over only when the second one is, and so on. Every engine does as it likes. Which sends
    are given away is what ``BoundPlan::MarkGiven`` in ``native/plan/passes.cc`` says; with which send a sum is fused,
    ``BoundPlan::MarkReaders``; and that it is lent on where that send is given away too, or is an answer,
    ``Task::FuseSlot`` in ``native/host/task.cc`` and ``ShmSend::Reserve`` in ``native/transport/shm/send.cc``.
    """
    given: dict[int, Node] = {}  # such sends, by who wrote what they send
    for plan, row in zip(plans, nodes, strict=True):
        for i, node in enumerate(row if plan.staged else ()):
            span = node.step.src
            if not node.step.lends or span is None or span.buf is not Buf.SCRATCH:
                continue
            before, after = _first(span, reversed(row[:i])), _first(span, row[i + 1 :])
            if before is not None and all(n is None or _only_writes(n, span) for n in (before, after)):
                given[before.id] = node
    for node in given.values():
        reduced = node.other
        assert reduced is not None
        if reduced.step.op is Op.RECV_REDUCE:
            node.onward = given.get(reduced.id) or _answer(reduced, nodes[reduced.rank])
        if node.onward is not None:
            node.onward.lent = node


def _answer(reduced: Node, row: list[Node]) -> Node | None:
    """The first message back to whoever sent a summand, where it is what the sum is fused with."""
    for node in row[reduced.index + 1 :]:
        step = node.step
        if step.op is Op.SEND and step.src == reduced.step.dst and step.lane != reduced.step.lane and step.deps:
            fifo = [
                n for n in row if n.step.op is Op.SEND and (n.step.peer, n.step.channel) == (step.peer, step.channel)
            ]
            return node if node is fifo[0] and step.peer == reduced.step.peer and step.lends else None
        if step.dst == reduced.step.dst:
            return None
    return None


def _first(span: Span, row: Iterable[Node]) -> Node | None:
    """The first that touches any of it."""
    return next((n for n in row if any(meet(span, each) for each in reads(n.step) + writes(n.step))), None)


def _only_writes(node: Node, span: Span) -> bool:
    return span in writes(node.step) and not any(meet(span, each) for each in reads(node.step))
