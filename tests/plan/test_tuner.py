"""The tuner and what it goes by: costs against the plans themselves, the choice against its own predictions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import examples, parametrize
from topologies import cluster

from hetcoll import _native
from hetcoll.errors import ArgumentError, InitError
from hetcoll.plan.algorithms import ALGORITHMS, Algorithm, Draft, find, register
from hetcoll.plan.algorithms.hosts import among_hosts
from hetcoll.plan.ir import Op, Plan
from hetcoll.plan.rails import Nic
from hetcoll.plan.simulator import Link, Machine, check, predict
from hetcoll.plan.topology import RankInfo, Topology
from hetcoll.plan.tuner import LOOP_PIECE, UNLIMITED, among_hosts_of, choose, led, named, table
from hetcoll.types import Collective, DType

ALL = [(k, a) for k, entries in ALGORITHMS.items() for a in entries.values()]
SHIPPED = [pytest.param(a, id=f"{k.label}-{a.name}") for k, a in ALL if a.cost]
SIMULATED = [p for p in SHIPPED if not p.values[0].cost(4).turns]  # type: ignore[union-attr,misc]  # nothing has turns
KINDS = list(ALGORITHMS)


# ----------------------------------------------------------------------------------------------------------- costs


def test_what_is_taken_only_by_name() -> None:
    assert {(k.label, a.name) for k, a in ALL if not (a.cost or a.levels)} == {
        ("gather", "binomial"), ("scatter", "binomial"),
    }  # fmt: skip


@parametrize("algorithm", SHIPPED, first=8)
def test_stated_costs_are_those_of_the_plans(algorithm: Algorithm) -> None:
    assert algorithm.cost
    for n in (n for n in range(2, 18) if algorithm.supports(n)):
        plans = [algorithm.build(n, r) for r in range(n)]
        report, cost = check(plans), algorithm.cost(n)
        whole = max(plans[0].send_units, plans[0].recv_units)
        messages = [sum(s.peer >= 0 for s in p.steps) for p in plans]
        assert cost.messages == max(messages)
        assert sum(messages) <= cost.mean * n * cost.messages + 1e-9
        assert cost.mean == 1 or sum(messages) == pytest.approx(cost.mean * n * cost.messages)
        if algorithm.name == "doubling":  # an odd rank's own input may overtake its partner's
            assert cost.hops - 1 <= report.hops <= cost.hops
        else:
            assert cost.hops == report.hops
        if algorithm.collective is Collective.BARRIER:
            assert (cost.sent, cost.received, cost.reduced) == (0, 0, 0)
            continue
        loads = list(zip(report.sent, report.received, report.reduced, strict=True))
        stated = (cost.sent * whole, cost.received * whole, cost.reduced * whole)
        assert pytest.approx(max(sent + received for sent, received, _ in loads)) == stated[0] + stated[1]
        busiest = max(loads, key=lambda load: (load[0] + load[1], load[2]))
        assert busiest[2] == pytest.approx(stated[2])
        assert any(load == pytest.approx(stated) for load in loads)
        assert cost.answered * whole <= min(map(units_answered, [plans] * n, range(n)))


def units_answered(plans: list[Plan], rank: int) -> int:
    """What a rank reduces from a peer's message and sends back as the first of a channel, where the peer expects it
    before all else: native/plan/passes.cc, MarkAnswers."""
    steps, units = plans[rank].steps, 0
    for i, got in enumerate(steps):
        if got.op is not Op.RECV_REDUCE:
            continue
        answers = [s for s in steps if s.op is Op.SEND and s.src == got.dst and i in s.deps and s.peer == got.peer]
        theirs = plans[got.peer].steps
        first = {s.lane: s for s in reversed(theirs)}.values()
        ready = {s.channel for s in first if s.op is Op.RECV and s.peer == rank and not s.deps}
        units += sum(s.src.count for s in answers if s.src and s.channel in ready)
    return units


@pytest.mark.parametrize("shape", [(2,), (4,), (8,), (1, 1)])
@pytest.mark.parametrize("algorithm", SIMULATED)
def test_costs_agree_with_the_simulated_time(algorithm: Algorithm, shape: tuple[int, ...]) -> None:
    """Straight lines against a simulation of every piece: within a factor of 2.5 for the smallest and the largest."""
    assert algorithm.cost
    topology = cluster(*shape)
    plans = [algorithm.build(topology.size, r) for r in range(topology.size)]
    cost = algorithm.cost(topology.size)
    for nbytes in (8, 1 << 26):
        if algorithm.collective is Collective.BARRIER:
            nbytes = 0
        stated = choose(algorithm.collective, nbytes, topology, algorithm.name).seconds
        if cost.copied:  # what was fitted, and nothing simulates
            stated -= Machine().staging * cost.copied
        if algorithm.name == "chain" and topology.size > 2:  # so was this
            stated -= cost.hops * LOOP_PIECE / Machine().shm.bandwidth
        assert 1 / 2.5 < stated / predict(plans, nbytes, topology) < 2.5


# ---------------------------------------------------------------------------------------------------------- choice


@given(st.sampled_from(KINDS), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 16), st.data())
@settings(max_examples=examples(60))
def test_the_choice_is_the_fastest_for_every_size(
    kind: Collective, hosts: list[int], cores: int, data: st.DataObject
) -> None:
    topology = cluster(*hosts, cores=cores)
    rows = table(kind, topology)
    uppers = [upper for upper, _ in rows]
    assert uppers == sorted(set(uppers))
    assert uppers[-1] == UNLIMITED
    edges = [u + d for u in uppers[:-1] for d in (0, 1)]
    nbytes = data.draw(st.sampled_from([0, 1, 1 << 20, 1 << 34, *edges]) | st.integers(0, 1 << 40))
    choice = choose(kind, nbytes, topology)
    assert choice.name == next(name for upper, name in rows if nbytes <= upper)
    entries = ALGORITHMS[kind].values()
    levels = 1 < len(hosts) < topology.size
    usable = [a for a in entries if a.supports(len(hosts) if among_hosts_of(a, topology) else topology.size)]
    usable = [a for a in usable if a.cost or (levels and a.levels)]
    if topology.crowding <= 1 or topology.cores > 8:
        usable = [a for a in usable if not (a.cost and a.cost(topology.size).turns)]
    times = [choose(kind, nbytes, topology, a.name).seconds for a in usable]
    best = min(t for t in times if not math.isnan(t))
    assert choice.seconds == pytest.approx(best, rel=1e-6, abs=1e-12)


def test_small_messages_take_little_handling_and_large_ones_little_traffic() -> None:
    for topology in (cluster(4), cluster(8), cluster(16), cluster(1, 1, 1, 1)):
        rows = table(Collective.ALLREDUCE, topology)
        costs = [ALGORITHMS[Collective.ALLREDUCE][name].cost for _, name in rows]
        steps = [cost(topology.size) for cost in costs if cost]
        assert steps[0].messages < steps[-1].messages
        assert steps[0].sent > steps[-1].sent


def test_long_sums_of_one_host_go_through_common_memory_where_slots_are_not_claimed() -> None:
    def last(topology: Topology) -> str:
        return table(Collective.ALLREDUCE, topology)[-1][1]

    for n in (4, 6, 8):
        for host in (cluster(n), cluster(n, cores=2)):
            claiming = replace(host, ranks=tuple(replace(info, claims=info.rank == 1) for info in host.ranks))
            assert (last(host), last(claiming)) == ("chained" if host.crowding > 1 else "staged", "direct")
            least = table(Collective.ALLREDUCE, host)[-2][0]
            assert least < 1 << 18 if host.crowding > 1 else 1 << 18 < least < 2 << 20
        elsewhere = {last(cluster(n, cores=2, setting="tcp")), last(cluster(n, n, cores=2))}
        assert elsewhere.isdisjoint({"staged", "chained"})
    assert {last(cluster(n, cores=cores)) for n, cores in ((2, 2), (2, 8), (3, 3))} == {"direct"}
    assert {last(cluster(n, cores=cores)) for n, cores in ((3, 1), (3, 2), (5, 4), (12, 8))} == {"chained"}
    assert last(cluster(2, cores=1)) == "direct"
    assert [last(cluster(32, cores=cores)) for cores in (4, 8, 16, 32)] == ["chained"] * 3 + ["staged"]
    assert [last(cluster(n, cores=cores)) for n, cores in ((64, 32), (128, 64))] == ["chained", "staged"]


def test_more_ranks_than_cores_ask_for_fewer_hops() -> None:
    roomy, crowded = cluster(8), cluster(8, cores=2)
    assert (roomy.crowding, crowded.crowding) == (1.0, 4.0)
    reach = [
        sum(upper for upper, name in table(Collective.ALLREDUCE, t) if name == "oneshot") for t in (roomy, crowded)
    ]
    assert reach[0] < reach[1]


def test_more_ranks_than_cores_send_few_messages_over_sockets() -> None:
    for n, first, last in (
        (4, "doubling", "halving_doubling"),
        (6, "reduce_broadcast", "direct"),
        (8, "reduce_broadcast", "halving_doubling"),
    ):
        crowded = table(Collective.ALLREDUCE, cluster(n, cores=2, setting="tcp"))
        assert (crowded[0][1], crowded[-1][1]) == (first, last)
    # Where each rank has a core, whoever waits for one other at each step leaves it idle.
    assert table(Collective.ALLREDUCE, cluster(8, setting="tcp"))[-1][1] == "direct"
    assert table(Collective.ALLREDUCE, cluster(2, cores=2, setting="tcp"))[0][1] == "oneshot"


def test_sums_in_rank_order_send_few_messages_over_sockets() -> None:
    """Where ranks share cores: the fewest in all, and no loop through all ranks for what the root could add at once."""
    for n in (4, 8, 16):
        crowded = cluster(n, cores=2, setting="tcp")
        rows = table(Collective.ALLREDUCE, crowded, ordered=True)
        assert (rows[0][1], rows[-1][1]) == ("reduce_broadcast", "direct")
        assert rows[0][0] > 32 << 10
        upper, first = table(Collective.REDUCE, crowded, ordered=True)[0]
        assert first == "direct"
        assert upper > 256 << 10
    rows = table(Collective.ALLREDUCE, cluster(*[1] * 64), ordered=True)
    assert [name for _, name in rows] == ["reduce_broadcast", "direct"]


def test_a_slower_network_moves_the_thresholds() -> None:
    slow = Machine(tcp=Link(latency=1e-3, overhead=2e-6, bandwidth=3.5e9, duplex=True))
    topology = cluster(1, 1, 1, 1)
    first = table(Collective.ALLREDUCE, topology)[0]
    assert table(Collective.ALLREDUCE, topology, machine=slow)[0][0] > first[0]


def rated(*rates: tuple[int, int], topology: Topology | None = None) -> Topology:
    ranks = (topology or cluster(*(1 for _ in rates))).ranks
    return Topology(tuple(replace(info, rates=each) for info, each in zip(ranks, rates, strict=True)))


def test_the_slowest_cards_that_say_their_rate_are_taken_for_the_network() -> None:
    some = rated((0, 0), (10_000, 0), (1000, 200_000), (25_000, 0))
    assert some.rate == (1000, 2)
    assert Machine().on(some) == Machine().on(rated(*[(1000, 0)] * 4))
    assert 0.11e9 < Machine().on(some).tcp.bandwidth < 0.125e9
    told = Machine().network(some)
    assert told == "network between hosts: 1 Gbit/s, as the system of rank 2 says of its cards"
    for kind in ALGORITHMS:  # nothing follows from which rank it is that looks: all hold the same
        assert table(kind, some) == table(kind, rated(*[(1000, 0)] * 4))


def test_a_network_of_no_known_rate_is_taken_for_the_machines() -> None:
    assert Machine().on(cluster(2, 2)) == Machine()
    assert "taken for 28 Gbit/s: no system says its cards' rate" in Machine().network(cluster(2, 2))
    within = rated((1000, 0), (1000, 0), topology=cluster(2))  # one host has no network
    assert Machine().on(within) == Machine()
    assert Machine().network(within) == ""


def test_cards_of_unlike_rates_ask_for_few_long_messages() -> None:
    """Where whole messages or several streams wait for each other, they wait for the slow card. If one host has such
    cards, all choose so; equal cards, one host and RDMA change nothing."""
    like = rated(*[(250, 0)] * 4)
    unlike = Topology((*like.ranks[:2], replace(like.ranks[2], unlike=True), like.ranks[3]))
    for kind in (Collective.ALLREDUCE, Collective.ALLGATHER, Collective.REDUCE_SCATTER):
        assert choose(kind, 64 << 10, like).name != "ring"
        for nbytes in (64 << 10, 1 << 20, 64 << 20):
            assert choose(kind, nbytes, unlike).name == "ring"
    assert choose(Collective.ALLREDUCE, 8, unlike).name == choose(Collective.ALLREDUCE, 8, like).name
    nics = tuple(Nic("mlx5_0:1", "Ethernet", f"10.0.0.{r + 1}", "") for r in range(4))
    rdma = Topology(tuple(replace(info, nics=(nics[info.rank],)) for info in unlike.ranks))
    inside = Topology(tuple(replace(info, host="a") for info in unlike.ranks))
    for each in (like, rdma, inside):
        assert not each.unlike
        told = Topology(tuple(replace(info, unlike=False) for info in each.ranks))
        assert table(Collective.ALLREDUCE, each) == table(Collective.ALLREDUCE, told)


def test_a_rank_fills_no_more_of_a_fast_card_than_it_can() -> None:
    fast = rated(*[(100_000, 0)] * 4)
    assert Machine().on(fast) == Machine()
    assert Machine().network(fast).endswith("100 Gbit/s, as the system of rank 0 says of its cards; of which a rank"
                                            " fills 28 by TCP")  # fmt: skip


def test_rdma_has_the_rate_of_its_own_ports() -> None:
    ranks = (RankInfo(r, "ab"[r], nics=(Nic("mlx5_0:1", "Ethernet", f"10.0.0.{r + 1}", ""),)) for r in range(2))
    both = rated((1000, 400_000), (1000, 200_000), topology=Topology(tuple(ranks)))
    assert both.rate == (200_000, 1)
    assert Machine().on(both) == Machine()._replace(verbs=Machine().verbs._replace(bandwidth=22e9))
    assert Machine().network(both) == "network between hosts: 200 Gbit/s, as the system of rank 1 says of its cards"


def test_a_network_of_a_lower_rate_asks_for_fewer_bytes() -> None:
    """Sizes from which on a share goes to each rank in the place of the whole; and from which on rings gain."""
    six = (rated(*[(mbits, 0)] * 6) for mbits in (10_000, 1000))
    before, after = ({name: upper for upper, name in table(Collective.ALLREDUCE, t)} for t in six)
    assert after["doubling"] < before["doubling"] / 8
    assert after["direct"] == before["direct"] < UNLIMITED


def test_what_is_taken_among_hosts_was_among_the_fastest_there() -> None:
    """Microseconds that all-reduces took: docs/measurements/2026-11-hosts.md."""
    names = ("doubling", "halving_doubling", "tree", "direct", "ring")
    took = (
        (8, 10_000, 8, 24.3, 47.8, 47.8, 92.9, 121.4),
        (8, 10_000, 4096, 33.1, 62.0, 62.0, 96.1, 136.8),
        (8, 10_000, 65536, math.inf, 95.3, 109.5, 162.8, 195.9),
        (4, 1000, 1 << 20, math.inf, 13183, 17585, 14753, 13245),
        (4, 1000, 1 << 24, math.inf, 213286, 312716, 233444, 220797),
        (8, 1000, 1 << 24, math.inf, 249169, 310619, 468008, 277084),
        (16, 1000, 1 << 24, math.inf, 270818, 364850, 619224, 319367),
        (8, 200, 1 << 16, math.inf, 3868, 5124, 4166, 3926),
    )
    for n, mbits, nbytes, *micros in took:
        name = choose(Collective.ALLREDUCE, int(nbytes), rated(*[(int(mbits), 0)] * int(n))).name
        assert micros[names.index(name)] <= 1.1 * min(micros)


def far(micros: int, topology: Topology) -> Topology:
    """All but the ranks of the first host tell such a round trip to it."""
    home = topology.hosts[0]
    ranks = (replace(info, round_trip=0 if info.rank in home else micros) for info in topology.ranks)
    return replace(topology, ranks=tuple(ranks))


@pytest.mark.parametrize("hosts", [(1,) * 4, (1,) * 8, (2,) * 4])
def test_a_network_of_a_high_latency_asks_for_the_fewest_rounds(hosts: tuple[int, ...]) -> None:
    near, distant = cluster(*hosts), far(2048, cluster(*hosts))
    for kind, nbytes, few in (
        (Collective.ALLREDUCE, 64 << 10, "oneshot"),
        (Collective.ALLREDUCE, 2 << 20, "direct"),
        (Collective.BROADCAST, 128 << 10, "direct"),
    ):
        assert choose(kind, nbytes, near).name != few
        assert choose(kind, nbytes, distant).name == few
    assert choose(Collective.BARRIER, 0, distant).name == "direct"
    for kind in ALGORITHMS:  # all hold the same, whoever of them looks
        assert table(kind, distant) == table(kind, far(2048, cluster(*hosts)))


def test_on_a_slow_network_rings_gain_from_the_same_sizes_on_whatever_its_latency() -> None:
    slow = rated(*[(200, 0)] * 6)
    later = replace(slow, ranks=tuple(replace(info, round_trip=128) for info in slow.ranks))
    begins = [table(Collective.ALLREDUCE, each)[-2][0] for each in (rated(*[(10_000, 0)] * 6), slow, later)]
    assert max(begins) < 1.05 * min(begins)


def test_the_longest_round_trip_is_taken_where_it_is_longer_than_the_machines() -> None:
    some = Topology(tuple(replace(info, round_trip=(0, 64, 2048, 0)[info.rank]) for info in cluster(1, 1, 1, 1).ranks))
    assert some.round_trip == (2048, 2)
    assert Machine().on(some) == Machine()._replace(tcp=Machine().tcp._replace(latency=1024e-6))
    assert Machine().network(some).endswith("; 1024 us a message, by the round trip of rank 2")
    assert Machine().on(far(16, cluster(2, 2))) == Machine()  # a rank takes as long as that before it sees a message
    alone = Topology(tuple(replace(info, round_trip=2048) for info in cluster(4).ranks))  # one host has no network
    assert Machine().on(alone) == Machine()


def test_v_forms_choose_among_their_plain_forms() -> None:
    for kind in (Collective.ALLGATHERV, Collective.REDUCE_SCATTERV, Collective.ALLTOALLV):
        assert table(kind, cluster(5)) == table(kind.plain, cluster(5))


def test_what_is_asked_for_is_taken_or_refused() -> None:
    choice = choose(Collective.ALLREDUCE, 8, cluster(4), "ring")
    assert (choice.name, choice.reason) == ("ring", "asked for")
    assert table(Collective.ALLREDUCE, cluster(4), "ring") == [(UNLIMITED, "ring")]
    with pytest.raises(ArgumentError, match="no algorithm 'rign' for allreduce: there are chained, direct, doubling"):
        choose(Collective.ALLREDUCE, 8, cluster(4), "rign")
    with pytest.raises(ArgumentError, match="allgather by doubling does not support 3 ranks"):
        table(Collective.ALLGATHER, cluster(3), "doubling")


def test_reasons_name_the_runner_up() -> None:
    assert choose(Collective.ALLTOALL, 8, cluster(4)).reason == "the only one"
    assert choose(Collective.BARRIER, 0, cluster(16)).reason.startswith("before direct (")


def test_without_a_cost_an_algorithm_is_taken_only_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, Collective.ALLTOALL, {})

    @register(Collective.ALLTOALL, "odd")
    def odd(p: Draft) -> None:
        raise NotImplementedError

    assert choose(Collective.ALLTOALL, 8, cluster(2), "odd").name == "odd"
    with pytest.raises(ArgumentError, match="no algorithm for alltoall among 2 ranks states its cost"):
        table(Collective.ALLTOALL, cluster(2))


def test_settings_name_algorithms() -> None:
    assert set(named("ring")) == {k for k in Collective if "ring" in ALGORITHMS.get(k.plain, {})}
    assert named("ring, allreduce:tree") == {**named("ring"), Collective.ALLREDUCE: "tree"}
    assert named("allgatherv:doubling") == {Collective.ALLGATHERV: "doubling"}
    for setting, problem in (
        ("rong", "'rong' names no algorithm: 'rong'; there are aggregated, binomial, chain, chained, direct"),
        ("allreduces:ring", "'allreduces:ring' names no collective: 'allreduces'"),
        ("alltoall:ring", "no algorithm 'ring' for alltoall: there are aggregated, pairwise"),
        ("", "'' names no algorithm: ''"),
    ):
        with pytest.raises(ArgumentError, match=f"^HETCOLL_ALGO: {problem}"):
            named(setting)


# -------------------------------------------------------------------------------------------------------- topology


def test_hosts_and_transports() -> None:
    names = ["b", "a", "b", "c", "a"]
    t = Topology(tuple(RankInfo(r, h) for r, h in enumerate(names)))
    assert t.hosts == ((0, 2), (1, 4), (3,))
    assert [t.local_rank(r) for r in range(5)] == [0, 0, 1, 0, 1]
    assert (t.same_host(0, 2), t.same_host(0, 1)) == (True, False)
    assert (t.transport(0, 2), t.transport(0, 1)) == ("shm", "tcp")
    assert replace(t, setting="tcp").transport(0, 2) == "tcp"
    assert cluster(2, setting="shm").transport(0, 1) == "shm"


def test_topologies_refuse_what_cannot_be() -> None:
    with pytest.raises(ArgumentError, match=r"wanted ranks 0, 1, 2, \.\.\. in order, got \[0, 2\]"):
        Topology((RankInfo(0, "a"), RankInfo(2, "a")))
    with pytest.raises(ArgumentError, match="shared memory is asked for, but rank 2 is on host host1"):
        cluster(2, 1, setting="shm")
    with pytest.raises(InitError, match="rank 1 runs version '2', but rank 0 runs '1'"):
        Topology((RankInfo(0, "a", version="1"), RankInfo(1, "a", version="2")))


def test_predictions_refuse_plans_that_do_not_fit_together() -> None:
    plans = [ALGORITHMS[Collective.ALLREDUCE]["ring"].build(2, r) for r in range(2)]
    broken: Plan = replace(plans[0], steps=tuple(s for s in plans[0].steps if s.op is not Op.SEND))
    with pytest.raises(AssertionError, match="carries 0 messages but 1 are received"):
        predict([broken, plans[1]], 8, cluster(2))


@parametrize("hosts", [128, 1], first=1)
def test_the_choice_for_a_thousand_ranks_binds(hosts: int) -> None:
    """However long the buffer is, and whichever algorithm is asked for that cuts it into stretches."""
    n, seen = 1024, set()
    for cores in (2, 64):
        topology = Topology(tuple(RankInfo(r, f"host{r * hosts // n}", cores=cores) for r in range(n)))
        for kind, entries in ALGORITHMS.items():
            for nbytes in (8 << shift for shift in range(0, 28, 9)):
                names = {choose(kind, nbytes, topology).name} | {a.name for a in entries.values() if a.stretches}
                for name in names:
                    cut = find(kind, name).cut(nbytes, topology.cores, n)
                    drawn = (kind, name, cut, topology.cores)
                    if drawn not in seen:
                        seen.add(drawn)
                        entry = find(kind, name)
                        if among_hosts_of(entry, topology):
                            entry = among_hosts(entry, led=nbytes <= led(kind, name, topology))
                        plan = entry.build(n, 0, hosts=topology.hosts, stretches=cut, cores=topology.cores)
                        assert max(plan.send_units, plan.recv_units) <= 1 << 15
                        each = -(-nbytes // 4 // max(plan.send_units, plan.recv_units))  # elements of a unit
                        counts = each * plan.send_units, each * plan.recv_units
                        steps, _ = _native.bind_plan(plan.encode(), n, DType.FLOAT32, *counts)
                        assert steps == len(plan.steps)


def test_only_what_is_able_is_chosen() -> None:
    assert table(Collective.ALLREDUCE, cluster(4), able=lambda entry: entry.name == "ring") == [(UNLIMITED, "ring")]
    with pytest.raises(ArgumentError, match="no algorithm for allreduce among 4 ranks states its cost"):
        table(Collective.ALLREDUCE, cluster(4), able=lambda _: False)
