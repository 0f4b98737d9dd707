"""Sets of plans that turn: a few ranks stand for all, and what is proved of these is proved of all."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import pytest
from mutants import edited, field_mutants, passes, structural_mutants
from thorough import parametrize

from hetcoll.plan.algorithms import Algorithm, Hosts, find
from hetcoll.plan.algorithms.among import among
from hetcoll.plan.algorithms.islands import ISLANDS
from hetcoll.plan.ir import Plan, Step
from hetcoll.plan.simulator import PlanError, Report, check, prove
from hetcoll.plan.symmetry import Symmetry, everyone, symmetry_of
from hetcoll.types import Collective

AR, AG, RS, A2A = Collective.ALLREDUCE, Collective.ALLGATHER, Collective.REDUCE_SCATTER, Collective.ALLTOALL
KINDS = (structural_mutants, field_mutants)
PAIRS: Hosts = ((0, 1), (2, 3), (4, 5))


class Drawn(Sequence[Plan]):
    """The plans of all ranks, each drawn when it is asked for, and not kept."""

    def __init__(self, entry: Algorithm, size: int) -> None:
        self._entry, self._size = entry, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, rank: int) -> Plan:  # type: ignore[override]
        return self._entry.build(self._size, rank)


def flat(kind: Collective, name: str, size: int) -> list[Plan]:
    return [find(kind, name).build(size, rank) for rank in range(size)]


def islands(entry: Algorithm) -> list[Plan]:
    return [entry.build(6, rank, hosts=PAIRS) for rank in range(6)]


TURNING = {
    "allreduce-ring": lambda: flat(AR, "ring", 4),
    "allreduce-direct": lambda: flat(AR, "direct", 4),
    "allgather-ring": lambda: flat(AG, "ring", 4),
    "reduce_scatter-direct": lambda: flat(RS, "direct", 4),
    "reduce_scatter-ring": lambda: flat(RS, "ring", 3),
    "allreduce-staged": lambda: flat(AR, "staged", 3),
    "barrier-dissemination": lambda: flat(Collective.BARRIER, "dissemination", 4),
    "allreduce-islands": lambda: islands(ISLANDS[AR]),
    "allgather-islands": lambda: islands(ISLANDS[AG]),
    "allreduce-ring among islands": lambda: islands(among(find(AR, "ring"))),
}
_SETS = [pytest.param(make, id=name) for name, make in TURNING.items()]
turning_sets = pytest.mark.parametrize("make", _SETS)
some_turning_sets = parametrize("make", _SETS[::-1], first=3)


def outcome(plans: Sequence[Plan], symmetry: Symmetry, inplace: bool) -> Report | None:
    try:
        return prove(plans, symmetry, inplace=inplace, scale=False)
    except PlanError:
        return None


@turning_sets
def test_what_turns_is_found_and_comes_to_the_same(make: Callable[[], list[Plan]]) -> None:
    plans = make()
    symmetry = symmetry_of(plans)
    assert symmetry.times == (3 if len(plans) in (3, 6) else 4)
    for inplace in (False, True):
        report = outcome(plans, symmetry, inplace)
        assert report is not None
        assert report == outcome(plans, everyone(len(plans)), inplace)


@some_turning_sets
def test_an_edit_of_all_ranks_is_caught_where_it_is_without_stand_ins(make: Callable[[], list[Plan]]) -> None:
    """Each edit of the plan of rank 0, and of those it stands for; some of two edits."""
    plans, seen, rng = make(), 0, random.Random(7)
    symmetry = symmetry_of(plans)
    mutants = [plan for kind in KINDS for _, plan in kind(plans[0])]
    mutants = rng.sample(mutants, min(len(mutants), 120))
    for mutant in (*mutants, *(another(mutant, rng) for mutant in mutants[:20])):
        wrong = list(plans)
        for strides, rank in enumerate(symmetry.orbit(0)):
            wrong[rank] = replace(mutant, rank=rank, steps=tuple(symmetry.step(step, strides) for step in mutant.steps))
        found = symmetry_of(wrong)
        if found.times > 1:  # else what it moves does not stay in one piece
            seen += 1
            for inplace in (False, True):
                assert outcome(wrong, found, inplace) == outcome(wrong, everyone(len(wrong)), inplace)
    assert seen > 20


def another(plan: Plan, rng: random.Random) -> Plan:
    return rng.choice([plan, *(mutant for _, mutant in structural_mutants(plan))])


@some_turning_sets
def test_an_edit_of_one_rank_is_no_turn(make: Callable[[], list[Plan]]) -> None:
    """So the whole set is proved, as any other; `test_simulator` has all edits of all ranks."""
    plans = make()
    for rank in (1, len(plans) - 1):
        for kind in KINDS:
            for what, mutant in kind(plans[rank]):
                assert symmetry_of([*plans[:rank], mutant, *plans[rank + 1 :]]).times == 1, what


def test_an_edit_that_only_breaks_the_symmetry_is_proved_for_itself() -> None:
    """Two receives of rank 3 change places: nothing is wrong with that, but nobody else does it."""
    plans = flat(AR, "direct", 4)
    i, j = (k for k, step in enumerate(plans[3].steps) if step.lane == 1 and step.peer in (1, 0))
    first, second = plans[3].steps[i].peer, plans[3].steps[j].peer
    plans[3] = edited(edited(plans[3], i, peer=second), j, peer=first)
    assert symmetry_of(plans).times == 1
    assert passes(plans, False)


def test_units_turn_within_each_stretch() -> None:
    entry = find(AR, "staged")
    plans = [entry.build(4, rank, stretches=3) for rank in range(4)]
    symmetry = symmetry_of(plans)
    assert (symmetry.times, symmetry.blocks) == (4, (4, 4, 4))
    assert outcome(plans, symmetry, False) == outcome(plans, everyone(4), False)


def test_ranks_that_no_other_can_stand_for() -> None:
    """Those of a call with a root, and those with whom no other does the same."""
    for kind, name in ((Collective.BROADCAST, "ring"), (AR, "tree"), (AR, "oneshot")):
        assert symmetry_of(flat(kind, name, 4)).times == 1


@pytest.mark.parametrize(
    ("kind", "name", "size"),
    [
        (AR, "ring", 192),
        (AR, "tree", 512),
        (Collective.BARRIER, "dissemination", 512),
        pytest.param(AR, "ring", 1024, marks=pytest.mark.thorough),
        pytest.param(AR, "direct", 512, marks=pytest.mark.thorough),
        pytest.param(AR, "tree", 1024, marks=pytest.mark.thorough),
    ],
)
def test_many_ranks_are_proved(kind: Collective, name: str, size: int) -> None:
    report = check(Drawn(find(kind, name), size))
    hops = {
        "ring": 2 * size - 2,
        "direct": 2,
        "tree": 2 * size.bit_length() - 2,
        "dissemination": size.bit_length() - 1,
    }
    assert report.hops == hops[name]


def test_plans_that_turn_are_proved_in_the_memory_of_a_few() -> None:
    tracemalloc.start()
    try:
        assert check(Drawn(find(AR, "ring"), 64)).steps == 64 * 252
        assert tracemalloc.get_traced_memory()[1] < 16 << 20  # of 110 MB where each rank stands for itself
    finally:
        tracemalloc.stop()


def test_all_that_a_step_has_is_compared() -> None:
    """`symmetry.Stand` names what it compares: a new field of a step belongs there, too."""
    compared = {"op", "lane", "channel", "deps", "compressed", "src", "dst", "peer", "local"}
    assert {field.name for field in fields(Step)} == compared
