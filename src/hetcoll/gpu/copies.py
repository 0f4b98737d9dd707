"""One-sided messages of a GPU's memory: the copies between it and pinned memory, beside the engine, and how they are
ordered with streams.

Pieces pass through pinned memory of a fixed size (``native/host/staging.h``), which links fill and empty. The copies
have streams of their own, on which nothing waits. So what waits for a stream of the user's is not begun before: the
engine looks at an event (`after`).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from typing import TYPE_CHECKING

import hetcoll._native as _native

from ..calls.buffers import Buffer
from ..errors import ArgumentError, BufferTypeError, DeviceError
from ..vendors.devices.base import URGENT
from ..vendors.devices.signals import signal_kernels
from . import streams

if TYPE_CHECKING:
    from ..vendors.devices.base import Device

log = logging.getLogger("hetcoll")

_PAGE = 4096
_STAGED = 4 << 20  # bytes each way: they stay in the last-level cache
_LEAST_STAGED = 128 << 10  # of a FIFO, of which there are two for each rank
_PAUSE = 100e-6  # seconds between looks at streams


class Copies:
    """Of one rank's GPU. `size`: ranks of the communicator."""

    def __init__(self, device: Device, engine: _native.Engine, size: int) -> None:
        self._device, self._waits = device, list[_native.Gate]()  # what may still read words
        self._lock = threading.Lock()
        staged = 2 * max(_STAGED, 2 * size * _LEAST_STAGED)
        self._undo = contextlib.ExitStack()
        with device.active(), contextlib.ExitStack() as undo:
            ways = []
            for _ in range(2):
                ways.append(device.stream(URGENT))
                undo.callback(device.destroy_stream, ways[-1])
            pinned = device.allocate_host(_PAGE + staged)
            undo.callback(device.free_host, pinned)
            ctypes.memset(pinned, 0, _PAGE)
            zero, word, abort = pinned, pinned + 64, pinned + 128  # of streams that cannot wait by themselves
            functions = {**device.functions(), **signal_kernels(device, word, zero, abort)}
            self._copier = _native.Copier(vendor=device.vendor, functions=functions, into=ways[0], out=ways[1])
            engine.use_copier(self._copier, pinned + _PAGE, staged)
            self._undo = undo.pop_all()
        self.pinned = _PAGE + staged

    def check(self, buffer: Buffer, name: str) -> None:
        """BufferTypeError for memory that is another GPU's."""
        kind = "cuda" if self._device.vendor == "cuda" else "rocm"
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

    def signals(self, count: int) -> int:
        """Pinned memory for so many signals, of 8 bytes each, until `close`."""
        nbytes = 8 * count
        words = self._device.allocate_host(nbytes)
        self._undo.callback(self._device.free_host, words)
        self.pinned += nbytes
        return words

    def wait(self, word: int, value: int, stream: object) -> None:
        """What comes on `stream` from now on waits until the word holds `value` or more. Errors: as `after`."""
        handle = streams.handle(stream, None)
        try:
            gate = self._copier.wait(word, value, handle)
        except _native.Fault as error:
            raise self._refused(error) from error
        with self._lock:
            self._waits = [each for each in (*self._waits, gate) if each is not None and not each.open]

    def _refused(self, fault: _native.Fault) -> ArgumentError | DeviceError:
        if problem := self._copier.failure():
            return DeviceError(problem)
        return ArgumentError(f"stream: wanted one of {self._device.vendor}:{self._device.index}: {fault}")

    def close(self, timeout: float = 5.0) -> None:
        """Give everything back. The engine is closed: so the words let streams go, which may take a moment."""
        deadline = time.monotonic() + timeout
        try:
            while not all(gate.open for gate in self._waits):
                if time.monotonic() > deadline:
                    log.warning("streams still wait for signals of windows: their pinned memory is not given back")
                    return
                time.sleep(_PAUSE)
            self._waits.clear()
            self._undo.close()
        except (_native.Fault, DeviceError) as error:  # there is nothing to give back to
            log.warning("the GPU has failed: %s", error)
