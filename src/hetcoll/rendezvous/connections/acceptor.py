"""Accepting connections: who proves the job's secret is let in, everyone else is kept cheap.

Until it has proven something a connection costs one socket, CLAIM.size bytes and HANDSHAKE_SECONDS. There are at most
MAX_PENDING of them. When more come, the oldest is turned away as soon as it has had PATIENCE seconds, in which a rank
answers: idle strangers, however long they last, delay a rank by PATIENCE for each MAX_PENDING that came before it. A
rank that was turned away because it was slow comes again. An acceptor shares its owner's selector and thread.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...errors import AuthenticationError
from .auth import CLAIM, HANDSHAKE_SECONDS, MAX_PENDING, PATIENCE, Challenge, Service
from .secure import Socket
from .sockets import peer_is_us, spell_address, spell_error, tune

log = logging.getLogger("hetcoll.acceptor")

_RETRY = 0.1  # seconds until the next accept when descriptors ran out

Admit = Callable[[socket.socket, str, bytes], None]


class Fetch(NamedTuple):
    """What a FETCH of the acceptor's context gets after the verdict: processes of our user over a Unix socket always,
    all others only through an `open` acceptor."""

    reply: bytes
    open: bool


@dataclass(slots=True)
class _Pending:
    sock: Socket
    name: str
    local: bool
    challenge: Challenge
    came: float
    claim: bytes = b""


class Acceptor:
    """Guards the `listeners` (bound, listening), which it owns.

    `admit` is called with a non-blocking socket, the peer's address for people and the claim's context. `tls`: what
    goes over TCP is encrypted behind the greeting.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listeners: Sequence[socket.socket],
        secret: bytes,
        service: Service,
        context: bytes,
        admit: Admit,
        fetch: Fetch | None = None,
        *,
        tls: bool = False,
    ) -> None:
        self._selector, self._listeners = selector, listeners
        self._secret, self._service, self._context = secret, service, context
        self._admit, self._fetch, self._tls = admit, fetch, tls
        self._pending: dict[int, _Pending] = {}  # oldest first
        self._open = False
        self._open_at = 0.0
        for listener in listeners:
            listener.setblocking(False)

    def prepare(self) -> float | None:
        """Call before each select; gives the seconds until the next call is due, or None."""
        now = time.monotonic()
        while self._pending and now >= self._oldest().came + HANDSHAKE_SECONDS:
            self._part_with(self._oldest(), "it proved nothing in time")
        if self._full(now):  # full of connections that may yet answer
            self._shut()
            self._open_at = self._oldest().came + PATIENCE
        elif not self._open and now >= self._open_at:
            for listener in self._listeners:
                self._selector.register(listener, selectors.EVENT_READ, self._accept)
            self._open = True
        waits = [self._oldest().came + HANDSHAKE_SECONDS - now] if self._pending else []
        if not self._open:
            waits.append(self._open_at - now)
        return min(waits, default=None)

    @property
    def descriptors(self) -> int:
        """How many it has open."""
        return len(self._listeners) + len(self._pending)

    def _oldest(self) -> _Pending:
        return next(iter(self._pending.values()))

    def _full(self, now: float) -> bool:
        return len(self._pending) >= MAX_PENDING and now < self._oldest().came + PATIENCE

    def close(self) -> None:
        """Close the listeners and all connections that were not let in."""
        self._shut()
        for pending in list(self._pending.values()):
            self._turn_away(pending, "the listener ends")
        self.abandon()

    def abandon(self) -> None:
        """Close the descriptors without touching the selector."""
        for pending in list(self._pending.values()):
            pending.sock.close()
        for listener in self._listeners:
            listener.close()

    def _shut(self) -> None:
        if self._open:
            for listener in self._listeners:
                self._selector.unregister(listener)
        self._open = False

    def _accept(self, key: selectors.SelectorKey) -> None:
        listener = key.fileobj
        assert isinstance(listener, socket.socket)
        for _ in range(MAX_PENDING):  # then those who are here have their turn: a claim may have come
            now = time.monotonic()
            if not self._open or self._full(now):
                return
            try:
                accepted, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # out of descriptors, or the peer has gone already
                log.debug("accept: %s", spell_error(error))
                self._shut()
                self._open_at = now + _RETRY
                return
            if len(self._pending) >= MAX_PENDING:
                self._part_with(self._oldest(), "others wait, and it has proven nothing")
            local = listener.family == socket.AF_UNIX
            challenge = Challenge(self._secret, self._service, self._context, tls=self._tls and not local)
            sock = Socket.adopt(accepted)
            pending = _Pending(sock, spell_address(address), local, challenge, now)
            try:
                tune(sock)
                sock.send(challenge.greeting, socket.MSG_NOSIGNAL)
                challenge.secure(sock)
            except OSError as error:
                log.debug("%s: %s", pending.name, spell_error(error))
                sock.close()
                continue
            self._pending[sock.fileno()] = pending
            self._selector.register(sock, selectors.EVENT_READ, lambda _, pending=pending: self._read(pending))

    def _read(self, pending: _Pending) -> None:
        if self._pending.get(pending.sock.fileno()) is not pending:
            return  # turned away by an earlier event of the same round
        try:
            part = pending.sock.recv(CLAIM.size - len(pending.claim))
            pending.claim += part
            if not part:
                self._turn_away(pending, "it ended before it proved anything")
            elif len(pending.claim) == CLAIM.size:
                self._judge(pending)
        except BlockingIOError:
            return
        except (OSError, AuthenticationError) as error:
            self._turn_away(pending, spell_error(error))

    def _judge(self, pending: _Pending) -> None:
        judgement = pending.challenge.judge(pending.claim, open_fetch=self._may_fetch(pending))
        reply = self._fetch.reply if self._fetch and judgement.accepted and not judgement.proven else b""
        pending.sock.send(judgement.verdict + reply, socket.MSG_NOSIGNAL)
        if not judgement.proven:
            self._turn_away(pending, "it was told the unique id" if reply else "it did not prove the job's secret")
            return
        del self._pending[pending.sock.fileno()]
        self._selector.unregister(pending.sock)
        self._admit(pending.sock, pending.name, judgement.context)

    def _may_fetch(self, pending: _Pending) -> bool:
        if self._fetch is None or pending.claim[8:40] != self._context:
            return False
        return peer_is_us(pending.sock) if pending.local else self._fetch.open

    def _part_with(self, pending: _Pending, reason: str) -> None:
        """Turn away who is too late, unless its claim is here: we may be late ourselves."""
        self._read(pending)
        if self._pending.get(pending.sock.fileno()) is pending:
            self._turn_away(pending, reason)

    def _turn_away(self, pending: _Pending, reason: str) -> None:
        log.debug("%s: closed, %s", pending.name, reason)
        del self._pending[pending.sock.fileno()]
        self._selector.unregister(pending.sock)
        pending.sock.close()


def choose_wait(*waits: float | None) -> float | None:
    """The shortest of some times to wait, none of them below 0; None when there is nothing to wait for."""
    known = [max(0.0, wait) for wait in waits if wait is not None]
    return min(known, default=None)
