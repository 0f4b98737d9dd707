"""Telling a process that died from a connection that broke, as when a firewall resets it.

A member of the job listens for as long as it lives, and serves nobody there. Where its connection breaks, the store
connects to that place again and again until it is back: what nobody listens at any more is dead. The end of a stream
needs no such look: only a process that ends leaves one. Who is felt says a word to the store, for its own end of the
connection may look sound as yet.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import select
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from .sockets import BACKLOG, SILENT, close_hard, is_itself, spell_address, spell_error, unpace

log = logging.getLogger("hetcoll.pulse")

_REST = 0.1  # seconds in which a process is felt once, however often somebody connects
_AT_ONCE = 256  # connections that are let go in a turn
_FIRST_PAUSE, _LAST_PAUSE = 0.01, 0.25  # seconds until a process is felt again, doubling
_ANSWER = 3.0  # seconds that its host has
_RESET = {errno.ECONNRESET, errno.ECONNABORTED}  # as the connection to the store was: that says nothing of the process

Places = tuple[tuple[str, int], ...]


class Pulse:
    """Of this process. One thread calls it, but for `close`."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._rests_until = 0.0

    def begin(self, connection: socket.socket) -> Places:
        """Where it listens, from now on: at the address by which it is connected to the others. Nothing where the
        system does not let it."""
        if self._listener is None:
            try:
                host = connection.getsockname()[0]
                self._listener = socket.create_server((host, 0), family=connection.family, backlog=BACKLOG)
            except OSError as error:
                log.warning("a reset of this process's connection will look like its death: %s", spell_error(error))
                return ()
            self._listener.setblocking(False)
        return (self._listener.getsockname()[:2],)

    @property
    def descriptors(self) -> int:
        return int(self._listener is not None)

    def watch(self, poll: select.poll) -> float | None:
        """Have `poll` tell when it is felt; or the seconds until it is to be watched again."""
        if self._listener is None:
            return None
        rest = self._rests_until - time.monotonic()
        if rest > 0:
            return rest
        poll.register(self._listener, select.POLLIN)
        return None

    def is_felt(self, ready: list[tuple[int, int]]) -> bool:
        """Whether somebody has connected, as `poll` says, who is let go."""
        if self._listener is None or all(fd != self._listener.fileno() for fd, _ in ready):
            return False
        self._rests_until = time.monotonic() + _REST
        try:
            for _ in range(_AT_ONCE):
                self._listener.accept()[0].close()
        except OSError as error:  # that was the last, or descriptors ran out
            log.debug("felt: %s", spell_error(error))
        return True

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()


@dataclass(slots=True)
class _Patient:
    """`due`: when to feel it next; while `sock` connects, until when it is to answer."""

    address: tuple[str, int]
    why: str
    due: float = 0.0
    pause: float = _FIRST_PAUSE
    sock: socket.socket | None = None


class Pulses:
    """Of others, by token. `on_death` is told whose process is dead, why, and whether that is only silent. It shares
    its owner's selector and thread."""

    def __init__(self, selector: selectors.BaseSelector, on_death: Callable[[bytes, str, bool], None]) -> None:
        self._selector, self._on_death = selector, on_death
        self._patients: dict[bytes, _Patient] = {}

    @property
    def descriptors(self) -> int:
        return sum(each.sock is not None for each in self._patients.values())

    def feel(self, token: bytes, address: tuple[str, int], why: str) -> None:
        """The connection to it broke: see from now on whether it lives."""
        self.forget(token)
        self._patients[token] = _Patient(address, why)

    def forget(self, token: bytes) -> None:
        """It is back, or lost."""
        patient = self._patients.pop(token, None)
        if patient is not None:
            self._let_go(patient)

    def tick(self) -> float | None:
        """Do what is due; the seconds until the next deadline."""
        now = time.monotonic()
        for token, patient in list(self._patients.items()):
            if self._patients.get(token) is not patient or patient.due > now:
                continue
            if patient.sock is None:
                self._connect(token, patient)
            elif _has_answered(patient.sock):  # we are late
                self._judge(token, patient)
            else:
                self._die(token, f"{patient.why}, and its host does not answer", silent=True)
        return min((each.due - now for each in self._patients.values()), default=None)

    def abandon(self) -> None:
        """Close the descriptors without touching the selector."""
        for patient in self._patients.values():
            if patient.sock is not None:
                patient.sock.close()
        self._patients.clear()

    def _connect(self, token: bytes, patient: _Patient) -> None:
        host, port = patient.address
        patient.due = time.monotonic() + _LAST_PAUSE
        try:
            sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:  # out of descriptors
            log.debug("%s: %s", patient.address, spell_error(error))
            return
        patient.sock, patient.due = sock, time.monotonic() + _ANSWER
        unpace(sock)
        sock.setblocking(False)
        try:
            ipaddress.ip_address(host)  # or a name would be looked up
            code = sock.connect_ex((host, port))
        except (ValueError, OverflowError):
            code = errno.EINVAL
        if code in (0, errno.EINPROGRESS):
            self._selector.register(sock, selectors.EVENT_WRITE, lambda _: self._judge(token, patient))
        else:
            self._judge(token, patient, code)

    def _judge(self, token: bytes, patient: _Patient, code: int = 0) -> None:
        """What the system says of an attempt."""
        sock = patient.sock
        if sock is None or self._patients.get(token) is not patient:
            return  # forgotten by an earlier event of the same round
        code = code or sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not code and is_itself(sock):
            code = errno.ECONNREFUSED
        if not code or code in _RESET:
            self._let_go(patient)
            patient.due = time.monotonic() + patient.pause
            patient.pause = min(2 * patient.pause, _LAST_PAUSE)
        elif code == errno.ECONNREFUSED:
            text = f"its process died: {patient.why}, and nobody listens at {spell_address(patient.address)} any more"
            self._die(token, text, silent=False)
        else:
            self._die(token, f"{patient.why}, and to its host: {os.strerror(code)}", silent=code in SILENT)

    def _die(self, token: bytes, why: str, *, silent: bool) -> None:
        self.forget(token)
        self._on_death(token, why, silent)

    def _let_go(self, patient: _Patient) -> None:
        sock, patient.sock = patient.sock, None
        if sock is not None:
            if sock in self._selector.get_map():
                self._selector.unregister(sock)
            close_hard(sock)


def _has_answered(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    return bool(poll.poll(0))
