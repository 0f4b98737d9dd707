"""Connections that have proven the secret, at the store and at relays, and what is to be sent over them."""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from collections.abc import Collection
from itertools import islice

from ..protocol.routes import Entry, pack_down
from ..protocol.wire import FrameReader, Op, Status, header
from .sockets import until_vanished

ENDED = "its process died: the connection ended without a goodbye"
_MAX_UNSENT = 256 << 20  # bytes queued for who does not read


class Connection:
    """A socket and its queue. Who is at its other end has entered with its `token`, or is the `child` of a relay."""

    def __init__(self, sock: socket.socket, name: str, dirty: set[Connection], reader: FrameReader) -> None:
        self.sock, self.name, self.reader = sock, name, reader
        self.token = b""
        self.child = 0
        self.queue: deque[memoryview] = deque()
        self._unsent = 0
        self._cast: tuple[int, int, bytes] | None = None  # operation, status and body for the entries that follow
        self._entries: list[Entry] = []
        self._dirty = dirty

    def send(self, op: int, body: bytes, request: int = 0, status: int = Status.OK, number: int = 0) -> None:
        """Queue one frame; whoever owns the connection flushes it before it sleeps."""
        self._settle()
        self._put(op, body, request, status, number)
        self._dirty.add(self)

    def cast(self, op: int, body: bytes, status: int, entry: Entry) -> None:
        """Queue one frame for somebody behind this relay. Those with the same body that follow each other are one."""
        cast = self._cast
        if cast is None or cast[2] is not body or cast[:2] != (op, status):
            self._settle()
            self._cast = (op, status, body)
        self._entries.append(entry)
        self._dirty.add(self)

    def _settle(self) -> None:
        if self._cast is not None:
            op, status, body = self._cast
            self._put(Op.DOWN, pack_down(op, status, self._entries, body), 0, Status.OK, 0)
            self._cast = None
            self._entries.clear()

    def _put(self, op: int, body: bytes, request: int, status: int, number: int) -> None:
        for part in (header(op, body, request, status, number), body):
            if part:
                self.queue.append(memoryview(part))
                self._unsent += len(part)

    def flush(self) -> None:
        """Send what the socket takes now."""
        self._settle()
        while self.queue:
            try:
                sent = self.sock.sendmsg(list(islice(self.queue, 64)), (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            self._unsent -= sent
            while sent:
                head = self.queue.popleft()
                if sent < len(head):
                    self.queue.appendleft(head[sent:])
                sent -= min(sent, len(head))

    def flush_with(self, selector: selectors.BaseSelector) -> None:
        """The same, and have `selector` say when it takes more. ConnectionError where too much is left."""
        self.flush()
        if self._unsent > _MAX_UNSENT:
            raise ConnectionResetError(f"it left {self._unsent} bytes unread")
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.queue else 0)
        if selector.get_key(self.sock).events != events:
            selector.modify(self.sock, events, self)


class Watch:
    """Finds those of some connections whose hosts have vanished. It looks as seldom as it can."""

    def __init__(self) -> None:
        self._due = 0.0

    def look(self, connections: Collection[Connection]) -> tuple[list[Connection], float]:
        """Those, and the seconds until the next look."""
        now = time.monotonic()
        if now < self._due:
            return [], self._due - now
        left = {each: until_vanished(each.sock) for each in connections}
        self._due = now + min((seconds for seconds in left.values() if seconds), default=1.0)
        return [each for each, seconds in left.items() if not seconds], self._due - now
