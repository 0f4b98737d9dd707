"""Arrays in the memory of fake GPUs, which NumPy can view: blocks by index, as PyTorch's and CuPy's."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
from gpu_kinds import device_of, has_gpu

import hetcoll
from hetcoll.calls.buffers import Buffer
from hetcoll.gpu.array import DeviceArray


class Viewed:
    """An array on a fake GPU with what `hetcoll.runtime.reshard` asks of PyTorch's and CuPy's: blocks by index that are
    views, and copies between them behind what the device has to do."""

    def __init__(self, memory: DeviceArray, view: np.ndarray[Any, Any] | None = None) -> None:
        self._memory, self._view = memory, _view(memory) if view is None else view

    @property
    def shape(self) -> tuple[int, ...]:
        return self._view.shape

    def new_empty(self, shape: tuple[int, ...]) -> Viewed:
        return Viewed(self._memory.new_empty(shape))

    def reshape(self, *shape: Any) -> Viewed:
        made = self._view.reshape(*shape)
        assert np.shares_memory(made, self._view) or not made.size, "a copy would be written in place of the array"
        return Viewed(self._memory, made)

    def __getitem__(self, where: Any) -> Viewed:
        return Viewed(self._memory, self._view[where])

    def __setitem__(self, where: Any, values: Viewed) -> None:
        self._memory.device.synchronize()
        self._view[where] = values._view

    def get(self) -> np.ndarray[Any, Any]:
        self._memory.device.synchronize()
        return self._view.copy()

    def __hetcoll_buffer__(self) -> Buffer:
        assert self._view.flags.c_contiguous
        found = self._memory.buffer()
        return replace(found, ptr=self._view.ctypes.data, count=self._view.size, owner=self)


def _view(memory: DeviceArray) -> np.ndarray[Any, Any]:
    raw = (ctypes.c_uint8 * memory.nbytes).from_address(memory.ptr)
    return np.frombuffer(raw, memory.dtype, memory.size).reshape(memory.shape)


def viewed(comm: hetcoll.Communicator, array: np.ndarray[Any, Any]) -> Any:
    return Viewed(DeviceArray.of(device_of(comm), array)) if has_gpu(comm) else array.copy()


def fetched(array: Any) -> np.ndarray[Any, Any]:
    """What such an array holds."""
    found: np.ndarray[Any, Any] = array.get() if isinstance(array, Viewed) else array
    return found
