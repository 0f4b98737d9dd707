"""File descriptors between processes of one host: a rank makes a segment and hands it to its neighbours.

The descriptor travels over an abstract Unix socket (unix(7), SCM_RIGHTS) whose random name the ranks exchange through
the store. Both ends must run as the same user (SO_PEERCRED) and prove the job's secret.

Who has a descriptor as a number loses it where Ctrl-C raises between two instructions. So it is a `FileIO` or a
`SocketType` at once: the C code of `map` calls nothing between the system's answer and these, which close themselves
when they are dropped.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from io import FileIO
from operator import itemgetter

from ..errors import AuthenticationError, InitError, spell_ranks
from ..rendezvous.connections.auth import (
    CLAIM,
    GREETING,
    HANDSHAKE_SECONDS,
    VERDICT,
    Challenge,
    Response,
    Service,
    greeting_context,
)
from ..rendezvous.connections.sockets import peer_is_us, receive_exactly, send_all, spell_error, wait_ready

log = logging.getLogger("hetcoll.descriptors")

_RANK, _FD = struct.Struct("<I"), struct.Struct("=i")
_ACCEPT = socket.SocketType._accept  # type: ignore[attr-defined]
_OWNER = partial(socket.SocketType, socket.AF_UNIX, socket.SOCK_STREAM, 0)  # in C, as `FileIO` is
_RETRY = 0.01  # seconds between attempts to reach a socket that is not bound yet
_POLL = 0.05  # seconds between looks at `check`


Check = Callable[[Collection[int]], None]
"""Called now and then with the ranks that are waited for; raises to end the wait (one of them was lost)."""


def _nothing(ranks: Collection[int]) -> None:
    return None


def new_name() -> str:
    """A name for `share_fd` that nobody can guess."""
    return f"hetcoll-{os.urandom(16).hex()}"


def host_identity(override: str | None = None) -> str:
    """What ranks of one host have in common: the boot's id and the network namespace. `override`: HETCOLL_HOST_ID."""
    if override:
        return override
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')}"


def shared_memory(
    label: str,
    nbytes: int,
    name: str,
    rank: int,
    ranks: Sequence[int],
    secret: bytes,
    timeout: float,
    check: Check = _nothing,
) -> FileIO:
    """Memory of so many bytes that `ranks`, all of this host, have in common. Collective: the first of them makes it,
    and hands it to the others. The caller closes it."""
    if rank != ranks[0]:
        return receive_fd(name, rank, secret, timeout, ranks[0], check)
    # A memfd: not limited by the size of /dev/shm, and gone with the last process that maps it.
    (memory,) = map(FileIO, map(os.memfd_create, (label,), (os.MFD_CLOEXEC,)), ("r+b",))
    try:
        os.ftruncate(memory.fileno(), nbytes)
        share_fd(name, memory.fileno(), ranks[1:], secret, timeout, check)
        return memory
    except BaseException:
        memory.close()
        raise


def share_fd(
    name: str, fd: int, peers: Collection[int], secret: bytes, timeout: float, check: Check = _nothing
) -> None:
    """Hand `fd` to each rank of `peers`, which call `receive_fd` with the same `name` and `secret`.

    Blocks until all have it. InitError names those that have not come within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    missing = set(peers)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + name)
        listener.listen(max(len(missing), 1) + 16)
        listener.setblocking(False)
        while missing:
            check(missing)
            accepted: list[socket.SocketType] = []
            try:
                wait_ready(listener, select.POLLIN, min(deadline, time.monotonic() + _POLL))
                accepted.extend(map(_OWNER, map(itemgetter(0), map(_ACCEPT, (listener,)))))
                missing.discard(_hand_over(accepted[0], fd, secret, missing, deadline))
            except BlockingIOError:
                continue
            except TimeoutError:
                if time.monotonic() < deadline:
                    continue
                text = f"sharing memory: {spell_ranks(missing)} of this host did not fetch it in {timeout:g} s"
                raise InitError(text) from None
            finally:
                for sock in accepted:
                    sock.close()


def _hand_over(sock: socket.SocketType, fd: int, secret: bytes, missing: set[int], deadline: float) -> int:
    """Give `fd` to who proves to be one of the `missing` ranks; its rank, or -1."""
    sock.setblocking(False)
    soon = min(deadline, time.monotonic() + HANDSHAKE_SECONDS)
    try:
        if not peer_is_us(sock):
            return -1
        challenge = Challenge(secret, Service.DESCRIPTOR)
        send_all(sock, challenge.greeting, soon)
        judgement = challenge.judge(receive_exactly(sock, CLAIM.size, soon))
        (rank,) = _RANK.unpack_from(judgement.context)
        if judgement.proven and rank in missing:
            sock.sendmsg([judgement.verdict], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _FD.pack(fd))])
            return int(rank)
        send_all(sock, VERDICT.pack(0, bytes(32)), soon)
    except OSError as error:
        log.debug("sharing a descriptor: %s", spell_error(error))
    return -1


def receive_fd(
    name: str, rank: int, secret: bytes, timeout: float, sharer: int = -1, check: Check = _nothing
) -> FileIO:
    """The descriptor that rank `sharer` of this host shares under `name` with us, `rank`. The caller closes it.

    InitError when nobody shares it within `timeout` seconds; AuthenticationError when the other side has another
    secret, refuses this rank or runs as another user.
    """
    deadline = time.monotonic() + timeout
    while True:
        check([sharer])
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                sock.connect("\0" + name)
                sock.setblocking(False)
                return _fetch(sock, rank, secret, deadline, partial(check, [sharer]))
            except ConnectionError as error:  # not bound yet, or its process has died, which `check` will be told
                if time.monotonic() + _RETRY >= deadline:
                    why = "" if isinstance(error, ConnectionRefusedError) else f": {spell_error(error)}"
                    raise InitError(f"shared memory {name}: nobody offers it after {timeout:g} s{why}") from None
            except OSError as error:
                raise InitError(f"shared memory {name}: {spell_error(error)}") from error
        time.sleep(_RETRY)


def _fetch(sock: socket.socket, rank: int, secret: bytes, deadline: float, check: Callable[[], None]) -> FileIO:
    if not peer_is_us(sock):
        raise AuthenticationError("shared memory: the process that offers it runs as another user")
    _wait_for_word(sock, deadline, check)
    greeting = receive_exactly(sock, GREETING.size, deadline)
    if greeting_context(greeting, Service.DESCRIPTOR) is None:
        raise AuthenticationError("shared memory: what offers it is not hetcoll")
    response = Response(secret, greeting, _RANK.pack(rank))
    send_all(sock, response.claim, deadline)
    _wait_for_word(sock, deadline, check)
    came: tuple[bytes, list[tuple[int, int, bytes]], int, object] | None = None
    memory: FileIO | None = None
    try:
        (came,) = map(sock.recvmsg, (VERDICT.size,), (socket.CMSG_LEN(_FD.size),), (socket.MSG_CMSG_CLOEXEC,))
        if len(came[0]) != VERDICT.size:
            raise ConnectionResetError("the process that offers it closed the connection")
        response.check(came[0])
        if len(fds := _descriptors(came)) != 1:  # the system drops what this process may not have (MSG_CTRUNC)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        (memory,) = map(FileIO, fds, ("r+b",))
        return memory
    except BaseException:
        for fd in _descriptors(came) if came is not None and memory is None else ():
            os.close(fd)
        raise


def _wait_for_word(sock: socket.socket, deadline: float, check: Callable[[], None]) -> None:
    """As `wait_ready`, but `check` may end it: the connection stands from when it lies in a queue, though whoever has
    that queue may never look into it."""
    while True:
        check()
        try:
            return wait_ready(sock, select.POLLIN, min(deadline, time.monotonic() + _POLL))
        except TimeoutError:
            if time.monotonic() >= deadline:
                raise


def _descriptors(came: tuple[bytes, list[tuple[int, int, bytes]], int, object]) -> list[int]:
    """Those that came with a message."""
    rights = (data for level, kind, data in came[1] if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS))
    return [fd for data in rights for (fd,) in _FD.iter_unpack(data[: len(data) - len(data) % _FD.size])]
