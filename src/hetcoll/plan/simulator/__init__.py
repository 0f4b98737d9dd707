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

Where ranks do the same as others, with all ranks and units moved on, a few stand for all: `symmetry.symmetry_of`
compares every plan with its stand-in's. Then all of them may run in step, since no step that is done keeps another from
being done. What has happened before a step of another rank is what has happened before its stand-in's, moved on; the
bit sets of nodes hold those of all ranks, as one rank sees them. Values are not moved on: all ranks' stand in arrays.

`serialisable` proves, beside that, orders in which the steps of plans may be enqueued on devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from ...errors import PlanError
from ...types import REDUCING, Collective
from ..ir import Op, Plan
from ..machine import Link, Machine
from ..symmetry import Symmetry, symmetry_of
from .grid import grids
from .memory import Memory, check_barrier, check_races, check_values
from .network import network
from .node import RECEIVES, Node, follows
from .progress import order_node, run, waits
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
        One plan for each rank. Those that stand for others are kept, and all of them where there are none; so a
        sequence that draws plans when it is asked for them need not keep them either.
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
    return prove(plans, symmetry_of(plans), credits=credits, inplace=inplace, scale=scale)


def prove(
    all_plans: Sequence[Plan],
    symmetry: Symmetry,
    *,
    credits: int | None = None,
    inplace: bool = False,
    scale: bool | None = None,
) -> Report:
    """As `check`, of plans that are known to have this symmetry."""
    plans = [all_plans[rank] for rank in symmetry.standing]
    apart = not inplace and plans[0].apart
    nodes = network(plans, apart, symmetry)
    slots = credits if credits is not None else 0 if apart else max(plan.credits for plan in plans)
    order = run(plans, nodes, slots, symmetry)
    each = grids(plans, symmetry)
    memories = [Memory(plan, inplace, grid) for plan, grid in zip(plans, each, strict=True)]
    lends = plans[0].collective is not Collective.BARRIER  # its units are empty
    heard = _order(plans, order, memories, symmetry, lends)
    if lends:
        averaged = any(s.op is Op.SCALE for p in plans for s in p.steps) if scale is None else scale
        check_values(plans, order, memories, symmetry, averaged and plans[0].collective in REDUCING)
    else:
        check_barrier(plans, nodes, heard, symmetry)
    return _report(plans, order, symmetry.times)


def _order(plans: list[Plan], order: list[Node], memories: list[Memory], symmetry: Symmetry, lends: bool) -> list[int]:
    """Find out what has happened before each node, and check for races; for each rank, all that it has heard of.

    What nobody asks a node for any more it forgets: its bit sets have a bit for every step of all ranks.
    """
    seen = partial(symmetry.bits, each=len(order))
    heard = [0] * len(plans)
    last: dict[int, Node] = {}
    for node in order:
        for earlier, _ in waits(node):
            last[earlier.id] = node
        for earlier, follows_it in node.deps:
            if follows_it and earlier.before is not None:  # which is over, too
                last[earlier.before.id] = node
    done: dict[int, list[Node]] = {}
    for node in order:
        done.setdefault(last.get(node.id, node).id, []).append(node)
    for node in order:
        order_node(node, lends, seen)
        if lends:
            check_races(plans[node.rank], memories[node.rank], node, symmetry.times)
        else:
            heard[node.rank] |= node.full | node.paced
        for each in done.get(node.id, ()):
            each.full = each.over = each.paced = 0
    return heard


def _report(plans: Sequence[Plan], order: list[Node], times: int) -> Report:
    def units(ops: Iterable[Op]) -> tuple[int, ...]:
        spans = [[s.src or s.dst for s in p.steps if s.op in ops] for p in plans]
        return tuple(sum(span.count for span in row if span) for row in spans) * times

    sends = sum(node.step.op is Op.SEND for node in order)
    hops = max((node.hops for node in order), default=0)
    return Report(
        len(order) * times, sends * times, hops, units([Op.SEND]), units(RECEIVES), units([Op.RECV_REDUCE, Op.REDUCE])
    )
