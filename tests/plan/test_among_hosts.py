"""Any algorithm among hosts: proved for hosts of any sizes, in both forms; what it costs; and which form is chosen."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutants import missed
from plan_executor import execute
from thorough import examples, parametrize
from topologies import any_groups, cluster, side_by_side

from hetcoll.errors import ArgumentError
from hetcoll.plan.algorithms import ALGORITHMS, Algorithm, Cost, Draft, Hosts, find, inp, out, register, tmp
from hetcoll.plan.algorithms.atoms import AMONG
from hetcoll.plan.algorithms.hosts import among_hosts, runs_among
from hetcoll.plan.costs import COSTS, LEVELS, levels
from hetcoll.plan.ir import Op, Plan
from hetcoll.plan.simulator import check, follows, predict
from hetcoll.plan.tuner import UNLIMITED, among_hosts_of, choose, led, table
from hetcoll.types import REDUCING, ROOTED, Collective

FLAT = [entry for kind in AMONG for entry in ALGORITHMS[kind].values() if runs_among(entry)]
ALL = [pytest.param(entry, id=f"{entry.collective.label}-{entry.name}") for entry in FLAT]
FORMS = pytest.mark.parametrize("form", [False, True], ids=["split", "led"])


SIZES = [(2, 2), (3, 1), (1, 3), (1, 1, 2), (2, 2, 2), (2, 2, 2, 2), (2, 3, 5), (1, 2, 1, 3, 1), (1, 7)]
SHAPES = [*(side_by_side(*sizes) for sizes in SIZES), ((0, 2, 4), (1, 3)), ((3, 1), (0,), (2, 4, 5), (6,))]


def build(
    entry: Algorithm, hosts: Hosts, form: bool, *, root: int = 0, scale: bool = False, compress: bool = False
) -> list[Plan]:
    n, placed = sum(map(len, hosts)), among_hosts(entry, led=form)
    return [placed.build(n, r, root=root, scale=scale, hosts=hosts, compress=compress) for r in range(n)]


@FORMS
@parametrize("entry", ALL, first=2)
def test_they_are_proved_for_hosts_of_any_sizes(entry: Algorithm, form: bool) -> None:
    """In place or not, for a sum and for an average, each with every second shape."""
    for turn, hosts in enumerate(hosts for hosts in SHAPES if entry.supports(len(hosts))):
        n = sum(map(len, hosts))
        for root in sorted({0, n // 2, n - 1}) if entry.collective in ROOTED else [0]:
            for scale in (False, True) if entry.collective in REDUCING else (False,):
                plans = build(entry, hosts, form, root=root, scale=scale)
                check(plans, inplace=(turn + scale) % 2 == 0, scale=scale)


@FORMS
@parametrize("sizes", [(5, 11), (1, 15), (2,) * 8, (1,) * 5 + (3,), (7, 9, 11, 13)], first=1)
def test_the_shapes_of_many_ranks_are_proved(sizes: tuple[int, ...], form: bool) -> None:
    hosts, n = side_by_side(*sizes), sum(sizes)
    for entry in (
        e for e in FLAT if e.name in ("ring", "tree", "direct", "halving", "doubling") and e.supports(len(sizes))
    ):
        check(build(entry, hosts, form, root=n - 1 if entry.collective in ROOTED else 0), inplace=True)


@parametrize("kind", [Collective.ALLREDUCE, Collective.REDUCE_SCATTER], first=1)
def test_compressed_plans_are_proved(kind: Collective) -> None:
    """As above."""
    for turn, hosts in enumerate(SHAPES):
        for scale in (False, True):
            plans = build(find(kind, "direct"), hosts, False, scale=scale, compress=True)
            check(plans, scale=scale, inplace=(turn + scale) % 2 == 0)


@given(st.data())
@settings(max_examples=examples(24))
def test_any_hosts_give_numpys_result_in_any_order(data: st.DataObject) -> None:
    hosts = data.draw(any_groups())
    n = sum(map(len, hosts))
    entry = data.draw(st.sampled_from([e for e in FLAT if e.supports(len(hosts))]))
    scale = data.draw(st.booleans()) and entry.collective in REDUCING
    root = data.draw(st.integers(0, n - 1)) if entry.collective in ROOTED else 0
    plans = build(entry, hosts, data.draw(st.booleans()), root=root, scale=scale)
    counts = [data.draw(st.integers(0, 40))] * n
    if entry.collective in (Collective.ALLGATHER, Collective.REDUCE_SCATTER):  # the v forms
        counts = data.draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
    inplace = data.draw(st.booleans())
    check(plans, inplace=inplace, scale=scale)
    rng = random.Random(data.draw(st.integers(0, 1 << 30)))
    execute(plans, counts, inplace, rng, max(plans[0].credits, data.draw(st.integers(1, 3))))


@FORMS
@parametrize("shape", [(2, 1), (2, 2)], first=1)
@parametrize("name", ["ring", "tree", "direct"], first=1)
def test_every_single_edit_is_caught(name: str, shape: tuple[int, ...], form: bool) -> None:
    for kind in (kind for kind in AMONG if name in ALGORITHMS[kind]):
        scale, root = kind in REDUCING, 1 if kind in ROOTED else 0
        plans = build(find(kind, name), side_by_side(*shape), form, root=root, scale=scale)
        assert not missed(plans, scale), kind.label


# ------------------------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize("sizes", [(2, 2), (4, 2), (8, 3), (1, 7), (2, 2, 1), (3, 5, 2, 1)])
@pytest.mark.parametrize("name", ["direct", "ring"])
def test_an_allreduce_crosses_hosts_once_each_way(name: str, sizes: tuple[int, ...]) -> None:
    """2(m-1)/m of the buffer leaves each of m hosts and no less can, and all that waits follows element by element."""
    m, hosts = len(sizes), side_by_side(*sizes)
    plans = build(find(Collective.ALLREDUCE, name), hosts, False)
    assert check(plans, credits=0).hops == 2 + (2 if name == "direct" else 2 * (m - 1))
    assert leaving(plans, hosts) == [2 * (m - 1) * plans[0].recv_units // m] * m
    for plan in plans:
        assert all(follows(plan, plan.steps[d], s) for s in plan.steps for d in s.deps)


def leaving(plans: list[Plan], hosts: Hosts) -> list[int]:
    """Units that leave each host."""
    return [sum(count for a, _, count in crossing(plans, hosts) if a == i) for i in range(len(hosts))]


def coming(plans: list[Plan], hosts: Hosts) -> list[int]:
    return [sum(count for _, b, count in crossing(plans, hosts) if b == i) for i in range(len(hosts))]


def crossing(plans: list[Plan], hosts: Hosts) -> list[tuple[int, int, int]]:
    """(from which host, to which, units) of messages between hosts."""
    home = {rank: i for i, host in enumerate(hosts) for rank in host}
    sends = [(plan.rank, s) for plan in plans for s in plan.steps if s.op is Op.SEND]
    return [(home[r], home[s.peer], s.src.count) for r, s in sends if s.src and home[r] != home[s.peer]]


@pytest.mark.parametrize("entry", ALL)
def test_where_hosts_are_led_one_rank_of_each_crosses(entry: Algorithm) -> None:
    hosts, root = side_by_side(3, 1, 2, 4), 5 if entry.collective in ROOTED else 0
    leaders = {0, 3, 5 if root == 5 else 4, 6}
    for plan in build(entry, hosts, True, root=root) if entry.supports(4) else ():
        mates = next(host for host in hosts if plan.rank in host)
        peers = {peer for peer, _ in plan.edges}
        assert peers <= (leaders | set(mates) if plan.rank in leaders else leaders & set(mates))


def test_sums_grow_in_one_copy_of_scratch() -> None:
    """And in one more where the algorithm needs its own: here it receives where it will read what was added up."""

    def aside(p: Draft) -> None:
        p.scratch_copies = 1
        if p.rank != p.root:
            p.send(0, inp(), p.root)
            return
        total = inp()
        for peer in p.others():
            p.recv(0, tmp(), peer)
            p.copy(0, out(), total)
            p.reduce(0, out(), tmp())
            total = out()

    hosts = side_by_side(2, 2, 2, 2)
    for kind in (Collective.REDUCE_SCATTER, Collective.REDUCE):
        for entry, form in product((e for e in FLAT if e.collective is kind), (False, True)):
            assert {plan.scratch_copies for plan in build(entry, hosts, form)} <= {0, 1}
    own = Algorithm("aside", Collective.REDUCE, aside)
    for form, inplace in product((False, True), (False, True)):
        plans = build(own, hosts, form, root=1)
        check(plans, inplace=inplace)
        assert form or plans[0].scratch_copies == 2


def test_all_ranks_of_one_a_host_run_the_algorithm_itself() -> None:
    hosts = side_by_side(1, 1, 1, 1)
    for entry, form in product(FLAT, (False, True)):
        if not form and entry.name in ("doubling", "halving") and entry.collective is not Collective.ALLREDUCE:
            continue  # split, each region is a message
        flat = [entry.build(4, r) for r in range(4)]
        assert [plan.steps for plan in build(entry, hosts, form)] == [plan.steps for plan in flat]


def test_what_cannot_be_had_is_said() -> None:
    with pytest.raises(ArgumentError, match="allgather by doubling does not support 3 hosts"):
        build(find(Collective.ALLGATHER, "doubling"), side_by_side(1, 1, 2), False)


# ------------------------------------------------------------------------------------------------------------- costs


@FORMS
@parametrize("sizes", [(4, 2), (3, 3, 3), (2, 2), (4, 4), (8, 8), (2, 2, 2, 2), (1, 5)], first=2)
@pytest.mark.parametrize("entry", ALL)
def test_costs_are_those_of_the_plans(entry: Algorithm, sizes: tuple[int, ...], form: bool) -> None:
    if not entry.supports(len(sizes)) or entry.cost is None:
        return
    hosts = side_by_side(*sizes)
    plans = build(entry, hosts, form)
    report = check(plans)
    inside, between = levels(entry.collective, entry.cost(len(sizes)), hosts, led=form)
    whole = max(plans[0].send_units, plans[0].recv_units)
    assert report.hops <= inside.hops + between.hops <= report.hops + 2
    if len(set(sizes)) == 1:
        most = max(sum(s.peer >= 0 for s in plan.steps) for plan in plans)
        assert most <= 1.01 * (inside.messages + between.messages)
        both = zip(leaving(plans, hosts), coming(plans, hosts), strict=True)
        assert max(map(sum, both)) <= (between.sent + between.received + 1e-9) * whole
        loads = zip(report.sent, report.received, strict=True)
        stated = inside.sent + inside.received + between.sent + between.received
        assert max(map(sum, loads)) <= (stated + 1e-9) * whole
    topology = cluster(*sizes)
    upper = led(entry.collective, entry.name, topology)
    for nbytes in (8, 1 << 26):
        if (nbytes <= upper) == form:
            stated = choose(entry.collective, nbytes, topology, entry.name).seconds
            assert 1 / 3 < stated / predict(plans, nbytes, topology) < 3


def test_short_messages_lead_and_long_ones_split() -> None:
    for sizes in ((4, 4), (7, 9, 11, 13), (16,) * 16):
        for name in ("oneshot", "doubling", "direct", "ring", "tree"):
            assert 8 < led(Collective.ALLREDUCE, name, cluster(*sizes)) < 1 << 18
    assert led(Collective.BROADCAST, "ring", cluster(2, 2)) == UNLIMITED  # the root sends as much to its only mate
    assert led(Collective.ALLREDUCE, "ring", cluster(2, 2)) == led(Collective.ALLREDUCE, "direct", cluster(2, 2))


def test_long_messages_of_many_hosts_come_from_one_host_at_a_time() -> None:
    """Of several that send to one host at a time some wait, so that links are not full."""
    for kind in (Collective.ALLREDUCE, Collective.ALLGATHER, Collective.REDUCE_SCATTER):
        for sizes in ((1,) * 4, (1,) * 8, (2,) * 8, (7, 9, 11, 13)):
            cost = COSTS[kind][table(kind, cluster(*sizes))[-1][1]](len(sizes))
            assert (cost.senders, cost.sent) == (1, COSTS[kind]["ring"](len(sizes)).sent)
        assert table(kind, cluster(4, 4))[-1][1] == "direct"


def test_which_algorithms_run_among_hosts() -> None:
    ring = find(Collective.ALLREDUCE, "ring")
    assert among_hosts_of(ring, cluster(2, 1))
    assert not among_hosts_of(ring, cluster(2, 1), ordered=True)
    assert not among_hosts_of(ring, cluster(3))
    assert not among_hosts_of(ring, cluster(1, 1, 1))
    assert not among_hosts_of(find(Collective.ALLREDUCE, "staged"), cluster(2, 1))
    assert not among_hosts_of(find(Collective.ALLTOALL, "pairwise"), cluster(2, 1))


def test_an_algorithm_with_levels_draws_them_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, Collective.ALLREDUCE, dict(ALGORITHMS[Collective.ALLREDUCE]))
    monkeypatch.setitem(LEVELS, Collective.ALLREDUCE, {})

    @register(Collective.ALLREDUCE, "own", levels=lambda hosts: (Cost(1, 1, 0, 0), Cost(1, len(hosts), 0, 0)))
    def own(p: Draft) -> None:
        raise NotImplementedError

    assert not among_hosts_of(find(Collective.ALLREDUCE, "own"), cluster(2, 2))
    assert choose(Collective.ALLREDUCE, 1 << 20, cluster(2, 2)).name == "own"
    assert choose(Collective.ALLREDUCE, 1 << 20, cluster(4)).name != "own"


def test_what_is_sent_first_may_lie_within_what_is_sent_next() -> None:
    """The third host is sent all while the second has the middle only."""

    def middle_first(p: Draft) -> None:
        p.units = 3
        second, third = ((p.root + step) % p.size for step in (1, 2))
        if p.rank == p.root:
            for unit in (1, 0, 2):
                p.send(0, inp(unit), second)
                if unit == 1:
                    p.send(1, inp(0, 3), third)
        elif p.rank == second:
            for unit in (1, 0, 2):
                p.recv(0, out(unit), p.root)
        else:
            p.recv(0, out(0, 3), p.root)

    for hosts in (side_by_side(2, 2, 2), side_by_side(1, 2, 3)):
        for root in (0, 5):
            check(build(Algorithm("middle", Collective.BROADCAST, middle_first), hosts, False, root=root))


def test_what_is_asked_for_runs_among_as_many_hosts() -> None:
    assert choose(Collective.ALLGATHER, 8, cluster(3, 3), "doubling").name == "doubling"
    with pytest.raises(ArgumentError, match="allgather by doubling does not support 3 hosts"):
        choose(Collective.ALLGATHER, 8, cluster(2, 3, 3), "doubling")
    assert table(Collective.ALLREDUCE, cluster(2, 2), "ring") == [(UNLIMITED, "ring")]
