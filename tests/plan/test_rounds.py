"""Algorithms that say of each message in which round it goes, so that a rank draws no other's plan: what they say is
proved as plans of all ranks are, and among thousands of ranks it is all that is looked at."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import examples, parametrize
from topologies import any_islands, side_by_side
from waits import proved

from hetcoll.errors import PlanError
from hetcoll.plan import order
from hetcoll.plan.algorithms import ALGORITHMS, Algorithm, Draft, Hosts, find
from hetcoll.plan.algorithms.among import among
from hetcoll.plan.algorithms.atoms import AMONG
from hetcoll.plan.algorithms.base import Likeness, Rounds
from hetcoll.plan.algorithms.islands import ISLANDS
from hetcoll.plan.flat import LAG
from hetcoll.plan.ir import Op, Plan
from hetcoll.plan.order import Frame, ordered
from hetcoll.plan.pieces import Cut
from hetcoll.plan.pipeline import pipelined
from hetcoll.types import REDUCING, ROOTED, Collective

EVERY = [*ISLANDS.values(), *(entry for table in ALGORITHMS.values() for entry in table.values())]
IN_ROUNDS = [entry for entry in EVERY if entry.rounds is not None]
WAYS = [(entry, way) for entry in IN_ROUNDS for way in ("", "ordered", "compress")]
NEEDED = [  # what turns does so where all ranks do alike; GPUs compress by `islands`
    pytest.param(entry, way, id=f"{entry.collective.label}-{entry.name}-{way}")
    for entry, way in WAYS
    if (entry.ordered if way == "ordered" else entry.name == "islands" if way else entry.likeness is not Likeness.TURN)
]


@pytest.mark.parametrize(("entry", "way"), NEEDED)
@given(st.data())
@settings(max_examples=examples(9))
def test_what_goes_in_rounds_has_an_order(entry: Algorithm, way: str, data: st.DataObject) -> None:
    """Of a few ranks, where as few islands as there are count as many."""
    many, whole, inside = data.draw(any_islands().filter(lambda x: len(x) > 1)), entry, True
    if entry.name != "islands":
        inside = not way and entry.collective in AMONG and data.draw(st.booleans())
        many = many if inside else tuple((r,) for r in range(data.draw(st.integers(2, 9))))
        whole = among(entry) if inside else entry
    n = sum(map(len, many))
    how: dict[str, Any] = {"scale": entry.collective in REDUCING and data.draw(st.booleans()), "groups": ()}
    if way == "compress" and len(many) > 2 and data.draw(st.booleans()):
        how["groups"] = ((*many[0], *many[1]), *many[2:])
    root = data.draw(st.integers(0, n - 1)) if entry.collective in ROOTED else 0
    cuts = data.draw(st.sampled_from([(0, 1), (0, 3), (0, 1, 4, 5), (0, 1, 2, 3, 4, 5)]))
    made = Cut(cuts, cuts[-1] if way == "compress" else data.draw(st.integers(1, cuts[-1])), 1)
    asked = {way: True} if way else {}
    plans = [whole.build(n, r, root=root, hosts=many if inside else None, **how, **asked) for r in range(n)]
    with patch.object(order, "MANY", 0):
        frames = [Frame(plan, whole, many, **how) for plan in plans]
    assert len({frame.lengths for frame in frames}) == 1
    proved([ordered(frame, made) for frame in frames], pipelined(plans, *made[:2]), many)


@parametrize("islands", [8, 48, 2048, 1024], first=3)
@pytest.mark.parametrize(("entry", "way"), NEEDED)
def test_both_ends_of_a_message_agree_and_take_few_calls(entry: Algorithm, way: str, islands: int) -> None:
    """Among ranks that are islands each, and islands of 8 where there is such a way: three ranks of them."""
    for members in (1, 8):
        inside = members > 1 and entry.name != "islands"
        if inside and (way or entry.collective not in AMONG):
            continue
        whole, hosts = among(entry) if inside else entry, side_by_side(*[members] * islands)
        n, calls = islands * members, 0

        def count(_frame: object, event: str, _what: object) -> None:
            nonlocal calls
            calls += event == "call"

        found: dict[int, tuple[Plan, Sequence[int]]] = {}
        for rank in (0, n // 2, n - members):
            sys.setprofile(count)
            try:
                asked = {way: True} if way else {}
                placed = hosts if entry.name == "islands" or inside else None
                frame = Frame(whole.build(n, rank, hosts=placed, **asked), whole, hosts)
                plan, _, levels = ordered(frame, Cut((0, 1), 1, 1))
            finally:
                sys.setprofile(None)
            found[rank] = plan, levels
        assert calls < 3 * (40_000 + 40 * islands)
        assert sum(meet(*found[a], *found[b]) for a in found for b in found if a != b) > 0 or "tree" in entry.name


def meet(sender: Plan, sent: Sequence[int], receiver: Plan, received: Sequence[int]) -> int:
    """How many messages one rank sends another, each of which goes before it comes."""
    (op, _, peer, *_), (other, _, source, *_) = sender.columns.fields, receiver.columns.fields
    goes = np.array(sent)[(op == Op.SEND) & (peer == receiver.rank)]
    comes = np.array(received)[(other != Op.SEND) & (source == sender.rank)]
    assert (comes == goes + LAG).all()
    return len(goes)


def test_rounds_that_are_wrong_are_refused() -> None:
    """Where what is sent on goes no later than what came."""
    entry = find(Collective.BROADCAST, "tree")

    def at_once(plan: Plan) -> Rounds:
        none = np.zeros(len(plan.steps), np.int64)
        return Rounds(none, none)

    islands = side_by_side(*[1] * 100)
    wrong = entry._replace(rounds=at_once)
    own = wrong.build(100, 50)
    with pytest.raises(PlanError, match=r"rank 50 of 100, step .*: goes in a round before what it waits for"):
        ordered(Frame(own, wrong, islands), Cut((0, 1), 1, 1))


@pytest.mark.parametrize("entry", IN_ROUNDS, ids=lambda entry: f"{entry.collective.label}-{entry.name}")
def test_no_other_plan_is_drawn(entry: Algorithm) -> None:
    """Of 2,048 ranks, also where sums are in the order of ranks."""
    drawn: list[int] = []

    def draw(p: Draft) -> None:
        drawn.append(p.rank)
        entry.draw(p)

    hosts: Hosts = side_by_side(*[1] * 2048)
    counted = entry._replace(draw=draw)
    own = counted.build(2048, 7, hosts=hosts, ordered=entry.ordered)
    Frame(own, counted, hosts)
    assert set(drawn) == {7}
