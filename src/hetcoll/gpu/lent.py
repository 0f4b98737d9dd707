"""Memory of GPUs that other processes have opened, and that must not be freed meanwhile (cuIpcOpenMemHandle: "undefined
behavior").

Who has a rank's memory open holds a lock on that rank's byte of a file that the ranks of the host have in common. The
system takes a lock away when its process ends (fcntl(2): open file description locks; a forked child keeps its
parent's). Ranks that close a communicator together wait for each other. What others have open for longer is left, and
freed when a communicator of this process next lends memory or gives it back: on a thread that may wait, as drivers do
there until the device is idle.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import time
from io import FileIO
from typing import TYPE_CHECKING, NamedTuple

from ..errors import DeviceError

if TYPE_CHECKING:
    from ..vendors.devices.base import Device

_TOGETHER = 0.5  # seconds that a rank waits for others to close the same communicator
_PAUSE = 0.001  # between looks
_FLOCK = struct.Struct("@hhqqi4x")  # l_type, l_whence, l_start, l_len, l_pid, with words of 64 bits


class _Lent(NamedTuple):
    """What is still to be freed, of the rank at place `here` in `file`."""

    device: Device
    addresses: list[int]
    file: FileIO
    here: int

    def free(self) -> bool:
        """Free it, unless others have it open."""
        try:
            _lock(self.file, fcntl.F_WRLCK, self.here)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        with contextlib.ExitStack() as undo:
            undo.callback(self.file.close)
            for address in self.addresses:
                undo.callback(self.device.free, address)
        return True


_left: list[_Lent] = []


class Lender:
    """One communicator's, for the rank at place `here` on its host. `fd` is of a file that is the same for all ranks
    there, and is not kept. Its methods raise DeviceError where that has no locks."""

    def __init__(self, fd: int, here: int) -> None:
        self._here, self._problem = here, ""
        self._lent: list[tuple[Device, int]] = []
        self._borrowed: list[tuple[Device, int]] = []
        with contextlib.ExitStack() as undo:
            try:
                self._file = undo.enter_context(FileIO(f"/proc/self/fd/{fd}", "r+b"))  # its locks are not those of `fd`
                _lock(self._file, fcntl.F_UNLCK, here)
                undo.pop_all()
            except OSError as error:
                self._problem = f"locks on shared memory: {error.strerror}"

    def lend(self, device: Device, nbytes: int, *, uncached: bool) -> int:
        """The address of memory that others may open, zeros or not. `uncached`: kernels of several GPUs use it at
        once."""
        self._check()
        free_left()
        address = device.allocate_shared(nbytes) if uncached else device.allocate(nbytes)
        self._lent.append((device, address))
        return address

    def borrow(self, device: Device, handle: bytes, place: int) -> int:
        """Where `device` sees what the rank at that place has lent."""
        self._check()
        try:
            _lock(self._file, fcntl.F_RDLCK, place)
        except OSError as error:
            raise DeviceError(f"locks on shared memory: {error.strerror}") from error
        address = device.open_ipc(handle)
        self._borrowed.append((device, address))
        return address

    def _check(self) -> None:
        if self._problem:
            raise DeviceError(self._problem)

    def close(self) -> None:
        """Give everything back that is open here; nothing on this GPU uses it any more."""
        if self._problem:
            return
        with contextlib.ExitStack() as undo:
            undo.callback(self._end_lending)
            undo.callback(_lock, self._file, fcntl.F_UNLCK, 0, 0)
            for device, address in self._borrowed:
                undo.callback(device.close_ipc, address)

    def _end_lending(self) -> None:
        if not self._lent:
            self._file.close()
            return
        lent = _Lent(self._lent[0][0], [address for _, address in self._lent], self._file, self._here)
        deadline = time.monotonic() + _TOGETHER
        while not (freed := lent.free()) and time.monotonic() < deadline:
            time.sleep(_PAUSE)
        if not freed:
            _left.append(lent)
        free_left()


def free_left() -> None:
    """Free what was left and is open nowhere any more. From any thread."""
    kept: list[_Lent] = []
    with contextlib.suppress(IndexError):
        while True:
            lent = _left.pop()
            if not lent.free():
                kept.append(lent)
    _left.extend(kept)


def _lock(file: FileIO, kind: int, first: int, count: int = 1) -> None:
    """Set a lock of this kind on so many bytes, on all there are where `count` is 0; OSError where others' do not let
    it be."""
    fcntl.fcntl(file.fileno(), fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, first, count, 0))
