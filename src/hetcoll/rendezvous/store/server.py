"""The store: one thread in rank 0's process through which the ranks of a job find and watch each other.

Who proves the job's secret (`acceptor`) becomes a member. What members can ask for is in `groups`.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence

from ... import lifetime
from ...config.limits import Held, reserve_descriptors
from ...errors import CommunicationError
from ..connections.acceptor import Acceptor, Fetch, choose_wait
from ..connections.auth import Service
from ..connections.members import ENDED, Connection, Watch
from ..connections.sockets import broke, receive, silent_for, spell_error, vanished
from ..protocol.exchanges import FEW
from ..protocol.unique_id import HOSTED
from ..protocol.wire import F64, FrameReader, Op, Status, header, pack
from .groups import Groups
from .returns import Claim
from .tree import Tree

log = logging.getLogger("hetcoll.store")

_ITSELF = 256  # descriptors that the store of a large job takes, whatever its size
_FAREWELL = 1.0  # seconds that the last messages may take

_hosted: dict[bytes, StoreServer] = {}


class StoreServer:
    """Serves a job over `listeners` (bound, listening; it owns them) until `close`.

    `context` is the 32 bytes by which probes recognise the store: the job's id, 16 bytes, and the key of its launch.
    `unique_id` is what FETCH hands out: to processes of this user over a Unix listener, and with `open_fetch` to
    whoever asks for this job. When this process ends the store waits up to `linger` seconds for those who still use it.
    `succeeds`: see `Groups`; such a store ends when all who came to it have gone. `tls`: see `Acceptor`.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        secret: bytes,
        context: bytes,
        unique_id: bytes = b"",
        *,
        open_fetch: bool = False,
        linger: float = 0.0,
        succeeds: Claim | None = None,
        tls: bool = False,
    ) -> None:
        self._linger = linger
        self._idle = threading.Event()  # nobody is connected
        self._idle.set()
        self._job_id = context[:16]
        local = [b"", *(each.getsockname() for each in listeners if each.family == socket.AF_UNIX)][-1]
        charge = pack((context, bytes([open_fetch, tls]), F64.pack(linger), local))
        launched = any(context[16:]) and succeeds is None
        self._groups = Groups(launched=launched, reserve=_reserve, charge=charge, succeeds=succeeds)
        self._connections: dict[int, Connection] = {}
        self._dirty: set[Connection] = set()  # have something queued since the last flush
        self._watch = Watch()
        self._closing = self._retiring = self._withdraws = False
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._tree = Tree(self._groups, self._part_with, self._selector)
        self._selector.register(self._wake_read, selectors.EVENT_READ, lambda _: self._wake_read.recv(64))
        body = pack([unique_id])
        fetch = Fetch(header(Op.REPLY, body) + body, open_fetch)
        self._acceptor = Acceptor(
            self._selector, listeners, secret, Service.STORE, context, self._admit, fetch, tls=tls
        )
        self._thread = threading.Thread(target=self._run, name="hetcoll-store", daemon=True)
        HOSTED[self._job_id] = _hosted[self._job_id] = self
        lifetime.start(self._thread, self, self._end)

    def close(self) -> None:
        """Tell the members that the store ends, and end it. Takes a few seconds at most; more than once is fine."""
        lifetime.forget(self)
        self._forget()
        if not self._closing:
            self._closing = True
            with contextlib.suppress(OSError):  # the thread may have seen the flag, and ended
                self._wake_write.send(b"\0")
        if threading.current_thread() is not self._thread:
            self._thread.join(_FAREWELL + 5)
            self._wake_write.close()  # not by the thread: it may end between our flag and our byte

    def retire(self) -> None:
        """All have come who ever will: end when they have gone."""
        self._retiring = True
        with contextlib.suppress(OSError):  # it has ended
            self._wake_write.send(b"\0")

    def withdraw(self) -> bool:
        """End without a word, unless it serves already; whether it did. Who came to it looks for another store."""
        self._withdraws = True
        with contextlib.suppress(OSError):
            self._wake_write.send(b"\0")
        while self._thread.is_alive() and self._groups.returns.waits:
            self._thread.join(0.1)
        return not self._thread.is_alive()

    def holds(self) -> Held:
        """Its sockets, its selector and its thread."""
        others = self._acceptor.descriptors + self._tree.pulses.descriptors
        return Held(3 + others + len(self._connections), self._thread.is_alive())

    @property
    def refused(self) -> int:
        """Requests of ranks that the others went on without."""
        return self._groups.rolls.refused

    def _end(self) -> None:
        """At exit: ranks that are still at work may need the store. An exception is for all to hear of, at once."""
        if not self._idle.is_set() and not hasattr(sys, "last_value"):
            log.info("the store waits up to %g s for %d connections to end", self._linger, len(self._connections))
            with contextlib.suppress(KeyboardInterrupt):  # enough of it
                self._idle.wait(self._linger)
        self.close()

    def abandon(self) -> None:
        """In a forked child: close the inherited descriptors."""
        self._closing = True
        self._forget()
        self._selector.close()  # never unregister: the epoll set is shared with the parent
        self._acceptor.abandon()
        self._tree.pulses.abandon()
        for sock in (self._wake_read, self._wake_write, *(each.sock for each in list(self._connections.values()))):
            sock.close()

    def _run(self) -> None:
        try:
            while True:
                look = self._part_with_vanished()
                wait = choose_wait(look, self._groups.tick(), self._tree.tick(), self._acceptor.prepare())
                self._look_who_is_left()
                if self._withdraws and self._groups.returns.waits:
                    return
                if self._closing or self._groups.alone or self._left():
                    break
                self._turn(wait)
            self._say_farewell()
        except Exception:
            log.exception("the store failed")  # members see that it is lost
        finally:
            self._acceptor.close()
            self._tree.pulses.abandon()
            for connection in list(self._connections.values()):
                connection.sock.close()
            self._selector.close()
            self._wake_read.close()
            if not self._closing:  # of itself
                lifetime.forget(self)
                self._forget()
                self._wake_write.close()

    def _forget(self) -> None:
        _hosted.pop(self._job_id, None)
        HOSTED.pop(self._job_id, None)

    def _look_who_is_left(self) -> None:
        """Set `_idle` where that is nobody: some have not entered yet, others are missing."""
        if not self._idle.is_set() and not self._tree.keeps and all(each.token for each in self._connections.values()):
            self._idle.set()

    def _left(self) -> bool:
        """Whether all have gone, and nobody else will come: as to a store after the one before it was lost."""
        return self._idle.is_set() and (self._retiring or self._groups.returns.over)

    def _turn(self, wait: float | None) -> None:
        """Send what is queued, sleep, and serve what came."""
        while self._dirty:  # a lost connection makes others dirty
            connection = self._dirty.pop()
            self._guarded(connection, self._flush)
        for key, events in self._selector.select(wait):
            if not isinstance(key.data, Connection):
                key.data(key)
                continue
            if events & selectors.EVENT_WRITE:
                self._guarded(key.data, self._flush)
            if events & selectors.EVENT_READ:
                self._guarded(key.data, self._read)

    def _admit(self, sock: socket.socket, name: str, context: bytes) -> None:
        connection = Connection(sock, name, self._dirty, FrameReader())
        self._connections[sock.fileno()] = connection
        self._idle.clear()
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _guarded(self, connection: Connection, action: Callable[[Connection], None]) -> None:
        """`action`, whose failure costs this connection and no other."""
        if self._connections.get(connection.sock.fileno()) is not connection:
            return  # closed by an earlier event of the same round
        try:
            action(connection)
        except (OSError, CommunicationError) as error:
            self._disconnect(connection, spell_error(error), broke=broke(error))
        except Exception as error:
            log.exception("serving %s", connection.name)
            self._disconnect(connection, f"the store failed: {error!r}")

    def _read(self, connection: Connection) -> None:
        data = receive(connection.sock)
        if data == b"":
            raise ConnectionResetError(ENDED)
        for frame in connection.reader.feed(data or b""):
            self._tree.handle(connection, frame)
            if self._connections.get(connection.sock.fileno()) is not connection:
                return

    def _flush(self, connection: Connection) -> None:
        connection.flush_with(self._selector)

    def _disconnect(self, connection: Connection, reason: str, *, broke: bool = False) -> None:
        """Close a connection that has ended, or only `broke`. An empty reason is a goodbye."""
        del self._connections[connection.sock.fileno()]
        self._selector.unregister(connection.sock)
        silence = silent_for(connection.sock)
        connection.sock.close()
        self._dirty.discard(connection)
        log.debug("%s is gone: %s", connection.name, reason or "goodbye")
        self._tree.lost(connection, reason, broke=broke, silence=silence)

    def _part_with_vanished(self) -> float:
        """Give the connections up whose hosts have vanished; the seconds until the next look."""
        found, wait = self._watch.look(self._connections.values())
        for connection in found:
            self._disconnect(connection, spell_error(vanished()), broke=True)
        return wait

    def _part_with(self, connection: Connection) -> None:
        """The tree has no more use for a connection."""
        if self._connections.get(connection.sock.fileno()) is connection:
            with contextlib.suppress(OSError):
                connection.flush()
            self._disconnect(connection, "")

    def _say_farewell(self) -> None:
        self._acceptor.close()
        alone = self._groups.alone.encode()
        last = (Op.REPLY, alone, 0, Status.REFUSED) if alone else (Op.CLOSING, b"", 0, Status.OK)
        for connection in self._connections.values():
            if not connection.token:
                connection.send(*last)
        self._tree.say_farewell(*last)
        deadline = time.monotonic() + _FAREWELL
        self._turn(0.0)
        while any(each.queue for each in self._connections.values()) and time.monotonic() < deadline:
            self._turn(0.05)


def _reserve(size: int) -> str:
    """See `Groups`: a connection for each rank of a small job; the tree of a large one has its own bound."""
    return reserve_descriptors(size if size <= FEW else _ITSELF)
