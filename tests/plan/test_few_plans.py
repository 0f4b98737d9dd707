"""Of which algorithms few flat plans say what all ranks do, and that orders by these are those by all."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import examples
from topologies import any_islands, side_by_side

from hetcoll.plan.algorithms import ALGORITHMS, Algorithm, Draft
from hetcoll.plan.algorithms.among import among
from hetcoll.plan.algorithms.atoms import AMONG
from hetcoll.plan.algorithms.base import Likeness
from hetcoll.plan.algorithms.islands import ISLANDS
from hetcoll.plan.order import Frame, ordered
from hetcoll.plan.pieces import Cut
from hetcoll.types import REDUCING, ROOTED, Collective

EVERY = [*ISLANDS.values(), *(entry for table in ALGORITHMS.values() for entry in table.values())]
STARS = [entry for entry in EVERY if entry.likeness is Likeness.STAR]
FEW = [entry for entry in EVERY if entry.likeness is not None]


@given(st.data())
@settings(max_examples=examples(36))
def test_few_plans_order_as_all_do(data: st.DataObject) -> None:
    """Islands of any sizes and ranks, or ranks that are islands each."""
    entry = data.draw(st.sampled_from(FEW))
    sizes = st.sampled_from([2, 4, 8]) if entry.likeness is Likeness.SWAP else st.integers(2, 9)
    alone = sizes.map(lambda n: tuple((r,) for r in range(n)))
    many = any_islands().filter(lambda x: entry.likeness is not Likeness.SWAP or len(x) in (2, 4))
    islands = data.draw(many if entry.name == "islands" else alone)
    if entry.name != "islands" and entry.collective in AMONG and data.draw(st.booleans()):
        islands, entry = data.draw(many), among(entry)
    n, kind = sum(map(len, islands)), entry.collective
    scale = kind in REDUCING and data.draw(st.booleans())
    how: dict[str, Any] = {"scale": scale, "groups": ()}
    in_order = entry.ordered and data.draw(st.booleans())
    made = Cut(data.draw(st.sampled_from([(0, 1), (0, 3), (0, 1, 4, 5)])), data.draw(st.integers(1, 3)), 1)
    nothing = {"likeness": None, "rounds": None}
    each = entry._replace(flat=entry.flat and entry.flat._replace(**nothing), **nothing)
    root = data.draw(st.integers(0, n - 1)) if kind in ROOTED else 0
    for rank in range(n):
        own = entry.build(n, rank, root=root, hosts=islands, ordered=in_order, scale=scale)
        few, all_drawn = Frame(own, entry, islands, **how), Frame(own, each, islands, **how)
        assert few.lengths == all_drawn.lengths
        assert ordered(few, made) == ordered(all_drawn, made)


@pytest.mark.parametrize("entry", STARS, ids=lambda entry: f"{entry.collective.label}-{entry.name}")
def test_of_a_star_two_plans_are_drawn_at_most(entry: Algorithm) -> None:
    """Islands of unequal sizes, and 2,048 of 8; where none has two, the plan that is there is one of them."""
    for islands in (side_by_side(*[8] * 2048), side_by_side(*range(1, 20)), side_by_side(*[1] * 300)):
        n, alone = sum(map(len, islands)), len(islands) == 300
        if entry.name != "islands" and not alone and entry.collective not in AMONG:
            continue
        drawn: list[int] = []

        def draw(p: Draft, drawn: list[int] = drawn) -> None:
            drawn.append(p.rank)
            entry.draw(p)

        counted = entry._replace(draw=draw)
        whole = counted if entry.name == "islands" or alone else among(entry)._replace(flat=counted)
        for rank, root in ((0, 0), (0, n - 1), (n - 1, n // 2)):
            own = whole.build(n, rank, root=root, hosts=islands)
            drawn.clear()
            Frame(own, whole, islands)
            assert len(drawn) <= 2 - alone


def test_what_is_a_star() -> None:
    """A rank that is not the root has one message, with the root, and nothing before it."""
    assert {(e.collective, e.name) for e in STARS} == {
        *((k, name) for k in ROOTED for name in ("islands", "direct")),
        (Collective.GATHER, "led"),
        (Collective.SCATTER, "led"),
    }
    for entry in STARS:
        for n, root in ((2, 1), (5, 0), (7, 3)):
            alone = tuple((r,) for r in range(n))
            for rank in set(range(n)) - {root}:
                first, *rest = entry.build(n, rank, root=root, hosts=alone).steps
                assert first.peer == root
                assert all(step.peer < 0 for step in rest)


@pytest.mark.parametrize(
    "entry", [e for e in EVERY if e.likeness is Likeness.SWAP], ids=lambda e: f"{e.collective.label}-{e.name}"
)
def test_of_what_swaps_one_plan_is_drawn(entry: Algorithm) -> None:
    """Among 2,048 islands of 8. Of doubling among 6 islands, of which some sit out, all are drawn."""
    for islands in (side_by_side(*[8] * 2048), side_by_side(1, 2, 3, 4, 5, 6)):
        drawn: list[int] = []

        def draw(p: Draft, drawn: list[int] = drawn) -> None:
            drawn.append(p.rank)
            entry.draw(p)

        if entry.supports(len(islands)):
            n, whole = sum(map(len, islands)), among(entry)
            own = whole.build(n, n // 2, hosts=islands)
            Frame(own, whole._replace(flat=entry._replace(draw=draw)), islands)
            assert len(drawn) == (1 if len(islands) == 2048 else 6)


def test_which_algorithms_turn_and_swap() -> None:
    def of(likeness: Likeness) -> set[tuple[Collective, str]]:
        return {(entry.collective, entry.name) for entry in EVERY if entry.likeness is likeness}

    swapping = {(Collective.ALLREDUCE, "doubling"), (Collective.ALLREDUCE, "halving_doubling")}
    swapping |= {(Collective.ALLGATHER, "doubling"), (Collective.REDUCE_SCATTER, "halving")}
    kinds = (Collective.ALLREDUCE, Collective.ALLGATHER, Collective.REDUCE_SCATTER)
    assert of(Likeness.SWAP) == swapping
    assert of(Likeness.TURN) == {(kind, name) for kind in kinds for name in ("ring", "direct", "islands")}


MANY = 512  # islands
CALLS = {"islands": 36, "doubling": 36, "halving": 36, "tree": 36}  # of Python's functions, for each island


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, "islands") for kind in ISLANDS),
        (Collective.ALLGATHER, "doubling"),
        (Collective.REDUCE_SCATTER, "halving"),
        (Collective.BROADCAST, "tree"),
        (Collective.REDUCE, "tree"),
    ],
    ids=str,
)
def test_what_a_rank_draws_takes_few_calls_for_each_island(kind: Collective, name: str) -> None:
    """That of the root, and of a rank in the middle. Memory is as long as 512 islands leave it whole: in one piece."""
    islands = tuple(Island(ranks) for ranks in side_by_side(*[8] * MANY))
    entry, n, calls = ISLANDS[kind] if name == "islands" else among(ALGORITHMS[kind][name]), 8 * MANY, 0

    def count(_frame: object, event: str, _what: object) -> None:
        nonlocal calls
        calls += event == "call"

    for rank in (0, n // 2):
        calls = 0
        sys.setprofile(count)
        try:
            own = entry.build(n, rank, hosts=islands)
            ordered(Frame(own, entry, islands), Cut((0, 1), 1, 1))
        finally:
            sys.setprofile(None)
        assert calls < CALLS[name] * MANY
        Island.asked = 0
        own.encode()
        assert Island.asked <= MANY


class Island(tuple[int, ...]):
    """Its ranks. It counts how often any is asked whether it holds a rank."""

    asked = 0

    def __contains__(self, rank: object) -> bool:
        Island.asked += 1
        return super().__contains__(rank)
