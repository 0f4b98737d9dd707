"""Gather and scatter led: proved for hosts of any sizes, one message a host between hosts, and where it is chosen."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutants import missed
from plan_executor import execute
from thorough import examples
from topologies import any_groups, cluster, side_by_side

from hetcoll.plan.algorithms import Hosts, find
from hetcoll.plan.ir import Op, Plan
from hetcoll.plan.simulator import check, predict
from hetcoll.plan.tuner import UNLIMITED, choose, table
from hetcoll.types import Collective

KINDS = (Collective.GATHER, Collective.SCATTER)
EACH = pytest.mark.parametrize("kind", KINDS, ids=[kind.label for kind in KINDS])
SIZES = [(4,), (2, 2), (3, 1), (1, 3), (1, 1, 2), (2, 2, 2, 2), (2, 3, 5), (1, 2, 1, 3, 1), (1, 7)]
SHAPES = [*(side_by_side(*sizes) for sizes in SIZES), ((0, 2, 4), (1, 3)), ((3, 1), (0,), (2, 4, 5), (6,))]


def build(kind: Collective, hosts: Hosts, root: int = 0, name: str = "led") -> list[Plan]:
    n = sum(map(len, hosts))
    return [find(kind, name).build(n, rank, root=root, hosts=hosts) for rank in range(n)]


@EACH
def test_it_is_proved_for_hosts_of_any_sizes(kind: Collective) -> None:
    for hosts in SHAPES:
        for root in range(sum(map(len, hosts))):
            plans = build(kind, hosts, root)
            for inplace in (False, True):
                check(plans, inplace=inplace)


@EACH
@pytest.mark.parametrize("sizes", [(5, 11), (1, 15), (7, 9, 11, 13)])
def test_the_shapes_of_many_ranks_are_proved(kind: Collective, sizes: tuple[int, ...]) -> None:
    check(build(kind, side_by_side(*sizes), sum(sizes) - 1), inplace=True)


@given(st.data())
@settings(max_examples=examples(15))
def test_any_hosts_give_numpys_result_in_any_order(data: st.DataObject) -> None:
    hosts = data.draw(any_groups())
    n = sum(map(len, hosts))
    plans = build(data.draw(st.sampled_from(KINDS)), hosts, data.draw(st.integers(0, n - 1)))
    rng = random.Random(data.draw(st.integers(0, 1 << 30)))
    count, credits = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 3))
    execute(plans, [count] * n, data.draw(st.booleans()), rng, credits)


@EACH
@pytest.mark.parametrize("sizes", [(2, 1), (2, 2)])
def test_every_single_edit_is_caught(kind: Collective, sizes: tuple[int, ...]) -> None:
    plans = build(kind, side_by_side(*sizes), 1)
    assert not missed(plans, False)


def crossing(plans: list[Plan], hosts: Hosts) -> list[int]:
    """The units of each message between hosts."""
    home = {rank: i for i, host in enumerate(hosts) for rank in host}
    sends = [(plan.rank, step) for plan in plans for step in plan.steps if step.op is Op.SEND]
    return [step.src.count for rank, step in sends if step.src and home[rank] != home[step.peer]]


@EACH
def test_one_message_a_host_crosses(kind: Collective) -> None:
    hosts = side_by_side(2, 3, 5)
    assert sorted(crossing(build(kind, hosts, 3), hosts)) == [2, 5]
    assert crossing(build(kind, hosts, 3, "direct"), hosts) == [1] * 7
    apart = ((0, 2, 4), (1, 3))  # whose parts do not lie side by side in the root's buffer
    assert crossing(build(kind, apart), apart) == [1, 1]
    assert check(build(kind, hosts, 3)).hops == 2


@EACH
def test_few_bytes_are_led_and_many_go_straight(kind: Collective) -> None:
    for sizes in ((2, 2), (4, 4, 4), (8,) * 8):
        (upper, first), last = table(kind, cluster(*sizes))
        assert (first, last) == ("led", (UNLIMITED, "direct"))
        assert 1 << 16 < upper < 1 << 26
    assert table(kind, cluster(1, 1, 1, 1)) == [(UNLIMITED, "direct")]
    assert table(kind, cluster(4)) == [(UNLIMITED, "direct")]


@EACH
@pytest.mark.parametrize("sizes", [(2, 2), (4, 2), (8, 8), (2, 2, 2, 2)])
def test_costs_are_those_of_the_plans(kind: Collective, sizes: tuple[int, ...]) -> None:
    plans, topology = build(kind, side_by_side(*sizes)), cluster(*sizes)
    for nbytes in (8, 1 << 16, 1 << 26):
        stated = choose(kind, nbytes, topology, "led").seconds
        assert 1 / 3 < stated / predict(plans, nbytes, topology) < 3
