"""Kernels that check calls on GPUs (``vendors/devices/kernels/checks.h``), their memory, and their launches."""

from __future__ import annotations

import copy
import ctypes
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import numpy as np

import hetcoll._native as _native

from ..calls.buffers import Buffer
from ..types import DType
from ..vendors.devices.kernels import table
from ..vendors.devices.kernels.source import checks_names

if TYPE_CHECKING:
    from ..vendors.devices.base import Device
    from .shared import Note
    from .snapshot import Spares

RECORD = 8 * table.RECORD_WORDS  # bytes
_CHUNK = 256 << 10  # bytes of memory that is taken at a time
_ALIGNED = 256
_MOST_BLOCKS, _BLOCK_BYTES = 64, 64 << 10  # of a fold: in all, and bytes of a part for one more
_COMPARING = 64  # threads


class Executor(Protocol):
    """What these need of the executor that captures calls (`executor.GpuExecutor`)."""

    @property
    def device(self) -> Device: ...

    @property
    def spares(self) -> Spares: ...

    def stream(self, stream: object, **buffers: Buffer | None) -> int: ...

    def bound(
        self, shape: _native.KernelShape, what: str, notes: Sequence[Note], message: DType | None = None
    ) -> _native.GpuCall: ...


@dataclass(slots=True)
class Parts:
    """A buffer, the elements of its parts, and the address of the table of them."""

    buffer: Buffer
    elements: Sequence[int]
    offsets: int


class _Memory(Protocol):
    def take(self, nbytes: int) -> int: ...

    def close(self) -> None: ...


class _Arena:
    """Memory that stays until `close`, zero at first. What is given back is taken again for what has its size."""

    def __init__(
        self, allocate: Callable[[int], int], free: Callable[[int], None], fill: Callable[[int, int], object]
    ) -> None:
        self._allocate, self._free, self._clear = allocate, free, fill
        self._lock = threading.Lock()  # of what follows
        self._chunks: list[int] = []
        self._unused: defaultdict[int, list[int]] = defaultdict(list)  # by size
        self._at = self._end = 0

    def take(self, nbytes: int) -> int:
        nbytes = -(-nbytes // _ALIGNED) * _ALIGNED
        with self._lock:
            if unused := self._unused[nbytes]:
                return unused.pop()
            if self._end - self._at < nbytes:
                room = max(nbytes, _CHUNK)
                self._at = self._allocate(room)
                self._end = self._at + room
                self._chunks.append(self._at)
                self._clear(self._at, room)
            self._at += nbytes
            return self._at - nbytes

    def give_back(self, at: int, nbytes: int) -> None:
        with self._lock:
            self._unused[-(-nbytes // _ALIGNED) * _ALIGNED].append(at)

    def close(self) -> None:
        while self._chunks:
            self._free(self._chunks.pop())


class _Loan:
    """Memory of an arena that `close` gives back to it."""

    def __init__(self, arena: _Arena) -> None:
        self._arena = arena
        self._taken: list[tuple[int, int]] = []

    def take(self, nbytes: int) -> int:
        at = self._arena.take(nbytes)
        self._taken.append((at, nbytes))
        return at

    def close(self) -> None:
        while self._taken:
            self._arena.give_back(*self._taken.pop())


class Folds:
    """Those of one communicator on this rank's GPU. Graphs may be replayed until it is closed."""

    def __init__(self, path: Executor, queue: _native.DeviceQueue, calls: _native.GpuCalls) -> None:
        self._path, self._queue, self._calls, self._device = path, queue, calls, path.device
        device = self._device
        device.kernels().load_kept()  # before replays are under way, for which a driver may wait when it loads kernels
        on_gpu = (device.allocate, device.free, device.clear)
        on_host = (device.allocate_host, device.free_host, lambda at, nbytes: ctypes.memset(at, 0, nbytes))
        self._arenas = _Arena(*on_gpu), _Arena(*on_gpu), _Arena(*on_host)
        self._memory: _Memory
        self._tickets: _Memory  # that are 0 whenever no kernel is at work
        self._pinned: _Memory
        self._memory, self._tickets, self._pinned = self._arenas

    def once(self) -> Folds:
        """The same of one call, whose memory others have after its `close`: once its comparison is over."""
        made = copy.copy(self)
        made._memory, made._tickets, made._pinned = map(_Loan, self._arenas)
        return made

    def records(self, count: int) -> int:
        """The place of so many records."""
        return self._memory.take(count * RECORD)

    def findings(self) -> table.Findings:
        """In pinned memory."""
        nbytes = ctypes.sizeof(table.Findings)
        at = self._pinned.take(nbytes)
        ctypes.memset(at, 0, nbytes)
        return table.Findings.from_address(at)

    def parts(self, buffer: Buffer, elements: Sequence[int]) -> Parts:
        offsets = np.array([*accumulate(elements, initial=0)], np.uint64)
        at = self._pinned.take(offsets.nbytes)
        ctypes.memmove(at, offsets.ctypes.data, offsets.nbytes)
        return Parts(buffer, elements, at)

    def fold(self, parts: Parts, op: int, to: int, stream: int) -> None:
        """Enqueue or capture on `stream` that a record of each part is written to `to`."""
        count, dtype = len(parts.elements), parts.buffer.dtype
        most = max(parts.elements) * dtype.itemsize
        blocks = max(1, min(_MOST_BLOCKS // count, -(-most // _BLOCK_BYTES)))
        arguments = table.Fold(offsets=parts.offsets, op=op, blocks=blocks)
        if blocks > 1:  # graphs may run at one time, so each has its own
            arguments.partial, arguments.tickets = self.records(count * blocks), self._tickets.take(4 * count)
        name, _ = checks_names(dtype)
        self._launch(name, arguments, count * blocks, table.FOLD_THREADS, parts.buffer.ptr, to, stream)

    def compare(self, dtype: DType, arguments: table.Comparison, to: table.Findings, stream: int) -> None:
        """Enqueue or capture on `stream` that records are compared."""
        _, name = checks_names(dtype)
        self._launch(name, arguments, 1, _COMPARING, arguments.given, ctypes.addressof(to), stream)

    def _launch(
        self, name: str, arguments: ctypes.Structure, blocks: int, threads: int, src: int, dst: int, stream: int
    ) -> None:
        """As calls of the executor are, so that what comes on other streams of the graph comes after it."""
        function, own = self._device.kernels().function(name), bytes(arguments)
        shape = self._queue.bind_kernel(function=function, arguments=own, captured=own, blocks=blocks, threads=threads)
        bound = self._path.bound(shape, f"HETCOLL_CHECK: {name}", [], DType.UINT8)
        self._calls.run(bound, src, dst, stream, True)

    def close(self) -> None:
        """Give the memory back."""
        for memory in (self._memory, self._tickets, self._pinned):
            memory.close()
