"""One who besieges: a process that connects as fast as it is answered, in eight ways.

Each connection is a generator that gives the event it waits for. So many wait at each port, beside each other: one that
never answers, as those of the store's successors, does not hold up the siege of the others.
"""

from __future__ import annotations

import errno
import itertools
import random
import selectors
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Generator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from ranks import die_with_parent

from hetcoll.rendezvous.connections.auth import CLAIM, GREETING, VERDICT

_IDLE = 200  # connections that are kept open, and on which nothing is said
_WAITING = 16  # connections that wait for something at a time, at each port
_SECONDS = 5.0  # that each of them waits at most

Talk = Generator[int, None, None]


def attack(pipe: Connection, made: Any, seed: int) -> None:
    """Connect to the ports that come last through `pipe`, until it is closed; `made` counts connections."""
    die_with_parent()
    stranger = _Stranger(made, seed)
    with suppress(EOFError, ConnectionError):
        ports = pipe.recv()
        while True:
            if pipe.poll():
                ports = pipe.recv()
            stranger.go_on(stranger.connect(ports))


class _Stranger:
    def __init__(self, made: Any, seed: int) -> None:
        self._made, self._random = made, random.Random(seed)
        self._idle: deque[socket.socket] = deque()
        self._waiting: dict[socket.socket, tuple[float, int]] = {}  # since when, at which port; the oldest first
        self._at: Counter[int] = Counter()  # how many of them, by port
        self._selector = selectors.EpollSelector()
        self._sources = itertools.cycle(f"127.0.{seed % 250 + 1}.{n}" for n in range(1, 250))

    def connect(self, ports: list[int]) -> bool:
        """Begin one more, where that can be; whether nobody listens there as yet, or enough of them wait everywhere."""
        free = [port for port in ports if self._at[port] < _WAITING]
        if not free:
            return True
        sock, port, made = socket.socket(), self._random.choice(free), self._made.value
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_IP, 24, 1)  # IP_BIND_ADDRESS_NO_PORT: each address has all ports
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # no TIME_WAIT
        sock.bind((next(self._sources), 0))
        self._advance(sock, port, self._talk(sock, port))
        return bool(self._made.value == made)

    def go_on(self, rest: bool) -> None:
        """With those that need not wait any more; and part with those that have waited too long."""
        for key, _ in self._selector.select(0.001 if rest else 0):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            self._selector.unregister(sock)
            self._advance(sock, self._waiting[sock][1], key.data)
        while self._waiting and time.monotonic() - next(iter(self._waiting.values()))[0] > _SECONDS:
            sock = next(iter(self._waiting))
            self._selector.unregister(sock)
            self._end(sock)

    def _advance(self, sock: socket.socket, port: int, talk: Talk) -> None:
        """Until it waits for something, or is over."""
        try:
            event = next(talk)
        except (StopIteration, OSError):
            self._end(sock)
            return
        if event:
            self._selector.register(sock, event, talk)
            if sock not in self._waiting:
                self._waiting[sock] = time.monotonic(), port
                self._at[port] += 1
            return
        self._forget(sock)
        self._idle.append(sock)
        if len(self._idle) > _IDLE:
            self._idle.popleft().close()

    def _end(self, sock: socket.socket) -> None:
        self._forget(sock)
        sock.close()

    def _forget(self, sock: socket.socket) -> None:
        if sock in self._waiting:
            self._at[self._waiting.pop(sock)[1]] -= 1

    def _talk(self, sock: socket.socket, port: int) -> Talk:
        """One way of eight; two of them are to connect and to leave at once."""
        draw = self._random
        code = sock.connect_ex(("127.0.0.1", port))
        if code == errno.EINPROGRESS:
            yield selectors.EVENT_WRITE
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            return
        self._made.value += 1
        kind = draw.randrange(8)
        if kind in (1, 2):
            yield from _say(sock, draw.randbytes(draw.randrange(1, 300)))
        elif kind == 3:
            yield from _hear(sock, GREETING.size)
            yield from _say(sock, b"\1" + draw.randbytes(CLAIM.size - 1))
            yield from _hear(sock, VERDICT.size)
        elif kind == 4:
            yield from _say(sock, 3 * (yield from _hear(sock, GREETING.size)))
        elif kind == 5:
            yield from _say(sock, b"GET / HTTP/1.1\r\n\r\n" + bytes(draw.choice([0, 1 << 16])))
        elif kind == 6:
            yield 0


def _say(sock: socket.socket, data: bytes) -> Talk:
    while data := data[sock.send(data) :]:
        yield selectors.EVENT_WRITE


def _hear(sock: socket.socket, nbytes: int) -> Generator[int, None, bytes]:
    """So many, or fewer at the end."""
    data = b""
    while len(data) < nbytes:
        yield selectors.EVENT_READ
        part = sock.recv(nbytes - len(data))
        if not part:
            break
        data += part
    return data
