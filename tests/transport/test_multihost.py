"""Three hosts with two ranks and two network interfaces each: shared memory and striped TCP in one communicator."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import netns
import numpy as np
import pytest
from cases import run_cases
from ranks import Job, Ranks
from reference import Case
from thorough import parametrize

import hetcoll
from hetcoll.errors import CollectiveTimeoutError, CommunicationError
from hetcoll.plan.algorithms import ALGORITHMS
from hetcoll.rendezvous.store import server as store
from hetcoll.types import REDUCING, ROOTED, Collective

Launch = Callable[..., Ranks]
HOSTS, LOCAL = 3, 2
SIZE = HOSTS * LOCAL


def enter(job: Job, hosts: list[str]) -> Any:
    """Go to this rank's host; rank 0 has the job's store there, instead of the one that it has outside."""
    netns.enter(hosts[job.rank // LOCAL])
    if job.rank != 0:
        return None
    store._hosted[job.unique_id.job_id].close()
    return hetcoll.get_unique_id()


def meet(job: Job, unique_id: Any) -> list[str]:
    """Join; how data goes to each other rank."""
    job.unique_id = unique_id
    comm = job.join()
    topology = comm.topology
    return ["" if peer == job.rank else topology.transport(job.rank, peer) for peer in range(job.size)]


def leave(job: Job) -> None:
    assert job.comm is not None
    job.comm.close()


def close_store(job: Job) -> None:
    store._hosted[job.unique_id.job_id].close()


@contextmanager
def joined(launch: Launch, net: netns.Network, **env: str) -> Iterator[tuple[Ranks, list[list[str]]]]:
    """The ranks, each on its host, and how data goes from each to each."""
    ranks = launch(SIZE, join=False, HETCOLL_SOCKET_STRIPES="2", **env)
    unique_id = ranks.run(enter, net.hosts)[0]
    yield ranks, ranks.run(meet, unique_id)
    ranks.run(leave)
    ranks.start(close_store, only=[0])
    ranks.finish(only=[0])


@pytest.fixture
def net() -> Iterator[netns.Network]:
    with netns.network(HOSTS) as made:
        yield made


def with_comm(job: Job, function: Callable[..., Any], *args: Any) -> Any:
    assert job.comm is not None
    return function(job.comm, *args)


def cases() -> list[Case]:
    found: list[Case] = []
    for turn, kind in enumerate(kind for kind in ALGORITHMS if kind is not Collective.BARRIER):
        for count in (1, SIZE + 1, 20_011):
            op = "avg" if kind in REDUCING and turn % 2 else "sum"
            root = (turn + count) % SIZE if kind in ROOTED else 0
            found.append(Case(kind.label, ("float32", "int64")[op == "sum"], count, op, root, seed=turn))
    counts = (5, 0, 4099, 1, 0, 70)
    found += [Case(name, "bfloat16", 9, counts=counts) for name in ("allgatherv", "reduce_scatterv")]
    return [*found, Case("alltoallv", "uint8", 3000)]


def exchange(comm: hetcoll.Communicator, a: int, b: int, nbytes: int) -> dict[str, int]:
    """Rank a sends to rank b; what each interface of this host sent meanwhile."""
    comm.barrier()
    before = netns.sent_bytes()
    data = np.arange(nbytes, dtype=np.uint8)
    if comm.rank == a:
        comm.send(data, b)
    elif comm.rank == b:
        got = np.zeros_like(data)
        comm.recv(got, a)
        assert (got == data).all()
    comm.barrier()
    return {name: count - before[name] for name, count in netns.sent_bytes().items()}


def test_three_hosts_with_two_networks(launch: Launch, net: netns.Network) -> None:
    with joined(launch, net) as (ranks, paths):
        for rank, row in enumerate(paths):
            for peer, path in enumerate(row):
                assert path == ("" if peer == rank else "shm" if peer // LOCAL == rank // LOCAL else "tcp")

        rows = ranks.run(with_comm, run_cases, cases(), {}, timeout=60)
        for case, digests in zip(cases(), zip(*rows, strict=True), strict=True):
            if case.collective in ("allreduce", "allgather", "allgatherv", "broadcast"):
                assert len(set(digests)) == 1, f"{case}: ranks hold different bits"

        nbytes = 8 << 20
        far = ranks.run(with_comm, exchange, 0, 2, nbytes)[0]
        for name in ("eth0", "eth1"):  # each carried its part, and both little else
            assert 0.1 * nbytes < far[name], far
        assert nbytes <= far["eth0"] + far["eth1"] < 1.2 * nbytes, far
        near = ranks.run(with_comm, exchange, 0, 1, nbytes)[0]
        assert near["eth0"] + near["eth1"] + near["lo"] < 0.1 * nbytes, near


def chosen(comm: hetcoll.Communicator, nbytes: int) -> tuple[str, str]:
    """By what an all-reduce goes, which is right, and what is taken for the network."""
    x = np.full(nbytes // 4, comm.rank, np.float32)
    comm.allreduce(x)
    assert (x == sum(range(comm.size))).all()
    told = comm.explain("allreduce", nbytes)
    return told.algorithm, told.network


def test_a_network_of_a_high_latency_is_known_and_asks_for_the_fewest_rounds(
    launch: Launch, net: netns.Network
) -> None:
    nbytes = 512 << 10
    with joined(launch, net) as (ranks, _):
        rows = ranks.run(with_comm, chosen, nbytes)
    assert len(set(rows)) == 1
    assert rows[0][0] != "oneshot", rows[0]
    with net.delayed(0.004), joined(launch, net) as (ranks, _):
        rows = ranks.run(with_comm, chosen, nbytes)
    assert len(set(rows)) == 1
    name, network = rows[0]
    assert name == "oneshot"
    found = re.search(r"; (\d+) us a message, by the round trip of rank [2-5]$", network)
    assert found, network
    assert int(found[1]) >= 4096, "8 ms each way, as the nearest power of two says it"


def within(host: str, make: Callable[[], socket.socket]) -> socket.socket:
    """A socket that is made on a host."""

    def enter_and_make() -> socket.socket:
        netns.enter(host)
        return make()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(enter_and_make).result(10)


def test_what_waits_when_a_network_gets_slower_does_not_stop_it() -> None:
    """Of the hosts that these tests are made of: packets of many segments have no room in a smaller burst."""
    nbytes = 400_000
    with netns.network(2, "1mbit") as slow, ExitStack() as stack:
        listener = stack.enter_context(within(slow.hosts[1], lambda: socket.create_server(("10.78.0.2", 0))))
        address = listener.getsockname()
        sender = stack.enter_context(within(slow.hosts[0], lambda: socket.create_connection(address)))
        receiver = stack.enter_context(listener.accept()[0])
        receiver.settimeout(15)
        thread = threading.Thread(target=sender.sendall, args=(bytes(nbytes),))
        thread.start()
        came = 0
        while came < nbytes:
            before, came = came, came + len(receiver.recv(65536))
            assert came > before
            if before < 220_000 <= came:  # all that could leave at once: the rest waits
                slow.set_rate(0, 0, "200mbit", "8kb", "1ms")
        thread.join()


@pytest.mark.calm
def test_two_networks_alike_carry_a_half_each(launch: Launch, net: netns.Network) -> None:
    nbytes = 8 << 20
    with joined(launch, net) as (ranks, _):
        far = ranks.run(with_comm, exchange, 0, 2, nbytes)[0]
    for name in ("eth0", "eth1"):
        assert 0.4 * nbytes < far[name] < 0.7 * nbytes, far


def test_a_slower_network_gets_less(launch: Launch, net: netns.Network) -> None:
    net.set_rate(0, 0, "40mbit")
    nbytes = 48 << 20
    with joined(launch, net) as (ranks, _):
        sent = ranks.run(with_comm, exchange, 0, 2, nbytes)[0]
    assert sent["eth0"] > nbytes // 20, sent
    # It is ten times as fast, of which a busy machine shows less; dealt out in turn, both would carry the same.
    assert sent["eth1"] > 1.25 * sent["eth0"], sent


@pytest.mark.calm
def test_messages_that_fit_both_sockets_are_dealt_by_what_each_network_carried(
    launch: Launch, net: netns.Network
) -> None:
    """The kernel takes all of a message at once, so what waits in the sockets says nothing of their pace."""
    for host in (0, 1):  # so slow that what a busy machine takes for it is little beside it
        net.set_rate(host, 0, "10mbit", burst="64kb")
        net.set_rate(host, 1, "40mbit", burst="64kb")
    with joined(launch, net) as (ranks, _):
        shares = list[float]()  # the first shows the pace
        while len(shares) < 8 and max(shares, default=0.0) < 2.5:
            sent = ranks.run(with_comm, exchange, 0, 2, 4 << 20)[0]
            shares.append(sent["eth1"] / sent["eth0"])
    assert max(shares) >= 2.5, shares


def add_up(comm: hetcoll.Communicator, seconds: float) -> None:
    """All-reduces until one fails."""
    end = time.monotonic() + seconds
    x = np.ones(300_000, np.float32)
    while time.monotonic() < end:
        x[:] = 1
        comm.allreduce(x)
        assert (x == comm.size).all()


@parametrize("nets", [(1,), (0, 1)], first=1)
def test_a_network_that_is_cut_is_an_error_on_every_rank(
    launch: Launch, net: netns.Network, nets: tuple[int, ...]
) -> None:
    """With one network some control connections may live on; with both, host 1 is cut off altogether."""
    with joined(launch, net, HETCOLL_TIMEOUT="3") as (ranks, _):
        ranks.start(with_comm, add_up, 20)
        time.sleep(0.5)
        net.cut(1, *nets)
        outcomes = ranks.finish(40)
        for outcome in outcomes:
            assert isinstance(outcome.error, CommunicationError), outcome.trace or "no error"
            text = str(outcome.error)
            cut_off = outcome.rank in (2, 3)
            if len(nets) == 2 and not cut_off:
                assert isinstance(outcome.error, CollectiveTimeoutError), text
                assert "ranks 2-3 did not answer" in text, text
            else:
                assert "rank" in text, text
            assert outcome.seconds < 15, (outcome.seconds, text)  # 3, and some for questions that nobody answers
