"""Collectives that copy engines pull out of other GPUs' windows, in any order with those that take slots."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakes
import numpy as np
import pytest
from device_checks import Capture
from dlpack_arrays import Quick
from gpu_calls import Called, device_of_rank
from gpu_kinds import VENDOR, device_of, start
from losing import await_stopped
from on_gpu import KINDS
from patience import PATIENCE
from ranks import Ranks, wait_until
from thorough import parametrize
from verdicts import check_lost

import hetcoll
from hetcoll import CollectiveMismatchError, CollectiveTimeoutError, CommunicationError
from hetcoll.gpu.array import DeviceArray
from hetcoll.types import DType

DIRECT = "direct,alltoall:pairwise"
LENGTH = 40_000  # int32s of a window
FOUND_WITHIN = 8.0 * PATIENCE  # seconds
Start = Callable[..., Ranks]
Model = list[np.ndarray[Any, Any]]  # by rank


def play(comm: hetcoll.Communicator, seed: int, calls: int) -> int:
    """Calls that follow from `seed`, whose results are the next ones' input, on two streams by turns, beside a model of
    all ranks' memory. Where the window begins in its memory differs by rank. Returns how many were pulled."""
    device, size, dice = device_of(comm), comm.size, random.Random(seed)
    windowed = [np.random.default_rng(rank).integers(0, 1 << 20, LENGTH, np.int32) for rank in range(size)]
    others = [np.zeros(LENGTH, np.int32) for _ in range(size)]
    first = 64 * comm.rank  # elements
    whole, apart = DeviceArray(device, first + LENGTH, "int32"), DeviceArray.of(device, others[0])
    whole.set(np.concatenate([np.zeros(first, np.int32), windowed[comm.rank]]))
    mine = whole.buffer(first)
    pulled, streams = 0, [device.stream() for _ in range(2)]
    with comm.window(mine):
        for turn in range(calls):
            kind = dice.choice(["gather", "gather there", "gather parts", "exchange", "exchange there", "spread"])
            slots = dice.random() < 0.3
            n, at = dice.randrange(1, LENGTH // (2 * size)), dice.randrange(LENGTH // 2)
            here, model = (apart.buffer, others) if slots else (lambda a, k: whole.buffer(first + a, k), windowed)
            there, results = apart.buffer, others
            how = {"stream": streams[turn % 2], "async_op": dice.random() < 0.5}
            if slots:
                there, results = (lambda a, k: whole.buffer(first + a, k)), windowed
            pulled += not slots
            if kind == "gather":
                comm.allgather(here(at, n), there(0, n * size), **how)
                found = np.concatenate([each[at : at + n] for each in model])
                for each in results:
                    each[: n * size] = found
            elif kind == "gather there":
                comm.allgather(here(at + comm.rank * n, n), here(at, n * size), **how)
                gather(model, at, [n] * size)
            elif kind == "gather parts":
                counts = [n + 7 * rank for rank in range(size)]
                at //= 2
                comm.allgatherv(
                    here(at + sum(counts[: comm.rank]), counts[comm.rank]), here(at, sum(counts)), counts, **how
                )
                gather(model, at, counts)
            elif kind == "spread":
                root = dice.randrange(size)
                comm.broadcast(here(at, n), root, **how)
                for each in model:
                    each[at : at + n] = model[root][at : at + n]
            else:
                inside = kind == "exchange there"
                comm.alltoall(here(at, n * size), (here if inside else there)(at, n * size), **how)
                blocks = [each[at : at + n * size].reshape(size, n).copy() for each in model]
                for rank, each in enumerate(model if inside else results):
                    each[at : at + n * size] = np.concatenate([block[rank] for block in blocks])
            if dice.random() < 0.2:
                comm.allreduce(apart.buffer(0, n), op="max", stream=streams[turn % 2])
                top = np.maximum.reduce([each[:n] for each in others])
                for each in others:
                    each[:n] = top
        device.synchronize()
        assert (whole.get()[first:] == windowed[comm.rank]).all()
        assert (whole.get()[:first] == 0).all(), "what lies before the window was written"
        assert (apart.get() == others[comm.rank]).all()
    for stream in streams:
        device.destroy_stream(stream)
    return pulled


def gather(model: Model, at: int, counts: list[int]) -> None:
    begins = np.cumsum([0, *counts])
    found = np.concatenate([each[at + a : at + b] for each, a, b in zip(model, begins[:-1], begins[1:], strict=True)])
    for each in model:
        each[at : at + len(found)] = found


@parametrize(("kinds", "queues"), [("nn", 1), ("aaa", 4), ("nnnn", 2), ("aa", 1)], first=2)
def test_any_order_of_calls(whole: Start, kinds: str, queues: int) -> None:
    few = {"CUDA_DEVICE_MAX_CONNECTIONS": str(queues), "GPU_MAX_HW_QUEUES": str(queues)}
    ranks = whole(kinds, HETCOLL_ALGO=DIRECT, jitter=f"{queues}:50", **few)
    for seed in (1, 2):
        assert min(ranks.run(play, seed, 60, timeout=100)) > 30


def driver_calls(comm: hetcoll.Communicator, log: str) -> list[tuple[int, int]]:
    """Copies of this rank, and whatever else takes multiprocessors, in calls that the fast path knew before there was a
    window."""
    device, size, rank, n = device_of_rank(comm.rank), comm.size, comm.rank, 3000
    mine, apart = DeviceArray.of(device, np.zeros(2 * n, np.int32)), DeviceArray(device, 2 * n, "int32")
    place = KINDS[device.vendor], device.index
    Quick.streams[place] = 0

    def part(array: DeviceArray, at: int, count: int) -> Quick:
        return Quick(*place, DType.INT32, (count,), address=array.ptr + 4 * at)

    calls = [
        lambda: comm.allgather(part(mine, rank * n, n), part(mine, 0, 2 * n)),
        lambda: comm.allgather(part(mine, n, n), part(apart, 0, 2 * n)),
        lambda: comm.alltoall(part(mine, 0, 2 * n), part(apart, 0, 2 * n)),
        lambda: comm.broadcast(part(mine, 0, n), 1),
    ]

    called = Called(log)

    def take(call: Callable[[], hetcoll.Work]) -> tuple[int, int]:
        called.since()
        call().wait(60)
        later = [name for name in called.since() if "AsyncError" not in name]
        return sum("Memcpy" in name for name in later), sum("Launch" in name or "nccl" in name for name in later)

    for call in calls * 2:
        call()
    device.synchronize()
    with comm.window(mine):
        found = [take(call) for call in calls * 2]
        told = [comm.explain(op, 1 << 20).gpus for op in ("allgather", "alltoall", "broadcast", "scatter")]
        assert all("lies in window 0, at one offset on all ranks, is pulled out of there" in each for each in told[:3])
        assert "out of no window: only allgather:direct, " in told[3]
    assert comm.explain("allgather", 1 << 20).gpus.endswith("out of no window: none is open that all GPUs see")
    assert found[: len(calls)] == found[len(calls) :]
    assert size == 2
    return found[: len(calls)]


@pytest.mark.fakes
@pytest.mark.parametrize("kinds", ["nn", "aa"])
def test_what_is_pulled_is_one_copy_for_each_peer_and_one_of_what_is_not_in_place(kinds: str, tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    env = fakes.environments([VENDOR[kind] for kind in kinds], len(kinds), log=log)
    with Ranks(len(kinds), {**env, "HETCOLL_ALGO": DIRECT}, tidy=False) as ranks:  # the log stays open
        here, there = ranks.run(driver_calls, log, timeout=100)
    assert here == [(1, 0), (2, 0), (2, 0), (1, 0)]
    assert there == [(1, 0), (2, 0), (2, 0), (0, 0)]


def differ(comm: hetcoll.Communicator, how: str) -> str:
    """Rank 1 keeps what it gives elsewhere, or does not call at all."""
    device, n = device_of(comm), 1000
    data = np.arange(4 * n, dtype=np.int32)
    mine, apart = DeviceArray.of(device, data), DeviceArray.of(device, data)
    with comm.window(mine) as window:
        comm.allgather(mine.buffer(comm.rank * n, n), mine.buffer(0, 2 * n)).wait(60)
        mine.set(data)
        comm.barrier()
        at, place = (4 if how == "at another byte" else 0) * comm.rank, mine
        if how == "in no window" and comm.rank == 1:
            place = apart
        if how == "not" and comm.rank == 1:
            wait_until(lambda: comm.error, FOUND_WITHIN)
        with pytest.raises(CommunicationError) as caught:  # noqa: PT012 (it may be the wait that says so)
            send, recv = place.buffer(at + comm.rank * n, n), place.buffer(at, 2 * n)
            comm.allgather(send, recv, timeout=1.0).wait()
        device.synchronize()
        if how != "at another byte" or comm.rank == 1:  # what was not called was not written
            assert comm.rank == 0 or (mine.get() == data).all()
        assert isinstance(caught.value, CollectiveTimeoutError if how == "not" else CollectiveMismatchError)
        window.close()
    return str(caught.value)


@pytest.mark.fakes
@pytest.mark.parametrize("how", ["at another byte", "in no window", "not"])
def test_ranks_that_keep_it_elsewhere_are_told_and_nobody_writes_their_memory(how: str) -> None:
    with start("nn", HETCOLL_ALGO=DIRECT) as ranks:
        for text in ranks.run(differ, how, timeout=60):
            if how == "not":
                assert "allgather(int32, count=1000) did not finish in 1 s" in text
                continue
            assert "rank 0 called allgather(int32, count=1000) in place in window 0 at byte 0 " in text
            assert "in one window, at one offset, on all ranks, or in none on any" in text


def lose(comm: hetcoll.Communicator) -> None:
    """Rank 1 is killed in the middle of calls."""
    mine = DeviceArray.of(device_of(comm), np.zeros(3 << 18, np.uint8))
    with comm.window(mine):
        while True:
            comm.alltoall(mine.buffer(), DeviceArray(device_of(comm), 3 << 18, "uint8").buffer()).wait()
            print("moved", flush=True)
            if comm.rank == 1:
                time.sleep(60)


@parametrize("kinds", ["nnn", "aa"], first=1)
def test_a_peer_that_dies_is_named(placed: Start, kinds: str) -> None:
    ranks = placed(kinds, HETCOLL_ALGO=DIRECT)
    ranks.start(lose)
    wait_until(lambda: all("moved" in ranks.output(rank) for rank in range(len(kinds))), 60)
    asked = time.monotonic()
    ranks.kill(1)
    check_lost(ranks.finish(), 1, asked, FOUND_WITHIN)


def close_again(comm: hetcoll.Communicator) -> None:
    """A close that calls under way held up is made good by the next one, which waits for them, too."""
    window = comm.window(DeviceArray(device_of(comm), LENGTH, "int32"))
    comm.allreduce(DeviceArray(device_of(comm), 8, "int32")).wait(60)
    executor: Any = comm._core.gpus.executor
    assert window._number in executor.pulls._windows, "all see it"
    busy = [True, True, False]

    def end(seconds: float) -> None:
        if busy.pop(0):
            raise CollectiveTimeoutError("close: collectives still read the window")

    executor.pulls.__dict__["end"] = end
    for _ in range(2):
        with pytest.raises(CollectiveTimeoutError, match="still read the window"):
            window.close()
    window.close()
    assert not busy
    del executor.pulls.__dict__["end"]
    comm.barrier()


@pytest.mark.fakes
def test_a_close_that_gave_up_is_made_good() -> None:
    with start("nn", HETCOLL_ALGO=DIRECT) as ranks:
        ranks.run(close_again, timeout=60)


def close_early(comm: hetcoll.Communicator) -> None:
    """Rank 0 takes its window back while rank 1 has not yet made a call that reads it."""
    device, n = device_of(comm), 50_000
    mine, got = (DeviceArray.of(device, np.full(k * n, 1 + comm.rank, np.int32)) for k in (1, 2))
    window = comm.window(mine)
    comm.allgather(mine.buffer(), got.buffer()).wait(60)
    got.set(np.zeros(2 * n, np.int32))
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    work = comm.allgather(mine.buffer(), got.buffer(), async_op=True)
    print("called", flush=True)
    window.close()
    assert work.done
    mine.set(np.full(n, 7, np.int32))
    assert (got.get() == np.repeat([1, 2], n)).all()
    comm.allgather(mine.buffer(), got.buffer()).wait(60)  # through slots
    assert (got.get() == 7).all()


@pytest.mark.parametrize("kinds", ["nn"])
def test_a_window_is_given_back_when_nobody_reads_it(placed: Start, kinds: str) -> None:
    ranks = placed(kinds, HETCOLL_ALGO=DIRECT)
    ranks.start(close_early)
    wait_until(lambda: "called" in ranks.output(0), 60)
    await_stopped(ranks.pid(1))
    ranks.signal(1, signal.SIGCONT)
    for outcome in ranks.finish():
        assert outcome.error is None, outcome.trace


def replay(comm: hetcoll.Communicator) -> None:
    """A graph of calls in and out of place, replayed with other data, and other calls in between."""
    device, size, rank, n = device_of(comm), comm.size, comm.rank, 5000
    mine, got = (DeviceArray.of(device, np.zeros(size * n, np.int32)) for _ in range(2))
    stream = device.stream()
    with comm.window(mine):
        comm.allreduce(got.buffer(), stream=stream).wait(60)
        with Capture(device, stream) as captured:
            comm.allgather(mine.buffer(rank * n, n), mine.buffer(), stream=stream)
            comm.alltoall(mine.buffer(), got.buffer(), stream=stream)
            comm.alltoall(mine.buffer(), mine.buffer(), stream=stream)
        for turn in range(3):
            mine.set(np.full(size * n, 10 * turn + rank, np.int32))
            comm.barrier()
            captured.replay(stream)
            comm.broadcast(mine.buffer(0, n), size - 1, stream=stream)
            want = np.full(size * n, 10 * turn + rank)
            assert (got.get() == want).all()
            want[:n] = 10 * turn + size - 1
            assert (mine.get() == want).all()
        captured.close()
    device.destroy_stream(stream)


@parametrize("kinds", ["nn", "aaa"], first=1)
def test_graphs(whole: Start, kinds: str) -> None:
    whole(kinds, HETCOLL_ALGO=DIRECT).run(replay, timeout=60)
