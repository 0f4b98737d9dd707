"""Connections that break though both of their ends live, as where a firewall resets them."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

_LIBC = ctypes.CDLL(None, use_errno=True)
_NOTHING = struct.pack("H14x", socket.AF_UNSPEC)
_TCP_REPAIR = 19
_ESTABLISHED = 1
_SO_COOKIE = 57  # asm-generic/socket.h
_NETLINK_SOCK_DIAG, _SOCK_DESTROY = 4, 21  # linux/netlink.h, linux/sock_diag.h
_REQUEST_AND_ACK = 1 | 4  # linux/netlink.h
_HEAD, _REPLY = struct.Struct("=IHHII"), struct.Struct("=IHHIIi")
_DESTROY = struct.Struct("=BBxxI")  # linux/inet_diag.h: the family, the protocol, and which states


def reset(sock: socket.socket) -> None:
    """Both ends hear of it: connect(2) to no address has the kernel drop the connection, and tell its peer."""
    with suppress(OSError):
        _LIBC.connect(sock.fileno(), _NOTHING, len(_NOTHING))


def vanish(sock: socket.socket) -> None:
    """The other end hears nothing until it sends something. It takes CAP_NET_ADMIN."""
    with suppress(OSError):  # who had it heard from the other end by then, and closed it
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 1)
    reset(sock)


def destroy(sock: socket.socket) -> None:
    """As a firewall between the ends: both hear of it, and keep what they know of it. It takes CAP_NET_ADMIN."""
    try:
        names = sock.getsockname(), sock.getpeername()
    except OSError:  # it is broken already
        return
    ends = [(socket.inet_pton(sock.family, name[0]), name[1]) for name in names]
    which = struct.pack("!HH", *(port for _, port in ends)) + b"".join(host.ljust(16, b"\0") for host, _ in ends)
    # Without its number the kernel would take the socket that listens at this port, where the connection is no more.
    which += bytes(4) + sock.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8)
    body = _DESTROY.pack(sock.family, socket.IPPROTO_TCP, 0xFFFFFFFF) + which
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as kernel:
        kernel.send(_HEAD.pack(_HEAD.size + len(body), _SOCK_DESTROY, _REQUEST_AND_ACK, 0, 0) + body)
        code = -_REPLY.unpack_from(kernel.recv(256))[5]
    if code not in (0, errno.ENOENT):  # which it is when it has ended meanwhile
        raise OSError(code, f"SOCK_DESTROY: {os.strerror(code)}")


def own_connections() -> list[socket.socket]:
    """All TCP connections of this process, whoever made them, as descriptors that the caller closes."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it was closed meanwhile
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
            copy = os.dup(int(fd))
            try:
                sock = socket.socket(fileno=copy)
            except OSError:  # it is another file by now, which has the number of the one that was closed
                os.close(copy)
                raise
            if _is_established(sock):
                found.append(sock)
            else:
                sock.close()
    return found


def _is_established(sock: socket.socket) -> bool:
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        return False
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED


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
