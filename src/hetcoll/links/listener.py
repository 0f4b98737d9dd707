"""The data plane's TCP connections: listening, connecting, and matching the two by what they are for."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

from .. import lifetime
from ..config.env import Config
from ..config.interfaces import choose_interfaces, interface_rates
from ..config.limits import Held
from ..errors import ClosedError, InitError, spell_ranks
from ..rendezvous.connections.acceptor import Acceptor
from ..rendezvous.connections.auth import Service
from ..rendezvous.connections.sockets import BACKLOG, settle, spell_error, unpace
from .connector import connect_all
from .edges import ADMITTED, CAME, CONFIRMED, TAKEN, YIELD, Address, Came, EdgeKey, Request

log = logging.getLogger("hetcoll.listener")

_POLL = 0.05  # seconds between looks at `check` while waiting for peers
_GRACE = 0.1  # seconds until `dst` connects by itself


def _nothing() -> None:
    return None


class Resumes(Protocol):
    """Who takes the connections that replace others: `mending.Mending`."""

    def admit(self, key: EdgeKey, *, hurried: bool) -> Came | None: ...

    def resume(self, key: EdgeKey, sock: socket.socket, came: Came) -> None: ...


class _Promise(NamedTuple):
    """A connection that was admitted and whose connector has yet to confirm that it did not give it up meanwhile."""

    sock: socket.socket
    key: EdgeKey
    hurried: bool
    begins: bool  # made again by who has a link since a connection that this end did not get


class Listener:
    """Accepts the data-plane connections of this process: one socket an address of the chosen interfaces.

    Interfaces are HETCOLL_SOCKET_IFNAME's, or loopback's with `loopback` (all ranks are on this host), or all but
    loopback's. `secret` is the job's (`UniqueId.secret`). InitError where no interface is up.

    Connections come with an `EdgeKey`; `take` and `ensure` give them out. Only those count that the connector confirmed
    after they were admitted: a listener that was held up finds claims of connectors that have given up. A second one
    with the same key replaces the first. Sockets are given out non-blocking and with TCP_NODELAY, and belong to the
    caller; those that nobody took are closed by `close`.
    """

    def __init__(self, config: Config, secret: bytes, *, loopback: bool = False) -> None:
        self._secret = secret
        self._local = choose_interfaces(config.socket_ifname, loopback=loopback)
        if not self._local:
            raise InitError("no network interface is up: wanted one to listen at")
        token = os.urandom(16)
        listeners: list[socket.socket] = []
        addresses: list[Address] = []
        try:
            for interface in self._local:
                listeners.append(socket.socket(interface.family, socket.SOCK_STREAM))
                unpace(listeners[-1])  # what it accepts will have its congestion control
                listeners[-1].bind((interface.host, 0))
                listeners[-1].listen(BACKLOG)
                port = listeners[-1].getsockname()[1]
                addresses.append(Address(interface.host, port, interface.name, token))
        except OSError as error:
            for sock in listeners:
                sock.close()
            raise InitError(f"listening at {interface.host} ({interface.name}): {error.strerror}") from error
        self.addresses: tuple[Address, ...] = tuple(addresses)
        self._arrived: dict[EdgeKey, socket.socket] = {}
        self._promises: set[_Promise] = set()
        self._lacking: set[EdgeKey] = set()  # what `take` waits for
        self._outgoing: set[EdgeKey] = set()  # that we connect as `src`: then a hurried `dst` must yield
        self._connecting: set[socket.socket] = set()
        self._news = threading.Condition()
        self._closing = False
        self.mending: Resumes | None = None
        self._watches: list[tuple[int, Callable[[], None]]] = []
        self._watched = 0  # of these, in the selector
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ, lambda _: self._wake())
        context = token.ljust(32, b"\0")
        self._acceptor = Acceptor(self._selector, listeners, secret, Service.DATA, context, self._admit, tls=config.tls)
        self._thread = threading.Thread(target=self._run, name="hetcoll-listener", daemon=True)
        lifetime.start(self._thread, self)

    def rates(self, stripes: int) -> list[int]:
        """Mbit/s of the interfaces that so many stripes of a link use; none where the system does not say it of one."""
        return interface_rates(list(dict.fromkeys(address.interface for address in self.addresses))[:stripes])

    def connect_many(
        self, requests: Iterable[Request], deadline: float, check: Callable[[], None] = _nothing
    ) -> dict[EdgeKey, socket.socket]:
        """A socket for each request, all of them made at once.

        `deadline` is a time of `time.monotonic`. InitError names the rank, the addresses and what each answered;
        AuthenticationError when the reason is the secret. `check` is called now and then, and raises to end the wait
        (a rank was lost, the operation aborted).
        """

        def check_both() -> None:
            self._check_open()
            check()

        return connect_all(requests, self._secret, self._local, deadline, check_both, self._connecting)

    def take(
        self, keys: Collection[EdgeKey], deadline: float, check: Callable[[], None] = _nothing
    ) -> dict[EdgeKey, socket.socket]:
        """The sockets that peers made for `keys`; InitError at `deadline` names the ranks that did not come."""
        with self._news:
            self._lacking.update(keys)
            try:
                missing = self._await(keys, deadline, check)
            finally:
                self._lacking.difference_update(keys)
            if missing:
                ranks = spell_ranks({key.src for key in missing})
                edges = "; ".join(map(str, missing[:3])) + ("; ..." if len(missing) > 3 else "")
                raise InitError(f"{ranks} did not connect in time ({edges})")
            return {key: self._arrived.pop(key) for key in keys}

    def _await(self, keys: Collection[EdgeKey], deadline: float, check: Callable[[], None]) -> list[EdgeKey]:
        """Wait for connections, and give those that have not come by `deadline`. Under `_news`."""
        while True:
            self._check_open()
            missing = [key for key in keys if key not in self._arrived]
            left = deadline - time.monotonic()
            if not missing or left <= 0:
                return missing
            check()
            self._news.wait(min(left, _POLL))

    def ensure(
        self, rank: int, requests: Sequence[Request], deadline: float, check: Callable[[], None] = _nothing
    ) -> dict[EdgeKey, socket.socket]:
        """Both ends' call for edges that `rank` is one end of: connects those whose `src` it is, takes the others.

        By convention the lower rank is `src`. Each peer must ask for the same keys, but no end waits until the other
        one does: what does not come soon `dst` connects itself. Of two connections `src`'s counts. All or nothing.
        """
        ours, theirs = [each for each in requests if each.key.src == rank], [r for r in requests if r.key.src != rank]
        made: dict[EdgeKey, socket.socket] = {}
        try:
            with self._news:
                self._await_promised({each.key for each in ours}, deadline, check)
                here = [each.key for each in ours if each.key in self._arrived]
                made |= {key: self._arrived.pop(key) for key in here}
                ours = [each for each in ours if each.key not in made]
                self._outgoing.update(each.key for each in ours)
            made |= self.connect_many(ours, deadline, check)
            with self._news:
                late = set(self._await([r.key for r in theirs], min(deadline, time.monotonic() + _GRACE), check))
            made |= self.connect_many([r._replace(hurried=True) for r in theirs if r.key in late], deadline, check)
            return made | self.take([r.key for r in theirs if r.key not in made], deadline, check)
        except BaseException:
            for sock in made.values():
                sock.close()
            raise

    def arrived(self, channel: int) -> list[EdgeKey]:
        """The connections of this channel that peers have made and nobody has taken yet."""
        with self._news:
            return [key for key in self._arrived if key.channel == channel]

    def _await_promised(self, keys: Collection[EdgeKey], deadline: float, check: Callable[[], None]) -> None:
        """Wait until it is known which connections count that `dst` made of its own accord. Under `_news`."""
        while any(each.hurried and each.key in keys for each in self._promises) and time.monotonic() < deadline:
            self._check_open()
            check()
            self._news.wait(_POLL)

    def watch(self, fd: int, news: Callable[[], None]) -> None:
        """Call `news` on the listener's thread whenever `fd` is readable. It may be closed: this is of a copy."""
        with self._news:
            self._watches.extend(zip(map(os.dup, [fd]), [news], strict=True))  # in one call: Ctrl-C comes between two
        with contextlib.suppress(OSError):  # the thread has ended
            self._wake_write.send(b"\0")

    def _wake(self) -> None:
        self._wake_read.recv(64)
        with self._news:
            new, self._watched = self._watches[self._watched :], len(self._watches)
        for fd, news in new:
            self._selector.register(fd, selectors.EVENT_READ, lambda _, news=news: news())

    def holds(self) -> Held:
        """Its sockets, its selector and its thread."""
        with self._news:
            waiting = len(self._arrived) + len(self._promises) + len(self._connecting) + len(self._watches)
            return Held(0 if self._closing else 3 + self._acceptor.descriptors + waiting, self._thread.is_alive())

    def close(self) -> None:
        """Stop listening and close what nobody took. Takes a few seconds at most; more than once is fine."""
        lifetime.forget(self)
        with self._news:
            first, self._closing = not self._closing, True
            self._news.notify_all()
        if first:
            with contextlib.suppress(OSError):  # the thread may have seen the flag, and ended
                self._wake_write.send(b"\0")
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)
            self._wake_write.close()  # not by the thread: it may end between our flag and our byte

    def abandon(self) -> None:
        """In a forked child: close the inherited descriptors."""
        self._closing = True
        self._news = threading.Condition()  # the parent's may have been locked
        self._selector.close()
        self._acceptor.abandon()
        promised = [each.sock for each in list(self._promises)]
        for sock in (*self._arrived.values(), *promised, *self._connecting, self._wake_read, self._wake_write):
            sock.close()
        for fd, _ in self._watches:
            os.close(fd)

    def _check_open(self) -> None:
        if self._closing:
            raise ClosedError("the listener was closed")

    def _run(self) -> None:
        try:
            while not self._closing:
                for key, _ in self._selector.select(self._wait()):
                    key.data(key)
        finally:
            with self._news:
                self._closing = True
                self._acceptor.close()
                for sock in (*self._arrived.values(), *(each.sock for each in self._promises)):
                    sock.close()
                for fd, _ in self._watches:
                    os.close(fd)
                self._arrived.clear()
                self._promises.clear()
                self._watches.clear()
                self._news.notify_all()
            self._selector.close()
            self._wake_read.close()

    def _wait(self) -> float | None:
        wait = self._acceptor.prepare()
        return None if wait is None else max(0.0, wait)

    def _admit(self, sock: socket.socket, name: str, context: bytes) -> None:
        key, hurried = EdgeKey.decode(context)
        log.debug("%s: %s", key, name)
        came = None
        if key.life > 0 and self.mending is not None:
            came = self.mending.admit(key, hurried=hurried)
        with self._news:
            begins = came is None and self._begins(key)
            came = Came(0) if begins else came
            yields = came is None if key.life > 0 else hurried and key in self._outgoing
            told = b"" if came is None else CAME.pack(*came)
            try:
                settle(sock)
                sock.send(YIELD if yields else ADMITTED + told, socket.MSG_NOSIGNAL)
            except OSError as error:
                log.debug("%s: %s", name, spell_error(error))
                yields = True
            if not yields:
                promise = _Promise(sock, key, hurried, begins)
                self._promises.add(promise)
        if yields:
            sock.close()
        else:
            answer = bytearray()
            self._selector.register(sock, selectors.EVENT_READ, lambda _: self._confirm(promise, answer))

    def _begins(self, key: EdgeKey) -> bool:
        """Whether a link begins here with a connection that is made again: the one before broke when the connector had
        confirmed it, and this end did not hear. Under `_news`."""
        first = key._replace(life=0)
        known = first in self._arrived or any(each.key._replace(life=0) == first for each in self._promises)
        return key.life > 0 and first in self._lacking and not known

    def _confirm(self, promise: _Promise, answer: bytearray) -> None:
        """The connector of an admitted connection has answered, or given it up."""
        sock, key, _, begins = promise
        wanted = 1 + (CAME.size if key.life > 0 else 0) + (len(TAKEN) if begins else 0)
        try:
            part = sock.recv(wanted - len(answer))
            answer += part
            if part and len(answer) < wanted:
                return
            confirmed = len(answer) == wanted and answer[:1] == CONFIRMED
            if confirmed and begins:  # here is no engine yet to say so
                sock.send(TAKEN, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return
        except OSError as error:
            log.debug("%s: %s", key, spell_error(error))
            confirmed = False
        self._selector.unregister(sock)
        if key.life > 0 and not begins:
            with self._news:
                self._promises.discard(promise)
            if confirmed and self.mending is not None:
                self.mending.resume(key, sock, Came(*CAME.unpack(answer[1:])))
            else:
                sock.close()
            return
        key = key._replace(life=0)
        with self._news:
            self._promises.discard(promise)
            older = self._arrived.pop(key, None) if confirmed else sock
            if confirmed:
                self._arrived[key] = sock
            self._news.notify_all()
        if older is not None:
            older.close()
