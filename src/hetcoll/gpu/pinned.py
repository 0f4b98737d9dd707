"""How much memory of a host its ranks may pin for GPUs (HETCOLL_PINNED_BYTES), and how much this process does.

All ranks of a host that have GPUs have equal parts of it, in which all communicators of a process are counted. Of what
several of them have mapped each one's part counts. Ranks without GPUs pin nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

from ..calls.buffers import Buffer
from ..errors import InitError
from ..types import DType

if TYPE_CHECKING:
    from ..vendors.devices.base import Device

WINDOWS = 8
"""One part in so many is left to windows, where slots can do without."""

_lock = threading.RLock()  # what garbage is collected of, in the middle of this, may give some back
_held = 0  # bytes of all communicators of this process
_ranks = 1  # of its host that have GPUs, in the largest communicator
_sharing = 0  # communicators of this process that have slots


class Told(NamedTuple):
    """What a rank with a GPU tells the others: bytes that its process holds, how many communicators have slots there,
    and how many ranks with GPUs its host is known to have."""

    held: int
    sharing: int
    ranks: int

    @classmethod
    def now(cls) -> Self:
        with _lock:
            return cls(_held, _sharing, _ranks)


class Room(NamedTuple):
    """Bytes that each of so many `ranks` of a host may still pin, and the `part` of it that a new communicator takes.

    The first one takes half, the next a third of what that leaves, then a fourth: so each leaves room to many, and none
    has less than those that come after it.
    """

    all: int
    part: int
    share: int
    ranks: int
    budget: int

    @classmethod
    def of(cls, told: Sequence[Told], budget: int) -> Self:
        """That of the rank which has the least, of all with GPUs of a host."""
        return min(cls._of(each, budget, max(len(told), each.ranks)) for each in told)

    @classmethod
    def _of(cls, told: Told, budget: int, ranks: int) -> Self:
        room = max(0, budget // ranks - told.held)
        return cls(room, room // (2 + told.sharing), budget // ranks, ranks, budget)


class Pinned:
    """What one communicator of this process pins. `budget` is that of a host, of which so many `ranks` pin memory, as
    far as that is known."""

    def __init__(self, budget: int, ranks: int) -> None:
        self._budget, self._known = budget, ranks
        self._shares = False
        self.held = 0
        """Bytes."""

    def begin(self) -> None:
        """It has slots from now on, and so many ranks of the host do have GPUs."""
        global _ranks, _sharing
        with _lock:
            _ranks = max(_ranks, self._known)
            _sharing += not self._shares
            self._shares = True

    def end(self) -> None:
        """It has none any more."""
        global _sharing
        with _lock:
            _sharing -= self._shares
            self._shares = False

    @property
    def ranks(self) -> int:
        """How many have a part of it."""
        return max(_ranks, self._known)

    @property
    def share(self) -> int:
        """What this process may have, with all of its communicators."""
        return self._budget // self.ranks

    @property
    def room(self) -> int:
        """What is left of it."""
        return max(0, self.share - _held)

    @property
    def windows(self) -> int:
        """What of it those of a communicator may have now."""
        return min(self.share // WINDOWS, self.room)

    def lacks(self, nbytes: int) -> str:
        """Why so many bytes more do not fit, for people; nothing where they do."""
        if _held + nbytes <= self.share:
            return ""
        return (
            f"{nbytes} bytes more of pinned memory are needed, and of {self.share} that each of {self.ranks} ranks of"
            f" a host may have {_held} are in use: {self.wanted(_held + nbytes - self.share)}"
        )

    def wanted(self, more: int) -> str:
        """What must be allowed for so many bytes more on each rank, for people."""
        return f"wanted HETCOLL_PINNED_BYTES={(self.share + more) * self.ranks} or more, got {self._budget}"

    @contextlib.contextmanager
    def taken(self, nbytes: int) -> Iterator[None]:
        """The block pins so many bytes, which are this communicator's if it does. InitError where they do not fit."""
        self._take(nbytes)
        try:
            yield
        except BaseException:
            self.give(nbytes)
            raise

    def _take(self, nbytes: int) -> None:
        with _lock:
            if problem := self.lacks(nbytes):
                raise InitError(problem) from MemoryError(problem)
            self.count(nbytes)

    def count(self, nbytes: int) -> None:
        """So many bytes more are pinned, or fewer, whether they fit or not: as for a call that all ranks are in."""
        global _held
        with _lock:
            _held += nbytes
            self.held += nbytes

    def give(self, nbytes: int) -> None:
        """So many bytes are not pinned any more."""
        self.count(-nbytes)


class PinnedMemory:
    """So many bytes of the host that `device` reads and writes, too: zeros at first. They are given back with it.
    InitError where they do not fit, DeviceError where the driver has none."""

    def __init__(self, device: Device, pinned: Pinned, nbytes: int) -> None:
        with pinned.taken(nbytes):
            self.at = device.allocate_host(nbytes)
        self.nbytes = nbytes
        ctypes.memset(self.at, 0, nbytes)
        self._end = weakref.finalize(self, _give_back, device, pinned, self.at, nbytes)
        self._end.atexit = False  # the driver's own end takes it

    def buffer(self, first: int, nbytes: int) -> Buffer:
        """These bytes of it, as calls take memory of the host."""
        return Buffer(self.at + first, nbytes, DType.UINT8, self)

    def word(self, first: int) -> Buffer:
        """The 64 bits there."""
        return Buffer(self.at + first, 1, DType.INT64, self)


def _give_back(device: Device, pinned: Pinned, address: int, nbytes: int) -> None:
    device.free_host(address)
    pinned.give(nbytes)
