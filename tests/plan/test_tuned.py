"""What `hetcoll tune` measured chooses where ranks are placed as they were then, and nowhere else."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from topologies import cluster

from hetcoll.errors import ArgumentError
from hetcoll.plan import tuner
from hetcoll.plan.algorithms import ALGORITHMS
from hetcoll.plan.machine import Machine, Network
from hetcoll.plan.tuned import Between, Measured, Placed, Tuned, lookup, read, write
from hetcoll.types import Collective

KIND = Collective.ALLREDUCE
PLACED = Placed.of(cluster(4))
ONE = Measured(KIND, PLACED, (8, 1024, 4096), {"tree": (1e-6, 5e-6, 9e-6), "ring": (3e-6, 4e-6, 5e-6)})


@st.composite
def measurements(draw: st.DrawFn) -> Measured:
    kind = draw(st.sampled_from([KIND, Collective.ALLGATHER, Collective.REDUCE]))
    sizes = tuple(sorted(draw(st.sets(st.integers(1, 2**40), min_size=1, max_size=6))))
    times = st.tuples(*[st.floats(1e-8, 10.0)] * len(sizes))
    seconds = draw(st.dictionaries(st.sampled_from(sorted(ALGORITHMS[kind])), times, min_size=1))
    hosts = tuple(draw(st.lists(st.integers(1, 99), min_size=1, max_size=5)))
    transport = draw(st.sampled_from(["shm", "tcp", "verbs", "shm and tcp", "shm and verbs"]))
    return Measured(kind, Placed(hosts, draw(st.integers(1, 512)), transport), sizes, seconds)


@given(st.lists(measurements(), max_size=4))
def test_what_is_written_is_read(measured: list[Measured]) -> None:
    found = read(write(Tuned(tuple(measured)), ["about", "it"]), "file").times
    assert [one[:3] for one in found] == [one[:3] for one in measured]
    for one, other in zip(found, measured, strict=True):
        assert one.seconds.keys() == other.seconds.keys()
        for name, seconds in one.seconds.items():
            assert seconds == pytest.approx(other.seconds[name], rel=1e-3)


@given(measurements())
def test_the_fastest_is_chosen_at_each_size_but_for_a_little(one: Measured) -> None:
    rows = one.rows()
    assert [upper for upper, _ in rows] == sorted({upper for upper, _ in rows})
    assert rows[-1][0] == tuner.UNLIMITED
    for i, nbytes in enumerate(one.nbytes):
        least = min(seconds[i] for seconds in one.seconds.values())
        assert one.seconds[tuner.look_up(rows, nbytes)][i] <= least / 0.97


def test_it_holds_where_ranks_are_placed_so() -> None:
    assert lookup(KIND, cluster(4), [ONE]) == ONE
    assert ONE.rows() == [(math.isqrt(8 * 1024), "tree"), (tuner.UNLIMITED, "ring")]
    told = "measured with 1024 bytes: ring 4.0 us (3.0 predicted), tree 5.0 us, direct (9.0 predicted)"
    assert ONE.choose(900, {"direct": 9e-6, "ring": 3e-6}) == ("ring", 4e-6, told)
    more = Placed.of(cluster(4, cores=4)), Placed.of(cluster(4, cores=64))
    assert more[0] == more[1], "cores that nobody uses"
    for other in (cluster(5), cluster(4, cores=2), cluster(2, 2), cluster(4, setting="tcp")):
        assert lookup(KIND, other, [ONE]) is None
    assert lookup(Collective.ALLGATHER, cluster(4), [ONE]) is None
    gathers = Measured(Collective.ALLGATHER, PLACED, (8,), {"ring": (1e-6,), "direct": (2e-6,)})
    assert lookup(Collective.ALLGATHERV, cluster(4), [ONE, gathers]) == gathers


def test_of_algorithms_that_may_be_taken() -> None:
    ordered = [name for name, entry in ALGORITHMS[KIND].items() if entry.ordered]
    slow = {ordered[0]: (9.0, 9.0, 9.0)}
    found = lookup(KIND, cluster(4), [ONE._replace(seconds=ONE.seconds | slow)], ordered=True)
    assert found is not None
    assert found.seconds == {name: times for name, times in (ONE.seconds | slow).items() if name in ordered}
    only = ONE._replace(seconds={name: times for name, times in ONE.seconds.items() if name not in ordered})
    assert lookup(KIND, cluster(4), [only], ordered=True) is None
    three = Measured(Collective.ALLGATHER, Placed.of(cluster(3)), (8,), {"doubling": (1e-6,)})  # of 2, 4, 8 ranks only
    assert lookup(Collective.ALLGATHER, cluster(3), [three]) is None


def test_the_network_between_hosts_is_what_was_measured() -> None:
    placed = Placed.of(cluster(2, 2, 2))
    between = Between(placed.hosts, placed.transport, Network(500e-6, 7e-6, 20e6))
    found = read(write(Tuned(networks=(between,)), ()), "file")
    assert found == Tuned(networks=(between,))
    there, elsewhere = found.machine(cluster(2, 2, 2)), found.machine(cluster(2, 2))
    assert elsewhere == Machine()
    assert there.on(cluster(2, 2, 2)).tcp[:3] == (500e-6, 7e-6, 20e6)
    told = there.network(cluster(2, 2, 2))
    assert "0.16 Gbit/s, 500 us a message and 7 us of work at either end, as measured" in told
    far, near = (
        tuner.table(Collective.BARRIER, cluster(*[1] * 8), machine=Machine(measured=Network(latency, 3e-6, 1e9)))
        for latency in (500e-6, 1e-6)
    )
    assert far == [(tuner.UNLIMITED, "direct")], "one round"
    assert near == [(tuner.UNLIMITED, "dissemination")], "the fewest messages"


def test_all_to_alls_with_counts_take_none_that_wants_equal_shares() -> None:
    topology = cluster(2, 2)
    times: dict[str, tuple[float, ...]] = {"aggregated": (1e-6,), "pairwise": (2e-6,)}
    one = Measured(Collective.ALLTOALL, Placed.of(topology), (64,), times)
    assert lookup(Collective.ALLTOALL, topology, [one]) == one
    other = lookup(Collective.ALLTOALLV, topology, [one])
    assert other is not None
    assert other.rows() == [(tuner.UNLIMITED, "pairwise")]


GOOD = write(Tuned((ONE,), (Between((2, 2), "tcp", Network(5e-6, 3e-6, 1e9)),)), ())


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"allreduce"', '"allreduced"', r"file, line \d+: measured.1.collective: wanted '\w+' or "),
        ("hosts = [4]", "hosts = []", "hosts: wanted a list, got "),
        ("hosts = [4]", "hosts = [4, 0]", "hosts: wanted a whole number from 1 on, got 0"),
        ("cores = 4", 'cores = "4"', "cores: wanted a whole number from 1 on, got '4'"),
        ("cores = 4\n", "", "measured.1: wanted cores there"),
        ('"shm"', '"smh"', "transport: wanted 'shm' or 'tcp' or "),
        ("[8, 1024, 4096]", "[8, 4096, 1024]", "bytes: wanted rising sizes, got "),
        ("ring = [3, 4, 5]", "ring = [3, 4]", "measured.1.us.ring: wanted 3 times, one a size, got 2"),
        ("ring = [3, 4, 5]", "ring = [3, 4, -5]", "us.ring: wanted a number above 0, got -5"),
        ("ring = [3, 4, 5]", "rign = [3, 4, 5]", "us.rign: is no algorithm of allreduce: there are chained, direct"),
        ("cores = 4", "cores = 4\nsize = 3", "measured.1.size: is no key here: there are collective, "),
        ("[[measured]]", "[[measures]]", "measures: is no table here: there are [[measured]], [[network]]"),
        ("[[network]]", "[network]", "network: wanted tables [[network]] with "),
        ('latency = "5 us"', 'latency = "5"', "network.1.latency: wanted a time in a string"),
        ('latency = "5 us"', 'latency = "0 us"', "network.1.latency: wanted more than no time"),
        ('overhead = "3 us"\n', "", "network.1: wanted overhead there"),
        ("[[measured]]", "[[measured]", "file: "),
    ],
)
def test_what_is_wrong_is_named_with_its_line(old: str, new: str, words: str) -> None:
    assert old in GOOD
    read(GOOD, "file")
    with pytest.raises(ArgumentError, match=words if "\\d" in words else re.escape(words)):
        read(GOOD.replace(old, new), "file")
