"""Runs plans with every rank's steps one after another, as a device with a single hardware queue would."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir import Op, Plan
from .network import network
from .node import Node, wrong


def serialisable(plans: Sequence[Plan], orders: Sequence[Sequence[int]], credits: int) -> None:
    """Prove that each rank may enqueue its steps in the given order, whatever number of queues its device has.

    All lanes of a rank are folded into one: a step begins when every step before it in the rank's order is over, and
    ends when its message has a slot, or has come. That this completes proves more queues too: they only wait for less.

    Parameters
    ----------
    plans
        Of all ranks, in rank order.
    orders
        For each rank, the indices of its steps.
    credits
        Slots of each channel and direction, of one message each.

    Raises
    ------
    PlanError
        An order misses or repeats a step, enqueues one before what it waits for on its own rank, or does not complete.
    """
    nodes = network(plans)
    for plan, row, order in zip(plans, nodes, orders, strict=True):
        _check_order(plan, row, order)
    over: set[int] = set()
    waiting = [[row[i] for i in reversed(order)] for row, order in zip(nodes, orders, strict=True)]
    flying: dict[int, int] = {}
    moved = True
    while moved:
        moved = False
        for queue in waiting:
            while queue and _passes(queue[-1], waiting, over, flying, credits):
                for node in queue[-1].group or (queue[-1],):
                    over.add(waiting[node.rank].pop().id)
                moved = True
    stuck = [queue[-1] for queue in waiting if queue]
    if stuck:
        names = "; ".join(f"rank {n.rank} step {n}" for n in stuck[:8])
        problem = f"one step after another, with {credits} slots, does not complete: {names}"
        raise wrong(plans[stuck[0].rank], stuck[0].index, problem)


def _check_order(plan: Plan, row: list[Node], order: Sequence[int]) -> None:
    if sorted(order) != list(range(len(row))):
        raise wrong(plan, None, f"wanted an order of {len(row)} steps, each once")
    place = {i: k for k, i in enumerate(order)}
    for node in row:
        for earlier in [dep for dep, _ in node.deps] + ([] if node.before is None else [node.before]):
            if place[earlier.index] > place[node.index]:
                raise wrong(plan, node.index, f"is enqueued before step {earlier}, which it waits for")


def _passes(node: Node, waiting: list[list[Node]], over: set[int], flying: dict[int, int], credits: int) -> bool:
    step = node.step
    if step.op is Op.LOCAL:  # when it is the next step of all members
        return all(waiting[member.rank][-1:] == [member] for member in node.group)
    if step.op is Op.SEND:
        if flying.get(node.fifo, 0) == credits:
            return False
        flying[node.fifo] = flying.get(node.fifo, 0) + 1
    elif node.other is not None:
        if node.other.id not in over:
            return False
        flying[node.fifo] -= 1
    return True
