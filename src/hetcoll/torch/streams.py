"""Streams of GPUs as torch knows them, at the least cost to the host.

`torch.cuda.current_stream` and `torch.cuda.stream` take dozens of calls in Python, several times an operation: most of
what an operation costs. What they end in is used here directly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

_known: dict[tuple[int, int, int], torch.cuda.Stream] = {}  # by what torch tells of a stream: number, device, its type


def current(device: int) -> torch.cuda.Stream:
    """The stream of GPU `device` that is current on this thread: for one stream always the same object."""
    place = torch._C._cuda_getCurrentStream(device)
    found = _known.get(place)
    if found is None:
        number, index, kind = place
        made = torch.cuda.Stream(stream_id=number, device_index=index, device_type=kind)
        found = _known.setdefault(place, made)
    return found


def on_device(device: int, start: Callable[[], object]) -> None:
    """Call `start` with GPU `device` as the current one."""
    before = torch._C._cuda_exchangeDevice(device)
    try:
        start()
    finally:
        if before != device:
            torch._C._cuda_exchangeDevice(before)


def capturing() -> bool:
    """Whether the current stream of the current GPU is being captured into a graph, where no event may be asked."""
    return bool(torch._C._cuda_isCurrentStreamCapturing())


class Lane:
    """A stream of a group's, on GPU `device`, for operations that their caller's stream does not wait for."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._place = (self.stream.stream_id, self.stream.device_index, self.stream.device_type)
        _known[self._place] = self.stream
        self._begin = torch.cuda.Event()  # one for all operations: who waits, waits for what it marks then
        self._lock = threading.Lock()  # of marking it and waiting

    def run(self, start: Callable[[], object]) -> torch.cuda.Event:
        """Call `start` with this stream as the current one, after what is on the caller's now; the event is its end."""
        ended: torch.cuda.Event = torch.cuda.Event()

        def run() -> None:
            before = current(self.device)
            with self._lock:
                self._begin.record(before)
                self._begin.wait(self.stream)
            _select(self.stream)
            try:
                start()
            finally:
                _select(before)
            ended.record(self.stream)

        on_device(self.device, run)
        return ended


def _select(stream: torch.cuda.Stream) -> None:
    """`torch.cuda.set_stream`."""
    torch._C._cuda_setStream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )
