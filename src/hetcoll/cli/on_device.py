"""A communicator that takes NumPy arrays to a GPU and back, so that the cases of `hetcoll perf` run on its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..buffers import Buffer, read_buffer
from ..communicator import Communicator
from ..vendors.devices.base import Device

_PAGE = 4096
_SECONDS = 60.0


class OnDevice:
    """The operations of `comm` on `device`. Each call waits for its end.

    Arrays that share memory on the host share it on the device, and lie there as they do in their pages here. All
    memory of the arrays' owners goes along and comes back, so what a call must not touch is seen.
    """

    def __init__(self, comm: Communicator, device: Device) -> None:
        self._comm, self._device = comm, device
        self.rank, self.size = comm.rank, comm.size

    def __getattr__(self, name: str) -> Callable[..., None]:
        method = getattr(self._comm, name)

        def call(*args: Any, **options: Any) -> None:
            owners = {id(owner): owner for owner in (_owner(a) for a in args if isinstance(a, np.ndarray))}
            taken = {key: self._device.allocate(owner.nbytes + _PAGE) for key, owner in owners.items()}
            try:
                there = {key: at + (owners[key].ctypes.data - at) % _PAGE for key, at in taken.items()}
                for key, owner in owners.items():
                    self._device.copy(there[key], owner.ctypes.data, owner.nbytes)
                moved = [self._buffer(a, there) if isinstance(a, np.ndarray) else a for a in args]
                work = method(*moved, **options)
                if work is not None:
                    work.wait(_SECONDS)
                for key, owner in owners.items():
                    self._device.copy(owner.ctypes.data, there[key], owner.nbytes)
            finally:
                for at in taken.values():
                    self._device.free(at)

        return call

    def _buffer(self, array: NDArray[Any], there: dict[int, int]) -> Buffer:
        host, owner = read_buffer(array, "array", writable=False), _owner(array)
        kind = "cuda" if self._device.vendor == "cuda" else "rocm"
        address = there[id(owner)] + host.ptr - owner.ctypes.data
        return Buffer(address, host.count, host.dtype, array, kind, self._device.index)


def _owner(array: NDArray[Any]) -> NDArray[Any]:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
