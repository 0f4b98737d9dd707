"""Hosts and islands of any sizes: no plan is refused, and what a rank keeps grows with what it does."""

from __future__ import annotations

import random
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import DEADLINE
from plan_executor import execute
from thorough import examples, parametrize

from hetcoll import _native
from hetcoll.plan import ir
from hetcoll.plan.algorithms import Algorithm, Hosts, find, regions
from hetcoll.plan.algorithms.hosts import among_hosts
from hetcoll.plan.algorithms.islands import ISLANDS
from hetcoll.plan.ir import HEADER, SPAN, STEP, Buf, Plan, Span, offsets
from hetcoll.plan.pieces import Lengths, parts
from hetcoll.plan.pipeline import pipelined, ramp, share_units
from hetcoll.plan.simulator import PlanError, check, progress
from hetcoll.plan.simulator.node import Node
from hetcoll.plan.simulator.progress import _ready
from hetcoll.types import REDUCING, ROOTED, WHOLE, Collective, DType

BIND = Path(__file__).parents[2] / "benchmarks/bind.py"

DIRECT = among_hosts(find(Collective.ALLREDUCE, "direct"), led=False)
GRAIN = 64  # elements
SLOT, SMALLEST = 1 << 20, 1 << 18  # elements, too


def side_by_side(*sizes: int) -> Hosts:
    ends = list(accumulate(sizes))
    return tuple(tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True))


def build(a: Algorithm, hosts: Hosts, *, root: int = 0, scale: bool = False) -> list[Plan]:
    n = sum(map(len, hosts))
    return [a.build(n, r, root=root, scale=scale, hosts=hosts) for r in range(n)]


def compact(plan: Plan) -> tuple[Plan, list[Span], list[Span]]:
    """A plan, all its spans in units, and the same as the engine reads them, in numbers of the plan's points."""
    spans = [s for step in plan.steps for s in (step.src, step.dst, *(step.local.parts if step.local else ())) if s]
    data = plan.encode(plan.points())
    head = HEADER.unpack_from(data)
    read: list[Span] = []
    part = HEADER.size + head[3] * STEP.size + 4 * head[4]
    tail = [SPAN.unpack_from(data, part + i * SPAN.size) for i in range(head[11])]
    for i in range(head[3]):
        row = STEP.unpack_from(data, HEADER.size + i * STEP.size)
        mine = [row[5:8], row[8:11], *tail[row[13] : row[13] + row[14]]]
        read += [Span(Buf(buf), start, count) for buf, start, count in mine if buf >= 0]
    return replace(plan, send_units=head[5], recv_units=head[6]), spans, read


@pytest.mark.parametrize("sizes", [(7, 9, 11, 13), (1, 47), (5, 8, 9, 11, 13)])
def test_the_engine_takes_plans_of_hosts_of_any_sizes(sizes: tuple[int, ...]) -> None:
    """40 ranks on hosts of 7, 9, 11 and 13: 36,036 units, of which each rank names far fewer."""
    hosts, n = side_by_side(*sizes), sum(sizes)
    for rank in (0, n // 2, n - 1):
        plan = DIRECT.build(n, rank, hosts=hosts)
        steps, _ = _native.bind_plan(plan.encode(), n, DType.FLOAT32, 1 << 18, 1 << 18)
        assert steps == len(plan.steps)
    check(build(DIRECT, side_by_side(2, 3, 5, 7)), inplace=True)


def test_units_without_number_are_encoded_by_their_points() -> None:
    """Hosts of 1 to 23 ranks: more units than 32 bits count, and more than the engine numbers."""
    hosts = side_by_side(*range(1, 24))
    n = sum(map(len, hosts))
    plan = DIRECT.build(n, n - 1, hosts=hosts)
    assert plan.crowded
    assert plan.send_units > 1 << 32
    send, recv = plan.points()
    assert send == recv
    assert len(send) <= 2 * len(plan.steps)
    steps, _ = _native.bind_plan(plan.encode(plan.points()), n, DType.FLOAT32, 1 << 20, 1 << 20)
    assert steps == len(plan.steps)
    count = (1 << 40) + 7
    table = offsets([count], plan.send_units, send)
    assert table == [point * count // plan.send_units for point in send]


@pytest.mark.parametrize("kind", list(ISLANDS))
def test_what_is_encoded_by_points_is_where_it_was(kind: Collective) -> None:
    for sizes in ((2, 3), (3, 1, 2)):
        hosts = side_by_side(*sizes)
        for plan in build(ISLANDS[kind], hosts):
            small, spans, read = compact(plan)
            points = plan.points()
            for span, number in zip(spans, read, strict=True):
                buf = span.buf if span.buf is not Buf.SCRATCH else plan.scratch_like
                units, few = plan.units(buf), small.units(buf)
                copy, start = divmod(number.start, few) if span.buf is Buf.SCRATCH else (0, number.start)
                assert number.buf is span.buf
                assert points[buf][start] == span.start - copy * units
                assert points[buf][start + number.count] == span.start - copy * units + span.count


SIDE = [Collective.ALLREDUCE, Collective.ALLGATHER, Collective.REDUCE_SCATTER]  # whose proofs take longest
LARGE = [
    ((2, 3, 5, 7), list(ISLANDS)),
    ((31, 33), list(ISLANDS)),
    ((32, 32), list(ISLANDS)),
    ((64, 64), list(ISLANDS)),
    ((100, 28), list(ISLANDS)),
    ((31, 37, 41), list(ISLANDS)),
    ((13, 17, 19, 23), list(ISLANDS)),
    ((31, 33, 37), list(ISLANDS)),
    ((1, 63), list(ISLANDS)),
    ((50, 14), list(ISLANDS)),
    ((15, 17), list(ISLANDS)),
    ((64, 192), [*SIDE, Collective.BROADCAST, Collective.REDUCE]),
    ((1, 255), SIDE),
]


@parametrize(("sizes", "kinds"), LARGE, first=2)
def test_islands_of_any_sizes_are_proved(sizes: tuple[int, ...], kinds: list[Collective]) -> None:
    for kind in kinds:
        root = sum(sizes) - 1 if kind in ROOTED else 0
        check(build(ISLANDS[kind], side_by_side(*sizes), root=root, scale=kind in REDUCING), inplace=True)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", SIDE, ids=lambda kind: kind.label)
@pytest.mark.parametrize("sizes", [(1, 1023), (500, 524)], ids=lambda sizes: "+".join(map(str, sizes)))
def test_1024_ranks_are_proved_in_a_gigabyte(sizes: tuple[int, ...], kind: Collective) -> None:
    """In a process of its own, whose peak it is: of a million parts of LOCAL steps, and several million cells."""
    args = ["--prove", "--op", kind.label, "--islands", *map(str, sizes)]
    command = [sys.executable, BIND, *args]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=DEADLINE).stdout
    row = [cell.strip() for cell in found.splitlines()[-1].split("|")]
    assert row[1:3] == ["islands", "+".join(map(str, sizes))]
    assert int(row[-2]) < 1024


@given(st.data())
@settings(max_examples=examples(6))
def test_any_partition_of_many_ranks_is_proved(data: st.DataObject) -> None:
    """Up to some 64 ranks, on islands of any sizes."""
    sizes: list[int] = []
    left = data.draw(st.integers(2, 64))
    while left:
        sizes.append(data.draw(st.integers(1, left)))
        left -= sizes[-1]
    n, kind = sum(sizes), data.draw(st.sampled_from([*ISLANDS]))
    root = data.draw(st.integers(0, n - 1)) if kind in ROOTED else 0
    scale = kind in REDUCING and data.draw(st.booleans())
    check(build(ISLANDS[kind], side_by_side(*sizes), root=root, scale=scale), inplace=data.draw(st.booleans()))


def test_members_of_an_island_are_asked_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not each of them whenever another one is ready: for 255 that was 11 million times, for 1,023 no end."""
    asked = 0

    def ready(node: Node, pieces: int) -> bool:
        nonlocal asked
        asked += 1
        return _ready(node, pieces)

    monkeypatch.setattr(progress, "_ready", ready)
    plans = build(ISLANDS[Collective.ALLREDUCE], side_by_side(1, 63))
    check(plans)
    assert asked < 12 * sum(len(plan.steps) for plan in plans)


# Up to 4,096 ranks: two islands, primes, islands of 1 to 90 with more units than two words count, hosts of eight.
MANY = [(1, 4095), (2047, 2049), (1009, 1013, 2074), (*range(1, 91),), (1, 2, 3, 5, 7, 11, 13, 17) * 69, (8,) * 512]


def bounded(sizes: Sequence[int], kind: Collective, rank: int, root: int) -> None:
    """A rank draws its own plan in memory that grows with its own messages, and with the parts of its LOCAL steps."""
    n, hosts = sum(sizes), side_by_side(*sizes)
    ISLANDS[kind].build(2, 0, hosts=side_by_side(1, 1))  # what the first one of a process leaves in caches is no plan's
    for kept in (regions._rows, regions._places, regions._shares, regions.cut):  # of other plans of such a shape
        kept.cache_clear()
    tracemalloc.start()
    try:
        plan = ISLANDS[kind].build(n, rank, hosts=hosts, root=root)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    spans = sum(2 + (len(step.local.parts) if step.local else 0) for step in plan.steps)
    assert peak < 512 * (spans + n) + (16 << 10)
    send, recv = plan.points()
    shares = plan.size if kind not in WHOLE else 1
    assert max(len(send), len(recv)) <= 2 * spans + shares + 4
    deps, parts = sum(len(s.deps) for s in plan.steps), sum(len(s.local.parts) for s in plan.steps if s.local)
    assert len(plan.encode((send, recv))) == HEADER.size + STEP.size * len(plan.steps) + 4 * deps + SPAN.size * parts


@pytest.mark.parametrize("kind", list(ISLANDS), ids=lambda kind: kind.label)
@parametrize("sizes", MANY, first=4, ids=lambda sizes: f"{len(sizes)} islands, {sum(sizes)} ranks")
def test_of_4096_ranks_each_draws_its_own(sizes: tuple[int, ...], kind: Collective) -> None:
    n = sum(sizes)
    for rank in (n // 2, n - 1) if kind in ROOTED else (n // 2,):
        bounded(sizes, kind, rank, n - 1 if kind in ROOTED else 0)


@given(st.data())
@settings(max_examples=20)
def test_any_partition_of_4096_ranks_is_drawn(data: st.DataObject) -> None:
    most = data.draw(st.sampled_from([3, 40, 700, 4000]))
    sizes = data.draw(st.lists(st.integers(1, most), min_size=2, max_size=min(200, max(2, 8192 // most))))
    while sum(sizes) > 4096:
        sizes.pop()
    n, kind = sum(sizes), data.draw(st.sampled_from([*ISLANDS]))
    root = data.draw(st.integers(0, n - 1)) if kind in ROOTED else 0
    bounded(sizes, kind, data.draw(st.integers(0, n - 1)), root)


@pytest.mark.parametrize("kind", [Collective.GATHER, Collective.SCATTER])
def test_a_rank_beside_the_root_draws_no_others_parts(kind: Collective) -> None:
    bounded((103, 576, 111, 111, 83), kind, 272, 361)


@pytest.mark.parametrize("sizes", [(1, 1023), (500, 524), (31, 33, 37)])
@pytest.mark.parametrize("kind", [Collective.ALLREDUCE, Collective.ALLGATHER, Collective.REDUCE_SCATTER])
def test_a_rank_keeps_what_it_uses(sizes: tuple[int, ...], kind: Collective) -> None:
    n, hosts = sum(sizes), side_by_side(*sizes)
    for rank in (0, n // 2, n - 1):
        plan = ISLANDS[kind].build(n, rank, hosts=hosts)
        spans = sum(2 + (len(step.local.parts) if step.local else 0) for step in plan.steps)
        send, recv = plan.points()
        assert max(len(send), len(recv)) <= 2 * spans + 4
        assert len(plan.encode((send, recv))) == HEADER.size + STEP.size * len(plan.steps) + 4 * sum(
            len(step.deps) for step in plan.steps
        ) + SPAN.size * sum(len(step.local.parts) for step in plan.steps if step.local)


@given(st.data())
@settings(max_examples=examples(9))
def test_any_partition_in_pieces_fits_its_slots_and_is_right(data: st.DataObject) -> None:
    """Any sizes of islands, any counts from 0 on: pieces are proved, come to NumPy's result and fit their slots."""
    sizes = data.draw(st.lists(st.integers(1, 7), min_size=2, max_size=4))
    hosts, n = side_by_side(*sizes), sum(sizes)
    kind = data.draw(st.sampled_from([k for k in ISLANDS if k is not Collective.ALLTOALL]))
    whole = build(ISLANDS[kind], hosts, scale=kind in REDUCING)
    count = data.draw(st.integers(0, 3_000_000))
    length, equal = parts(Lengths.of(whole), count, SMALLEST, GRAIN)
    most = SLOT // SMALLEST
    plans = pipelined(whole, ramp(length, most), most)
    shares = [count] * (max(1, plans[0].recv_units // share_units(plans[0])))
    for plan in plans[:: max(1, n // 3)]:
        table = offsets(shares, share_units(plan), plan.points()[1], GRAIN, length * equal)
        assert table == sorted(table)
        where = dict(zip(plan.points()[1], table, strict=True))
        for step in plan.steps:
            span = step.dst if step.peer >= 0 else None
            if span is not None and span.buf is Buf.RECV:
                assert where[span.start + span.count] - where[span.start] <= SLOT
    few = pipelined(whole, ramp(data.draw(st.integers(1, 4)), 2))
    check(few)
    execute(few, [data.draw(st.integers(0, 60))] * n, False, random.Random(data.draw(st.integers(0, 1 << 20))), 3)


@parametrize(
    ("sizes", "kind", "count"),
    [
        ((101, 103), Collective.ALLGATHER, 1 << 20),
        ((101, 103), Collective.ALLREDUCE, 1 << 26),
        ((1, 70), Collective.REDUCE_SCATTER, 1 << 22),
        ((20, 28), Collective.ALLGATHER, 1 << 22),
        ((61, 67), Collective.ALLREDUCE, 1 << 24),
    ],
    first=2,
)
def test_messages_of_large_islands_fit_their_slots(sizes: tuple[int, ...], kind: Collective, count: int) -> None:
    """Whichever alignment is chosen. Where it can be, what a vendor's library moves for each member is equally long."""
    hosts = side_by_side(*sizes)
    whole = build(ISLANDS[kind], hosts)
    length, equal = parts(Lengths.of(whole), count, SMALLEST, GRAIN)
    most = SLOT // SMALLEST
    cuts = ramp(length, most)
    plan = pipelined(whole, cuts, most)[0]
    points = plan.points()[1]
    table = offsets([count] * (plan.recv_units // share_units(plan)), share_units(plan), points, GRAIN, length * equal)
    where = dict(zip(points, table, strict=True))
    assert table == sorted(table)
    sent = [where[s.dst.start + s.dst.count] - where[s.dst.start] for s in plan.steps if s.peer >= 0 and s.dst]
    assert max((x for x in sent), default=0) <= SLOT
    if equal % sizes[0] == 0 and kind is Collective.ALLREDUCE and count > 100 * equal * length * GRAIN:
        step = next(s for s in plan.steps if s.local is not None)
        ends = [(where[p.start], where[p.start + p.count]) for p in step.local.parts if p]  # type: ignore[union-attr]
        assert len({b - a for a, b in ends}) == 1


def test_a_span_that_its_receiver_cuts_otherwise_is_refused() -> None:
    """Units of both ends have one denominator: a third is not what three of ten are."""
    plans = build(ISLANDS[Collective.BROADCAST], side_by_side(1, 3))
    step = next(s for s in plans[1].steps if s.dst is not None and s.peer >= 0)
    assert step.dst is not None
    worse = replace(step, dst=Span(step.dst.buf, 0, step.dst.count + 1))
    steps = tuple(worse if s is step else s for s in plans[1].steps)
    with pytest.raises(PlanError, match="wanted a message as long as"):
        check([plans[0], replace(plans[1], steps=steps), *plans[2:]])


def test_parts_that_members_share_are_checked_where_their_memory_differs() -> None:
    """Members may have the very same parts, and scratch of different sizes."""
    plans = build(ISLANDS[Collective.ALLGATHER], side_by_side(1, 2))
    parts = (Span(Buf.SCRATCH, 0, plans[0].pieces), Span(Buf.SCRATCH, plans[0].pieces, plans[0].pieces))
    for rank, copies in ((1, 2), (2, 0)):
        plan = plans[rank]
        steps = [replace(s, local=replace(s.local, parts=parts)) if s.local else s for s in plan.steps]
        plans[rank] = replace(plan, steps=tuple(steps), scratch_copies=copies)
    with pytest.raises(PlanError, match=r"rank 2 of 3.*outside the 0 units"):
        check(plans)


def test_crowded_depends_on_what_the_engine_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = DIRECT.build(5, 0, hosts=side_by_side(2, 3))
    assert not plan.crowded
    monkeypatch.setattr(ir, "MOST_UNITS", 11)
    assert plan.crowded
    assert all(a < b for a, b in pairwise(plan.points()[0]))
