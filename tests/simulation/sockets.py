"""Stand-ins for `socket`, `select` and `selectors`, over the simulated network."""

from __future__ import annotations

import errno
import itertools
import os
import selectors as real_selectors
import socket as real
import struct
from collections.abc import Iterable
from typing import Any

from .kernel import Queue, World, process
from .network import POLLIN, POLLOUT, File, Network

AF_INET, AF_UNIX = real.AF_INET, real.AF_UNIX
EVENT_READ, EVENT_WRITE = real_selectors.EVENT_READ, real_selectors.EVENT_WRITE
_USER = 1000


def network() -> Network:
    found: Network = process().host.network
    return found


def _install(file: File) -> int:
    """The lowest number that is free, as systems do it."""
    files = process().files
    number = 3
    while number in files:
        number += 1
    files[number] = file
    return number


class socket:  # noqa: N801
    """As Python's, of a file of the process that runs now."""

    __slots__ = ("_fd", "_open", "_timeout", "family", "type")

    def __init__(self, family: int = AF_INET, type: int = real.SOCK_STREAM, proto: int = 0, fileno: int | None = None):
        World.kernel.call()
        if fileno is None:
            fileno = _install(File(network(), process().host, process(), family))
        self._fd, self._timeout = fileno, None
        self._open: File | None = process().files[fileno]
        self.family, self.type = real.AddressFamily(self._file.family), real.SOCK_STREAM

    @property
    def _file(self) -> File:
        if self._open is None:
            raise OSError(errno.EBADF, "Bad file descriptor")
        return self._open

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            World.kernel.call()
            number, self._fd, self._open = self._fd, -1, None
            process().files.pop(number).close()

    def detach(self) -> int:
        number, self._fd, self._open = self._fd, -1, None
        return number

    def setblocking(self, blocks: bool) -> None:
        self._timeout = None if blocks else 0.0

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    def bind(self, address: Any) -> None:
        World.kernel.call()
        self._file.bind(address)

    def listen(self, backlog: int = 128) -> None:
        World.kernel.call()
        self._file.listen()

    def connect_ex(self, address: Any) -> int:
        World.kernel.call()
        return self._file.connect(address)

    def connect(self, address: Any) -> None:
        code = self.connect_ex(address)
        if code == errno.EINPROGRESS and self._timeout != 0.0:
            file = self._file
            self._await(lambda: file.state == "open" or file.failed)
            code = file.take_error()
        if code:
            raise OSError(code, os.strerror(code))

    def accept(self) -> tuple[socket, Any]:
        World.kernel.call()
        file = self._file
        if file.state != "listening":
            raise OSError(errno.EINVAL, "Invalid argument")
        self._await(lambda: bool(file.backlog))
        found = file.backlog.popleft()
        found.process = process()
        return socket(fileno=_install(found)), found.remote or ""

    def send(self, data: Any, flags: int = 0, /) -> int:
        World.kernel.call()
        file = self._file
        if not (sent := file.send(data)) and len(data):
            self._await(lambda: file.writable, or_at_once=False)
            sent = file.send(data)
        return sent

    def sendmsg(self, buffers: Iterable[Any], *_: Any) -> int:
        return socket.send(self, b"".join(buffers))

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        World.kernel.call()
        file = self._file
        if not file._came and not file.readable:
            self._await(lambda: file.readable)
        data = file.receive(size)
        if data is None:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return data

    def _await(self, ready: Any, *, or_at_once: bool = True) -> None:
        if or_at_once and ready():
            return
        if self._timeout == 0.0:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        kernel, file = World.kernel, self._file
        until = None if self._timeout is None else kernel.now + self._timeout
        while not ready():
            if not kernel.wait([file.queue], None if until is None else until - kernel.now):
                raise TimeoutError("timed out")

    def shutdown(self, how: int) -> None:
        World.kernel.call()
        self._file.shut(how)

    def getsockname(self) -> Any:
        return self._file.local or ("0.0.0.0", 0)

    def getpeername(self) -> Any:
        file = self._file
        if file.state != "open" or file._broken:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        return file.remote

    def getsockopt(self, level: int, option: int, size: int = 0) -> Any:
        file = self._file
        if (level, option) == (real.SOL_SOCKET, real.SO_ERROR):
            return file.take_error()
        if (level, option) == (real.SOL_SOCKET, real.SO_PEERCRED):
            return struct.pack("3i", process().pid, _USER, _USER)
        if (level, option) == (real.IPPROTO_TCP, real.TCP_INFO):
            return file.tcp_info().ljust(size, b"\0")[:size]
        if (level, option) == (real.IPPROTO_TCP, real.TCP_CONGESTION):
            return b"cubic".ljust(size, b"\0")
        raise OSError(errno.ENOPROTOOPT, "Protocol not available")

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        if (level, option) == (real.SOL_SOCKET, real.SO_LINGER):
            self._file.hard = value == struct.pack("ii", 1, 0)
        elif (level, option) == (real.SOL_SOCKET, real.SO_KEEPALIVE):
            self._file.kept_alive = True


def create_server(address: Any, *, family: int = AF_INET, backlog: int | None = None, **_: Any) -> socket:
    made = socket(family)
    try:
        made.bind(address)
        made.listen()
    except OSError:
        made.close()
        raise
    return made


def create_connection(address: Any, timeout: float | None = None) -> socket:
    made = socket()
    try:
        made.settimeout(timeout)
        made.connect(address)
    except OSError:
        made.close()
        raise
    return made


def socketpair() -> tuple[socket, socket]:
    one, other = (File(network(), process().host, process(), AF_UNIX) for _ in range(2))
    one.peer, other.peer = other, one
    one.state = other.state = "open"
    return socket(fileno=_install(one)), socket(fileno=_install(other))


def getaddrinfo(host: Any, port: Any, **_: Any) -> list[Any]:
    World.kernel.call()
    name = host.decode() if isinstance(host, bytes) else host
    return [(real.AF_INET, real.SOCK_STREAM, 6, "", (name, port or 0))]


def has_dualstack_ipv6() -> bool:
    return False


class poll:  # noqa: N801
    """As Python's."""

    def __init__(self) -> None:
        self._watched: dict[int, int] = {}

    def register(self, sock: Any, events: int) -> None:
        self._watched[sock if isinstance(sock, int) else sock.fileno()] = events

    def poll(self, milliseconds: float | None = None) -> list[tuple[int, int]]:
        seconds = None if milliseconds is None or milliseconds < 0 else milliseconds / 1000
        return _wait_for(self._watched, seconds)


def _wait_for(watched: dict[int, int], seconds: float | None) -> list[tuple[int, int]]:
    kernel = World.kernel
    kernel.call()
    files = process().files
    until = None if seconds is None else kernel.now + seconds
    while True:
        found, queues = [], []
        for number, wanted in watched.items():
            file = files.get(number)
            if file is None:
                continue
            if events := file.events(wanted):
                found.append((number, events))
            else:
                queues.append(file.queue)
        if found or (until is not None and kernel.now >= until):
            if len(found) > 1:
                kernel.random.shuffle(found)
            return found
        kernel.wait(queues, None if until is None else until - kernel.now)


class DefaultSelector(real_selectors._BaseSelectorImpl):  # type: ignore[name-defined,misc]
    """As `selectors.EpollSelector`: files tell it that they changed, so that it need not look at all of them."""

    def __init__(self) -> None:
        super().__init__()
        self._fd = _install(File(network(), process().host, process(), AF_UNIX))
        self._files: dict[int, tuple[int, File, int, Any]] = {}
        """By their numbers: in which order they came, what is wanted of them, and the key."""
        self._order = itertools.count()
        self.moved: dict[int, None] = {}
        """Which have changed since they were not ready."""
        self.queue: Queue = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> Any:
        number = fileobj.fileno()
        if number in self._fd_to_key:
            raise KeyError(f"{fileobj!r} is already registered")
        key = self._fd_to_key[number] = real_selectors.SelectorKey(fileobj, number, events, data)
        file = process().files[number]
        wanted = (POLLIN if events & EVENT_READ else 0) | (POLLOUT if events & EVENT_WRITE else 0)
        self._files[number] = next(self._order), file, wanted, key
        file.selectors[self] = number
        self.moved[number] = None
        return key

    def unregister(self, fileobj: Any) -> Any:
        key = self._fd_to_key.pop(fileobj.fileno())
        del self._files[key.fd][1].selectors[self]
        del self._files[key.fd]
        self.moved.pop(key.fd, None)
        return key

    def modify(self, fileobj: Any, events: int, data: Any = None) -> Any:
        self.unregister(fileobj)
        return self.register(fileobj, events, data)

    def get_key(self, fileobj: Any) -> Any:
        return self._fd_to_key[fileobj.fileno()]

    def select(self, timeout: float | None = None) -> list[tuple[Any, int]]:
        kernel = World.kernel
        kernel.call()
        until = None if timeout is None else kernel.now + max(0.0, timeout)
        while True:
            found = []
            for number in list(self.moved):
                order, file, wanted, key = self._files[number]
                events = 0 if file.state == "closed" else file.events(wanted)
                if events:
                    ready = (EVENT_READ if events & ~POLLOUT else 0) | (EVENT_WRITE if events & ~POLLIN else 0)
                    found.append((order, key, ready & key.events))
                else:
                    del self.moved[number]
            if found or (until is not None and kernel.now >= until):
                if len(found) > 1:
                    found.sort()
                    kernel.random.shuffle(found)
                return [(key, ready) for _, key, ready in found]
            kernel.wait([self.queue], None if until is None else until - kernel.now)

    def close(self) -> None:
        super().close()
        for _, each, _, _ in self._files.values():
            del each.selectors[self]
        self._files.clear()
        file = process().files.pop(self._fd, None)
        if file is not None:
            file.close()
