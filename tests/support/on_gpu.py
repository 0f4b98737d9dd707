"""A communicator for tests that takes NumPy arrays to the GPU and back: the host suite's cases run on device memory.

Arrays that share memory share it there as well, so that in-place calls are in place. Memory around the arrays goes
along and comes back, so that what a call must not touch is seen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from dlpack_arrays import Quick
from numpy.typing import NDArray

import hetcoll
from hetcoll.calls.buffers import Buffer, read_buffer
from hetcoll.vendors.devices.base import Device

Array = NDArray[Any]
KINDS = {"cuda": 2, "hip": 10}  # dlpack.h: kDLCUDA, kDLROCM
_AROUND = 64  # bytes of the host's memory before and behind each array that take part, as far as they are NumPy's


class OnGpu:
    """The collectives of `comm`, on `device`, enqueued on `stream`; `quick`: on its library's current stream."""

    def __init__(self, comm: hetcoll.Communicator, device: Device, stream: int = 0, *, quick: bool = False) -> None:
        self._comm, self._device, self._stream, self._quick = comm, device, stream, quick
        self.rank, self.size = comm.rank, comm.size
        if quick:
            Quick.streams[KINDS[device.vendor], device.index] = stream

    def __getattr__(self, name: str) -> Callable[..., hetcoll.Work]:
        method = getattr(self._comm, name)

        def call(*args: Any, **options: Any) -> hetcoll.Work:
            arrays = [a for a in args if isinstance(a, np.ndarray)]
            with Copies(self._device, arrays) as copies:
                moved: list[Any] = [copies.buffer(a) if isinstance(a, np.ndarray) else a for a in args]
                if self._quick:
                    moved = [_quick(self._device, a) if isinstance(a, Buffer) else a for a in moved]
                    work = method(*moved, **options)
                else:
                    work = method(*moved, stream=self._stream, **options)
                work.wait(60)
                self._device.synchronize()
                copies.fetch()
            return hetcoll.Work()

        return call


class InARow:
    """The collectives of `comm`, kept until the first is waited for. Then all are enqueued, by turns on `streams` and
    with a `pause` before each. The host waits for none before the last one is enqueued."""

    def __init__(
        self, comm: hetcoll.Communicator, device: Device, streams: Sequence[int], pause: Callable[[], object]
    ) -> None:
        self._comm, self._device, self._streams, self._pause = comm, device, streams, pause
        self._asked: list[Callable[..., hetcoll.Work]] = []
        self.rank, self.size = comm.rank, comm.size

    def __getattr__(self, name: str) -> Callable[..., Landing]:
        method = getattr(self._comm, name)

        def call(*args: Any, async_op: bool, **options: Any) -> Landing:
            copies = Copies(self._device, [a for a in args if isinstance(a, np.ndarray)]).__enter__()
            moved = [copies.buffer(a) if isinstance(a, np.ndarray) else a for a in args]
            self._asked.append(functools.partial(method, *moved, **options))
            return Landing(self, copies)

        return call

    def finish(self) -> None:
        asked, self._asked, works = self._asked, [], []
        self._device.synchronize()
        for turn, call in enumerate(asked):
            self._pause()
            works.append(call(stream=self._streams[turn % len(self._streams)], async_op=turn % 3 == 1))
        for work in works:
            work.wait(60)
        self._device.synchronize()


class Landing:
    """What one of these calls will have left."""

    def __init__(self, row: InARow, copies: Copies) -> None:
        self._row, self._copies = row, copies

    def wait(self) -> None:
        self._row.finish()
        self._copies.fetch()
        self._copies.__exit__()


def _quick(device: Device, buffer: Buffer) -> Quick:
    return Quick(KINDS[device.vendor], device.index, buffer.dtype, (buffer.count,), address=buffer.ptr)


def _extent(array: Array) -> tuple[int, int]:
    """The memory that takes part: never beyond what NumPy allocated for the array, since it is written back later.

    An empty slice points to the begin of what it was cut from, wherever the slice was.
    """
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    first, last = np.lib.array_utils.byte_bounds(owner)
    at = array.ctypes.data
    return max(first, at - _AROUND), min(last, at + array.nbytes + _AROUND)


class Copies:
    """The memory of some arrays on the device, each stretch of it once."""

    def __init__(self, device: Device, arrays: Sequence[Array]) -> None:
        self._device = device
        kind = "cuda" if device.vendor == "cuda" else "rocm"
        self._place = (kind, device.index)
        spans: list[list[int]] = []
        for at, end in sorted(map(_extent, arrays)):
            if spans and at < spans[-1][1]:
                spans[-1][1] = max(spans[-1][1], end)
            else:
                spans.append([at, end])
        self._spans = [(at, end, device.allocate(max(1, end - at))) for at, end in spans]

    def __enter__(self) -> Copies:
        for at, end, there in self._spans:
            self._device.copy(there, at, end - at)
        return self

    def buffer(self, array: Array) -> Buffer:
        host = read_buffer(array, "array", writable=False)
        first, last = _extent(array)
        at, _, there = next(s for s in self._spans if s[0] <= first and last <= s[1])
        return Buffer(there + host.ptr - at, host.count, host.dtype, array, *self._place)

    def fetch(self) -> None:
        for at, end, there in self._spans:
            self._device.copy(at, there, end - at)

    def __exit__(self, *_: object) -> None:
        for _, _, there in self._spans:
            self._device.free(there)
