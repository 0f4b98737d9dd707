"""The store's side of all members: who is connected to whom, and in large jobs who is told to go where.

The members of small jobs stay with the store. So do the first ones of a large job, and each that is asked to becomes a
relay beside its own membership. Later ones are sent to the relay nearest to the store that has room; while there is
none, they wait. A member is lost when its own connection ends. Where that breaks, it is missing until its `pulse` says
that it is dead; and where a relay is lost, those behind it are. Who is missing comes back elsewhere, with what it has
of the frames that were sent to it. Who has not come back after ABSENCE seconds is lost.
"""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Callable
from typing import NamedTuple

from ...errors import CommunicationError
from ..connections.members import Connection
from ..connections.pulse import Pulses
from ..connections.sockets import silent_for
from ..protocol.exchanges import FEW
from ..protocol.keys import Member
from ..protocol.routes import Entry as Way
from ..protocol.routes import unpack_up
from ..protocol.wire import U32, U64, Frame, Op, Status, pack, read_count
from ..uplink import ABSENCE, RELAY_SECONDS, RETURN, SILENCE, Entry, Kind, pack_places
from .groups import Groups
from .node import Node

log = logging.getLogger("hetcoll.tree")

FAN = 32  # children of a relay; members, and as many relays, that the store has itself
_FOR_RELAYS = 2  # of these
_TRIES = 3  # relays that somebody cannot reach until the store takes it itself
MAX_WAITING = 48  # who wait at the store for a relay; more are to come again
_GRANTED = 10.0  # seconds that a place is kept for who was sent there
_PATIENCE = 1.0  # seconds that some wait until another relay is asked for
_LOOKS_EVERY = 1.0  # seconds: for relays that say nothing
_AWAY = 6.0  # seconds in which nobody who lost this store is with another one: see `silent_for`

assert _TRIES * RELAY_SECONDS < RETURN, "who lost its relay, and is sent to others that are stopped, is lost"


class _Waiting(NamedTuple):
    connection: Connection
    entry: Entry


class Tree:
    """All nodes. `end` closes a connection of the store's own, once what is queued is sent. One thread calls it, and
    what it is told by `selector`."""

    def __init__(self, groups: Groups, end: Callable[[Connection], None], selector: selectors.BaseSelector) -> None:
        self._groups, self._end = groups, end
        self.pulses = Pulses(selector, self._hear_of_death)
        groups.returns.watch(self.pulses)
        groups.successors.reaches = self._reaches
        groups.successors.host_of = self._host_of
        self._here: set[str] = set()  # addresses of this host
        self._nodes: dict[bytes, Node] = {}
        self._relays: list[Node] = []  # in the order in which they came
        self._waiting: list[_Waiting] = []
        self._missing: dict[bytes, float] = {}  # until when members, or children of lost relays, may come back
        self._asked = 0
        self._own = dict.fromkeys(Kind, 0)  # how many are connected to the store itself
        self._recruit_at = self._late_until = 0.0
        self._looked = time.monotonic()

    def _host_of(self, member: Member) -> str:
        if not isinstance(member, Node) or member.entry.hosts:
            return ""
        host = member.entry.addresses[0][0] if member.entry.addresses else "unknown"
        return "" if host in self._here else host

    def _reaches(self, member: Member) -> bool:
        way = member.way() if isinstance(member, Node) else None
        if way is None or silent_for(way[0].sock):
            return False
        return not (way[1] and self._is_late(time.monotonic()))

    @property
    def keeps(self) -> bool:
        """Whether the store is to go on for somebody."""
        return any(each.entry.kind is Kind.MEMBER and self._groups.keeps(each) for each in self._nodes.values())

    def tick(self) -> float | None:
        """Do what is due; the seconds until the next deadline."""
        pulse = self.pulses.tick()
        now, waits = time.monotonic(), [] if pulse is None else [pulse]
        for token, until in list(self._missing.items()):
            if until <= now and self._missing.pop(token, None) is not None:
                self._give_up(self._nodes[token])
            else:
                waits.append(until - now)
        if now > self._looked + _AWAY:
            self._late_until = now + SILENCE
        if self._relays:
            self._leave_silent(now)
            waits.append(_LOOKS_EVERY)
        self._looked = now
        if self._waiting:
            if now >= self._recruit_at:
                self._recruit_at = now + _PATIENCE
                self._recruit()
                self._serve_waiting()
            waits.append(self._recruit_at - now)
        return min(waits, default=None)

    def _leave_silent(self, now: float) -> None:
        """Relays that are stopped, as those behind them do, who count as elsewhere until they are back."""
        late = now > self._looked + 2 * _LOOKS_EVERY  # what they said may be unread
        for relay in self._relays:
            if late:
                relay.heard = now
            elif now > relay.heard + SILENCE and relay.way() is not None:
                self._lose(relay, f"a relay said nothing for {SILENCE:g} s")

    # Frames.

    def handle(self, connection: Connection, frame: Frame) -> None:
        """A frame of a connection whose first one was ENTER."""
        if frame.op == Op.ENTER:
            self._enter(connection, Entry.read(frame.body))
            return
        node = self._nodes.get(connection.token)
        if node is None:
            raise CommunicationError(f"a frame of operation {frame.op} before it entered")
        if frame.op != Op.UP:
            self._frame(node, frame)
            return
        route, inner = unpack_up(frame.body)
        for number in route[:-1]:
            found = node.children.get(number)
            if found is None:
                self._part(node, number)
                return
            node = found
        try:
            self._frame_behind(node, route[-1], inner)
        except CommunicationError as error:  # not the relay's fault
            log.info("%s: %s", node.name, error)
            self._tell_behind(node, route[-1], Op.CUT, b"", Status.OK)
            if (child := node.children.get(route[-1])) is not None:
                self._lose(child, str(error))

    def _frame_behind(self, relay: Node, number: int, frame: Frame) -> None:
        child = relay.children.get(number)
        if frame.op == Op.ENTER:
            self._enter_behind(relay, number, Entry.read(frame.body))
        elif child is not None and frame.op == Op.GONE:
            lose = self._miss if frame.status == Status.AGAIN else self._lose
            lose(child, frame.body.decode(errors="replace"))
        elif child is not None:
            self._frame(child, frame)
        elif frame.op == Op.BEAT:
            self._part(relay, number)

    def _part(self, parent: Node, number: int) -> None:
        """A relay speaks over a way that is no more: where it does not know that, it comes again, and keeps those that
        are behind it."""
        self._tell_behind(parent, number, Op.CUT, b"", Status.OK)

    def _frame(self, node: Node, frame: Frame) -> None:
        if frame.op == Op.SYNC:
            node.sync(read_count(frame.body), Op.SYNCED)
        elif frame.op == Op.ACK:
            node.stream.acknowledge(read_count(frame.body))
        elif frame.op == Op.BEAT:
            node.heard = time.monotonic()
        elif node.entry.kind is Kind.RELAY and frame.op == Op.CHILDREN:
            kept = {number for (number,) in U32.iter_unpack(frame.body)}
            for child in [each for number, each in node.children.items() if number not in kept]:
                self._miss(child, "the relay to it lost it")
        elif node.entry.kind is Kind.MEMBER and node.stream.accept(frame.number, len(frame.body)):
            if node.stream.owes():
                node.emit(Op.ACK, U64.pack(node.stream.received))
            if frame.op == Op.BYE:
                self._groups.keep_words(node, frame.fields)
                self._lose(node, "")
            else:
                self._groups.handle(node, frame)

    def lost(self, connection: Connection, reason: str, *, broke: bool, silence: float) -> None:
        """A connection of the store's own has ended, or only `broke`, after `silence` seconds without a packet of the
        other end's host."""
        self._waiting = [each for each in self._waiting if each.connection is not connection]
        node = self._nodes.get(connection.token)
        if node is not None and node.connection is connection:
            (self._miss if broke else self._lose)(node, reason, silent=broke and silence > 0)
            if node.entry.kind is Kind.RELAY:  # those behind it have heard nothing of it either, and have left it
                self._missing[node.entry.token] -= min(silence, 0.8 * ABSENCE)

    # Entering.

    def _enter(self, connection: Connection, entry: Entry) -> None:
        node = self._nodes.get(entry.token)
        if node is not None and entry.attempt <= node.entry.attempt:
            return
        if node is None and entry.received:
            connection.send(Op.REPLY, b"the job has gone on without this process", 0, Status.REFUSED)
            return
        most = FAN if node is None and len(entry.failed) < _TRIES else 2 * FAN  # who was here has little time
        if entry.hosts or entry.size <= FEW or self._own[entry.kind] < most:
            self._attach(connection, None, 0, entry)
        elif entry.kind is Kind.RELAY or len(self._waiting) < MAX_WAITING:
            self._waiting.insert(0 if entry.kind is Kind.RELAY else len(self._waiting), _Waiting(connection, entry))
            self._serve_waiting()
        else:
            connection.send(Op.GO, b"")

    def _enter_behind(self, relay: Node, number: int, entry: Entry) -> None:
        node = self._nodes.get(entry.token)
        if relay.children.get(number) not in (None, node) or (node is not None and entry.attempt <= node.entry.attempt):
            return  # it has gone elsewhere since
        if entry.token not in self._nodes and entry.received:
            text = b"the job has gone on without this process"
            self._tell_behind(relay, number, Op.REPLY, text, Status.REFUSED)
            return
        if (kept := next((each for each in relay.granted if each[1] is entry.kind), None)) is not None:
            relay.granted.remove(kept)
        self._attach(None, relay, number, entry)

    @staticmethod
    def _tell_behind(relay: Node, number: int, op: Op, body: bytes, status: Status) -> None:
        """To a child of a relay that is nobody yet."""
        if (way := relay.way()) is not None:
            way[0].cast(op, body, status, Way((*way[1], number), 0, 0))

    def _attach(self, connection: Connection | None, parent: Node | None, number: int, entry: Entry) -> None:
        node = self._nodes.get(entry.token)
        if node is None:
            name = connection.name if connection is not None else f"a process behind {parent.name}" if parent else ""
            node = self._nodes[entry.token] = Node(entry, name)
            if entry.kind is Kind.RELAY:
                self._relays.append(node)
        self._detach(node)
        node.entry, node.away = entry, False
        self._find(entry.token)
        node.parent, node.connection, node.number = parent, connection, number
        if connection is not None:
            connection.token = entry.token
            self._own[entry.kind] += 1
            self._here.add(connection.sock.getsockname()[0].removeprefix("::ffff:"))
        if parent is not None:
            parent.children[number] = node
        if entry.kind is Kind.RELAY:
            for each in self._relays:  # there may be some behind it
                each.heard = time.monotonic()
            node.emit(Op.WELCOME, U64.pack(0))
            self._serve_waiting()
            return
        node.sync(entry.received, Op.WELCOME)
        if self._asked * (FAN - _FOR_RELAYS) < entry.size - FAN and not entry.hosts:
            self._ask(node)

    def _detach(self, node: Node) -> None:
        """Forget the way to it."""
        if node.parent is not None:
            node.parent.children.pop(node.number, None)
        old, node.parent, node.connection = node.connection, None, None
        if old is not None:
            old.token = b""
            self._own[node.entry.kind] -= 1
            self._end(old)

    def _ask(self, node: Node) -> None:
        node.asked = True
        self._asked += 1
        node.send(Op.SERVE, b"")

    def _recruit(self) -> None:
        """Some wait for longer than it takes to become a relay: ask one more."""
        able = (n for n in self._nodes.values() if n.entry.kind is Kind.MEMBER and not (n.asked or n.entry.hosts))
        if (found := next((node for node in able if node.way() is not None), None)) is not None:
            self._ask(found)

    def _serve_waiting(self) -> None:
        """Send those on for whom a relay has room: the oldest relays are nearest to the store."""
        now, left = time.monotonic(), list[_Waiting]()
        room = [relay for relay in self._relays if _has_room(relay, Kind.RELAY, now) and relay.way() is not None]
        for each in self._waiting if room else ():
            connection, entry = each
            able = (relay for relay in room if relay.entry.token not in entry.failed)
            relay = next((relay for relay in able if _has_room(relay, entry.kind, now)), None)
            if relay is None:
                left.append(each)
                continue
            relay.granted.append((now + _GRANTED, entry.kind))
            connection.send(Op.GO, pack((relay.entry.token, pack_places(relay.entry.addresses))))
        if room:
            self._waiting = left

    # Losing.

    def _is_late(self, now: float) -> bool:
        """Whether what relays say may have come while this process was stopped, and others served."""
        return now > self._looked + _AWAY or now < self._late_until

    def _lose(self, node: Node, reason: str, *, silent: bool = False) -> None:
        """It has ended; in order where there is no reason."""
        if node.entry.kind is Kind.RELAY:
            self._detach(node)
            self._missing[node.entry.token] = time.monotonic() + ABSENCE
            return
        if reason:
            log.info("%s is lost: %s", node.name, reason)
        else:
            node.emit(Op.CUT, b"")
        del self._nodes[node.entry.token]
        self._find(node.entry.token)
        self._detach(node)
        self._groups.drop(node, reason, silent=silent or node.away)

    def _miss(self, node: Node, reason: str, *, silent: bool = False) -> None:
        """Its own connection broke, which is no death as yet. After a silence, or where it is behind a relay and this
        process was stopped, it may have gone to another store since: then its death is no proof that it did not."""
        entry, now = node.entry, time.monotonic()
        node.away = silent or (node.parent is not None and self._is_late(now))
        if entry.kind is Kind.RELAY or not (entry.addresses or entry.hosts):
            self._lose(node, reason)
            return
        log.info("%s is missing: %s", node.name, reason)
        self._detach(node)
        self._missing[entry.token] = now + ABSENCE
        if not entry.hosts:
            self.pulses.feel(entry.token, entry.addresses[0], reason)

    def _find(self, token: bytes) -> None:
        """It is missing no more."""
        self._missing.pop(token, None)
        self.pulses.forget(token)

    def _hear_of_death(self, token: bytes, reason: str, silent: bool) -> None:
        if (node := self._nodes.get(token)) is not None:
            self._lose(node, reason, silent=silent)
        elif not (silent or self._is_late(time.monotonic())):
            self._groups.hear_of_death(token)

    def _give_up(self, relay: Node) -> None:
        """Who is missing has not come back; nor have those that are still behind it, where that is a relay."""
        if relay.entry.kind is Kind.MEMBER:
            self._lose(relay, f"its connection broke, and it did not come back within {ABSENCE:g} s", silent=True)
            return
        del self._nodes[relay.entry.token]
        self._relays.remove(relay)
        for child in list(relay.children.values()):
            if child.entry.kind is Kind.RELAY:
                self._detach(child)
                self._missing.pop(child.entry.token, None)
                self._give_up(child)
            else:
                text = f"the relay to it was lost, and it did not come back within {ABSENCE:g} s"
                self._lose(child, text, silent=True)

    def say_farewell(self, op: Op, body: bytes, request: int, status: Status) -> None:
        """The store ends: tell members, and then relays."""
        for kind in Kind:
            for node in self._nodes.values():
                if node.entry.kind is Kind.MEMBER and kind is Kind.MEMBER:
                    node.send(op, body, request, status)
                elif node.entry.kind is kind and node.connection is not None:
                    node.connection.send(Op.CLOSING, b"")


def _has_room(relay: Node, kind: Kind, now: float) -> bool:
    """Whether it has a place for one more. Some are for relays alone, or the tree could not grow."""
    if len(relay.children) >= FAN:
        return False
    relay.granted = [each for each in relay.granted if each[0] > now]
    kinds = [each.entry.kind for each in relay.children.values()] + [each for _, each in relay.granted]
    return len(kinds) < FAN and (kind is Kind.RELAY or kinds.count(Kind.MEMBER) < FAN - _FOR_RELAYS)
