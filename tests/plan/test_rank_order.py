"""Reductions in the order of ranks: which algorithms can, and that the checker tells the order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from thorough import parametrize

from hetcoll.errors import ArgumentError
from hetcoll.plan import tuner
from hetcoll.plan.algorithms import ALGORITHMS, Algorithm, find
from hetcoll.plan.ir import Plan
from hetcoll.plan.simulator import PlanError, check
from hetcoll.plan.topology import RankInfo, Topology
from hetcoll.types import REDUCING, ROOTED, Collective

SIZES = [2, 3, 4, 5, 8, 16]
ENTRIES = [(kind, entry) for kind, table in ALGORITHMS.items() if kind in REDUCING for entry in table.values()]
ORDERED = [pytest.param(kind, entry, id=f"{kind.label}-{entry.name}") for kind, entry in ENTRIES if entry.ordered]
OTHERS = [pytest.param(kind, entry, id=f"{kind.label}-{entry.name}") for kind, entry in ENTRIES if not entry.ordered]


def build(entry: Algorithm, n: int, root: int, *, ordered: bool = True, **how: object) -> list[Plan]:
    return [entry.build(n, r, root=root, ordered=ordered, **how) for r in range(n)]  # type: ignore[arg-type]


ASKED = [
    pytest.param(kind, entry, n, id=f"{kind.label}-{entry.name}-{n}")
    for n in SIZES
    for kind, entry in ENTRIES
    if entry.ordered and entry.supports(n)
]


@parametrize(("kind", "entry", "n"), ASKED, first=sum(row.values[2] != max(SIZES) for row in ASKED))
def test_they_are_proved_to_add_in_rank_order(kind: Collective, entry: Algorithm, n: int) -> None:
    for root in sorted({0, 1, n // 2, n - 1}) if kind in ROOTED else [0]:
        for how in ({}, {"scale": True}, {"stretches": 3 if entry.stretches else 1, "cores": 4}):
            plans = build(entry, n, root, **how)
            assert all(plan.ordered and plan.redundant for plan in plans)
            for inplace in (False, True) if root == 0 else (root % 2 == 1,):
                check(plans, inplace=inplace)


@pytest.mark.parametrize(("kind", "entry"), ORDERED)
def test_the_checker_tells_another_order(kind: Collective, entry: Algorithm) -> None:
    """Their plans without the order, and with ranks that have changed places, would give other bits."""
    if entry.name in ("oneshot", "chain", "reduce_broadcast", "hypercube"):  # they have no other
        plans = build(entry, 4, 0, ordered=False)
        assert not plans[0].ordered
        check([replace(plan, ordered=True) for plan in plans])
        return
    for n in (4, 5):
        plans = build(entry, n, 1 if kind in ROOTED else 0, ordered=False, cores=4)
        check(plans)
        with pytest.raises(PlanError, match="was not added up in the order of ranks"):
            check([replace(plan, ordered=True) for plan in plans])


@pytest.mark.parametrize(("kind", "entry"), OTHERS)
def test_others_are_refused(kind: Collective, entry: Algorithm) -> None:
    with pytest.raises(ArgumentError, match="does not reduce in the order of ranks"):
        entry.build(4, 0, ordered=True)
    topology = Topology(tuple(RankInfo(r, "a", cores=2) for r in range(4)))
    with pytest.raises(ArgumentError, match=f"{kind.label} by {entry.name}, which does not reduce in the order"):
        tuner.choose(kind, 8, topology, entry.name, ordered=True)


@pytest.mark.parametrize("n", SIZES)
def test_the_tuner_takes_none_but_them(n: int) -> None:
    for setting in ("auto", "tcp"):
        for cores in (2, 16):
            topology = Topology(tuple(RankInfo(r, str(r % 2), cores=cores) for r in range(n)))
            for kind in REDUCING:
                for _, name in tuner.table(kind, topology, ordered=True):
                    assert find(kind, name).ordered, (setting, kind, name)


def test_what_reduces_nothing_has_no_order() -> None:
    assert not find(Collective.BROADCAST, "binomial").build(4, 0, ordered=True).ordered
