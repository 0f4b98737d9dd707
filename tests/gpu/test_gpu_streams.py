"""Streams of GPUs: calls and messages on several, in any order, beside what users have on theirs."""

from __future__ import annotations

import gc
import struct
from contextlib import closing
from pathlib import Path
from typing import Any

import fakes
import numpy as np
import pytest
from gpu_calls import Called, device_of_rank, overlap
from gpu_places import REAL
from ranks import Ranks
from thorough import parametrize

import hetcoll
from hetcoll.errors import DeviceError
from hetcoll.gpu.array import DeviceArray
from hetcoll.types import DType, ReduceOp
from hetcoll.vendors.devices.kernels import reduce_name

TURNS = {0: ((1, 1), (1, 3)), 1: ((0, 2), (0, 0)), 2: ((1, 3), (1, 1)), 3: ((0, 0), (0, 2))}
"""What each rank calls: 1 and whom it sends to, or 0 and whom it receives from. In turn nobody could begin."""


def out_of_turn(comm: hetcoll.Communicator, own: bool, more: bool) -> None:
    """Messages larger than all slots, each on a stream of its `own` or all by ``async_op=True``, and an all-reduce
    while they wait; with `more`, receives that both ranks post ahead of their sends."""
    device, rank, count = device_of_rank(comm.rank), comm.rank, 1_700_003
    turns = (*TURNS[rank], *([(0, rank ^ 2), (1, rank ^ 2)] if more else []))
    arrays = [DeviceArray.of(device, np.full(count, rank if out else -1, np.int32)) for out, _ in turns]
    total = DeviceArray.of(device, np.full(70_001, 1 + rank, np.int32))
    streams = [device.stream() if own else 0 for _ in range(len(turns) + 1)]
    works = []
    for i, ((out, peer), array, stream) in enumerate(zip(turns, arrays, streams, strict=False)):
        if i == 1:
            works.append(comm.allreduce(total.buffer(), stream=streams[-1], async_op=True))
        call = comm.send if out else comm.recv
        works.append(call(array.buffer(), peer, stream=stream, async_op=not own))
    results, later = [*arrays, total], device.stream()
    copies = [DeviceArray(device, array.size, "int32") for array in results]
    works[-1].wait_stream(later)  # for all that was enqueued, whatever ran it
    for copy, array in zip(copies, results, strict=True):
        device.copy(copy.ptr, array.ptr, array.nbytes, later)
    for work in works:
        work.wait(60)
    device.synchronize(later)
    assert (total.get() == 10).all()
    for (out, peer), array in zip(turns, arrays, strict=True):
        assert (array.get() == (rank if out else peer)).all()
    assert all((copy.get() == array.get()).all() for copy, array in zip(copies, results, strict=True))


@parametrize("queues", ["8", "32"], first=1)  # a message that waits holds up what shares its hardware queue
@parametrize("own", [True, False], first=1)
@parametrize("islands", ["0,1|2,3", None], first=1)  # half of the messages are a library's, or none
def test_peers_that_are_late_hold_up_nobody_else(
    gpus: Any, islands: str | None, own: bool, queues: str, request: pytest.FixtureRequest
) -> None:
    ranks = gpus(4, islands, env={"CUDA_DEVICE_MAX_CONNECTIONS": queues}, timeout=20)
    if request.node.callspec.params["gpus"] == REAL:  # the driver waits for the device when it loads,
        ranks.run(first_sum)
        ranks.run(in_turn)  # and so may the library when it connects
    ranks.run(out_of_turn, own, queues == "32", timeout=100)


def own_streams(comm: hetcoll.Communicator, log: str) -> tuple[int, int]:
    """How many streams there are after sums by slots, and once a communicator is closed that something still holds."""

    def there() -> int:
        names = Called(log).since()
        return names.count("cuStreamCreateWithPriority") - names.count("cuStreamDestroy")

    gc.disable()
    array = DeviceArray.of(device_of_rank(comm.rank), np.ones(1_100_003, np.float32))
    part = comm.split(0)
    assert part is not None
    part.send(array.buffer(), 1) if comm.rank == 0 else part.recv(array.buffer(), 0)
    before = there()
    work = part.allreduce(array.buffer(), async_op=True)
    work.wait()
    part.close()
    return before, there()


@pytest.mark.fakes
def test_streams_are_made_as_they_are_used_and_go_with_the_communicator(tmp_path: Path) -> None:
    log = tmp_path / "log"
    env = {**fakes.environments(["cuda"] * 2, 2, log=log), "HETCOLL_ISLANDS": "0|1"}
    with closing(Ranks(2, env, tidy=False)) as ranks:  # the log stays open
        for before, after in ranks.run(own_streams, str(log)):
            assert before <= 2, "a message has the caller's stream"
            assert after == 0


def in_turn(comm: hetcoll.Communicator) -> None:
    """The messages of `out_of_turn`, one after another."""
    device = device_of_rank(comm.rank)
    array = DeviceArray.of(device, np.full(3, comm.rank, np.int32))
    for source, dest in ((0, 1), (2, 3), (0, 3), (2, 1), (0, 2), (2, 0), (1, 3), (3, 1)):
        if comm.rank == source:
            array.set(np.full(3, source, np.int32))
            comm.send(array.buffer(), dest)
        if comm.rank == dest:
            comm.recv(array.buffer(), source)
            assert (array.get() == source).all()


def first_sum(comm: hetcoll.Communicator, behind_messages: bool = False) -> None:
    """Of its type in these processes. `behind_messages`: of which each rank takes its peer's only later."""
    device, peer = device_of_rank(comm.rank), comm.rank ^ 1
    out, into = (DeviceArray.of(device, np.full(2_500_003, comm.rank, np.int32)) for _ in range(2))
    total = DeviceArray.of(device, np.full(70_001, 1 + comm.rank, np.int32))
    works = [comm.send(out.buffer(), peer, async_op=True)] if behind_messages else []
    works.append(comm.allreduce(total.buffer(), async_op=True))
    if behind_messages:
        works.append(comm.recv(into.buffer(), peer, async_op=True))
    for work in works:
        work.wait(60)
    assert (total.get() == comm.size * (comm.size + 1) // 2).all()
    assert (into.get() == (peer if behind_messages else comm.rank)).all()


def test_a_first_call_does_not_wait_for_messages_before_it(gpus: Any, tmp_path: Path) -> None:
    env = {"HETCOLL_CACHE": str(tmp_path / "kernels"), "HETCOLL_TIMEOUT": "20"}
    env["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"  # of eight queues a send that waits may share that of the all-reduce
    gpus(2, env=env).run(first_sum)  # compiles, and keeps what it has compiled
    gpus(2, env=env, strict=1).run(first_sum, True)  # other processes, whose driver waits when it loads


def loading_behind_messages(comm: hetcoll.Communicator) -> str:
    with pytest.raises(hetcoll.CollectiveTimeoutError) as caught:
        first_sum(comm, True)
    return str(caught.value)


def test_who_loads_kernels_behind_messages_says_so(gpus: Any, tmp_path: Path) -> None:
    env = {"HETCOLL_CACHE": str(tmp_path / "kernels"), "HETCOLL_TIMEOUT": "3"}  # empty, so nothing can be loaded ahead
    said = gpus(2, env=env, strict=1).run(loading_behind_messages)
    assert all("kernels of exchange_int32_sum" in text and "messages before it" in text for text in said)


def messages_alone(comm: hetcoll.Communicator) -> None:
    device, peer = device_of_rank(comm.rank), comm.rank ^ 1

    def no_compiler(_: Any) -> Any:
        raise DeviceError("NVRTC, which compiles kernels, cannot be used")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(device), "kernels", no_compiler)
        out, into = (DeviceArray.of(device, np.full(3, comm.rank, np.int32)) for _ in range(2))
        comm.sendrecv(out.buffer(), peer, into.buffer(), peer)
        assert (into.get() == peer).all()


def test_messages_need_no_compiler(gpus: Any, tmp_path: Path) -> None:
    gpus(2, env={"HETCOLL_CACHE": str(tmp_path / "kernels")}).run(messages_alone)


def test_order_on_streams(gpus: Any) -> None:
    gpus(2, jitter="3:200", timeout=120).run(overlap, timeout=200)


def messages_for_another_stream(comm: hetcoll.Communicator) -> None:
    """What is sent is there late; what comes is read on a stream that waits for the message alone."""
    device, count = device_of_rank(comm.rank), 2_500_003
    stream, later = device.stream(), device.stream()
    array, copy, scratch = (DeviceArray(device, count, "int32") for _ in range(3))
    for turn in range(4):
        sends = comm.rank == turn % 2
        value = DeviceArray.of(device, np.full(count, turn if sends else -1, np.int32))
        for _ in range(30):
            device.copy(scratch.ptr, value.ptr, value.nbytes, stream)
        device.copy(array.ptr, value.ptr, value.nbytes, stream)
        work = (comm.send if sends else comm.recv)(array.buffer(), 1 - comm.rank, stream=stream, async_op=True)
        work.wait_stream(later)
        device.copy(copy.ptr, array.ptr, array.nbytes, later)
        device.synchronize(later)
        assert (copy.get() == turn).all()
        work.wait(60)
    for each in (stream, later):
        device.destroy_stream(each)


@parametrize("islands", [None, ""], first=1)
def test_a_stream_waits_for_a_message(gpus: Any, islands: str | None) -> None:
    gpus(2, islands, jitter="3:200", timeout=120).run(messages_for_another_stream, timeout=100)


def beside_others(comm: hetcoll.Communicator) -> None:
    """Calls across islands, calls of the island's library and kernels that take long, on streams of their own; none of
    them waits for the host, and streams may share a hardware queue."""
    device = device_of_rank(comm.rank)
    device.activate()
    inner = comm.split(comm.rank // 2)
    assert inner is not None
    crossing, inside, user = streams = [device.stream() for _ in range(3)]
    n, few = 700_001, 4_000_000  # one warp adds the latter in some milliseconds
    a, b, c = (DeviceArray(device, size) for size in (n, n, few))
    add = device.kernels().function(reduce_name(DType.FLOAT32, ReduceOp.SUM))
    arguments = [struct.pack("P", c.ptr)] * 3 + [struct.pack("Q", few)]
    for call in (comm, inner):
        call.allreduce(a, stream=crossing)  # all is made and loaded before anything is under way
    device.synchronize()
    a.set(np.full(n, 1 + comm.rank, np.float32))
    b.set(np.full(n, 1 + comm.rank, np.float32))
    c.set(np.full(few, 1, np.float32))
    works = []
    for turn in range(4):
        device.launch(add, 1, 32, arguments, user)
        works.append(comm.allreduce(a, stream=crossing))
        works.append(inner.allreduce(b, stream=inside, async_op=turn % 2 == 1))
        if turn % 2 == 1:
            works[-1].wait_stream(inside)
    for work in works:
        work.wait(60)
    device.synchronize()
    assert (a.get() == 10 * comm.size**3).all()
    island = [r for r in range(comm.size) if r // 2 == comm.rank // 2]
    assert (b.get() == sum(1 + r for r in island) * len(island) ** 3).all()
    assert (c.get() == 2**4).all()
    inner.close()
    for stream in streams:
        device.destroy_stream(stream)


@parametrize("queues", ["1", "2"], first=0)
def test_beside_kernels_and_libraries_of_the_user(gpus: Any, queues: str) -> None:
    ranks = gpus(4, "0,1|2,3", env={"CUDA_DEVICE_MAX_CONNECTIONS": queues}, jitter="7:100", timeout=120)
    ranks.run(beside_others, timeout=100)
