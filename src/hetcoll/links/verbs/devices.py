"""Devices that this process has open. Its communicators share them: the first opens one, the last closes it."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from ...errors import InitError
from .library import Library, UnavailableError

_WORD = ctypes.sizeof(ctypes.c_void_p)


class Device:
    """An open device, named as in ``/sys/class/infiniband``, with a protection domain. Made by `hold`."""

    def __init__(self, library: Library, name: str) -> None:
        self.library, self.name, self.users = library, name, 0
        try:
            self.context: Any = library.device.Context(name=name)
            self.pd: Any = library.pd.PD(self.context)
        except library.error as error:
            raise UnavailableError(f"{name} cannot be opened: {error}") from error

    @property
    def pd_address(self) -> int:
        """The address of libibverbs' ``struct ibv_pd``, for the engine.

        pyverbs hands it out as a number, or as if it were a Python object, whose identity then is the address. It is
        compared with what the struct should hold: a context, and the handle that pyverbs knows.
        """
        address = id(self.pd.pd) if self.library.poses else int(self.pd.pd)
        handle = ctypes.c_uint32.from_address(address + _WORD).value
        if not ctypes.c_void_p.from_address(address).value or handle != self.pd.handle:
            raise InitError(f"{self.name}: pyverbs does not say where its protection domain is")
        return address

    def register(self, address: int, nbytes: int) -> Any:
        """A memory region (`pyverbs.mr.MR`) of this memory; of read-only memory where it cannot be written."""
        try:
            return self.library.mr.MR(self.pd, nbytes, _READ | _WRITE, address=address)
        except self.library.error as error:
            if getattr(error, "error_code", None) != _EFAULT:
                raise
            return self.library.mr.MR(self.pd, nbytes, _READ, address=address)

    def register_peer(self, address: int, nbytes: int) -> Any:
        """A memory region of a GPU's memory by the address that its driver gave it, where a module of the GPU's driver
        tells the kernel about it (nvidia_peermem, amdgpu)."""
        return self.library.mr.MR(self.pd, nbytes, _GPU, address=address)

    def register_dmabuf(self, fd: int, offset: int, nbytes: int) -> Any:
        """A memory region (`pyverbs.mr.DmaBufMR`) of a GPU's memory: `nbytes` that begin `offset` bytes into the
        dma-buf. For the device, that is also their address (pyverbs gives it as the iova of ``ibv_reg_dmabuf_mr``).
        """
        return self.library.mr.DmaBufMR(self.pd, nbytes, _GPU, fd, offset)


_READ, _WRITE = 0, 1 | 2  # infiniband/verbs.h: IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE
_GPU = _WRITE | 4  # and IBV_ACCESS_REMOTE_READ: native/transport/verbs/read_back.h
_EFAULT = 14
_lock = threading.Lock()
_open: dict[str, Device] = {}


def hold(library: Library, name: str) -> Device:
    """The open device `name`; UnavailableError where it cannot be opened. `release` it as often."""
    with _lock:
        device = _open.get(name) or Device(library, name)
        _open[name] = device
        device.users += 1
        return device


def release(device: Device) -> None:
    """One user less; the last one closes it."""
    with _lock:
        device.users -= 1
        if device.users == 0:
            del _open[device.name]
            device.pd.close()
            device.context.close()


def abandon() -> None:
    """In a forked child: the devices are the parent's. Closing them here would undo what the parent registered."""
    global _lock
    _lock = threading.Lock()
    for device in _open.values():
        for each in (device.pd, device.context):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))  # for good: they close themselves when they die
    _open.clear()
