"""What the store knows of one group."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ...errors import spell_gone
from ..protocol.exchanges import Exchange
from ..protocol.keys import Member
from ..protocol.past import Answered
from ..protocol.wire import NOBODY, U32, Op, Status, pack


@dataclass(slots=True)
class Roll:
    """One decision: the requests that wait for it by rank, what each rank said, until when; or how it failed."""

    waiting: dict[int, tuple[Member, int]] = field(default_factory=dict)
    said: dict[int, bytes] = field(default_factory=dict)
    failed: tuple[bytes, Status] | None = None
    due: float = math.inf

    def answer(self, body: bytes, status: Status) -> None:
        for member, request in self.waiting.values():
            member.send(Op.REPLY, body, request, status)
        self.waiting.clear()


@dataclass(slots=True)
class Group:
    """Ranks that know each other. `gone` has the reason of each rank that was lost, and "" for one that left.

    `roll` are the requests of ranks that want to go on with those that are left, `rolls` the number of such calls so
    far, and `late` who is there but did not come to one in time. `agreements` and `growths` are decisions under way, by
    number, and those that failed. `reserved` are members that have yet to join what grew of their group. `formed` once
    all ranks have met in an exchange. `mixed` is why it never will: two processes said that they are the same rank, or
    ranks said different sizes. `watched` is when agreements are looked at next.
    `leaving` are ranks that said goodbye, of which the others have yet to be told, and `words` their last ones. `own`
    is what ranks told in exchanges, by tag, for those who ask. `answered` are answers of a store that was lost, by
    operation and key, of a group that was `resumed` after it.
    """

    name: bytes
    size: int
    members: dict[int, Member] = field(default_factory=dict)
    gone: dict[int, str] = field(default_factory=dict)
    host: int = NOBODY
    verdict: bytes | None = None
    exchanges: dict[bytes, Exchange] = field(default_factory=dict)
    roll: dict[int, tuple[Member, int]] = field(default_factory=dict)
    rolls: int = 0
    late: set[int] = field(default_factory=set)
    agreements: dict[int, Roll] = field(default_factory=dict)
    growths: dict[int, Roll] = field(default_factory=dict)
    reserved: dict[int, Member] = field(default_factory=dict)
    formed: bool = False
    mixed: str = ""
    leaving: list[int] = field(default_factory=list)
    words: dict[int, bytes] = field(default_factory=dict)
    own: dict[bytes, dict[int, bytes]] = field(default_factory=dict)
    watched: float = math.inf
    answered: dict[tuple[int, bytes], Answered] = field(default_factory=dict)
    resumed: bool = False

    def spell_loss(self, rank: int) -> bytes:
        """The body of LOST."""
        return pack([self.name, U32.pack(rank), self.gone[rank].encode()])

    def spell_needed(self, rank: int, tag: bytes) -> bytes:
        """That of a reply to who needs a rank that is gone in the exchange `tag`."""
        text = f"{spell_gone(rank, self.gone[rank])}; {tag!r} needed it"
        return pack([U32.pack(rank), text.encode()])
