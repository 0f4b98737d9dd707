"""HETCOLL_CHECK of calls that graphs capture: each replay is checked on the GPUs, and no host waits for it.

With the call are captured kernels (``vendors/devices/kernels/checks.h``) that fold what this rank gives before it and
what it has got after it, a collective by which the ranks tell each other of their folds, and a kernel that compares
them. What that finds it writes to pinned memory, for `look`, which the GPU's watchdog calls each second and the
communicator's next call does. A replay is not a call: there is nobody to whom an input that is not finite could be an
error, so that is logged.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

import hetcoll._native as _native

from ..calls import Call, allgather, alltoall
from ..calls.buffers import Buffer, element_type
from ..health.diagnosis import Diagnosis, Kind
from ..health.status_report import call_site
from ..runtime.checksums import Fold, foldable
from ..runtime.crosscheck import given, shares
from ..types import COMPLEX, CUT, FLOATS, FROM_ROOT, LOGICAL, REDUCING, TO_ROOT, Collective, DType, ReduceOp
from ..vendors.devices.kernels import table
from ..vendors.devices.kernels.source import checks_names
from ..work import Work
from .array import clear

if TYPE_CHECKING:
    from ..vendors.devices.base import Device
    from .shared import Note

log = logging.getLogger("hetcoll")

_CHUNK = 256 << 10  # bytes of memory that is taken at a time
_ALIGNED = 256
_RECORD = 8 * table.RECORD_WORDS
_MOST_BLOCKS, _BLOCK_BYTES = 64, 64 << 10  # of a fold: in all, and bytes of a part for one more
_COMPARING = 64  # threads
_CAME, _FOLDED = 1, 2  # Wrong of checks.h
_LANE_BYTES = 16


class Executor(Protocol):
    """What this needs of the executor that captures calls (`executor.GpuExecutor`)."""

    @property
    def device(self) -> Device: ...

    def stream(self, stream: object, **buffers: Buffer | None) -> int: ...

    def bound(
        self, shape: _native.KernelShape, what: str, notes: Sequence[Note], message: DType | None = None
    ) -> _native.GpuCall: ...


class Ranks(Protocol):
    """Who takes part (`links.wiring.Wiring`)."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...


class _Arena:
    """Memory that stays until `close`, zero at first."""

    def __init__(self, allocate: Callable[[int], int], free: Callable[[int], None], fill: Callable[[int, int], None]):
        self._allocate, self._free, self._clear = allocate, free, fill
        self._chunks: list[int] = []
        self._at = self._end = 0

    def take(self, nbytes: int) -> int:
        nbytes = -(-nbytes // _ALIGNED) * _ALIGNED
        if self._end - self._at < nbytes:
            room = max(nbytes, _CHUNK)
            self._at = self._allocate(room)
            self._end = self._at + room
            self._chunks.append(self._at)
            self._clear(self._at, room)
        self._at += nbytes
        return self._at - nbytes

    def close(self) -> None:
        while self._chunks:
            self._free(self._chunks.pop())


@dataclass(slots=True, eq=False)
class _Captured:
    """A call that a graph has, and what is found of it in pinned memory."""

    what: str
    site: str
    dtype: DType
    op: ReduceOp
    rounds: bool
    elements: int  # that this rank gives
    found: table.Findings
    odd: bool = False  # said already


@dataclass(slots=True)
class _Parts:
    """Parts of a buffer, and where the table of them is."""

    buffer: Buffer
    elements: Sequence[int]
    offsets: int


class Replays:
    """Of one communicator's calls on this rank's GPU. Graphs may be replayed until it is closed."""

    def __init__(
        self,
        path: Executor,
        queue: _native.DeviceQueue,
        calls: _native.GpuCalls,
        diagnosis: Diagnosis,
        ranks: Ranks,
    ) -> None:
        device = path.device
        self._path, self._queue, self._calls, self._device = path, queue, calls, device
        self._diagnosis, self._rank, self._size = diagnosis, ranks.rank, ranks.size
        self._lock = threading.Lock()  # of what follows
        self._memory = _Arena(device.allocate, device.free, lambda at, nbytes: clear(device, at, nbytes))
        self._pinned = _Arena(device.allocate_host, device.free_host, lambda at, nbytes: _zero(at, nbytes))
        self._captured: list[_Captured] = []

    # Capturing.

    def collective(self, call: Call, stream: object, start: Callable[[Call], Work]) -> Work:
        """See `runtime.executor.Replays`."""
        handle = self._path.stream(stream, sendbuf=call.send, recvbuf=call.recv)
        rank, size, reduces = self._rank, self._size, call.collective in REDUCING
        source, result = given(call, rank), call.recv or call.send
        gives, gets = shares(call, size)
        if call.collective in TO_ROOT and call.root != rank:
            result = None
        own = None if source is None else self._parts(source, gives)
        made = None if result is None else self._parts(result, gets)
        same, cut = call.collective is Collective.ALLREDUCE, call.collective.plain in CUT
        fold = Fold(call, size, 1) if reduces and foldable(call) else None
        op = table.MOVED if fold is None else ReduceOp.AVG if fold.rounds else call.op
        stride, rows = 1 + same, size if cut else 1  # a row of two records has the result's, too
        mine, all_of = self._records(rows * stride), self._records(size * stride)
        of_result = mine + _RECORD if same else self._records(len(gets))
        if own is not None:
            self._fold(call.dtype, op, own, mine, handle)
        work = start(call)
        if made is not None:
            self._fold(call.dtype, op, made, of_result, handle)
        tell = alltoall if cut else allgather
        start(tell(rank, size, self._row(mine, rows * stride, call), self._row(all_of, size * stride, call)))
        entry = self._enter(call, fold, 0 if source is None else source.count)
        checked = made is not None and (fold is not None or not reduces)
        self._compare(
            call.dtype,
            table.Comparison(
                to=ctypes.addressof(entry.found), given=all_of, made=of_result, same=same, stride=stride,
                root=call.root if call.collective in FROM_ROOT else size,
                parts=len(gets) if checked else 0, op=op if checked else table.MOVED,
                **self._given(own, mine), **self._bounds(call, fold, gets[0]),
            ),
            handle,
        )  # fmt: skip
        self._watch(entry)
        return work

    def _parts(self, buffer: Buffer, elements: Sequence[int]) -> _Parts:
        offsets = np.array([*accumulate(elements, initial=0)], np.uint64)
        with self._lock:
            at = self._pinned.take(offsets.nbytes)
        ctypes.memmove(at, offsets.ctypes.data, offsets.nbytes)
        return _Parts(buffer, elements, at)

    def _records(self, count: int) -> int:
        with self._lock:
            return self._memory.take(count * _RECORD)

    def _row(self, at: int, records: int, call: Call) -> Buffer:
        """Records as the communicator sends them."""
        like = call.send or call.recv
        assert like is not None, "a call that is captured has a buffer"
        return Buffer(at, records * table.RECORD_WORDS, DType.UINT64, None, like.device, like.index)

    def _given(self, own: _Parts | None, at: int) -> dict[str, Any]:
        return {} if own is None else {"own": at, "own_parts": len(own.elements), "offsets": own.offsets}

    def _bounds(self, call: Call, fold: Fold | None, elements: int) -> dict[str, Any]:
        """What the comparison of sums needs."""
        if fold is None or not fold.rounds:
            return {}
        packs = -(-elements * call.dtype.itemsize // _LANE_BYTES)
        numbers = -(-packs // table.FOLD_LANES) * (_LANE_BYTES // call.dtype.itemsize)
        slope, floor = fold.bounds(numbers * (2 if call.dtype in COMPLEX else 1))
        whole = call.dtype not in FLOATS | COMPLEX
        divisor = self._size if call.op is ReduceOp.AVG else 1
        return {"slope": slope, "floor": floor, "most": fold.most, "whole": whole, "divisor": divisor}

    def _fold(self, dtype: DType, op: int, parts: _Parts, to: int, stream: int) -> None:
        count = len(parts.elements)
        most = max(parts.elements) * dtype.itemsize
        blocks = max(1, min(_MOST_BLOCKS // count, -(-most // _BLOCK_BYTES)))
        with self._lock:
            partial = self._memory.take(count * blocks * _RECORD) if blocks > 1 else 0
            tickets = self._memory.take(4 * count) if blocks > 1 else 0
        arguments = table.Fold(offsets=parts.offsets, partial=partial, tickets=tickets, op=op, blocks=blocks)
        name, _ = checks_names(dtype)
        self._launch(name, arguments, count * blocks, table.FOLD_THREADS, parts.buffer.ptr, to, stream)

    def _compare(self, dtype: DType, arguments: table.Comparison, stream: int) -> None:
        _, name = checks_names(dtype)
        arguments.rank, arguments.size = self._rank, self._size
        self._launch(name, arguments, 1, _COMPARING, arguments.given, arguments.to, stream)

    def _launch(
        self, name: str, arguments: ctypes.Structure, blocks: int, threads: int, src: int, dst: int, stream: int
    ) -> None:
        """As calls of the executor are, so that what comes on other streams of the graph comes after it."""
        function = self._device.kernels().function(name)
        shape = self._queue.bind_kernel(function=function, arguments=bytes(arguments), blocks=blocks, threads=threads)
        bound = self._path.bound(shape, f"HETCOLL_CHECK: {name}", [], DType.UINT8)
        self._calls.run(bound, src, dst, stream, True)

    def _enter(self, call: Call, fold: Fold | None, elements: int) -> _Captured:
        with self._lock:
            found = table.Findings.from_address(self._pinned.take(ctypes.sizeof(table.Findings)))
        rounds = fold is not None and fold.rounds
        return _Captured(call.describe(), call_site(), call.dtype, call.op, rounds, elements, found)

    def _watch(self, captured: _Captured) -> None:
        with self._lock:
            self._captured.append(captured)

    # Looking.

    def look(self) -> None:
        """Tell of what replays have found since the last look. What is wrong fails the communicator."""
        wrong = []
        with self._lock:
            for each in self._captured:
                if each.found.odd_replay and not each.odd:
                    each.odd = True
                    self._tell_odd(each)
                if each.found.wrong_replay:
                    wrong.append(self._spell(each))
            if wrong:
                self._captured = [each for each in self._captured if not each.found.wrong_replay]
        if wrong:
            log.error("%s", "; ".join(wrong))
            self._diagnosis.post(Kind.CORRUPT, -1, wrong[0])

    def _tell_odd(self, each: _Captured) -> None:
        found = each.found
        log.error(
            "HETCOLL_CHECK: the input of %s on rank %d is not finite in replay %d of the graph that captured it at %s:"
            " %d of %d elements, the first at %d",
            each.what, self._rank, found.odd_replay, each.site, found.odd, each.elements, found.first,
        )  # fmt: skip

    def _spell(self, each: _Captured) -> str:
        found = each.found
        if found.what == _CAME:
            problem = f" on rank {self._rank} is wrong: what rank {found.where} gave came changed"
        elif found.what == _FOLDED:
            got, wanted = (_number(each, bits) for bits in (found.got, found.wanted))
            every = f"every {table.FOLD_LANES}th {_LANE_BYTES} bytes from byte {_LANE_BYTES * found.where} on"
            folds = f"{each.op.label} of {every} is {got}, and of what the ranks gave {wanted}"
            problem = f" on rank {self._rank} is wrong: {folds}"
        else:
            problem = f" is not the same everywhere: rank {self._rank} and rank {found.where} hold different ones"
        replay = f"in replay {found.wrong_replay} of the graph that captured it at {each.site}"
        return f"HETCOLL_CHECK: the result of {each.what}{problem}, {replay}"

    def close(self) -> None:
        """Give everything back. No graph may be replayed any more."""
        with self._lock, contextlib.ExitStack() as undo:
            self._captured = []
            undo.callback(self._memory.close)
            undo.callback(self._pinned.close)


def _number(each: _Captured, bits: int) -> Any:
    """A fold as `checks.h` keeps it."""
    word = np.uint64(bits)
    if each.rounds or each.dtype in FLOATS:
        return word.view(np.float64)
    return bool(bits) if each.op in LOGICAL else word.astype(element_type(each.dtype))


def _zero(at: int, nbytes: int) -> None:
    ctypes.memset(at, 0, nbytes)
