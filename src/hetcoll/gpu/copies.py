"""One-sided messages of a GPU's memory: the copies between it and pinned memory, beside the engine, and how they are
ordered with streams.

Pieces pass through pinned memory of a fixed size (``native/host/staging.h``), which links fill and empty; or a GPU
reads them from the memory of another one of the host, which it has opened (`open`); or RDMA devices of two hosts reach
that of both (`runtime.window_memory`), and nothing is copied. The copies have streams of their
own, on which nothing waits. So what waits for a stream of the user's is not begun before: the engine looks at an event
(`after`).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from typing import TYPE_CHECKING

import hetcoll._native as _native

from ..calls.buffers import KIND_OF, Buffer
from ..errors import ArgumentError, BufferTypeError, DeviceError, InitError
from ..runtime.executor import Shared
from ..vendors.devices.base import URGENT
from ..vendors.devices.kernels.source import PIECES, PIECES_OF_TABLE
from ..vendors.devices.signals import signal_kernels
from . import streams

if TYPE_CHECKING:
    from ..vendors.devices.base import Device
    from .pinned import Pinned

log = logging.getLogger("hetcoll")

_PAGE = 4096
_STAGED = 4 << 20  # bytes each way: they stay in the last-level cache
_FIFO_STAGED, _LEAST_STAGED = 128 << 10, 4 << 10  # of a FIFO, of which there are two for each rank
_PAUSE = 100e-6  # seconds between looks at streams
_ROWS, _ROW = 65536, 24  # of the table of pieces that a kernel reads; bytes of one, `Move` of native/base/copier.h
_SAMPLE = 4096  # bytes that who opens memory reads first


def _sample(rank: int) -> bytes:
    """What that of a rank holds."""
    return bytes((rank + 7 * i) % 251 for i in range(_SAMPLE))


class Copies:
    """Of one rank's GPU. `size`: ranks of the communicator; `pinned`: what it may pin of the host's memory. DeviceError
    where that is too little."""

    def __init__(self, device: Device, engine: _native.Engine, size: int, pinned: Pinned) -> None:
        self._pinned = pinned
        self._device, self._waits = device, list[tuple[int, _native.Gate]]()  # what may still read words, and which
        self._spare: list[tuple[int, int]] = []  # words that no window has: where, and how many
        self._opened: dict[str, list[int]] = {}  # address here and how often, by handle
        self._sample = 0  # this rank's own
        self._right: dict[int, bool] = {}  # whether that of a rank was read right
        self._lock = threading.Lock()
        room = (pinned.windows - _PAGE - _ROWS * _ROW) // 2 // _PAGE * _PAGE
        staged = 2 * max(2 * size * _LEAST_STAGED, min(room, max(_STAGED, 2 * size * _FIFO_STAGED)))
        self._undo = contextlib.ExitStack()
        with device.active(), contextlib.ExitStack() as undo:
            ways = []
            for _ in range(2):
                ways.append(device.stream(URGENT))
                undo.callback(device.destroy_stream, ways[-1])
            first = self._pin(_PAGE + staged, undo)
            ctypes.memset(first, 0, _PAGE)
            zero, word, abort = first, first + 64, first + 128  # of streams that cannot wait by themselves
            functions = {**device.functions(), **signal_kernels(device, word, zero, abort)}
            self._copier = _native.Copier(vendor=device.vendor, functions=functions, into=ways[0], out=ways[1])
            engine.use_copier(self._copier, first + _PAGE, staged)
            self._undo = undo.pop_all()

    @property
    def pinned(self) -> int:
        """See `runtime.executor.Copies`."""
        return self._pinned.held

    def _pin(self, nbytes: int, undo: contextlib.ExitStack) -> int:
        """So many bytes of the host, until `undo`."""
        try:
            with self._pinned.taken(nbytes):
                address = self._device.allocate_host(nbytes)
        except InitError as error:
            raise DeviceError(f"memory for windows: {error}") from error
        undo.callback(self._pinned.give, nbytes)
        undo.callback(self._device.free_host, address)
        return address

    @property
    def vendor(self) -> str:
        """Of the GPU."""
        return self._device.vendor

    def check(self, buffer: Buffer, name: str) -> None:
        """BufferTypeError for memory that is another GPU's."""
        kind = KIND_OF[self._device.vendor]
        if (buffer.device, buffer.index) != (kind, self._device.index):
            wanted = f"memory of {kind}:{self._device.index}, the GPU of this rank"
            raise BufferTypeError(f"{name}: wanted {wanted}, or the host's, got some of {buffer.place}")

    def after(self, stream: object, buffer: Buffer) -> _native.Gate | None:
        """What is on `stream` now, or on the current one of the buffer's library; None where that is done.
        ArgumentError where the driver does not take it, DeviceError where the GPU has failed."""
        handle = streams.handle(stream, buffer)
        try:
            return self._copier.after(handle)
        except _native.Fault as error:
            raise self._refused(error) from error

    def share(self, buffer: Buffer, rank: int) -> Shared | None:
        """How others open this memory; None where the driver does not let them, as of memory mapped by pages."""
        device = self._device
        try:
            with device.active():
                if not self._sample:
                    self._sample = device.allocate(_SAMPLE)
                    self._undo.callback(device.free, self._sample)
                    words = ctypes.create_string_buffer(_sample(rank), _SAMPLE)
                    device.copy(self._sample, ctypes.addressof(words), _SAMPLE)
                base = device.pointer(buffer.ptr).base
                sample = device.ipc_handle(device.pointer(self._sample).base)
                found = device.ipc_handle(base)
                return Shared(device.vendor, found.hex(), buffer.ptr - base, sample.hex())
        except DeviceError as error:
            log.info("memory of %s cannot be shared: %s", device.name, error)
            return None

    def open(self, shared: Shared, rank: int) -> int | None:
        """Where this GPU sees memory of `rank`; None where it cannot, or reads something else there."""
        device = self._device
        with device.active():
            try:
                if rank not in self._right:
                    if not self._right:
                        self._use_kernels()
                    self._right[rank] = self._reads(shared.sample, _sample(rank))
                if self._right[rank]:
                    return self._mapped(shared.memory) + shared.offset
                log.warning("%s reads wrong bytes from rank %d's: pieces go through the host", device.name, rank)
            except DeviceError as error:
                log.info("%s cannot open the memory of rank %d: %s", device.name, rank, error)
            return None

    def _reads(self, handle: str, wanted: bytes) -> bool:
        """Whether this GPU reads that from the beginning of another one's allocation."""
        device, words = self._device, ctypes.create_string_buffer(_SAMPLE)
        with contextlib.ExitStack() as undo:
            sample = self._mapped(handle)
            undo.callback(self.close_shared, handle)
            here = device.allocate(_SAMPLE)
            undo.callback(device.free, here)
            device.copy(here, sample, _SAMPLE)  # as pieces go: from one GPU to the other
            device.copy(ctypes.addressof(words), here, _SAMPLE)
        return words.raw == wanted

    def _use_kernels(self) -> None:
        """Copy engines take some microseconds for each piece: where the device can compile them, kernels have many."""
        try:
            few, many = (self._device.kernels().function(name) for name in (PIECES, PIECES_OF_TABLE))
            table = self._pin(_ROWS * _ROW, self._undo)
            self._copier.use_kernels(few, many, table, _ROWS)
        except DeviceError as error:
            log.warning("%s has no kernel for pieces, copy engines move them: %s", self._device.name, error)

    def _mapped(self, handle: str) -> int:
        if handle not in self._opened:
            self._opened[handle] = [self._device.open_ipc(bytes.fromhex(handle)), 0]
        entry = self._opened[handle]
        entry[1] += 1
        return entry[0]

    def close_shared(self, handle: str) -> None:
        """Undo one `open`."""
        entry = self._opened[handle]
        entry[1] -= 1
        if entry[1] == 0:
            self._device.close_ipc(self._opened.pop(handle)[0])

    def signals(self, count: int) -> int:
        """Pinned memory for so many signals, of 8 bytes each, until `spare` or `close`."""
        with self._lock:
            self._forget_open()
            awaited = [word for word, _ in self._waits]
            for at, n in self._spare:
                if n == count and not any(at <= word < at + 8 * n for word in awaited):
                    self._spare.remove((at, n))
                    return at
        return self._pin(8 * count, self._undo)

    def spare(self, at: int, count: int) -> None:
        """Those of a window that is closed: for another one, once no stream waits for them."""
        with self._lock:
            self._spare.append((at, count))

    def _forget_open(self) -> None:
        self._waits = [each for each in self._waits if not each[1].open]

    def wait(self, word: int, value: int, stream: object) -> None:
        """What comes on `stream` from now on waits until the word holds `value` or more. Errors: as `after`."""
        handle = streams.handle(stream, None)
        try:
            gate = self._copier.wait(word, value, handle)
        except _native.Fault as error:
            raise self._refused(error) from error
        with self._lock:
            self._forget_open()
            if gate is not None:
                self._waits.append((word, gate))

    def _refused(self, fault: _native.Fault) -> ArgumentError | DeviceError:
        if problem := self._copier.failure():
            return DeviceError(problem)
        return ArgumentError(f"stream: wanted one of {self._device.vendor}:{self._device.index}: {fault}")

    def close(self, timeout: float = 5.0) -> None:
        """Give everything back. The engine is closed: so the words let streams go, which may take a moment."""
        deadline = time.monotonic() + timeout
        try:
            while not all(gate.open for _, gate in self._waits):
                if time.monotonic() > deadline:
                    log.warning("streams still wait for signals of windows: their pinned memory is not given back")
                    return
                time.sleep(_PAUSE)
            self._waits.clear()
            for address, _ in self._opened.values():
                self._device.close_ipc(address)
            self._opened.clear()
            self._undo.close()
        except (_native.Fault, DeviceError) as error:  # there is nothing to give back to
            log.warning("the GPU has failed: %s", error)
