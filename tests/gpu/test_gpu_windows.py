"""One-sided messages of GPUs' memory, of both vendors and beside the host's: pieces, streams, and what goes wrong."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from device_checks import Capture
from gpu_kinds import Own, device_of, has_gpu, start
from gpu_places import PLACES, STAND_INS
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Ranks, close_all, kept, wait_until
from verdicts import check_lost

import hetcoll
from hetcoll import (
    AbortedError,
    ArgumentError,
    BufferTypeError,
    ClosedError,
    CollectiveTimeoutError,
    CommunicationError,
    DeviceError,
)
from hetcoll.gpu.array import DeviceArray
from hetcoll.gpu.copies import _STAGED
from hetcoll.serving import CacheLayout, Handoff

LINKS: dict[str, dict[str, Any]] = {
    "shm": {},
    "tcp": {"HETCOLL_TRANSPORT": "tcp"},
    "hosts": {"HETCOLL_HOST_ID": ("a", "b", "c")},
}
PART = 30_000  # elements of each rank's window that one rank writes
FOUND_WITHIN = 8.0  # seconds
Piece = tuple[int, int, int]  # in the source, in the part of the window, length
Start = Callable[..., Ranks]


@pytest.fixture(scope="module", params=PLACES)
def whole(request: pytest.FixtureRequest) -> Iterator[Start]:
    """`start`, for ranks that stay whole; "real" GPUs are NVIDIA's."""

    def begin(kinds: str, **more: Any) -> Ranks:
        words = {name: value[: len(kinds)] if isinstance(value, tuple) else value for name, value in more.items()}
        return start(kinds, place=request.param, **words)

    with kept(begin) as get:
        yield get


@pytest.fixture(params=PLACES)
def launch(request: pytest.FixtureRequest) -> Iterator[Start]:
    made: list[Ranks] = []

    def begin(kinds: str, **more: Any) -> Ranks:
        made.append(start(kinds, place=request.param, **more))
        return made[-1]

    yield begin
    close_all(made)


@st.composite
def pieces(draw: st.DrawFn) -> list[Piece]:
    """Some that touch, some that overlap, some empty."""
    found = []
    for _ in range(draw(st.integers(1, 12))):
        n = draw(st.sampled_from([0, 1, 3, 10, 11, 500, 9000]))
        found.append((draw(st.integers(0, PART - n)), draw(st.integers(0, PART - n)), n))
    return found


# Who, whose window, whether it waits, whether it uses its GPU, pieces.
CALLS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans(), st.booleans(), pieces()), min_size=1, max_size=8
)


def here(comm: hetcoll.Communicator, values: Any, on_gpu: bool) -> Any:
    """An array of this rank's, on its GPU where it has one and is asked to."""
    return DeviceArray.of(device_of(comm), values) if on_gpu and has_gpu(comm) else values.copy()


def values_of(array: Any) -> Any:
    return array.get() if isinstance(array, DeviceArray) else array


def put_and_get(comm: hetcoll.Communicator, calls: list[Any]) -> None:
    """What was put is also got back, by one request after the other, with nothing between them that waits."""
    made = vars(comm).setdefault("kept for test_gpu_windows", {})
    if not made:
        made["mine"] = Own(comm, np.zeros(PART * comm.size, np.int32))
        made["window"] = comm.window(made["mine"].array, signals=comm.size)
    window, mine = made["window"], made["mine"]
    zeros = np.zeros(PART * comm.size, np.int32)
    if has_gpu(comm):
        mine.array.set(zeros)
    else:
        mine.array[:] = zeros
    comm.barrier()
    works, model = [], {owner: zeros.copy() for owner in range(comm.size)}
    for number, (who, owner, waits, on_gpu, parts) in enumerate(calls):
        who, owner = who % comm.size, owner % comm.size
        data = np.random.default_rng(number).integers(1, 1 << 30, PART, np.int32)
        own, there, count = (np.array(column) for column in zip(*parts, strict=True))
        base = who * PART
        for a, b, n in parts:
            model[owner][base + b : base + b + n] = data[a : a + n]
        if who != comm.rank:
            continue
        src, got = here(comm, data, on_gpu), here(comm, np.zeros(PART, np.int32), not on_gpu)
        works.append(window.put(src, owner, base + there, src_offset=own, count=count, signal=who, async_op=not waits))
        works.append(window.get(got, owner, base, count=PART, async_op=True))
        works[-1].wait()
        assert (values_of(got) == model[owner][base : base + PART]).all(), "what was got is not what was put"
    for work in works:
        work.wait()
        assert work.done
        assert work.error is None
    for who in range(comm.size):
        arrived = sum(w % comm.size == who and owner % comm.size == comm.rank for w, owner, *_ in calls)
        made[who] = made.get(who, 0) + arrived
        window.wait_signal(who, made[who])
        assert window.signal(who) == made[who]
    assert (mine.get() == model[comm.rank]).all()
    comm.barrier()


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("kinds", ["nn", "nc", "nac", "aca"])
def test_random_pieces(whole: Start, kinds: str, link: str) -> None:
    ranks = whole(kinds, **LINKS[link])

    @settings(max_examples=8, deadline=None)
    @given(CALLS)
    def check(calls: list[Any]) -> None:
        ranks.run(put_and_get, calls)

    check()


SIZES = (1, 3, 4097, 262_145, 3 * _STAGED + 5)  # bytes; the last one is more than there is room for on the way


def sizes(comm: hetcoll.Communicator) -> None:
    """Pieces of all sizes in one call, and thousands of small ones, both ways; the owner is in no call meanwhile."""
    total, block, blocks = sum(SIZES), 1021, 3000
    mine = Own(comm, np.zeros(max(total, block * blocks), np.uint8))
    with comm.window(mine.array, signals=2) as window:
        before = comm.counters()
        for other in range(comm.size):
            if other == 0 or comm.rank == 0:
                continue
            peer = 0
            data = np.random.default_rng(1).integers(0, 256, mine.get().size, np.uint8)
            src, back = Own(comm, data), Own(comm, np.zeros_like(data))
            starts = np.concatenate([[0], np.cumsum(SIZES)[:-1]])
            window.put(src.array, peer, starts[::-1], src_offset=starts[::-1], count=SIZES[::-1], signal=0)
            window.get(back.array, peer, count=total)
            assert (back.get()[:total] == data[:total]).all()
            order, at = np.random.default_rng(2).permutation(blocks), np.arange(blocks) * block
            window.put(src.array, peer, order * block, src_offset=at, count=block, signal=0)
            window.get(back.array, peer, order * block, dst_offset=at, count=block)
            assert (back.get()[: block * blocks] == data[: block * blocks]).all()
            window.put(src.array, peer, count=0, signal=1)
            window.put(src.array, peer, 5, src_offset=7, count=1, signal=0)
        if comm.rank == 0:
            wait_until(lambda: window.signal(0) == 3 and window.signal(1) == 1, 60)
            found = comm.counters()
            assert found["window_pieces"] - before["window_pieces"] == len(SIZES) + 1 + 2 * blocks + 1
            assert 2 * _STAGED < comm.memory()["pinned"] < 3 * _STAGED or not has_gpu(comm)
        comm.barrier()


@pytest.mark.parametrize("link", ["shm", "tcp"])
@pytest.mark.parametrize("kinds", ["nn", "na", "nc", "cn", "ac", "ca"])
def test_sizes(whole: Start, kinds: str, link: str) -> None:
    whole(kinds, **LINKS[link]).run(sizes)


def many_to_one(comm: hetcoll.Communicator) -> None:
    """All others put at the same time, many puts in flight; rank 0 has all of it."""
    block, blocks = 5003, 40
    mine = Own(comm, np.zeros(comm.size * block * blocks, np.uint8))
    with comm.window(mine.array, signals=comm.size) as window:
        data = np.random.default_rng(comm.rank).integers(0, 256, block * blocks, np.uint8)
        src = Own(comm, data)
        works = [
            window.put(
                src.array, 0, (comm.rank * blocks + i) * block, src_offset=i * block, count=block, signal=comm.rank,
                async_op=True,
            )
            for i in range(blocks)
        ]  # fmt: skip
        for work in works:
            work.wait()
        if comm.rank == 0:
            for rank in range(comm.size):
                window.wait_signal(rank, blocks)
                want = np.random.default_rng(rank).integers(0, 256, block * blocks, np.uint8)
                assert (mine.get()[rank * block * blocks :][: block * blocks] == want).all()
        comm.barrier()


@pytest.mark.parametrize("kinds", ["nn", "nccc", "cnaca"])
def test_many_ranks_to_one(whole: Start, kinds: str) -> None:
    whole(kinds).run(many_to_one)


def in_order(comm: hetcoll.Communicator) -> None:
    """`src` is what the stream's work before the call makes of it, and `dst` is written after what reads it."""
    n, device = 2_000_003, device_of(comm)
    mine = DeviceArray.of(device, np.zeros(n, np.int32))
    with comm.window(mine, signals=comm.size) as window:
        stream, peer = device.stream(), 1 - comm.rank
        old, new = (DeviceArray.of(device, np.full(n, value, np.int32)) for value in (1, 2))
        src, seen = DeviceArray(device, n, "int32"), DeviceArray(device, n, "int32")
        for turn in range(5):
            for array in (old, new):  # the last one must be seen
                device.copy(src.ptr, array.ptr, src.nbytes, stream)
            work = window.put(src, peer, signal=0, stream=stream, async_op=True)
            window.wait_signal(0, turn + 1, stream=stream)
            device.copy(seen.ptr, mine.ptr, seen.nbytes, stream)  # what came
            device.copy(src.ptr, old.ptr, src.nbytes, device.stream()) if False else None
            work.wait()
            device.copy(src.ptr, old.ptr, src.nbytes, stream)
            device.copy(seen.ptr, src.ptr, 4, stream) if False else None
            window.get(src, peer, stream=stream)
            assert (src.get() == 2).all(), "what was got is not there when the call is over"
            device.synchronize(stream)
            assert (seen.get() == 2).all(), "the stream did not wait for the data"
            comm.barrier()
        device.destroy_stream(stream)


@pytest.mark.parametrize("jitter", ["1:3000", "2:500"])
@pytest.mark.parametrize("kinds", ["nn", "na", "aa"])
def test_the_order_of_streams(launch: Start, kinds: str, jitter: str) -> None:
    launch(kinds, jitter=jitter).run(in_order)
