"""Host memory that the GPUs of one host have mapped, beside the slots (`slots`): each rank has a part of it, which the
kernels of all read and write. For what GPUs that do not see each other's memory pass on by kernels alone."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InitError

if TYPE_CHECKING:
    from ..vendors.devices.base import Device
    from .pinned import Pinned


class MappedMemory:
    """This process's mapping of a file that all ranks of a host share, with a part of so many bytes for each. InitError
    or DeviceError where it cannot be had."""

    def __init__(self, fd: int, parts: Sequence[int], device: Device, pinned: Pinned) -> None:
        sizes = [whole_pages(nbytes) for nbytes in parts]
        whole, share = sum(sizes), sum(sizes) // len(sizes)
        try:
            memory = np.frombuffer(mmap.mmap(fd, whole, mmap.MAP_SHARED), np.uint8)
        except OSError as error:
            raise InitError(f"mapping {whole} bytes for GPUs: {error.strerror}") from error
        address = int(memory.ctypes.data)
        with pinned.taken(share):
            memory[:: mmap.PAGESIZE].sum()  # drivers pin pages that exist
            first = device.register_host(address, whole)
        self.at = [first + sum(sizes[:rank]) for rank in range(len(sizes))]
        """Where the device sees each part."""
        self._end = weakref.finalize(self, _give_back, device, memory, pinned, share)
        self._end.atexit = False  # the driver's own end takes it

    def close(self) -> None:
        """Unmap. The device must be done with it."""
        self._end()


def whole_pages(nbytes: int) -> int:
    """Bytes of the pages that so many need."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _give_back(device: Device, memory: np.ndarray[tuple[int], np.dtype[np.uint8]], pinned: Pinned, share: int) -> None:
    """The last array of it unmaps it."""
    device.unregister_host(int(memory.ctypes.data))
    pinned.give(share)
