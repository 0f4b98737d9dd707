"""What a member keeps of a group that it is in, and of its requests."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from ..errors import HetcollError, InitError, PeerLostError
from .protocol.news import Handler
from .protocol.past import JOINT, Answered, Past
from .protocol.wire import NOBODY, U32, Frame, Op, Status, unpack

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
    """Of this process in a group."""

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
    answered: dict[int, Answered] = field(default_factory=dict)

    def keep(self, call: Call, frame: Frame) -> None:
        """Of a request that was answered."""
        ended_well = frame.status == Status.OK
        self.joined = self.joined or (call.op is Op.JOIN and ended_well)
        self.formed = self.formed or (call.op is Op.EXCHANGE and ended_well)
        if call.op is Op.SHRINK and ended_well:
            (self.rolls,) = U32.unpack(call.key)
        if call.op in JOINT and frame.status != Status.REFUSED:
            self.answered[call.op] = Answered(call.key, Status(frame.status), frame.body)

    def spell(self, name: bytes, *, whole: bool = True) -> bytes:
        """For a new store. Answers that are long are the same for all: not all have to tell the `whole` of them."""
        told = {tag: value for (tag, rank), value in self.own.items() if rank == self.rank}
        answered = {op: each for op, each in self.answered.items() if whole or len(each.body) <= _SHORT}
        past = Past(name, self.rank, self.size, self.formed, self.rolls, self.gone, self.verdict, told, answered)
        return past.pack()
