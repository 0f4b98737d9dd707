"""Connections that break though both of their ends live, as where a firewall resets them."""

from __future__ import annotations

import ctypes
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

_LIBC = ctypes.CDLL(None, use_errno=True)
_NOTHING = struct.pack("H14x", socket.AF_UNSPEC)
_TCP_REPAIR = 19


def reset(sock: socket.socket) -> None:
    """Both ends hear of it: connect(2) to no address has the kernel drop the connection, and tell its peer."""
    with suppress(OSError):
        _LIBC.connect(sock.fileno(), _NOTHING, len(_NOTHING))


def vanish(sock: socket.socket) -> None:
    """The other end hears nothing until it sends something. It takes CAP_NET_ADMIN."""
    sock.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 1)
    reset(sock)


@contextmanager
def resets(connections: Callable[[], Iterable[socket.socket]], seconds: float, seed: int = 7) -> Iterator[list[int]]:
    """One of these is reset every so many seconds, chosen at random; how many were, so far."""
    over, count, draw = threading.Event(), [0], random.Random(seed)

    def run() -> None:
        while not over.wait(seconds):
            found = [sock for sock in connections() if sock.fileno() >= 0]
            if found:
                reset(draw.choice(found))
                count[0] += 1

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield count
    finally:
        over.set()
        thread.join(10)
