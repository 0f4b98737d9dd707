"""Making many data-plane connections at once: every connect is under way before any is waited for.

A rank may be reachable at several addresses. Stripe i starts with the i-th; an address that does not work is followed
by the next, and after the last by the first again. Only a refusal at all of them is final: a rank listens before it
publishes its addresses, so nobody is there any more.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Sequence

from ..config.interfaces import Interface
from ..errors import AuthenticationError, InitError
from ..rendezvous.connections.auth import GREETING, HANDSHAKE_SECONDS, VERDICT, Response, Service, greeting_context
from ..rendezvous.connections.secure import Socket
from ..rendezvous.connections.sockets import settle, spell_address, spell_error, tune, unpace
from .edges import ADMITTED, CONFIRMED, Address, EdgeKey, Request

log = logging.getLogger("hetcoll.connector")

_PAUSE = 0.05  # seconds until the next round over a rank's addresses
_POLL = 0.05  # seconds between looks at `check`


def order_addresses(addresses: Sequence[Address], stripe: int) -> list[Address]:
    """The order in which to try a rank's addresses: one an interface, rotated by `stripe`, then the others."""
    by_interface: dict[str, Address] = {}
    for address in addresses:
        by_interface.setdefault(address.interface, address)
    firsts = list(by_interface.values())
    turn = stripe % len(firsts) if firsts else 0
    return [*firsts[turn:], *firsts[:turn], *(address for address in addresses if address not in firsts)]


def choose_source(host: str, local: Sequence[Interface], stripe: int) -> str | None:
    """The local address to connect to `host` from, so that stripes use different NICs; None: let the kernel choose.

    An interface in the network of `host` is better than another. This host's own addresses need no choice.
    """
    target = ipaddress.ip_address(host)
    mine = [each for each in local if each.network.version == target.version and not each.loopback]
    if target.is_loopback or len({each.name for each in local if not each.loopback}) < 2 or any(
        each.host == host for each in local
    ):  # fmt: skip
        return None
    pool = [each for each in mine if target in each.network] or mine
    return pool[stripe % len(pool)].host if pool else None


class _Attempt:
    """One edge in the making. `fail` moves it to its next address, `due` says when that is tried.

    `yielded` is set when the other end connects as well: its connection counts, and this one is closed.
    """

    def __init__(self, request: Request, secret: bytes, local: Sequence[Interface]) -> None:
        self.key, self._request = request.key, request
        self.yielded = False
        self._secret, self._local = secret, local
        self._places = order_addresses(request.addresses, request.key.stripe)
        self._next = 0
        self._failures: dict[Address, Exception] = {}
        self._address: Address | None = None
        self._response: Response | None = None
        self._data = b""
        self.sock: Socket | None = None
        self.due = 0.0  # when to start, or when to give the address up
        if not self._places:
            raise InitError(f"rank {request.peer} published no address to connect to")

    def start(self) -> None:
        """Begin to connect to the next address."""
        self._address = address = self._places[self._next % len(self._places)]
        self._next += 1
        self._response, self._data, self._proven, self._claimed = None, b"", False, False
        self.due = time.monotonic() + HANDSHAKE_SECONDS
        try:
            self.sock = Socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET, socket.SOCK_STREAM)
            tune(self.sock)
            unpace(self.sock)
            source = choose_source(address.host, self._local, self.key.stripe)
            if source is not None and self._next <= len(self._places):  # later rounds let the kernel choose
                self.sock.bind((source, 0))
            code = self.sock.connect_ex((address.host, address.port))
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # no other address is of any help
                raise InitError(f"no socket for a link to rank {self._request.peer}: {error.strerror}") from error
            self.fail(error)

    def advance(self) -> bool:
        """Go on after the socket became ready; true when the edge stands."""
        assert self.sock is not None
        assert self._address is not None
        if self._response is None:
            code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
        if self._response is not None and not self._claimed:
            return self._claim()
        wanted = 1 if self._proven else GREETING.size if self._response is None else VERDICT.size
        part = self.sock.recv(wanted - len(self._data))
        if not part:
            raise ConnectionResetError("it closed the connection")
        self._data += part
        if len(self._data) < wanted:
            return False
        data, self._data = self._data, b""
        if self._proven:
            self.yielded = data != ADMITTED
            settle(self.sock)
            if not self.yielded:
                self.sock.send(CONFIRMED, socket.MSG_NOSIGNAL)
            return True
        if self._response is not None:
            self._response.check(data)
            self._proven = True
            return self.advance()
        if greeting_context(data, Service.DATA) != self._address.token.ljust(32, b"\0"):
            raise ConnectionResetError("another process listens there")
        self._response = Response(self._secret, data, self.key.encode(hurried=self._request.hurried))
        self._response.secure(self.sock)
        return self._claim()

    def _claim(self) -> bool:
        """BlockingIOError until TLS has shaken hands."""
        assert self.sock is not None
        assert self._response is not None
        self.sock.send(self._response.claim, socket.MSG_NOSIGNAL)
        self._claimed = True
        return False

    def fail(self, error: Exception) -> None:
        """Give this address up; raises when that is final."""
        if self.sock is not None:
            self.sock.close()
        self.sock = None
        assert self._address is not None
        self._failures[self._address] = error
        self.due = time.monotonic() + (_PAUSE if self._next % len(self._places) == 0 else 0.0)
        log.debug("%s at %s: %s", self.key, spell_address(self._address), spell_error(error))
        kinds = [type(each) for each in self._failures.values()]
        if len(kinds) == len(set(self._places)) and all(
            issubclass(kind, (ConnectionRefusedError, AuthenticationError)) for kind in kinds
        ):
            raise self.explain()

    def explain(self) -> InitError:
        """What was tried, and how each address answered."""
        parts = [f"{spell_address(address)}: {spell_error(error)}" for address, error in self._failures.items()]
        if self.sock is not None and self._address is not None and self._address not in self._failures:
            parts.append(f"{spell_address(self._address)}: no answer")
        text = f"rank {self._request.peer} at {', at '.join(parts) or 'its address: not tried'}"
        proof = any(isinstance(error, AuthenticationError) for error in self._failures.values())
        return AuthenticationError(text) if proof else InitError(text)


def connect_all(
    requests: Iterable[Request],
    secret: bytes,
    local: Sequence[Interface],
    deadline: float,
    check: Callable[[], None],
    watch: set[socket.socket],
) -> dict[EdgeKey, socket.socket]:
    """A connected, non-blocking socket for each request but those whose other end connects as well;
    `listener.Listener.connect_many` says what it raises.

    `check` is called every _POLL seconds and raises to end the wait. Sockets in the making are in `watch`, for `fork`.
    """
    attempts = [_Attempt(request, secret, local) for request in requests]
    done: dict[EdgeKey, socket.socket | None] = {}  # None where the other end's connection counts
    idle, look_at = set(attempts), 0.0
    with selectors.DefaultSelector() as selector:
        try:
            while len(done) < len(attempts):
                now = time.monotonic()
                if now >= look_at:
                    check()
                    _give_up(attempts, idle, selector, now)
                    look_at = now + _POLL
                if now >= deadline:
                    late = [attempt.explain() for attempt in attempts if attempt.key not in done]
                    raise late[0] if len(late) == 1 else InitError("; ".join(map(str, late)))
                _start_due(idle, selector, watch, now)
                for key, _ in selector.select(min(deadline, look_at) - now):
                    _advance(key.data, idle, selector, done)
        except BaseException:
            for sock in filter(None, done.values()):
                sock.close()
            raise
        finally:
            for attempt in attempts:
                if attempt.sock is not None:
                    watch.discard(attempt.sock)
                    if done.get(attempt.key) is None:
                        attempt.sock.close()
    return {key: sock for key, sock in done.items() if sock is not None}


def _give_up(attempts: list[_Attempt], idle: set[_Attempt], selector: selectors.BaseSelector, now: float) -> None:
    """Turn away from addresses that have not answered."""
    for attempt in attempts:
        if attempt.sock is not None and now >= attempt.due and attempt.sock in selector.get_map():
            selector.unregister(attempt.sock)
            idle.add(attempt)
            attempt.fail(TimeoutError("no answer"))


def _start_due(idle: set[_Attempt], selector: selectors.BaseSelector, watch: set[socket.socket], now: float) -> None:
    """Start all whose turn has come."""
    for attempt in [attempt for attempt in idle if attempt.due <= now]:
        attempt.start()
        if attempt.sock is not None:
            watch.add(attempt.sock)
            idle.discard(attempt)
            selector.register(attempt.sock, selectors.EVENT_READ, attempt)


def _advance(
    attempt: _Attempt, idle: set[_Attempt], selector: selectors.BaseSelector, done: dict[EdgeKey, socket.socket | None]
) -> None:
    sock = attempt.sock
    assert sock is not None
    try:
        if attempt.advance():
            selector.unregister(sock)
            done[attempt.key] = None if attempt.yielded else sock
    except BlockingIOError:
        return
    except (OSError, AuthenticationError) as error:
        selector.unregister(sock)
        idle.add(attempt)
        attempt.fail(error)
