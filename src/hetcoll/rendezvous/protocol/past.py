"""What a member tells a job's new store of the groups that it was in at the one before."""

from __future__ import annotations

from typing import NamedTuple

from ...errors import parser
from .wire import U32, Op, Status, pack, unpack

JOINT = frozenset({Op.EXCHANGE, Op.SHRINK, Op.AGREE, Op.GROW})
"""Requests that several ranks make and that are answered together. The second field of each tells one from the next:
who got its answer before the store was lost tells it to the new one, for those who did not."""


_FAILED = 8  # so many


class Answered(NamedTuple):
    """A request that was answered: its second field, and the reply."""

    key: bytes
    status: Status
    body: bytes


def remember(earlier: tuple[Answered, ...], last: Answered) -> tuple[Answered, ...]:
    """What a member keeps of its requests of one kind: the last that ended well, which others may have yet to hear of,
    and some that failed since, as nobody came to them."""
    if last.status == Status.OK:
        return (last,)
    return (*earlier[:1], *earlier[1:][1 - _FAILED :], last)


class Past(NamedTuple):
    """One group, which this rank has left where that is `gone` itself. `formed`: all of its ranks have met in an
    exchange. `rolls` is the number of its last `shrink`, `told` what this rank told as its own in exchanges, by tag,
    `answered` its last answers to each operation of JOINT."""

    name: bytes
    rank: int
    size: int
    formed: bool
    rolls: int
    gone: dict[int, str]
    verdict: bytes
    told: dict[bytes, bytes]
    answered: dict[int, tuple[Answered, ...]]

    def pack(self) -> bytes:
        """What `read` reads."""
        head = self.name, U32.pack(self.rank), U32.pack(self.size), bytes([self.formed]), U32.pack(self.rolls)
        gone = pack(part for rank, reason in self.gone.items() for part in (U32.pack(rank), reason.encode()))
        told = pack(part for item in self.told.items() for part in item)
        answered = pack(
            part
            for op, some in self.answered.items()
            for each in some
            for part in (bytes([op, each.status]), each.key, each.body)
        )
        return pack((*head, gone, self.verdict, told, answered))

    @classmethod
    @parser("what a member tells of its group")
    def read(cls, body: bytes) -> Past:
        """What `pack` made."""
        name, rank, size, formed, rolls, gone, verdict, told, answered = unpack(body)
        (number,), (count,), (roll,) = U32.unpack(rank), U32.unpack(size), U32.unpack(rolls)
        lost = {U32.unpack(who)[0]: reason.decode() for who, reason in _rows(gone, 2)}
        last: dict[int, tuple[Answered, ...]] = {}
        for kind, key, said in _rows(answered, 3):
            last[kind[0]] = (*last.get(kind[0], ()), Answered(key, Status(kind[1]), said))
        own = dict[bytes, bytes](_rows(told, 2))
        return cls(name, number, count, formed == b"\1", roll, lost, verdict, own, last)


def _rows(body: bytes, count: int) -> list[list[bytes]]:
    """The fields of a body, so many at a time."""
    fields = unpack(body)
    return [fields[at : at + count] for at in range(0, len(fields), count)]
