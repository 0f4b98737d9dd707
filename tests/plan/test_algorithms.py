"""The algorithms: their schedules first, then the bytes that come out, against NumPy."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_executor import execute
from thorough import examples, parametrize

from hetcoll.errors import ArgumentError
from hetcoll.plan.algorithms import ALGORITHMS, Algorithm, Draft, direct, find, inp, out, p2p, register, ring, tree
from hetcoll.plan.algorithms.base import stretched
from hetcoll.plan.ir import Buf, Op, Plan, Span, Step
from hetcoll.plan.simulator import Report, check, follows
from hetcoll.types import REDUCING, ROOTED, Collective

SIZES = [2, 3, 4, 5, 7, 8, 12, 16]
REDUCTIONS = [a for kind, table in ALGORITHMS.items() if kind in REDUCING for a in table.values()]


def build(collective: Collective, name: str, n: int, *, root: int = 0, scale: bool = False) -> list[Plan]:
    return [find(collective, name).build(n, r, root=root, scale=scale) for r in range(n)]


def proved(collective: Collective, name: str, n: int, *, root: int = 0) -> Report:
    return check(build(collective, name, n, root=root))


def count(plan: Plan, *ops: Op) -> int:
    return sum(step.op in ops for step in plan.steps)


def peers(plan: Plan, op: Op, channel: int | None = None) -> list[int]:
    return [s.peer for s in plan.steps if s.op is op and channel in (None, s.channel)]


# ------------------------------------------------------------------------------------------------------ schedules


@pytest.mark.parametrize("n", SIZES)
def test_ring_allreduce_is_two_rounds_of_one_ring(n: int) -> None:
    for plan in build(Collective.ALLREDUCE, "ring", n):
        assert count(plan, Op.SEND) == count(plan, Op.RECV, Op.RECV_REDUCE) == 2 * (n - 1)
        assert set(peers(plan, Op.SEND)) == {(plan.rank + 1) % n}
        assert set(peers(plan, Op.RECV) + peers(plan, Op.RECV_REDUCE)) == {(plan.rank - 1) % n}
        assert [s.channel for s in plan.steps if s.op is Op.SEND] == [0] * (n - 1) + [1] * (n - 1)
        assert (plan.send_units, plan.recv_units, plan.lanes) == (n, n, 4)
    report = proved(Collective.ALLREDUCE, "ring", n)
    assert report.sent == report.received == (2 * (n - 1),) * n  # of n units: 2(n-1)/n of the buffer
    assert report.reduced == (n - 1,) * n
    assert report.hops == 2 * (n - 1)


def test_ring_allreduce_streams_from_lane_to_lane() -> None:
    """Every dep of a ring may be followed element by element, and every phase has a channel of its own."""
    for plan in build(Collective.ALLREDUCE, "ring", 5, scale=True):
        deps = [(plan.steps[d], step) for step in plan.steps for d in step.deps]
        assert len(deps) == 2 * 4
        assert all(follows(plan, first, second) for first, second in deps)
        assert {(s.lane, s.op, s.channel) for s in plan.steps} == {
            (0, Op.SEND, 0), (1, Op.RECV_REDUCE, 0), (4, Op.SCALE, 0), (2, Op.SEND, 1), (3, Op.RECV, 1),
        }  # fmt: skip


@pytest.mark.parametrize("name", ["ring", "direct"])
def test_allreduce_of_two_is_four_steps(name: str) -> None:
    for r in range(2):
        plan = find(Collective.ALLREDUCE, name).build(2, r)
        other, mine = 1 - r, Span(Buf.RECV, r)
        assert plan.steps == (
            Step(Op.SEND, 0, src=Span(Buf.SEND, other), peer=other),
            Step(Op.RECV_REDUCE, 1, Span(Buf.SEND, r), mine, other),
            Step(Op.SEND, 2, src=mine, peer=other, channel=1, deps=(1,)),
            Step(Op.RECV, 3, dst=Span(Buf.RECV, other), peer=other, channel=1),
        )


def test_oneshot_allreduce_of_two_is_two_steps_without_scratch() -> None:
    for r in range(2):
        plan = direct.oneshot_allreduce(2, r)
        assert [str(s) for s in plan.steps] == [
            f"0:send send[0:1] peer {1 - r}",
            f"1:recv_reduce send[0:1] -> recv[0:1] peer {1 - r} after 0",
        ]
        assert (plan.scratch_copies, plan.credits) == (0, 1)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(
    ("collective", "name"),
    [
        (Collective.REDUCE_SCATTER, "ring"),
        (Collective.ALLGATHER, "ring"),
        (Collective.REDUCE_SCATTER, "direct"),
        (Collective.ALLGATHER, "direct"),
        (Collective.ALLTOALL, "pairwise"),
    ],
)
def test_shares_move_once(collective: Collective, name: str, n: int) -> None:
    """n - 1 shares of 1/n leave and reach every rank: no algorithm can move less."""
    report = proved(collective, name, n)
    assert report.sent == report.received == (n - 1,) * n
    assert report.hops == (n - 1 if name == "ring" else 1)


@pytest.mark.parametrize("n", SIZES)
def test_direct_allreduce_spreads_its_targets(n: int) -> None:
    plans = build(Collective.ALLREDUCE, "direct", n)
    for channel in (0, 1):
        for k in range(n - 1):  # at every moment each rank is the target of one other
            assert {peers(plan, Op.SEND, channel)[k] for plan in plans} == set(range(n))
    assert check(plans).hops == 2
    assert all(count(plan, Op.SEND) == 2 * (n - 1) for plan in plans)


@pytest.mark.parametrize("n", [2, 3, 4, 7])
@pytest.mark.parametrize("stretches", [1, 2, 3, 5])
def test_staged_allreduce_goes_through_one_place_stretch_by_stretch(n: int, stretches: int) -> None:
    entry = find(Collective.ALLREDUCE, "staged")
    for scale in (False, True):
        plans = [entry.build(n, r, scale=scale, stretches=stretches) for r in range(n)]
        for inplace in (False, True):
            report = check(plans, inplace=inplace, scale=scale)
            assert report.sent == report.received == (2 * (n - 1) * stretches,) * n
        assert report.hops == max(2, stretches)
    for plan in plans:
        assert (plan.staged, plan.credits, plan.scratch_copies, plan.send_units) == (True, 0, 1, n * stretches)
        spans = [span for step in plan.steps for span in (step.src, step.dst) if span and span.buf is Buf.SCRATCH]
        places = {span.start // n for span in spans}
        assert places == ({0} if stretches == 1 else {0, stretches - 1})


@parametrize("n", [3, 8, 2, 4, 7], first=2)
@pytest.mark.parametrize("stretches", [1, 2, 3, 5])
@pytest.mark.parametrize("cores", [1, 2, 3, 64])
def test_chained_allreduce_goes_once_through_all_ranks(n: int, stretches: int, cores: int) -> None:
    entry = find(Collective.ALLREDUCE, "chained")
    for scale in (False, True):
        plans = [entry.build(n, r, scale=scale, stretches=stretches, cores=cores) for r in range(n)]
        report = check(plans, inplace=(stretches + scale) % 2 == 0, scale=scale)
        assert sum(report.sent) == sum(report.received) == 2 * (n - 1) * n * stretches
        assert sum(report.reduced) == (n - 1) * n * stretches  # what can be had with no less
    chains = min(n, cores, 4)
    copies = [step for plan in plans for step in plan.steps if step.op is Op.COPY]
    assert len(copies) == 2 * chains * stretches  # by the first rank of each, and to the last one's output
    for plan in plans:
        assert (plan.staged, plan.credits, plan.scratch_copies, plan.send_units) == (True, 0, 1, n * stretches)
        spans = [span for step in plan.steps for span in (step.src, step.dst) if span and span.buf is Buf.SCRATCH]
        assert {span.start // n for span in spans} == ({0} if stretches == 1 else {0, stretches - 1})


def test_chains_pass_ranks_that_take_turns_on_a_core_one_after_another() -> None:
    plans = [find(Collective.ALLREDUCE, "chained").build(8, r, cores=2) for r in range(8)]
    passed = [[step.peer for step in plan.steps if step.op is Op.SEND and step.channel == 0] for plan in plans]
    assert passed == [[2, 2], [3, 3], [4, 4], [5, 5], [6, 6], [7, 7], [1], [0]]


@given(st.integers(0, 1 << 40), st.integers(2, 64), st.integers(1, 64))
def test_stretches_are_alike_but_for_the_last(elements: int, size: int, stretches: int) -> None:
    table = stretched(elements, size, stretches)
    lengths = [b - a for a, b in pairwise(table)]
    assert (table[0], table[-1], len(lengths)) == (0, elements, size * stretches)
    others, last = lengths[:-size], lengths[-size:]
    assert len(set(others)) <= 1
    assert all(length % 16 == 0 for length in others)
    assert 0 <= max(last) - min(last) <= 1
    if others:  # the last is longer than another by less than what they were shortened by
        assert sum(last) - size * others[0] < 16 * size * stretches


@pytest.mark.parametrize("n", SIZES)
def test_oneshot_allreduce_is_one_hop_in_rank_order(n: int) -> None:
    report = proved(Collective.ALLREDUCE, "oneshot", n)
    assert (report.hops, report.messages) == (1, n * (n - 1))
    for plan in build(Collective.ALLREDUCE, "oneshot", n):
        sources = [s.peer for s in plan.steps if s.op in (Op.RECV, Op.RECV_REDUCE)]
        assert sources == sorted(sources)


@pytest.mark.parametrize("n", SIZES)
def test_doubling_meets_partners_at_powers_of_two(n: int) -> None:
    k = n.bit_length() - 1
    folded = n - (1 << k)
    plans = build(Collective.ALLREDUCE, "doubling", n)
    report = check(plans)
    assert k <= report.hops <= k + 2 * (folded > 0)
    assert report.messages == (1 << k) * k + 2 * folded
    if not folded:
        assert all(peers(p, Op.SEND) == [p.rank ^ (1 << i) for i in range(k)] for p in plans)
    for plan in plans[: 2 * folded : 2]:
        assert [(s.op, s.peer) for s in plan.steps] == [(Op.SEND, plan.rank + 1), (Op.RECV, plan.rank + 1)]


@pytest.mark.parametrize("n", SIZES)
def test_halving_doubling_moves_twice_the_buffer_in_few_rounds(n: int) -> None:
    k = n.bit_length() - 1
    m, folded = 1 << k, n > 1 << k
    report = proved(Collective.ALLREDUCE, "halving_doubling", n)
    assert report.hops == 2 * k + 2 * folded
    assert max(report.sent) == 2 * (m - 1) + m * folded  # of m units
    assert max(report.reduced) == m - 1 + m * folded


@pytest.mark.parametrize(
    ("collective", "name"), [(Collective.REDUCE_SCATTER, "halving"), (Collective.ALLGATHER, "doubling")]
)
@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_recursive_shares_take_log2_rounds(collective: Collective, name: str, n: int) -> None:
    plans = build(collective, name, n)
    assert check(plans).hops == n.bit_length() - 1
    distances = [1 << i for i in range(n.bit_length() - 1)]
    for plan in plans:
        assert [p ^ plan.rank for p in peers(plan, Op.SEND)] == (distances if name == "doubling" else distances[::-1])


@pytest.mark.parametrize("n", [*range(2, 34), 100])
def test_double_binary_trees(n: int) -> None:
    """Two trees over all ranks, about log2 n deep; nobody but the root is inner in both."""
    for root in {0, 1, n - 1}:
        inner = []
        for t in (0, 1):
            families = [tree.family(n, r, root, t) for r in range(n)]
            assert [r for r, f in enumerate(families) if f.parent is None] == [root]
            for r, f in enumerate(families):
                assert len(f.children) <= 2
                assert all(families[c].parent == r for c in f.children)
            depths = [_depth(families, r) for r in range(n)]
            assert max(depths) <= (n - 1).bit_length()
            inner.append({r for r, f in enumerate(families) if f.children} - {root})
        assert not inner[0] & inner[1]


def _depth(families: Sequence[tree.Family], rank: int) -> int:
    depth = 0
    parent = families[rank].parent
    while parent is not None:
        depth, parent = depth + 1, families[parent].parent
        assert depth <= len(families)
    return depth


@pytest.mark.parametrize("n", SIZES)
def test_trees_load_nobody_more_than_the_buffer(n: int) -> None:
    for root in (0, n - 1):
        down, up = proved(Collective.BROADCAST, "tree", n, root=root), proved(Collective.REDUCE, "tree", n, root=root)
        assert max(down.sent) <= 2
        assert max(up.received) <= 2  # of two units
        assert down.sent[root] == up.received[root] == 2
        assert down.hops == up.hops == (n - 1).bit_length()
    both = proved(Collective.ALLREDUCE, "tree", n)
    assert max(both.sent) <= 4
    assert both.hops <= 2 * (n - 1).bit_length()


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("collective", [Collective.BROADCAST, Collective.REDUCE, Collective.GATHER, Collective.SCATTER])
def test_rooted_algorithms_by_hops(collective: Collective, n: int) -> None:
    floor, ceil = n.bit_length() - 1, (n - 1).bit_length()
    for root in {0, n - 1}:
        assert proved(collective, "direct", n, root=root).hops == 1
        plans = build(collective, "binomial", n, root=root)
        assert check(plans).hops == floor
        assert len(plans[root].edges) == ceil
        assert all(plan.lanes == 1 for plan in plans)
        if collective in (Collective.BROADCAST, Collective.REDUCE):
            chain = proved(collective, "ring", n, root=root)
            assert (chain.hops, chain.messages) == (n - 1, n - 1)


@pytest.mark.parametrize("algorithm", REDUCTIONS, ids=lambda a: f"{a.collective.label}-{a.name}")
def test_averages_divide_each_result_once(algorithm: Algorithm) -> None:
    for n in (2, 3, 4, 8):
        if not algorithm.supports(n):
            continue
        root = n - 1 if algorithm.collective in ROOTED else 0
        plans = [algorithm.build(n, r, root=root, scale=True) for r in range(n)]
        scaled = sum(s.dst.count for p in plans for s in p.steps if s.op is Op.SCALE and s.dst)
        if algorithm.name == "oneshot":  # every rank computes all of it
            assert scaled == n
        elif algorithm.collective is Collective.ALLREDUCE and algorithm.name == "doubling":
            assert scaled == 1 << (n.bit_length() - 1)
        else:
            assert scaled == max(plans[0].send_units, plans[0].recv_units)


def test_what_does_not_reduce_never_divides() -> None:
    for kind in ALGORITHMS.keys() - REDUCING:
        for a in ALGORITHMS[kind].values():
            assert a.build(4, 1, scale=True) == a.build(4, 1)


def test_alone_everything_is_one_copy_or_nothing() -> None:
    for table in ALGORITHMS.values():
        for a in table.values():
            plan = a.build(1, 0, scale=True)
            nothing = a.collective in (Collective.BROADCAST, Collective.BARRIER)
            assert [str(s) for s in plan.steps] == ([] if nothing else ["0:copy send[0:1] -> recv[0:1]"])


# ------------------------------------------------------------------------------------------------------- the table


def test_errors_name_what_there_is() -> None:
    with pytest.raises(ArgumentError, match="no algorithm 'rng' for allgatherv: there are direct, doubling, ring"):
        find(Collective.ALLGATHERV, "rng")
    with pytest.raises(ArgumentError, match="reduce_scatter by halving does not support 6 ranks"):
        find(Collective.REDUCE_SCATTER, "halving").build(6, 0)
    with pytest.raises(ArgumentError, match=r"must lie in 0\.\.3, got rank 4 and root 0"):
        ring.allreduce(4, 4)
    with pytest.raises(ArgumentError, match="got rank 0 and root -1"):
        ring.broadcast(4, 0, root=-1)
    with pytest.raises(ArgumentError, match=r"wanted hosts that hold each of 3 ranks once, got \(\(0, 1\),\)"):
        ring.allreduce(3, 0, hosts=((0, 1),))
    with pytest.raises(ArgumentError, match="allreduce has an algorithm called ring already"):
        register(Collective.ALLREDUCE, "ring")(lambda p: None)


def test_a_users_algorithm_takes_its_place_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, Collective.BROADCAST, dict(ALGORITHMS[Collective.BROADCAST]))

    @register(Collective.BROADCAST, "star")
    def star(p: Draft) -> None:
        for peer in p.others():
            if p.rank == p.root:
                p.send(0, inp(), peer)
        if p.rank != p.root:
            p.recv(0, out(), p.root)

    check([star(5, r, root=2) for r in range(5)])
    execute(build(Collective.BROADCAST, "star", 3, root=1), [5] * 3, False, random.Random(0))


def test_p2p_gives_each_peer_and_direction_a_lane() -> None:
    plan = p2p(8, 2, [3, 4, 3], [1, 3])
    assert [str(s) for s in plan.steps] == [
        "0:send send[0:1] peer 3 channel 2",
        "0:send send[2:3] peer 3 channel 2",
        "1:send send[1:2] peer 4 channel 2",
        "2:recv -> recv[0:1] peer 1 channel 2",
        "3:recv -> recv[1:2] peer 3 channel 2",
    ]
    assert (plan.send_units, plan.recv_units) == (3, 2)


def test_p2p_refuses_what_cannot_match() -> None:
    with pytest.raises(ArgumentError, match=r"peer must lie in 0\.\.3, got 4"):
        p2p(4, 0, [4], [])
    with pytest.raises(ArgumentError, match="rank 1 sends itself 2 messages but receives 1 from itself"):
        p2p(4, 1, [1, 1], [1])


# ----------------------------------------------------------------------------------------------------------- bytes


@given(st.data())
@settings(max_examples=examples(150))
def test_any_plan_gives_numpys_result_in_any_order(data: st.DataObject) -> None:
    tables = [t for kind, t in ALGORITHMS.items() if kind is not Collective.BARRIER]
    algorithm = data.draw(st.sampled_from([a for t in tables for a in t.values()]))
    n = data.draw(st.sampled_from([n for n in range(1, 9) if algorithm.supports(n)]))
    count = data.draw(st.integers(0, 2 * n + 3))
    counts = [count] * n
    if algorithm.collective in (Collective.ALLGATHER, Collective.REDUCE_SCATTER) and not algorithm.equal:  # the v forms
        counts = data.draw(st.lists(st.integers(0, 7), min_size=n, max_size=n))
    root = data.draw(st.integers(0, n - 1)) if algorithm.collective in ROOTED else 0
    scale = data.draw(st.booleans()) and algorithm.collective in REDUCING
    hosts: dict[int, list[int]] = {}
    for r in range(n):
        hosts.setdefault(data.draw(st.integers(0, 2)), []).append(r)
    islands = tuple(map(tuple, hosts.values()))
    plans = [algorithm.build(n, r, root=root, scale=scale, hosts=islands) for r in range(n)]
    rng = random.Random(data.draw(st.integers(0, 1 << 30)))
    slots = max(plans[0].credits, data.draw(st.integers(1, 3)))
    execute(plans, counts, data.draw(st.booleans()), rng, slots)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 64])
@pytest.mark.parametrize("name", sorted(ALGORITHMS[Collective.ALLREDUCE]))
def test_allreduce_of_few_elements_among_many_ranks(name: str, count: int) -> None:
    execute(build(Collective.ALLREDUCE, name, 6, scale=True), [count] * 6, True, random.Random(count))


def test_the_executor_sees_a_wrong_plan() -> None:
    plans = build(Collective.ALLREDUCE, "ring", 3)
    wrong = [replace(s, op=Op.RECV, src=None) if s.op is Op.RECV_REDUCE else s for s in plans[1].steps]
    plans[1] = replace(plans[1], steps=tuple(wrong))
    with pytest.raises(AssertionError, match="Not equal"):
        execute(plans, [5] * 3, False, random.Random(1))
