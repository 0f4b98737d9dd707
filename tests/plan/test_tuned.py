"""What `hetcoll tune` measured chooses where ranks are placed as they were then, and nowhere else."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import examples
from topologies import cluster

from hetcoll.errors import ArgumentError
from hetcoll.plan import tuner
from hetcoll.plan.algorithms import ALGORITHMS
from hetcoll.plan.machine import Machine, Network
from hetcoll.plan.topology import Islands, RankInfo, Topology
from hetcoll.plan.tuned import Between, Island, Measured, Placed, Tuned, find, lookup, read, write
from hetcoll.types import Collective

KIND = Collective.ALLREDUCE
PLACED = Placed.of(cluster(4))
ONE = Measured(KIND, PLACED, (8, 1024, 4096), {"tree": (1e-6, 5e-6, 9e-6), "ring": (3e-6, 4e-6, 5e-6)})


@st.composite
def islands_of(draw: st.DrawFn, hosts: tuple[int, ...]) -> tuple[Island, ...]:
    """Any of all ranks of these hosts, or none."""
    ranks = [host for host, n in enumerate(hosts) for _ in range(n)]
    names = draw(st.lists(st.integers(0, 3), min_size=len(ranks), max_size=len(ranks)))
    found = [[host for host, name in zip(ranks, names, strict=True) if name == each] for each in sorted({*names})]
    if len(found) < 2:
        return ()
    vendors = draw(st.lists(st.sampled_from(["cpu", "cuda", "hip"]), min_size=len(found), max_size=len(found)))
    counts = [tuple((host, one.count(host)) for host in sorted({*one})) for one in found]
    return tuple(map(Island, vendors, counts))


@st.composite
def measurements(draw: st.DrawFn) -> Measured:
    kind = draw(st.sampled_from([KIND, Collective.ALLGATHER, Collective.REDUCE]))
    sizes = tuple(sorted(draw(st.sets(st.integers(1, 2**40), min_size=1, max_size=6))))
    times = st.tuples(*[st.floats(1e-8, 10.0)] * len(sizes))
    seconds = draw(st.dictionaries(st.sampled_from(sorted(ALGORITHMS[kind])), times, min_size=1))
    hosts = tuple(draw(st.lists(st.integers(1, 99), min_size=1, max_size=5)))
    islands, host = draw(islands_of(hosts)), ["shm", "tcp", "verbs", "shm and tcp", "shm and verbs"]
    transport = draw(st.sampled_from(["mapped", "direct and mapped", "staged-rdma"] if islands else host))
    return Measured(kind, Placed(hosts, draw(st.integers(1, 512)), transport, islands), sizes, seconds)


@given(st.lists(measurements(), max_size=4))
@settings(max_examples=examples(34))
def test_what_is_written_is_read(measured: list[Measured]) -> None:
    found = read(write(Tuned(tuple(measured)), ["about", "it"]), "file").times
    assert [one[:3] for one in found] == [one[:3] for one in measured]
    for one, other in zip(found, measured, strict=True):
        assert one.seconds.keys() == other.seconds.keys()
        for name, seconds in one.seconds.items():
            assert seconds == pytest.approx(other.seconds[name], rel=1e-3)


@given(measurements())
@settings(max_examples=examples(34))
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


def gpus(hosts: str, vendors: str, *, cross: str = "auto") -> Topology:
    """A rank for each letter: on which host, and whose GPU."""
    names = {"n": "cuda", "a": "hip", "c": ""}
    places = enumerate(zip(hosts, vendors, strict=True))
    ranks = tuple(RankInfo(r, host, vendor=names[vendor], device=str(r)) for r, (host, vendor) in places)
    return Topology(ranks, cross=cross)


def among(topology: Topology, islands: Islands | None = None) -> Placed:
    return Placed.among(topology, topology.islands if islands is None else islands)


def test_layouts_of_gpus_are_told_apart() -> None:
    placed = among(gpus("aabb", "nana"))
    assert [*map(str, placed.islands)] == ["cuda 1 on host 0, 1 on host 1", "hip 1 on host 0, 1 on host 1"]
    assert placed.transport == "mapped"
    assert placed.members == ((0, 2), (1, 3))
    others = [
        among(gpus("aaaa", "nana")),
        among(gpus("aabb", "nnaa")),
        among(gpus("aabb", "nnnn"), ((0, 2), (1, 3))),
        among(gpus("aabb", "nana"), ((0,), (2,), (1,), (3,))),
        among(gpus("aabb", "nana", cross="staged")),
        among(gpus("aabb", "nanc")),
        Placed.of(gpus("aabb", "nana")),
    ]
    assert len({placed, *others}) == len(others) + 1
    assert among(gpus("abab", "nnaa")) == placed, "ranks may have other numbers"
    assert [*map(str, others[1].islands)] == ["cuda 2 on host 0", "hip 2 on host 1"]
    assert others[1].transport == "staged-tcp"


def test_times_on_gpus_are_not_those_of_host_memory() -> None:
    topology = gpus("aa", "na")
    times: dict[str, tuple[float, ...]] = {"ring": (1e-6,), "tree": (2e-6,)}
    there = Measured(KIND, among(topology), (64,), times)
    here = there._replace(placed=Placed.of(topology), seconds={"direct": (1e-6,)})
    assert lookup(KIND, topology, [there]) is None
    assert lookup(KIND, topology, [there, here]) == here
    assert find(KIND, among(topology), [here, there], lambda _: True) == there
    found = find(KIND, among(topology), [there], lambda entry: entry.name == "tree")
    assert found is not None
    assert [*found.seconds] == ["tree"]
    assert find(KIND, among(topology), [here], lambda _: True) is None


GPUS = Measured(KIND, among(gpus("aabb", "nnaa")), (8,), {"ring": (1e-6,)})
ON_GPUS = write(Tuned((GPUS,)), ())


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"cuda 2 on host 0", ', "", "file, line 5: measured.1.islands: wanted a list of islands, such as "),
        ('"cuda 2 on host 0"', '"cuda 1 on host 0"', "together have the ranks of all hosts, got ['cuda 1 on"),
        ('"cuda 2 on host 0"', '"cuda 2 on host 1"', "together have the ranks of all hosts"),
        ('"cuda 2 on host 0"', '"cuda 2 on host 0", "hip 0 on host 1"', "together have the ranks of all hosts"),
        ('"cuda 2 on host 0"', '"tpu 2 on host 0"', "got ['tpu 2 on host 0'"),
        ('"cuda 2 on host 0"', "2", "got [2, 'hip 2 on host 1']"),
        ('["cuda 2 on host 0", "hip 2 on host 1"]', '"cuda 2 on host 0"', "got 'cuda 2 on host 0'"),
        ('"staged-tcp"', '"tcp"', "line 7: measured.1.transport: wanted 'direct' or 'mapped' or "),
    ],
)
def test_what_is_wrong_of_gpus_is_named_with_its_line(old: str, new: str, words: str) -> None:
    assert old in ON_GPUS
    assert read(ON_GPUS, "file").times == (GPUS,)
    with pytest.raises(ArgumentError, match=re.escape(words)):
        read(ON_GPUS.replace(old, new), "file")


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
