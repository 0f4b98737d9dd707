"""One-sided messages of GPUs' memory and what goes wrong: streams that wait in vain, peers, copies, bad input."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from device_checks import Capture
from gpu_kinds import Own, device_of, has_gpu, start
from losing import await_stopped
from ranks import Ranks, wait_until
from verdicts import check_lost

import hetcoll
from hetcoll import (
    AbortedError,
    ArgumentError,
    BufferTypeError,
    ClosedError,
    CommunicationError,
    DeviceError,
)
from hetcoll.gpu.array import DeviceArray

FOUND_WITHIN = 8.0  # seconds
Start = Callable[..., Ranks]


def let_go(comm: hetcoll.Communicator, how: str) -> float:
    """A stream waits for what does not come any more."""
    if comm.rank == 1:
        window = comm.window(None)
        comm.barrier()
        if how == "abort":
            comm.abort("enough")
        time.sleep(60 if how == "die" else 0)
        return 0.0
    device = device_of(comm)
    window = comm.window(DeviceArray.of(device, np.zeros(4, np.int32)))
    stream = device.stream()
    work = window.wait_signal(0, 1, stream=stream)
    with contextlib.suppress(AbortedError):  # rank 1 may have passed it, and aborted, before this one has
        comm.barrier()
    print("waiting", flush=True)
    if how == "close":
        window.close()
    begun = time.monotonic()
    device.synchronize(stream)
    assert time.monotonic() - begun < FOUND_WITHIN
    wait_until(lambda: work.error is not None, FOUND_WITHIN)
    with pytest.raises(ClosedError if how == "close" else AbortedError if how == "abort" else CommunicationError):
        work.wait()
    device.destroy_stream(stream)
    if how != "close":
        window.wait_signal()  # raises
    return 0.0


@pytest.mark.parametrize("how", ["close", "abort", "die"])
@pytest.mark.parametrize("kinds", ["nn", "ac"])
def test_streams_that_wait_in_vain_go_on(placed: Start, kinds: str, how: str) -> None:
    ranks = placed(kinds, HETCOLL_TRANSPORT="tcp")
    ranks.start(let_go, how)
    wait_until(lambda: "waiting" in ranks.output(0), 60)
    asked = time.monotonic()
    if how == "die":
        ranks.kill(1)
        check_lost(ranks.finish(), 1, asked, FOUND_WITHIN)
    else:
        error = ranks.finish()[0].error
        assert isinstance(error, AbortedError) if how == "abort" else error is None, error


def lose(comm: hetcoll.Communicator, how: str) -> None:
    """Rank 1 is killed in the middle of puts or gets."""
    mine = Own(comm, np.zeros(1 << 22, np.uint8))
    window, src = comm.window(mine.array), Own(comm, np.ones(1 << 22, np.uint8))
    comm.barrier()
    while True:
        (window.put if how == "put" else window.get)(src.array, 1)
        print("moved", flush=True)
        if comm.rank == 1:
            time.sleep(60)


@pytest.mark.parametrize("how", ["put", "get"])
@pytest.mark.parametrize("kinds", ["nnc", "can"])
def test_a_peer_that_dies_is_named(placed: Start, kinds: str, how: str) -> None:
    ranks = placed(kinds)
    ranks.start(lose, how)
    wait_until(lambda: all("moved" in ranks.output(rank) for rank in (0, 1, 2)), 60)
    asked = time.monotonic()
    ranks.kill(1)
    check_lost(ranks.finish(), 1, asked, FOUND_WITHIN)


def put_on(window: Any, src: Any) -> None:
    for _ in range(10_000):
        at = np.arange(16) << 14
        window.put(src, 0, at, src_offset=at, count=1 << 14, signal=0)


def close_windows(comm: hetcoll.Communicator) -> None:
    """Rank 0 takes its memory back while rank 1 goes on putting into it and getting from it."""
    mine = Own(comm, np.zeros(1 << 18, np.uint8))
    window, other = comm.window(mine.array), comm.window(None)
    src = Own(comm, np.full(1 << 18, 7, np.uint8))
    if comm.rank == 0:
        window.wait_signal(0, 3)
        refused = comm.counters()["window_refused"]
        window.close()
        closed = mine.get()
        wait_until(lambda: comm.counters()["window_refused"] > refused, 60)
        assert (mine.get() == closed).all(), "a window was written after it was closed"
    else:
        got = [Own(comm, np.zeros(1 << 18, np.uint8)) for _ in range(40)]
        window.put(src.array, 0)
        works = [window.get(each.array, 0, async_op=True) for each in got]
        with pytest.raises(ClosedError, match="the window was closed"):
            put_on(window, src.array)
        for each, work in zip(got, works, strict=True):
            try:
                work.wait()
            except ClosedError:
                continue
            assert (each.get() == 7).all(), "what was got is not what was there"
    comm.barrier()
    other.close()


@pytest.mark.parametrize("kinds", ["nn", "ac", "ca"])
def test_closed_windows_are_not_touched(placed: Start, kinds: str) -> None:
    placed(kinds, jitter="1:200").run(close_windows)


def slow_reader(comm: hetcoll.Communicator) -> None:
    """Rank 0 closes its window while an answer that nobody reads yet is on its way: it has what was there."""
    n = 24 << 20
    data = np.random.default_rng(3).integers(0, 256, n, np.uint8)
    mine = DeviceArray.of(device_of(comm), data if comm.rank == 0 else np.zeros(1, np.uint8))
    with comm.window(mine) as window:
        if comm.rank == 1:
            got = np.zeros(n, np.uint8)
            work = window.get(got, 0, async_op=True)
            os.kill(os.getpid(), signal.SIGSTOP)
            try:
                work.wait()
            except ClosedError:
                return
            assert (got == data).all()
            return
        wait_until(lambda: comm.counters()["window_gets"] == 1, 60)
        window.close()
        mine.set(np.zeros(n, np.uint8))
        print("closed", flush=True)


@pytest.mark.parametrize("kinds", ["nn", "aa"])
def test_closing_under_an_answer(placed: Start, kinds: str) -> None:
    ranks = placed(kinds)
    ranks.start(slow_reader)
    wait_until(lambda: "closed" in ranks.output(0), 60)
    await_stopped(ranks.pid(1))
    ranks.signal(1, signal.SIGCONT)
    for outcome in ranks.finish():
        assert outcome.error is None, outcome.trace


def go_on_putting(comm: hetcoll.Communicator) -> None:
    mine = Own(comm, np.zeros(1 << 20, np.uint8))
    window = comm.window(mine.array)
    src = Own(comm, np.ones(1 << 20, np.uint8))
    while True:
        window.put(src.array, 1 - comm.rank)


@pytest.mark.fakes
@pytest.mark.parametrize("code", ["719", "late719"])
@pytest.mark.parametrize(("kinds", "name"), [("nc", "cuMemcpyAsync"), ("ac", "hipMemcpyAsync")])
def test_a_copy_that_fails(kinds: str, name: str, code: str) -> None:
    with start(kinds, fail=f"{name}:60:{code}") as ranks:  # behind all that come before the first put
        for outcome in ranks.outcomes(go_on_putting):
            assert isinstance(outcome.error, CommunicationError), outcome.trace
            assert "rank 0" in str(outcome.error)
            assert "cu" in str(outcome.error) or "hip" in str(outcome.error)


def no_room(comm: hetcoll.Communicator) -> str:
    mine = Own(comm, np.zeros(10, np.uint8))
    with pytest.raises(DeviceError, match=r"buf: that of rank 0 cannot be a window: DeviceError: .*Host") as caught:
        comm.window(mine.array)
    comm.barrier()
    if comm.rank == 0:
        with comm.window(mine.array) as window:  # there is room again
            window.put(mine.array, 0)
            comm.barrier()
    else:
        comm.window(None)
        comm.barrier()
    return str(caught.value)


@pytest.mark.fakes
@pytest.mark.parametrize(("kinds", "name"), [("nc", "cuMemHostAlloc"), ("ac", "hipHostMalloc")])
def test_no_memory_for_what_is_on_its_way(kinds: str, name: str) -> None:
    with start(kinds, fail=f"{name}:1:2") as ranks:
        assert len(set(ranks.run(no_room))) == 1


def bad_calls(comm: hetcoll.Communicator) -> None:
    device, n = device_of(comm), 64
    mine = DeviceArray.of(device, np.zeros(n, np.float32))
    stream, x = device.stream(), np.ones(n, np.float32)
    host_only = comm.window(np.zeros(n, np.float32))
    with pytest.raises(ArgumentError, match="stream: wanted a rank whose windows or puts had memory of its GPU"):
        host_only.wait_signal(stream=stream)
    with pytest.raises(ArgumentError, match="stream: wanted src on a GPU, got host memory"):
        host_only.put(x, 1, stream=stream)
    window = comm.window(mine)
    src = DeviceArray.of(device, x)
    with Capture(device, stream, "relaxed") as captured:
        for call in (
            lambda: window.put(src, 1, stream=stream),
            lambda: window.get(src, 1, stream=stream),
            lambda: window.wait_signal(stream=stream),
        ):
            with pytest.raises(ArgumentError, match=r"stream: .* captured into a graph, and no graph takes one-sided"):
                call()
    captured.close()
    other = DeviceArray.of(other_device(comm), x)
    with pytest.raises(BufferTypeError, match=r"src: wanted memory of \w+:\d, the GPU of this rank"):
        window.put(other, 1)
    with pytest.raises(ArgumentError, match="value: wanted 0 or more, below"):
        window.wait_signal(0, 1 << 62, stream=stream)
    with pytest.raises(BufferTypeError, match="src: wanted the window's dtype"):
        window.put(DeviceArray.of(device, np.ones(4)), 1)
    with pytest.raises(ArgumentError, match="is not inside src"):
        window.put(src, 1, count=n + 1)
    comm.barrier()
    assert (mine.get() == 0).all()
    host_only.put(src, 1 - comm.rank, signal=0)
    host_only.wait_signal(stream=stream).wait()
    device.synchronize(stream)
    comm.barrier()
    window.close()
    device.destroy_stream(stream)


def late_counts(comm: hetcoll.Communicator) -> str:
    """Bad input is the caller's alone; a count that a GPU says beyond its bound ends the communicator everywhere."""
    n, host_only, word = 64, comm.window(np.zeros(64, np.float32)), np.zeros(1, np.int64)
    x = np.ones(n, np.float32)
    with pytest.raises(ArgumentError, match=r"stream: wanted that of the GPU that fills src.*, got None"):
        host_only.put(x, 1, late=word)
    with pytest.raises(BufferTypeError, match="late: wanted one int64 in memory of the host, got 1 of float64 on cpu"):
        host_only.put(x, 1, late=np.zeros(1), stream=0)
    with pytest.raises(BufferTypeError, match="late: wanted one int64 at a multiple of 8 bytes"):
        host_only.put(x, 1, late=np.zeros(24, np.uint8)[4:12].view(np.int64), stream=0)
    with pytest.raises(ArgumentError, match="late: wanted one piece that is not empty, got 2"):
        host_only.put(x, 1, [0, 2], src_offset=[0, 2], count=1, late=word, stream=0)
    mine = Own(comm, np.zeros(n, np.float32))
    window = comm.window(mine.array, signals=2)
    if has_gpu(comm):
        src = DeviceArray.of(device_of(comm), x)
        for turn, source in enumerate((src, x)):
            word[0] = 5 + turn
            window.put(source, 1, 32 * turn, src_offset=32, late=word, signal=0, stream=0)
        comm.barrier()  # what fails next fails the other rank, too, which has seen these
        word[0] = 33
        with pytest.raises(CommunicationError) as caught:
            window.put(src, 1, 16, count=32, late=word, signal=1, stream=0)
    else:
        window.wait_signal(0, 2)
        assert [np.flatnonzero(half).tolist() for half in mine.array.reshape(2, 32)] == [[*range(5)], [*range(6)]]
        before = mine.array.copy()
        comm.barrier()
        with pytest.raises(CommunicationError) as caught:
            window.wait_signal(1)
        assert (mine.array == before).all()
    return str(caught.value)


@pytest.mark.parametrize("kinds", ["nc", "ac"])
def test_late_counts(placed: Start, kinds: str) -> None:
    for text in placed(kinds).run(late_counts):
        assert "a put to rank 1: its late count is 33, and 32 was the most" in text


def other_device(comm: hetcoll.Communicator) -> Any:
    from hetcoll.vendors.devices import cuda, hip

    mine = device_of(comm)
    return next(each for each in (cuda if mine.vendor == "cuda" else hip).devices() if each.index != mine.index)


@pytest.mark.parametrize("kinds", ["nn", "aa"])
def test_bad_input(placed: Start, kinds: str) -> None:
    placed(kinds).run(bad_calls)


def closing(comm: hetcoll.Communicator) -> tuple[int, int]:
    """Windows that are never closed, with copies in flight, streams and a Work that nobody waits for."""
    mine = Own(comm, np.zeros(1 << 22, np.uint8))
    window = comm.window(mine.array)
    for _ in range(3):
        window.put(mine.array, 1 - comm.rank, async_op=True)
    stream = device_of(comm).stream()
    window.wait_signal(0, 100, stream=stream)
    comm.barrier()
    comm.close()
    before = mine.get()
    device_of(comm).synchronize(stream)
    assert (mine.get() == before).all()
    window.close()
    return (0, 0)


@pytest.mark.parametrize("kinds", ["nn", "na"])
def test_close_gives_all_back(placed: Start, kinds: str) -> None:
    placed(kinds).run(closing)
