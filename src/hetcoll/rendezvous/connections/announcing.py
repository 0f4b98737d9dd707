"""Abstract Unix sockets by which stores on a host are found: by ranks that mpirun started, and by `hetcoll top`.

Who connects there and runs as the same user is told the unique id (`acceptor.Fetch`).
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
from typing import NamedTuple

from ...errors import InitError
from ..protocol.unique_id import UniqueId
from ..protocol.wire import HEADER, unpack
from .auth import GREETING, VERDICT, Response, Service, Verb, greeting_context
from .sockets import BACKLOG, peer_is_us, receive_exactly, send_all, spell_error

log = logging.getLogger("hetcoll.announcing")

MAX_ID_BYTES = 64 << 10

_numbers = itertools.count(1)  # of the stores that this process started


class Announced(NamedTuple):
    """A store on this host: the process it lives in, the how many-th there, and the name of its socket."""

    pid: int
    number: int
    name: str


def announce(job_id: bytes) -> list[socket.socket]:
    """A listener for the store of this job; none where the system refuses it, for the job can do without."""
    name = f"\0hetcoll-job-{os.getuid()}-{os.getpid()}-{next(_numbers)}-{job_id[:8].hex()}"
    try:
        return [_listen_at(name)]
    except InitError as error:
        log.info("hetcoll top will not find this job by itself: %s", error)
        return []


def announced() -> list[Announced]:
    """The stores of our user's processes on this host, in the order of processes and of their stores."""
    begin = f"@hetcoll-job-{os.getuid()}-"
    with open("/proc/net/unix", errors="replace") as file:
        words = {line.split()[-1] for line in file}
    found = []
    for word in words:
        pid, _, rest = word.removeprefix(begin).partition("-")
        number = rest.partition("-")[0]
        if word.startswith(begin) and pid.isdecimal() and number.isdecimal():
            found.append(Announced(int(pid), int(number), "\0" + word[1:]))
    return sorted(found)


def find_announced(name: str) -> list[str]:
    """Where rank 0 may listen: at `name`, or where another user has that, at one that begins with it (unix(7))."""
    with open("/proc/net/unix", errors="replace") as file:
        words = [line.split()[-1] for line in file]
    begin = f"@{name[1:]}-"
    return [name, *dict.fromkeys("\0" + word[1:] for word in words if word.startswith(begin))]


def _held_by_us(name: str) -> bool:
    """Whether a process of our user listens at this abstract name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            sock.connect(name)
        except OSError:
            return False
        return peer_is_us(sock)


def listens_locally(name: bytes) -> bool | None:
    """Whether somebody listens at this abstract name in this process's network namespace, which has its own. None where
    the system does not say."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)  # a full queue is somebody's, too
        try:
            sock.connect(name)
        except BlockingIOError:
            return True
        except ConnectionRefusedError:
            return False
        except OSError as error:
            log.debug("%r: %s", name, spell_error(error))
            return None
        return True


def listen_locally(name: str) -> socket.socket:
    """A listener at `name`, which others can work out; where another user took it first, at a random one beside it."""
    try:
        return _listen_at(name)
    except InitError:
        if _held_by_us(name):
            raise
        return _listen_at(f"{name}-{os.urandom(16).hex()}")


def _listen_at(name: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(name)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise InitError(f"rank 0 cannot announce its store: {spell_error(error)}") from error
    return sock


def fetch_locally(sock: socket.socket, deadline: float, key: bytes | None = None) -> UniqueId:
    """The unique id that a store of our user tells over a Unix socket, with the key of a launch of that one."""
    if not peer_is_us(sock):
        raise ConnectionResetError("the process that announces it runs as another user")
    greeting = receive_exactly(sock, GREETING.size, deadline)
    context = greeting_context(greeting, Service.STORE)
    if context is None or key not in (None, context[16:]):
        raise ConnectionResetError("what announces itself is not this job's store")
    response = Response(b"", greeting, context, Verb.FETCH)
    send_all(sock, response.claim, deadline)
    response.check(receive_exactly(sock, VERDICT.size, deadline))
    return read_id(sock, deadline)


def read_id(sock: socket.socket, deadline: float) -> UniqueId:
    """What a store sends after the verdict on a FETCH."""
    length = HEADER.unpack(receive_exactly(sock, HEADER.size, deadline))[3]
    if length > MAX_ID_BYTES:
        raise ConnectionResetError(f"a unique id of {length} bytes: wanted at most {MAX_ID_BYTES}")
    return UniqueId.from_bytes(unpack(receive_exactly(sock, length, deadline))[0])
