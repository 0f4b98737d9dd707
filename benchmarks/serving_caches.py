"""What serving.py moves: shapes of puts, and the caches of two ranks, on hosts or GPUs."""

from __future__ import annotations

import ctypes
import os
from typing import Any, NamedTuple

import numpy as np

_ODD = np.uint64(0x9E3779B97F4A7C15)


class Shape(NamedTuple):
    """Bytes of a piece, pieces of a put, puts under way."""

    piece: int
    pieces: int
    depth: int

    @property
    def total(self) -> int:
        return self.pieces * self.depth

    @property
    def nbytes(self) -> int:
        return self.piece * self.total

    def places(self) -> tuple[Any, Any]:
        """Which pieces go where."""
        return np.random.default_rng(1).permutation(self.total), np.random.default_rng(2).permutation(self.total)

    def content(self) -> Any:
        """The sender's cache: each word is its own."""
        return (np.arange(self.nbytes // 8, dtype=np.uint64) * _ODD + np.uint64(self.total)).view(np.uint8)

    def wanted(self) -> Any:
        """What is to come."""
        source, target = self.places()
        found = np.empty((self.total, self.piece), np.uint8)
        found[target] = self.content().reshape(self.total, self.piece)[source]
        return found.reshape(-1)


def gpu(rank: int) -> Any:
    """This process's, as BENCH_DEVICE says."""
    from hetcoll.vendors.devices import cuda, hip

    wanted = os.environ["BENCH_DEVICE"]
    driver = hip if wanted == "hip" or (wanted == "auto" and cuda.why_not()) else cuda
    if reason := driver.why_not():
        raise SystemExit(f"--device {wanted}: {reason}")
    found = driver.devices()
    return found[rank % len(found)]


class Cache:
    """Bytes on the host, or on this process's GPU; there through pinned memory."""

    def __init__(self, rank: int, nbytes: int, on_gpu: bool) -> None:
        self._device = gpu(rank) if on_gpu else None
        self._pinned = 0
        if self._device is None:
            self.array: Any = np.zeros(nbytes, np.uint8)
            return
        from hetcoll.gpu.array import DeviceArray

        self.array = DeviceArray(self._device, nbytes, "uint8")
        self._pinned = self._device.allocate_host(nbytes)
        self._host: Any = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self._pinned))

    def set(self, values: Any) -> None:
        if self._device is None:
            self.array[:] = values
            return
        self._host[:] = values
        self._device.copy(self.array.ptr, self._pinned, len(self._host))
        self._device.synchronize()

    def get(self) -> Any:
        if self._device is None:
            return self.array
        self._device.synchronize()
        self._device.copy(self._pinned, self.array.ptr, len(self._host))
        return self._host

    def free(self) -> None:
        if self._device is not None and self._pinned:
            self._device.synchronize()
            self._device.free_host(self._pinned)
            self._pinned = 0
