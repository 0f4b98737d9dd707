"""Islands: whose GPUs one vendor's library serves, as a pure function of what ranks told each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import Job, RankError, Ranks

import hetcoll
from hetcoll.config.env import Config
from hetcoll.config.variables import islands as parse
from hetcoll.errors import ArgumentError, InitError
from hetcoll.gpu.slots import slot_bytes
from hetcoll.job import _with_device, _with_islands
from hetcoll.plan.rails import Nic
from hetcoll.plan.topology import Islands, RankInfo, Topology, restrict, spell_islands

Pool = Callable[..., Ranks]


def ranks(*vendors: str, devices: str = "") -> tuple[RankInfo, ...]:
    """One rank for each vendor, on one host; `devices` has a letter for each."""
    named = zip(vendors, devices or " " * len(vendors), strict=True)
    return tuple(RankInfo(r, "h", vendor=v, device=d.strip()) for r, (v, d) in enumerate(named))


@pytest.mark.parametrize(
    ("infos", "islands"),
    [
        (ranks("cuda", "cuda", "hip", "hip"), ((0, 1), (2, 3))),
        (ranks("hip", "cuda", "hip", "cuda", "cuda"), ((0, 2), (1, 3, 4))),
        (ranks("", "cuda", "", "cuda"), ((0,), (1, 3), (2,))),
        (ranks("", ""), ((0,), (1,))),
        (ranks("cuda", "cuda", "cuda", devices="aba"), ((0, 1), (2,))),
        (ranks("cuda", "cuda", "cuda", "cuda", devices="aabb"), ((0, 2), (1, 3))),
        (ranks("cuda", "hip", devices="aa"), ((0,), (1,))),
    ],
)
def test_one_vendor_is_one_island(infos: tuple[RankInfo, ...], islands: Islands) -> None:
    topology = Topology(infos)
    assert topology.islands == islands
    assert [topology.island(r) for r in range(len(infos))] == [
        next(i for i in islands if r in i) for r in range(len(infos))
    ]


def test_islands_reach_over_hosts() -> None:
    infos = tuple(RankInfo(r, "ab"[r % 2], vendor="cuda", device="0000:01") for r in range(2))
    assert Topology(infos).islands == ((0, 1),)


def test_a_line_says_it_to_people() -> None:
    assert Topology(ranks("")).line() == "1 rank on 1 host"
    assert Topology(ranks("", "", "")).line() == "3 ranks on 1 host, shm inside"
    places = enumerate([("a", "cuda"), ("a", "cuda"), ("b", "cpu"), ("a", "cuda")])
    infos = tuple(RankInfo(rank, host, wish=wish) for rank, (host, wish) in places)
    assert Topology(infos, asked=((0, 1, 3), (2,))).line() == (
        "4 ranks on 2 hosts (0-1, 3 | 2), shm inside and tcp between hosts, devices 3 cuda, 1 cpu, islands 0,1,3|2"
    )
    many = Topology(tuple(RankInfo(rank, f"h{rank // 8}") for rank in range(1024)))
    assert many.line() == "1024 ranks on 128 hosts, shm inside and tcp between hosts"


def test_gpus_are_told_later() -> None:
    before = Topology(ranks("", "", ""), "auto", ((0, 1), (2,)))
    after = before.equipped([("cuda", "a"), ("cuda", "b"), ("hip", "a")])
    assert after.islands == before.islands == ((0, 1), (2,))
    assert [(i.vendor, i.device) for i in after.ranks] == [("cuda", "a"), ("cuda", "b"), ("hip", "a")]
    assert Topology(after.ranks).islands == ((0, 1), (2,))


@pytest.mark.parametrize("text", ["0,1|2", "0|1|2,2", "0,1|2,3|4", "0,1,2,3|3", "0,1|2,3,4"])
def test_asked_islands_hold_each_rank_once(text: str) -> None:
    with pytest.raises(ArgumentError, match="islands: wanted each of the ranks 0-3 once, got "):
        Topology(ranks(*["cuda"] * 4), asked=parse(text))


def test_asked_islands_are_taken_as_they_are() -> None:
    assert Topology(ranks(*["cuda"] * 4), asked=((3, 0), (1,), (2,))).islands == ((3, 0), (1,), (2,))


def test_asked_islands_that_no_library_serves_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"0,1\|2 has ranks 0 and 1 in one island, but no .* serves cuda and hip"):
        Topology(ranks("cuda", "hip", "hip"), asked=((0, 1), (2,)))
    with pytest.raises(ArgumentError, match="no one library serves cuda and no GPU"):
        Topology(ranks("cuda", ""), asked=((0, 1),))
    with pytest.raises(ArgumentError, match="ranks 0 and 2 in one island, but a library takes each GPU once, and h a"):
        Topology(ranks("cuda", "cuda", "cuda", devices="aba"), asked=((0, 1, 2),))


@given(st.permutations(range(6)), st.sets(st.integers(1, 5)), st.data())
def test_spelling_and_restricting(order: list[int], cuts: set[int], data: st.DataObject) -> None:
    ends = [0, *sorted(cuts), 6]
    islands = tuple(tuple(order[a:b]) for a, b in pairwise(ends))
    assert parse(spell_islands(islands)) == islands
    some = data.draw(st.lists(st.integers(0, 5), unique=True, min_size=1))
    fewer = restrict(islands, some)
    assert fewer is not None
    assert sorted(r for island in fewer for r in island) == list(range(len(some)))
    for a in range(len(some)):
        for b in range(len(some)):
            together = any(some[a] in i and some[b] in i for i in islands)
            assert together == any(a in i and b in i for i in fewer)
    assert restrict(None, some) is None
    assert restrict(islands, range(8)) == (*islands, (6,), (7,))


@pytest.mark.parametrize("text", ["", "|", "0,|1", "0-", "a", "0;1", "3-1", "-1", "0,,1"])
def test_what_names_no_ranks_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="islands: wanted ranks such as"):
        _with_islands(Config(), text)


@pytest.mark.parametrize("device", ["", "gpu", "cuda:", "cpu:0", b"cpu", 0, ["cpu"]])
def test_what_names_no_device_is_refused(device: Any) -> None:
    with pytest.raises(ArgumentError, match="device: wanted auto, cpu, cuda, hip"):
        _with_device(Config(), device)


def test_the_argument_wins_over_the_variable() -> None:
    config = Config(islands=((0,), (1,)))
    assert _with_islands(config, None) is config
    assert _with_islands(config, "0-1").islands == ((0, 1),)
    assert _with_islands(config, [[1], np.array([0])]).islands == ((1,), (0,))
    for wrong in ([["0"]], [0, 1], [[0.5]], 3):
        with pytest.raises(ArgumentError, match="islands: wanted ranks such as"):
            _with_islands(config, wrong)  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------------- processes


def _islands(comm: hetcoll.Communicator) -> tuple[Islands, Islands | None]:
    """Those of the communicator, and of the one of its odd or even ranks, backwards."""
    with comm.split(comm.rank % 2, -comm.rank) as child:  # type: ignore[union-attr]
        return comm._wiring.topology.islands, child._wiring.topology.asked


def test_islands_of_a_job_and_its_parts(pool: Pool) -> None:
    rows = pool(4, HETCOLL_ISLANDS="0-2|3").run(_islands)
    assert [whole for whole, _ in rows] == [((0, 1, 2), (3,))] * 4
    assert [part for _, part in rows] == [((1, 0),), ((1,), (0,)), ((1, 0),), ((1,), (0,))]


def test_ranks_must_ask_for_the_same_islands() -> None:
    with pytest.raises(RankError, match=r"HETCOLL_ISLANDS is '0,1' on rank 0 and '0.1' on rank 1"):
        Ranks(2, {"HETCOLL_ISLANDS": ("0,1", "0|1")})


def test_islands_that_miss_a_rank_are_refused_by_all() -> None:
    with pytest.raises(RankError, match="islands: wanted each of the ranks 0-1 once, got 0,2"):
        Ranks(2, {"HETCOLL_ISLANDS": "0,2"})


@pytest.mark.parametrize(
    ("cross", "hosts", "setting", "said"),
    [
        ("direct", "ab", "tcp", "no rank may use RDMA: HETCOLL_TRANSPORT is tcp"),
        ("mapped", "aab", "auto", "ranks 0 and 2 share no memory: they are on hosts a and b"),
        ("mapped", "aa", "tcp", "HETCOLL_TRANSPORT is tcp"),
    ],
)
def test_a_way_between_gpus_that_is_not_there(cross: Any, hosts: str, setting: Any, said: str) -> None:
    infos = tuple(RankInfo(r, host) for r, host in enumerate(hosts))
    with pytest.raises(InitError, match=f"HETCOLL_CROSS={cross}: .*{said}"):
        Topology(infos, setting, cross=cross)


def test_ways_between_gpus() -> None:
    infos = tuple(RankInfo(r, host) for r, host in enumerate("aab"))
    auto = Topology(infos)
    assert [auto.way(0, r) for r in (1, 2)] == ["mapped", "staged-tcp"]
    assert [auto.why(0, r) for r in (1, 2)] == ["mapped: one host", "staged: another host"]
    assert [auto.far(0, r) for r in (1, 2)] == [False, True]
    assert Topology(infos[:2], cross="mapped").way(0, 1) == "mapped"
    assert Topology(infos, cross="staged").way(0, 1) == "staged-tcp"
    tcp = Topology(infos, "tcp")
    assert (tcp.way(0, 1), tcp.why(0, 1)) == ("staged-tcp", "staged: HETCOLL_TRANSPORT")


GPUS = [("cuda", "0"), ("hip", "1"), ("hip", "2"), ("", "")]


def with_rdma(**settings: Any) -> Topology:
    """Ranks 0 and 1 on one host, 2 and 3 on another; all have ports that reach each other."""
    nics = [(Nic(f"rxe{r}:1", "Ethernet", f"10.77.0.{r + 1}", "10.77.0.0/24"),) for r in range(4)]
    infos = tuple(RankInfo(r, "aabb"[r], nics=nics[r], wish="cuda" if r < 3 else "cpu") for r in range(4))
    return Topology(infos, **settings)


def test_the_direct_way() -> None:
    auto = with_rdma().equipped(GPUS)
    assert auto.ways(0, 2) == ("direct", "staged-rdma", "staged-tcp")
    assert auto.ways(0, 1) == ("mapped", "staged-tcp")
    assert auto.ways(0, 3) == ("staged-rdma", "staged-tcp"), "a rank without a GPU has no memory of a GPU"
    assert auto.why(0, 2) == auto.why(2, 0) == "direct: the RDMA devices of both reach the GPUs' memory"
    for pair in ((0, 2), (2, 0)):
        without = dataclasses.replace(auto, excluded=frozenset({(0, 2, "direct")}))
        assert without.way(*pair) == "staged-rdma"
        assert without.why(*pair) == "staged: direct did not work"
        assert without.way(1, 2) == "direct"
    deaf = with_rdma().equipped(GPUS, ["", "its ports refuse it", "", ""])
    assert (deaf.way(0, 2), deaf.way(1, 2)) == ("direct", "staged-rdma")
    assert deaf.why(1, 2) == "staged: another host; not direct: rank 1: its ports refuse it"
    staged = with_rdma(cross="staged").equipped(GPUS)
    assert (staged.ways(0, 1), staged.ways(0, 2)) == (("staged-tcp",), ("staged-rdma", "staged-tcp"))
    everywhere = with_rdma(setting="verbs").equipped(GPUS)
    assert everywhere.ways(0, 1) == ("direct", "staged-rdma")


def test_the_direct_way_where_it_is_asked_for() -> None:
    asked = with_rdma(cross="direct").equipped(GPUS)
    assert [asked.ways(0, r) for r in (1, 2, 3)] == [("mapped",), ("direct",), ("staged-rdma", "staged-tcp")]
    assert asked.why(0, 2) == "direct, as HETCOLL_CROSS says"
    with pytest.raises(InitError, match="HETCOLL_CROSS=direct: rank 1: its ports refuse it"):
        with_rdma(cross="direct").equipped(GPUS, ["", "its ports refuse it", "", ""])
    none_left = dataclasses.replace(asked, excluded=frozenset({(0, 2, "direct")}))
    with pytest.raises(InitError, match="no way is left between ranks 0 and 2: HETCOLL_CROSS is direct"):
        none_left.way(0, 2)
    nowhere = dataclasses.replace(asked, ranks=(*asked.ranks[:2], RankInfo(2, "b", no_nics="no device")))
    with pytest.raises(InitError, match="HETCOLL_CROSS=direct: rank 2: no device"):
        nowhere.check_rails()


def join_with_a_wish(job: Job) -> None:
    job.join()


def test_a_way_that_is_not_there_is_told_to_all_ranks_at_init() -> None:
    with Ranks(2, {"HETCOLL_CROSS": "mapped", "HETCOLL_HOST_ID": ("a", "b")}, join=False) as ranks:
        for outcome in ranks.outcomes(join_with_a_wish):
            assert isinstance(outcome.error, InitError)
            assert "ranks 0 and 1 share no memory" in str(outcome.error)


@pytest.mark.parametrize(
    ("islands", "mib", "near"),
    [
        ("0|1", 4, 4),
        ("0,1|2,3", 2, 2),
        ("0,1,2|3", 4, 4),
        ("0|1|2,3", 2, 2),
        ("0|1|2|3", 2, 2),
        ("0,1,2,3", 4, 4),
        ("0,1", 4, 8),
        ("0,1,2,3,4,5,6,7", 4, 2),
    ],
)
def test_slots_are_as_large_as_the_cache_allows(islands: str, mib: int, near: int) -> None:
    """Those on GPUs, as large as the ranks of one island share some memory."""
    size = islands.count(",") + islands.count("|") + 1
    topology = Topology(ranks(*["cuda"] * size), asked=parse(islands))
    assert slot_bytes(topology) == mib << 20
    assert slot_bytes(topology, near=True) == near << 20


def test_the_cores_of_a_host_are_shared_by_its_ranks() -> None:
    infos = [RankInfo(rank, host, cores={"a": 7, "b": 64}[host]) for rank, host in enumerate("aabaa")]
    assert Topology(tuple(infos)).shares == (1, 1, 64, 1, 1)
    assert Topology(tuple(dataclasses.replace(info, cores=3) for info in infos)).shares == (0, 0, 3, 0, 0)
