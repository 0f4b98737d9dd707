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
from typing import TYPE_CHECKING

from ..errors import DeviceError

if TYPE_CHECKING:
    from ..vendors.devices.base import Device

_TOGETHER = 0.5  # seconds that a rank waits for others to close the same communicator
_PAUSE = 0.001  # between looks
_FLOCK = struct.Struct("@hhqqi4x")  # l_type, l_whence, l_start, l_len, l_pid, with words of 64 bits


class Lender:
    """One communicator's, for the rank at place `here` on its host, whose GPU is `device`. `fd` is of a file that is
    the same for all ranks there, and is not kept. `lend` and `borrow` raise DeviceError where that has no locks."""

    def __init__(self, device: Device, fd: int, here: int) -> None:
        self._device, self._here, self._problem = device, here, ""
        self._lent: list[int] = []
        self._borrowed: list[int] = []
        with contextlib.ExitStack() as undo:
            try:
                self._file = undo.enter_context(FileIO(f"/proc/self/fd/{fd}", "r+b"))  # its locks are not those of `fd`
                _lock(self._file, fcntl.F_UNLCK, here)
                undo.pop_all()
            except OSError as error:
                self._problem = f"locks on shared memory: {error.strerror}"

    def lend(self, nbytes: int, *, uncached: bool) -> int:
        """The address of memory that others may open. `uncached` as in `Device.allocate`."""
        self._check()
        free_left()
        self._lent.append(address := self._device.allocate(nbytes, uncached=uncached))
        return address

    def borrow(self, handle: bytes, place: int) -> int:
        """Where the GPU sees what the rank at that place has lent."""
        self._check()
        try:
            _lock(self._file, fcntl.F_RDLCK, place)
        except OSError as error:
            raise DeviceError(f"locks on shared memory: {error.strerror}") from error
        self._borrowed.append(address := self._device.open_ipc(handle))
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
            for address in self._borrowed:
                undo.callback(self._device.close_ipc, address)

    def _end_lending(self) -> None:
        deadline = time.monotonic() + _TOGETHER
        while not (freed := self.free()) and time.monotonic() < deadline:
            time.sleep(_PAUSE)
        if not freed:
            _left.append(self)
        free_left()

    def free(self) -> bool:
        """Free what was lent, unless others have it open; nothing is borrowed any more."""
        try:
            _lock(self._file, fcntl.F_WRLCK, self._here)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        with contextlib.ExitStack() as undo:
            undo.callback(self._file.close)
            for address in self._lent:
                undo.callback(self._device.free, address)
        return True


_left: list[Lender] = []  # what they have lent others still have open


def free_left() -> None:
    """Free what was left and is open nowhere any more. From any thread."""
    kept: list[Lender] = []
    with contextlib.suppress(IndexError):
        while True:
            lender = _left.pop()
            if not lender.free():
                kept.append(lender)
    _left.extend(kept)


def _lock(file: FileIO, kind: int, first: int, count: int = 1) -> None:
    """Set a lock of this kind on so many bytes, on all there are where `count` is 0; OSError where others' do not let
    it be."""
    fcntl.fcntl(file.fileno(), fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, first, count, 0))
