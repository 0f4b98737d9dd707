"""GPUs have what their plans use: links to those of other hosts that they talk with, pinned memory by a budget."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import fakes
import numpy as np
import pytest
from gpu_calls import device_of_rank
from gpu_kinds import start as start_kinds
from ranks import Ranks
from thorough import parametrize

import hetcoll
from hetcoll.errors import CollectiveTimeoutError, CommunicationError, InitError, PeerLostError
from hetcoll.gpu.array import DeviceArray
from hetcoll.gpu.demand import Demand, find_rooms, slots_that_fit
from hetcoll.gpu.pinned import Pinned, Room, Told
from hetcoll.links.facts import Gpu
from hetcoll.plan.topology import RankInfo, Topology

FAST = 2 << 20  # bytes of a slot


def topology_of(hosts: int, ranks: int) -> Topology:
    return Topology(tuple(RankInfo(rank, str(rank // ranks), vendor="cuda") for rank in range(hosts * ranks)))


def gpus_of(topology: Topology, told: Told) -> list[Gpu]:
    """Of all ranks that have one, whose processes pin as much."""
    return [replace(Gpu.none(""), vendor=info.vendor, pinned=told) for info in topology.ranks]


def fitted(topology: Topology, budget: int, held: int = 0, *, kernels: bool = False) -> int:
    gpus = gpus_of(topology, Told(held, 0, 1))
    return slots_that_fit(topology, gpus, find_rooms(topology, gpus, budget), FAST, kernels=kernels)


@pytest.fixture(autouse=True)
def first_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_ranks", 1), ("_held", 0), ("_sharing", 0)):
        monkeypatch.setattr(f"hetcoll.gpu.pinned.{name}", value)


@pytest.mark.parametrize(
    ("hosts", "ranks", "slot_kib", "everywhere"),
    [(2, 1, 2048, True), (4, 2, 2048, True), (2, 8, 768, True), (8, 8, 256, True), (128, 8, 512, False)],
)
def test_what_a_host_pins_stays_within_the_budget(hosts: int, ranks: int, slot_kib: int, everywhere: bool) -> None:
    """Rings and trees always fit, and edges to all ranks in all but the largest jobs."""
    topology, budget = topology_of(hosts, ranks), 1 << 30
    slot, demand = fitted(topology, budget), Demand.of(topology, topology.hosts[0], ranks)
    assert slot >> 10 == slot_kib
    fit = demand.fit(budget // ranks, slot, slot)
    assert fit is not None
    assert fit.far == (demand.far if everywhere else demand.few)
    assert ranks * (demand.bytes(slot, fit.far, rings=fit.rings) + fit.spare * slot) <= budget
    assert everywhere or ranks * demand.bytes(slot, demand.far) > budget
    assert demand.few <= topology.size.bit_length()


@pytest.mark.parametrize(("gpus", "slot_kib"), [(1, 512), (2, 256), (4, 128), (8, 32)])
def test_ranks_without_gpus_leave_their_part_to_those_with_them(gpus: int, slot_kib: int) -> None:
    """Of 64 ranks of a host. What lies between one with and one without is pinned by the former alone."""
    ranks = tuple(RankInfo(rank, "a", vendor="cuda" if rank < gpus else "") for rank in range(64))
    topology, budget = Topology(ranks), 1 << 30
    slot, demand = fitted(topology, budget), Demand.of(topology, topology.hosts[0], gpus)
    assert slot >> 10 == slot_kib
    assert gpus * demand.bytes(slot, 0) <= budget
    assert demand.bytes(slot, 0) > 2 * 2 * (64 - gpus) * 3 * slot  # two channels, two ways, three slots
    with pytest.raises(InitError, match=rf"{gpus} ranks of a host have GPUs, and each needs \d+ bytes"):
        fitted(topology, 1 << 20)


@pytest.mark.parametrize(("ranks", "fast", "first_kib", "most"), [(2, 4 << 20, 4096, 64), (8, 1 << 20, 768, 12)])
def test_each_communicator_leaves_room_to_many(ranks: int, fast: int, first_kib: int, most: int) -> None:
    """GPUs of a host in two islands. The first ones have kernels, and slots as large as is fast, or nearly."""
    topology, held, found = topology_of(1, ranks), 0, []
    demand, budget = Demand.of(topology, topology.hosts[0], ranks, kernels=True), 1 << 30
    while (room := Room.of([Told(held, len(found), 1)] * ranks, budget)).all > 0:
        fit = demand.fit(room.all, fast, part=room.part)
        if fit is None:
            break
        found.append((fit.slot >> 10, fit.kernels))
        held += demand.bytes(fit.slot, fit.far, kernels=fit.kernels, rings=fit.rings)
        assert held <= budget // ranks
    assert found[0] == (first_kib, True)
    assert found[-1] == (32, False)
    assert len(found) >= most


def test_a_budget_that_is_too_small_says_what_would_do() -> None:
    with pytest.raises(InitError, match=r"wanted HETCOLL_PINNED_BYTES=(\d+) or more, got 1048576") as caught:
        fitted(topology_of(4, 2), 1 << 20, 1 << 18)
    enough = int(str(caught.value).split("BYTES=")[1].split()[0])
    assert fitted(topology_of(4, 2), enough, 1 << 18) == 32 << 10
    with pytest.raises(InitError):
        fitted(topology_of(4, 2), enough - 2, 1 << 18)


def test_all_communicators_of_a_process_share_its_part() -> None:
    world, part = Pinned(1000, 4), Pinned(1000, 2)
    world.begin()
    part.begin()
    assert Told.now() == Told(0, 2, 4)
    with world.taken(100):
        pass
    with pytest.raises(ZeroDivisionError), part.taken(100):
        raise ZeroDivisionError
    assert (world.held, part.held, part.share) == (100, 0, 250)
    with pytest.raises(InitError, match=r"100 are in use: wanted HETCOLL_PINNED_BYTES=1004 or more"), part.taken(151):
        raise AssertionError("it was taken")
    world.give(100)
    assert not part.lacks(250)
    world.end()
    world.end()
    assert Told.now() == Told(0, 1, 4)
    part.end()


# On fakes.


@pytest.fixture
def start() -> Iterator[Any]:
    """Ranks with a fake GPU each, on a host of its own: every one is an island."""
    made: list[Ranks] = []

    def get(size: int, vendor: str = "cuda", **env: str) -> Ranks:
        islands, hosts = "|".join(map(str, range(size))), tuple(map(str, range(size)))
        devices = fakes.environment(vendor, devices=size, timeout=30)
        told = {"HETCOLL_HOST_ID": hosts, "HETCOLL_ISLANDS": islands, "HETCOLL_SOCKET_STRIPES": "1"}
        made.append(Ranks(size, {**devices, **told, **env}))
        return made[-1]

    yield get
    for ranks in made:
        ranks.kill_all()


def reduce(comm: hetcoll.Communicator, count: int = 700_001) -> None:
    array = DeviceArray.of(device_of_rank(comm.rank), np.full(count, comm.rank + 1, np.float32))
    comm.allreduce(array.buffer()).wait(30)
    assert (array.get() == sum(range(1, comm.size + 1))).all()


def tried(comm: hetcoll.Communicator) -> int:
    return sum("tried with bytes" in path for path in comm.explain("allreduce", 20).paths)


def use_all_that_fits(comm: hetcoll.Communicator) -> SimpleNamespace:
    """A ring, then every rank with every other, then more than there is room for."""
    device, size, rank = device_of_rank(comm.rank), comm.size, comm.rank
    reduce(comm)
    ring, pinned = tried(comm), [comm.memory()["pinned"]]
    sent = DeviceArray.of(device, np.arange(size, dtype=np.int32) + 10 * rank)
    got = DeviceArray(device, size, "int32")
    comm.alltoall(sent.buffer(), got.buffer()).wait(30)
    assert (got.get() == 10 * np.arange(size) + rank).all()
    pinned.append(comm.memory()["pinned"])
    problem, every = None, tried(comm)
    try:
        for shift in range(1, size):
            comm.sendrecv(sent.buffer(), (rank + shift) % size, got.buffer(), (rank - shift) % size).wait(30)
    except CommunicationError as error:
        problem = str(error)
    return SimpleNamespace(ring=ring, all=every, pinned=pinned, problem=problem)


@parametrize("vendor", ["cuda", "hip"], first=1)
def test_links_come_with_the_plans_that_use_them_as_long_as_there_is_room(start: Any, vendor: str) -> None:
    budget = 10 << 20
    ranks = start(4, vendor, HETCOLL_PINNED_BYTES=str(budget), HETCOLL_ALGO="allreduce:ring")
    for found in ranks.run(use_all_that_fits, timeout=100):
        assert (found.ring, found.all) == (2, 3)
        assert found.pinned[0] < found.pinned[1] <= budget
        assert f"got {budget}" in found.problem
        assert "wanted HETCOLL_PINNED_BYTES=" in found.problem


def too_little(comm: hetcoll.Communicator) -> None:
    with pytest.raises(InitError, match="wanted HETCOLL_PINNED_BYTES="):
        reduce(comm)


def test_a_budget_that_is_too_small_is_an_error_on_all_ranks(start: Any) -> None:
    start(2, HETCOLL_PINNED_BYTES="256K").run(too_little, timeout=60)


def go_round(comm: hetcoll.Communicator) -> int:
    """All begin to receive before anyone sends, and each waits for the next."""
    device, right, left = device_of_rank(comm.rank), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    mine, got = DeviceArray.of(device, np.full(4, comm.rank)), DeviceArray(device, 4, "int64")
    device_work = DeviceArray.of(device, np.ones(1))
    comm.broadcast(device_work.buffer(), root=0).wait(30)  # the GPU path is set up by all together
    received = comm.recv(got.buffer(), left, async_op=True)
    comm.send(mine.buffer(), right)
    received.wait(30)
    return int(got.get()[0])


def test_first_messages_in_a_circle_do_not_wait_for_each_other(start: Any) -> None:
    assert start(4, HETCOLL_ALGO="broadcast:binomial").run(go_round, timeout=60) == [3, 0, 1, 2]


def send_across(comm: hetcoll.Communicator, how: str) -> None:
    """Ranks 0 and 2 have nothing to do with each other until then."""
    reduce(comm, 1009)
    assert tried(comm) == 2
    if comm.rank == 0:
        array = DeviceArray.of(device_of_rank(0), np.ones(4))
        comm.send(array.buffer(), 2, timeout=None if how == "dies" else 2.0)
    elif comm.rank == 2 and how == "dies":
        os._exit(7)


@pytest.mark.parametrize("how", ["dies", "does not come"])
def test_a_rank_that_does_not_come_to_try_the_way_is_named(start: Any, how: str) -> None:
    ranks = start(4, HETCOLL_ALGO="allreduce:ring")
    ranks.start(send_across, how)
    (outcome,) = ranks.finish(30, only=[0])
    assert isinstance(outcome.error, PeerLostError if how == "dies" else CollectiveTimeoutError), outcome.trace
    assert "rank 2" in str(outcome.error)


def use_many(comm: hetcoll.Communicator, count: int) -> int:
    """The bytes that so many communicators of all, each with messages between all, pin of this rank's part."""
    device, size, parts = device_of_rank(comm.rank) if comm.rank < 2 else None, comm.size, []
    for turn in range(count):
        part = comm.split(0)
        assert part is not None
        parts.append(part)
        sent = np.arange(size, dtype=np.int32) + turn
        array = sent.copy() if device is None else DeviceArray.of(device, sent)
        part.allreduce(array if isinstance(array, np.ndarray) else array.buffer()).wait(30)
        assert ((array if isinstance(array, np.ndarray) else array.get()) == size * sent).all()
    return sum(part.memory()["pinned"] for part in parts)


def test_ranks_with_and_without_gpus_have_many_communicators_within_the_budget() -> None:
    """Ranks without GPUs pin nothing, and later communicators have smaller slots."""
    budget = 64 << 20
    with start_kinds("nacccc", HETCOLL_PINNED_BYTES=str(budget), HETCOLL_ALGO="allreduce:direct") as ranks:
        told = ranks.run(use_many, 4, timeout=100)
    assert told[2:] == [0] * 4
    assert all(4 * 2 * 5 * (3 * 32 << 10) < pinned <= budget // 2 for pinned in told[:2])


def check_messages(comm: hetcoll.Communicator) -> list[int]:
    """What is pinned after each of some messages, of which checks keep a copy; and after the communicator has gone."""
    part, found = comm.split(0), []
    assert part is not None
    for nbytes in (100, 1 << 20, 1 << 20):
        mine, got = (DeviceArray.of(device_of_rank(comm.rank), np.zeros(nbytes, np.uint8)) for _ in range(2))
        part.sendrecv(mine.buffer(), 1 - comm.rank, got.buffer(), 1 - comm.rank).wait(60)
        found.append(part.memory()["pinned"])
    before = Told.now().held
    part.close()
    return [*found, before - Told.now().held]


@pytest.mark.fakes
def test_copies_that_checks_look_at_are_counted() -> None:
    with start_kinds("na", HETCOLL_CHECK="1") as ranks:
        for few, many, again, given_back in ranks.run(check_messages, timeout=100):
            assert few + (1 << 20) <= many == again == given_back
