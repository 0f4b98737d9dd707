"""A rank's connection to the store: exchanges, verdicts, questions, keys, and news of the other ranks.

One daemon thread reads. It sleeps in the kernel while nothing comes, hands replies to the threads that wait for them,
and calls the event handler of the group that a push is for. Handlers run on that thread: they must be quick, and must
not call back into the client.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

from .. import lifetime
from ..config.limits import Held, reserve_descriptors
from ..errors import ClosedError, CommunicationError, HetcollError, InitError, PeerLostError
from .connections.sockets import SILENT, round_trip, spell_address, spell_error
from .membership import Call, Membership
from .protocol.columns import Column, Telling, unpack_columns
from .protocol.news import Handler, StoreLost, Verdict
from .protocol.unique_id import UniqueId, hosted_here
from .protocol.wire import F64, NOBODY, U32, WORLD, Frame, Op, pack
from .succession import SECONDS, Succession
from .uplink import GRACE, RETURN, RefusedError, Uplink

if TYPE_CHECKING:
    from .relay import Relay

log = logging.getLogger("hetcoll.control")

_SEND_SECONDS = 30.0
ON_ITS_WAY = 0.4  # seconds that the answers to a question may take once the store has them
_LITTLE = 0.1  # seconds to send to a store that does not answer, whose socket may be full
_GOODBYE_SECONDS, _GOODBYE_BEHIND = 1.0, 5.0  # the latter behind a relay
_RELAY_DESCRIPTORS = 170  # of its children, and of those who have yet to prove the secret
_WANTED = (Op.LEAVE, Op.QUERY)  # also of a group whose other requests were given up
_LEFT = 8  # groups whose ends are remembered


class ControlClient:
    """Joins `group` of the job, if any, as `rank` of `size` within `timeout` seconds. Thread-safe.

    Raises InitError when the store cannot be reached or refuses the rank, AuthenticationError when the secrets differ.
    `timeout` is also what calls without one of their own are given.
    """

    def __init__(
        self,
        unique_id: UniqueId,
        rank: int,
        size: int,
        timeout: float,
        on_event: Handler | None = None,
        group: bytes | None = WORLD,
    ) -> None:
        self._timeout = timeout
        self._numbers = itertools.count(1)
        self._calls: dict[int, Call] = {}
        self._groups: dict[bytes, Membership] = {}
        self._left: list[Membership] = []  # the last whose group is over, which a rank may not have heard
        self._given_up: dict[bytes, str] = {}  # of `while_wanted` groups: why requests are of no more use, if they are
        self._lock = threading.Lock()  # of the tables and _end
        self._end: StoreLost | None = None
        self._closing = self._forked = False
        self._words: tuple[bytes, ...] = ()  # when it closed
        deadline = time.monotonic() + timeout
        self._size = size
        self._relay: Relay | None = None
        self._succession = Succession(hosts=hosted_here(unique_id.job_id) is not None)
        self._uplink = Uplink(unique_id, size, deadline, self._serve, patient=group is None)
        self._thread = threading.Thread(target=self._read, name="hetcoll-control", daemon=True)
        lifetime.start(self._thread, self)
        try:
            if group is not None:
                self.join(group, rank, size, on_event, timeout=max(deadline - time.monotonic(), 0.1))
        except BaseException:
            self.close()
            raise

    @property
    def round_trip(self) -> int:
        """In microseconds, to where the store or a relay is: see `sockets.round_trip`."""
        return round_trip(self._uplink.sock)

    @property
    def unique_id(self) -> UniqueId:
        """The job that this is connected to, and where its store is."""
        return self._uplink.unique_id

    @property
    def lost_early(self) -> bool:
        """Whether the store was lost before it said who comes after it: a newcomer finds that one where it was."""
        return self._end is not None and not self._end.orderly and not self._succession.told

    def join(
        self, group: bytes, rank: int, size: int, on_event: Handler | None = None, *, timeout: float | None = None
    ) -> None:
        """Become `rank` of a group of `size`. InitError where another process is that rank, or named another size.

        A rank that left a group may come back when the others have left it too, which it waits for.
        """
        with self._lock:
            if group in self._groups:
                raise InitError(f"this process is already rank {self._groups[group].rank} of the group {group!r}")
            self._groups[group] = membership = Membership(group, rank, size, on_event)
        hosts = b"\1" if hosted_here(self.unique_id.job_id) else b"\0"
        try:
            seconds = self._timeout if timeout is None else timeout
            fields = (group, U32.pack(rank), U32.pack(size), hosts, F64.pack(seconds))
            frame = self._call(Op.JOIN, fields, seconds, group)
        except BaseException:
            with self._lock:
                self._groups.pop(group, None)
            raise
        if membership.host == NOBODY:
            (membership.host,) = U32.unpack(frame.fields[0])

    def leave(self, group: bytes, words: bytes = b"", *, timeout: float | None = None) -> None:
        """Say goodbye to a group: its other members see `Left`, and are told these `words` when they `query`."""
        self._call(Op.LEAVE, (group, words), timeout, group)
        with self._lock:
            membership = self._groups.pop(group, None)
            if membership is not None and membership.over:
                membership.leave()
                self._left = [*self._left[1 - _LEFT :], membership]

    def exchange(self, group: bytes, tag: bytes, blob: bytes, timeout: float | None = None) -> list[bytes]:
        """Every rank's `blob`, in the order of ranks: an all-gather, which all members call with the same `tag`.

        InitError names the ranks that did not come within `timeout` seconds; PeerLostError a rank that is gone. A tag
        whose exchange failed stays failed.
        """
        return list(self.exchange_columns(group, tag, Telling([blob]), timeout)[0])

    def exchange_columns(
        self, group: bytes, tag: bytes, telling: Telling, timeout: float | None = None
    ) -> list[Column]:
        """As `exchange`, of several values: what all ranks told as the first of theirs, as the second, and so on; then
        in the same way, in place of values of which only who has the same is told, their numbers."""
        seconds = self._timeout if timeout is None else timeout
        membership = self._groups.get(group)
        fields = (group, tag, pack(telling.shared), pack(telling.alike), telling.own, F64.pack(seconds))
        frame = self._call(Op.EXCHANGE, fields, seconds, group)
        self._uplink.met()
        assert membership is not None, "or the store refused"
        columns, own = frame.fields
        membership.own[tag, membership.rank] = telling.own
        if own:
            (values,) = unpack_columns(own, membership.size)
            membership.own.update(((tag, rank), value) for rank, value in enumerate(values))
        return unpack_columns(columns, membership.size)

    def look_up(
        self, group: bytes, tag: bytes, ranks: Collection[int], timeout: float | None = None
    ) -> dict[int, bytes]:
        """What each of `ranks` told as its own in the exchange `tag`, which must be over. Asks the store once for each
        rank, and never in groups of few ranks, where all were told."""
        self._check_usable(group, Op.LOOK)
        membership = self._groups.get(group)
        known = {} if membership is None else membership.own
        missing = [rank for rank in dict.fromkeys(ranks) if (tag, rank) not in known]
        if missing:
            frame = self._call(Op.LOOK, (group, tag, b"".join(map(U32.pack, missing))), timeout, group)
            known.update(zip(((tag, rank) for rank in missing), frame.fields, strict=True))
        return {rank: known[tag, rank] for rank in ranks}

    def post_verdict(self, group: bytes, kind: bytes, blob: bytes, timeout: float | None = None) -> Verdict:
        """Tell all members, this one too, what became of the group. The first verdict wins, and is returned."""
        _, kind, blob, rank = self._call(Op.POST, (group, kind, blob), timeout, group).fields
        return Verdict(kind, blob, U32.unpack(rank)[0])

    def leave_verdict(self, group: bytes, kind: bytes, blob: bytes) -> None:
        """As `post_verdict`, for a store that does not answer now: its reply is not waited for."""
        with contextlib.suppress(OSError):  # the store is lost, then, which everybody hears
            self._uplink.send(Op.POST, pack((group, kind, blob)), next(self._numbers), _LITTLE)

    def query(self, group: bytes, blob: bytes, timeout: float) -> tuple[dict[int, bytes | None], dict[int, bytes]]:
        """Ask all members, this one too; each rank's answer, or None from one that did not give any in `timeout`. And
        the last words of those that have left: see `leave`. InitError ON_ITS_WAY later where the store does not say."""
        told = self._call(Op.QUERY, (group, blob, F64.pack(timeout)), timeout, group).fields
        answers = {rank: each[1:] if each[:1] == b"\1" else None for rank, each in enumerate(told)}
        return answers, {rank: each[1:] for rank, each in enumerate(told) if each[:1] == b"\2"}

    def decide(self, op: Op, fields: tuple[bytes, ...], timeout: float) -> list[bytes]:
        """What the store answers to all that wait for one decision: see `decisions`."""
        return self._call(op, (*fields, F64.pack(timeout)), timeout, fields[0] if fields else None).fields

    def membership(self, group: bytes) -> Membership | None:
        """What the store has told of a group, where this process is in it."""
        return self._groups.get(group)

    def check_present(self, group: bytes, ranks: Collection[int]) -> None:
        """PeerLostError where the store has told that one of `ranks` died or left. InitError where the group's requests
        are of no more use; ClosedError where this process has left it, and hears nothing of it any more."""
        if why := self._given_up.get(group):
            raise InitError(why)
        if (membership := self._groups.get(group)) is None:
            raise ClosedError("this process has left the group")
        membership.check_present(ranks)

    def put(self, key: bytes, value: bytes, timeout: float | None = None) -> None:
        """Set a key of the whole job."""
        self._call(Op.PUT, (key, value), timeout)

    def get(self, key: bytes, timeout: float | None = None) -> bytes:
        """The value of a key, waiting until someone puts it; InitError after `timeout` seconds."""
        seconds = self._timeout if timeout is None else timeout
        return self._call(Op.GET, (key, F64.pack(seconds)), seconds).fields[0]

    def holds(self) -> Held:
        """The connection and its thread, and the store where this process hosts it."""
        connected = self._uplink.descriptors if self._end is None else 0
        mine = Held(connected + self._succession.descriptors, self._thread.is_alive())
        others = [each.holds() for each in (self._relay, hosted_here(self.unique_id.job_id)) if each is not None]
        return Held(*map(sum, zip(mine, *others, strict=True)))

    def close(self, *words: bytes) -> None:
        """Leave all groups in order and end the thread. Takes a few seconds at most; more than once is fine. `words`
        are `leave`'s, for one of the groups."""
        lifetime.forget(self)
        if self._forked:
            return
        with self._lock:
            first, self._closing, self._uplink.closing = not self._closing, True, True
            self._words = words
            relay = self._relay
        if relay is not None:
            relay.retire()
        if first and self._end is None:
            try:
                self._uplink.send(Op.BYE, pack(words), 0, _GOODBYE_SECONDS)
            except OSError as error:
                log.debug("goodbye: %s", spell_error(error))
        if threading.current_thread() is self._thread:
            return
        # The store closes the connection when it has read the goodbye, which may have to find another way to it.
        self._thread.join(_GOODBYE_BEHIND if self._uplink.behind else _GOODBYE_SECONDS)
        if self._thread.is_alive():
            self._uplink.end()
            self._thread.join(5.0)
        self._succession.close()

    def abandon(self) -> None:
        """In a forked child: close the inherited socket; every call raises ClosedError."""
        self._forked = self._closing = True
        self._uplink.close()
        self._succession.close()

    def _serve(self) -> None:
        """The store wants this process to be a relay, at the address by which it is connected to the others."""
        with self._lock:
            if self._closing or self._relay is not None:
                return
            from .relay import Relay  # few processes need it, and imports count

            host = self._uplink.sock.getsockname()[0]
            if problem := reserve_descriptors(_RELAY_DESCRIPTORS):
                log.warning("this process cannot be a relay: %s", problem)
                return
            try:
                self._relay = Relay(
                    self.unique_id, host, self._size, self._timeout, tls=self._uplink.sock.secured,
                    silence=lambda: self._uplink.silence,
                )  # fmt: skip
            except OSError as error:
                log.warning("this process cannot be a relay at %s: %s", host, spell_error(error))

    # Requests.

    def _call(self, op: Op, fields: tuple[bytes, ...], timeout: float | None, group: bytes | None = None) -> Frame:
        seconds = self._timeout if timeout is None else timeout
        # The answer, when it is time, says who was missing.
        patience = seconds + (ON_ITS_WAY if op == Op.QUERY else min(2.0, max(0.5, seconds / 10)))
        self._check_usable(group, op)
        number, call = next(self._numbers), Call(op, group, fields)
        with self._lock:
            self._calls[number] = call
        try:
            self._check_usable(group, op)  # the thread may have ended before it could see this call
            self._uplink.send(op, pack(fields), number, min(patience, _SEND_SECONDS))
            if not call.wait(patience):
                store = spell_address(self.unique_id.addresses[0])
                raise InitError(f"the store at {store} did not answer in {seconds:.3g} s")
        except OSError as error:
            raise CommunicationError(f"the store could not be told: {spell_error(error)}") from error
        finally:
            self._uplink.forget(number)
            with self._lock:
                self._calls.pop(number, None)
        return call.reply(seconds)

    @contextlib.contextmanager
    def while_wanted(self, group: bytes) -> Iterator[Callable[[str], None]]:
        """Gives what ends this block's requests of `group`, and its waits for ranks of it (`check_present`), with an
        InitError of these words: at once, from any thread. But not those to leave it, and questions: they are short,
        and asked after its end, too."""

        def end(why: str) -> None:
            with self._lock:
                if group not in self._given_up:  # the block is over
                    return
                self._given_up[group] = why
                calls = [call for call in self._calls.values() if call.group == group and call.op not in _WANTED]
            for call in calls:
                call.finish(InitError(why))

        self._given_up[group] = ""
        try:
            yield end
        finally:
            with self._lock:
                self._given_up.pop(group, None)

    def _check_usable(self, group: bytes | None, op: Op) -> None:
        if group is not None and op not in _WANTED and (why := self._given_up.get(group)):
            raise InitError(why)
        if self._forked:
            raise ClosedError("this control connection belongs to the parent of this forked process")
        if threading.current_thread() is self._thread:
            raise RuntimeError("an event handler called its ControlClient: that would wait for itself")
        if self._closing:
            raise ClosedError("the control connection was closed")
        if self._end is not None:
            raise self._store_error(group)

    def _store_error(self, group: bytes | None) -> PeerLostError:
        assert self._end is not None
        membership = self._groups.get(group) if group is not None else next(iter(list(self._groups.values())), None)
        host = NOBODY if membership is None else membership.host
        who = (
            "the process that hosts the job's store" if host == NOBODY else f"rank {host}, which hosts the job's store,"
        )
        what = "has ended" if self._end.orderly else f"was lost: {self._end.reason}"
        return PeerLostError(f"{who} {what}", -1 if host == NOBODY else host)

    # The reader thread.

    def _read(self) -> None:
        end = StoreLost("the connection ended", False)
        try:
            while True:
                end = self._listen()
                if not self._go_on(end):
                    break
        finally:
            self._finish(end)

    def _listen(self) -> StoreLost:
        """Until the store is lost."""
        end = StoreLost("the connection ended", False)
        try:
            for frame in self._uplink.frames():
                if frame.op == Op.CLOSING:
                    end = StoreLost("its process ended in order", True)
                    break
                self._dispatch(frame)
        except (OSError, HetcollError, struct.error, ValueError) as error:
            end = _lost(error)
        return end._replace(sure=end.sure and not self._uplink.late)

    def _go_on(self, end: StoreLost) -> bool:
        """Go to the store that takes the place of the one that has ended, if there is any. One that gave up, as too few
        came to it, has none: others may have gone on elsewhere."""
        if not (self._succession.certain or end.sure):
            return False
        # Who heard nothing from a relay for some seconds notices it before those do whom the system tells of it.
        deadline = time.monotonic() + SECONDS + (RETURN if self._uplink.behind else 0.0)
        while not (self._closing or self._succession.hosts or time.monotonic() >= deadline):
            lost = self.unique_id
            home = self._succession.find(lost, end, lambda: self._closing or time.monotonic() >= deadline)
            if home is None:
                return False
            if home is not lost:
                self._part_with_host(end)
                for membership in list(self._groups.values()):
                    membership.host = NOBODY
            mine = b"\1" if self._succession.hosts else b"\0", self._succession.places, self._succession.told
            whole = self._succession.hosts or bool(self._succession.places)
            groups = [*self._left, *self._groups.values()]
            pasts = pack(each.spell(whole=whole) for each in groups if each.joined)
            self._relay = None  # it ends with the way to the store that it had
            try:
                self._uplink.move(home, pack((*mine, pasts)), max(deadline, time.monotonic() + GRACE))
                if self._closing:  # perhaps the goodbye went to the lost one
                    self._uplink.send(Op.BYE, pack(self._words), 0, _GOODBYE_SECONDS)
                return True
            except (OSError, HetcollError) as error:
                end = _lost(error)
        return False

    def _part_with_host(self, end: StoreLost) -> None:
        for membership in list(self._groups.values()):
            membership.part_with_host(end)

    def _dispatch(self, frame: Frame) -> None:
        if frame.op == Op.REPLY:
            self._uplink.forget(frame.request)
            with self._lock:
                call = self._calls.get(frame.request)
            if call is not None:
                membership = None if call.group is None else self._groups.get(call.group)
                if membership is not None:
                    membership.keep(call, frame)
                call.finish(frame)
        elif frame.op == Op.STAND:
            self._uplink.send(Op.STANDING, pack((b"", self._succession.stand(frame.body))), 0, _SEND_SECONDS)
        elif frame.op == Op.SUCCESSORS:
            self._succession.hear(frame.body)
        else:
            group, *fields = frame.fields
            membership = self._groups.get(group)
            answer = None if membership is None else membership.hear(frame.op, fields, frame.body)
            if answer is not None:
                self._uplink.send(Op.ANSWER, pack((fields[2], answer)), 0, _SEND_SECONDS)

    def _finish(self, end: StoreLost) -> None:
        with self._lock:
            self._end = end
            calls, closing = list(self._calls.values()), self._closing
        self._uplink.close()
        for call in calls:
            error = ClosedError("the control connection was closed") if closing else self._store_error(None)
            call.finish(error)
        if closing:
            return
        self._part_with_host(end)
        for membership in list(self._groups.values()):
            membership.tell(end)


def _lost(error: Exception) -> StoreLost:
    unsure = isinstance(error, CommunicationError | RefusedError) or getattr(error, "errno", None) in SILENT
    return StoreLost(spell_error(error), False, not unsure)
