"""Compressed calls of ranks with and without a GPU, and the bits that NumPy's formats give for them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from codec_reference import rounded
from elements import NUMPY
from gpu_calls import device_of_rank

import hetcoll
from hetcoll.calls.buffers import Buffer
from hetcoll.plan.algorithms import Hosts
from hetcoll.types import Collective, DType, Format

Array = np.ndarray[Any, np.dtype[Any]]
KINDS = [
    (d, f)
    for d in (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
    for f in (Format.BF16, Format.FP8, Format.INT8)
    if f.factor(d.itemsize) < 1
]
COLLECTIVES = (Collective.ALLREDUCE, Collective.REDUCE_SCATTER)


def make(rank: int, turn: int, count: int, dtype: DType) -> Array:
    return np.random.default_rng([rank, turn]).standard_normal(count).astype(NUMPY[dtype])


class Calls(NamedTuple):
    """Several on the same buffers."""

    kind: Collective
    count: int
    dtype: DType
    form: str
    turns: int
    op: str
    inplace: bool

    def share(self, ranks: int) -> int:
        """Elements of a rank's result."""
        return self.count // (1 if self.kind is Collective.ALLREDUCE else ranks)


def summed(comm: hetcoll.Communicator, calls: Calls) -> tuple[list[bytes], dict[str, int]]:
    """Their results, and the counters, on buffers of this rank's GPU, or of its host where it has none."""
    if comm.topology.ranks[comm.rank].wish == "cpu":
        return summed_on_host(comm, calls)
    device = device_of_rank(comm.rank)
    kind, count, dtype, form, turns, op, inplace = calls
    found, item, share = [], dtype.itemsize, calls.share(comm.size)
    with device.active():
        send = device.allocate(max(1, count * item))
        recv = device.allocate(max(1, share * item))
        into = recv
        if inplace:
            into = send if kind is Collective.ALLREDUCE else send + comm.rank * share * item
        where = "cuda" if device.vendor == "cuda" else "rocm"
        x, y = (Buffer(at, n, dtype, comm, where, device.index) for at, n in ((send, count), (into, share)))
        for turn in range(turns):
            data = make(comm.rank, turn, count, dtype)
            device.copy(send, data.ctypes.data, data.nbytes)
            getattr(comm, kind.label)(x, y, op, compress=form, stream=0).wait(60)
            result = np.empty(share, data.dtype)
            device.copy(result.ctypes.data, into, result.nbytes)
            found.append(result.tobytes())
            if not inplace:
                left = np.empty_like(data)
                device.copy(left.ctypes.data, send, left.nbytes)
                assert left.tobytes() == data.tobytes(), "the input was changed"
        counters = comm.counters()
        comm.reset_feedback()
        for address in (send, recv):
            device.free(address)
    return found, counters


def summed_on_host(comm: hetcoll.Communicator, calls: Calls) -> tuple[list[bytes], dict[str, int]]:
    kind, count, dtype, form, turns, op, inplace = calls
    found, x, share = [], np.empty(count, NUMPY[dtype]), calls.share(comm.size)
    into = np.empty(share, x.dtype)
    if inplace:
        into = x if kind is Collective.ALLREDUCE else x[comm.rank * share :][:share]
    for turn in range(turns):
        x[:] = data = make(comm.rank, turn, count, dtype)
        getattr(comm, kind.label)(x, into, op, compress=form)
        found.append(into.tobytes())
        assert inplace or x.tobytes() == data.tobytes(), "the input was changed"
    counters = comm.counters()
    comm.reset_feedback()
    return found, counters


def wanted(
    kind: Collective, islands: Hosts, count: int, dtype: DType, form: Format, turns: int, op: str
) -> list[list[bytes]]:
    """What comes of it on each rank: islands add up their own in their type, and what was lost of what one sent to
    another comes with the next. All-reduces are of two islands, which add alike."""
    ranks, lost = sum(map(len, islands)), dict[tuple[int, int], Array]()
    share = count // (1 if kind is Collective.ALLREDUCE else ranks)
    found: list[list[bytes]] = [[] for _ in range(ranks)]
    for turn in range(turns):
        sums = [make(members[0], turn, count, dtype) for members in islands]
        for i, members in enumerate(islands):
            for other in members[1:]:
                sums[i] = add(sums[i], make(other, turn, count, dtype))
        for i, members in enumerate(islands):
            for rank in members:
                mine = slice(0, count) if kind is Collective.ALLREDUCE else slice(rank * share, (rank + 1) * share)
                total = sums[i][mine]
                if kind is Collective.ALLREDUCE:  # both islands round what they send
                    total, lost[-1, rank] = rounded(total, lost.get((-1, rank)), dtype, form)
                for d in range(1, len(islands)):
                    other = (i - d) % len(islands)
                    came, lost[other, rank] = rounded(sums[other][mine], lost.get((other, rank)), dtype, form)
                    total = add(total, came)
                if op == "avg":
                    total = (total.astype(np.float32) / np.float32(ranks)).astype(total.dtype)
                found[rank].append(total.tobytes())
    return found


def add(x: Array, y: Array) -> Array:
    return (x.astype(np.float32) + y.astype(np.float32)).astype(x.dtype)
