"""Small messages between GPUs of one host: kernels, beside copies and the library's, in any order of sizes."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from device_checks import Capture
from gpu_calls import device_of_rank
from gpu_places import PLACES, ranks_on
from ranks import Ranks, close_all, kept
from thorough import parametrize

import hetcoll
from hetcoll.errors import AbortedError, CommunicationError, PeerLostError
from hetcoll.gpu.array import DeviceArray
from hetcoll.gpu.planner import MOST_INSIDE
from hetcoll.vendors.devices.kernels.table import MESSAGE_MOST, MESSAGE_WORDS, RING_SLOTS

SIZES = (1, 8, MOST_INSIDE, MOST_INSIDE + 4, MESSAGE_WORDS, MESSAGE_WORDS + 4, MESSAGE_MOST, MESSAGE_MOST + 4)  # bytes


def of_bytes(comm: hetcoll.Communicator, values: Any) -> DeviceArray:
    return DeviceArray.of(device_of_rank(comm.rank), np.asarray(values, np.uint8))


def pattern(src: int, nbytes: int, turn: int = 0) -> Any:
    return np.random.default_rng(1000 * src + turn).integers(0, 256, nbytes, np.uint8)


def of_every_size(comm: hetcoll.Communicator) -> None:
    """One way, both ways with other sizes each way, and more of them on the way than a ring has slots."""
    rank, size = comm.rank, comm.size
    after, before = (rank + 1) % size, (rank - 1) % size
    for i, nbytes in enumerate(SIZES):
        back = SIZES[-1 - i]  # from even ranks; the ring of an odd number of ranks has two even neighbours
        mine, theirs = ((nbytes if who % 2 else back) for who in (rank, before))
        out, into = of_bytes(comm, pattern(rank, mine, i)), of_bytes(comm, np.zeros(theirs))
        work = comm.sendrecv(out.buffer(), after, into.buffer(), before, async_op=i % 2 == 1)
        work.wait(60)
        assert (into.get() == pattern(before, theirs, i)).all(), nbytes
    if rank > 1:
        return
    arrays = [of_bytes(comm, pattern(0, 5, turn) if rank == 0 else np.zeros(5)) for turn in range(3 * RING_SLOTS)]
    works = [(comm.recv if rank else comm.send)(each.buffer(), 1 - rank, async_op=turn % 3 == 0)
             for turn, each in enumerate(arrays)]  # fmt: skip
    for work in works:
        work.wait(60)
    assert all((each.get() == pattern(0, 5, turn)).all() for turn, each in enumerate(arrays))


def in_groups(comm: hetcoll.Communicator) -> None:
    """Messages of a pair that kernels and copies carry, several of each, against calls of their own on the peer."""
    rank, size = comm.rank, comm.size
    peers = [peer for peer in range(size) if peer != rank]
    sizes = (7, MESSAGE_MOST + 4, MESSAGE_WORDS, 9)
    for apart in (False, True):  # rank 0 makes calls instead, one after another
        sent = [(peer, of_bytes(comm, pattern(rank, n, i))) for peer in peers for i, n in enumerate(sizes)]
        got = [(peer, i, of_bytes(comm, np.zeros(n))) for peer in peers for i, n in enumerate(sizes)]

        if apart and rank == 0:
            works = [comm.send(array.buffer(), peer, async_op=True) for peer, array in sent]
            works += [comm.recv(array.buffer(), peer, async_op=True) for peer, _, array in got]
            for work in works:
                work.wait(60)
        else:
            with comm.group():
                for peer, array in sent:
                    comm.send(array.buffer(), peer)
                for peer, _, array in got:
                    comm.recv(array.buffer(), peer)
        for peer, i, array in got:
            assert (array.get() == pattern(peer, sizes[i], i)).all(), (peer, sizes[i])


def mixed_graph(comm: hetcoll.Communicator) -> None:
    """A graph of messages that kernels and copies carry, replayed by turns with calls."""
    device, other = device_of_rank(comm.rank), 1 - comm.rank
    device.activate()
    stream = device.stream()
    sizes = (8, MESSAGE_MOST + 4)
    out = [of_bytes(comm, np.zeros(n)) for n in sizes]
    into = [of_bytes(comm, np.zeros(n)) for n in sizes]

    def both(k: int, j: int) -> None:
        comm.sendrecv(out[k].buffer(), other, into[j].buffer(), other, stream=stream)

    with Capture(device, stream) as captured:
        both(0, 0)
        both(1, 1)
        both(comm.rank, other)
    for turn in range(4):
        for each in out:
            each.set(pattern(comm.rank, each.size, turn))
        for each in into:
            each.set(np.zeros(each.size, np.uint8))
        if turn % 2:
            both(0, 0)
        captured.replay(stream)
        device.synchronize(stream)
        assert all((each.get() == pattern(other, each.size, turn)).all() for each in into)
    captured.close()
    device.destroy_stream(stream)


def in_order(comm: hetcoll.Communicator) -> None:
    """A group of messages to one peer that makes a call of each, or the other way round: small ones before and behind a
    long one, and more of all than rings and slots hold. Graphs have the same calls on both."""
    rank, device = comm.rank, device_of_rank(comm.rank)
    device.activate()
    stream = device.stream()
    sizes = (7, 2 * MESSAGE_MOST, MESSAGE_WORDS, *[9] * 5)
    call = comm.recv if rank else comm.send
    both = (True, True)
    for groups, captured in (((False, True), False), ((True, False), False), (both, False), (both, True)):
        arrays = [of_bytes(comm, np.zeros(n) if rank else pattern(0, n, i)) for i, n in enumerate(sizes)]
        in_graph = Capture(device, stream) if captured else contextlib.nullcontext()
        in_group = comm.group() if groups[rank] else contextlib.nullcontext()
        with in_graph as graph, in_group:
            for array in arrays:
                call(replace(array.buffer(), stream=stream), 1 - rank)
        for _ in range(2):
            if graph is not None:
                graph.replay(stream)
        device.synchronize(stream)
        assert rank == 0 or all(
            (array.get() == pattern(0, n, i)).all() for i, (n, array) in enumerate(zip(sizes, arrays, strict=True))
        )
        if graph is not None:
            graph.close()
    device.destroy_stream(stream)


def beside_a_library(comm: hetcoll.Communicator) -> None:
    """A group of small messages to all in a graph: some are the library's, whose node may run before or after ours."""
    rank, device = comm.rank, device_of_rank(comm.rank)
    device.activate()
    stream, peers = device.stream(), [peer for peer in range(comm.size) if peer != rank]
    out, into = of_bytes(comm, pattern(rank, 9)), [of_bytes(comm, np.zeros(9)) for _ in peers]

    def group() -> None:
        with comm.group():
            for peer, array in zip(peers, into, strict=True):
                comm.send(replace(out.buffer(), stream=stream), peer)
                comm.recv(replace(array.buffer(), stream=stream), peer)

    group()
    device.synchronize(stream)
    with Capture(device, stream) as captured:
        group()
    for _ in range(12):
        captured.replay(stream)
        device.synchronize(stream)
    assert all((array.get() == pattern(peer, 9)).all() for peer, array in zip(peers, into, strict=True))
    captured.close()
    device.destroy_stream(stream)


def first_in_a_graph(comm: hetcoll.Communicator) -> None:
    """The first message between two ranks may be captured, where no library has to connect them."""
    device, other, fresh = device_of_rank(comm.rank), 1 - comm.rank, comm.split(0)
    assert fresh is not None
    device.activate()
    stream = device.stream()
    out, into = of_bytes(comm, pattern(comm.rank, MOST_INSIDE)), of_bytes(comm, np.zeros(MOST_INSIDE))
    fresh.allreduce(out.buffer(), into.buffer(), "max").wait(60)
    with Capture(device, stream) as captured:
        fresh.sendrecv(out.buffer(), other, into.buffer(), other, stream=stream)
    for _ in range(6):
        captured.replay(stream)
    device.synchronize(stream)
    assert (into.get() == pattern(other, MOST_INSIDE)).all()
    captured.close()
    fresh.close()
    device.destroy_stream(stream)


def replay_beside_others(comm: hetcoll.Communicator) -> None:
    """Replays on one stream and messages on another, none of which waits for the other's."""
    device, other, turns = device_of_rank(comm.rank), 1 - comm.rank, 14
    device.activate()
    streams, sizes = (device.stream(), device.stream()), (9, 5003, 1)
    outside, inside = ([of_bytes(comm, pattern(comm.rank, n, turn)) for n in sizes] for turn in (0, 1))
    into = [[of_bytes(comm, np.zeros(n)) for n in sizes] for _ in streams]

    def exchange(arrays: list[DeviceArray], to: list[DeviceArray], stream: int) -> None:
        for array, result in zip(arrays, to, strict=True):
            comm.sendrecv(array.buffer(), other, result.buffer(), other, stream=stream)

    exchange(outside, into[0], streams[0])
    with Capture(device, streams[1]) as captured:
        exchange(inside, into[1], streams[1])
    for _ in range(turns):
        captured.replay(streams[1])
        exchange(outside, into[0], streams[0])
    for stream in streams:
        device.synchronize(stream)
    for turn, arrays in enumerate(into):
        assert all((each.get() == pattern(other, each.size, turn)).all() for each in arrays)
    captured.close()
    for stream in streams:
        device.destroy_stream(stream)


KINDS = {
    "nnnn": ["cuda"] * 4,
    "nn": ["cuda"] * 2,
    "nnn": ["cuda"] * 3,
    "aa": ["hip"] * 2,
    "nan": ["cuda", "hip", "cuda"],
    "np": ["cuda", "posing"],
}


def launch(place: str, kinds: str, **env: str) -> Ranks:
    vendors = KINDS[kinds]
    devices = {"HETCOLL_DEVICE": tuple("hip" if vendor == "posing" else vendor for vendor in vendors)}
    asked = {"HETCOLL_ISLANDS": "|".join(map(str, range(len(vendors))))}
    return ranks_on(place, vendors, {**devices, **asked, **env}, timeout=60)


@pytest.fixture(scope="module", params=PLACES)
def gpus(request: pytest.FixtureRequest) -> Iterator[Callable[..., Ranks]]:
    """Ranks that stay whole."""
    with kept(partial(launch, request.param)) as get:
        yield get


@pytest.fixture(params=PLACES)
def lost(request: pytest.FixtureRequest) -> Iterator[Callable[..., Ranks]]:
    """The same, for one test."""
    made: list[Ranks] = []

    def start(kinds: str, **env: str) -> Ranks:
        made.append(launch(request.param, kinds, **env))
        return made[-1]

    yield start
    close_all(made)


def all_of_it(comm: hetcoll.Communicator) -> None:
    of_every_size(comm)
    in_groups(comm)


@parametrize(
    ("kinds", "islands"),
    [("nan", "0|1|2"), ("nn", "0,1"), ("nn", "0|1"), ("aa", "0,1"), ("nnn", "0,1,2"), ("nnn", "0,1|2")],
    first=2,
)
def test_messages_of_every_size(gpus: Callable[..., Ranks], kinds: str, islands: str) -> None:
    gpus(kinds, HETCOLL_ISLANDS=islands).run(all_of_it, timeout=200)


@pytest.mark.parametrize("islands", ["0|1", "0,1"])
def test_on_one_hardware_queue(gpus: Callable[..., Ranks], islands: str) -> None:
    ranks = gpus("nn", CUDA_DEVICE_MAX_CONNECTIONS="1", HETCOLL_ISLANDS=islands)
    for each in (of_every_size, mixed_graph, in_order):
        ranks.run(each, timeout=100)


@parametrize("kinds", ["nn", "aa"], first=1)
def test_first_in_a_graph(gpus: Callable[..., Ranks], kinds: str) -> None:
    gpus(kinds, HETCOLL_ISLANDS="0,1").run(first_in_a_graph, timeout=100)


def test_beside_a_library_in_graphs(gpus: Callable[..., Ranks]) -> None:
    gpus("nnnn", HETCOLL_ISLANDS="0,1|2,3").run(beside_a_library, timeout=100)


def wait_in_vain(comm: hetcoll.Communicator, nbytes: int, sends: bool, then: str) -> Any:
    """A message that rank 1 has no part in: it does something else."""
    made, into = (of_bytes(comm, np.zeros(nbytes)) for _ in range(2))
    comm.sendrecv(made.buffer(), 1 - comm.rank, into.buffer(), 1 - comm.rank).wait(60)
    comm.barrier()
    if comm.rank == 1:
        time.sleep(0.3)
        if then == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        comm.abort("enough")
        return None
    begun = time.monotonic()
    try:
        for _ in range(2 * RING_SLOTS):  # more than a ring holds
            work = (comm.send if sends else comm.recv)(made.buffer(), 1)
        work.wait(60)
    except CommunicationError as error:
        return error, time.monotonic() - begun
    return None, 0.0


@parametrize("kinds", ["nn", "aa"], first=1)
def test_replays_and_other_messages_at_the_same_time(gpus: Callable[..., Ranks], kinds: str) -> None:
    gpus(kinds, HETCOLL_ISLANDS="0,1").run(replay_beside_others, timeout=200)


@parametrize(
    ("islands", "nbytes", "sends", "then", "wanted"),
    [
        ("0|1", 8, False, "die", PeerLostError),
        ("0,1", MESSAGE_WORDS + 4, True, "abort", AbortedError),
        ("0,1", 8, False, "die", PeerLostError),
        ("0|1", MESSAGE_MOST, True, "abort", AbortedError),
    ],
    first=2,
)
def test_a_rank_that_is_gone(
    lost: Callable[..., Ranks], islands: str, nbytes: int, sends: bool, then: str, wanted: type[Exception]
) -> None:
    ranks = lost("nn", HETCOLL_ISLANDS=islands)
    ranks.start(wait_in_vain, nbytes, sends, then)
    (outcome,) = ranks.finish(100, only=[0])
    if then == "die":
        ranks.kill(1)
    error, seconds = outcome.value
    assert isinstance(error, wanted), error
    assert seconds < 20
