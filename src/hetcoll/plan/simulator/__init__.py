"""Proves plans, and predicts their time (`predict`, in `timing`).

`check` takes one plan a rank and proves, for every timing there can be, that they finish, that no two steps race for
memory, and that the result is right. That one run is enough follows from the plans' form: FIFOs with one writer and one
reader make a Kahn network, whose outcome timing cannot change (Kahn, "The semantics of a simple language for parallel
programming", 1974), and more room in the FIFOs cannot add a deadlock.

* Progress: the steps run with the fewest slots that the plans declare. Without slots a send waits for its receive.
* Races: every pair of accesses to the same unit, one of them a write, must be ordered by lanes, deps and messages. A
  send lends its memory: it is over when its own message was received, or whatever its memory was lent on for; the
  sends behind it in its lane, and what answers them, say nothing about that (`order_node`, `join_loans`).
* Values: inputs are random integers modulo a prime, so a contribution that is missing, doubled or in the wrong place
  changes the sum; a second value per unit depends on the order of the additions, to prove that all ranks hold the
  same bits, and those of the order of ranks where a plan says that (`ordered`).

`serialisable` proves, beside that, orders in which the steps of plans may be enqueued on devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...errors import PlanError
from ...types import REDUCING, Collective
from ..ir import Op, Plan
from ..machine import Link, Machine
from .grid import grids
from .memory import Memory, check_races, check_values
from .network import network
from .node import RECEIVES, Node, follows
from .progress import order_node, run
from .serial import serialisable
from .timing import predict

__all__ = [
    "RECEIVES", "Link", "Machine", "PlanError", "Report", "check", "follows", "predict", "serialisable",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Report:
    """What a proved set of plans does. Units, not bytes; tuples have one entry a rank."""

    steps: int
    messages: int
    hops: int  # the longest chain of messages that wait for each other
    sent: tuple[int, ...]
    received: tuple[int, ...]
    reduced: tuple[int, ...]


def check(
    plans: Sequence[Plan], *, credits: int | None = None, inplace: bool = False, scale: bool | None = None
) -> Report:
    """Prove the plans of all ranks, in rank order.

    Parameters
    ----------
    plans
        One plan for each rank.
    credits
        Slots of each FIFO; by default what the plans declare, and none where they say `apart` and are not in place.
        A message may be longer than all slots together.
    inplace
        Whether each rank's input and output are the same memory.
    scale
        Whether the result is an average, where there is a sum. By default it is if any plan divides.

    Raises
    ------
    PlanError
        With the first problem found.
    """
    apart = not inplace and plans[0].apart
    nodes = network(plans, apart)
    slots = credits if credits is not None else 0 if apart else max(plan.credits for plan in plans)
    order = run(plans, nodes, slots)
    memories = [Memory(plan, inplace, grid) for plan, grid in zip(plans, grids(plans), strict=True)]
    for node in order:
        lends = plans[0].collective is not Collective.BARRIER  # its units are empty
        order_node(node, lends)
        if lends:
            check_races(plans[node.rank], memories[node.rank], node)
    averaged = any(s.op is Op.SCALE for p in plans for s in p.steps) if scale is None else scale
    check_values(plans, order, memories, averaged and plans[0].collective in REDUCING)
    return _report(plans, order)


def _report(plans: Sequence[Plan], order: list[Node]) -> Report:
    def units(ops: Iterable[Op]) -> tuple[int, ...]:
        spans = [[s.src or s.dst for s in p.steps if s.op in ops] for p in plans]
        return tuple(sum(span.count for span in row if span) for row in spans)

    sends = sum(node.step.op is Op.SEND for node in order)
    hops = max((node.hops for node in order), default=0)
    return Report(len(order), sends, hops, units([Op.SEND]), units(RECEIVES), units([Op.RECV_REDUCE, Op.REDUCE]))
