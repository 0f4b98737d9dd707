"""Who is connected to the store, itself or through relays, and how frames come there."""

from __future__ import annotations

from ..connections.members import Connection
from ..protocol.routes import Entry as Way
from ..protocol.routes import Route
from ..protocol.streams import Stream
from ..protocol.wire import U64, Op, Status
from ..uplink import Entry, Kind


class Node:
    """A member or a relay, wherever it is. `parent` is a relay; None: the store itself, over `connection`."""

    def __init__(self, entry: Entry, name: str) -> None:
        self.entry, self.name = entry, name
        self.ranks: dict[bytes, int] = {}
        self.stream = Stream()
        self.parent: Node | None = None
        self.connection: Connection | None = None
        self.number = 0  # among its parent's children
        self.children: dict[int, Node] = {}
        self.granted: list[tuple[float, Kind]] = []  # until when places are kept, and for whom
        self.asked = False  # to be a relay as well
        self.heard = 0.0  # of a relay: when
        self.away = False  # it may have gone to another store before this one saw that its connection broke

    def way(self) -> tuple[Connection, Route] | None:
        """The connection that leads here, and the route from there on; None where there is no way now."""
        route: list[int] = []
        node = self
        while node.parent is not None:
            route.append(node.number)
            node = node.parent
        return None if node.connection is None else (node.connection, tuple(reversed(route)))

    def send(self, op: Op, body: bytes, request: int = 0, status: Status = Status.OK) -> None:
        """As `groups.Member`: sent again where it is lost with a relay."""
        sent = self.stream.put(op, body, request, status)
        self.emit(sent.op, sent.body, sent.request, sent.status, sent.number)

    def emit(self, op: Op, body: bytes, request: int = 0, status: Status = Status.OK, number: int = 0) -> None:
        """Send a frame that is lost where there is no way."""
        if (way := self.way()) is None:
            return
        connection, route = way
        if route:
            connection.cast(op, body, status, Way(route, request, number))
        else:
            connection.send(op, body, request, status, number)

    def sync(self, received: int, op: Op) -> None:
        """It has so many frames: say how many of its are here, and send the rest."""
        self.stream.acknowledge(received)
        self.emit(op, U64.pack(self.stream.received))
        for sent in self.stream.again():
            self.emit(sent.op, sent.body, sent.request, sent.status, sent.number)
