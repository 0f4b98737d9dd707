"""The way to the store: straight in small jobs, through a tree of relays in large ones.

Who comes to the store says so in its first frame (`Entry`). The store keeps it, or sends it on to a relay: the same
handshake there, and the same first frame, which the relay passes on. Where a connection breaks, or a relay says nothing
for too long (`Uplink.silence`), who was connected comes to the store again, and proves the job's secret again; what was
under way is sent again (`streams`). Where the store is lost itself, `succession` says where to go.
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
from .connections import sockets
from .connections.probe import connect_relay, connect_store
from .connections.pulse import Places, Pulse
from .connections.secure import Socket
from .connections.sockets import broke, close_hard, receive, send_all, silent_for, spell_error, wait_ready
from .protocol.streams import Stream
from .protocol.unique_id import UniqueId, hosted_here
from .protocol.wire import U32, U64, Frame, FrameReader, Op, Status, header, pack, read_count, unpack

log = logging.getLogger("hetcoll.uplink")

SILENCE = 10.0  # seconds without a word from a relay until it is given up
_STARTING = 0.25  # of the time that a job has to start, where that is longer: many ranks wait for few cores then
RETURN = 20.0  # seconds in which whoever lost its relay finds another
_LAST_TRY = 5.0  # of whoever was patient already, since its store's host may live
GRACE = 3.0  # seconds in which the members of a small job come to a new store
ABSENCE = 30.0  # seconds until who lives and has not come back to the store is lost; of large jobs, who may live
RELAY_SECONDS = 5.0  # that a relay has to answer
_FIRST_PAUSE, _LAST_PAUSE = 0.05, 8.0  # seconds until who was not let in comes again, doubling: many wait at once
_FAREWELL = 1.0  # seconds that who leaves looks for another way, to say so
TOKEN_BYTES = 16


def time_to_return(error: Exception) -> float:
    """Seconds in which whoever lost its way to the store so looks for another."""
    return _LAST_TRY if getattr(error, "errno", None) in sockets.SILENT else RETURN


class Kind(IntEnum):
    """Who enters."""

    MEMBER = 0
    RELAY = 1


class RefusedError(InitError):
    """The store is there, and does not let this process in."""


class Entry(NamedTuple):
    """Who enters: `token`, random, is the same when it comes again; `received` says how many of the store's frames it
    has by then (a relay: 1). `hosts`: the store lives in this process. `failed` are tokens of relays that did not
    answer it. `addresses` are where it listens: a relay for its children, a member as `pulse` says. `attempt` grows
    each time: an entry that was given up may arrive after the next one.
    """

    kind: Kind
    token: bytes
    size: int
    hosts: bool = False
    received: int = 0
    failed: tuple[bytes, ...] = ()
    addresses: Places = ()
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


def pack_places(addresses: Places) -> bytes:
    """Hosts and ports."""
    return pack(part for host, port in addresses for part in (host.encode(), U32.pack(port)))


@parser("where a process listens")
def read_places(body: bytes) -> Places:
    """What `pack_places` made."""
    parts = iter(unpack(body))
    return tuple((host.decode(), U32.unpack(port)[0]) for host, port in zip(parts, parts, strict=True))


def enter(
    unique_id: UniqueId,
    entry: Entry,
    deadline: float,
    *,
    again: bool = False,
    patient: bool = False,
    pulse: Pulse | None = None,
) -> Place:
    """Come to the store, and to where it sends us. InitError where that cannot be had, or the store refuses. `patient`:
    where the store is lost meanwhile another one may come, until `deadline`."""
    pause = _FIRST_PAUSE
    while True:
        sock, _ = connect_store(unique_id, deadline, there=again)
        again = not patient  # from here on it is there, or gone
        if pulse is not None:
            entry = entry._replace(addresses=pulse.begin(sock))
        try:
            answer, reader = _knock(sock, entry, deadline)
        except OSError as error:
            if (broke(error) or patient) and time.monotonic() < deadline:
                if not broke(error):  # the store ends, and may accept until it has
                    time.sleep(_FIRST_PAUSE)
                continue
            raise InitError(f"the way to the job's store: {spell_error(error)}") from error
        if answer.op == Op.WELCOME:
            return Place(sock, reader, False, read_count(answer.body))
        sock.close()
        if not answer.body:  # many wait for the first relays
            time.sleep(max(0.0, min(deadline - time.monotonic(), pause * (0.5 + os.urandom(1)[0] / 255))))
            pause = min(2 * pause, _LAST_PAUSE)
            continue
        token, places = unpack(answer.body)
        soon = min(deadline, time.monotonic() + RELAY_SECONDS)
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
    reader, again = FrameReader(), True
    try:
        while True:
            if again:
                body = entry._replace(attempt=time.monotonic_ns()).pack()
                send_all(sock, header(Op.ENTER, body) + body, deadline)
                again = False
            wait_ready(sock, select.POLLIN, deadline)
            data = receive(sock)
            if data == b"":
                raise ConnectionResetError("it closed the connection")
            for frame in reader.feed(data or b""):
                if frame.op == Op.REPLY and frame.status != Status.OK:
                    raise RefusedError(frame.body.decode())
                if frame.op in (Op.WELCOME, Op.GO):
                    return frame, reader
                again = again or frame.op == Op.RESYNC  # it may have been lost with the relay's way to the store
    except BaseException:
        close_hard(sock)  # it may have entered
        raise


class Uplink:
    """A member's connection to the store, for as long as there is a way. `serve` is called when the store wants this
    process to be a relay. `patient` as `enter`, to come in. Sending is thread-safe; one thread reads."""

    def __init__(
        self, unique_id: UniqueId, size: int, deadline: float, serve: Callable[[], None], *, patient: bool = False
    ) -> None:
        self._id, self._size, self._serve = unique_id, size, serve
        self._lock = threading.Lock()
        self._asked: dict[int, tuple[Op, bytes]] = {}  # requests without a reply
        self._behind = self.closing = self._over = False
        self._left = False  # this way is given up: what comes after a frame that was cut short would be part of it
        self._pulse = Pulse()
        self._heard, self._woke = 0.0, -SILENCE
        self._starting, self._started = _STARTING * (deadline - time.monotonic()), deadline
        try:
            self._connect(deadline, there=False, patient=patient)
        except BaseException:
            self._pulse.close()
            raise

    def _connect(self, deadline: float, *, there: bool, patient: bool = False) -> None:
        """To the store, which has never heard of this process. `there`: where nobody answers for it, it is gone."""
        self._token, self._stream = os.urandom(TOKEN_BYTES), Stream()
        self._go(self._come(deadline, again=there, patient=patient))

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
            again = [(op, body, request, Status.AGAIN) for request, (op, body) in self._asked.items()]
            for frame in [(Op.RETURN, report, 0, Status.OK), *again]:
                try:
                    self._put(*frame, deadline)
                except OSError:
                    self._leave_way()  # it is sent again over the next one

    @property
    def behind(self) -> bool:
        """Whether it goes through a relay."""
        return self._behind

    @property
    def silence(self) -> float:
        """Seconds without a word from a relay until this process gives it up."""
        return max(SILENCE, self._starting) if time.monotonic() < self._started else SILENCE

    def met(self) -> None:
        """All ranks are there: the job has started."""
        self._started = time.monotonic()

    @property
    def late(self) -> bool:
        """Whether this process was stopped until now: what it hears may be long over, and the job elsewhere."""
        return time.monotonic() < self._woke + SILENCE

    def _come(self, deadline: float, *, again: bool, patient: bool = False) -> Place:
        hosts = hosted_here(self._id.job_id) is not None
        entry = Entry(Kind.MEMBER, self._token, self._size, hosts, self._stream.received)
        pulse = None if hosts else self._pulse  # the store dies with its own process
        return enter(self._id, entry, deadline, again=again, patient=patient, pulse=pulse)

    def _go(self, place: Place) -> None:
        """Send again over this way what the store does not have."""
        self.sock, self._reader, self._behind, count = place
        self._left = False
        self._heard = time.monotonic()
        self._resend(count)

    def _resend(self, count: int) -> None:
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
                self._put(op, body, request, Status.OK, time.monotonic() + seconds)
            except OSError as error:
                self._leave_way()
                patient = isinstance(error, TimeoutError) and not broke(error)  # not the system's, which gave it up
                if self.closing or self._over or (patient and not self._behind):
                    raise
            except (KeyboardInterrupt, SystemExit):  # of a signal handler, in the middle of a frame, or before it
                self._leave_way()
                raise

    def forget(self, request: int) -> None:
        """Nobody waits for this reply any more."""
        self._asked.pop(request, None)

    def _put(self, op: Op, body: bytes, request: int, status: Status, deadline: float) -> None:
        number = self._stream.put(op, body, request, status).number
        if self._left:
            return
        send_all(self.sock, header(op, body, request, status, number) + body, deadline)

    def _tell(self, op: Op) -> None:
        """How much has come, past the stream."""
        body = U64.pack(self._stream.received)
        with self._lock:
            if not self._left:
                send_all(self.sock, header(op, body) + body, time.monotonic() + RETURN)

    def end(self) -> None:
        """Shut down for good, whether or not the goodbye has come to the store."""
        self._over = True
        with contextlib.suppress(OSError):  # it has ended
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the descriptors."""
        self.sock.close()
        self._pulse.close()

    @property
    def descriptors(self) -> int:
        """How many it has open."""
        return 1 + self._pulse.descriptors

    def _leave_way(self) -> None:
        """Who reads sees an end, and finds another way. The other end does not: that would be this process's death."""
        self._left = True
        with contextlib.suppress(OSError):  # it broke
            self.sock.shutdown(socket.SHUT_RD)

    def frames(self) -> Iterator[Frame]:
        """What comes; raises where the store ends, is lost or cannot be reached: a CommunicationError, or RefusedError,
        where others may have gone on without this process."""
        came = b""  # some came with the welcome
        while True:
            try:
                yield from self._whole(came)
                came = self._read() or b""
            except OSError as error:
                silence = silent_for(self.sock)
                if self._over or not self._come_again(error):  # a goodbye is sent again, too
                    if not silence or error.errno in sockets.SILENT:
                        raise
                    text = f"{spell_error(error)}, and {silence:.3g} s before that its host fell silent"
                    raise CommunicationError(text) from error
                came = b""

    def _come_again(self, error: OSError) -> bool:
        """Find another way to the store; False where there is none."""
        log.info("the way to the store is lost (%s): looking for another", spell_error(error))
        deadline = time.monotonic() + (_FAREWELL if self.closing else time_to_return(error))
        while True:
            with self._lock:  # nobody sends to a descriptor that is another's by then
                close_hard(self.sock)  # to a relay, which may live, the end of the stream would be this process's death
            try:
                place = self._come(deadline, again=True)
                with self._lock:
                    self._go(place)
            except RefusedError as failure:
                raise failure from error
            except HetcollError as failure:
                log.info("there is no other way to the store: %s", spell_error(failure))
                return False
            except OSError as failure:
                log.debug("that way broke, too: %s", spell_error(failure))
            else:
                return not self._over

    def _read(self) -> bytes | None:
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        rest = self._pulse.watch(poll)
        silence = self._heard + self.silence - time.monotonic() if self._behind else sockets.until_vanished(self.sock)
        waits = [max(0.0, wait) for wait in (rest, silence) if wait is not None]
        began = time.monotonic()
        ready = poll.poll(1000 * min(SILENCE / 2, *waits))
        if time.monotonic() >= began + SILENCE:
            self._woke = time.monotonic()
        if self._pulse.is_felt(ready):
            self._tell(Op.ACK)  # where the connection broke, the system says so now
        if all(fd != self.sock.fileno() for fd, _ in ready):
            late = self._behind and time.monotonic() >= self._heard + self.silence
            if late and not poll.poll(0):  # or it has spoken, and this process has been late
                raise TimeoutError(f"a relay said nothing for {self.silence:.3g} s")
            if not (self._behind or sockets.until_vanished(self.sock)):
                raise sockets.vanished()
            return None
        self._heard = time.monotonic()
        data = receive(self.sock)
        if data == b"":
            raise ConnectionResetError("the connection ended")
        return data

    def _whole(self, data: bytes) -> Iterator[Frame]:
        for frame in self._reader.feed(data):
            if frame.op == Op.REPLY and frame.status == Status.REFUSED and frame.request == 0:
                raise CommunicationError(frame.body.decode())
            if frame.op in (Op.BEAT, Op.WELCOME):  # the latter where we had entered twice: see `_knock`
                continue
            if frame.op == Op.CUT:
                self._over = True
            elif frame.op == Op.GONE:
                raise sockets.vanished()
            elif frame.op == Op.RESYNC:
                self._tell(Op.SYNC)
            elif frame.op == Op.SYNCED:
                with self._lock:
                    self._resend(read_count(frame.body))
            elif frame.op == Op.ACK:
                with self._lock:
                    self._stream.acknowledge(read_count(frame.body))
            elif self._stream.accept(frame.number, len(frame.body)):
                if frame.op == Op.SERVE:
                    self._serve()
                else:
                    yield frame
                if self._stream.owes():  # not before: where the way broke that raises, and this frame counts as here
                    self._tell(Op.ACK)
