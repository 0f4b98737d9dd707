"""The fakes for NCCL and RCCL: what they compute, how they wait, how they fail."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import fakes
import ml_dtypes
import numpy as np
import pytest
from fakes.collectives import (
    AVG,
    IN_PROGRESS,
    INVALID_ARGUMENT,
    INVALID_USAGE,
    MAX,
    MIN,
    PROD,
    SUM,
    TYPES,
    CollectiveError,
    Comm,
    Library,
)
from fakes.drivers import Driver
from fakes.harness import LAUNCH_FAILED, TIMED_OUT, Array, call, download, finish, refused, upload, words
from ranks import Job, Ranks, wait_until
from thorough import HOUSE, parametrize

pytestmark = [pytest.mark.fakes, HOUSE]

SIZE = 3
NUMPY = {"bfloat16": ml_dtypes.bfloat16}
REDUCTIONS: dict[int, Callable[[Array], Array]] = {
    SUM: lambda parts: parts.sum(0),
    PROD: lambda parts: parts.prod(0),
    MAX: lambda parts: parts.max(0),
    MIN: lambda parts: parts.min(0),
}


def data(dtype: str, rank: int, count: int, seed: int = 0) -> Array:
    """Small whole numbers: every type holds them and their sums and products."""
    rng = np.random.default_rng(1000 * seed + rank)
    return rng.integers(0, 4, count).astype(NUMPY.get(dtype, dtype))


@pytest.fixture
def joined(vendor: str) -> Callable[..., list[Any]]:
    """Runs ``function(driver, job, comm, stream, *args)`` on `ranks` new processes with a communicator."""

    def run(
        function: Callable[..., Any],
        *args: Any,
        ranks: int = SIZE,
        blocking: bool = True,
        env: dict[str, str] | None = None,
        **settings: Any,
    ) -> Any:
        env = {**fakes.environment(vendor, devices=ranks, **{"timeout": 5, **settings}), **(env or {})}
        with Ranks(ranks, env, join=False) as processes:
            processes.start(call, vendor, unique_id, 0, (vendor,), only=[0])
            [identity] = finish(processes, [0])
            for rank in range(ranks):
                more = (vendor, identity, ranks, blocking, function, args)
                processes.start(call, vendor, member, rank, more, only=[rank])
            return finish(processes)

    return run


def unique_id(driver: Driver, job: Job, vendor: str) -> bytes:
    return Library(vendor).unique_id()


def member(
    driver: Driver,
    job: Job,
    vendor: str,
    identity: bytes,
    ranks: int,
    blocking: bool,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    comm = Comm(Library(vendor), ranks, job.rank, identity, blocking=blocking)
    settle(comm)
    result = function(driver, job, comm, driver.stream(), *args)
    settle(comm)
    comm.destroy()
    return result


def settle(comm: Comm) -> int:
    """Wait until a communicator that does not block has done what it began."""
    if comm.handle:
        wait_until(lambda: comm.state() != IN_PROGRESS)
        return comm.state()
    return 0


def code_of(function: Callable[..., Any], *args: Any) -> int:
    try:
        function(*args)
    except CollectiveError as error:
        return error.code
    return 0


# What they compute.


def reductions(driver: Driver, job: Job, comm: Comm, stream: int, dtype: str, count: int) -> None:
    parts = np.stack([data(dtype, rank, SIZE * count) for rank in range(SIZE)])
    own = parts[job.rank]
    send, recv = upload(driver, own), driver.allocate(own.nbytes)
    for op, reduction in REDUCTIONS.items():
        wanted = reduction(parts.astype(np.float64)).astype(own.dtype)
        comm.call("ncclAllReduce", send, recv, own.size, dtype, op, stream)
        driver.synchronize(stream)
        assert (download(driver, recv, own) == wanted).all(), op
        comm.call("ncclReduceScatter", send, recv, count, dtype, op, stream)
        driver.synchronize(stream)
        share = slice(job.rank * count, (job.rank + 1) * count)
        assert (download(driver, recv, own[:count]) == wanted[share]).all(), op
    driver.fill(recv, 0, own.nbytes, stream)
    comm.call("ncclReduce", send, recv, own.size, dtype, SUM, 1, stream)
    driver.synchronize(stream)
    wanted = parts.astype(np.float64).sum(0) * (job.rank == 1)
    assert (download(driver, recv, own).astype(np.float64) == wanted).all()


@parametrize("dtype", TYPES, first=3)
def test_reductions(joined: Callable[..., Any], dtype: str) -> None:
    joined(reductions, dtype, 101)


def moves(driver: Driver, job: Job, comm: Comm, stream: int, count: int) -> None:
    parts = np.stack([data("int32", rank, SIZE * count) for rank in range(SIZE)])
    own = parts[job.rank]
    send, recv = upload(driver, own), driver.allocate(own.nbytes)
    share = slice(job.rank * count, (job.rank + 1) * count)

    def check(name: str, wanted: Array, *args: Any) -> None:
        driver.fill(recv, 0, own.nbytes, stream)
        comm.call(name, *args, stream)
        driver.synchronize(stream)
        assert (download(driver, recv, wanted) == wanted).all(), name

    check("ncclBroadcast", parts[2], send, recv, own.size, "int32", 2)
    check("ncclAllGather", parts[:, :count].ravel(), send, recv, count, "int32")
    check("ncclAlltoAll", parts[:, share].ravel(), send, recv, count, "int32")
    check("ncclScatter", parts[1][share], send, recv, count, "int32", 1)
    gathered = parts[:, :count].ravel() * (job.rank == 0)
    check("ncclGather", gathered, send, recv, count, "int32", 0)
    comm.call("ncclAllGather", recv + own.itemsize * count * job.rank, recv, count, "int32", stream)  # in place
    driver.synchronize(stream)


@pytest.mark.parametrize("count", [1, 100_003])
def test_moves(joined: Callable[..., Any], count: int) -> None:
    joined(moves, count)


def averages(driver: Driver, job: Job, comm: Comm, stream: int) -> None:
    own = np.array([3, 5, 6]) * (job.rank + 1)
    for dtype, wanted in (("float32", [6, 10, 12]), ("int64", [6, 10, 12])):
        array = own.astype(dtype)
        buffer = upload(driver, array)
        comm.call("ncclAllReduce", buffer, buffer, 3, dtype, AVG, stream)
        driver.synchronize(stream)
        np.testing.assert_allclose(download(driver, buffer, array), wanted, rtol=1e-6)
    with comm.scaled(0.5 * (job.rank + 1), "float32") as op:
        buffer = upload(driver, own.astype(np.float32))
        comm.call("ncclAllReduce", buffer, buffer, 3, "float32", op, stream)
        driver.synchronize(stream)
        factors = sum(0.5 * (rank + 1) ** 2 for rank in range(SIZE))
        assert (download(driver, buffer, np.empty(3, np.float32)) == np.array([3, 5, 6]) * factors).all()
        assert code_of(comm.call, "ncclAllReduce", buffer, buffer, 3, "float64", op, stream) == INVALID_ARGUMENT


def test_averages_and_scaled_sums(joined: Callable[..., Any]) -> None:
    joined(averages)


def messages(driver: Driver, job: Job, comm: Comm, stream: int) -> None:
    """Everyone sends to everyone, itself too, in one group, larger than any slot; then along a chain without one."""
    count = 40_000
    boxes = {peer: driver.allocate(8 * count) for peer in range(SIZE)}
    sent = [upload(driver, np.full(count, 10 * job.rank + peer)) for peer in range(SIZE)]
    with comm.group():
        for peer in range(SIZE):
            comm.call("ncclSend", sent[peer], count, "int64", peer, stream)
            comm.call("ncclRecv", boxes[peer], count, "int64", peer, stream)
    driver.synchronize(stream)
    for peer, box in boxes.items():
        assert (download(driver, box, np.empty(count, np.int64)) == 10 * peer + job.rank).all()
    if job.rank > 0:
        comm.call("ncclRecv", boxes[0], count, "int64", job.rank - 1, stream)
    if job.rank < SIZE - 1:
        comm.call("ncclSend", sent[0] if job.rank == 0 else boxes[0], count, "int64", job.rank + 1, stream)
    driver.synchronize(stream)
    assert download(driver, boxes[0] if job.rank else sent[0], np.empty(1, np.int64))[0] == 0


def test_messages(joined: Callable[..., Any]) -> None:
    joined(messages)


def grouped(driver: Driver, job: Job, comm: Comm, stream: int) -> None:
    """Shares of unequal size by rooted calls in one group, on two streams."""
    counts = [3, 0, 70_000]
    offsets = [0, *itertools.accumulate(counts)]
    own = data("int32", job.rank, counts[job.rank])
    whole = driver.allocate(4 * sum(counts))
    source = upload(driver, own) if own.size else 0
    side = driver.stream()
    with comm.group():
        for root, count in enumerate(counts):
            place = whole + 4 * offsets[root]
            comm.call(
                "ncclBroadcast",
                source if root == job.rank else place,
                place,
                count,
                "int32",
                root,
                (stream, side)[root % 2],
            )
    driver.synchronize(side)
    driver.synchronize(stream)
    wanted = np.concatenate([data("int32", rank, count) for rank, count in enumerate(counts)])
    assert (download(driver, whole, wanted) == wanted).all()


def test_groups(joined: Callable[..., Any]) -> None:
    joined(grouped)


def replayed(driver: Driver, job: Job, comm: Comm, stream: int) -> None:
    ones = np.ones(1000, np.float32)
    buffer = upload(driver, ones)
    driver.begin_capture(stream)
    comm.call("ncclAllReduce", buffer, buffer, ones.size, "float32", SUM, stream)
    graph = driver.end_capture(stream)
    executable = driver.instantiate(graph)
    for _ in range(4):
        driver.replay(executable, stream)
    driver.synchronize(stream)
    assert (download(driver, buffer, ones) == SIZE**4).all()
    driver.destroy_graph(graph, executable)


def test_collectives_are_captured(joined: Callable[..., Any]) -> None:
    joined(replayed)


def outlived(driver: Driver, job: Job, comm: Comm, stream: int, end: str) -> None:
    """A communicator is ended, by rank 0 while a graph with a call of it lives: that returns after the graph's end."""
    value = driver.allocate(8)
    driver.begin_capture(stream)
    comm.call("ncclAllReduce", value, value, 1, "int64", SUM, stream)
    graph = driver.end_capture(stream)
    executable = driver.instantiate(graph)
    ending = threading.Thread(target=getattr(comm, end))
    if job.rank == 0:
        ending.start()
        ending.join(0.3)
        assert ending.is_alive()
    driver.destroy_graph(graph, executable)
    if job.rank == 0:
        ending.join(10)
        assert not ending.is_alive()


@pytest.mark.parametrize("end", ["destroy", "abort"])
def test_graphs_hold_their_communicator(joined: Callable[..., Any], end: str) -> None:
    joined(outlived, end, ranks=2)


def divided(driver: Driver, job: Job, comm: Comm, stream: int) -> int:
    part = comm.split(-1 if job.rank == 1 else 0, -job.rank)
    if part is None:
        return 0
    value = upload(driver, np.array([job.rank + 1], np.int32))
    out = driver.allocate(8)
    part.call("ncclAllGather", value, out, 1, "int32", stream)
    driver.synchronize(stream)
    part.destroy()
    return int("".join(map(str, download(driver, out, np.empty(2, np.int32)))))


def test_split(joined: Callable[..., Any]) -> None:
    assert joined(divided) == [31, 0, 31]


# How they wait.


def stream_ordered(driver: Driver, job: Job, comm: Comm, stream: int) -> None:
    """The calls return before anything runs; the kernels run after what is before them on the stream."""
    at, word = words(driver, 1)
    value = driver.allocate(8)
    driver.wait(stream, at, 1)
    driver.fill(value, 1, 8, stream)
    for _ in range(3):
        comm.call("ncclAllReduce", value, value, 1, "int64", SUM, stream)
    assert not driver.idle(stream)
    word[0] = 1
    driver.synchronize(stream)
    assert download(driver, value, np.empty(1, np.int64))[0] == int.from_bytes(b"\1" * 8, "little") * SIZE**3


def test_collectives_run_on_streams(joined: Callable[..., Any]) -> None:
    joined(stream_ordered, jitter="5:500")


def two_communicators(driver: Driver, job: Job, comm: Comm, stream: int) -> int:
    """Ranks that call two communicators in different orders, with one hardware queue: nobody can go on."""
    part = comm.split(0, 0)
    side = driver.stream()
    value = driver.allocate(8)
    order = [(comm, stream), (part, side)]
    for each, own in order if job.rank else reversed(order):
        each.call("ncclAllReduce", value, value, 1, "int64", SUM, own)
    codes = [refused(driver.synchronize, own) for own in (stream, side)]
    part.destroy()
    return max(codes)


@pytest.mark.parametrize(("queues", "code"), [(1, TIMED_OUT), (2, 0)])
def test_wrong_orders_hang_where_streams_share_a_queue(joined: Callable[..., Any], queues: int, code: int) -> None:
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": str(queues), "GPU_MAX_HW_QUEUES": str(queues)}
    assert joined(two_communicators, ranks=2, timeout=1, env=env) == [code, code]


def launched_late(driver: Driver, job: Job, comm: Comm, stream: int) -> None:
    """A communicator that does not block: the call returns before the kernel is on the stream."""
    value = upload(driver, np.ones(1, np.int64))
    code = code_of(comm.call, "ncclAllReduce", value, value, 1, "int64", SUM, stream)
    assert (code, driver.idle(stream)) == (IN_PROGRESS, True)
    assert code_of(comm.call, "ncclAllReduce", value, value, 1, "int64", SUM, stream) == INVALID_ARGUMENT
    assert settle(comm) == 0
    driver.synchronize(stream)
    assert download(driver, value, np.empty(1, np.int64))[0] == SIZE


def test_communicators_that_do_not_block(joined: Callable[..., Any]) -> None:
    joined(launched_late, blocking=False)


# How they fail.


def mismatched(driver: Driver, job: Job, comm: Comm, stream: int) -> int:
    value = driver.allocate(64)
    comm.call("ncclAllReduce", value, value, 1 + job.rank, "int64", SUM, stream)
    return refused(driver.synchronize, stream)


def test_ranks_that_differ_are_told(joined: Callable[..., Any]) -> None:
    assert joined(mismatched, ranks=2) == [LAUNCH_FAILED] * 2


def out_of_bounds(driver: Driver, job: Job, comm: Comm, stream: int) -> int:
    value = driver.allocate(64)
    comm.call("ncclAllReduce", value, value, 9, "int64", SUM, stream)
    return refused(driver.synchronize, stream)


def test_collectives_stay_inside_allocations(joined: Callable[..., Any]) -> None:
    assert joined(out_of_bounds, ranks=2) == [700, 700]


def aborted(driver: Driver, job: Job, comm: Comm, stream: int) -> tuple[int, float]:
    """Rank 0 waits for a peer that does not come, and aborts; its stream is free again."""
    value = driver.allocate(8)
    start = time.monotonic()
    if job.rank == 0:
        comm.call("ncclAllReduce", value, value, 1, "int64", SUM, stream)
        time.sleep(0.1)
        assert not driver.idle(stream)
        comm.abort()
    return refused(driver.synchronize, stream), time.monotonic() - start


def test_abort_ends_what_waits(joined: Callable[..., Any]) -> None:
    (code, seconds), (other, _) = joined(aborted, ranks=2, timeout=20)
    assert (code, other) == (0, 0)
    assert seconds < 5


def link_broken(driver: Driver, job: Job, comm: Comm, stream: int) -> tuple[int, int]:
    """What a test made fail: the kernel stays, the communicator says so, an abort frees the stream."""
    value = driver.allocate(8)
    comm.call("ncclAllReduce", value, value, 1, "int64", SUM, stream)
    state = wait_until(comm.state)
    assert not driver.idle(stream)
    code = code_of(comm.call, "ncclAllReduce", value, value, 1, "int64", SUM, stream)
    comm.abort()
    driver.synchronize(stream)
    return state, code


def test_asynchronous_errors_are_injected(joined: Callable[..., Any]) -> None:
    assert joined(link_broken, ranks=2, fail="ncclAllReduce:1:late6", timeout=20) == [(6, 6)] * 2


def refusals(driver: Driver, job: Job, comm: Comm, stream: int) -> list[int]:
    value = driver.allocate(8)
    return [
        code_of(comm.call, "ncclAllReduce", value, value, 1, "int64", 17, stream),
        code_of(comm.call, "ncclBroadcast", value, value, 1, "int64", 2, stream),
        code_of(comm.call, "ncclSend", value, 1, "int64", 2, stream),
        code_of(comm.library.call, "ncclGroupEnd"),
    ]


def test_wrong_arguments_are_refused(joined: Callable[..., Any]) -> None:
    assert joined(refusals, ranks=2) == [[INVALID_ARGUMENT] * 3 + [INVALID_USAGE]] * 2


def init_code(driver: Driver, job: Job, vendor: str, identity: bytes, size: int) -> int:
    return code_of(Comm, Library(vendor), size, job.rank, identity)


def test_two_ranks_on_one_device_are_refused(vendor: str) -> None:
    with Ranks(2, fakes.environment(vendor), join=False) as ranks:
        ranks.start(call, vendor, unique_id, 0, (vendor,), only=[0])
        [identity] = finish(ranks, [0])
        assert ranks.run(call, vendor, init_code, 0, (vendor, identity, 2)) == [INVALID_USAGE] * 2


def init_aborted(driver: Driver, job: Job, vendor: str) -> int:
    """The other rank never comes: a communicator that does not block is aborted while it waits."""
    library = Library(vendor)
    comm = Comm(library, 2, 0, library.unique_id(), blocking=False)
    time.sleep(0.05)
    assert comm.state() == IN_PROGRESS
    comm.abort()
    return code_of(comm.state)


def test_an_init_is_aborted(vendor: str) -> None:
    with Ranks(1, fakes.environment(vendor, timeout=20), join=False) as ranks:
        assert ranks.run(call, vendor, init_aborted, 0, (vendor,), timeout=10) == [INVALID_ARGUMENT]
