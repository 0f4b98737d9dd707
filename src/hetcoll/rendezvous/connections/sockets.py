"""Non-blocking sockets with deadlines. A deadline is a time of `time.monotonic`, in seconds."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import math
import os
import select
import socket
import struct
import time
from collections.abc import Iterable
from typing import Any

from ...errors import InitError

log = logging.getLogger("hetcoll.sockets")

BACKLOG = 4096
_CHUNK = 256 << 10
_KEEP_ALIVE = 5  # seconds: between probes of an idle connection
_USER_TIMEOUT = 30  # seconds without an acknowledgement until the kernel gives a connection up
_VANISHED = 22.0  # seconds without a packet from the peer's host until a connection that is watched is given up
SILENT = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN}
"""What ends a connection to a peer that may live."""
_TCP_INFO = struct.Struct("8B24I")  # linux/tcp.h, of which the last ones are:
_LAST_RECEIVED = slice(19, 21)  # milliseconds since data and an acknowledgement came
_NAME = 16  # bytes of a congestion control's name
_UCRED = struct.Struct("3i")
_HARD = struct.pack("ii", 1, 0)  # of SO_LINGER
_MIN_RTT = struct.Struct("148xI")  # of tcp_info, in microseconds; kernels before 4.6 do not have it
_NO_RTT = 0xFFFFFFFF  # nothing was acknowledged yet
_PACING = b"bbr"  # how those begin that pace


def tune(sock: socket.socket) -> None:
    """Non-blocking, no delay for small messages, and a peer whose host vanished is noticed: see `until_vanished`."""
    sock.setblocking(False)
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_ALIVE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEP_ALIVE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT * 1000)


def close_hard(sock: socket.socket) -> None:
    """With a reset: the end of the stream would say that this process ends it."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _HARD)
    sock.close()


def broke(error: Exception) -> bool:
    """Whether the system says that a connection broke, which both of its ends may survive; else one ended it."""
    return isinstance(error, OSError) and error.errno is not None


def silent_for(sock: socket.socket) -> float:
    """Seconds since the peer's host acknowledged something, if these are more than where both live, who hear of each
    other every _KEEP_ALIVE seconds; else 0. The end of a connection acknowledges nothing. It has to be less than the 8
    seconds after which a member that lost its connection to a store that is stopped may be with another one."""
    seconds = _silence(sock)
    return seconds if seconds > _KEEP_ALIVE + 1.0 else 0.0


def until_vanished(sock: socket.socket) -> float:
    """Seconds until the peer's host counts as lost if nothing comes from it meanwhile; 0 when it does.

    The kernel's own limit begins anew with each send that follows silence: it looks for who is idle, or for who does
    not acknowledge, so a host that vanished may be noticed after twice as long.
    """
    return max(0.0, _VANISHED - _silence(sock))


def vanished() -> OSError:
    """What to raise where `until_vanished` is over: as the kernel's own words, but for how long it was."""
    return TimeoutError(errno.ETIMEDOUT, f"Nothing came from its host for {_VANISHED:g} s")


def _silence(sock: socket.socket) -> float:
    """Seconds since the last packet of the peer's host."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        return float(min(_TCP_INFO.unpack(info)[_LAST_RECEIVED])) / 1000
    except (OSError, struct.error):  # it is closed, or no TCP
        return 0.0


def peer_is_us(sock: socket.SocketType) -> bool:
    """Whether the process at the other end of a Unix socket runs as our user, or as root."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    uid: int = _UCRED.unpack(raw)[1]
    return uid in (os.geteuid(), 0)


def unpace(sock: socket.socket) -> None:
    """For a socket that is about to connect or to listen: no congestion control that paces, until `settle`.

    BBR paces. Between the processes of a host that costs up to three quarters of the throughput, in timers; and whoever
    was connected with it is paced for ever, whatever is chosen then (`sk_pacing_status` of the kernel).
    """
    if _control(sock).startswith(_PACING):
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")  # every kernel has it
        except PermissionError:
            log.warning("reno is not allowed (net.ipv4.tcp_allowed_congestion_control): TCP inside a host is slow")


def settle(sock: socket.socket) -> None:
    """For a connection that was begun with `unpace`: to another host it goes on as the system wants it."""
    if sock.getsockname()[0] == sock.getpeername()[0]:
        return
    with socket.socket(sock.family) as fresh:
        system = _control(fresh)
    if system.startswith(_PACING):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, system)


def round_trip(sock: socket.socket) -> int:
    """Of a connection to another host: microseconds of its shortest round trip, the nearest power of two, since what
    many tell should be alike. 0 inside a host, and where the system does not say it."""
    try:
        if sock.getsockname()[0] == sock.getpeername()[0]:
            return 0
        (found,) = _MIN_RTT.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT.size))
    except (OSError, struct.error):
        return 0
    return 0 if found in (0, _NO_RTT) else 1 << round(math.log2(found))


def _control(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME)


def spells_loopback(host: str) -> bool:
    """Whether it is an address, not a name, that only this host can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_itself(sock: socket.socket) -> bool:
    """Whether a connected socket is its own peer, and is then to be closed: TCP connects whoever asks for a port that
    nobody listens at from that very port (RFC 9293, 3.5, simultaneous open), which the system may have picked.

    Its closing leaves nothing behind: in TIME-WAIT it would keep the port from whoever wants to listen there.
    """
    try:
        if sock.getsockname() != sock.getpeername():
            return False
    except OSError:  # it was reset since it connected
        return False
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _HARD)
    return True


def spell_address(address: object) -> str:
    """``10.0.0.2:4123`` or ``[fe80::1]:4123``; "a local process" for a Unix socket."""
    if not isinstance(address, tuple):
        return "a local process"
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def spell_error(error: Exception) -> str:
    """What went wrong, in lower case and without the number."""
    text = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
    return text[:1].lower() + text[1:]


def resolve(host: str) -> list[tuple[socket.AddressFamily, Any]]:
    """The addresses of a host, each with its family."""
    # Given a str, Python loads its codec for international names, which takes longer than finding rank 0.
    name = host.encode() if host.isascii() else host
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return [(family, address) for family, _, _, _, address in found]


def receive(sock: socket.socket) -> bytes | None:
    """What a non-blocking socket has for us: bytes, `b""` at its end, `None` when there is nothing now."""
    try:
        return sock.recv(_CHUNK)
    except (BlockingIOError, InterruptedError):
        return None


def wait_ready(sock: socket.SocketType, events: int, deadline: float) -> None:
    """Sleep until `sock` is ready for poll `events`; TimeoutError at `deadline`."""
    left = deadline - time.monotonic()
    poll = select.poll()
    poll.register(sock, events)
    if left <= 0 or not poll.poll(left * 1000):
        raise TimeoutError("timed out")


def send_all(sock: socket.SocketType, data: bytes, deadline: float) -> None:
    """Send everything over a non-blocking socket; TimeoutError at `deadline`."""
    view = memoryview(data)
    while view:
        try:
            view = view[sock.send(view, socket.MSG_NOSIGNAL) :]
        except BlockingIOError:
            wait_ready(sock, select.POLLOUT, deadline)


def receive_exactly(sock: socket.SocketType, nbytes: int, deadline: float) -> bytes:
    """`nbytes` from a non-blocking socket; ConnectionError where it ends before, TimeoutError at `deadline`."""
    data = bytearray()
    while len(data) < nbytes:
        try:
            part = sock.recv(nbytes - len(data))
        except BlockingIOError:
            wait_ready(sock, select.POLLIN, deadline)
            continue
        if not part:
            raise ConnectionResetError(f"closed after {len(data)} of {nbytes} bytes")
        data += part
    return bytes(data)


def bind_all(hosts: Iterable[str], port: int) -> list[socket.socket]:
    """A listening socket at each of the addresses `hosts`, at `port` (0: any). InitError where that is taken; then
    none is left open."""
    listeners: list[socket.socket] = []
    host = ""
    try:
        for host in hosts:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listeners.append(socket.create_server((host, port), family=family, backlog=BACKLOG))
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise InitError(f"listening at {spell_address((host, port))}: {spell_error(error)}") from error
    return listeners
