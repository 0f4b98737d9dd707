"""An array on a GPU: what `Communicator.empty` gives for one, and what the benchmark measures with.

It is no array library: it has a shape and a type, can be copied from and to NumPy, and shows itself to PyTorch, CuPy,
JAX and Numba through `__cuda_array_interface__` (NVIDIA) or DLPack, so that they use the memory without a copy.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..calls.buffers import KIND_OF, Buffer, element_type
from ..errors import ArgumentError, DeviceError
from ..types import DType

if TYPE_CHECKING:
    from ..vendors.devices.base import Device


_PAUSE = 100e-6  # seconds between looks at a GPU
_DEFAULT_STREAM = 0  # on which work on these arrays is, where a call names none


class Residual:
    """What compression lost of a buffer on a GPU, kept there: `nbytes` from `address` on. `settled`: no call is under
    way."""

    def __init__(self, device: Device, nbytes: int, settled: Callable[[], bool]) -> None:
        self._device, self._settled, self.nbytes = device, settled, nbytes
        self.address = device.allocate(nbytes)

    @classmethod
    def cleared(cls, device: Device, nbytes: int, settled: Callable[[], bool]) -> Residual | None:
        """Nothing lost yet. None where the GPU is full: the call goes on without, since other ranks may be in it."""
        try:
            made = cls(device, nbytes, settled)
        except DeviceError:
            return None
        device.clear(made.address, nbytes)
        return made

    def free(self) -> None:
        """Give the memory back, once no call is under way."""
        while not self._settled():
            time.sleep(_PAUSE)
        self._device.free(self.address)


class DeviceArray:
    """Uninitialised memory of `device`, C-contiguous. `dtype` is NumPy's, or the name of one of ml_dtypes'.

    The memory is given back with the array, which must outlive the work that uses it.
    """

    def __init__(self, device: Device, shape: int | Sequence[int], dtype: Any = "float32") -> None:
        self.device = device
        self.dtype: np.dtype[Any] = element_type(dtype)
        self._element = DType[self.dtype.name.upper()]
        self._kind = KIND_OF[device.vendor]
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.size = math.prod(self.shape)
        self.nbytes = self.size * self.dtype.itemsize
        self.ptr = device.allocate(max(1, self.nbytes))
        self._free = weakref.finalize(self, device.free, self.ptr)
        self._free.atexit = False  # the driver's own end takes it

    @classmethod
    def of(cls, device: Device, array: np.ndarray[Any, Any]) -> DeviceArray:
        """A copy of a NumPy array."""
        made = cls(device, array.shape, array.dtype)
        made.set(array)
        return made

    def new_empty(self, shape: int | Sequence[int]) -> DeviceArray:
        """Another one of this type and device, as PyTorch's tensors have it."""
        return DeviceArray(self.device, shape, self.dtype)

    def set(self, array: np.ndarray[Any, Any]) -> None:
        """Fill it from a NumPy array of its shape and type. Complete on return."""
        if array.shape != self.shape or array.dtype != self.dtype:
            raise ArgumentError(f"array: wanted {self.dtype} {self.shape}, got {array.dtype} {array.shape}")
        array = np.ascontiguousarray(array)
        self.device.synchronize()
        self.device.copy(self.ptr, int(array.ctypes.data), self.nbytes)

    def get(self) -> np.ndarray[Any, Any]:
        """A NumPy copy, of what is there when all work on the device is done."""
        out = np.empty(self.shape, self.dtype)
        self.device.synchronize()
        self.device.copy(int(out.ctypes.data), self.ptr, self.nbytes)
        return out

    def buffer(self, start: int = 0, count: int | None = None) -> Buffer:
        """Elements [start, start + count) as the communicator sees them."""
        count = self.size - start if count is None else count
        if start < 0 or count < 0 or start + count > self.size:
            raise ArgumentError(f"wanted elements within {self.size}, got {count} from {start} on")
        at = self.ptr + start * self.dtype.itemsize
        return Buffer(at, count, self._element, self, self._kind, self.device.index, _DEFAULT_STREAM)

    def __hetcoll_buffer__(self) -> Buffer:
        return self.buffer()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.device.vendor != "cuda" or self.dtype.kind == "V":
            raise AttributeError("__cuda_array_interface__")
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (self.ptr, False), "version": 3, "stream": None}

    def __repr__(self) -> str:
        return f"<hetcoll.DeviceArray {self.dtype} {self.shape} on {self.device.name}>"
