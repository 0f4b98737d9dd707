"""Finding the store: connects to all places where it may listen until one proves to be the right one.

Ports, each of which may be another listener's, are tried all at once. Addresses at which one listener is reached (both
of loopback, those of several interfaces) are tried in turn, as in RFC 8305: the next one when the one before has
failed, has not been reached for STAGGER seconds, or was reached and has not greeted for GREETS seconds.

What listens there instead is left alone: the store speaks first, so a foreign service sees a connection that opens,
says nothing and closes. A place that refuses is tried again, because rank 0 may simply not be there yet. One that
greets as the store and cannot prove the job's secret is passed over: anyone can repeat a greeting.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...errors import AuthenticationError, InitError
from ..protocol.unique_id import UniqueId
from .auth import GREETING, HANDSHAKE_SECONDS, VERDICT, Response, Service, greeting_context
from .secure import Socket
from .sockets import is_itself, resolve, spell_address, spell_error, tune

log = logging.getLogger("hetcoll.probe")

_FIRST_RETRY, _LAST_RETRY = 0.02, 0.5  # seconds between attempts, doubling
_FOREIGN_RETRY = 2.0  # where something else answered
_BROKEN = 6  # attempts that broke in the handshake, or were not answered, until that counts as an answer
_NOT_TRIED = "not tried"
STAGGER = 0.25
GREETS = 2.0


class Found(NamedTuple):
    """A connected, non-blocking socket whose listener greeted with `context` and accepted our claim."""

    sock: Socket
    context: bytes
    address: tuple[str, int]


@dataclass(slots=True)
class _Place:
    """One address: when to try it next, and the attempt in progress."""

    family: int
    address: tuple[Any, ...]
    due: float
    pause: float = _FIRST_RETRY
    outcome: str = _NOT_TRIED
    sock: Socket | None = None
    deadline: float = 0.0
    connected: bool = False
    data: bytes = b""
    context: bytes = b""
    response: Response | None = None  # to its greeting
    claimed: bool = False  # that was sent
    answers: int = 0  # how many attempts have ended
    broken: int = 0  # by a reset or by silence, which say nothing of who listens
    after: _Place | None = None  # the next address of the same listener
    denied: str = ""  # why it did not pass for the store, which it greets as


@dataclass(slots=True)
class Search:
    """A search for the listener of `service` whose greeting's context `matches`, at `endpoints`.

    `respond` makes the claim out of a greeting and its context; the listener must accept it, and prove itself in turn.
    `settled`: it listens at one of the endpoints already or never will, so a failed proof is final when all of them
    have answered. Else the search goes on, for it may come up at another. The first `eager` ports are tried at once,
    the rest a little later: most often they are not needed. `one`: all endpoints are one listener's, not only those of
    one port. `there`: it has listened before, so where nobody answers for it, it is gone.
    """

    service: Service
    matches: Callable[[bytes], bool]
    endpoints: Sequence[tuple[str, int]]
    respond: Callable[[bytes, bytes], Response]
    settled: bool = False
    one: bool = False
    there: bool = False
    eager: int = 4
    _places: dict[tuple[Any, ...], _Place] = field(default_factory=dict)
    _unresolved: dict[str, str] = field(default_factory=dict)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def run(self, deadline: float) -> Found:
        """The first that proves itself. InitError at `deadline` says what each place answered; AuthenticationError
        where one of them failed the proof."""
        started, resolve_at = time.monotonic(), 0.0
        try:
            while time.monotonic() < deadline:
                if time.monotonic() >= resolve_at:
                    self._resolve()
                    resolve_at = time.monotonic() + 1.0 if self._unresolved or not self._places else float("inf")
                found = self._step(min(deadline, resolve_at))
                if found is not None:
                    return found
                if self.settled and not self._unresolved and all(place.answers for place in self._places.values()):
                    self._check_denied()
                    if self.there:
                        break
            waited = time.monotonic() - started
            self._check_denied()
            raise InitError(f"the store of rank 0 was not found within {waited:.1f} s: {self._spell_outcomes()}")
        finally:
            self._close()

    def _check_denied(self) -> None:
        denied = [f"{spell_address(p.address)}: {p.denied}" for p in self._places.values() if p.denied]
        if denied:
            raise AuthenticationError(f"the store of rank 0 at {'; '.join(denied)}")

    def _resolve(self) -> None:
        """Look the hosts up. A name that is not known yet may become known: the search tries again."""
        now = time.monotonic()
        self._unresolved.clear()
        lasts: dict[int, _Place] = {}  # by port
        for place in self._places.values():
            lasts[0 if self.one else place.address[1]] = place
        for host in dict.fromkeys(host for host, _ in self.endpoints):
            try:
                answers = resolve(host)
            except OSError as error:
                self._unresolved[host] = spell_error(error)
                continue
            ports = [port for name, port in self.endpoints if name == host]
            for family, address in answers:
                for index, port in enumerate(ports):
                    at = (address[0], port, *address[2:])
                    if at in self._places:
                        continue
                    last = lasts.get(0 if self.one else port)
                    due = now + (0.0 if index < self.eager else 10 * _FIRST_RETRY)
                    place = _Place(family, at, due if last is None or last.answers else math.inf)
                    if last is not None:
                        last.after = place
                    self._places[at] = lasts[0 if self.one else port] = place

    def _step(self, until: float) -> Found | None:
        """Start what is due, then sleep until something happens."""
        now = time.monotonic()
        times = [until]
        for place in self._places.values():
            if place.sock is not None and now >= place.deadline:
                self._broke(place, self._spell_silence(place), _FOREIGN_RETRY, connected=place.connected)
            if place.sock is None and now >= place.due:
                self._start(place)
            times.append(place.due if place.sock is None else place.deadline)
        for key, _ in self._selector.select(max(0.0, min(times) - now)):
            found = self._advance(key.data)
            if found is not None:
                return found
        return None

    def _start(self, place: _Place) -> None:
        try:
            sock = Socket(place.family, socket.SOCK_STREAM)
        except OSError as error:
            self._retry(place, spell_error(error))
            return
        place.sock, place.connected, place.data, place.response = sock, False, b"", None
        if place.outcome == _NOT_TRIED:
            place.outcome = "no answer"
        place.deadline = time.monotonic() + HANDSHAKE_SECONDS
        _let_next(place, STAGGER)
        try:
            tune(sock)
            code = sock.connect_ex(place.address)
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
            self._selector.register(sock, selectors.EVENT_WRITE, place)
        except OSError as error:
            self._retry(place, spell_error(error))

    def _advance(self, place: _Place) -> Found | None:
        sock = place.sock
        assert sock is not None
        try:
            if not place.connected:
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    raise OSError(code, os.strerror(code))
                if is_itself(sock):
                    raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
                place.connected = True
                _let_next(place, GREETS)
                self._selector.modify(sock, selectors.EVENT_READ, place)
                return None
            if place.response is not None and not place.claimed:
                self._claim(place, sock)
                return None
            wanted = GREETING.size if place.response is None else VERDICT.size
            part = sock.recv(wanted - len(place.data))
            if not part:
                self._retry(place, "it closed the connection")
                return None
            place.data += part
            return self._judge(place, sock) if len(place.data) == wanted else None
        except BlockingIOError:
            return None
        except AuthenticationError as error:
            if not place.denied:
                log.warning("%s greets as this job's store: %s", spell_address(place.address), error)
            place.denied = str(error)
            self._retry(place, place.denied, _FOREIGN_RETRY)
        except OSError as error:
            connected = place.connected or error.errno == errno.ECONNRESET  # before we saw that it was connected
            self._broke(place, spell_error(error), connected=connected)
        return None

    def _judge(self, place: _Place, sock: Socket) -> Found | None:
        """Go on after a whole greeting or verdict."""
        data, place.data = place.data, b""
        if place.response is not None:
            place.response.check(data)
            self._selector.unregister(sock)
            place.sock, place.denied = None, ""
            return Found(sock, place.context, (str(place.address[0]), int(place.address[1])))
        context = greeting_context(data, self.service)
        if context is None or not self.matches(context):
            self._retry(place, "another job's store" if context else "something else", _FOREIGN_RETRY)
            return None
        place.context, place.response, place.claimed = context, self.respond(data, context), False
        place.response.secure(sock)
        self._claim(place, sock)
        return None

    @staticmethod
    def _claim(place: _Place, sock: Socket) -> None:
        """BlockingIOError until TLS has shaken hands."""
        assert place.response is not None
        sock.send(place.response.claim, socket.MSG_NOSIGNAL)
        place.claimed = True

    @staticmethod
    def _spell_silence(place: _Place) -> str:
        if place.response is not None:
            return "it greets as this job's store but does not answer"
        return "it accepts but does not greet" if place.connected else "no answer"

    def _broke(self, place: _Place, outcome: str, pause: float = 0.0, *, connected: bool) -> None:
        """An attempt has failed. Where the other end was connected, it may be the store, and have had no time."""
        place.broken += connected
        self._retry(place, outcome, pause, answered=not connected or place.broken >= _BROKEN)

    def _retry(self, place: _Place, outcome: str, pause: float = 0.0, *, answered: bool = True) -> None:
        if place.sock is not None:
            if place.sock in self._selector.get_map():
                self._selector.unregister(place.sock)
            place.sock.close()
        place.sock, place.outcome = None, outcome
        place.answers += answered
        _let_next(place, 0.0)
        place.due = time.monotonic() + (pause or place.pause)
        place.pause = min(2 * place.pause, _LAST_RETRY)

    def _close(self) -> None:
        for place in self._places.values():
            if place.sock is not None:
                place.sock.close()
                place.sock = None
        self._selector.close()

    def _spell_outcomes(self) -> str:
        """What happened, places with the same outcome together."""
        groups: dict[str, list[str]] = {}
        for place in self._places.values():
            groups.setdefault(place.outcome, []).append(spell_address(place.address))
        parts = [f"{_first_few(places)}: {outcome}" for outcome, places in groups.items()]
        parts += [f"{host}: {reason}" for host, reason in self._unresolved.items()]
        return "; ".join(parts) or "there is no address to try"


def _let_next(place: _Place, seconds: float) -> None:
    """The next address of the same listener, unless it was tried, is tried after so long."""
    if place.after is not None and place.after.outcome == _NOT_TRIED:
        place.after.due = time.monotonic() + seconds


def _first_few(items: Iterable[str]) -> str:
    items = list(items)
    return ", ".join(items[:3]) + (f" and {len(items) - 3} more" if len(items) > 3 else "")


def connect_store(unique_id: UniqueId, deadline: float, *, there: bool = False) -> tuple[Socket, tuple[str, int]]:
    """A connection to the job's store that has proven the secret, and the address it goes to. `there` as `Search`."""
    found = Search(
        Service.STORE,
        lambda context: context[:16] == unique_id.job_id,
        unique_id.addresses,
        lambda greeting, _: Response(unique_id.secret, greeting),
        settled=True,
        one=True,
        there=there,
    ).run(deadline)
    return found.sock, found.address


def connect_relay(unique_id: UniqueId, token: bytes, addresses: Sequence[tuple[str, int]], deadline: float) -> Socket:
    """A connection to the relay with this token that has proven the secret."""
    search = Search(
        Service.RELAY,
        lambda context: context[:16] == token,
        addresses,
        lambda greeting, _: Response(unique_id.secret, greeting),
        settled=True,
        one=True,
        there=True,
    )
    return search.run(deadline).sock
