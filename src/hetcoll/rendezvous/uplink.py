"""The way to the store: straight in small jobs, through a tree of relays in large ones.

Who comes to the store of a job of more than FEW ranks says so in its first frame (`Entry`). The store keeps it, or
sends it on to a relay: the same handshake there, and the same first frame, which the relay passes on. Where a relay is
lost, or says nothing for SILENCE seconds, its children come to the store again; what was under way is sent again
(`streams`). The process with the store is nobody's child; when it is lost, `succession` says where to go.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import NamedTuple

from ..errors import CommunicationError, HetcollError, InitError, parser
from .connections.probe import connect_relay, connect_store
from .connections.secure import Socket
from .connections.sockets import receive, send_all, spell_error, wait_ready
from .protocol.exchanges import FEW
from .protocol.streams import Stream
from .protocol.unique_id import UniqueId, hosted_here
from .protocol.wire import U32, U64, Frame, FrameReader, Op, Status, header, pack, read_count, unpack

log = logging.getLogger("hetcoll.uplink")

SILENCE = 10.0  # seconds without a word from a relay until it is given up
RETURN = 20.0  # seconds in which whoever lost its relay finds another
GRACE = 2.0  # seconds in which the members of a small job come to a new store
ABSENCE = 30.0  # seconds until who has not come back to the store of a large job is lost
_RELAY_SECONDS = 10.0  # that a relay has to answer
_FIRST_PAUSE, _LAST_PAUSE = 0.05, 8.0  # seconds until who was not let in comes again, doubling: many wait at once
TOKEN_BYTES = 16


class Kind(IntEnum):
    """Who enters."""

    MEMBER = 0
    RELAY = 1


class Entry(NamedTuple):
    """Who enters: `token`, random, is the same when it comes again; `received` says how many of the store's frames it
    has by then (a relay: 1). `hosts`: the store lives in this process. `failed` are tokens of relays that did not
    answer it. A relay says where it listens. `attempt` grows each time: an entry that was given up may arrive after the
    next one.
    """

    kind: Kind
    token: bytes
    size: int
    hosts: bool = False
    received: int = 0
    failed: tuple[bytes, ...] = ()
    addresses: tuple[tuple[str, int], ...] = ()
    attempt: int = 0

    def pack(self) -> bytes:
        """The body of ENTER."""
        head = bytes([self.kind, self.hosts]), U32.pack(self.size), U64.pack(self.received), U64.pack(self.attempt)
        return pack((self.token, *head, b"".join(self.failed), pack_places(self.addresses)))

    @classmethod
    @parser("what a process says when it enters")
    def read(cls, body: bytes) -> Entry:
        """What `pack` made."""
        token, (kind, hosts), size, received, attempt, failed, addresses = unpack(body)
        tokens = tuple(failed[i : i + TOKEN_BYTES] for i in range(0, len(failed), TOKEN_BYTES))
        (count,), (ranks,) = U64.unpack(received), U32.unpack(size)
        return cls(Kind(kind), token, ranks, bool(hosts), count, tokens, read_places(addresses), U64.unpack(attempt)[0])


class Place(NamedTuple):
    """Where who entered has come to. `behind`: a relay. `came`: frames of it that the store has."""

    sock: Socket
    reader: FrameReader
    behind: bool
    came: int


def pack_places(addresses: tuple[tuple[str, int], ...]) -> bytes:
    """Hosts and ports."""
    return pack(part for host, port in addresses for part in (host.encode(), U32.pack(port)))


@parser("where a process listens")
def read_places(body: bytes) -> tuple[tuple[str, int], ...]:
    """What `pack_places` made."""
    parts = iter(unpack(body))
    return tuple((host.decode(), U32.unpack(port)[0]) for host, port in zip(parts, parts, strict=True))


def enter(unique_id: UniqueId, entry: Entry, deadline: float, *, again: bool = False) -> Place:
    """Come to the store, and to where it sends us. InitError where that cannot be had, or the store refuses."""
    pause = _FIRST_PAUSE
    while True:
        sock, _ = connect_store(unique_id, deadline, there=again)
        answer, reader = _knock(sock, entry, deadline)
        if answer.op == Op.WELCOME:
            return Place(sock, reader, False, read_count(answer.body))
        sock.close()
        if not answer.body:  # many wait for the first relays
            time.sleep(max(0.0, min(deadline - time.monotonic(), pause * (0.5 + os.urandom(1)[0] / 255))))
            pause = min(2 * pause, _LAST_PAUSE)
            continue
        token, places = unpack(answer.body)
        soon = min(deadline, time.monotonic() + _RELAY_SECONDS)
        try:
            sock = connect_relay(unique_id, token, read_places(places), soon)
            answer, reader = _knock(sock, entry, soon)
            if answer.op == Op.WELCOME:
                return Place(sock, reader, True, read_count(answer.body))
            sock.close()
        except (OSError, HetcollError) as error:
            log.info("a relay at %s: %s", read_places(places), spell_error(error))
            if time.monotonic() >= deadline:
                raise
        entry = entry._replace(failed=(*entry.failed, token)[-8:])


def _knock(sock: socket.socket, entry: Entry, deadline: float) -> tuple[Frame, FrameReader]:
    """Say who we are, and take the answer."""
    reader = FrameReader()
    try:
        body = entry._replace(attempt=time.monotonic_ns()).pack()
        send_all(sock, header(Op.ENTER, body) + body, deadline)
        while True:
            wait_ready(sock, select.POLLIN, deadline)
            data = receive(sock)
            if data == b"":
                raise ConnectionResetError("it closed the connection")
            for frame in reader.feed(data or b""):
                if frame.op == Op.REPLY and frame.status != Status.OK:
                    raise InitError(frame.body.decode())
                if frame.op in (Op.WELCOME, Op.GO):
                    return frame, reader
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError) and not isinstance(error, HetcollError):
            raise InitError(f"the way to the job's store: {spell_error(error)}") from error
        raise


class Uplink:
    """A member's connection to the store, for as long as there is a way. `serve` is called when the store wants this
    process to be a relay. Sending is thread-safe; one thread reads."""

    def __init__(self, unique_id: UniqueId, size: int, deadline: float, serve: Callable[[], None]) -> None:
        self._id, self._size, self._serve = unique_id, size, serve
        self._lock = threading.Lock()
        self._asked: dict[int, tuple[Op, bytes]] = {}  # requests without a reply
        self._behind = self.closing = self._over = False
        self._connect(deadline, there=False)

    def _connect(self, deadline: float, *, there: bool) -> None:
        """To the store, which has never heard of this process. `there`: where nobody answers for it, it is gone."""
        self._token = os.urandom(TOKEN_BYTES)
        self._stream = Stream() if self._size > FEW else None
        if self._stream is None:
            self.sock, self._reader = connect_store(self._id, deadline, there=there)[0], FrameReader()
        else:
            self._come(deadline, again=there)

    @property
    def unique_id(self) -> UniqueId:
        """The job, and where its store is now."""
        return self._id

    def move(self, unique_id: UniqueId, report: bytes, deadline: float) -> None:
        """Go to another store of the job, say what was known to the one before, and ask again what that left open."""
        with self._lock:
            self.sock.close()
            self._id, self._behind = unique_id, False
            self._connect(deadline, there=True)
            self._put(Op.RETURN, report, 0, deadline)
            for request, (op, body) in list(self._asked.items()):
                self._put(op, body, request, deadline, Status.AGAIN)

    @property
    def behind(self) -> bool:
        """Whether it goes through a relay."""
        return self._behind

    def _come(self, deadline: float, *, again: bool) -> None:
        """Enter, and send again what the store does not have."""
        assert self._stream is not None
        hosts = hosted_here(self._id.job_id) is not None
        entry = Entry(Kind.MEMBER, self._token, self._size, hosts, self._stream.received)
        self.sock, self._reader, self._behind, count = enter(self._id, entry, deadline, again=again)
        self._resend(count)

    def _resend(self, count: int) -> None:
        assert self._stream is not None
        self._stream.acknowledge(count)
        for sent in self._stream.again():
            data = header(sent.op, sent.body, sent.request, sent.status, sent.number) + sent.body
            send_all(self.sock, data, time.monotonic() + RETURN)

    def send(self, op: Op, body: bytes, request: int, seconds: float) -> None:
        """Send a frame. OSError where there is no way, or the store takes nothing for so long. Where the way is lost
        it is sent again over the next one, if there is any."""
        with self._lock:
            if request:
                self._asked[request] = op, body
            try:
                self._put(op, body, request, time.monotonic() + seconds)
            except OSError as error:
                patient = isinstance(error, TimeoutError) and error.errno is None  # not the system's, which gave it up
                if self.closing or self._over or (patient and not self._behind):
                    raise
                self.shut_down()  # who reads notices, and finds another way

    def forget(self, request: int) -> None:
        """Nobody waits for this reply any more."""
        self._asked.pop(request, None)

    def _put(self, op: Op, body: bytes, request: int, deadline: float, status: Status = Status.OK) -> None:
        number = 0 if self._stream is None else self._stream.put(op, body, request, status).number
        send_all(self.sock, header(op, body, request, status, number) + body, deadline)

    def _tell(self, op: Op) -> None:
        """How much has come, past the stream."""
        assert self._stream is not None
        body = U64.pack(self._stream.received)
        with self._lock:
            send_all(self.sock, header(op, body) + body, time.monotonic() + RETURN)

    def end(self) -> None:
        """Shut down for good, whether or not the goodbye has come to the store."""
        self._over = True
        self.shut_down()

    def shut_down(self) -> None:
        """Who reads sees the end."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            log.debug("shutting the connection to the store down: %s", spell_error(error))

    def frames(self) -> Iterator[Frame]:
        """What comes, until the store ends, is lost or cannot be reached: then it ends, or raises."""
        yield from self._whole(b"")  # that came with the welcome
        while True:
            try:
                data = self._read()
                if data == b"":
                    raise ConnectionResetError("the connection ended")
                yield from self._whole(data or b"")
            except OSError as error:
                if not self._behind or self._over or isinstance(error, HetcollError):  # a goodbye is sent again, too
                    if isinstance(error, ConnectionResetError) and str(error) == "the connection ended":
                        return
                    raise
                log.info("the way to the store is lost (%s): looking for another", spell_error(error))
                with self._lock:
                    self._take_leave()
                    self.sock.close()
                    self._come(time.monotonic() + RETURN, again=True)
                yield from self._whole(b"")

    def _take_leave(self) -> None:
        """Tell the relay, which may live, that who goes elsewhere has not died. In vain where a frame was cut short."""
        with contextlib.suppress(OSError):
            self.sock.send(header(Op.GONE, b""), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _read(self) -> bytes | None:
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        if not poll.poll(SILENCE * 1000 if self._behind else None):
            raise TimeoutError(f"a relay said nothing for {SILENCE:g} s")
        return receive(self.sock)

    def _whole(self, data: bytes) -> Iterator[Frame]:
        for frame in self._reader.feed(data):
            if frame.op == Op.REPLY and frame.status == Status.REFUSED and frame.request == 0:
                raise CommunicationError(frame.body.decode())
            if self._stream is None:
                yield frame
            elif frame.op == Op.BEAT:
                continue
            elif frame.op == Op.CUT:
                self._over = True
            elif frame.op == Op.RESYNC:
                self._tell(Op.SYNC)
            elif frame.op == Op.SYNCED:
                with self._lock:
                    self._resend(read_count(frame.body))
            elif frame.op == Op.ACK:
                with self._lock:
                    self._stream.acknowledge(read_count(frame.body))
            elif self._stream.accept(frame.number):
                if self._stream.owes():
                    self._tell(Op.ACK)
                if frame.op == Op.SERVE:
                    self._serve()
                else:
                    yield frame
