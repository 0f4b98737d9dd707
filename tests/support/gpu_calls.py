"""What tests run on ranks that have a GPU each: cases held to what NumPy gives, messages, calls on several streams."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from cases import run_case
from on_gpu import OnGpu
from ranks import Ranks
from reference import Case

import hetcoll
from hetcoll.gpu.array import DeviceArray
from hetcoll.plan import one_kernel
from hetcoll.types import OCP_OF, ROOTED, Collective, DType, ReduceOp, supports
from hetcoll.vendors.devices.base import Device

COLLECTIVES = ("allreduce", "allgather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "alltoall")
BY_KERNEL = COLLECTIVES[1:]  # of these and all-reduces the short ones are one kernel, where ranks share a host


def device_of_rank(rank: int) -> Device:
    """Of the vendor whose GPUs the process sees; of both, the one that HETCOLL_DEVICE names."""
    from hetcoll.vendors.devices import cuda, hip

    posing = os.environ.get("HETCOLL_DEVICE") == "hip"
    found = cuda.devices() if cuda.why_not() is None and not posing else hip.devices()
    return found[rank % len(found)]


def run_on_gpu(comm: hetcoll.Communicator, cases: list[Case]) -> list[bytes]:
    device = device_of_rank(comm.rank)
    stream = device.stream()
    try:
        return [run_case(OnGpu(comm, device, stream), case) for case in cases]  # type: ignore[arg-type]
    finally:
        device.destroy_stream(stream)


class Called:
    """What this process calls of drivers and libraries, by the fakes' log."""

    def __init__(self, log: str) -> None:
        self._log, self._at = Path(log), 0

    def since(self) -> list[str]:
        """Since it was asked before."""
        with self._log.open("rb") as file:
            file.seek(self._at)
            whole = file.read().rpartition(b"\n")[0]  # others may be writing a line
        self._at += len(whole)
        mine = f"{os.getpid()} "
        return [line.split()[-1] for line in whole.decode().splitlines() if line.startswith(mine)]


def check(ranks: Ranks, cases: list[Case], run: Callable[..., list[bytes]] = run_on_gpu) -> None:
    """`run` checks the results on each rank; what all ranks must have alike is compared here, bit by bit."""
    rows = ranks.run(run, cases, timeout=300)
    for case, digests in zip(cases, zip(*rows, strict=True), strict=True):
        if case.collective in ("allreduce", "allgather", "allgatherv", "broadcast"):
            assert len(set(digests)) == 1, f"{case}: ranks hold different bits"


def cases_of(size: int, counts: tuple[int, ...], *, alone: bool = False) -> Iterator[Case]:
    """Short ones in place and not, long ones in either way: ranks of an odd number have the ways that an even number
    has not. `alone`: each of more than three ranks is an island, of which kernels take more."""
    turn = 0
    for kind, count, inplace in itertools.product(COLLECTIVES, counts, (False, True)):
        if kind == "broadcast" and inplace:
            continue
        turn += 1
        if count > 50_000 and kind != "broadcast" and inplace == (COLLECTIVES.index(kind) + size) % 2:
            continue
        op = ("sum", "max", "avg")[turn % 3] if "reduce" in kind else "sum"
        dtype, itemsize = (("float32", 4), ("bfloat16", 2), ("int64", 8))[turn % 3]
        if kind in BY_KERNEL and count > 50_000:  # so that a rank reads more than one kernel does
            most = one_kernel.MOST_ALONE if alone else one_kernel.MOST_MOVED
            count += most // (itemsize * (1 if kind == "broadcast" else size - 1))
        yield Case(kind, dtype, count, op, turn % size, inplace, seed=turn)


def by_kernel(size: int) -> list[Case]:
    """Chunks that end within a pack, several to a block; in place and not in turn; of every width, from every root."""
    counts = {"float32": 5, "bfloat16": 10_001, "float64": 3_001, "int8": 100_003, "complex128": 777}
    found = []
    for turn, (kind, (dtype, count)) in enumerate(itertools.product(BY_KERNEL, counts.items())):
        op = "avg" if dtype == "bfloat16" and "reduce" in kind else "sum"
        roots = range(size) if dtype == "float32" else (turn // 2 % size,)
        for root in roots if Collective[kind.upper()] in ROOTED else (0,):
            inplace = (turn + root) % 2 == 1 and kind != "broadcast"
            found.append(Case(kind, dtype, count, op, root, inplace, seed=turn))
    return found


_EDGES = [1, 16, 4096, 32 << 10, 128 << 10, 1 << 20]  # bytes: of a pack, a chunk, a slot, one chunk a block
_TYPES = {True: ("float32", "bfloat16"), False: ("uint8", "bfloat16", "float32", "complex128")}


def any_cases(size: int, seed: int, number: int, largest: int) -> list[Case]:
    """Of every collective, all roots, and lengths around the edges, in an order that only the seed gives. Some come
    several times in a row: then who only gives runs ahead."""
    dice = random.Random(seed)
    found: list[Case] = []
    while len(found) < number:
        kind = dice.choice(COLLECTIVES)
        dtype = dice.choice(_TYPES["reduce" in kind])
        nbytes = dice.choice([edge for edge in _EDGES if edge <= largest])
        count = max(1, nbytes // DType[dtype.upper()].itemsize + dice.choice([-1, 0, 0, 1, 3]))
        op, root, shift = dice.choice(["sum", "max"]), dice.randrange(size), dice.choice([0, 0, 1])
        inplace = kind not in ("broadcast", "alltoall") and dice.random() < 0.3
        for _ in range(dice.choice([1, 1, 1, 7])):
            found.append(Case(kind, dtype, count, op, root, inplace, seed=len(found), shift=shift))
    return found


SOME = (DType.INT64, DType.UINT8, DType.FLOAT32, DType.BFLOAT16, DType.FLOAT8_E5M2, DType.COMPLEX128, DType.BOOL)
"""A type of each kind: the fakes compile the kernels of every type by themselves."""
OTHERS = tuple(dtype for dtype in DType if dtype not in SOME)


def every_reduction(types: Sequence[DType] = (*SOME, *OTHERS), *, older_float8: bool = True) -> list[Case]:
    """Few elements and many in turn. Without AMD's older 8-bit floats, where GPUs of both kinds have them converted
    (`test_float8`)."""
    pairs = [
        (dtype, op)
        for dtype in types
        for op in ReduceOp
        if supports(dtype, op) and (older_float8 or dtype not in OCP_OF)
    ]
    return [
        Case("allreduce", dtype.label, count, op.label, seed=count, exact=op is not ReduceOp.AVG)
        for (dtype, op), count in zip(pairs, itertools.cycle((7, 2001, 2001)), strict=False)
    ]


def exchange(comm: hetcoll.Communicator) -> None:
    """Rings of messages, both ways at once and in groups, to oneself as well."""
    device, size, rank = device_of_rank(comm.rank), comm.size, comm.rank
    right, left = (rank + 1) % size, (rank - 1) % size
    for count in (1, 3_300_003):  # more than the slots of two ranks of a host hold
        values = np.arange(count, dtype=np.int32)
        mine = DeviceArray.of(device, values + rank)
        got, other = (DeviceArray(device, count, "int32") for _ in range(2))
        comm.sendrecv(mine.buffer(), right, got.buffer(), left).wait(60)
        assert (got.get() == values + left).all()
        with comm.group():
            comm.send(mine.buffer(), left)
            comm.send(mine.buffer(), rank)
            comm.recv(got.buffer(), right)
            comm.recv(other.buffer(), rank)
        assert (got.get() == values + right).all()
        assert (other.get() == mine.get()).all()
        if rank == 0:  # where others have a group
            comm.sendrecv(mine.buffer(), right, got.buffer(), left).wait(60)
        else:
            with comm.group():
                comm.send(mine.buffer(), right)
                comm.recv(got.buffer(), left)
        assert (got.get() == values + left).all()
        if rank == 0:
            comm.send(mine.buffer(), 1)
        elif rank == 1:
            comm.recv(got.buffer(), 0)
            assert (got.get() == values).all()


def overlap(comm: hetcoll.Communicator) -> None:
    """Calls on several streams with work of the user's before and behind, none waited for by the host."""
    device = device_of_rank(comm.rank)
    streams = [device.stream() for _ in range(3)]
    count = 70_003
    sources = [DeviceArray.of(device, np.full(count, 1 + i + comm.rank, np.float32)) for i in range(3)]
    work = [DeviceArray(device, count) for _ in range(3)]
    results = [DeviceArray(device, count) for _ in range(12)]
    device.synchronize()
    works = []
    for turn, result in enumerate(results):
        i, stream = turn % 3, streams[turn % 3]
        device.copy(work[i].ptr, sources[i].ptr, work[i].nbytes, stream)
        works.append(comm.allreduce(work[i].buffer(), stream=stream, async_op=turn % 2 == 1))
        if turn % 2 == 1:
            works[-1].wait_stream(stream)
        device.copy(result.ptr, work[i].ptr, result.nbytes, stream)
    for each in works:
        each.wait(60)
    for turn, result in enumerate(results):
        want = sum(1 + turn % 3 + rank for rank in range(comm.size))
        assert (result.get() == want).all(), f"call {turn}"
