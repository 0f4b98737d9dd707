"""Kernels that check what graphs capture (``vendors/devices/kernels/checks.h``), their memory, and their launches."""

from __future__ import annotations

import ctypes
import threading
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
from .array import clear

if TYPE_CHECKING:
    from ..vendors.devices.base import Device
    from .shared import Note

RECORD = 8 * table.RECORD_WORDS  # bytes
_CHUNK = 256 << 10  # bytes of memory that is taken at a time
_ALIGNED = 256
_MOST_BLOCKS, _BLOCK_BYTES = 64, 64 << 10  # of a fold: in all, and bytes of a part for one more
_COMPARING = 64  # threads


class Executor(Protocol):
    """What these need of the executor that captures calls (`executor.GpuExecutor`)."""

    @property
    def device(self) -> Device: ...

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


class _Arena:
    """Memory that stays until `close`, zero at first."""

    def __init__(
        self, allocate: Callable[[int], int], free: Callable[[int], None], fill: Callable[[int, int], object]
    ) -> None:
        self._allocate, self._free, self._clear = allocate, free, fill
        self._lock = threading.Lock()  # of what follows
        self._chunks: list[int] = []
        self._at = self._end = 0

    def take(self, nbytes: int) -> int:
        nbytes = -(-nbytes // _ALIGNED) * _ALIGNED
        with self._lock:
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


class Folds:
    """Those of one communicator on this rank's GPU. Graphs may be replayed until it is closed."""

    def __init__(self, path: Executor, queue: _native.DeviceQueue, calls: _native.GpuCalls) -> None:
        self._path, self._queue, self._calls, self._device = path, queue, calls, path.device
        device = self._device
        device.kernels().load_kept()  # before replays are under way, for which a driver may wait when it loads kernels
        self._memory = _Arena(device.allocate, device.free, lambda at, nbytes: clear(device, at, nbytes))
        self._pinned = _Arena(device.allocate_host, device.free_host, lambda at, nbytes: ctypes.memset(at, 0, nbytes))

    def records(self, count: int) -> int:
        """The place of so many records."""
        return self._memory.take(count * RECORD)

    def findings(self) -> table.Findings:
        """In pinned memory."""
        return table.Findings.from_address(self._pinned.take(ctypes.sizeof(table.Findings)))

    def parts(self, buffer: Buffer, elements: Sequence[int]) -> Parts:
        offsets = np.array([*accumulate(elements, initial=0)], np.uint64)
        at = self._pinned.take(offsets.nbytes)
        ctypes.memmove(at, offsets.ctypes.data, offsets.nbytes)
        return Parts(buffer, elements, at)

    def fold(self, parts: Parts, op: int, to: int, stream: int) -> None:
        """Capture on `stream` that a record of each part is written to `to`."""
        count, dtype = len(parts.elements), parts.buffer.dtype
        most = max(parts.elements) * dtype.itemsize
        blocks = max(1, min(_MOST_BLOCKS // count, -(-most // _BLOCK_BYTES)))
        arguments = table.Fold(offsets=parts.offsets, op=op, blocks=blocks)
        if blocks > 1:  # graphs may run at one time, so each has its own
            arguments.partial, arguments.tickets = self.records(count * blocks), self._memory.take(4 * count)
        name, _ = checks_names(dtype)
        self._launch(name, arguments, count * blocks, table.FOLD_THREADS, parts.buffer.ptr, to, stream)

    def compare(self, dtype: DType, arguments: table.Comparison, to: table.Findings, stream: int) -> None:
        """Capture on `stream` that records are compared."""
        _, name = checks_names(dtype)
        self._launch(name, arguments, 1, _COMPARING, arguments.given, ctypes.addressof(to), stream)

    def _launch(
        self, name: str, arguments: ctypes.Structure, blocks: int, threads: int, src: int, dst: int, stream: int
    ) -> None:
        """As calls of the executor are, so that what comes on other streams of the graph comes after it."""
        function = self._device.kernels().function(name)
        shape = self._queue.bind_kernel(function=function, arguments=bytes(arguments), blocks=blocks, threads=threads)
        bound = self._path.bound(shape, f"HETCOLL_CHECK: {name}", [], DType.UINT8)
        self._calls.run(bound, src, dst, stream, True)

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()
        self._pinned.close()
