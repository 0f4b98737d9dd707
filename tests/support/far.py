"""Frames that are held for a while on their way: what netem does, which not every kernel has.

Two taps of a switch stand in the place of a cable, and a thread carries what comes out of one into the other.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import select
import struct
import threading
import time
from collections.abc import Callable, Sequence

_TUNSETIFF = 0x400454CA  # linux/if_tun.h, as are the next two
_IFF_TAP = 0x0002
_IFF_NO_PI = 0x1000
_FRAME = 1 << 16


def _tap(name: str) -> int:
    """A new tap in this thread's namespace, as long as the descriptor is open."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    except OSError:
        os.close(fd)
        raise
    return fd


class Delay:
    """Carries frames between the two taps of each pair, which it makes where `enter` brings its thread, so many seconds
    after they came. OSError where there can be none."""

    def __init__(self, pairs: Sequence[tuple[str, str]], seconds: float, enter: Callable[[], None]) -> None:
        self._seconds = seconds
        self._stop, self._ready = os.eventfd(0), threading.Event()
        self._problem: OSError | None = None
        self._thread = threading.Thread(target=self._run, args=(pairs, enter), name="delay")
        self._thread.start()
        self._ready.wait()
        if self._problem is not None:
            self.close()
            raise self._problem

    def close(self) -> None:
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._stop)

    def _run(self, pairs: Sequence[tuple[str, str]], enter: Callable[[], None]) -> None:
        across: dict[int, int] = {}
        try:
            enter()
            for names in pairs:
                one, other = map(_tap, names)
                across |= {one: other, other: one}
        except OSError as error:
            self._problem = error
        self._ready.set()
        if self._problem is None:
            self._carry(across)
        for fd in across:
            os.close(fd)

    def _carry(self, across: dict[int, int]) -> None:
        poll = select.poll()
        for fd in (self._stop, *across):
            poll.register(fd, select.POLLIN)
        held: list[tuple[float, int, int, bytes]] = []
        serial = itertools.count()
        while True:
            left = None if not held else max(0.0, held[0][0] - time.monotonic()) * 1000
            for fd, _ in poll.poll(left):
                if fd == self._stop:
                    return
                due = time.monotonic() + self._seconds
                heapq.heappush(held, (due, next(serial), across[fd], os.read(fd, _FRAME)))
            while held and held[0][0] <= time.monotonic():
                _, _, fd, frame = heapq.heappop(held)
                os.write(fd, frame)
