"""GPUs of several hosts, over pinned slots and TCP: the cases of one host, and what only sockets can do."""

from __future__ import annotations

import os
import socket
import threading
import time
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fakes
import numpy as np
import pytest
from gpu_calls import cases_of, check, device_of_rank, exchange, overlap
from ranks import Ranks, kept, wait_until
from reference import Case
from thorough import parametrize
from verdicts import check_lost

import hetcoll
from hetcoll.errors import CollectiveMismatchError, CollectiveTimeoutError, CommunicationError, PeerLostError
from hetcoll.gpu.array import DeviceArray
from hetcoll.gpu.proxy import Proxies
from hetcoll.health.desync_report import Called
from hetcoll.links.wiring import Wiring
from hetcoll.plan.topology import RankInfo, Topology

pytestmark = pytest.mark.fakes

LARGE = (33 << 20) // 2 + 3  # elements of two bytes: more than all slots of an edge hold


def environment(hosts: str, **settings: Any) -> dict[str, str | tuple[str, ...]]:
    """Every GPU is an island, so that all messages are ours."""
    alone = "|".join(map(str, range(len(hosts))))
    devices = fakes.environment("cuda", devices=len(hosts), **settings)
    return {**devices, "HETCOLL_HOST_ID": tuple(hosts), "HETCOLL_ISLANDS": alone}


@pytest.fixture(scope="module")
def gpus() -> Iterator[Any]:
    """Ranks with a fake GPU each, on hosts: ``gpus("aab")`` has two on one and one on another."""

    def start(hosts: str, *, env: dict[str, str] | None = None, **settings: Any) -> Ranks:
        return Ranks(len(hosts), {**environment(hosts, **settings), **(env or {})})

    with kept(start) as get:
        yield get


@parametrize("hosts", ["aab", "ab", "aabb"], first=1)
def test_every_collective(gpus: Any, hosts: str) -> None:
    check(gpus(hosts), list(cases_of(len(hosts), (0, 1, 5, 1009, 70_001))))


@pytest.mark.thorough
def test_islands_that_talk_through_proxies(gpus: Any) -> None:
    ranks = gpus("aabb", env={"HETCOLL_ISLANDS": "0,1|2,3"})
    check(ranks, list(cases_of(4, (5, 70_001))))


@pytest.mark.thorough
def test_over_tcp_inside_a_host(gpus: Any) -> None:
    check(gpus("aa", env={"HETCOLL_TRANSPORT": "tcp"}), list(cases_of(2, (7, 70_001))))


@pytest.mark.parametrize(
    ("cores", "sockets"), [((64, 64), 20), ((32, 64), 12), ((64, 16), 6), ((2, 2), 4), ((0, 64), 4), ((500, 500), 20)]
)
def test_sockets_go_by_the_cores_of_both_ranks(cores: tuple[int, int], sockets: int) -> None:
    infos = [RankInfo(rank, str(rank), cores=n, vendor="cuda") for rank, n in enumerate(cores)]
    share: Any = SimpleNamespace(gpus=infos, slot_bytes=1, topology=Topology(tuple(infos)))
    for rank in range(2):
        wiring: Any = SimpleNamespace(rank=rank, stripes=None)
        nothing: Any = None
        assert Proxies(wiring, nothing, nothing, share).stripes(1 - rank) == sockets


@parametrize(
    "dtypes",
    [("bool", "uint8", "int64", "bfloat16", "complex128"), ("int8", "uint16", "int32", "uint64", "float16", "float64")],
    first=1,
)
def test_every_type(gpus: Any, dtypes: tuple[str, ...]) -> None:
    cases = [Case("allreduce", dtype, 40_001, "max" if dtype == "bool" else "sum", seed=2) for dtype in dtypes]
    check(gpus("ab"), cases)


@parametrize(("stripes", "count"), [("16", 5_000_003), ("1", 5_000_003), ("3", LARGE)], first=0)
def test_messages_in_many_pieces(gpus: Any, stripes: str, count: int) -> None:
    """Few of them are reduced: every load and store of a fake's kernel is looked at."""
    cases = [Case("allgather", "bfloat16", count), Case("allreduce", "int64", 300_003, inplace=True)]
    check(gpus("ab", env={"HETCOLL_SOCKET_STRIPES": stripes}), cases)


def test_parts_of_unequal_size(gpus: Any) -> None:
    counts = (70_001, 0, 300_000)
    cases = [Case("allgatherv", "int16", counts=counts), Case("reduce_scatterv", op="avg", counts=counts)]
    check(gpus("aab"), [*cases, Case("alltoallv", "int32", 90_001)])


@parametrize("queues", ["1", "2"], first=0)
def test_streams_that_share_hardware_queues(gpus: Any, queues: str) -> None:
    ranks = gpus("aab", env={"CUDA_DEVICE_MAX_CONNECTIONS": queues}, jitter=f"{queues}:100", timeout=120)
    check(ranks, [*cases_of(3, (1009, 100_001)), Case("alltoall", count=2_300_001)])


@pytest.mark.thorough
def test_links_that_are_slow_and_cut_what_they_carry(gpus: Any) -> None:
    ranks = gpus("ab", env={"HETCOLL_FAULT": "delay=0.2,short=0.5,reorder=0.2", "HETCOLL_SOCKET_STRIPES": "2"})
    check(ranks, list(cases_of(2, (5, 70_001))))


@pytest.mark.skipif(os.geteuid() != 0, reason="it takes CAP_NET_ADMIN to reset a connection")
@pytest.mark.thorough
def test_connections_that_are_reset(gpus: Any) -> None:
    ranks = gpus("ab", env={"HETCOLL_FAULT": "reset=150000", "HETCOLL_SOCKET_STRIPES": "2"})
    check(ranks, list(cases_of(2, (5, 70_001))))


def test_messages(gpus: Any) -> None:
    gpus("aab").run(exchange, timeout=200)


@pytest.mark.thorough
def test_order_on_streams(gpus: Any) -> None:
    gpus("ab", jitter="3:200", timeout=120).run(overlap, timeout=200)


def leave_early(comm: hetcoll.Communicator) -> None:
    """What was sent arrives, although the sender closes at once and the receiver comes late."""
    other = hetcoll.Communicator.split(comm, 0)
    assert other is not None
    device, count = device_of_rank(comm.rank), 5_000_000
    array = DeviceArray.of(device, np.arange(count, dtype=np.int32) * (1 - comm.rank))
    work = other.send(array.buffer(), 1) if comm.rank == 0 else None
    if work is None:
        time.sleep(0.3)
        other.recv(array.buffer(), 0).wait(20)
        assert (array.get() == np.arange(count)).all()
    other.close()


def test_what_was_sent_outlives_the_communicator(gpus: Any) -> None:
    gpus("ab").run(leave_early, timeout=100)


# What goes wrong.


def reduce_until_told(comm: hetcoll.Communicator, count: int, begun: Path) -> None:
    array = DeviceArray.of(device_of_rank(comm.rank), np.ones(count, np.float32))
    for _ in range(100_000):
        comm.allreduce(array.buffer(), op="max").wait(30)
        (begun / str(comm.rank)).touch()


@pytest.fixture
def start(gpus: Any) -> Iterator[Any]:
    """As `gpus`, but new processes, which are killed at the end."""
    made: list[Ranks] = []

    def get(hosts: str, env: dict[str, str] | None = None) -> Ranks:
        made.append(Ranks(len(hosts), {**environment(hosts, timeout=30), **(env or {})}))
        return made[-1]

    yield get
    for ranks in made:
        ranks.kill_all()


@parametrize("count", [1000, 4_000_000], first=1)
def test_a_killed_rank_is_named_at_once(start: Any, count: int, tmp_path: Path) -> None:
    ranks = start("aab")
    ranks.start(reduce_until_told, count, tmp_path)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 3, 60)
    killed = time.monotonic()
    ranks.kill(2)
    check_lost(ranks.finish(20), 2, killed, 5.0)


def receive_from_who_left(comm: hetcoll.Communicator) -> None:
    """What hears of failed links, to tell the others, is slow."""
    array = DeviceArray.of(device_of_rank(comm.rank), np.ones(1000, np.float32))
    usual, hears = Proxies._watch, threading.Event()
    with unittest.mock.patch.object(Proxies, "_watch", lambda proxies: (hears.wait(30), usual(proxies))):
        comm.allreduce(array.buffer()).wait(60)
    if comm.rank == 1:
        hears.set()
        comm.close()
        return
    work = comm.recv(array.buffer(), 1)
    try:
        with pytest.raises(CollectiveTimeoutError):
            work.wait(1.0)
    finally:
        hears.set()
    work.wait(20)


def test_nothing_is_received_from_a_link_that_has_ended(start: Any) -> None:
    ranks = start("ab")
    ranks.start(receive_from_who_left)
    (outcome,) = ranks.finish(60, only=[0])
    assert isinstance(outcome.error, PeerLostError), outcome.trace
    assert outcome.error.rank == 1
    ranks.finish(30, only=[1])


def cut_a_socket(comm: hetcoll.Communicator) -> None:
    """Calls until rank 1 cuts one of the sockets of its GPU."""
    fds: list[int] = []
    sockets = Wiring.sockets

    def record(*args: Any) -> Iterator[tuple[tuple[int, int], list[int]]]:
        for edge, each in sockets(*args):
            fds.extend(each)
            yield edge, each

    Wiring.sockets = record  # type: ignore[method-assign]
    array = DeviceArray.of(device_of_rank(comm.rank), np.ones(1_000_000, np.float32))
    for turn in range(100_000):
        comm.allreduce(array.buffer(), op="max").wait(30)
        if turn == 3 and comm.rank == 1:
            with socket.socket(fileno=os.dup(fds[-1])) as one:
                one.shutdown(socket.SHUT_RDWR)


def test_a_cut_socket_ends_the_call_everywhere(start: Any) -> None:
    ranks = start("ab")
    begun = time.monotonic()
    ranks.start(cut_a_socket)
    outcomes = ranks.finish(20)
    for outcome in outcomes:
        assert isinstance(outcome.error, PeerLostError), f"{outcome.value!r} {outcome.trace}"
        assert "TCP" in str(outcome.error)
        assert " from rank " in str(outcome.error) or " to rank " in str(outcome.error)
    assert len({str(outcome.error) for outcome in outcomes}) == 1, "ranks raise different errors"
    assert max(outcome.ended for outcome in outcomes) - begun < 15


def call_differently(comm: hetcoll.Communicator, how: str) -> None:
    array = DeviceArray.of(device_of_rank(comm.rank), np.ones(3000, np.float32))
    comm.allreduce(array.buffer()).wait(20)
    if how == "op":
        comm.allreduce(array.buffer(), op="max" if comm.rank == 0 else "sum").wait(20)
    elif how == "collective" and comm.rank == 0:
        comm.allreduce(array.buffer()).wait(20)
    elif how == "collective":
        comm.broadcast(array.buffer(), root=0).wait(20)
    elif comm.rank == 0:
        comm.send(array.buffer(), 1).wait(20)
    else:
        if how == "late message":  # whoever finds it out is in the call after it by then
            reporter: Any = comm._diagnosis._reporter
            reporter.inside = lambda thread=None: Called("allreduce(float32, count=3000)", "there")
        comm.recv(DeviceArray(array.device, 3001).buffer(), 0).wait(20)
    comm.allreduce(array.buffer()).wait(20)
    wait_until(lambda: comm._engine.failed, 10)
    comm.barrier()


@parametrize("how", ["op", "collective", "message", "late message"], first=2)
def test_different_calls_are_found_on_the_first_frame(start: Any, how: str) -> None:
    ranks = start("ab")
    ranks.start(call_differently, how)
    for outcome in ranks.finish(30):
        assert isinstance(outcome.error, CollectiveMismatchError), f"{outcome.value!r} {outcome.trace}"
        wanted = {"op": ("op=max", "op=sum"), "collective": ("allreduce(", "broadcast("), "message": ("3000", "3001")}
        assert all(word in str(outcome.error) for word in wanted[how.removeprefix("late ")]), str(outcome.error)


def wait_for_silence(comm: hetcoll.Communicator) -> None:
    array = DeviceArray.of(device_of_rank(comm.rank), np.ones(3000, np.float32))
    comm.allreduce(array.buffer()).wait(20)
    if comm.rank == 0:
        comm.allreduce(array.buffer()).wait(20)
    else:
        wait_until(lambda: comm._engine.failed, 15)
        comm.barrier()


def test_a_rank_that_does_not_call_is_named(start: Any) -> None:
    ranks = start("ab", {"HETCOLL_TIMEOUT": "2"})
    ranks.start(wait_for_silence)
    for outcome in ranks.finish(30):
        assert isinstance(outcome.error, CollectiveTimeoutError | CommunicationError), outcome.trace
        assert "receive from rank 1" in str(outcome.error), str(outcome.error)
