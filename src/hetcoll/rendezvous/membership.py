"""What a member keeps of a group that it is in, and of its requests, and whom it tells the news of that group."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from dataclasses import dataclass, field

from ..errors import HetcollError, InitError, PeerLostError, parser, spell_gone
from .protocol.news import Event, Handler, Left, Lost, Query, StoreLost, Verdict
from .protocol.past import JOINT, Answered, Past, remember
from .protocol.wire import NOBODY, U32, Frame, Op, Status, unpack

log = logging.getLogger("hetcoll.control")

_SHORT = 16 << 10  # bytes


class Call:
    """A request whose reply a thread waits for. `key` is the second field of one that concerns a `group`."""

    def __init__(self, op: Op, group: bytes | None, fields: tuple[bytes, ...]) -> None:
        self.op, self.group = op, group
        self.key = fields[1] if len(fields) > 1 else b""
        self._done = threading.Event()
        self._answers: list[Frame | HetcollError] = []

    def finish(self, answer: Frame | HetcollError) -> None:
        """The first answer counts, whichever thread has it."""
        self._answers.append(answer)
        self._done.set()

    def wait(self, seconds: float) -> bool:
        return self._done.wait(seconds)

    def reply(self, seconds: float) -> Frame:
        """What the store answered, which had so many seconds, or the error that it stands for."""
        frame = self._answers[0]
        if isinstance(frame, HetcollError):
            raise frame
        if frame.status == Status.OK:
            return frame
        if frame.status == Status.LOST:
            rank, text = unpack(frame.body)
            raise PeerLostError(text.decode(), U32.unpack(rank)[0])
        within = f" within {seconds:.3g} s" if frame.status == Status.TIMEOUT else ""
        raise InitError(f"{frame.body.decode()}{within}")


@dataclass(slots=True)
class Membership:
    """Of this process in the group of this name."""

    name: bytes
    rank: int
    size: int
    handler: Handler | None
    host: int = NOBODY
    gone: dict[int, str] = field(default_factory=dict)  # why, "" for one that left
    own: dict[tuple[bytes, int], bytes] = field(default_factory=dict)  # what was looked up, by tag and rank
    joined: bool = False
    formed: bool = False  # all ranks have met in an exchange
    rolls: int = 0  # how many times its ranks shrank
    verdict: bytes = b""
    answered: dict[int, tuple[Answered, ...]] = field(default_factory=dict)

    def keep(self, call: Call, frame: Frame) -> None:
        """Of a request that was answered."""
        ended_well = frame.status == Status.OK
        self.joined = self.joined or (call.op is Op.JOIN and ended_well)
        self.formed = self.formed or (call.op is Op.EXCHANGE and ended_well)
        if call.op is Op.SHRINK and ended_well:
            (self.rolls,) = U32.unpack(call.key)
        if call.op in JOINT and frame.status != Status.REFUSED:
            last = Answered(call.key, Status(frame.status), frame.body)
            self.answered[call.op] = remember(self.answered.get(call.op, ()), last)

    @parser("news from the store")
    def hear(self, op: int, fields: list[bytes], body: bytes) -> bytes | None:
        """News from the store, each told once: a new store may tell what the one before has told. The answer to a
        question."""
        if op == Op.HOST:
            (self.host,) = U32.unpack(fields[0])
        elif op == Op.LOST:
            (rank,), reason = U32.unpack(fields[0]), fields[1].decode()
            if not self.gone.get(rank):
                self.gone[rank] = reason
                self.tell(Lost(rank, reason))
        elif op == Op.LEFT:
            for (rank,) in map(U32.unpack, fields):
                if rank not in self.gone:
                    self.gone[rank] = ""
                    self.tell(Left(rank))
        elif op == Op.VERDICT:
            if not self.verdict:
                self.verdict = body
                self.tell(Verdict(fields[0], fields[1], U32.unpack(fields[2])[0]))
        elif op == Op.ASK:
            return self.tell(Query(U32.unpack(fields[0])[0], fields[1]))
        return None

    def check_present(self, ranks: Collection[int]) -> None:
        """PeerLostError where one of `ranks` died or left."""
        for rank in ranks:
            if rank in self.gone:
                raise PeerLostError(spell_gone(rank, self.gone[rank]), rank)

    def part_with_host(self, end: StoreLost) -> None:
        """The store has ended, and with it most often the rank whose process hosted it."""
        if self.host not in (NOBODY, self.rank) and self.host not in self.gone:
            reason = f"its process hosted the job's store: {end.reason}"
            self.gone[self.host] = "" if end.orderly else reason
            self.tell(Left(self.host) if end.orderly else Lost(self.host, reason))

    def tell(self, event: Event) -> bytes | None:
        """The handler's answer."""
        if self.handler is None:
            return None
        try:
            return self.handler(self.name, event)
        except Exception:
            log.exception("the event handler of %r failed on %r", self.name, event)
            return None

    @property
    def over(self) -> bool:
        """Whether its ranks have gone on in another group, or never will all meet in it again, as one has died."""
        if any(self.gone.values()):
            return True
        return any(each.status == Status.OK for op in (Op.SHRINK, Op.GROW) for each in self.answered.get(op, ()))

    def leave(self) -> None:
        """This process is no rank of it any more."""
        self.gone.setdefault(self.rank, "")

    def spell(self, *, whole: bool = True) -> bytes:
        """For a new store. Answers that are long are the same for all: not all have to tell the `whole` of them."""
        told = {tag: value for (tag, rank), value in list(self.own.items()) if rank == self.rank}
        answered = {
            op: tuple(each for each in some if whole or len(each.body) <= _SHORT) for op, some in self.answered.items()
        }
        past = Past(self.name, self.rank, self.size, self.formed, self.rolls, self.gone, self.verdict, told, answered)
        return past.pack()
