"""Sockets whose bytes go encrypted from some point on: HETCOLL_TLS, as native/transport/tls.h does it."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import hetcoll._native as _native

from ...errors import AuthenticationError

A = TypeVar("A")
R = TypeVar("R")


class Socket(socket.socket):
    """A socket that says everything in the clear until `secure`. It must be non-blocking by then."""

    __slots__ = ("_tls",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tls: _native.Tls | None = None

    @classmethod
    def adopt(cls, sock: socket.socket) -> Socket:
        """The same socket."""
        return cls(fileno=sock.detach())

    def secure(self, key: bytes, *, server: bool) -> None:
        """Encrypt from here on; the other end does the same, as the other of client and server. The handshake goes on
        with each `send` and `recv`, which raise BlockingIOError until it is over, and AuthenticationError where the
        other end does not have the key."""
        self._tls = _native.Tls(self.fileno(), key, server)

    @property
    def secured(self) -> bool:
        """Whether it is encrypted by now."""
        return self._tls is not None

    def send(self, data: Any, flags: int = 0, /) -> int:
        return super().send(data, flags) if self._tls is None else _explained(self._tls.send, data)

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        return super().recv(size, flags) if self._tls is None else _explained(self._tls.recv, size)

    def sendmsg(self, buffers: Iterable[Any], *rest: Any) -> int:
        return super().sendmsg(buffers, *rest) if self._tls is None else self.send(b"".join(buffers))

    def close(self) -> None:
        self._tls = None  # which knows the descriptor, and that may soon be another's
        super().close()

    def detach(self) -> int:
        """The descriptor; an engine or a proxy that takes it over goes on encrypted."""
        (fd,) = map(socket.socket.detach, (self,))  # as in `links.descriptors`: the number is not lost
        try:
            if self._tls is not None:
                self._tls.hand(fd)
        except BaseException:
            os.close(fd)
            raise
        return fd


def detach_all(socks: Iterable[socket.socket]) -> list[int]:
    """The descriptors of all, or an error, and none is left open."""
    fds: list[int] = []
    try:
        fds.extend(sock.detach() for sock in socks)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds


def _explained(call: Callable[[A], R], argument: A) -> R:
    try:
        return call(argument)
    except OSError as error:
        if error.errno != errno.EKEYREJECTED:
            raise
        text = "the two sides have different secrets (HETCOLL_SECRET): it does not prove ours in TLS"
        raise AuthenticationError(text) from error
