"""What calls on a GPU need beside their buffers: memory for what passes through, and streams beside the user's."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import hetcoll._native as _native

if TYPE_CHECKING:
    from ..vendors.devices.base import Device


class PassingMemory:
    """Of one queue, or of all that graphs have captured of it: `staging` holds messages that are added on arrival, of
    up to `slot_bytes`."""

    def __init__(self, device: Device, slot_bytes: int) -> None:
        self._device, self._scratch_bytes, self._undo = device, 0, contextlib.ExitStack()
        self.staging = self._allocate(_native.STAGED_MESSAGES * slot_bytes)

    def _allocate(self, nbytes: int) -> int:
        found = self._device.allocate(nbytes)
        self._undo.callback(self._device.free, found)
        return found

    def scratch(self, nbytes: int) -> int | None:
        """New scratch memory for plans that need so much, at least twice as much as before; None where what there is
        suffices. The old one stays until `close`: streams may still use it, and graphs know it."""
        if nbytes <= self._scratch_bytes:
            return None
        more = max(nbytes, 2 * self._scratch_bytes)
        found = self._allocate(more)
        self._scratch_bytes = more  # only now: what could not be had is asked for again
        return found

    def close(self) -> None:
        """Give everything back. Nothing may be under way, and no graph may be replayed any more."""
        self._undo.close()


class SideStream:
    """A stream for calls that no stream of the user's waits for, of this `priority`."""

    def __init__(self, device: Device, priority: int = 0) -> None:
        self._device = device
        self._stream, self._begun = device.stream(priority), device.event()

    def behind(self, stream: int) -> int:
        """It, on which what comes from now on begins after what is on `stream` now."""
        self._device.record(self._begun, stream)
        self._device.wait(self._stream, self._begun)
        return self._stream

    def close(self) -> None:
        """Give it back. Nothing may be under way."""
        self._device.destroy_stream(self._stream)
        self._device.destroy_event(self._begun)
