"""Messages with tags other than 0, which match by tag as MPI's do: those of two ranks and one tag in their order.

Messages with tag 0 go straight over the communicator, where they match in the order of the calls. A receive that is
posted there would be given whatever comes next, so others must not go there: each two ranks that use tags have a
communicator for these, which threads make when both do. On it a message is two: its tag, type and count, then its
bytes. While receives from a rank wait, a thread reads what that rank sends; what no receive is for is kept until one
is. So receives need not be posted in the order of the sends, and a message holds up no other. A receive from any rank
asks all of them, out of band, how many such messages they have sent, and reads those.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np

import hetcoll._native as _native

from ..calls import RECV, SEND, check_int, check_rank, whole
from ..calls.buffers import Buffer, read_buffer
from ..calls.messages import Message
from ..errors import ArgumentError, ClosedError, HetcollError, InitError, PeerLostError
from ..health.verdicts import Kind
from ..types import ANY_SOURCE, DType
from ..work import Work
from .core import Core, Owner
from .executor import ROW_BYTES, Row
from .parcels import SLICE, Pair, Parcel
from .regroup import name_of, while_whole
from .worker import Worker

_QUESTION = "tagged messages to you"
_ASKING = 2.0  # seconds for the answers
_PAUSES = (100e-6, 5e-3)  # seconds between questions: at first, and at most
_REASON = 2.0  # seconds until the news of what became of a rank is there
_EVER = 7 * 86400.0  # seconds until the other rank uses tags, too
_CLOSED = "this communicator was closed"
_HEADER = struct.Struct("<qq16s")  # tag, count, type; under HETCOLL_CHECK a checksum follows


Kept = tuple[str, int, "np.ndarray[Any, np.dtype[np.uint8]]", Row]  # a message: type, count, bytes, and its checksum


class Line:
    """What goes between this rank and another one."""

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.connecting = threading.Lock()
        self.give_up: Callable[[str], None] | None = None  # ends the making of `pair`
        self.pair: Pair | None = None
        self.writer, self.reader = Worker(f"hetcoll-tags-to-{peer}"), Worker(f"hetcoll-tags-from-{peer}")
        self.sent = self.read = self.awaited = 0  # messages; `awaited` are those that are known to come
        self.kept: dict[int, deque[Kept]] = {}  # by their tags


class Mailbox:
    """The tagged messages of one communicator, which is `owner`. It does not keep that alive."""

    def __init__(self, core: Core, owner: Callable[[], Owner | None]) -> None:
        self._core, self._owner = core, owner
        self._mutex = threading.Lock()
        self._lines: dict[int, Line] = {}
        self._posted: list[Parcel] = []  # receives, in the order of the calls
        self._latest = core.rank  # whose message a receive from any rank was given last
        self._finder = Worker("hetcoll-tags-from-any")
        self._closed = False
        self._inspection = core.message_check
        core.diagnosis.questions.answers[_QUESTION] = self._sent_to

    def __str__(self) -> str:
        return f"rank {self._core.rank}"

    def _sent_to(self, peer: int) -> int:
        line = self._lines.get(peer)
        return 0 if line is None else line.sent

    def _line(self, peer: int) -> Line:
        """Under the mutex."""
        if peer not in self._lines:
            self._lines[peer] = Line(peer)
        return self._lines[peer]

    def send(self, buffer: Buffer, dest: int, tag: int, limit: float) -> Parcel:
        """Start to send; complete when the memory may be used again."""
        parcel = Parcel(self, buffer, tag, dest, "send", limit)
        if self._inspection is not None:
            parcel.checksum, parcel.odd = self._inspection.words(Message(SEND, buffer, dest), None, limit)
        with self._mutex:
            line = self._line(dest)
            line.sent += 1
        line.writer.put(lambda: self._run(parcel, lambda: self._write(line, parcel)))
        return parcel

    def receive(self, buffer: Buffer, source: int | None, tag: int, limit: float) -> Parcel:
        """Start to receive from `source`, or from any rank."""
        parcel = Parcel(self, buffer, tag, source, "recv", limit)
        with self._mutex:
            lines = list(self._lines.values()) if source is None else [self._line(source)]
            if waiting := [line for line in lines if tag in line.kept]:  # those ranks have their turns
                line = min(waiting, key=lambda line: (line.peer - self._latest - 1) % self._core.size)
                message = line.kept[tag].popleft()
                if not line.kept[tag]:
                    del line.kept[tag]
                self._give(parcel, line.peer, *message)
                return parcel
            self._posted.append(parcel)
        if source is None:
            self._finder.put(lambda: self._run(parcel, lambda: self._find(parcel)))
        else:
            lines[0].reader.put(lambda: self._run(parcel, lambda: self._read_for(lines[0], parcel)))
        return parcel

    def _run(self, parcel: Parcel, task: Callable[[], None], peer: int | None = None) -> None:
        """`peer`: whose message the task moves, where the parcel wants any rank's."""
        try:
            task()
        except Exception as error:
            parcel.end(self.explain(error, parcel, peer))

    def _write(self, line: Line, parcel: Parcel) -> None:
        pair, other = self._pair(line)
        header = _HEADER.pack(parcel.tag, parcel.count, parcel.dtype.encode()) + parcel.checksum.tobytes()
        inner = pair.send(np.frombuffer(header, np.uint8), other, async_op=True)
        if parcel.count:
            inner = pair.send(parcel.memory, other, async_op=True)
        parcel.begin(pair, inner)

    def _read_for(self, line: Line, parcel: Parcel) -> None:
        while not parcel.done:
            self._read(line)

    def _read(self, line: Line) -> None:
        """The next message of a rank; waits for it."""
        pair, other = self._pair(line)
        header = np.empty(_HEADER.size + (0 if self._inspection is None else ROW_BYTES), np.uint8)
        self._complete(pair, pair.recv(header, other, async_op=True))
        tag, count, name = _HEADER.unpack(header[: _HEADER.size].tobytes())
        checksum = header[_HEADER.size :]
        dtype = name.rstrip(b"\0").decode()
        with self._mutex:
            parcel = self._take(line.peer, tag)
        if parcel is not None and not parcel.fits(dtype, count):
            self._give(parcel, line.peer, dtype, count, None, checksum)
        memory = np.empty(0 if parcel is not None else count * DType[dtype.upper()].itemsize, np.uint8)
        if count:
            into = memory if parcel is None else parcel.memory
            self._complete(pair, pair.recv(into, other, async_op=True))
        with self._mutex:
            line.read += 1
            if parcel is not None:
                self._end(parcel, line.peer, checksum)
            elif (late := self._take(line.peer, tag)) is not None:  # it was posted meanwhile
                self._give(late, line.peer, dtype, count, memory, checksum)
            else:
                line.kept.setdefault(tag, deque()).append((dtype, count, memory, checksum))

    def _take(self, peer: int, tag: int) -> Parcel | None:
        """The first receive that waits for such a message, which from now on waits for this one."""
        for parcel in self._posted:
            if parcel.tag == tag and parcel.wanted in (None, peer):
                self._posted.remove(parcel)
                return parcel
        return None

    def _give(
        self, parcel: Parcel, source: int, dtype: str, count: int, memory: np.ndarray[Any, Any] | None, checksum: Row
    ) -> None:
        """A message to the receive that it is for; a mismatch fails the group."""
        if memory is None or not parcel.fits(dtype, count):
            other = f"rank {source} called send({dtype}, count={count}, tag={parcel.tag}) to {self}"
            parcel.end(self.fail_all(Kind.MISMATCH, source, f"{self} called {parcel._what}; {other}"))
            raise self._gone()
        _native.copy_bytes(parcel.memory.ptr, memory.ctypes.data, memory.nbytes)
        self._end(parcel, source, checksum)

    def _end(self, parcel: Parcel, source: int, checksum: Row) -> None:
        """The receive is complete. Under the mutex."""
        if parcel.wanted is None:
            self._latest = source
        error = None
        if self._inspection is not None:
            try:
                self._inspection.incoming(Message(RECV, parcel.buffer, source), checksum).look()
            except HetcollError as wrong:
                error = wrong
        parcel.end(error, source)

    def _find(self, parcel: Parcel) -> None:
        """Read what ranks say that they have sent until one message was for this receive from any."""
        pause = _PAUSES[0]
        while not parcel.done:
            deserted = self._core.diagnosis.deserted()  # then these are the last answers
            try:
                answers = self._core.diagnosis.questions.ask(_QUESTION, _ASKING)
            except InitError:  # the store is slow, or cut off for now: the receive has its own time
                answers, deserted = {}, False
            for rank, sent in answers.items():
                with self._mutex:
                    line = self._line(rank) if isinstance(sent, int) and sent else None
                    if line is None or sent <= max(line.read, line.awaited):
                        continue
                    line.awaited = sent
                self._read_until(line, sent, parcel)
            with self._mutex:
                deserted = deserted and parcel in self._posted and not self._coming()
            if deserted:
                self._core.diagnosis.check_present(range(self._core.size))
            time.sleep(pause)
            pause = min(1.5 * pause, _PAUSES[1])

    def _coming(self) -> bool:
        """Whether a message is known of that is not read yet. Under the mutex."""
        return any(line.read < line.awaited for line in self._lines.values())

    def _read_until(self, line: Line, sent: int, parcel: Parcel) -> None:
        """On the line's thread; what goes wrong there ends the receive that asked for it."""

        def read() -> None:
            while line.read < sent:
                self._read(line)

        line.reader.put(lambda: self._run(parcel, read, line.peer))

    def _name(self, peer: int) -> tuple[bytes, list[int]]:
        """Of the communicator of this rank and that one, and its ranks."""
        ranks = sorted((self._core.rank, peer))
        return name_of(self._core.group, f"tags {ranks}"), ranks

    def _pair(self, line: Line) -> tuple[Pair, int]:
        """The communicator of this rank and that one, and that one's rank there."""
        with line.connecting:
            if line.pair is None:
                if (owner := self._owner()) is None:
                    raise self._gone()
                name, ranks = self._name(line.peer)
                with while_whole(self._core, name) as line.give_up:
                    self._check()  # only now, since `leave` ends what it sees
                    line.pair = pair = owner._make(name, ranks, _EVER, check=False)
                if self._closed:  # `leave` has been here, and saw none
                    pair.close()
                self._check()  # nobody else could halt this one
            return line.pair, 1 - line.pair.rank

    def _complete(self, pair: Pair, work: Work) -> None:
        """Wait as long as the group is whole. Not by `Work.wait`: no call of the program is stuck here."""
        ticket = work._ticket
        assert ticket is not None, "it is not done"
        while (status := pair._engine.wait(ticket, SLICE)) is _native.Status.TIMED_OUT:
            self._check()
        if status is not _native.Status.DONE:
            raise work.error or self._gone()

    def _check(self) -> None:
        if (error := self.failure()) is not None:
            raise error

    def check_coming(self, peer: int | None) -> None:
        """Raise where `peer` has left without the communicator of this rank and that one."""
        line = None if peer is None else self._lines.get(peer)
        if line is None or line.pair is not None:
            return
        pair = self._core.session.control.membership(self._name(line.peer)[0])
        if pair is None or not pair.formed:
            self._core.diagnosis.check_present([line.peer])

    def failure(self) -> Exception | None:
        """What the group has failed with; then nothing touches the memory of messages any more."""
        self._core.host.check_parent()
        failed = self._core.engine.failed
        error = self._core.diagnosis.known_error() if failed else ClosedError(_CLOSED) if self._closed else None
        if error is not None:
            self._halt()
        return error

    def explain(self, error: Exception, parcel: Parcel, source: int | None = None) -> Exception:
        """What the group has failed with, where two ranks of it had this `error`, which has their numbers as a pair."""
        deadline = time.monotonic() + _REASON
        while isinstance(error, HetcollError) and self.failure() is None and time.monotonic() < deadline:
            time.sleep(SLICE)  # the news of what became of a rank is on its way
        if (known := self.failure()) is not None:
            return known
        source = parcel.wanted if source is None else source
        peer = -1 if source is None else source
        if isinstance(error, PeerLostError):
            who = "which" if source == parcel.wanted else f"and rank {source}"
            return self.fail_all(Kind.PEER_GONE, peer, f"{self} called {parcel._what}, {who} left while it was needed")
        return self.fail_all(Kind.SYSTEM, peer, f"{self} called {parcel._what}: {type(error).__name__}: {error}")

    def fail_all(self, kind: Kind, peer: int, text: str) -> Exception:
        """Fail the group on all ranks."""
        self._core.diagnosis.post(kind, peer, text)
        self._halt()
        return self._gone()

    def _gone(self) -> Exception:
        return self.failure() or ClosedError(_CLOSED)

    def _halt(self) -> None:
        """Nothing touches the memory of messages any more."""
        for line in list(self._lines.values()):
            if line.pair is not None and not line.pair._engine.failed:
                line.pair._engine.fail(Kind.ABORTED, -1, "its communicator failed")

    # See `core.Rider`.

    def counters(self) -> dict[str, int]:
        return {}

    def memory(self) -> dict[str, int]:
        found: Counter[str] = Counter()
        for line in list(self._lines.values()):
            found.update(line.pair.memory() if line.pair is not None else {})
        return found

    def fail(self, kind: Kind, text: str) -> None:
        self._halt()

    def leave(self) -> None:
        sent = [self._sent_to(rank) for rank in range(self._core.size)]
        if any(sent) and not self._core.engine.failed:
            self._core.diagnosis.questions.leave_answers(_QUESTION, sent)
        self._closed = True
        for line in list(self._lines.values()):
            if line.pair is not None:
                with contextlib.suppress(HetcollError):  # whoever waits is told what the group failed with
                    line.pair.close()
            elif line.give_up is not None:  # the other rank has not used tags: ends the wait for it
                line.give_up(_CLOSED)

    def close(self) -> None:
        self._finder.close()  # first, since it may begin to read
        for line in list(self._lines.values()):
            line.writer.close()
            line.reader.close()


def tagged(core: Core, kind: int, buf: Any, peer: int, tag: int, async_op: bool, timeout: float | None) -> Work:
    """One half of a message with a tag, `kind` is SEND or RECV: see `Communicator.send` and `recv`."""
    if core.in_group():
        raise ArgumentError("group(): wanted messages without tags, got one with a tag: those wait for no others")
    core.host.check_usable()
    if (number := check_int(tag, "tag")) < 0:
        raise ArgumentError(f"tag: wanted 0 or more, got {number}")
    anyone = kind == RECV and whole(peer) == ANY_SOURCE
    if anyone and number == 0:
        raise ArgumentError(
            "peer: ANY_SOURCE wants a tag above 0: messages without one match in the order of the calls"
        )
    other = None if anyone else check_rank(peer, core.size, "peer")
    buffer = read_buffer(buf, "buf", writable=kind == RECV)
    core.gpus.check_place(buffer)
    if buffer.device != "cpu":
        raise ArgumentError(
            f"tag: wanted 0 for an array on {buffer.place}, got {number}: a GPU's messages match in the order of the"
            " calls"
        )
    if other == core.rank:
        raise ArgumentError(f"peer: rank {other} is this rank; a message to oneself needs both halves in a group()")
    box, seconds = core.rider(Mailbox, lambda owner: Mailbox(core, owner)), core.seconds(timeout)
    try:
        if kind == SEND:
            assert other is not None
            work = box.send(buffer, other, number, seconds)
        else:
            work = box.receive(buffer, other, number, seconds)
    except OSError as error:  # no thread
        if isinstance(error, HetcollError):
            raise
        raise core.diagnosis.unprepared(error) from error
    if not async_op:
        work.wait()
    return work
