"""Memory of GPUs that other processes have opened, and that must not be freed meanwhile (cuIpcOpenMemHandle: "undefined
behavior").

Who has a rank's memory open holds a lock on that rank's byte of a file that the ranks of the host have in common. The
system takes a lock away when its process ends (fcntl(2): open file description locks; a forked child keeps its
parent's). Ranks that close a communicator together wait for each other. What others have open for longer is freed
later, by a thread.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import threading
import time
from io import FileIO
from typing import TYPE_CHECKING, NamedTuple

from .. import lifetime
from ..errors import DeviceError, InitError

if TYPE_CHECKING:
    from ..vendors.devices.base import Device

log = logging.getLogger("hetcoll")

_TOGETHER = 0.5  # seconds that a rank waits for others to close the same communicator
_PAUSE, _LONG_PAUSE = 0.001, 0.05  # between looks
_FLOCK = struct.Struct("@hhqqi4x")  # l_type, l_whence, l_start, l_len, l_pid, with words of 64 bits


class _Left(NamedTuple):
    """What is still to be freed, of the rank at place `here` in `file`."""

    device: Device
    address: int
    file: FileIO
    here: int

    def free(self) -> bool:
        """Free it, unless others have it open."""
        if not _unlocked(self.file, self.here):
            return False
        self.file.close()
        try:
            with self.device.active():
                self.device.free(self.address)
        except DeviceError as error:
            log.warning("memory that other ranks had open is left to the process: %s", error)
        return True


_left: list[_Left] = []
_lock = threading.Lock()
_freeing: threading.Thread | None = None


class Lender:
    """One communicator's, for the rank at place `here` on its host. `fd` is of a file that is the same for all ranks
    there, and is not kept. InitError where it cannot be opened once more."""

    def __init__(self, fd: int, here: int) -> None:
        try:
            self._file = FileIO(f"/proc/self/fd/{fd}", "r+b")  # with locks of its own, unlike a copy of `fd`
        except OSError as error:
            raise InitError(f"opening shared memory for locks: {error.strerror}") from error
        self._here = here
        self._lent: tuple[Device, int] | None = None
        self._borrowed: list[tuple[Device, int]] = []

    def lend(self, device: Device, nbytes: int) -> int:
        """The address of memory that others may open, once in a communicator."""
        self._lent = (device, device.allocate_shared(nbytes))
        return self._lent[1]

    def borrow(self, device: Device, handle: bytes, place: int) -> int:
        """Where `device` sees what the rank at that place has lent. DeviceError where it cannot be opened."""
        _set_lock(self._file, fcntl.F_RDLCK, place)
        address = device.open_ipc(handle)
        self._borrowed.append((device, address))
        return address

    def close(self) -> None:
        """Give everything back that is open here; nothing on this GPU uses it any more."""
        for device, address in reversed(self._borrowed):
            device.close_ipc(address)
        self._borrowed.clear()
        _set_lock(self._file, fcntl.F_UNLCK, 0, 0)
        if self._lent is None:
            self._file.close()
            return
        lent = _Left(*self._lent, self._file, self._here)
        deadline = time.monotonic() + _TOGETHER
        while not (freed := lent.free()) and time.monotonic() < deadline:
            time.sleep(_PAUSE)
        if not freed:
            _free_later(lent)


def _free_later(lent: _Left) -> None:
    global _freeing
    with _lock:
        _left.append(lent)
        if _freeing is None:
            _freeing = threading.Thread(target=_free_left, name="hetcoll-lent", daemon=True)
            try:
                lifetime.begin(_freeing)
            except OSError as error:  # the process's end frees it
                log.warning("memory that other ranks have open is left to the process: %s", error)
                _freeing = None


def _free_left() -> None:
    global _freeing
    while True:
        with _lock:
            _left[:] = [lent for lent in _left if not lent.free()]
            if not _left:
                _freeing = None
                return
        time.sleep(_LONG_PAUSE)


def _set_lock(file: FileIO, kind: int, first: int, count: int = 1) -> None:
    """A lock of this kind on so many bytes, of all there are where `count` is 0."""
    fcntl.fcntl(file.fileno(), fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, first, count, 0))


def _unlocked(file: FileIO, at: int) -> bool:
    """Whether nobody else has a lock on that byte."""
    wish = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0)
    found, *_ = _FLOCK.unpack(fcntl.fcntl(file.fileno(), fcntl.F_OFD_GETLK, wish))
    return bool(found == fcntl.F_UNLCK)
