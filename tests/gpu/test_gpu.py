"""Collectives and messages on device memory: what NumPy gives, on fake GPUs everywhere and on real ones."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import sys
import threading
import unittest.mock
import weakref
from pathlib import Path
from typing import Any

import fakes
import numpy as np
import pytest
from cases import run_case, truths
from device_checks import Capture
from dlpack_arrays import Quick
from gpu_calls import OTHERS, SOME, Called, cases_of, check, device_of_rank, exchange, run_on_gpu
from gpu_places import STAND_INS
from on_gpu import KINDS, Copies, OnGpu
from ranks import Ranks, close_all
from reference import Case
from thorough import parametrize

import hetcoll
from hetcoll.cli.on_device import Mirror, Stream
from hetcoll.errors import ArgumentError
from hetcoll.gpu.array import DeviceArray
from hetcoll.plan import one_kernel
from hetcoll.runtime import messages
from hetcoll.runtime.core import Core
from hetcoll.types import DType, ReduceOp, supports

ODD = (0, 1, 1009, 70_001)


@parametrize("size", [3, 2], first=1)
def test_every_collective(gpus: Any, size: int) -> None:
    check(gpus(size), list(cases_of(size, ODD)))


def by_library(comm: hetcoll.Communicator, cases: list[Case]) -> list[bytes]:
    """Also what one kernel does, but where it was bound before."""
    with unittest.mock.patch.multiple(one_kernel, SMALL_NEAR=0, MOST_NEAR=0):
        found = run_on_gpu(comm, cases)
        assert comm.explain("allreduce", 20).gpus.startswith("one call of ")
        return found


def test_an_island_of_two(gpus: Any) -> None:
    """All of it by the vendor's library, or short ones by one kernel."""
    cases = list(cases_of(2, (5, 70_001)))
    check(gpus(2, ""), cases, by_library)
    again = [case for case in cases if case.count < 10 or case.collective == "allreduce"]
    check(gpus(2, ""), [dataclasses.replace(case, count=case.count + 1) for case in again])


def run_again(comm: hetcoll.Communicator, cases: list[Case]) -> list[int]:
    """How many calls of each case go the slow path when it is run for the second time."""
    device = device_of_rank(comm.rank)
    stream = device.stream()
    on = OnGpu(comm, device, stream, quick=True)
    cases = [dataclasses.replace(case, op=sys.intern(case.op)) for case in cases]  # as in a program's text
    try:
        for case in cases:
            run_case(on, case)  # type: ignore[arg-type]
        found = []
        for case in cases:
            with unittest.mock.patch.object(Core, "launch", autospec=True, side_effect=Core.launch) as launch:
                run_case(on, case)  # type: ignore[arg-type]
            found.append(launch.call_count)
        return found
    finally:
        device.destroy_stream(stream)


@parametrize("islands", [None, "0,1|2"], first=1)
def test_what_was_called_before_takes_the_fast_path(gpus: Any, islands: str | None) -> None:
    again = [*cases_of(3, (1009,)), Case("allgather", count=140_001), Case("reduce_scatter", "int64", 70_001)]
    cases = [case for case in again if not (case.collective == "alltoall" and case.inplace)]  # another program: long
    for found in gpus(3, islands).run(run_again, cases, timeout=300):
        assert found == [0] * len(cases)


def benchmark_again(comm: hetcoll.Communicator) -> tuple[int, list[str]]:
    """Calls of the slow path, and Python functions, of a benchmark's calls and of a persistent operation's starts."""
    stream = Stream(device_of_rank(comm.rank))
    arrays = [np.full(8, comm.rank + 1.0, np.float32), np.zeros(8, np.float32), np.zeros(8 * comm.size, np.float32)]
    mirror = Mirror(stream, arrays)
    mirror.upload()
    x, out, every = map(mirror.buffer, arrays)
    handle = comm.allreduce(x, out)  # also the first call, on the same stream
    comm.allgather(x, every)
    op = comm.allreduce_init(x, out)
    frames: list[str] = []
    with unittest.mock.patch.object(Core, "launch", autospec=True, side_effect=Core.launch) as launch:
        sys.setprofile(lambda frame, event, _: frames.append(frame.f_code.co_name) if event == "call" else None)
        try:
            comm.allreduce(x, out)
            comm.allgather(x, every)
        finally:
            sys.setprofile(None)
        op.start()
        op.wait()
    handle.wait_stream()
    device = device_of_rank(comm.rank)
    made = comm.allgather(DeviceArray.of(device, np.full((2, 3), float(comm.rank))))
    assert made.device is device
    device.synchronize()
    assert (made.get() == np.arange(comm.size)[:, None, None] * np.ones((2, 3))).all()
    mirror.download()
    assert (arrays[1] == sum(range(1, comm.size + 1))).all()
    assert (arrays[2] == np.repeat(np.arange(1.0, comm.size + 1), 8)).all()
    return launch.call_count, frames


def test_the_benchmarks_memory_takes_the_fast_path(gpus: Any) -> None:
    for slow, frames in gpus(2).run(benchmark_again):
        assert slow == 0
        assert not [name for name in frames if name in ("allreduce", "allgather", "launch", "read_buffer")], frames


def messages_again(comm: hetcoll.Communicator) -> int:
    """How many messages go the slow path when each of these is sent for the second time."""
    device, other = device_of_rank(comm.rank), 1 - comm.rank
    Quick.streams[KINDS[device.vendor], device.index] = 0
    out, into = DeviceArray(device, 3000), DeviceArray(device, 3000)
    send, recv = (Quick(KINDS[device.vendor], device.index, shape=(3000,), address=a.ptr) for a in (out, into))
    with (
        unittest.mock.patch.object(messages, "one_way", side_effect=messages.one_way) as half,
        unittest.mock.patch.object(messages, "both_ways", side_effect=messages.both_ways) as both,
    ):
        for turn in range(2):
            calls = [
                lambda: comm.send(send, other) if comm.rank == 0 else comm.recv(recv, other),
                lambda: comm.recv(recv, other) if comm.rank == 0 else comm.send(send, other),
                lambda: comm.sendrecv(send, other, recv, other),
            ]
            for number, call in enumerate(calls):
                out.set(np.full(3000, 100 * turn + 10 * number + comm.rank, np.float32))
                into.set(np.zeros(3000, np.float32))
                call().wait()
                want = 0 if number == comm.rank else 100 * turn + 10 * number + other
                assert (into.get() == want).all(), (turn, number, into.get())
        return half.call_count + both.call_count


def wait_on_another_stream(comm: hetcoll.Communicator) -> list[int]:
    """The streams that the handle of a short call makes wait: the current one of the tensors' library, or one named."""
    from hetcoll.gpu.executor import GpuExecutor

    device = device_of_rank(comm.rank)
    place = KINDS[device.vendor], device.index
    memory, Quick.streams[place] = DeviceArray.of(device, np.ones(9, np.float32)), 0
    tensor = Quick(*place, shape=(9,), address=memory.ptr)
    for _ in range(2):
        work = comm.allreduce(tensor)
    Quick.streams[place] = device.stream()
    with unittest.mock.patch.object(GpuExecutor, "join", autospec=True) as join:
        work.wait_stream()
        work.wait_stream(77)
    work.wait()
    assert (memory.get() == comm.size**2).all()
    found = [call.args[1] for call in join.call_args_list]
    return [found[0] - Quick.streams[place], found[1]]


def test_the_handle_of_a_short_call_knows_its_library(gpus: Any) -> None:
    assert gpus(2).run(wait_on_another_stream) == [[0, 77]] * 2


def test_messages_take_the_fast_path_too(gpus: Any) -> None:
    assert gpus(2).run(messages_again) == [3, 3]  # the first of each


def look_at_what_is_current(comm: hetcoll.Communicator) -> None:
    """Beside a library of the process that works on another device."""
    from cuda.bindings import driver

    mine, other = device_of_rank(comm.rank), device_of_rank(comm.rank + 1)
    for fresh in (False, True):  # also where the first call sets everything up
        used = comm.split(0) if fresh else comm
        assert used is not None
        array = DeviceArray.of(mine, np.ones(300_000, np.float32))
        other.activate()
        for part in (5, 300_000):
            used.allreduce(array.buffer(0, part)).wait()
        assert int(driver.cuCtxGetCurrent()[1]) == other.context
        if fresh:
            used.close()
    mine.activate()


def test_calls_leave_the_current_device_as_it_was(gpus: Any) -> None:
    gpus(2).run(look_at_what_is_current)


def ask_for_a_stream_that_is_none(comm: hetcoll.Communicator) -> None:
    array, fresh = DeviceArray.of(device_of_rank(comm.rank), np.ones(5, np.float32)), comm.split(0)
    assert fresh is not None
    for used in (comm, fresh):  # one whose first call this is, too
        array.set(np.ones(5, np.float32))
        with pytest.raises(ArgumentError, match=r"stream: wanted one of cuda:[01]: cuStreamIsCapturing"):
            used.allreduce(array, stream=0x77777)
        used.allreduce(array).wait()
        assert (array.get() == comm.size).all()
    fresh.close()


@pytest.mark.parametrize(
    "gpus", [STAND_INS], indirect=True
)  # what a real driver does with such a handle, it does not say
def test_a_stream_that_is_none_is_refused(gpus: Any) -> None:
    gpus(2).run(ask_for_a_stream_that_is_none)


def close_and_look(comm: hetcoll.Communicator) -> bool:
    other = comm.split(0)
    assert other is not None
    array = DeviceArray.of(device_of_rank(comm.rank), np.ones(5, np.float32))
    other.allreduce(array).wait()
    path = weakref.ref(other._gpus.executor)  # type: ignore[arg-type]
    other.close()
    del other
    gc.collect()
    return path() is None


def test_a_closed_communicator_keeps_nothing(gpus: Any) -> None:
    assert all(gpus(2).run(close_and_look))


@pytest.mark.thorough
def test_messages_larger_than_all_slots(gpus: Any) -> None:
    count = (17 << 20) // 4 + 3
    kinds = [Case("allreduce", count=count, inplace=True, seed=1), Case("allgather", count=count, seed=2)]
    check(gpus(2), [*kinds, Case("alltoall", count=count, seed=3)])


@parametrize("dtype", [dtype.label for dtype in DType], first=0)
def test_every_type_with_every_reduction(gpus: Any, dtype: str) -> None:
    """As those of two vendors do it (`test_gpu_mixed.py`), whose kernels are the same."""
    ops = [op.label for op in ReduceOp if supports(DType[dtype.upper()], op)]
    check(gpus(2), [Case("allreduce", dtype, n, op, seed=n) for op in ops for n in (7, 40_001)])


@parametrize("types", [SOME, OTHERS], first=1, ids=["some", "others"])
def test_logical_reductions_give_truth_values_on_one_rank(gpus: Any, types: tuple[DType, ...]) -> None:
    labels = {dtype.label for dtype in types}
    check(gpus(1), [case for case in truths((1009,)) if case.dtype in labels])


def test_parts_of_unequal_size(gpus: Any) -> None:
    cases = []
    for turn, counts in enumerate([(0, 5, 1), (70_001, 0, 300_000), (3, 3, 3)]):
        cases.append(Case("allgatherv", "int16", counts=counts, seed=turn))
        cases.append(Case("reduce_scatterv", "float32", op="avg", counts=counts, seed=turn, inplace=turn == 1))
        cases.append(Case("alltoallv", "int32", 1 + 90_000 * turn, seed=turn))
    check(gpus(3), cases)


@parametrize("queues", ["1", "2"], first=0)
def test_streams_that_share_hardware_queues(gpus: Any, queues: str) -> None:
    ranks = gpus(3, env={"CUDA_DEVICE_MAX_CONNECTIONS": queues}, jitter=f"{queues}:100", timeout=120)
    check(ranks, [*cases_of(3, (1009, 200_001)), Case("allreduce", count=3_000_001), Case("alltoall", count=2_300_001)])


def copy_while_others_write(comm: hetcoll.Communicator) -> None:
    memory = np.zeros(512, np.uint8)
    ours = np.frombuffer(memory.data[128:384], np.uint8)  # all that NumPy may take for ours
    arrays = [ours[:0], ours[100:120], ours[180:]]
    with Copies(device_of_rank(comm.rank), arrays) as copies:
        places = [copies.buffer(array) for array in arrays]
        memory[:] = 7
        copies.fetch()
    assert [place.count for place in places] == [0, 20, 76]
    assert places[2].ptr - places[1].ptr == 80
    assert (memory[128:384] == 0).all()
    assert (memory[:128] == 7).all()
    assert (memory[384:] == 7).all()


def test_copies_stay_within_what_numpy_allocated(gpus: Any) -> None:
    """What lies around it is not ours, and may change between the copies to the device and back."""
    gpus(2).run(copy_while_others_write)


def test_messages(gpus: Any) -> None:
    gpus(3).run(exchange, timeout=200)


def cross_over(comm: hetcoll.Communicator) -> None:
    """Groups in which no rank's first message is another's first one: all are under way together, though slots hold
    none of them whole. Types differ, and two messages of a pair have different lengths."""
    device, rank, size = device_of_rank(comm.rank), comm.rank, comm.size
    dtypes = ("int32", "uint8", "float64")
    for count in (11, 4_000_003):

        def values(src: int, dst: int, k: int, count: int = count) -> Any:
            return (np.arange(count // (k + 1)) + 10 * src + dst + k).astype(dtypes[k])

        peers = [(rank + d) % size for d in range(1, size)]
        sent = {(p, k): DeviceArray.of(device, values(rank, p, k)) for p in peers for k in range(3)}
        got = {(p, k): DeviceArray(device, count // (k + 1), dtypes[k]) for p in peers for k in range(3)}
        with comm.group():
            for (peer, _), array in sent.items():
                comm.send(array.buffer(), peer)
            for (peer, _), array in got.items():
                comm.recv(array.buffer(), peer)
        for (peer, k), array in got.items():
            assert (array.get() == values(peer, rank, k)).all(), (peer, k)


@parametrize("islands", [None, ""], first=1)
def test_messages_of_a_group_cross_over(gpus: Any, islands: str | None) -> None:
    gpus(3, islands).run(cross_over, timeout=120)


@parametrize("islands", ["0,1,2|3", "0,1|2,3", "", "0|1|2,3", "0,2|1,3"], first=1)
def test_islands(gpus: Any, islands: str) -> None:
    check(gpus(4, islands, timeout=120), list(cases_of(4, (1, 70_001))))


def all_to_alls(comm: hetcoll.Communicator, log: str) -> list[int]:
    """How often an all-to-all calls the library, a group being one call: out of place, in place, in place on rank 0
    alone. None is a kernel's. Each twice, since the second is made of what the first compiled."""
    device, size, rank = device_of_rank(comm.rank), comm.size, comm.rank
    begin, found, called = 1_000_000, [], Called(log)

    def calls() -> int:
        """Since it was asked before."""
        depth = count = 0
        for name in called.since():
            if name in ("ncclGroupStart", "ncclGroupEnd", "ncclSend", "ncclRecv"):
                count += depth == 0
                depth += {"ncclGroupStart": 1, "ncclGroupEnd": -1}.get(name, 0)
        return count

    for count, inplace in itertools.product((1, 70_001), (False, True, rank == 0)):
        part = np.arange(count, dtype=np.int32)
        for _ in range(2):
            mine = DeviceArray.of(device, np.concatenate([part + begin * (10 * rank + r) for r in range(size)]))
            got = mine if inplace else DeviceArray(device, size * count, "int32")
            calls()
            with unittest.mock.patch.object(one_kernel, "MOST_NEAR", 0):
                comm.alltoall(mine.buffer(), got.buffer())
            found.append(calls())
            assert (got.get() == np.concatenate([part + begin * (10 * r + rank) for r in range(size)])).all()
    return found


@pytest.mark.fakes
def test_an_all_to_all_inside_an_island_is_one_group(tmp_path: Path) -> None:
    log, size = str(tmp_path / "log"), 3
    ranks = Ranks(size, fakes.environments(["cuda"] * size, size, log=log), tidy=False)  # the log stays open
    try:
        assert ranks.run(all_to_alls, log) == [[1] * 12] * size
    finally:
        close_all([ranks])


def test_islands_that_cannot_reduce_a_type(gpus: Any) -> None:
    """int16, bitwise operations: no vendor's library has them, so every rank is on its own."""
    cases = [Case("allreduce", "int16", 20_011), Case("reduce_scatter", "int32", 20_011, "bxor")]
    check(gpus(4, "0,1,2|3", timeout=120), [*cases, Case("allreduce", "bool", 20_011, "lor")])


@pytest.mark.thorough
def test_parts_of_unequal_size_over_islands(gpus: Any) -> None:
    cases = [Case("allgatherv", "int16", counts=(70_001, 0, 3, 5), seed=1)]
    cases.append(Case("reduce_scatterv", "float32", op="avg", counts=(3, 70_001, 0, 5), seed=2))
    cases.append(Case("alltoallv", "int32", 30_001, seed=3))
    for islands in ("", "0,1,2|3"):
        check(gpus(4, islands, timeout=120), cases)


@pytest.mark.thorough
def test_islands_on_shared_hardware_queues(gpus: Any) -> None:
    ranks = gpus(4, "0,1|2,3", env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, jitter="5:100", timeout=120)
    check(ranks, [Case("allreduce", count=3_000_001), Case("allgather", count=1_000_003)])


def capture(comm: hetcoll.Communicator) -> tuple[list[float], float]:
    """An all-reduce in a graph, three replays of it, one without a graph; and what a larger one in the graph gave."""
    device = device_of_rank(comm.rank)
    device.activate()
    stream = device.stream()
    values, large = (DeviceArray.of(device, np.full(n, comm.rank + 1.0)) for n in (100, 160_000))
    comm.allreduce(values, stream=stream)
    device.synchronize(stream)
    found = [float(values.get()[-1])]
    with Capture(device, stream) as captured:
        comm.allreduce(values, stream=stream)
        comm.allreduce(large, stream=stream)
        asker = threading.Thread(
            target=lambda: comm._gpus.executor.idle
        )  # as the watch does: it must not end the capture
        asker.start()
        asker.join()
    for _ in range(3):
        captured.replay(stream)
        device.synchronize(stream)
        found.append(float(values.get()[-1]))
    comm.allreduce(values, stream=stream).wait()
    found.append(float(values.get()[0]))
    captured.close()
    device.destroy_stream(stream)
    return found, float(large.get()[-1])


@parametrize("islands", [None, ""], first=1)
def test_calls_in_a_graph(gpus: Any, islands: str | None) -> None:
    for found, large in gpus(2, islands).run(capture):
        assert found == [3.0, 6.0, 12.0, 24.0, 48.0]
        assert large == 12.0
