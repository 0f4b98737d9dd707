"""A communicator for tests whose collectives are captured into graphs, and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from device_checks import Capture
from on_gpu import Copies

import hetcoll
from hetcoll.vendors.devices.base import Device


class InGraph:
    """The collectives of `comm`, each captured into a graph of its own that is replayed on memory of zeros first."""

    def __init__(self, comm: hetcoll.Communicator, device: Device, stream: int, replays: int = 2) -> None:
        self._comm, self._device, self._stream, self._replays = comm, device, stream, replays
        self.rank, self.size = comm.rank, comm.size

    def __getattr__(self, name: str) -> Callable[..., hetcoll.Work]:
        method, device, stream = getattr(self._comm, name), self._device, self._stream

        def call(*args: Any, **options: Any) -> hetcoll.Work:
            arrays = [a for a in args if isinstance(a, np.ndarray)]
            with Copies(device, arrays) as copies:
                moved = [copies.buffer(a) if isinstance(a, np.ndarray) else a for a in args]
                zeros = np.zeros(max((a.nbytes for a in arrays), default=0), np.uint8)
                with Capture(device, stream) as captured:
                    method(*moved, stream=stream, **options)
                for turn in range(self._replays):
                    device.synchronize()
                    copies.__enter__()
                    for array, buffer in zip(arrays, filter(_is_buffer, moved), strict=True):
                        if turn + 1 < self._replays and array.nbytes:
                            device.copy(buffer.ptr, zeros.ctypes.data, array.nbytes)
                    device.synchronize()
                    captured.replay(stream)
                device.synchronize()
                copies.fetch()
                captured.close()
            return hetcoll.Work()

        return call


def _is_buffer(value: object) -> bool:
    return isinstance(value, hetcoll.calls.buffers.Buffer)
