"""All-to-all among hosts by one message a host and rank: proved for hosts of any sizes, and where it is chosen."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutants import missed
from plan_executor import execute
from thorough import examples
from topologies import any_groups, cluster, side_by_side

from hetcoll.errors import ArgumentError
from hetcoll.plan.algorithms import Hosts, find
from hetcoll.plan.ir import Op, Plan
from hetcoll.plan.simulator import check, predict
from hetcoll.plan.tuner import UNLIMITED, choose, named, table
from hetcoll.types import Collective

KIND = Collective.ALLTOALL
SIZES = [(4,), (2, 2), (3, 1), (1, 3), (1, 1, 2), (2, 2, 2, 2), (2, 3, 5), (1, 2, 1, 3, 1), (1, 7), (5, 5, 5)]
SHAPES = [*(side_by_side(*sizes) for sizes in SIZES), ((0, 2, 4), (1, 3)), ((3, 1), (0,), (2, 4, 5), (6,))]


def build(hosts: Hosts, name: str = "aggregated") -> list[Plan]:
    n = sum(map(len, hosts))
    return [find(KIND, name).build(n, rank, hosts=hosts) for rank in range(n)]


@pytest.mark.parametrize("hosts", SHAPES)
def test_it_is_proved_for_hosts_of_any_sizes(hosts: Hosts) -> None:
    for inplace in (False, True):
        check(build(hosts), inplace=inplace)


@given(st.data())
@settings(max_examples=examples(15))
def test_any_hosts_give_numpys_result_in_any_order(data: st.DataObject) -> None:
    plans = build(data.draw(any_groups()))
    rng = random.Random(data.draw(st.integers(0, 1 << 30)))
    count, credits = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 3))
    execute(plans, [count] * len(plans), data.draw(st.booleans()), rng, credits)


@pytest.mark.parametrize("sizes", [(2, 1), (2, 2)])
def test_every_single_edit_is_caught(sizes: tuple[int, ...]) -> None:
    plans = build(side_by_side(*sizes))
    assert not missed(plans, False, True)


def crossing(plans: list[Plan], hosts: Hosts) -> list[list[int]]:
    """By rank, the shares of each message that it sends to another host."""
    home = {rank: i for i, host in enumerate(hosts) for rank in host}
    return [
        [
            step.src.count
            for step in plan.steps
            if step.op is Op.SEND and step.src and home[step.peer] != home[plan.rank]
        ]
        for plan in plans
    ]


def test_one_message_goes_from_a_host_to_a_rank() -> None:
    hosts = side_by_side(4, 4, 4)
    plans = build(hosts)
    assert crossing(plans, hosts) == [[4, 4]] * 12
    assert crossing(build(hosts, "pairwise"), hosts) == [[1] * 8] * 12
    assert check(plans).hops == 2
    uneven = side_by_side(1, 3)
    assert crossing(build(uneven), uneven) == [[1, 1, 1], [3], [], []]


def test_few_bytes_are_aggregated_and_many_go_straight() -> None:
    for sizes in ((2, 2), (4, 4, 4), (8,) * 8):
        (upper, first), last = table(KIND, cluster(*sizes))
        assert (first, last) == ("aggregated", (UNLIMITED, "pairwise"))
        assert 1 << 16 < upper < 1 << 23
    for alone in (cluster(1, 1, 1, 1), cluster(4)):
        assert table(KIND, alone) == [(UNLIMITED, "pairwise")]


def test_shares_of_other_lengths_go_straight() -> None:
    several = cluster(4, 4)
    assert table(Collective.ALLTOALLV, several) == [(UNLIMITED, "pairwise")]
    assert named("aggregated") == {KIND: "aggregated"}
    for ask in (lambda: named("alltoallv:aggregated"), lambda: choose(Collective.ALLTOALLV, 8, several, "aggregated")):
        with pytest.raises(ArgumentError, match="no algorithm 'aggregated' for alltoallv: there are pairwise"):
            ask()


@pytest.mark.parametrize("sizes", [(2, 2), (4, 2), (8, 8), (2, 2, 2, 2)])
def test_costs_are_those_of_the_plans(sizes: tuple[int, ...]) -> None:
    plans, topology = build(side_by_side(*sizes)), cluster(*sizes)
    for nbytes in (8, 1 << 16, 1 << 26):
        stated = choose(KIND, nbytes, topology, "aggregated").seconds
        assert 1 / 3 < stated / predict(plans, nbytes, topology) < 3
