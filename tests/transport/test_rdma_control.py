"""RDMA's control side without devices: which port talks to which, what memory is registered, what people are told."""

from __future__ import annotations

import gc
import itertools
import json
import mmap
import os
import random
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import examples

from hetcoll.errors import ArgumentError, DeviceError, InitError, RegistrationError
from hetcoll.links.verbs import memory
from hetcoll.links.verbs.memory import Memory
from hetcoll.links.verbs.report import by_peer, describe, fell_back
from hetcoll.plan.rails import MOST_RAILS, Nic, pair_up
from hetcoll.plan.topology import RankInfo, Topology
from hetcoll.plan.tuner import choose
from hetcoll.types import Collective
from hetcoll.vendors.devices.base import DmaBuf

# Rails --------------------------------------------------------------------------------------------------------------


def nic(number: int, host: int, network: int | None = None) -> Nic:
    """Port `number` of a host, at 10.<network>.<number>.<host>."""
    net = number if network is None else network
    return Nic(f"mlx5_{number}:1", "Ethernet", f"10.{net}.{number}.{host}", f"10.{net}.0.0/16")


def infiniband(number: int, subnet: str) -> Nic:
    return Nic(f"mlx5_{number}:1", "InfiniBand", subnet + f"{number:016x}", subnet)


def test_ports_of_one_network_come_together() -> None:
    a, b = [nic(i, 1) for i in range(3)], [nic(i, 2) for i in (2, 0, 1)]  # the order is that of the nearest first
    rails = pair_up(a, b)
    assert sorted(i for i, _ in rails) == [0, 1, 2]
    assert all(a[i].network == b[j].network for i, j in rails)


def test_a_host_with_more_ports_uses_all_of_them() -> None:
    a, b = [nic(i, 1, 9) for i in range(3)], [nic(0, 2, 9)]
    assert pair_up(a, b) == ((0, 0), (1, 0), (2, 0))
    assert pair_up(b, a) == ((0, 0), (0, 1), (0, 2))


def test_what_cannot_reach_is_not_paired() -> None:
    six = Nic("mlx5_0:1", "Ethernet", "2001:db8::1", "2001:db8::/64")
    local = Nic("mlx5_0:1", "Ethernet", "fe80::1", "")
    one, other = "fe80000000000000", "fe80000000000001"
    for a, b in itertools.permutations([nic(0, 1), six, local, infiniband(0, one), infiniband(0, other)], 2):
        assert pair_up([a], [b]) == ()
    assert pair_up([infiniband(0, one)], [infiniband(3, one)]) == ((0, 0),)
    assert pair_up([nic(0, 1)], [nic(7, 2)]) == ((0, 0),)  # another network: there may be a router
    assert pair_up([], [nic(0, 1)]) == pair_up([nic(0, 1)], []) == ()


def test_every_port_that_reaches_one_has_a_rail() -> None:
    source = random.Random(7)
    for _ in range(300):
        a = [nic(i, 1, source.randrange(3)) for i in range(source.randrange(1, 5))]
        b = [nic(i, 2, source.randrange(3)) for i in range(source.randrange(1, 5))]
        rails = pair_up(a, b)
        assert {i for i, _ in rails} == set(range(len(a)))
        assert {j for _, j in rails} == set(range(len(b)))
        assert max(len(a), len(b)) <= len(rails) <= len(a) + len(b) - 1
    assert len(pair_up([nic(i, 1) for i in range(20)], [nic(i, 2) for i in range(20)])) == MOST_RAILS


def cluster(*nics: Sequence[Nic], setting: Any = "auto", hosts: str = "abcdefgh") -> Topology:
    infos = [
        RankInfo(r, hosts[r], nics=tuple(each), no_nics="" if each else "pyverbs is not installed")
        for r, each in enumerate(nics)
    ]
    return Topology(tuple(infos), setting)


def test_both_ends_see_the_same_rails() -> None:
    t = cluster([nic(0, 1), nic(1, 1)], [nic(1, 2)], [nic(0, 3), nic(1, 3), nic(2, 3)])
    for a, b in itertools.combinations(range(3), 2):
        assert t.rails(a, b) == tuple((i, j) for j, i in t.rails(b, a))


@given(st.data())
@settings(max_examples=examples(24))
def test_the_first_two_that_rdma_does_not_join_are_found_without_a_look_at_all_pairs(data: st.DataObject) -> None:
    ports = [nic(0, 1), nic(1, 2), infiniband(0, "fe80000000000000"), infiniband(1, "fe80000000000001")]
    nics = data.draw(st.lists(st.lists(st.sampled_from(ports), max_size=3, unique=True), min_size=2, max_size=8))
    hosts = data.draw(st.text("abc", min_size=len(nics), max_size=len(nics)))
    deaf = data.draw(st.lists(st.sampled_from(["", "deaf"]), min_size=len(nics), max_size=len(nics)))
    t = replace(cluster(*nics, setting=data.draw(st.sampled_from(["auto", "verbs"])), hosts=hosts), cross="direct")
    t = replace(t, ranks=tuple(replace(info, no_direct=why) for info, why in zip(t.ranks, deaf, strict=True)))
    pairs = [pair for pair in itertools.combinations(range(t.size), 2) if t.transport(*pair) != "shm"]
    wrong = next((reason for a, b in pairs if (reason := t.not_direct(a, b))), None)
    with nullcontext() if wrong is None else pytest.raises(InitError, match=re.escape(wrong)):
        t.equipped([("cuda", "")] * t.size, deaf)
    if len(t.hosts) > 1:
        firsts = itertools.combinations([host[0] for host in t.hosts], 2)
        assert t.between_hosts == ("verbs" if all(t.transport(*pair) == "verbs" for pair in firsts) else "tcp")


def test_rails_follow_the_gpus_that_ranks_use() -> None:
    """Each rank says in which order it has its ports; those that it names first come first at both ends."""
    told = cluster(*([nic(i, rank) for i in range(4)] for rank in range(3)))
    t = told.with_ports([(2, 3, 0, 1), (2, 3, 1, 0), ()])
    assert [n.name for n in t.ranks[0].nics] == ["mlx5_2:1", "mlx5_3:1", "mlx5_0:1", "mlx5_1:1"]
    assert t.ranks[2].nics == told.ranks[2].nics
    for a, b in itertools.permutations(range(3), 2):
        assert t.rails(a, b) == tuple((i, j) for j, i in t.rails(b, a))
    i, j = t.rails(0, 1)[0]
    assert (t.ranks[0].nics[i].name, t.ranks[1].nics[j].name) == ("mlx5_2:1", "mlx5_2:1")


def test_what_carries_data() -> None:
    t = cluster([nic(0, 1)], [nic(0, 2)], [], [nic(0, 2)], hosts="abcb")
    assert [[t.transport(a, b) for b in range(4) if b != a] for a in range(4)] == [
        ["verbs", "tcp", "verbs"], ["verbs", "tcp", "shm"], ["tcp", "tcp", "tcp"], ["verbs", "shm", "tcp"]
    ]  # fmt: skip
    assert t.between_hosts == "tcp"
    assert cluster([nic(0, 1)], [nic(0, 2)], hosts="ab").between_hosts == "verbs"


def test_asking_for_rdma_where_there_is_none() -> None:
    cluster([nic(0, 1)], [nic(0, 2)], setting="verbs").check_rails()
    with pytest.raises(ArgumentError, match="RDMA is asked for, but rank 1 has none: pyverbs is not installed"):
        cluster([nic(0, 1)], [], setting="verbs").check_rails()
    with pytest.raises(ArgumentError, match=r"no device of rank 0 \(mlx5_0:1 10.0.0.1\) reaches one of rank 1 \(mlx5"):
        cluster([nic(0, 1)], [infiniband(0, "fe80000000000000")], setting="verbs").check_rails()


def test_rdma_is_predicted_to_be_faster_than_tcp() -> None:
    fast = cluster(*([nic(0, r)] for r in range(4)))
    slow = replace(fast, ranks=tuple(replace(info, nics=()) for info in fast.ranks))
    for nbytes in (8, 1 << 20):
        times = [choose(Collective.ALLREDUCE, nbytes, t).seconds for t in (fast, slow)]
        assert times[0] < times[1]
    inside = cluster([nic(0, 1)], [nic(0, 1)], hosts="aa", setting="verbs")
    assert (inside.transport(0, 1), inside.between_hosts) == ("verbs", "tcp")
    shm = replace(inside, setting="auto")
    assert choose(Collective.ALLREDUCE, 8, inside).seconds > choose(Collective.ALLREDUCE, 8, shm).seconds


# What people are told -----------------------------------------------------------------------------------------------


def link(peer: int, path: str, *rails: dict[str, Any], resent: int = 0) -> dict[str, Any]:
    return {"peer": peer, "channel": 0, "path": path, "rails": list(rails), "resent": resent}


UP = {
    "device": "mlx5_0", "peer_device": "mlx5_1", "state": "up", "why": "", "bytes": 4096,
    "megabytes_per_second": 11012.3, "recovered": 0, "tries": 0, "tried": ""
}  # fmt: skip
DOWN = UP | {"state": "down", "why": "IBV_WC_RETRY_EXC_ERR"}


def test_links_in_words() -> None:
    t = cluster([nic(0, 1)], [nic(0, 2)], [], [nic(0, 4)], [nic(0, 1)], hosts="abcda")
    new = UP | {"megabytes_per_second": None, "bytes": 0, "recovered": 2}
    links = by_peer(json.dumps([link(1, "verbs", UP, DOWN, resent=3), link(1, "tcp", DOWN), link(1, "verbs", new)]))
    assert describe(links, t, 0, range(5)) == (
        "rank 1: verbs, channel 0, rails mlx5_0 to mlx5_1 (1.1e+04 MB/s, 4096 bytes sent), mlx5_0 to mlx5_1 (down: "
        "IBV_WC_RETRY_EXC_ERR); 3 pieces sent again",
        "rank 1: tcp, channel 0, rails mlx5_0 to mlx5_1 (down: IBV_WC_RETRY_EXC_ERR)",
        "rank 1: verbs, channel 0, rails mlx5_0 to mlx5_1 (0 bytes sent, taken up again 2 times)",
        "rank 2: tcp, since there is no RDMA: rank 2: pyverbs is not installed",
        "rank 3: verbs over mlx5_0:1 to mlx5_0:1: not connected yet",
    )
    assert (fell_back(links, 1), fell_back(links, 3)) == (True, False)
    assert describe({}, replace(t, setting="tcp"), 0, range(5)) == ()


# Memory -------------------------------------------------------------------------------------------------------------


class Region:
    """Stands for pyverbs' MR."""

    def __init__(self, device: FakeDevice, number: int) -> None:
        self.lkey, self.rkey, self._device = number, number + 1000, device

    def close(self) -> None:
        self._device.regions.remove(self)


class FakeVerbsError(Exception):
    pass


class FakeDevice:
    """An open device that says what is registered with it, and refuses after `most` regions. GPUs' memory it knows as
    dma-bufs, or (`peer`) by its address."""

    name = "fake"
    library = SimpleNamespace(error=FakeVerbsError)

    def __init__(self, most: int = 1 << 20, *, peer: bool = False) -> None:
        self.regions: list[Region] = []
        self.most, self.peer, self._made = most, peer, 0

    def register(self, address: int, nbytes: int) -> Region:
        if len(self.regions) == self.most:
            raise FakeVerbsError("Cannot allocate memory")
        self._made += 1
        self.regions.append(Region(self, self._made))
        return self.regions[-1]

    def register_dmabuf(self, fd: int, offset: int, nbytes: int) -> Region:
        assert os.fstat(fd).st_size >= offset + nbytes  # it is open
        if self.peer:
            raise FakeVerbsError("Operation not supported")
        return self.register(offset, nbytes)

    def register_peer(self, address: int, nbytes: int) -> Region:
        if not self.peer:
            raise FakeVerbsError("Bad address")
        return self.register(address, nbytes)


class FakeEngine:
    """Knows intervals, and may need some still."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[int, int, Any]] = {}
        self.seen: dict[int, int | None] = {}  # where devices see them
        self.busy: set[int] = set()
        self._handles = itertools.count(1)

    def register_memory(self, address: int, nbytes: int, keys: Any, seen_at: int | None = None) -> int:
        handle = next(self._handles)
        self.known[handle] = (address, nbytes, list(keys))
        self.seen[handle] = seen_at
        return handle

    def unregister_memory(self, handle: int) -> bool:
        if handle in self.busy:
            return False
        del self.known[handle]
        return True


@pytest.fixture
def parts() -> tuple[FakeEngine, list[FakeDevice], Memory]:
    engine, devices = FakeEngine(), [FakeDevice(), FakeDevice()]
    return engine, devices, Memory(engine, [(device, 5 + i) for i, device in enumerate(devices)])  # type: ignore[misc]


Parts = tuple[FakeEngine, list[FakeDevice], Memory]


def test_memory_is_registered_with_every_port(parts: Parts) -> None:
    engine, devices, found = parts
    lease = found.lease(4096, 100, "owner")
    assert list(engine.known.values()) == [(4096, 100, [(5, 1, 1001), (6, 1, 1001)])]
    lease.close()
    lease.close()
    assert engine.known == {}
    assert devices[0].regions == devices[1].regions == []
    assert found.counters == {
        "registered": 1, "unregistered": 1, "hits": 0, "evicted": 0, "refused": 0, "intervals": 0, "bytes": 0,
        "idle_bytes": 0,
    }  # fmt: skip


class FakeGpu:
    """Gives its memory as dma-bufs, if it can."""

    name = "a GPU"

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses, self.given = refuses, -1

    def dmabuf(self, address: int, nbytes: int) -> DmaBuf:
        if self.refuses:
            raise DeviceError("cuMemGetHandleForAddressRange: CUDA_ERROR_NOT_SUPPORTED")
        self.given = os.memfd_create("dma-buf")
        os.truncate(self.given, 1 << 20)
        return DmaBuf(self.given, address % 4096, nbytes)


def test_memory_of_a_gpu_is_registered_as_a_dma_buf(parts: Parts) -> None:
    engine, devices, found = parts
    gpu, address = FakeGpu(), (7 << 40) + 4096 + 96
    lease = found.lease(address, 5000, "owner", gpu)  # type: ignore[arg-type]
    assert list(engine.known.values()) == [(address, 5000, [(5, 1, 1001), (6, 1, 1001)])]
    assert list(engine.seen.values()) == [96]  # pyverbs makes the offset the address
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(gpu.given)
    lease.close()
    assert engine.known == {}
    assert devices[0].regions == devices[1].regions == []


@pytest.mark.parametrize("refuses", [True, False])
def test_memory_of_a_gpu_is_registered_as_peer_memory(refuses: bool) -> None:
    """Where its driver gives no dma-buf, or a device takes none."""
    engine, device = FakeEngine(), FakeDevice(peer=True)
    found, gpu, address = Memory(engine, [(device, 0)]), FakeGpu(refuses=refuses), 7 << 40  # type: ignore[list-item]
    lease = found.lease(address, 5000, "owner", gpu)  # type: ignore[arg-type]
    assert list(engine.seen.values()) == [address]  # which is not the processor's
    if not refuses:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(gpu.given)
    lease.close()
    assert device.regions == []


def test_memory_of_a_gpu_that_nobody_can_register() -> None:
    engine, devices = FakeEngine(), [FakeDevice(), FakeDevice(most=0)]
    found = Memory(engine, [(device, i) for i, device in enumerate(devices)])  # type: ignore[misc]
    with pytest.raises(
        RegistrationError, match=r"100 bytes of a GPU: as a dma-buf: .*NOT_SUPPORTED.*; as peer memory: .*Bad address"
    ):
        found.lease(7 << 40, 100, None, FakeGpu(refuses=True))  # type: ignore[arg-type]
    gpu = FakeGpu()
    with pytest.raises(RegistrationError, match=r"fake: registering 100 bytes: .*memory of GPUs"):
        found.lease(7 << 40, 100, None, gpu)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(gpu.given)
    assert devices[0].regions == []
    assert engine.known == {}


def test_a_part_of_what_is_registered_costs_nothing(parts: Parts) -> None:
    _, devices, found = parts
    whole, part = found.lease(4096, 8192, None), found.lease(5000, 100, None)
    assert (found.counters["registered"], found.counters["hits"]) == (1, 1)
    across = found.lease(4000, 200, None)  # begins before it
    assert found.counters["registered"] == 2
    across.close()
    whole.close()
    assert len(devices[0].regions) == 1  # the part is in use
    part.close()
    assert devices[0].regions == []


def test_the_owner_lives_as_long_as_the_registration(parts: Parts) -> None:
    """Else other memory could take the place of freed pages that the device still has."""
    found = parts[2]
    gone: list[str] = []

    class Owner:
        def __del__(self) -> None:
            gone.append("gone")

    whole = found.lease(4096, 8192, Owner())
    part = found.lease(5000, 100, None)
    whole.close()
    del whole
    gc.collect()
    assert gone == []
    part.close()
    del part
    gc.collect()
    assert gone == ["gone"]


def test_memory_in_use_stays_registered(parts: Parts) -> None:
    engine, devices, found = parts
    lease = found.lease(4096, 100, None)
    engine.busy = set(engine.known)
    with pytest.raises(ArgumentError, match="in use by an operation in flight"):
        lease.close()
    assert len(devices[0].regions) == 1
    engine.busy = set()
    lease.close()
    assert devices[0].regions == []


def test_a_refusal_leaves_nothing_behind() -> None:
    engine, devices = FakeEngine(), [FakeDevice(), FakeDevice(most=0)]
    found = Memory(engine, [(device, i) for i, device in enumerate(devices)])  # type: ignore[misc]
    with pytest.raises(RegistrationError, match=r"fake: registering 100 bytes: Cannot allocate memory.*ulimit -l"):
        found.lease(4096, 100, None)
    assert devices[0].regions == []
    assert engine.known == {}


def test_an_array_that_cannot_be_registered_is_ordinary_memory(caplog: pytest.LogCaptureFixture) -> None:
    engine, device = FakeEngine(), FakeDevice(most=0)
    found = Memory(engine, [(device, 0)])  # type: ignore[list-item]
    for _ in range(2):
        array = found.empty(100_000, None)
        array[:] = 1
        assert len(array) == 100_000
    assert found.counters["refused"] == 2
    (record,) = caplog.records
    assert "memory that is copied before it is sent: fake: registering" in record.getMessage()


def test_the_number_of_intervals_is_bounded(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MOST_INTERVALS", 3)
    found = parts[2]
    leases = [found.lease(at << 20, 100, None) for at in range(3)]
    with pytest.raises(RegistrationError, match="3 intervals of memory are registered"):
        found.lease(1 << 30, 100, None)
    leases[0].close()
    found.lease(1 << 30, 100, None)


def test_blocks_are_used_again(parts: Parts) -> None:
    engine, _, found = parts
    first = found.empty(100_000, None)
    first[:] = 7
    view = first[10:].view(np.int8)
    address = first.ctypes.data
    del first
    gc.collect()
    assert (view == 7).all()
    assert found.counters["idle_bytes"] == 0
    del view
    gc.collect()
    assert found.counters["idle_bytes"] == found.counters["bytes"] >= 100_000
    again = found.empty(90_000, None)
    assert again.ctypes.data == address
    assert len(again) == 90_000
    assert (found.counters["registered"], found.counters["hits"], len(engine.known)) == (1, 1, 1)
    assert found.empty(10_000_000, None).ctypes.data != address  # does not fit


def test_idle_blocks_are_bounded(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MOST_IDLE", 3 << 20)
    engine, devices, found = parts
    arrays = [found.empty(1 << 20, None) for _ in range(5)]
    starts = [array.ctypes.data for array in arrays]
    while arrays:
        del arrays[0]
    assert found.counters["idle_bytes"] == 3 << 20
    assert found.counters["evicted"] == 2
    assert sorted(known[0] for known in engine.known.values()) == sorted(starts[2:])  # the longest unused went
    assert len(devices[0].regions) == 3


def test_memory_of_the_host_is_kept_until_it_is_unregistered(parts: Parts) -> None:
    """Memory that ranks of the host share is emptied as soon as it is given back."""
    engine, devices, found = parts
    raw = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)
    array = found.empty(1 << 20, raw)
    assert array.ctypes.data == raw.ctypes.data
    references = len(gc.get_referrers(raw))
    engine.busy = set(engine.known)
    del array
    gc.collect()
    assert len(gc.get_referrers(raw)) == references  # an operation in flight still needs it
    engine.busy = set()
    found.lease(0, 1, None).close()  # any later call takes it back
    assert len(gc.get_referrers(raw)) < references
    assert devices[0].regions == []


def test_an_array_may_outlive_the_communicator(parts: Parts) -> None:
    _, devices, found = parts
    array = found.empty(100_000, None)
    found.close()
    assert devices[0].regions == []
    array[:] = 3
    assert (array == 3).all()
    assert (found.empty(1000, None)[:0] == 0).all()
    del array
    gc.collect()
