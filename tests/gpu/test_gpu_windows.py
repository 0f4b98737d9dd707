"""One-sided messages of GPUs' memory, of both vendors and beside the host's: pieces, streams, caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gpu_kinds import Own, device_of, has_gpu
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Ranks, wait_until
from scattered import PART, pieces
from thorough import parametrize

import hetcoll
from hetcoll import (
    CollectiveTimeoutError,
)
from hetcoll.gpu.array import DeviceArray
from hetcoll.gpu.copies import _STAGED
from hetcoll.serving import CacheLayout, Handoff

LINKS: dict[str, dict[str, Any]] = {
    "shm": {},
    "tcp": {"HETCOLL_TRANSPORT": "tcp"},
    "hosts": {"HETCOLL_HOST_ID": ("a", "b", "c")},
}
FOUND_WITHIN = 8.0  # seconds
Start = Callable[..., Ranks]


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
@parametrize("kinds", ["nac", "aca", "nn", "nc"], first=1)
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
@parametrize("kinds", ["na", "nc", "ca", "nn", "cn", "ac"], first=2)
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
    """`src` is what the stream's work before the call makes of it, and `dst` is written after what writes it there."""
    n, device, peer = 1_000_003, device_of(comm), 1 - comm.rank
    mine = DeviceArray.of(device, np.zeros(n, np.int32))
    old, src, seen = (DeviceArray.of(device, np.full(n, 1, np.int32)) for _ in range(3))
    stream = device.stream()
    with comm.window(mine) as window:
        for turn in range(1, 6):
            new = DeviceArray.of(device, np.full(n, turn + 1, np.int32))
            for array in (old, new):
                device.copy(src.ptr, array.ptr, src.nbytes, stream)
            work = window.put(src, peer, signal=0, stream=stream, async_op=True)
            window.wait_signal(0, turn, stream=stream)
            device.copy(seen.ptr, mine.ptr, seen.nbytes, stream)  # what came
            work.wait()
            device.copy(src.ptr, old.ptr, src.nbytes, stream)
            window.get(src, peer, stream=stream)
            assert (src.get() == turn + 1).all(), "what was got is not there, or was written over"
            device.synchronize(stream)
            assert (seen.get() == turn + 1).all(), "the stream did not wait for the data"
            comm.barrier()
    device.destroy_stream(stream)


@pytest.mark.parametrize("jitter", ["1:3000", "2:500"])
@parametrize("kinds", ["na", "nn", "aa"], first=1)
def test_the_order_of_streams(placed: Start, kinds: str, jitter: str) -> None:
    placed(kinds, jitter=jitter).run(in_order)


def wait_on_streams(comm: hetcoll.Communicator) -> None:
    """Before the signal, and after it; of several signals and streams."""
    device = device_of(comm)
    mine = DeviceArray.of(device, np.zeros(4, np.int32))
    one, two = device.stream(), device.stream()
    with comm.window(mine, signals=3) as window:
        src = DeviceArray.of(device, np.ones(4, np.int32))
        if comm.rank == 0:
            window.wait_signal(1, 0, stream=one)
            device.synchronize(one)
            works = [window.wait_signal(2, 2, stream=stream) for stream in (one, two)]
            ends = [device.event(), device.event()]
            for end, stream in zip(ends, (one, two), strict=True):
                device.record(end, stream)
            assert not any(device.query(end) for end in ends)
            comm.barrier()
            window.wait_signal(2, 1)
            assert not any(device.query(end) for end in ends)
            assert not any(work.done for work in works)
            with pytest.raises(CollectiveTimeoutError, match=r"wait_signal\(2, 2\) is not over"):
                works[0].wait(0.05)
            comm.barrier()
            for stream, work in zip((one, two), works, strict=True):
                device.synchronize(stream)
                work.wait()
            window.wait_signal(2, 2, stream=one).wait()
            device.synchronize(one)
            for end in ends:
                device.destroy_event(end)
        else:
            for _ in range(2):
                comm.barrier()
                window.put(src, 0, signal=2)
        comm.barrier()
    for stream in (one, two):
        device.destroy_stream(stream)


@pytest.mark.parametrize(("kinds", "waits"), [("nn", 1), ("an", 1), ("nn", 0), ("aa", 0)])
def test_streams_wait_for_signals(placed: Start, kinds: str, waits: int) -> None:
    """`waits` 0: kernels do it, where streams cannot."""
    placed(kinds, stream_waits=waits).run(wait_on_streams)


def wait_in_many_windows(comm: hetcoll.Communicator) -> None:
    """Words that streams wait for are the next window's, when no stream waits for them any more."""
    device = device_of(comm)
    mine, stream, held = DeviceArray.of(device, np.zeros(4, np.int32)), device.stream(), []
    for turn in range(4):
        with comm.window(mine, signals=3) as window:
            comm.barrier()
            window.put(mine, 1 - comm.rank, signal=turn % 3)
            window.wait_signal(turn % 3, 1, stream=stream).wait()
            device.synchronize(stream)
            window.wait_signal(2, 100, stream=stream)  # in vain: it goes on when the window is closed
            assert window.signal(turn % 3) == 1
        device.synchronize(stream)
        held.append(comm.memory()["pinned"])
        comm.barrier()
    assert held == held[:1] * 4
    device.destroy_stream(stream)


@pytest.mark.parametrize("kinds", ["nn", "aa"])
def test_windows_leave_no_pinned_memory(placed: Start, kinds: str) -> None:
    placed(kinds).run(wait_in_many_windows)


def behind_a_stream(comm: hetcoll.Communicator) -> None:
    """A put whose stream is not there yet does not end in time, stays in flight, and holds up nobody else's."""
    device, peer = device_of(comm), 1 - comm.rank
    mine = DeviceArray.of(device, np.zeros(4, np.int32))
    stream = device.stream()
    with comm.window(mine, signals=3) as window:
        src = DeviceArray.of(device, np.full(4, comm.rank, np.int32))
        window.wait_signal(1, stream=stream)
        with pytest.raises(CollectiveTimeoutError, match="not sent yet, since the stream is not there yet"):
            window.put(src, peer, signal=0, stream=stream, timeout=0.1)
        assert window.signal(0) == 0
        comm.barrier()
        window.put(src, comm.rank, signal=2)
        window.wait_signal(2)
        comm.barrier()  # both have put into their own windows, before what waits for the streams comes there
        if comm.rank == 0:  # one after the other: puts of a rank to another are done in their order
            window.put(np.zeros(0, np.int32), comm.rank, signal=1)
            window.put(np.zeros(0, np.int32), peer, signal=1)
        window.wait_signal(0)
        device.synchronize(stream)
        comm.barrier()
        assert (mine.get() == peer).all()
        comm.barrier()
    device.destroy_stream(stream)


@pytest.mark.parametrize("kinds", ["nn", "an"])
def test_a_stream_that_is_late(placed: Start, kinds: str) -> None:
    placed(kinds).run(behind_a_stream)


SIZES_OF = {"layers": 2, "blocks": 8, "block_tokens": 16, "heads": 4, "head_dim": 8}


def hand_off(comm: hetcoll.Communicator) -> None:
    """Two ranks that prefill, with half of the heads each, to one that decodes, which waits on a stream."""
    src, dst = CacheLayout(**SIZES_OF, ranks=2), CacheLayout(**SIZES_OF)
    sends = comm.rank < 2
    cache = Own(comm, np.full(src.shape if sends else dst.shape, comm.rank, np.float32))
    with Handoff(comm, cache.array, src, dst, senders=[0, 1], receivers=[2]) as handoff:
        if sends:
            with handoff.send(0) as sending:
                for layer in range(2):
                    if has_gpu(comm):
                        device = device_of(comm)
                        stream = device.stream()
                        values = DeviceArray.of(device, np.full(src.shape, 10 + comm.rank, np.float32))
                        device.copy(cache.array.ptr, values.ptr, values.nbytes, stream)
                        assert sending.layer(layer, [1, 2], [6, 4], stream=stream)
                    else:
                        cache.array[:] = 10 + comm.rank
                        assert sending.layer(layer, [1, 2], [6, 4])
        else:
            receiving = handoff.receive(0)
            for layer in range(2):
                if has_gpu(comm):
                    stream = device_of(comm).stream()
                    receiving.wait(layer, stream=stream)
                    device_of(comm).synchronize(stream)
                    assert receiving.arrived(layer)
                else:
                    receiving.wait(layer)
                got = cache.get()
                assert (got[layer][:, [6, 4], :, :2] == 10).all()
                assert (got[layer][:, [6, 4], :, 2:] == 11).all()
                assert (got[layer][:, [0, 1, 2, 3, 5, 7]] == 2).all()
            receiving.close()
        comm.barrier()


@pytest.mark.parametrize("kinds", ["nnn", "nac", "can"])
def test_caches_change_hands(placed: Start, kinds: str) -> None:
    placed(kinds).run(hand_off)
