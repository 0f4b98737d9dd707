"""A relay: a process of a large job that passes frames between others and the store.

It keeps no state of the job, only connections: up to the store or another relay, and down to its children, which are
members and relays. When its own way up changes, it tells its children (RESYNC), which find out what was lost, and the
store which children it has. Each child, and the store, hears of it now and then (BEAT), so that a relay whose process
is stopped is left. Where the store's host fell silent it tells its children so (GONE), which then look for the store as
long as who was connected to it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable

from .. import lifetime
from ..config.limits import Held
from ..errors import CommunicationError, HetcollError, InitError
from . import uplink
from .connections.acceptor import Acceptor, choose_wait
from .connections.auth import Service
from .connections.members import ENDED, Connection, Watch
from .connections.sockets import BACKLOG, SILENT, broke, receive, spell_error, until_vanished, vanished
from .protocol.routes import Entry, extend_up, pack_down, pack_up, unpack_down
from .protocol.unique_id import UniqueId
from .protocol.wire import U32, Frame, FrameReader, Op, Status

log = logging.getLogger("hetcoll.relay")

BEAT = 1.0  # seconds
_FAREWELL = 1.0


class Relay:
    """Serves children at `host` until its way up is lost for good, `close`, or (`retire`) the last child is gone.
    `tls`: see `Acceptor`. `silence`: see `Uplink`."""

    def __init__(
        self,
        unique_id: UniqueId,
        host: str,
        size: int,
        timeout: float,
        *,
        tls: bool = False,
        silence: Callable[[], float] = lambda: uplink.SILENCE,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        self._id, self._token, self._timeout = unique_id, os.urandom(uplink.TOKEN_BYTES), timeout
        self._most_silence = silence
        address = (host, int(listener.getsockname()[1]))
        self._entry = uplink.Entry(uplink.Kind.RELAY, self._token, size, addresses=(address,))
        self._children: dict[int, Connection] = {}
        self._numbers = itertools.count(1)
        self._dirty: set[Connection] = set()
        self._watch = Watch()
        self._up: Connection | None = None
        self._behind = False
        self._heard = self._beaten = 0.0
        self._closing = self._retired = self._silent = False
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ, lambda _: self._wake_read.recv(64))
        context = self._token.ljust(32, b"\0")
        self._acceptor = Acceptor(
            self._selector, [listener], unique_id.secret, Service.RELAY, context, self._admit, tls=tls
        )
        self._thread = threading.Thread(target=self._run, name="hetcoll-relay", daemon=True)
        lifetime.start(self._thread, self)

    def holds(self) -> Held:
        """Its sockets, its selector and its thread."""
        if not self._thread.is_alive():
            return Held()
        return Held(3 + self._acceptor.descriptors + len(self._children) + (self._up is not None), 1)

    def retire(self) -> None:
        """End when no child is left."""
        self._retired = True
        self._wake()

    def close(self) -> None:
        """End; children find other relays. More than once is fine."""
        lifetime.forget(self)
        self._closing = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * _FAREWELL)  # or it waits for a way up that nobody needs any more

    def abandon(self) -> None:
        """In a forked child: close the inherited descriptors."""
        self._closing = True
        self._selector.close()
        self._acceptor.abandon()
        up = [] if self._up is None else [self._up.sock]
        for sock in (self._wake_read, self._wake_write, *up, *(each.sock for each in list(self._children.values()))):
            sock.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._wake_write.send(b"\0")

    # The thread.

    def _run(self) -> None:
        try:
            self._begin()
            while not self._closing and not (self._retired and not self._children):
                self._turn()
        except (OSError, HetcollError) as error:
            log.info("a relay ends: %s", spell_error(error))
        finally:
            self._end()

    def _end(self) -> None:
        lifetime.forget(self)
        for child in self._children.values() if self._silent else ():
            child.send(Op.GONE, b"")
        deadline = time.monotonic() + _FAREWELL
        with contextlib.suppress(OSError, HetcollError):
            while any(each.queue for each in self._children.values()) and time.monotonic() < deadline:
                self._flush_all()
                time.sleep(0.001)
        self._acceptor.close()
        for sock in ([] if self._up is None else [self._up.sock]) + [each.sock for each in self._children.values()]:
            sock.close()
        self._children.clear()
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()

    def _begin(self) -> None:
        """Come for the first time. The store may be silent for a while, or be gone: `close` is seen now and then."""
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                return self._come(min(deadline - time.monotonic(), uplink.RETURN), again=False)
            except InitError as error:
                if isinstance(error, uplink.RefusedError) or self._closing or time.monotonic() >= deadline:
                    raise

    def _come(self, seconds: float, *, again: bool) -> None:
        # A store that does not know it any more, or has taken the place of another, knows its children no better: it
        # refuses a relay that was there before.
        entry = self._entry._replace(received=1 if again else 0)
        place = uplink.enter(self._id, entry, time.monotonic() + seconds, again=again)
        self._up = Connection(place.sock, "the store", self._dirty, place.reader)
        self._behind, self._heard = place.behind, time.monotonic()
        self._selector.register(place.sock, selectors.EVENT_READ, self._up)
        self._take(b"")  # what came with the welcome

    def _come_again(self, error: Exception) -> None:
        """Another way up."""
        assert self._up is not None
        self._selector.unregister(self._up.sock)
        self._up.sock.close()
        self._dirty.discard(self._up)
        self._up = None  # it may stay so: then the relay ends, and says no more to the store
        log.info("a relay's way up is lost: %s", spell_error(error))
        self._silent = getattr(error, "errno", None) in SILENT
        self._come(uplink.time_to_return(error), again=True)
        self._silent = False
        self._resync()

    def _resync(self) -> None:
        """What was under way is lost, also the news of a child that is gone."""
        assert self._up is not None
        self._up.send(Op.CHILDREN, b"".join(map(U32.pack, self._children)))
        for child in self._children.values():
            child.send(Op.RESYNC, b"")

    def _turn(self) -> None:
        now = time.monotonic()
        if now >= self._beaten + BEAT:
            self._beaten = now
            for each in (*self._children.values(), *([] if self._up is None else [self._up])):
                each.send(Op.BEAT, b"")
            self._part_with_vanished()
        self._flush_all()
        silence = self._heard + self._most_silence() - time.monotonic() if self._behind else None
        wait = choose_wait(self._beaten + BEAT - time.monotonic(), silence, self._acceptor.prepare())
        events = self._selector.select(wait)
        for key, mask in events:
            if not isinstance(key.data, Connection):
                key.data(key)
            elif key.data is self._up:
                self._serve_up(mask)
            else:
                self._guarded(key.data, self._serve_child, mask)
        if self._behind and time.monotonic() >= self._heard + self._most_silence():
            if any(key.data is self._up for key, _ in self._selector.select(0)):
                return  # it has spoken, and we have been late
            self._come_again(TimeoutError("a relay said nothing"))

    def _part_with_vanished(self) -> None:
        """Children whose hosts have vanished, and the way up if the store's has."""
        for child in self._watch.look(self._children.values())[0]:
            self._lose(child, spell_error(vanished()).encode(), Status.AGAIN)
        if self._up is not None and not self._behind and not until_vanished(self._up.sock):
            self._come_again(vanished())

    def _flush_all(self) -> None:
        while self._dirty:
            connection = self._dirty.pop()
            if connection is self._up:
                try:
                    connection.flush_with(self._selector)
                except OSError as error:
                    self._come_again(error)
            else:
                self._guarded(connection, lambda each, _: each.flush_with(self._selector), 0)

    def _guarded(self, child: Connection, action: Callable[[Connection, int], None], mask: int) -> None:
        """`action`, whose failure costs this child and no other."""
        if self._children.get(child.child) is not child:
            return
        try:
            action(child, mask)
        except (OSError, CommunicationError) as error:
            self._lose(child, spell_error(error).encode(), Status.AGAIN if broke(error) else Status.OK)

    def _lose(self, child: Connection, reason: bytes, status: Status = Status.OK) -> None:
        """A child is gone, in order where there is no reason. AGAIN: its connection broke, and it may come again."""
        del self._children[child.child]
        self._selector.unregister(child.sock)
        child.sock.close()
        if reason and self._up is not None:
            self._up.send(Op.UP, pack_up(child.child, Frame(Op.GONE, status, 0, reason)))

    def _admit(self, sock: socket.socket, name: str, context: bytes) -> None:
        child = Connection(sock, name, self._dirty, FrameReader())
        child.child = next(self._numbers)
        self._children[child.child] = child
        self._selector.register(sock, selectors.EVENT_READ, child)

    def _serve_child(self, child: Connection, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            child.flush_with(self._selector)
        if not mask & selectors.EVENT_READ:
            return
        data = receive(child.sock)
        if data == b"":
            raise ConnectionResetError(ENDED)
        assert self._up is not None
        for frame in child.reader.feed(data or b""):
            up = extend_up(child.child, frame.body) if frame.op == Op.UP else pack_up(child.child, frame)
            self._up.send(Op.UP, up)

    def _serve_up(self, mask: int) -> None:
        assert self._up is not None
        try:
            if mask & selectors.EVENT_WRITE:
                self._up.flush_with(self._selector)
            data = receive(self._up.sock) if mask & selectors.EVENT_READ else None
            if data == b"":
                raise ConnectionResetError("the connection ended")
        except OSError as error:
            self._come_again(error)
            return
        self._heard = time.monotonic()
        self._take(data or b"")

    def _take(self, data: bytes) -> None:
        assert self._up is not None
        for frame in self._up.reader.feed(data):
            if frame.op == Op.DOWN:
                self._pass_down(frame)
            elif frame.op == Op.RESYNC:
                self._resync()
            elif frame.op == Op.GONE:
                self._come_again(vanished())
                return
            elif frame.op == Op.CLOSING:
                self._closing = True

    def _pass_down(self, frame: Frame) -> None:
        op, status, entries, body = unpack_down(frame.body)
        onwards: dict[int, list[Entry]] = {}
        for route, request, number in entries:
            child = self._children.get(route[0])
            if child is None:
                continue
            if len(route) > 1:
                onwards.setdefault(route[0], []).append(Entry(route[1:], request, number))
            elif op == Op.CUT:
                child.send(Op.CUT, b"")  # its goodbye has come to the store
                with contextlib.suppress(OSError):
                    child.flush()
                self._lose(child, b"")
            else:
                child.send(op, body, request, status, number)
        for number, behind in onwards.items():
            self._children[number].send(Op.DOWN, pack_down(op, status, behind, body))
