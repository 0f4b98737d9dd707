"""Pieces and the order in which they are enqueued: proved like any plan, and wrong ones are caught."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_executor import execute
from thorough import examples, parametrize
from waits import Waits

from hetcoll.errors import ArgumentError
from hetcoll.plan.algorithms import ALGORITHMS, Algorithm, find, p2p
from hetcoll.plan.algorithms.base import Draft, inp, out
from hetcoll.plan.algorithms.islands import ISLANDS
from hetcoll.plan.ir import Op, Plan, cut, offsets
from hetcoll.plan.order import Frame, ordered
from hetcoll.plan.pieces import Cut, Lengths, parts
from hetcoll.plan.pipeline import pipelined, ramp, share_units
from hetcoll.plan.simulator import PlanError, check, serialisable
from hetcoll.types import REDUCING, ROOTED, WHOLE, Collective

SHIPPED = [pytest.param(a, id=f"{k.label}-{a.name}") for k, table in ALGORITHMS.items() for a in table.values()]
HOSTS = ((0, 2, 4), (1, 3))


def build(algorithm: Algorithm, n: int, *, scale: bool = False) -> list[Plan]:
    root = n - 1 if algorithm.collective in ROOTED else 0
    hosts = HOSTS if n == 5 else None
    return [algorithm.build(n, r, root=root, scale=scale, hosts=hosts) for r in range(n)]


# ----------------------------------------------------------------------------------------------------- pure numbers


@given(st.integers(1, 500), st.integers(1, 64))
def test_ramps_rise_stay_and_fall(length: int, most: int) -> None:
    cuts = ramp(length, most)
    sizes = [b - a for a, b in pairwise(cuts)]
    assert (cuts[0], cuts[-1]) == (0, length)
    assert 0 < min(sizes) <= max(sizes) <= most
    rise = 0
    while rise < len(sizes) // 2 and sizes[rise] == sizes[-1 - rise] == 1 << rise:
        rise += 1
    level = sizes[rise : len(sizes) - rise]
    assert not level or max(level) - min(level) <= 1
    assert len(sizes) <= -(-length // most) + 2 * most.bit_length()
    if length > 2 and most > 1:
        assert sizes[0] == sizes[-1] == 1


@given(st.lists(st.integers(0, 1 << 30), min_size=1, max_size=4), st.integers(1, 300), st.sampled_from([1, 4, 32]))
def test_offsets_are_alike_and_aligned(shares: list[int], units: int, grain: int) -> None:
    table = offsets(shares, units, range(len(shares) * units + 1), grain, units)
    assert len(table) == len(shares) * units + 1
    for k, count in enumerate(shares):
        mine = table[k * units : (k + 1) * units + 1]
        assert (mine[0], mine[-1]) == (sum(shares[:k]), sum(shares[: k + 1]))
        sizes = [b - a for a, b in pairwise(mine)]
        length = sizes[0]
        assert length % grain == 0 or length == count
        full = [size for size in sizes if size == length]
        assert sizes[: len(full)] == full
        assert sum(0 < size < length for size in sizes) <= 1


@given(st.integers(0, 1 << 34), st.sampled_from([1, 2, 8]), st.sampled_from([1 << 18, 1 << 19, 3 << 17]), st.data())
def test_pieces_fit_their_slot(count: int, item: int, smallest: int, data: st.DataObject) -> None:
    algorithm = data.draw(st.sampled_from([a for t in ALGORITHMS.values() for a in t.values()]))
    plans = build(algorithm, 5 if algorithm.supports(5) else 4)
    length, equal = parts(Lengths.of(plans), count * item, smallest, 128)
    assert equal == share_units(plans[0])
    assert length == 1 or count * item > smallest // 20
    unit = offsets([count], equal * length, (0, 1), 128 // item, equal * length)[1] * item
    even = -(-count // (share_units(plans[0]) * length)) * item
    longest = max((s.src or s.dst).count for p in plans for s in p.steps if s.peer >= 0)  # type: ignore[union-attr]
    assert max(unit, even) * min(longest, share_units(plans[0])) <= smallest
    assert len(bin(length)[2:].rstrip("0")) <= 3


def test_what_cannot_be_cut_is_refused() -> None:
    plans = build(find(Collective.ALLREDUCE, "ring"), 4)
    for cuts in ((), (0,), (1, 2), (0, 2, 2), (0, 3, 1)):
        with pytest.raises(ArgumentError, match="wanted rising cuts from 0"):
            pipelined(plans, cuts)
    with pytest.raises(ArgumentError, match="wanted at least one part"):
        ramp(0, 1)
    with pytest.raises(ArgumentError, match="one in a piece, got 3 and 0"):
        ramp(3, 0)
    with pytest.raises(ArgumentError, match="a piece of 100 bytes does not hold 1 units of 128 bytes"):
        parts(Lengths.of(plans), 1 << 20, 100, 128)


# ----------------------------------------------------------------------------------------------------------- pieces


@parametrize("algorithm", SHIPPED, first=4)
def test_pieces_of_every_shipped_plan_are_proved(algorithm: Algorithm) -> None:
    for n in (1, 2, 3, 4, 5, 8):
        if not algorithm.supports(n):
            continue
        scale = algorithm.collective in REDUCING
        whole = build(algorithm, n, scale=scale)
        uncut = check(whole)
        for cuts, most in (((0, 1, 3, 4), None), ((0, 1, 2), None), ((0, 1, 4, 9, 10), 2)):
            plans = pipelined(whole, cuts, most)
            for inplace in (False, True):
                report = check(plans, inplace=inplace, scale=scale)
            assert report.hops == uncut.hops
            if algorithm.collective is not Collective.BARRIER:
                messages = sum(len(_messages(plan)) for plan in plans) // 2
                assert report.messages == messages >= (len(cuts) - 1) * uncut.messages


def _messages(plan: Plan) -> list[int]:
    return [i for i, step in enumerate(plan.steps) if step.peer >= 0]


def test_pieces_of_a_group_are_proved() -> None:
    pairs = [(0, 1), (1, 0), (0, 1), (0, 2), (2, 2), (1, 2), (2, 0), (2, 2)]
    plans = [p2p(3, r, [d for s, d in pairs if s == r], [s for s, d in pairs if d == r]) for r in range(3)]
    check(pipelined(plans, (0, 1, 3)))


def test_pieces_of_two_are_whole_algorithms_that_overlap() -> None:
    plan = pipelined(build(find(Collective.ALLREDUCE, "direct"), 2), (0, 1, 3))[0]
    assert [str(s) for s in plan.steps] == [
        "0:send send[1:2] peer 1",
        "0:send send[4:6] peer 1",
        "1:recv_reduce send[0:1] -> recv[0:1] peer 1",
        "1:recv_reduce send[2:4] -> recv[2:4] peer 1",
        "2:send recv[0:1] peer 1 channel 1 after 2",
        "2:send recv[2:4] peer 1 channel 1 after 3",
        "3:recv -> recv[1:2] peer 1 channel 1",
        "3:recv -> recv[4:6] peer 1 channel 1",
    ]
    assert (plan.send_units, plan.recv_units, plan.pieces) == (6, 6, 1)


def test_messages_of_long_pieces_are_cut_again_and_local_steps_are_not() -> None:
    islands = ((0, 1), (2, 3))
    plans = [ISLANDS[Collective.ALLREDUCE].build(4, rank, hosts=islands) for rank in range(4)]
    plans = pipelined(plans, (0, 1, 4), 2)
    check(plans)
    assert [str(s) for s in plans[0].steps] == [
        "0:local reduce_scatter of send[0:1],send[1:2] -> recv[0:1]",
        "0:local reduce_scatter of send[2:5],send[5:8] -> recv[2:5]",
        "2:send recv[0:1] peer 2 after 0",
        "2:send recv[2:3] peer 2 after 1",
        "2:send recv[3:5] peer 2 after 1",
        "3:recv_reduce recv[0:1] -> recv[0:1] peer 2 after 2",
        "3:recv_reduce recv[2:3] -> recv[2:3] peer 2 after 3",
        "3:recv_reduce recv[3:5] -> recv[3:5] peer 2 after 4",
        "0:local allgather of recv[0:1],recv[1:2] recv[0:1] after 5",
        "0:local allgather of recv[2:5],recv[5:8] recv[2:5] after 7",
    ]


@pytest.mark.parametrize("islands", [((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((0,), (1,), (2, 3)), ((0, 1, 2), (3, 4))])
def test_pieces_of_islands_are_proved(islands: tuple[tuple[int, ...], ...]) -> None:
    n = sum(map(len, islands))
    for entry in ISLANDS.values():
        plans = [entry.build(n, rank, hosts=islands) for rank in range(n)]
        for cuts, most in ((ramp(9, 2), None), (ramp(12, 4), 1), (ramp(12, 4), 2)):
            pieces = pipelined(plans, cuts, most)
            check(pieces)
            serialisable(pieces, Waits(pieces, 3).orders(), 3)


def test_pieces_of_shares_are_cut_from_each_share() -> None:
    plan = pipelined(build(find(Collective.ALLGATHER, "doubling"), 4), (0, 1, 3))[0]
    assert [str(s) for s in plan.steps if s.op is Op.RECV] == [
        "1:recv -> recv[3:4] peer 1",
        "1:recv -> recv[4:6] peer 1",
        "1:recv -> recv[6:7] peer 2",
        "1:recv -> recv[9:10] peer 2",
        "1:recv -> recv[7:9] peer 2",
        "1:recv -> recv[10:12] peer 2",
    ]
    assert (plan.send_units, plan.recv_units, plan.pieces) == (3, 12, 3)
    assert cut(4 * 7, 12)[:4] == cut(7, 3)  # an even cut of all shares cuts each share evenly


@given(st.data())
@settings(max_examples=examples(55))
def test_pieces_give_numpys_result_in_any_order(data: st.DataObject) -> None:
    tables = [t for kind, t in ALGORITHMS.items() if kind is not Collective.BARRIER]
    algorithm = data.draw(st.sampled_from([a for t in tables for a in t.values()]))
    n = data.draw(st.sampled_from([n for n in range(1, 7) if algorithm.supports(n)]))
    scale = data.draw(st.booleans()) and algorithm.collective in REDUCING
    cuts = ramp(data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4)))
    plans = pipelined(build(algorithm, n, scale=scale), cuts, data.draw(st.sampled_from([None, 1, 2])))
    count = data.draw(st.integers(0, 2 * n * cuts[-1]))
    rng = random.Random(data.draw(st.integers(0, 1 << 30)))
    slots = max(plans[0].credits, data.draw(st.integers(1, 3)))
    execute(plans, [count] * n, data.draw(st.booleans()), rng, slots)


# ------------------------------------------------------------------------------------------------------------ order


@parametrize("algorithm", SHIPPED, first=4)
def test_orders_of_every_shipped_plan_can_run_one_after_another(algorithm: Algorithm) -> None:
    for n in (1, 2, 3, 4, 5, 8):
        if not algorithm.supports(n):
            continue
        whole = build(algorithm, n)
        for plans in (whole, pipelined(whole, ramp(9, 2)), pipelined(whole, ramp(9, 4), 2)):
            for credits in (1, 2, 4):
                serialisable(plans, Waits(plans, credits).orders(), credits)


def test_the_order_interleaves_the_lanes() -> None:
    """Two ranks, four pieces: every rank sends a piece before it waits for one, and uses what came at once."""
    entry = find(Collective.ALLREDUCE, "direct")
    plan, order, _ = ordered(Frame(build(entry, 2)[0], entry, ((0,), (1,))), Cut((0, 1, 2, 3, 4), 1, 1))
    words = [f"{plan.steps[i].lane}{'abcd'[i % 4]}" for i in order]
    assert " ".join(words) == "0a 0b 1a 0c 2a 1b 0d 2b 3a 1c 2c 3b 1d 2d 3c 3d"


def test_orders_that_wait_before_they_send_are_caught() -> None:
    plans = build(find(Collective.ALLREDUCE, "direct"), 2)
    right = ((0, 1, 2, 3), (0, 1, 2, 3))
    serialisable(plans, right, 1)
    serialisable(plans, [(1, 0, 2, 3), right[1]], 1)  # one rank that waits first is served by the other
    with pytest.raises(PlanError, match=r"one step after another, with 1 slots, does not complete: rank 0 step 1 .*1"):
        serialisable(plans, [(1, 0, 2, 3), (1, 0, 2, 3)], 1)
    with pytest.raises(PlanError, match=r"step 2 .*: is enqueued before step 1 .*, which it waits for"):
        serialisable(plans, [(0, 2, 1, 3), right[1]], 1)
    for order in ((0, 1, 2), (0, 1, 2, 2)):
        with pytest.raises(PlanError, match="wanted an order of 4 steps, each once"):
            serialisable(plans, [order, right[1]], 1)


def test_orders_must_not_outrun_the_slots() -> None:
    plans = pipelined(build(find(Collective.ALLREDUCE, "direct"), 2), (0, 1, 2, 3, 4))
    lanes = [[i for i, s in enumerate(plans[0].steps) if s.lane == lane] for lane in range(4)]
    sends_first = (*lanes[0], *lanes[1], *lanes[2], *lanes[3])
    serialisable(plans, [sends_first] * 2, 4)
    with pytest.raises(PlanError, match="with 3 slots, does not complete"):
        serialisable(plans, [sends_first] * 2, 3)


def test_plans_that_deadlock_have_no_order() -> None:
    """Who listens first, and who sends all pieces before it takes any."""
    for first, pieces in ((0, 1), (1, 4), (1, 1)):

        def draw(p: Draft, first: int = first) -> None:
            p.credits = first
            for step in (first, 1 - first):
                p.send(0, inp(), 1 - p.rank) if step else p.recv(0, out(1 - p.rank), 1 - p.rank)

        entry, made = Algorithm("turns", Collective.ALLGATHER, draw), Cut(tuple(range(pieces + 1)), 1, 1)
        frame = Frame(entry.build(2, 0), entry, ((0,), (1,)))
        if (first, pieces) == (1, 1):
            assert ordered(frame, made).order == (0, 1)
            continue
        with pytest.raises(PlanError, match="deadlock with 3 slots of one message each"):
            ordered(frame, made)


@given(st.data())
@settings(max_examples=examples(30))
def test_any_order_of_one_queue_that_completes_completes_with_more(data: st.DataObject) -> None:
    """Fold the lanes of each rank into a few queues, as a device would, in enqueue order: it always completes."""
    algorithm = data.draw(st.sampled_from([a for t in ALGORITHMS.values() for a in t.values()]))
    n = data.draw(st.sampled_from([n for n in range(2, 6) if algorithm.supports(n)]))
    credits = data.draw(st.integers(1, 4))
    plans = pipelined(build(algorithm, n), ramp(data.draw(st.integers(1, 8)), 2), data.draw(st.sampled_from([None, 1])))
    orders = Waits(plans, credits).orders()
    queues = data.draw(st.lists(st.integers(0, 2), min_size=31, max_size=31))
    folded = []
    for plan, order in zip(plans, orders, strict=True):
        place = {i: k for k, i in enumerate(order)}
        steps = tuple(
            replace(
                plan.steps[i], lane=queues[plan.steps[i].lane], deps=tuple(sorted(place[d] for d in plan.steps[i].deps))
            )
            for i in order
        )
        kept = [replace(s, deps=tuple(d for d in s.deps if steps[d].lane != s.lane)) for s in steps]
        folded.append(replace(plan, steps=tuple(kept), algorithm="folded"))
    Waits(folded, credits).orders()


def test_whole_buffers_and_shares() -> None:
    assert {c for c in Collective if c in WHOLE} == {Collective.ALLREDUCE, Collective.BROADCAST, Collective.REDUCE}
