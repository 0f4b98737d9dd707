"""Steps of what is built on messages: experts, arrays that change their layout, caches that change hands, windows."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from blocks import random_layout, values
from expert_calls import HIDDEN, MOST, PER_RANK, TOPK, Case, check_with, check_with_few
from gpu_kinds import Own, device_of, has_gpu
from viewed_gpu import fetched, viewed

import hetcoll
from hetcoll.experts import Experts, LowLatencyExperts
from hetcoll.gpu.array import DeviceArray
from hetcoll.runtime.reshard import Item, reshard
from hetcoll.serving import CacheLayout, Handoff

_AXES = ("layer", "kv", "block", "token", "head", "dim")
_CACHE: dict[str, Any] = {"layers": 2, "blocks": 5, "block_tokens": 3, "heads": 4, "head_dim": 8}


@contextmanager
def closing_last(comm: hetcoll.Communicator) -> Iterator[None]:
    """A rank that hears of a failure closes its windows. Who puts there before it hears, too, is told the cause by its
    next call."""
    try:
        yield
    except hetcoll.ClosedError:
        comm.barrier()
        comm.barrier()
        raise


@contextmanager
def of_part(members: Sequence[int]) -> Iterator[None]:
    """Notes on errors that they are those of a part, and names ranks as the whole does."""
    try:
        yield
    except hetcoll.CommunicationError as error:
        error.add_note("in a part")
        if isinstance(error, hetcoll.PeerLostError):
            error.rank = members[error.rank]
        raise


def experts(comm: hetcoll.Communicator, few: bool, seed: int, dtype: str, fp8: bool, turns: int) -> None:
    """Any routing, ranks without tokens too. All dispatches of a turn end before the next one."""
    kind, check = (LowLatencyExperts, check_with_few) if few else (Experts, check_with)
    device = device_of(comm) if has_gpu(comm) else None
    with (
        closing_last(comm),
        kind(comm, PER_RANK * comm.size, HIDDEN, dtype, MOST, TOPK, fp8=fp8) as made,
    ):
        for turn in range(turns):
            rng = np.random.default_rng((seed, turn))
            ids = [
                rng.integers(-1, PER_RANK * comm.size, (int(rng.integers(0, MOST + 1)), TOPK)).tolist()
                for _ in range(comm.size)
            ]
            check(made, comm, Case(ids, int(rng.integers(1 << 30)) & ~1 | (seed & 1), bool(rng.integers(2))), device)
        comm.barrier()


def layouts(comm: hetcoll.Communicator, seed: int, arrays: int, into: bool) -> None:
    """From any layout to any, over ranks of which some hold nothing, and of which each may have a GPU."""
    rng, items, wanted = np.random.default_rng(seed), [], []
    for number in range(arrays):
        shape = tuple(map(int, rng.integers(0, rng.choice((5, 60)), rng.integers(0, 4))))
        source, target = (random_layout(rng, shape, comm.size) for _ in range(2))
        dtype = str(rng.choice(("int16", "float32", "float64")))
        held, right = (values(number, each, dtype).get(comm.rank, np.empty(0, dtype)) for each in (source, target))
        out = viewed(comm, np.zeros_like(right, order="C")) if into else None
        items.append((Item(viewed(comm, held), source, target, out), held))
        wanted.append(right)
    found = [fetched(each) for each in reshard(comm._core, lambda: [item for item, _ in items])]
    if comm.error is not None:  # then streams go on without the data, and the next call says why
        comm.barrier()
    for got, right in zip(found, wanted, strict=True):
        assert (got.dtype, got.shape, got.tobytes()) == (right.dtype, right.shape, right.tobytes())
    assert all(fetched(item.array).tobytes() == held.tobytes() for item, held in items), "a source was written"


def beyond(comm: hetcoll.Communicator, seed: int, most: int) -> None:
    """A GPU says that a put has more than its bound. That ends what is one-sided in a communicator of the same ranks:
    each of them is told the count, and nothing is written."""
    told = [rank.rank for rank in comm.topology.ranks if rank.wish in ("cuda", "hip")]
    part = comm.split(0)
    assert part is not None
    if not told:  # those who had one are gone
        part.close()
        return
    rng = np.random.default_rng(seed)
    who, peer = int(rng.choice(told)), int(rng.integers(comm.size))
    count = int(rng.choice((most + 1, most + int(rng.integers(2, 1 << 40)), -int(rng.integers(1, 1 << 40)))))
    stream = device_of(comm).stream() if comm.rank == who else None
    mine, src = Own(comm, np.zeros(most, np.float64)), Own(comm, np.ones(most))
    try:
        with of_part(range(comm.size)), part:
            with closing_last(part), part.window(mine.array, signals=1) as window:
                part.barrier()
                try:
                    if comm.rank == who:
                        window.put(src.array, peer, signal=0, late=np.array([count]), stream=stream)
                    else:
                        window.wait_signal(0)
                except hetcoll.CommunicationError as error:
                    said = f"a put to rank {peer}: its late count is {count}, and {most} was the most"
                    if type(error) is not hetcoll.CommunicationError or said not in str(error):
                        raise
                else:
                    raise AssertionError("a count that is too large was not refused")
            part.barrier()  # there is an end of what is one-sided alone
        assert (mine.get() == 0).all(), "something was put"
    finally:
        if stream is not None:
            device_of(comm).destroy_stream(stream)


def caches(
    comm: hetcoll.Communicator, senders: Sequence[int], receivers: Sequence[int], seed: int, given_up: bool
) -> None:
    """Requests one after another in one slot; or one that its receivers give up, of which nothing comes afterwards."""
    rng = np.random.default_rng(seed)
    sizes, alike = _CACHE | {"kv": int(rng.integers(1, 3))}, bool(rng.integers(2))
    orders = [(*map(str, rng.permutation(_AXES[:-1])), "dim") for _ in range(2)]
    src = CacheLayout(**sizes, ranks=len(senders), axes=orders[0])
    dst = CacheLayout(**sizes, ranks=len(receivers), axes=orders[0] if alike else orders[1])
    shape = [sizes[name] for name in ("layers", "kv", "blocks", "block_tokens", "heads", "head_dim")]
    source, target = (rng.integers(1, 1 << 30, shape, np.int32) for _ in range(2))

    def part(layout: CacheLayout, cache: Any, member: int) -> Any:
        heads = layout.heads_of(member)
        mine = cache[..., heads.start : heads.stop, :]
        return np.ascontiguousarray(mine.transpose([_AXES.index(axis) for axis in layout.axes]))

    sends, takes = comm.rank in senders, comm.rank in receivers
    own = None
    if sends:
        own = Own(comm, part(src, source, list(senders).index(comm.rank)))
    elif takes:
        own = Own(comm, part(dst, target, list(receivers).index(comm.rank)))
    requests = [rng.permutation(5)[:count].tolist() for count in (3, 1)], [rng.permutation(5)[:n] for n in (3, 1)]
    layers = range(_CACHE["layers"])
    with (
        closing_last(comm),
        Handoff(comm, None if own is None else own.array, src, dst, senders, receivers, slots=2) as handoff,
    ):
        for blocks, to in zip(*requests, strict=True):
            receiving = handoff.receive(1) if takes else None
            comm.barrier()
            if sends:
                with handoff.send(1) as sending:
                    for layer in layers:
                        sending.layer(layer, blocks, to, last=False)
                        sending.layer(layer, [], [])
            if receiving is not None and given_up:
                receiving.cancel()
            elif receiving is not None:
                for layer in layers:
                    receiving.wait(layer)
                receiving.close()
                assert receiving.complete
            if not given_up:
                target[:, :, to] = source[:, :, blocks]
            comm.barrier()
        if takes and not given_up:
            assert own is not None
            assert (own.get() == part(dst, target, list(receivers).index(comm.rank))).all(), "a cache is wrong"
        comm.barrier()


def pieces(comm: hetcoll.Communicator, seed: int, count: int) -> None:
    """Every rank puts pieces into each window, and gets them back. How many a GPU's put has, that GPU says."""
    size, rank, slots = comm.size, comm.rank, 4
    mine = Own(comm, np.zeros(size * slots * count, np.int64))
    room = slots * count

    def of(source: int, peer: int) -> Any:
        """What a rank's part of a window is to be, and in which order its pieces are put."""
        rng = np.random.default_rng((seed, source, peer))
        return rng.integers(1, 1 << 40, room), rng.permutation(slots), int(rng.integers(0, room + 1))

    kept: list[tuple[Any, ...]] = []
    stream = device_of(comm).stream() if has_gpu(comm) else None
    try:
        with closing_last(comm), comm.window(mine.array, signals=size) as window:
            for step in range(size):  # each begins with another one
                peer = (rank + step) % size
                data, order, some = of(rank, peer)
                src = Own(comm, data)
                if stream is not None:
                    device, word = device_of(comm), np.zeros(1, np.int64)
                    said = DeviceArray.of(device, np.array([some]))
                    device.copy(int(word.ctypes.data), said.ptr, 8, stream)
                    work = window.put(
                        src.array, peer, rank * room, signal=rank, async_op=True, late=word, stream=stream
                    )
                    kept.append((work, src, word, said))
                else:
                    at = order * count
                    work = window.put(src.array, peer, rank * room + at, src_offset=at, count=count, async_op=True)
                    kept.append((work, src, at))
                    kept.append((window.put(src.array[:0], peer, signal=rank, async_op=True), src))
            for each, *_ in kept:
                each.wait()
            for peer in range(size):
                window.wait_signal(peer)
                assert window.signal(peer) == 1
            comm.barrier()
            whole = mine.get().reshape(size, room)
            for peer in range(size):
                data, _, some = of(peer, rank)
                wrote = some if comm.topology.ranks[peer].wish in ("cuda", "hip") else room
                want = np.where(np.arange(room) < wrote, data, 0)
                assert (whole[peer] == want).all(), f"what rank {peer} has put is wrong"
            peer = (rank + 1) % size
            back = Own(comm, np.zeros(room, np.int64))
            window.get(back.array, peer, rank * room, stream=stream)
            data, _, some = of(rank, peer)
            want = np.where(np.arange(room) < (room if stream is None else some), data, 0)
            assert (back.get() == want).all(), "what was got is not what was put"
            comm.barrier()
    finally:
        if stream is not None:
            device_of(comm).destroy_stream(stream)


def ring(comm: hetcoll.Communicator, count: int) -> None:
    """Both ways at once; then objects, for which one rank waits before it sends."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    if comm.size == 1:
        return
    x, got = np.full(count, comm.rank, np.int32), np.full(count, -1, np.int32)
    with comm.register(got):
        comm.sendrecv(x, right, got, left)
    assert (got == left).all()
    if comm.rank == 0:
        assert comm.recv_object(left) == {"from": left}
    comm.send_object({"from": comm.rank}, right)
    if comm.rank != 0:
        assert comm.recv_object(left) == {"from": left}


def returned(comm: hetcoll.Communicator, count: int, times: int) -> None:
    """Results that calls make themselves, and the persistent forms of two of them."""
    size, rank = comm.size, comm.rank
    rows = (np.arange(size)[:, None] * 10 + rank + np.zeros(count)).astype(np.float32)
    turned = (np.arange(size)[:, None] + 10 * rank + np.zeros(count)).astype(np.float32)
    total = 10 * size * rank + size * (size - 1) / 2
    assert (comm.allgather(rows[0]) == np.arange(size)[:, None]).all()
    assert (comm.reduce_scatter(rows) == total).all()
    assert (comm.alltoall(rows) == turned).all()
    own, part = np.zeros_like(rows), np.zeros(count, np.float32)
    exchange, scatter = comm.alltoall_init(rows, own), comm.reduce_scatter_init(rows, part)
    for _ in range(times):
        own[:], part[:] = -1, -1
        exchange.start()
        exchange.wait()
        scatter.start()
        scatter.wait()
        assert (own == turned).all()
        assert (part == total).all()
    comm.reset_feedback()


def trace(comm: hetcoll.Communicator, who: int) -> None:
    """One rank asks all for their last calls."""
    if comm.rank == who:
        try:
            with tempfile.TemporaryDirectory(prefix="hetcoll-campaign-") as folder:
                path = os.path.join(folder, "trace.json")
                comm.trace(path, timeout=20.0)
                assert json.loads(Path(path).read_text())["traceEvents"]
        except OSError as error:  # a rank that may write no file, or open none, is told so and goes on
            if error.errno not in (errno.EFBIG, errno.EMFILE, errno.ENOENT, errno.ENOMEM):
                raise
    comm.barrier()


WIDER: dict[str, Callable[..., None]] = {
    each.__name__: each for each in (experts, layouts, beyond, caches, pieces, ring, returned, trace)
}
