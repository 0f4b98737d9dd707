"""The operations that `hetcoll perf` measures: buffers, calls, and what each buffer must hold afterwards."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .. import DType, ReduceOp
from ..types import COMPLEX, FLOATS
from .on_device import Mirror
from .patterns import Array, Pattern, Piece, count_wrong, numpy_dtype, write

if TYPE_CHECKING:
    from .on_device import Stream

OPS = (
    "allreduce", "allgather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "alltoall",
    "allgatherv", "reduce_scatterv", "alltoallv", "sendrecv", "oneway", "pingpong", "barrier",
)  # fmt: skip
PAIRED = frozenset({"oneway", "pingpong"})
MESSAGES = PAIRED | {"sendrecv"}
REDUCING = frozenset({"allreduce", "reduce_scatter", "reduce", "reduce_scatterv"})
ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
ONLY_IN_PLACE = frozenset({"broadcast"})
ONLY_OUT_OF_PLACE = MESSAGES | {"alltoallv", "barrier"}
# In place these overwrite their own input, so a repeated call starts from other values.
CONSUMES_INPUT = REDUCING | {"alltoall"}

GUARD = 64  # bytes before and after every buffer, which nobody may touch
ALIGN = 4096
_POISON = 0x5A
REDUCED = -1  # in place of a source rank: the reduction of all


def busbw_factor(op: str, size: int) -> float:
    """What nccl-tests multiplies algbw by to get busbw, for `size` ranks.

    The v-forms count like their plain forms. Source: nccl-tests, doc/PERFORMANCE.md and each test's GetBw.
    """
    if op == "allreduce":
        return 2 * (size - 1) / size
    if op in ("broadcast", "reduce", "barrier") or op in MESSAGES:
        return 1.0
    return (size - 1) / size


def bandwidths(op: str, size: int, nbytes: int, time_us: float) -> tuple[float, float]:
    """(algbw, busbw) in GB/s (10**9 bytes) of one call that took `time_us` microseconds."""
    algbw = nbytes / time_us / 1e3 if time_us > 0 else 0.0
    return algbw, algbw * busbw_factor(op, size)


def places(op: str, inplace_only: bool = False) -> tuple[str, ...]:
    """Which of "out" and "in" the operation has."""
    if op in ONLY_IN_PLACE:
        return ("in",)
    if op in ONLY_OUT_OF_PLACE:
        return () if inplace_only else ("out",)
    return ("in",) if inplace_only else ("out", "in")


def uneven(total: int, size: int) -> tuple[int, ...]:
    """`total` elements dealt to `size` ranks in the proportion 1 : 2 : 3 : 1 : 2 : 3 : ..."""
    ends = [0, *accumulate(1 + i % 3 for i in range(size))]
    edges = [end * total // ends[-1] for end in ends]
    return tuple(b - a for a, b in pairwise(edges))


@dataclass(frozen=True, slots=True)
class Source:
    """`count` elements of the receive buffer from `start` on: rank's stream (or REDUCED) from `phase` on."""

    start: int
    count: int
    rank: int
    phase: int = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """The buffers of one rank, in elements. A size of None: this rank has no such buffer.

    `count` is the count column of nccl-tests (what a rank passes), `total` times the item size its size column.
    `alias` is where the smaller buffer lies in the larger one when the call is in place.
    """

    total: int
    count: int
    send: int | None
    recv: int | None
    expect: tuple[Source, ...] = ()
    alias: int = 0
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()


def shape(op: str, size: int, rank: int, elements: int, root: int) -> Shape:
    """The buffers of `rank` for about `elements` in the larger one: at least one a rank, the same for each where
    the operation deals evenly.
    """
    if op == "barrier":
        return Shape(0, 0, None, None)
    total = max(1, elements)
    at_root = rank == root
    if op in ("allreduce", "reduce"):
        out = (Source(0, total, REDUCED),) if op == "allreduce" or at_root else ()
        return Shape(total, total, total, total if out else None, out)
    if op == "broadcast":
        return Shape(total, total, None, total, (Source(0, total, root),))
    if op == "sendrecv":
        return Shape(total, total, total, total, (Source(0, total, (rank - 1) % size),))
    if op in PAIRED:
        return _pair(op, size, rank, total)
    if op == "alltoallv":
        return _alltoallv(size, rank, total)
    if op in ("allgatherv", "reduce_scatterv"):
        parts = uneven(total, size)
        share = total // size
    else:
        share = max(1, total // size)
        total = share * size
        parts = (share,) * size
    starts = (0, *accumulate(parts))
    own = starts[rank]
    everyone = tuple(Source(starts[i], parts[i], i) for i in range(size))
    match op:
        case "allgather" | "allgatherv":
            return Shape(total, share, parts[rank], total, everyone, own, sends=parts)
        case "gather":
            return Shape(total, share, share, total if at_root else None, everyone if at_root else (), own)
        case "reduce_scatter" | "reduce_scatterv":
            return Shape(total, share, total, parts[rank], (Source(0, parts[rank], REDUCED, own),), own, sends=parts)
        case "scatter":
            return Shape(total, share, total if at_root else None, share, (Source(0, share, root, own),), own)
        case "alltoall":
            blocks = tuple(Source(i * share, share, i, rank * share) for i in range(size))
            return Shape(total, share, total, total, blocks)
    raise ValueError(f"unknown operation {op!r}: expected one of {', '.join(OPS)}")


def _pair(op: str, size: int, rank: int, total: int) -> Shape:
    """Ranks 0 and 1, 2 and 3, ... are pairs, whose first one sends. The last one of an odd number does nothing."""
    peer = rank ^ 1
    if peer >= size:
        return Shape(total, total, None, None)
    source = (Source(0, total, peer),)
    if op == "pingpong":
        return Shape(total, total, total, total, source)
    return Shape(total, total, None, total, source) if rank % 2 else Shape(total, total, total, None)


def _alltoallv(size: int, rank: int, total: int) -> Shape:
    """Rank i sends `parts[(j - i) % size]` elements to rank j, so everyone sends and receives `total`."""
    parts = uneven(total, size)
    receives = tuple(parts[(rank - i) % size] for i in range(size))
    starts = (0, *accumulate(receives))
    sources = tuple(
        Source(starts[i], receives[i], i, sum(parts[(j - i) % size] for j in range(rank))) for i in range(size)
    )
    sends = tuple(parts[(j - rank) % size] for j in range(size))
    return Shape(total, total // size, total, total, sources, sends=sends, receives=receives)


@dataclass
class Guarded:
    """A buffer aligned to a page, between guard bytes."""

    data: Array
    memory: Array = field(repr=False)
    start: int

    @classmethod
    def empty(cls, count: int, dtype: np.dtype[Any]) -> Guarded:
        nbytes = count * dtype.itemsize
        memory = np.full(nbytes + 2 * GUARD + ALIGN, _POISON, np.uint8)
        start = GUARD + (-(memory.ctypes.data + GUARD)) % ALIGN
        return cls(memory[start : start + nbytes].view(dtype), memory, start)

    def poison(self) -> None:
        """Overwrite everything, guards included, so that what nobody wrote shows."""
        self.memory[:] = _POISON

    def damaged(self) -> int:
        """How many guard bytes were overwritten."""
        stop = self.start + self.data.nbytes
        guards = (self.memory[self.start - GUARD : self.start], self.memory[stop : stop + GUARD])
        return sum(int(np.count_nonzero(guard != _POISON)) for guard in guards)


class Library(Protocol):
    """What is measured in the place of hetcoll."""

    def bind(self, case: Case, send: Any, recv: Any) -> Callable[[], object]:
        """The call of a case on its buffers."""
        ...


class Case:
    """One operation at one size on this rank: `fill`, then `call`, then `wrong` says how many elements are wrong.

    With a `stream` the buffers lie on its GPU, calls are enqueued on it, and the values are checked in host memory. The
    calls are those of `comm`, or of another `library`.
    """

    def __init__(
        self,
        comm: Any,
        op: str,
        elements: int,
        dtype: DType,
        redop: ReduceOp | None,
        root: int,
        inplace: bool,
        stream: Stream | None = None,
        library: Library | None = None,
    ) -> None:
        self.op, self.dtype, self.redop, self.root, self.inplace = op, dtype, redop, root, inplace
        self.size: int = comm.size
        self.rank: int = comm.rank
        self.shape = shape(op, self.size, self.rank, elements, root)
        kind = numpy_dtype(dtype)
        self.nbytes = self.shape.total * kind.itemsize
        self._owners: list[Guarded] = []
        self._send, self._recv = self._buffers(kind)
        self._pattern = Pattern(dtype, self.size, 0, redop)
        memories = [owner.memory for owner in self._owners]
        self._mirror = None if stream is None else Mirror(stream, memories)
        self.call = bind(comm, self, *self._ends()) if library is None else library.bind(self, *self._ends())

    def _buffers(self, kind: np.dtype[Any]) -> tuple[Array | None, Array | None]:
        def new(count: int) -> Array:
            self._owners.append(Guarded.empty(count, kind))
            return self._owners[-1].data

        send, recv, alias = self.shape.send, self.shape.recv, self.shape.alias
        if send is None or recv is None or not self.inplace:
            return (None if send is None else new(send)), (None if recv is None else new(recv))
        whole = new(max(send, recv))
        part = whole[alias : alias + min(send, recv)]
        return (whole, part) if send >= recv else (part, whole)

    @property
    def buffers(self) -> tuple[Array | None, Array | None]:
        """(send, receive) buffer of this rank."""
        return self._send, self._recv

    def _ends(self) -> tuple[Any, Any]:
        """What the call is given: arrays, or memory of the GPU."""
        if self._mirror is None:
            return self._send, self._recv
        send, recv = (None if array is None else self._mirror.buffer(array) for array in self.buffers)
        return send, recv

    @property
    def messages(self) -> int:
        """One after another in a call: a pingpong's time is half of its call's, as in osu_latency."""
        return 2 if self.op == "pingpong" else 1

    def fill(self, seed: int) -> None:
        """New input, and nothing but poison where output belongs. Every rank uses the same seed."""
        self._pattern = Pattern(self.dtype, self.size, seed, self.redop)
        for owner in self._owners:
            owner.poison()
        if self._send is not None:
            write(self._send, self._input())
        elif self.op == "broadcast" and self.rank == self.root and self._recv is not None:
            write(self._recv, self._output())
        if self._mirror is not None:
            self._mirror.upload()

    def wait(self) -> None:
        """Until calls on a GPU's stream are done."""
        if self._mirror is not None:
            self._mirror.stream.synchronize()

    def wrong(self) -> int:
        """Wrong elements of the output, changed ones of an input that must not change, and damaged guard bytes."""
        if self._mirror is not None:
            self._mirror.download()
        wrong = sum(owner.damaged() for owner in self._owners)
        if self._recv is not None:
            rounded = self.redop is ReduceOp.AVG and self.dtype in FLOATS | COMPLEX
            wrong += count_wrong(self._recv, self._output(), rounded=rounded)
        if self._send is not None and (self._recv is None or not self.inplace):
            wrong += count_wrong(self._send, self._input())
        return wrong

    @property
    def repeatable(self) -> bool:
        """Whether the same call again on its own output must give the same output."""
        return not (self.inplace and self.op in CONSUMES_INPUT)

    def _input(self) -> list[Piece]:
        assert self._send is not None
        return [Piece(0, self._send.size, self._pattern.table(self.rank))]

    def _output(self) -> list[Piece]:
        pieces = []
        for source in self.shape.expect:
            table = self._pattern.reduced() if source.rank == REDUCED else self._pattern.table(source.rank)
            pieces.append(Piece(source.start, source.count, table, source.phase))
        return pieces


def bind(comm: Any, case: Case, send: Any, recv: Any) -> Callable[[], object]:
    """The call with all its arguments bound, so that a timed loop pays for nothing but the call."""
    redop = None if case.redop is None else sys.intern(case.redop.label)  # as a literal is
    match case.op:
        case "allreduce":
            return partial(comm.allreduce, send, None if case.inplace else recv, redop)
        case "reduce":
            return partial(comm.reduce, send, None if case.inplace else recv, redop, case.root)
        case "allgather" | "alltoall":
            return partial(getattr(comm, case.op), send, recv)
        case "reduce_scatter":
            return partial(comm.reduce_scatter, send, recv, redop)
        case "broadcast":
            return partial(comm.broadcast, recv, case.root)
        case "gather" | "scatter":
            return partial(getattr(comm, case.op), send, recv, case.root)
        case "allgatherv":
            return partial(comm.allgatherv, send, recv, counts=case.shape.sends)
        case "reduce_scatterv":
            return partial(comm.reduce_scatterv, send, recv, redop, counts=case.shape.sends)
        case "alltoallv":
            counts = {"sendcounts": case.shape.sends, "recvcounts": case.shape.receives}
            return partial(comm.alltoall, send, recv, **counts)
        case "sendrecv":
            following, before = (case.rank + 1) % case.size, (case.rank - 1) % case.size
            return partial(comm.sendrecv, send, following, recv, before)
        case "oneway" | "pingpong":
            peer = case.rank ^ 1
            return in_turn(case, partial(comm.send, send, peer), partial(comm.recv, recv, peer))
        case "barrier":
            return partial(comm.barrier)
    raise ValueError(f"unknown operation {case.op!r}: expected one of {', '.join(OPS)}")


def in_turn(case: Case, send: Callable[[], object], recv: Callable[[], object]) -> Callable[[], object]:
    """This rank's part of a message one way, or of one there and one back: the first rank of a pair sends first."""
    if case.shape.send is None:
        return recv if case.shape.recv is not None else lambda: None
    if case.shape.recv is None:
        return send
    first, second = (recv, send) if case.rank % 2 else (send, recv)

    def call() -> None:
        first()
        second()

    return call
