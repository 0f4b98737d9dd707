"""What memory of a GPU holds at one point of a stream, for the host to look at later."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..calls import check_seconds
from ..calls.buffers import Buffer
from ..errors import CollectiveTimeoutError, DeviceError
from ..runtime.executor import Snapshot
from . import streams

if TYPE_CHECKING:
    from ..vendors.devices.base import Device
    from .pinned import Pinned

_LEAST = 4 << 10  # bytes
_PAUSES = (20e-6, 1e-3)  # seconds between looks at whether the copy is there


class Spares:
    """Pinned memory of snapshots that are over, for later ones. A driver that takes some back waits for all streams.
    On one of them another thread's receive may stand, whose peer waits for what this rank is about to send."""

    def __init__(self, device: Device, pinned: Pinned) -> None:
        self.device, self._pinned = device, pinned
        self._spare: dict[int, deque[int]] = {}  # by bytes; a snapshot may end while garbage is collected, so no lock
        self._closed = False

    def take(self, nbytes: int) -> tuple[int, int]:
        """Some, and how many bytes it has: `nbytes` or more."""
        size = max(_LEAST, 1 << (nbytes - 1).bit_length() if nbytes else 0)
        try:
            return self._spare[size].pop(), size
        except LookupError:
            at = self.device.allocate_host(size)
            self._pinned.count(size)
            return at, size

    def give(self, at: int, size: int) -> None:
        """What `take` gave."""
        self._spare.setdefault(size, deque()).append(at)
        if self._closed:
            self.close()

    def close(self) -> None:
        """Give all back to the driver, now and from now on."""
        self._closed = True
        for size, spare in list(self._spare.items()):
            while spare:
                self.device.free_host(spare.pop())
                self._pinned.give(size)


class GpuSnapshot(Snapshot):
    """A copy of `buffer` in pinned memory, begun behind what is on `stream` now."""

    __slots__ = ("_at", "_buffer", "_device", "_error", "_event", "_over", "_size", "_spares")

    def __init__(self, spares: Spares, buffer: Buffer, stream: int) -> None:
        super().__init__(what="a copy of what a GPU has received")
        self._spares, self._buffer, self._over = spares, buffer, False
        self._device = device = spares.device
        self._error: DeviceError | None = None
        self._at = self._event = 0
        with device.active():
            self._at, self._size = spares.take(buffer.nbytes)
            self._event = device.event()
            device.copy(self._at, buffer.ptr, buffer.nbytes, stream)
            device.record(self._event, stream)

    def wait(self, timeout: float | None = None) -> None:
        """Block until the copy is there: streams that wait for others are let go when the communicator fails."""
        deadline = None if timeout is None else time.monotonic() + check_seconds(timeout)
        pause = _PAUSES[0]
        while not self.done:
            if deadline is not None and time.monotonic() > deadline:
                raise CollectiveTimeoutError(f"{self._what} is not there after {timeout:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])
        if self._error is not None:
            raise self._error

    def wait_stream(self, stream: object = None) -> None:
        """What comes on `stream` later begins when the copy is there."""
        with self._device.active():
            self._device.wait(streams.handle(stream, self._buffer), self._event)

    @property
    def done(self) -> bool:
        if not self._over:
            try:
                self._over = self._device.query(self._event)
            except DeviceError as error:
                self._over, self._error = True, error
        return self._over

    @property
    def error(self) -> Exception | None:
        return self._error

    def take(self) -> Buffer:
        """The copy, in memory of its own; once it is there."""
        data = np.empty(self._buffer.nbytes, np.uint8)
        ctypes.memmove(data.ctypes.data, self._at, data.nbytes)
        self._free()
        return replace(self._buffer, ptr=int(data.ctypes.data), owner=data, device="cpu", index=0, stream=None)

    def _free(self) -> None:
        with contextlib.suppress(DeviceError), self._device.active():  # a GPU that has failed takes nothing back
            if self._at:
                self._spares.give(self._at, self._size)
            if self._event:
                self._device.destroy_event(self._event)
        self._at = self._event = 0

    def __del__(self) -> None:
        self._free()
