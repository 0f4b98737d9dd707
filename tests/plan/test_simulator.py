"""The simulator: it passes every plan that is shipped, and catches every way to break one."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutants import Mutants, edited, edits, field_mutants, passes, reordered, structural_mutants
from thorough import parametrize

from hetcoll.plan.algorithms import ALGORITHMS, Algorithm, Hosts, find, p2p
from hetcoll.plan.ir import Buf, Op, Plan, Span, Step
from hetcoll.plan.simulator import PlanError, check, follows, predict
from hetcoll.plan.topology import RankInfo, Topology
from hetcoll.types import REDUCING, ROOTED, Collective

SHIPPED = [pytest.param(a, id=f"{k.label}-{a.name}") for k, table in ALGORITHMS.items() for a in table.values()]


def build(
    algorithm: Algorithm, n: int, *, root: int = 0, scale: bool = False, hosts: Hosts | None = None
) -> list[Plan]:
    return [algorithm.build(n, rank, root=root, scale=scale, hosts=hosts) for rank in range(n)]


def side_by_side(*sizes: int) -> Hosts:
    """Hosts of these sizes, one's ranks after the other's."""
    ends = list(accumulate(sizes))
    return tuple(tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True))


def variants(algorithm: Algorithm, n: int) -> Iterator[tuple[list[Plan], bool]]:
    """The plans for the first, second and last root, for a sum and for an average."""
    roots = sorted({0, 1 % n, n - 1}) if algorithm.collective in ROOTED else [0]
    for root in roots:
        for scale in (False, True) if algorithm.collective in REDUCING else (False,):
            yield build(algorithm, n, root=root, scale=scale), scale


# ---------------------------------------------------------------------------------------------------- right plans


@parametrize("algorithm", SHIPPED, first=17)
def test_every_shipped_plan_is_proved(algorithm: Algorithm) -> None:
    sizes = [n for n in range(1, 17) if algorithm.supports(n)]
    assert {1, 2, 4, 8, 16} <= set(sizes)
    for n in sizes:
        for plans, scale in variants(algorithm, n):
            for inplace in (False, True) if n <= 8 else (n // 2 % 2 == 0,):
                check(plans, inplace=inplace, scale=scale)


@pytest.mark.parametrize("algorithm", SHIPPED)
def test_declared_credits_are_the_least(algorithm: Algorithm) -> None:
    for n in (2, 3, 4, 5):
        if not algorithm.supports(n):
            continue
        plans = build(algorithm, n)
        for credits in (1, 3):
            check(plans, credits=credits, inplace=True)
        if plans[0].credits:
            with pytest.raises(PlanError, match="deadlock with 0 slots"):
                check(plans, credits=plans[0].credits - 1, inplace=True)
        if plans[0].apart:
            check(plans, credits=0)
        elif plans[0].credits and n == 4:
            with pytest.raises(PlanError, match="deadlock with 0 slots"):
                check([replace(plan, apart=True) for plan in plans])


messages = st.integers(1, 6).flatmap(
    lambda n: st.tuples(st.just(n), st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=40))
)


@given(messages)
@settings(max_examples=60)
def test_any_group_of_messages_is_proved(job: tuple[int, list[tuple[int, int]]]) -> None:
    n, pairs = job
    check([p2p(n, r, [d for s, d in pairs if s == r], [s for s, d in pairs if d == r]) for r in range(n)])


def test_a_group_with_more_peers_than_lanes_is_proved() -> None:
    n = 40
    plans = [p2p(n, r, list(range(n)) * 2, list(reversed(range(n))) * 2) for r in range(n)]
    assert max(plan.lanes for plan in plans) == 31
    assert check(plans).messages == 2 * n * (n - 1)


def test_a_chain_of_more_ranks_than_calls_nest_is_proved() -> None:
    """Each of which lends on what it was lent."""
    most, depth = sys.getrecursionlimit(), len(inspect.stack(0))
    sys.setrecursionlimit(depth + 100)
    try:
        check(build(ALGORITHMS[Collective.ALLREDUCE]["chained"], 200), inplace=True)
    finally:
        sys.setrecursionlimit(most)


# ---------------------------------------------------------------------------------------------------- wrong plans


@parametrize("mutants", [structural_mutants, field_mutants], first=1)
@parametrize("algorithm", SHIPPED, first=8)
def test_every_single_edit_is_caught(algorithm: Algorithm, mutants: Mutants) -> None:
    seen, missed = 0, []
    for n in (2, 3, 4):
        if not algorithm.supports(n):
            continue
        root = n - 1 if algorithm.collective in ROOTED else 0
        scales = (False, True) if n == 3 else (True,)  # an average has the steps of a sum, and one more
        for scale in scales if algorithm.collective in REDUCING else (False,):
            plans = build(algorithm, n, root=root, scale=scale)
            if passes(ordered := [replace(plan, ordered=algorithm.ordered) for plan in plans], scale):
                plans = ordered  # it adds in the order of ranks, asked to or not: an edit that changes that is wrong
            for what, wrong in edits(plans, [mutants]):
                seen += 1
                if passes(wrong, scale):
                    missed.append(f"{n} ranks, {what}")
    assert not missed
    assert seen > 10


def test_every_single_edit_of_a_group_is_caught() -> None:
    pairs = [(0, 1), (1, 0), (0, 1), (0, 2), (2, 2), (1, 2), (2, 0)]
    plans = [p2p(3, r, [d for s, d in pairs if s == r], [s for s, d in pairs if d == r]) for r in range(3)]
    for rank, plan in enumerate(plans):
        for i, step in enumerate(plan.steps):
            bad = [reordered(plan, [j for j in range(len(plan.steps)) if j != i]), edited(plan, i, channel=0)]
            bad += [edited(plan, i, peer=peer) for peer in range(3) if peer != step.peer >= 0]
            for mutant in bad if step.peer >= 0 else bad[:1]:
                assert not passes([*plans[:rank], mutant, *plans[rank + 1 :]], False), (rank, i)


def test_a_barrier_that_lets_a_rank_go_early_is_caught() -> None:
    plans = build(find(Collective.BARRIER, "dissemination"), 4)
    plans[2] = reordered(plans[2], [0, 2, 1, 3])  # speaks for the second time before it has listened
    with pytest.raises(PlanError, match="leaves without having heard of rank"):
        check(plans)


def test_another_order_of_additions_is_caught() -> None:
    plans = build(find(Collective.ALLREDUCE, "oneshot"), 4)
    check(plans)
    i, j = (k for k, s in enumerate(plans[0].steps) if s.op is Op.RECV_REDUCE and s.peer in (2, 3))
    plans[0] = edited(edited(plans[0], i, peer=3), j, peer=2)
    with pytest.raises(PlanError, match="another order than on rank 0"):
        check(plans)


# ---------------------------------------------------------------------------------------- what the checker says


def pair(*steps: Step, units: int = 1, **more: object) -> list[Plan]:
    """Two ranks that do the same with each other."""
    plans = []
    for r in range(2):
        mine = tuple(replace(s, peer=1 - r if s.peer >= 0 else -1) for s in steps)
        plans.append(Plan(Collective.ALLREDUCE, "test", 2, r, units, units, mine, **more))  # type: ignore[arg-type]
    return plans


SEND0 = Step(Op.SEND, 0, src=Span(Buf.SEND, 0), peer=1)
ADD1 = Step(Op.RECV_REDUCE, 1, Span(Buf.SEND, 0), Span(Buf.RECV, 0), 1, deps=(0,))


HALF = Step(Op.SCALE, 1, dst=Span(Buf.RECV, 0))
ASIDE = Step(Op.COPY, 1, Span(Buf.RECV, 0), Span(Buf.SCRATCH, 0))
ACROSS = Step(Op.COPY, 0, Span(Buf.SEND, 0, 2), Span(Buf.SCRATCH, 1, 2))
GROW = Step(Op.REDUCE, 0, Span(Buf.SEND, 0), Span(Buf.SCRATCH, 0))
AGAIN = replace(ADD1, src=ADD1.dst)
LATER = Step(Op.RECV, 1, dst=Span(Buf.SCRATCH, 0), peer=1, deps=(0,))  # when all is sent, which may fit no slot


@pytest.mark.parametrize(
    ("plans", "problem"),
    [
        (pair(SEND0, ADD1), "deadlock with 0 slots: rank 0 step 0 .* rank 1 step 0"),
        (pair(SEND0, LATER, scratch_copies=1, credits=1), "deadlock with 1 slots: rank 0 step 0 .* rank 1 step 0"),
        (pair(SEND0, replace(ADD1, deps=()), credits=1), "writes while step 0 .* may use it$"),
        (pair(SEND0, SEND0, ADD1, credits=1), "carries 2 messages but 1 are received"),
        (pair(SEND0, replace(SEND0, lane=2), ADD1, AGAIN, credits=1), "is used by lane 0 too"),
        (pair(SEND0, replace(ADD1, src=Span(Buf.SEND, 1)), units=2, credits=1), "differ in length"),
        (pair(replace(SEND0, src=Span(Buf.SEND, 1)), ADD1, units=2, credits=1), "wanted a message as long as"),
        (pair(SEND0, replace(ADD1, dst=Span(Buf.SEND, 0)), credits=1), "writes the caller's input"),
        (pair(SEND0, replace(ADD1, dst=Span(Buf.RECV, 1)), credits=1), r"recv\[1:2\] is outside the 1 units"),
        (pair(SEND0, replace(ADD1, src=None), credits=1), "wanted .src, dst, peer. to be"),
        (pair(SEND0, replace(ADD1, lane=32), credits=1), "lane or channel"),
        (pair(replace(SEND0, channel=2), ADD1, credits=1), "channel 2 is not for allreduce"),
        (pair(SEND0, replace(ADD1, deps=(1,)), credits=1), "wanted deps to be earlier steps"),
        (
            pair(SEND0, replace(ADD1, op=Op.RECV, src=None), credits=1),
            "wanted recv.0. to be rank 0's unit 0 . rank",
        ),
        (pair(SEND0, ADD1, HALF, HALF, credits=1), "averaged; it holds something else"),
        (pair(SEND0, ADD1, ASIDE, scratch_copies=1, credits=1), "nobody uses the result"),
        (pair(Step(Op.LOCAL, 0)), "is no collective among the members of an island"),
        (pair(GROW, scratch_copies=1), "holds nothing yet"),
        (pair(ACROSS, units=2, scratch_copies=2), "crosses the end of a copy of 2 units"),
    ],
)
def test_problems_are_named(plans: list[Plan], problem: str) -> None:
    with pytest.raises(PlanError, match=problem) as caught:
        check(plans, inplace=True)
    assert caught.value.rank in (0, 1)
    assert "allreduce by test, rank" in str(caught.value)


def lending(waits: bool) -> list[Plan]:
    """Unit 0 goes from rank to rank, through scratch; rank 0 sends the other one, perhaps after that."""
    unit, other, place, rest = Span(Buf.SEND, 0), Span(Buf.SEND, 1), Span(Buf.SCRATCH, 0), Span(Buf.RECV, 1)
    steps = [
        [
            Step(Op.COPY, 0, unit, place),
            Step(Op.SEND, 1, place, peer=1, deps=(0,)),
            Step(Op.SEND, 2, other, peer=2, channel=1, deps=(1,) if waits else ()),
        ],
        [
            Step(Op.RECV_REDUCE, 0, unit, place, 0),
            Step(Op.SEND, 1, place, peer=2, deps=(0,)),
            Step(Op.SEND, 2, other, peer=2, channel=1),
        ],
        [
            Step(Op.RECV_REDUCE, 0, other, rest, 0, 1),
            Step(Op.RECV_REDUCE, 0, rest, rest, 1, 1),
            Step(Op.RECV_REDUCE, 0, unit, Span(Buf.RECV, 0), 1),
        ],
    ]
    more = {"root": 2, "scratch_copies": 2, "staged": True}
    return [Plan(Collective.REDUCE, "test", 3, r, 2, 2, tuple(each), **more) for r, each in enumerate(steps)]  # type: ignore[arg-type]


def test_what_is_lent_on_is_home_when_the_last_one_has_read_it() -> None:
    """So what the last one needs before must not wait for that."""
    check(lending(waits=False))
    check([replace(plan, staged=False) for plan in lending(waits=True)])
    with pytest.raises(PlanError, match=r"deadlock with 0 slots: rank 0 step 1 .* rank 2 step 0"):
        check(lending(waits=True))
    check(lending(waits=True), credits=1)


def test_what_is_read_again_is_not_lent_on() -> None:
    """Rank 1 copies its sum as well, so it has a place of its own, and rank 0 waits for rank 1 only."""
    plans = lending(waits=True)
    again = Step(Op.COPY, 0, Span(Buf.SCRATCH, 0), Span(Buf.SCRATCH, 2))
    onward = Step(Op.SEND, 1, Span(Buf.SCRATCH, 2), peer=2, deps=(1,))
    plans[1] = replace(plans[1], steps=(plans[1].steps[0], again, onward, plans[1].steps[2]))
    check(plans)


def test_only_the_root_has_its_second_buffer() -> None:
    plans = build(find(Collective.REDUCE, "direct"), 2, root=0)
    plans[1] = replace(plans[1], steps=(Step(Op.COPY, 0, Span(Buf.SEND, 0), Span(Buf.RECV, 0)), *plans[1].steps))
    with pytest.raises(PlanError, match=r"only the root has recv\[0:1\]"):
        check(plans)


def test_overwriting_what_nobody_used_is_named() -> None:
    plans = build(find(Collective.ALLGATHER, "direct"), 2)
    copy = len(plans[0].steps) - 1
    plans[0] = reordered(plans[0], [0, 1, copy, copy])
    with pytest.raises(PlanError, match="before any use"):
        check(plans)


def test_plans_of_different_ranks_must_fit_together() -> None:
    plans = build(find(Collective.ALLREDUCE, "ring"), 2)
    with pytest.raises(PlanError, match="is plan 0 of 2"):
        check([plans[1], plans[0]])
    with pytest.raises(PlanError, match="algorithm is other, but ring on rank 0"):
        check([plans[0], replace(plans[1], algorithm="other")])


def test_following_needs_one_and_the_same_span() -> None:
    plan = Plan(Collective.ALLREDUCE, "x", 2, 0, 4, 4, (), scratch_copies=1)
    write = Step(Op.RECV, 0, dst=Span(Buf.RECV, 1, 2), peer=1)

    def read(buf: Buf, start: int, count: int) -> Step:
        return Step(Op.SEND, 1, src=Span(buf, start, count), peer=1)

    assert follows(plan, write, read(Buf.RECV, 1, 2))
    assert follows(plan, write, read(Buf.SEND, 1, 2))  # the same memory in place
    assert not follows(plan, write, read(Buf.RECV, 1, 1))
    assert not follows(plan, write, read(Buf.RECV, 3, 1))
    assert not follows(plan, write, read(Buf.SCRATCH, 1, 2))
    part = replace(plan, collective=Collective.ALLGATHER, send_units=1, rank=3)
    assert follows(part, replace(write, dst=Span(Buf.RECV, 3)), read(Buf.SEND, 0, 1))
    assert not follows(part, replace(write, dst=Span(Buf.RECV, 0)), read(Buf.SEND, 0, 1))


# ----------------------------------------------------------------------------------------------------------- time


def host(n: int, cores: int = 64) -> Topology:
    return Topology(tuple(RankInfo(r, "a", cores=cores) for r in range(n)))


@pytest.mark.parametrize("algorithm", SHIPPED)
def test_predicted_times_grow_with_size_and_crowding(algorithm: Algorithm) -> None:
    plans = build(algorithm, 4)
    times = [predict(plans, nbytes, host(4)) for nbytes in (0, 1 << 10, 1 << 16, 1 << 20, 1 << 24)]
    assert times[0] > 0
    assert times == sorted(times)
    assert predict(plans, 1 << 16, host(4, cores=1)) > times[2]


def test_rings_stream() -> None:
    """A chain takes little longer than one hop: its ranks work beside each other."""
    chain = find(Collective.BROADCAST, "ring")
    assert predict(build(chain, 8), 1 << 24, host(8)) < 4 * predict(build(chain, 2), 1 << 24, host(2))
