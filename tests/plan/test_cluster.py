"""Predictions for clusters: wrong files, hosts that stand for others, and what is known without a simulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from thorough import parametrize

from hetcoll import _native
from hetcoll.errors import ArgumentError
from hetcoll.plan.algorithms import find
from hetcoll.plan.algorithms.hosts import among_hosts
from hetcoll.plan.algorithms.tree import family
from hetcoll.plan.cluster import Cluster, Wiring, read
from hetcoll.plan.forecast import candidates, forecast
from hetcoll.plan.ir import Plan
from hetcoll.plan.simulator.graph import Tasks, Weaver
from hetcoll.plan.symmetry import Stand, everyone
from hetcoll.types import Collective

CLUSTERS = sorted((Path(__file__).parents[2] / "docs/examples/clusters").glob("*.toml"))
AR = Collective.ALLREDUCE
PLAIN = """
[[hosts]]
name = "node"
count = 6
ranks = 2
cores = 8
nic = "1 GB/s"

[network]
latency = "10 us"
overhead = "0 us"
"""


def plain(*changes: str) -> Cluster:
    return read(PLAIN, "plain.toml", changes)


def whole(cluster: Cluster, name: str) -> Tasks:
    """The tasks of all ranks, none of which stands for another."""
    plans = drawn(cluster, name)
    units = max(max(plan.send_units, plan.recv_units) for plan in plans)
    weaver = Weaver(units, Wiring(cluster), everyone(cluster.size), lambda server: server)
    for plan in plans:
        weaver.add(plan)
    return weaver.done()


def drawn(cluster: Cluster, name: str) -> list[Plan]:
    entry = among_hosts(find(AR, name), led=False)
    return [entry.build(cluster.size, rank, hosts=cluster.hosts) for rank in range(cluster.size)]


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_every_example_is_read(path: Path) -> None:
    cluster = read(path.read_text(), str(path))
    assert candidates(cluster, AR)
    gpus = any(kind.vendor for kind in cluster.kinds)
    assert ("hypercube" in candidates(cluster, Collective.REDUCE_SCATTER)) <= (not gpus), "islands are not alike"
    assert [cluster.host_of[host[0]] for host in cluster.hosts] == list(range(len(cluster.hosts)))


@parametrize("name", ["ring", "direct", "tree", "halving_doubling", "doubling", "oneshot"], first=3)
@pytest.mark.parametrize("nbytes", [0, 1000, 1 << 22])
@pytest.mark.parametrize("switches", [(), ("network.hosts_per_switch=2", "network.uplink=1 GB/s")])
def test_ranks_that_stand_for_others_take_as_long(name: str, nbytes: int, switches: tuple[str, ...]) -> None:
    cluster = plain("hosts.node.overhead=0 s", *switches)
    found = forecast(cluster, AR, name)
    full = whole(cluster, name)
    exact = (
        name not in ("direct", "oneshot") or switches
    )  # there several ranks' messages come to a card at the same instant
    tolerance = 1e-9 if exact or nbytes == 0 else 1e-3
    assert found.tasks.run(nbytes).seconds == pytest.approx(full.run(nbytes).seconds, rel=tolerance)
    if name in ("ring", "direct"):
        assert found.standing == (4 if switches else 2)
        assert len(found.tasks.steps) * (3 if switches else 6) == len(full.steps)
    if name in ("tree", "oneshot"):
        assert found.standing == cluster.size


def test_what_stands_for_all_is_compared_with_what_it_stands_for() -> None:
    cluster = plain()
    assert cluster.symmetry
    plans = drawn(cluster, "ring")
    stand = Stand(plans[0], cluster.symmetry)
    assert stand.fits(plans[2], 1)
    assert not stand.fits(plans[1], 1)
    assert plain("slow.node/1=2").symmetry is None
    assert plain("hosts.node.count=1").symmetry is None


def test_a_ring_takes_what_its_bytes_take() -> None:
    """A card for each rank's bytes: 2 (n - 1) / n of the buffer cross each card each way."""
    cluster = plain("hosts.node.ranks=1", "hosts.node.count=8")
    nbytes = 1 << 30
    seconds = forecast(cluster, AR, "ring").tasks.run(nbytes).seconds
    assert seconds == pytest.approx(2 * 7 / 8 * nbytes / 1e9, rel=0.01)
    empty = forecast(cluster, AR, "ring").tasks.run(0).seconds
    assert empty == pytest.approx(14 * 10e-6, rel=1e-6)


def test_stragglers_lost_cards_and_narrow_switches_hold_back() -> None:
    nbytes = 1 << 28

    def ring(*changes: str) -> float:
        return forecast(plain("hosts.node.nics=2", *changes), AR, "ring").tasks.run(nbytes).seconds

    usual = ring()
    assert 3 * usual <= ring("slow.node/3=3") <= 4 * usual  # the more as both directions of both phases pass there
    assert ring("lost.node/3=1") >= usual
    assert ring("hosts.node.nic=500 MB/s") == pytest.approx(2 * usual, rel=0.05)
    narrow = ring("network.hosts_per_switch=3", "network.uplink=250 MB/s")
    assert narrow == pytest.approx(8 * usual, rel=0.05)  # both cards of a host, each of 1 GB/s, work otherwise
    found = forecast(plain("network.hosts_per_switch=3", "network.uplink=250 MB/s"), AR, "ring")
    assert found.links(found.tasks.run(nbytes))[0][0].startswith("switch")


def test_a_card_that_has_rested_passes_a_burst_at_once() -> None:
    """A token bucket: each card gains the burst's bytes once, and what a message takes of cores passes meanwhile."""
    nbytes, hosts = 1 << 20, ("hosts.node.ranks=1", "hosts.node.count=8", "network.latency=0 s")
    usual = forecast(plain(*hosts), AR, "ring").tasks.run(nbytes).seconds
    burst = forecast(plain(*hosts, "hosts.node.burst=100000"), AR, "ring").tasks.run(nbytes).seconds
    assert usual - burst == pytest.approx(100e-6, rel=0.01)
    assert forecast(plain(*hosts, "hosts.node.burst=4M"), AR, "ring").tasks.run(nbytes).seconds < 0.05 * usual


def test_trees_pass_on_what_has_come() -> None:
    """A chain of hops takes little longer than one: each of two halves goes up and down."""
    cluster = plain("hosts.node.ranks=1", "hosts.node.count=8", "network.latency=0 s")
    seconds = forecast(cluster, AR, "tree").tasks.run(64 << 10).seconds
    assert 1.75 * (64 << 10) <= seconds * 1e9 <= 4 * (64 << 10)


def test_ranks_of_a_host_share_its_memory_and_pay_for_messages() -> None:
    one = ("hosts.node.count=1", "hosts.node.ranks=4", "hosts.node.latency=0 s")

    def direct(nbytes: int, *changes: str) -> float:
        return forecast(plain(*one, *changes), AR, "direct").tasks.run(nbytes).seconds

    moved = 4 * 4 * 3 / 4 * (1 << 24)  # each byte is copied twice, in two phases
    assert direct(1 << 24, "hosts.node.pinned=10 GB/s") == pytest.approx(moved / 10e9, rel=0.01)
    each = direct(0, "hosts.node.overhead=1 us")
    assert each == pytest.approx(12e-6, rel=0.2)  # in each phase a rank sends to three others and receives from them


def test_cards_that_ranks_share_are_shared() -> None:
    """Direct among hosts: of all bytes of a host those for other hosts cross its one card."""
    cluster = plain()
    seconds = forecast(cluster, AR, "direct").tasks.run(1 << 28).seconds
    crossing = 2 * 5 / 6 * (1 << 28)  # two phases, five of six shares
    assert crossing / 1e9 <= seconds <= 1.6 * crossing / 1e9


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('nic = "1 GB/s"', 'nic = "1 GB"', "line 7: hosts.1.nic: wanted a bandwidth in a string"),
        ('nic = "1 GB/s"', "", "line 2: hosts.1: wanted nic there"),
        ("count = 6", "count = -1", "line 4: hosts.1.count: wanted a whole number from 0 on, got -1"),
        ("count = 6", "cuont = 6", "line 4: hosts.1.cuont: is no key here: there are name, count"),
        ("count = 6", "count = 0", "wanted at least one host"),
        ("ranks = 2", "ranks = true", "line 5: hosts.1.ranks: wanted a whole number from 1 on, got True"),
        ("cores = 8", 'vendor = "intel"', "line 6: hosts.1.vendor: wanted 'cuda' or 'hip', got 'intel'"),
        ("cores = 8", 'islands = "0|1"', "line 6: hosts.1.islands: wanted a vendor there"),
        ("cores = 8", 'vendor = "cuda"\nislands = "0|2"', "line 7: hosts.1.islands: wanted each of the places 0 to 1"),
        ("cores = 8", 'vendor = "cuda"\nislands = "0|x"', "line 7: hosts.1.islands: wanted each place on a host once"),
        ("cores = 8", "cores = = 8", "at line 6"),
        ('latency = "10 us"', "latency = 10", "line 10: network.latency: wanted a time in a string"),
        ("[network]", "[netwrk]", "line 9: netwrk: is no table here: there are hosts, network"),
        ("[network]", '[slow]\n"node/6" = 2\n[network]', "line 10: slow.node/6: is no host: wanted NAME/NUMBER"),
        ("[network]", '[lost]\n"node/5" = 1\n[network]', "line 10: lost.node/5: wanted at least one of its 1 cards"),
        ("[network]", "[training]\nsamples = 1\n[network]", "line 9: training: wanted gradients there"),
        ('overhead = "0 us"', 'uplink = "1 GB/s"', "line 9: network: wanted both of hosts_per_switch and uplink"),
    ],
)
def test_a_wrong_file_names_the_line_and_what_was_wanted(old: str, new: str, complaint: str) -> None:
    with pytest.raises(ArgumentError, match=r"^wrong\.toml") as caught:
        read(PLAIN.replace(old, new, 1), "wrong.toml")
    assert complaint in str(caught.value)


def test_places_of_islands_are_in_any_order_and_hosts_are_counted_by_kind() -> None:
    more = """
[[hosts]]
name = "pair"
count = 2
ranks = 2
cores = 8
nic = "1 GB/s"
vendor = "cuda"
islands = "1,0"
"""
    found = read(PLAIN + more, "more.toml")
    assert [found.name(host) for host in (0, 5, 6, 7)] == ["node/0", "node/5", "pair/0", "pair/1"]
    assert found.islands[-1] == (15, 14)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("hosts.node.count", "wanted KEY=VALUE"), ("hosts.nodes.count=1", "no table called 'nodes'"),
        ("hosts.node.count=x", "plain.toml with hosts.node.count=x, line 4: hosts.1.count: wanted a whole number"),
        ("hosts.count=1", "wanted the name of one table of hosts"),
    ],
)  # fmt: skip
def test_a_wrong_change_is_named(change: str, complaint: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        plain(change)
    assert complaint in str(caught.value)


def test_what_is_too_large_says_so() -> None:
    with pytest.raises(ArgumentError, match="steps of 16384 ranks that may all differ"):
        forecast(plain("hosts.node.count=8192", "slow.node/0=2"), AR, "ring")
    with pytest.raises(ArgumentError, match="at least 2 ranks"):
        forecast(plain("hosts.node.count=1", "hosts.node.ranks=1"), AR, "ring")


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 13, 16, 33, 1000])
@pytest.mark.parametrize("tree", [0, 1])
def test_parents_and_children_in_trees_agree(size: int, tree: int) -> None:
    families = [family(size, rank, size // 3, tree) for rank in range(size)]
    for rank, mine in enumerate(families):
        assert (mine.parent is None) == (rank == size // 3)
        assert mine.parent is None or rank in families[mine.parent].children
        assert all(families[child].parent == rank for child in mine.children)
    assert sum(len(mine.children) for mine in families) == size - 1


def test_the_clock_refuses_arrays_that_do_not_fit_together() -> None:
    """Two tasks of which the second waits for the first, on one server; then with something wrong."""
    at, one = np.array([0, 1, 2]), np.array([1.0, 1.0])
    right: list[NDArray[Any]] = [
        np.array([2, 1], np.int32), at, np.array([0, 0], np.int32), one, one / 2, np.array([0, 1, 1]),
        np.array([1], np.int32), np.array([0], np.uint8), np.array([0.25]), np.array([0.0]),
    ]  # fmt: skip
    begin, end, busy = (np.frombuffer(found).tolist() for found in _native.run_tasks(right))
    assert (begin, end, busy) == ([0.0, 2.75], [2.5, 4.25], [4.0])
    begin, end, _ = (np.frombuffer(found).tolist() for found in _native.run_tasks([*right[:9], np.array([2.0])]))
    assert (begin, end) == ([0.0, 0.75], [0.5, 2.0])
    wrong = {
        0: np.array([0, 1], np.int32), 1: np.array([0, 2, 1]), 2: np.array([0, 1], np.int32), 3: np.array([1.0]),
        5: np.array([0, 1]), 6: np.array([2], np.int32), 7: np.array([0], np.int32), 8: np.array([0.25, 1.0]),
        9: np.array([-1.0]),
    }  # fmt: skip
    for i, array in wrong.items():
        with pytest.raises(ValueError, match=r"want|no such"):
            _native.run_tasks([*right[:i], array, *right[i + 1 :]])
    with pytest.raises(ValueError, match="ten arrays"):
        _native.run_tasks(right[:9])
