"""Plans over islands of unequal size: their schedules, their proofs, what comes out, and every way to break them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutants import Mutants, edits, field_mutants, passes, structural_mutants
from plan_executor import execute
from thorough import examples, parametrize
from topologies import side_by_side
from waits import Waits

from hetcoll.plan.algorithms import Algorithm, Hosts
from hetcoll.plan.algorithms.islands import ISLANDS
from hetcoll.plan.ir import Buf, Local, Op, Plan, Span, Step
from hetcoll.plan.pipeline import pipelined, ramp
from hetcoll.plan.simulator import PlanError, check, predict, serialisable
from hetcoll.plan.topology import RankInfo, Topology
from hetcoll.types import REDUCING, ROOTED, Collective

ALL = [pytest.param(a, id=kind.label) for kind, a in ISLANDS.items()]
Builder = Callable[..., list[Plan]]


SIZES = [
    (1,),
    (3,),
    (1, 1),
    (2, 2),
    (3, 1),
    (4, 2),
    (1, 1, 2),
    (2, 2, 1),
    (1, 7),
    (4, 4),
    (2, 3, 3),
    (8, 3),
    (3, 5, 2, 1),
]
MIXED = [((0, 2, 4), (1, 3)), ((3, 1), (0,), (2, 4, 5)), ((1, 0), (2, 3))]
SHAPES = [side_by_side(*sizes) for sizes in SIZES] + MIXED


def build(a: Algorithm, islands: Hosts, *, root: int = 0, scale: bool = False) -> list[Plan]:
    n = sum(map(len, islands))
    return [a.build(n, r, root=root, scale=scale, hosts=islands) for r in range(n)]


def variants(a: Algorithm, islands: Hosts) -> Iterator[tuple[list[Plan], bool]]:
    n = sum(map(len, islands))
    for root in sorted({0, n // 2, n - 1}) if a.collective in ROOTED else [0]:
        for scale in (False, True) if a.collective in REDUCING else (False,):
            yield build(a, islands, root=root, scale=scale), scale


def every_collective_but_the_barrier() -> set[Collective]:
    return {c for c in Collective if c.plain is c} - {Collective.BARRIER, Collective.P2P}


# ------------------------------------------------------------------------------------------------------- right plans


def test_every_collective_has_a_plan_over_islands() -> None:
    assert set(ISLANDS) == every_collective_but_the_barrier()


@parametrize("a", ALL, first=3)
def test_plans_are_proved_for_islands_of_any_sizes(a: Algorithm) -> None:
    """With as many slots as they want, in place or not; and with one and with three, each with every second shape."""
    for turn, islands in enumerate(SHAPES):
        for plans, scale in variants(a, islands):
            for inplace in (False, True):
                check(plans, inplace=inplace, scale=scale)
            credits = (1, 3)[(turn + scale) % 2]
            check(plans, credits=credits, inplace=True, scale=scale)
            serialisable(plans, Waits(plans, credits).orders(), credits)


@pytest.mark.parametrize("a", ALL)
def test_only_what_shares_memory_needs_a_slot(a: Algorithm) -> None:
    for islands in (side_by_side(2, 3), side_by_side(2, 3, 1)):
        both_send_first = a.collective is Collective.ALLREDUCE and len(islands) == 2
        wanted = int(both_send_first or a.collective is Collective.ALLTOALL)
        assert {plan.credits for plan in build(a, islands)} == {wanted}


@pytest.mark.parametrize("a", ALL)
def test_their_pieces_are_proved(a: Algorithm) -> None:
    for islands in SHAPES:
        n = sum(map(len, islands))
        scale = a.collective in REDUCING
        plans = pipelined(build(a, islands, root=n // 2 if a.collective in ROOTED else 0, scale=scale), (0, 1, 3))
        check(plans, inplace=n % 2 == 0, scale=scale)
        serialisable(plans, Waits(plans, 2).orders(), 2)


@st.composite
def any_islands(draw: st.DrawFn) -> Hosts:
    """1 to 8 ranks dealt to at most 4 islands, in any order within them."""
    n = draw(st.integers(1, 8))
    ranks = draw(st.permutations(range(n)))
    islands: dict[int, list[int]] = {}
    for rank in ranks:
        islands.setdefault(draw(st.integers(0, 3)), []).append(rank)
    return tuple(map(tuple, islands.values()))


@st.composite
def any_plans(draw: st.DrawFn) -> tuple[Algorithm, bool, list[Plan]]:
    """Of an algorithm, whether an average is what it computes, for such islands; whole or in pieces."""
    a, islands = draw(st.sampled_from(list(ISLANDS.values()))), draw(any_islands())
    root = draw(st.integers(0, sum(map(len, islands)) - 1)) if a.collective in ROOTED else 0
    scale = draw(st.booleans()) and a.collective in REDUCING
    plans = build(a, islands, root=root, scale=scale)
    return a, scale, pipelined(plans, ramp(draw(st.integers(1, 5)), 2)) if draw(st.booleans()) else plans


@given(st.data())
@settings(max_examples=examples(55))
def test_any_islands_are_proved(data: st.DataObject) -> None:
    _, scale, plans = data.draw(any_plans())
    check(plans, inplace=data.draw(st.booleans()), scale=scale)
    credits = data.draw(st.integers(1, 3))
    serialisable(plans, Waits(plans, credits).orders(), credits)


@given(st.data())
@settings(max_examples=examples(90))
def test_they_give_numpys_result_in_any_order(data: st.DataObject) -> None:
    a, _, plans = data.draw(any_plans())
    n = len(plans)
    counts = [data.draw(st.integers(0, 40))] * n
    if a.collective in (Collective.ALLGATHER, Collective.REDUCE_SCATTER):  # the v forms
        counts = data.draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
    rng = random.Random(data.draw(st.integers(0, 1 << 30)))
    execute(plans, counts, data.draw(st.booleans()), rng, max(plans[0].credits, data.draw(st.integers(1, 3))))


# --------------------------------------------------------------------------------------------------------- schedules


def test_allreduce_of_two_and_one() -> None:
    """Members own halves; the third rank owns all. Every half is added up on both sides."""
    plans = build(ISLANDS[Collective.ALLREDUCE], side_by_side(2, 1))
    assert [str(s) for s in plans[1].steps] == [
        "0:local reduce_scatter of send[0:1],send[1:2] -> recv[1:2]",
        "2:send recv[1:2] peer 2 after 0",
        "3:recv_reduce recv[1:2] -> recv[1:2] peer 2 after 1",
        "0:local allgather of recv[0:1],recv[1:2] recv[1:2] after 2",
    ]
    assert not any(s.op is Op.LOCAL for s in plans[2].steps)


@pytest.mark.parametrize("sizes", SIZES)
def test_allreduce_crosses_each_border_once_each_way(sizes: tuple[int, ...]) -> None:
    """2(m-1)/m of the buffer leaves each of m islands, and no less can; through all members' links alike."""
    islands = side_by_side(*sizes)
    m, plans = len(sizes), build(ISLANDS[Collective.ALLREDUCE], islands)
    report = check(plans)
    units = plans[0].send_units
    assert report.hops == min(m - 1, 2)
    for island in islands:
        left = [report.sent[r] for r in island]
        assert sum(left) * m == 2 * (m - 1) * units * (m > 1)
        assert max(left) == min(left)


@pytest.mark.parametrize("sizes", SIZES)
def test_shares_cross_to_each_island_once(sizes: tuple[int, ...]) -> None:
    """An all-gather brings every share into each other island once; its members get the same number of bytes."""
    islands = side_by_side(*sizes)
    for kind in (Collective.ALLGATHER, Collective.REDUCE_SCATTER):
        plans = build(ISLANDS[kind], islands)
        report, n = check(plans), sum(sizes)
        assert report.hops <= 1
        crossed = report.received if kind is Collective.ALLGATHER else report.sent
        for island in islands:
            assert [crossed[r] * len(island) for r in island] == [plans[0].pieces * (n - len(island))] * len(island)


def test_equal_islands_talk_to_one_rank_each() -> None:
    """Four and four: each rank has one partner, so there are few slots, and they stay in the cache."""
    for kind in (Collective.ALLREDUCE, Collective.ALLGATHER, Collective.REDUCE_SCATTER):
        for plan in build(ISLANDS[kind], side_by_side(4, 4)):
            assert {peer for peer, _ in plan.edges} == {(plan.rank + 4) % 8}


def test_pieces_of_local_steps_that_wait_for_nothing_take_turns() -> None:
    """A reduce-scatter adds up another island's piece, then its own, and so on: both are needed at the same time."""
    plans = pipelined(build(ISLANDS[Collective.REDUCE_SCATTER], side_by_side(2, 2)), (0, 1, 2, 3))
    results = [s.dst.buf for s in plans[0].steps if s.op is Op.LOCAL and s.dst]
    assert results == [Buf.SCRATCH, Buf.RECV] * 3
    plans = pipelined(build(ISLANDS[Collective.ALLREDUCE], side_by_side(2, 2)), (0, 1, 2, 3))
    kinds = [s.local.kind for s in plans[0].steps if s.local]
    assert kinds == [Collective.REDUCE_SCATTER] * 3 + [Collective.ALLGATHER] * 3  # the second waits for messages


def test_one_island_is_one_call_of_the_vendor() -> None:
    for a in ISLANDS.values():
        for plan in build(a, side_by_side(4)):
            local = [s for s in plan.steps if s.op is Op.LOCAL]
            assert not plan.edges
            assert len(local) == 1 or a.collective in (Collective.REDUCE, Collective.ALLTOALL)


def test_bytes_inside_an_island_take_time() -> None:
    topology = Topology(tuple(RankInfo(r, "a", cores=8) for r in range(4)))
    plans = build(ISLANDS[Collective.ALLREDUCE], side_by_side(2, 2))
    times = [predict(plans, nbytes, topology) for nbytes in (0, 1 << 20, 1 << 26)]
    assert times == sorted(times)
    alone = [predict(build(ISLANDS[Collective.ALLREDUCE], side_by_side(4)), n, topology) for n in (0, 200 * 10**6)]
    assert alone == pytest.approx([15e-6, 15e-6 + 1e-3])


# ------------------------------------------------------------------------------------------------------- wrong plans


@parametrize("mutants", [structural_mutants, field_mutants], first=1)
@pytest.mark.parametrize("a", ALL)
def test_every_single_edit_is_caught(a: Algorithm, mutants: Mutants) -> None:
    alike = a.collective in (Collective.GATHER, Collective.SCATTER)  # the root waits as its mates do, to order alike
    seen, missed = 0, []
    for islands in (side_by_side(2, 1), side_by_side(2, 2), side_by_side(1, 1), side_by_side(3), ((0, 2), (1, 3, 4))):
        scale = a.collective in REDUCING
        plans = build(a, islands, root=1 if a.collective in ROOTED else 0, scale=scale)
        for what, wrong in edits(plans, [mutants]):
            seen += 1
            if alike and what.startswith("rank 1: ") and "not after" in what:
                continue
            if passes(wrong, scale):
                missed.append(f"{islands}, {what}")
    assert not missed, f"{len(missed)} of {seen}"
    assert seen > 50


def island(*steps: Step, size: int = 2, collective: Collective = Collective.ALLREDUCE) -> list[Plan]:
    """One island whose ranks all do the same."""
    known = (tuple(range(size)),)
    return [Plan(collective, "test", size, r, 2, 2, steps, islands=known) for r in range(size)]


IN, OUT = (Span(Buf.SEND, 0, 2), Span(Buf.RECV, 0, 2))
REDUCE = Step(Op.LOCAL, 0, IN, OUT, local=Local(Collective.ALLREDUCE))
IN_HALF = Span(Buf.SEND, 0)
HALVES = (Span(Buf.RECV, 0), Span(Buf.RECV, 1))


@pytest.mark.parametrize(
    ("plans", "problem"),
    [
        ([replace(p, islands=()) for p in island(REDUCE)], "is in a plan that knows no islands"),
        ([replace(p, islands=((0,),)) for p in island(REDUCE)], r"islands \(\(0,\),\) do not hold each rank once"),
        (island(replace(REDUCE, dst=None)), r"wanted \(src, dst\) to be \(True, True\)"),
        (island(replace(REDUCE, local=Local(Collective.BARRIER))), "is no collective among the members of an island"),
        (island(replace(REDUCE, local=Local(Collective.ALLREDUCE, 1))), "wanted a root .* where .* rooted, got 1"),
        (island(replace(REDUCE, local=Local(Collective.BROADCAST))), "wanted a root .* where .* rooted, got -1"),
        (island(replace(REDUCE, dst=None, local=Local(Collective.ALLGATHER))), "wanted 2 parts, got 0"),
        (
            island(Step(Op.LOCAL, 0, Span(Buf.SEND, 0), local=Local(Collective.ALLGATHER, parts=HALVES))),
            r"recv\[1:2\] differs in length from send\[0:1\] on rank 1",
        ),
        (
            island(replace(REDUCE, dst=None, local=Local(Collective.ALLGATHER, parts=(HALVES[0],) * 2))),
            r"recv\[0:1\] differs in length from send\[0:2\]",
        ),
        ([island(REDUCE)[0], *island(REDUCE, REDUCE)[1:]], "rank 0 has only 1 local steps"),
        (island(REDUCE, replace(REDUCE, src=OUT, lane=1, deps=(0,))), "wanted all local steps in one lane"),
        (
            [island(REDUCE)[0], island(replace(REDUCE, dst=None, local=Local(Collective.BROADCAST, 1)))[1]],
            "is allreduce on rank 0",
        ),
        (
            island(Step(Op.LOCAL, 0, dst=HALVES[0], local=Local(Collective.REDUCE_SCATTER, parts=(IN_HALF,) * 2))),
            "wanted recv.1. to be .*; it holds nothing",
        ),
        (island(REDUCE, replace(REDUCE, src=OUT)), "it holds something else"),
    ],
)  # fmt: skip
def test_problems_are_named(plans: list[Plan], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        check(plans)


def test_members_that_come_in_another_order_never_meet() -> None:
    """Two islands: each waits inside for what the other sends only after its own local step."""
    send = Step(Op.SEND, 0, Span(Buf.RECV, 0), peer=1)
    islands = side_by_side(1, 1)
    local = Step(Op.LOCAL, 0, Span(Buf.SEND, 0), Span(Buf.RECV, 0), local=Local(Collective.ALLREDUCE))
    wait = Step(Op.RECV, 0, dst=Span(Buf.SCRATCH, 0), peer=1)
    steps = (wait, local, send)
    plans = [
        Plan(Collective.ALLREDUCE, "x", 2, r, 1, 1, tuple(replace(s, peer=1 - r if s.peer >= 0 else -1) for s in steps),
             scratch_copies=1, islands=islands)
        for r in range(2)
    ]  # fmt: skip
    with pytest.raises(PlanError, match="deadlock with 4 slots"):
        check(plans, credits=4)
    with pytest.raises(PlanError, match="deadlock with 4 slots of one message each"):
        Waits(plans, 4).orders()


def test_orders_in_which_members_never_meet_are_caught() -> None:
    """Rank 0 enqueues its local step before what rank 1 needs to come to it."""
    islands = (side_by_side(2)[0],)
    whole, tmp = Span(Buf.SEND, 0), Span(Buf.SCRATCH, 0)
    local = Step(Op.LOCAL, 0, whole, Span(Buf.RECV, 0), local=Local(Collective.ALLREDUCE))
    rows = [
        (local, Step(Op.SEND, 1, whole, peer=1)),
        (Step(Op.RECV, 0, dst=tmp, peer=0), replace(local, src=whole)),
    ]
    plans = [
        Plan(Collective.ALLREDUCE, "x", 2, r, 1, 1, row, scratch_copies=1, islands=islands)
        for r, row in enumerate(rows)
    ]
    order = Waits(plans, 1).orders()
    assert order == ((1, 0), (0, 1))
    serialisable(plans, order, 1)
    with pytest.raises(PlanError, match="one step after another, with 1 slots, does not complete"):
        serialisable(plans, [(0, 1), (0, 1)], 1)
