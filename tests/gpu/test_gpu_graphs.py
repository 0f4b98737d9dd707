"""Calls in CUDA and HIP graphs: captured once, replayed with other data, in any order that a graph's edges allow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fakes
import numpy as np
import pytest
from cases import run_case
from device_checks import Capture
from gpu_calls import Called, cases_of, check, device_of_rank
from gpu_kinds import VENDOR, start
from gpu_places import PLACES
from in_graph import InGraph
from ranks import Ranks, kept
from reference import Case
from thorough import parametrize

import hetcoll
from hetcoll.errors import ArgumentError
from hetcoll.gpu.array import DeviceArray

LARGE = 1_100_001  # float32s: more than one kernel does, in some pieces, in slots that come again
MIB = (1 << 20) // 4


@pytest.fixture(scope="module", params=PLACES)
def gpus(request: pytest.FixtureRequest) -> Iterator[Callable[..., Ranks]]:
    """Ranks of these kinds (see `start`) on so many hardware queues, every one an island unless said otherwise."""

    def on_queues(kinds: str, islands: str | None = None, queues: int = 8, **env: str) -> Ranks:
        asked = "|".join(map(str, range(len(kinds)))) if islands is None else islands
        env |= {"HETCOLL_ISLANDS": asked} if asked else {}
        env |= {"CUDA_DEVICE_MAX_CONNECTIONS": str(queues), "GPU_MAX_HW_QUEUES": str(queues)}
        return start(kinds, place=request.param, jitter=f"{queues}:50", **env)

    with kept(on_queues) as get:
        yield get


def run_in_graphs(comm: hetcoll.Communicator, cases: list[Case]) -> list[bytes]:
    device = device_of_rank(comm.rank)
    device.activate()
    stream = device.stream()
    comm.allreduce(DeviceArray(device, 1))
    try:
        return [run_case(InGraph(comm, device, stream), case) for case in cases]  # type: ignore[arg-type]
    finally:
        device.destroy_stream(stream)


@parametrize(("kinds", "queues"), [("nn", 1), ("nan", 4), ("aa", 2), ("nnn", 4)], first=1)
def test_every_collective(gpus: Any, kinds: str, queues: int) -> None:
    cases = list(cases_of(len(kinds), (250_001,)))
    check(gpus(kinds, queues=queues), cases, run_in_graphs)


@parametrize("islands", ["0,1,2|3", "0,1|2,3"], first=0)
def test_islands(gpus: Any, islands: str) -> None:
    check(gpus("nnnn", islands, 1), list(cases_of(4, (130_003,))), run_in_graphs)


@parametrize("kinds", ["nn", "aa"], first=0)
def test_an_island_whose_collectives_are_copies(gpus: Any, kinds: str) -> None:
    cases = [*cases_of(2, (250_001,)), Case("allgather", count=LARGE)]
    check(gpus(kinds, "", HETCOLL_ALGO="direct,alltoall:pairwise"), cases, run_in_graphs)


def waits_of_captured(comm: hetcoll.Communicator, log: str, counts: list[int]) -> list[int]:
    """How often a stream is told to wait for something while calls of each count are captured on one of its own."""
    device = device_of_rank(comm.rank)
    device.activate()
    stream, array = device.stream(), DeviceArray(device, max(counts))

    called, found = Called(log), []
    for count in counts:
        comm.allreduce(array.buffer(0, count), stream=stream)
        device.synchronize(stream)
        called.since()
        with Capture(device, stream) as captured:
            for _ in range(3):
                comm.allreduce(array.buffer(0, count), stream=stream)
        found.append(sum(name in ("cuStreamWaitEvent", "hipStreamWaitEvent") for name in called.since()))
        captured.close()
    device.destroy_stream(stream)
    return found


@pytest.mark.fakes
@parametrize("kinds", ["na", "nn"], first=1)
def test_calls_on_one_stream_follow_each_other_by_themselves(kinds: str, tmp_path: Path) -> None:
    """Else each had an edge from the last one, past what lies between them."""
    log = str(tmp_path / "log")
    env = fakes.environments([VENDOR[kind] for kind in kinds], len(kinds), log=log)
    with Ranks(len(kinds), {**env, "HETCOLL_ISLANDS": "0|1"}, tidy=False) as ranks:  # the log stays open
        assert ranks.run(waits_of_captured, log, [100, 100_001], timeout=100) == [[0, 0]] * len(kinds)


@pytest.mark.thorough
def test_parts_of_unequal_size(gpus: Any) -> None:
    cases = [
        Case("allgatherv", "int16", counts=(70_001, 0, 300_000), seed=1),
        Case("reduce_scatterv", "float32", op="avg", counts=(5, 900_001, 7), seed=2),
        Case("alltoallv", "int32", 190_001, seed=3),
    ]
    check(gpus("nan", queues=1), cases, run_in_graphs)


@pytest.mark.parametrize("count", [8 * MIB + 1])
@pytest.mark.thorough
def test_large_messages(gpus: Any, count: int) -> None:
    check(gpus("nn", queues=1), [Case("allreduce", count=count, inplace=i, seed=i) for i in (0, 1)], run_in_graphs)


def train(comm: hetcoll.Communicator) -> None:
    """Steps of two graphs, each with several calls, by turns with calls outside of them; all data new at each step."""
    device, size, rank = device_of_rank(comm.rank), comm.size, comm.rank
    device.activate()
    stream, side = device.stream(), device.stream()
    n, m = LARGE, 700_003
    half = m // size
    a, b = DeviceArray(device, n), DeviceArray(device, m)
    parts = DeviceArray(device, half * size)
    fork, join = device.event(), device.event()
    graphs = []
    for turn in range(2):
        with Capture(device, stream) as captured:
            comm.allreduce(a.buffer(), stream=stream)
            device.record(fork, stream)
            device.wait(side, fork)
            work = comm.allreduce(b.buffer(), op="max" if turn else "sum", stream=side, async_op=True)
            work.wait_stream(stream)
            comm.allgather(b.buffer(rank * half, half), parts.buffer(), stream=stream)
            device.record(join, side)
            device.wait(stream, join)
        graphs.append(captured)
    for step in range(6):
        a.set(np.full(n, step + rank, np.float32))
        b.set(np.arange(m, dtype=np.float32) % 97 + step * rank)
        turn = (step // 2) % 2
        if step % 3 == 2:
            comm.allreduce(a.buffer(), stream=stream)
            device.synchronize(stream)
            assert (a.get() == sum(step + r for r in range(size))).all()
            a.set(np.full(n, step + rank, np.float32))
        graphs[turn].replay(stream)
        device.synchronize(stream)
        assert (a.get() == sum(step + r for r in range(size))).all(), step
        ramp = np.arange(m, dtype=np.float32) % 97
        want = ramp + step * (size - 1) if turn else size * ramp + step * sum(range(size))
        assert (b.get() == want).all(), step
        assert (parts.get() == want[: half * size]).all(), step
    for captured in graphs:
        captured.close()
    for each in (stream, side):
        device.destroy_stream(each)


@parametrize("kinds", ["nn", "ana"], first=0)
def test_graphs_by_turns_with_other_calls(gpus: Any, kinds: str) -> None:
    gpus(kinds, queues=2).run(train, timeout=200)


def exchange(comm: hetcoll.Communicator) -> None:
    """A ring of messages, a group of them, and one to oneself, in one graph."""
    device, size, rank = device_of_rank(comm.rank), comm.size, comm.rank
    device.activate()
    stream, right, left = device.stream(), (rank + 1) % size, (rank - 1) % size
    mine, got, back, own = (DeviceArray(device, LARGE, "int32") for _ in range(4))
    with Capture(device, stream) as captured:
        comm.sendrecv(mine.buffer(), right, got.buffer(), left, stream=stream)
        if rank == 0:
            comm.send(got.buffer(), 1, stream=stream)
        elif rank == 1:
            comm.recv(back.buffer(), 0, stream=stream)
        comm.sendrecv(mine.buffer(), rank, own.buffer(), rank, stream=stream)
    for step in range(3):
        mine.set(np.arange(LARGE, dtype=np.int32) * (rank + 1) + step)
        captured.replay(stream)
        device.synchronize(stream)
        assert (got.get() == np.arange(LARGE) * (left + 1) + step).all()
        assert (own.get() == mine.get()).all()
        assert rank != 1 or (back.get() == np.arange(LARGE) * size + step).all()
    captured.close()
    device.destroy_stream(stream)


def test_messages(gpus: Any) -> None:
    gpus("nan", queues=1).run(exchange, timeout=200)


def grouped(comm: hetcoll.Communicator) -> None:
    """`group` has no stream of its own: the tensors' library says which is current."""
    from dlpack_arrays import Quick
    from on_gpu import KINDS

    device, other = device_of_rank(comm.rank), 1 - comm.rank
    device.activate()
    stream = device.stream()
    place = KINDS[device.vendor], device.index
    mine, got = (DeviceArray(device, LARGE) for _ in range(2))
    send, recv = (Quick(*place, shape=(LARGE,), address=a.ptr) for a in (mine, got))
    Quick.streams[place] = stream
    with Capture(device, stream) as captured, comm.group():
        comm.send(send, other)
        comm.recv(recv, other)
    for step in range(3):
        mine.set(np.full(LARGE, comm.rank + 10 * step, np.float32))
        captured.replay(stream)
        device.synchronize(stream)
        assert (got.get() == other + 10 * step).all()
    captured.close()
    Quick.streams[place] = 0
    device.destroy_stream(stream)


def test_groups_of_messages(gpus: Any) -> None:
    gpus("nn", queues=1).run(grouped)


def refuse(comm: hetcoll.Communicator, compress: str | None = None) -> str:
    if "cpu" in str(comm._config.device):
        comm.allreduce(np.ones(LARGE, np.float32))
        return ""
    device = device_of_rank(comm.rank)
    device.activate()
    stream = device.stream()
    array, small = (DeviceArray.of(device, np.ones(n, np.float32)) for n in (LARGE, 5))
    comm.allreduce(array.buffer(), stream=stream)
    with Capture(device, stream):
        with pytest.raises(ArgumentError) as raised:
            comm.allreduce(array.buffer(), stream=stream, compress=compress)
        device.copy(array.ptr, small.ptr, 20, stream)
    device.destroy_stream(stream)
    return str(raised.value)


def test_a_rank_without_a_gpu_is_named(gpus: Any) -> None:
    for said in gpus("nnc").run(refuse)[:2]:
        assert said.endswith("got rank 2, which has none"), said


def refuse_all(comm: hetcoll.Communicator) -> list[str]:
    """What is said of calls of which this rank does its part by its vendor's library, or has none."""
    device = None if "cpu" in str(comm._config.device) else device_of_rank(comm.rank)
    rank, size = comm.rank, comm.size
    if device is None:
        comm.allreduce(np.ones(5, np.float32))
        return []
    device.activate()
    stream, array = device.stream(), DeviceArray.of(device, np.ones(5, np.float32))
    comm.allreduce(array.buffer(), stream=stream)
    table = [[int(rank != source and source < 2) for source in range(size)], [0] * size]  # ranks 0 and 1 alone
    calls: list[Callable[[], object]] = [
        lambda: comm.allreduce(array.buffer(), stream=stream),
        lambda: comm.alltoall(
            array.buffer(0, sum(table[rank > 1])), array.buffer(1, sum(table[rank > 1])),
            sendcounts=table[rank > 1], recvcounts=table[rank > 1], stream=stream,
        ),
    ]  # fmt: skip
    said = []
    with Capture(device, stream) as captured:
        for call in calls:
            with pytest.raises(ArgumentError) as raised:
                call()
            said.append(str(raised.value))
        device.copy(array.ptr, array.ptr + 4, 4, stream)
    captured.close()
    device.destroy_stream(stream)
    return said


def test_all_ranks_refuse_what_one_of_them_cannot_capture(gpus: Any) -> None:
    """Else some had captured a call that others never make."""
    for said in gpus("nnnc", "").run(refuse_all)[:3]:
        assert len(said) == 2
        assert all(each.endswith("got rank 3, which has none") for each in said), said


def capture_uneven(comm: hetcoll.Communicator) -> str:
    """What is said of an all-to-all in which rank 2 has no part."""
    device, rank = device_of_rank(comm.rank), comm.rank
    device.activate()
    stream, array = device.stream(), DeviceArray.of(device, np.ones(4, np.float32))
    counts = [0, 0, 0] if rank == 2 else [int(peer == 1 - rank) for peer in range(3)]
    n, said = sum(counts), ""

    def call() -> None:
        comm.alltoall(array.buffer(0, n), array.buffer(2, n), sendcounts=counts, recvcounts=counts, stream=stream)

    call()
    with Capture(device, stream) as captured:
        try:
            call()
        except ArgumentError as error:
            said = str(error)
        device.copy(array.ptr, array.ptr + 4, 4, stream)
    captured.close()
    comm.allreduce(array.buffer(), stream=stream)  # a mismatch where some had captured it
    device.synchronize(stream)
    device.destroy_stream(stream)
    return said


@pytest.mark.fakes
@parametrize("algo", ["alltoallv:pairwise", ""], first=1)
def test_who_has_no_part_in_a_call_refuses_it_as_the_others_do(algo: str) -> None:
    """Of an island over two hosts, whose library does not run what HETCOLL_ALGO names."""
    env = {**fakes.environment("cuda", 3), "HETCOLL_HOST_ID": ("a", "b", "b"), "HETCOLL_ISLANDS": "0,1,2"}
    with contextlib.closing(Ranks(3, {**env, "HETCOLL_ALGO": algo})) as ranks:
        said = ranks.run(capture_uneven, timeout=60)
    assert all("wanted GPUs of one host" in each for each in said) if algo else said == [""] * 3, said


def test_a_rank_that_is_reached_by_sockets_is_named(gpus: Any) -> None:
    for said in gpus("nn", HETCOLL_CROSS="staged").run(refuse):
        assert said.endswith("got rank 1 (staged, as HETCOLL_CROSS says)"), said


def test_compressed_calls_are_refused(gpus: Any) -> None:
    for said in gpus("nn", HETCOLL_ISLANDS="0|1").run(refuse, "int8"):
        assert said.startswith("compress: wanted a call that no graph captures"), said


def capture_at_once(comm: hetcoll.Communicator) -> tuple[str, float]:
    """The first call of a communicator in a graph, and again after one outside of it."""
    device, fresh = device_of_rank(comm.rank), comm.split(0)
    assert fresh is not None
    device.activate()
    stream = device.stream()
    array, other = (DeviceArray.of(device, np.ones(LARGE, np.float32)) for _ in range(2))
    with Capture(device, stream):
        with pytest.raises(ArgumentError) as raised:
            fresh.allreduce(array.buffer(), stream=stream)
        device.copy(array.ptr, other.ptr, 4, stream)
    fresh.allreduce(array.buffer(), stream=stream)
    with Capture(device, stream) as captured:
        fresh.allreduce(array.buffer(), stream=stream)
    captured.replay(stream)
    device.synchronize(stream)
    captured.close()
    fresh.close()
    device.destroy_stream(stream)
    return str(raised.value), float(array.get()[-1])


@parametrize("islands", ["0,1,2,3", "0,1,2|3"], first=0)
def test_libraries_are_not_set_up_during_a_capture(gpus: Any, islands: str) -> None:
    for said, value in gpus("nnnn", islands, 1).run(capture_at_once):
        assert said.endswith("wanted a call of this communicator before")
        assert value == 16


def capture_twice(comm: hetcoll.Communicator) -> str:
    device = device_of_rank(comm.rank)
    device.activate()
    streams = [device.stream() for _ in range(2)]
    array = DeviceArray.of(device, np.ones(LARGE, np.float32))
    with Capture(device, streams[0], "relaxed") as captured:
        comm.allreduce(array.buffer(), stream=streams[0])
        with Capture(device, streams[1], "relaxed"):
            with pytest.raises(ArgumentError) as raised:
                comm.allreduce(array.buffer(), stream=streams[1])
            device.copy(array.ptr, array.ptr + 64, 32, streams[1])
    captured.replay(streams[0])
    device.synchronize(streams[0])
    assert (array.get() == 2).all()
    return str(raised.value)


def test_a_second_capture_at_the_same_time_is_refused(gpus: Any) -> None:
    for said in gpus("nn").run(capture_twice):
        assert "one capture at a time" in said
