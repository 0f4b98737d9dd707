"""The order of short and long messages, in groups and in calls of their own: it ends on a single hardware queue.

The first ranks are an island, or none are: there a library does at once what is too long for a kernel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetcoll.gpu.message_kernel import Placed
from hetcoll.gpu.planner import Carrier
from hetcoll.gpu.plans import GpuPlans, Made
from hetcoll.plan.ir import Buf, Op, Plan, Span, Step
from hetcoll.plan.pieces import SLOTS
from hetcoll.plan.simulator import PlanError, serialisable
from hetcoll.types import Collective, DType

SMALL, SLOT = 2 << 20, 4 << 20  # bytes up to which messages are a kernel's, and of a slot
LONG, RING = 0, 1  # the channels of copies or of what a library does, and of what kernels carry
SIZES = st.sampled_from([9, SMALL, SMALL + 4, 4 << 20, 12 << 20, 40 << 20])
Message = tuple[int, int, int]  # source, destination, bytes
Call = Sequence[Message]
Row = list[tuple[bool, int]]
"""Of messages, whether they are sent, and to whom, or from whom: one each way with each other rank at most."""
MATES = st.sampled_from([0, 2, 5])  # so many ranks are an island


def made(size: int, rank: int, call: Call, mates: int) -> Made:
    """What a rank enqueues for its part of a call; kernels stand as the messages that they carry."""
    mates = min(mates, size)
    first = (tuple(range(mates)),) if mates else ()
    islands: Any = SimpleNamespace(islands=(*first, *((r,) for r in range(mates, size))))
    found: list[Made] = []

    def carrier(peer: int, nbytes: int) -> Carrier:
        if nbytes <= SMALL:
            return Carrier.KERNEL
        return Carrier.LIBRARY if max(rank, peer) < mates else Carrier.COPIES

    nothing: Any = None
    plans = GpuPlans(rank, size, islands, SLOT, SimpleNamespace(bind=found.append), nothing, nothing)
    plans.kernel = SimpleNamespace(bind=tuple)  # type: ignore[assignment]
    sends = [(dst, n) for src, dst, n in call if src == rank]
    recvs = [(src, n) for src, dst, n in call if dst == rank]
    plans.messages(DType.UINT8, sends, recvs, carrier, apart=True)
    return found[0]


def carried(placed: Placed) -> Row:
    messages: Any = placed.kernel
    return [(out, small.peer) for out, small in messages]


def done_at_once(now: Step, mates: Sequence[int]) -> list[Row]:
    """By the library: the sends of a row come first."""
    assert now.local is not None
    parts = now.local.parts
    half = len(parts) // 2
    found: list[Row] = [[] for _ in range(half // len(mates))]
    for i, part in enumerate(parts):
        if part is not None:
            found[i % half // len(mates)].append((i < half, mates[i % len(mates)]))
    return found


def enqueued(each: Made) -> Iterable[Step]:
    """In that order. A ring may have room for no more than one message, so the sends of a kernel wait as its receives
    do; as steps one after another they wait for more than in a kernel, or a library."""
    for place in range(len(each.order) + 1):
        for placed in each.kernels:
            if placed.before == place:
                yield from (step(out, peer, RING) for out, peer in carried(placed))
        if place < len(each.order):
            now = each.plan.steps[each.order[place]]
            if now.op is not Op.LOCAL:
                yield step(now.op is Op.SEND, now.peer, LONG)
                continue
            for row in done_at_once(now, each.plan.islands[0]):
                yield from (step(out, peer, LONG) for out, peer in row)


def step(out: bool, peer: int, channel: int) -> Step:
    span = Span(Buf.SEND if out else Buf.RECV, 0)
    return (
        Step(Op.SEND, 0, span, peer=peer, channel=channel)
        if out
        else Step(Op.RECV, 0, dst=span, peer=peer, channel=channel)
    )


def prove(size: int, calls: Sequence[Sequence[Call]], mates: int = 0) -> None:
    """That the calls of each rank end on one queue, with all slots and with one."""
    plans = []
    for rank, mine in enumerate(calls):
        steps = tuple(each for call in mine for each in enqueued(made(size, rank, call, mates)))
        plans.append(Plan(Collective.BROADCAST, "calls", size, rank, 1, 1, steps))
    for slots in (SLOTS, 1):
        serialisable(plans, [range(len(plan.steps)) for plan in plans], slots)


def calls_of(size: int) -> st.SearchStrategy[list[list[Message]]]:
    ways = st.tuples(st.integers(0, size - 1), st.integers(1, size - 1), SIZES)
    message = ways.map(lambda way: (way[0], (way[0] + way[1]) % size, way[2]))
    return st.lists(st.lists(message, min_size=1, max_size=12), min_size=1, max_size=3)


many = st.integers(2, 5).flatmap(lambda size: st.tuples(st.just(size), calls_of(size)))


@given(many, MATES)
def test_groups_that_meet_groups(drawn: tuple[int, list[list[Message]]], mates: int) -> None:
    size, calls = drawn
    prove(size, [calls] * size, mates)
    for call in calls:
        check_levels(size, call, mates)


def check_levels(size: int, call: Call, mates: int) -> None:
    """What `plan.order` asks of a graph: what waits for a message or a slot is a lag above that, kernels of messages
    and what libraries do are on the level of those that they meet, and a rank has one of each level."""
    told: dict[tuple[int, int, Op], list[int]] = defaultdict(list)
    met: dict[tuple[int, int, bool, int], list[int]] = defaultdict(list)
    for rank in range(size):
        each = made(size, rank, call, mates)
        meeting = [(placed.level, RING, carried(placed)) for placed in each.kernels]
        for now, level in zip(each.plan.steps, each.level, strict=True):
            if now.op is Op.LOCAL:
                meeting += [(level, LONG, row) for row in done_at_once(now, each.plan.islands[0])]
            else:
                told[(rank, now.peer, now.op) if now.op is Op.SEND else (now.peer, rank, now.op)].append(level)
        levels = sorted({(level, by) for level, by, _ in meeting})
        assert all(a < b for (a, _), (b, _) in pairwise(levels))
        for level, by, row in meeting:
            for out, peer in row:
                met[(rank, peer, out, by) if out else (peer, rank, out, by)].append(level)
    for (src, dst, op), levels in told.items():
        other = told[src, dst, Op.RECV if op is Op.SEND else Op.SEND]
        before = [None] * SLOTS + other[:-SLOTS] if op is Op.SEND else other
        assert len(other) == len(levels)
        assert all(b is None or b + SLOTS <= a for a, b in zip(levels, before, strict=False))
    for (src, dst, out, by), of_one in met.items():
        assert of_one == met[src, dst, not out, by]


@given(st.lists(SIZES, min_size=1, max_size=12), MATES, st.data())
def test_one_way_any_calls_meet_any(sizes: list[int], mates: int, data: st.DataObject) -> None:
    """Groups of some against a call of each, or groups of others."""
    messages = [(0, 1, n) for n in sizes]
    cuts = [data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes))) for _ in range(2)]
    calls: list[list[list[Message]]] = [[], []]
    for mine, begins in zip(calls, cuts, strict=True):
        for message, begin in zip(messages, begins, strict=True):
            if begin or not mine:
                mine.append([])
            mine[-1].append(message)
    prove(2, calls, mates)


def test_no_order_of_a_group_meets_calls_of_either_order() -> None:
    """Both ways between two ranks, of which one makes a call of each: that takes more queues."""
    there, back = (0, 1, 40 << 20), (1, 0, 40 << 20)
    prove(2, [[[there, back]]] * 2)
    prove(2, [[[there], [back]]] * 2)
    for calls in ([[there], [back]], [[back], [there]]):
        with pytest.raises(PlanError, match="does not complete"):
            prove(2, [[[there, back]], calls])
