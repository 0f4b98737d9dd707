"""What ranks decide together though some of them may die: who goes on, what a flag is, who is taken in.

All who wait for a decision get the same answer in one turn of the store, and who comes too late to one that failed gets
that, too. Ranks that the others went on without are of an earlier epoch: what they ask of their group is refused.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NoReturn

from ...errors import spell_gone, spell_ranks
from ..protocol.keys import Member, RefusedError
from ..protocol.wire import F64, I64, U32, Op, Status, pack
from .group import Group, Roll

log = logging.getLogger("hetcoll.rolls")

NAME_BYTES = 16
MAX_NEWCOMERS = 1 << 16
DOUBT = F64.pack(0.5)  # seconds, again and again


@dataclass(slots=True)
class _Newcomer:
    """A process that waits to be taken in."""

    member: Member
    request: int


class Rolls:
    """All decisions of a store. `find` gives a member's group and rank, `create` makes a group of a name and size,
    `after` calls a function once so many seconds (a packed double) are over, `on_growth` is called when newcomers are
    of the job, and nobody has heard it yet. While it `doubts` that others do not decide otherwise, nothing is decided
    without them."""

    def __init__(
        self,
        find: Callable[[Member, bytes], tuple[Group, int]],
        create: Callable[[bytes, int], Group],
        after: Callable[[bytes, Callable[[], None]], None],
        clock: Callable[[], float],
        on_growth: Callable[[], None],
        doubts: Callable[[], bool],
    ) -> None:
        self._find, self._create, self._after, self._clock = find, create, after, clock
        self._on_growth, self._doubts = on_growth, doubts
        self._lobby: list[_Newcomer] = []  # in the order in which they came
        self._growing: list[tuple[Group, Roll]] = []  # groups that wait, in that order
        self.refused = 0
        """Requests of ranks that the others went on without."""

    def find_current(self, member: Member, name: bytes) -> tuple[Group, int]:
        """As `find`; RefusedError for a rank that the others went on without."""
        group, rank = self._find(member, name)
        if rank in group.late:
            self.refuse(f"rank {rank} did not come to shrink() in time: the others went on without it")
        return group, rank

    def refuse(self, text: str) -> NoReturn:
        """What a rank asks that the others went on without."""
        self.refused += 1
        log.info("refused: %s", text)
        raise RefusedError(text)

    def drop(self, member: Member) -> None:
        """`member` is gone, and is not taken in."""
        self._lobby = [each for each in self._lobby if each.member is not member]

    def awaits(self, member: Member) -> bool:
        """Whether `member` waits to be taken in: when all others have gone, nobody does that any more."""
        return any(each.member is member for each in self._lobby)

    def part(self, group: Group, rank: int, member: Member) -> None:
        """`rank` is no longer of `group`, which `group.gone` says already."""
        rolls = [group.agreements, group.growths]
        waiting = [group.roll.pop(rank, None), *(r.waiting.pop(rank, None) for each in rolls for r in each.values())]
        for _, request in filter(None, waiting):
            text = f"rank {rank} left the group while it waited for the others"
            member.send(Op.REPLY, text.encode(), request, Status.REFUSED)
        self._close_roll(group)
        _forget(group)
        for number in list(group.agreements):
            self._close_agreement(group, number)
        group.reserved.pop(rank, None)
        for roll in list(group.growths.values()):
            if roll.failed is None:
                self._fail_growth(group, roll, *_gone(group, rank))

    # Who goes on after a failure.

    def shrink(self, member: Member, request: int, name: bytes, _: bytes, seconds8: bytes) -> None:
        group, rank = self.find_current(member, name)
        if rank in group.roll:
            raise RefusedError(f"rank {rank} calls shrink() twice at a time")
        turn = group.rolls
        self._after(seconds8, lambda: self._close_roll(group, now=group.rolls == turn))
        group.roll[rank] = (member, request)
        self._close_roll(group)

    def _close_roll(self, group: Group, *, now: bool = False) -> None:
        """Tell those who came to a roll call who they are, once all have come that can, or `now`. Who did not come
        hears that it was left behind."""
        if not group.roll:  # most often, and there may be many ranks
            return
        if not now and len(group.roll) + len(group.late) < len(group.members):
            return  # without a look at every rank each time that one comes
        missing = group.members.keys() - group.roll.keys() - group.late
        if missing and not now:
            return
        if self._doubts():
            turn = group.rolls
            self._after(DOUBT, lambda: self._close_roll(group, now=now and group.rolls == turn))
            return
        group.late |= missing
        group.rolls += 1
        body = pack(map(U32.pack, (group.rolls, *sorted(group.roll))))
        for member, request in group.roll.values():
            member.send(Op.REPLY, body, request)
        group.roll.clear()
        tell_left_behind(group, missing)

    # What a flag is.

    def agree(self, member: Member, request: int, name: bytes, number4: bytes, flag8: bytes, seconds8: bytes) -> None:
        group, rank = self.find_current(member, name)
        (number,), _, seconds = U32.unpack(number4), I64.unpack(flag8), _finite(seconds8)
        roll = self._enter(group, group.agreements, number, rank, member, request, flag8)
        if roll is not None:
            roll.due = min(roll.due, self._clock() + seconds)
            self._watch(group, roll.due)
            self._close_agreement(group, number)

    def _watch(self, group: Group, due: float) -> None:
        """Look at the agreements of `group` at `due`. A program may agree at every step: a timer for each agreement
        would stay for as long as its timeout."""
        if due < group.watched:
            group.watched = due
            self._after(F64.pack(due - self._clock()), lambda: self._expire_agreements(group))

    def _expire_agreements(self, group: Group) -> None:
        group.watched, now = math.inf, self._clock()
        under_way = [roll for roll in group.agreements.values() if roll.failed is None]
        for roll in under_way:
            if roll.due <= now:
                text = f"{spell_ranks(_silent(group, roll))} never came to agree()"
                self._fail(group, roll, text.encode(), Status.TIMEOUT)
        self._watch(group, min((roll.due for roll in under_way if roll.failed is None), default=math.inf))

    def _close_agreement(self, group: Group, number: int) -> None:
        """The bits that all have who said something, once nobody is awaited that could."""
        roll = group.agreements.get(number)
        if roll is None or roll.failed is not None or not _complete(group, roll):
            return
        if self._doubts():
            self._after(DOUBT, lambda: self._close_agreement(group, number))
        else:
            flag = -1
            for (said,) in map(I64.unpack, roll.said.values()):
                flag &= said
            del group.agreements[number]
            roll.answer(pack([I64.pack(flag)]), Status.OK)

    # Who is taken in.

    def admit(self, member: Member, request: int, seconds8: bytes) -> None:
        """A process that is of no group yet wants to be taken into one that grows."""
        newcomer = _Newcomer(member, request)
        self._after(seconds8, lambda: self._expire_newcomer(newcomer))
        self._lobby.append(newcomer)
        self._close_growths()

    def _expire_newcomer(self, newcomer: _Newcomer) -> None:
        if newcomer in self._lobby:
            self._lobby.remove(newcomer)
            text = "the job did not take this process in: grow() was not called for it"
            newcomer.member.send(Op.REPLY, text.encode(), newcomer.request, Status.TIMEOUT)

    def grow(
        self, member: Member, request: int, name: bytes, number4: bytes, count4: bytes, told: bytes, seconds8: bytes
    ) -> None:
        """All of a group want so many newcomers; what the lowest rank told, these are told."""
        group, rank = self.find_current(member, name)
        (number,), (count,), _ = U32.unpack(number4), U32.unpack(count4), _finite(seconds8)
        if not 1 <= count <= MAX_NEWCOMERS:
            raise RefusedError(f"grow() by {count} ranks: wanted 1 to {MAX_NEWCOMERS}")
        roll = self._enter(group, group.growths, number, rank, member, request, count4 + told)
        if roll is None:
            return
        if len(roll.said) == 1:
            self._growing.append((group, roll))
        other, first = next(iter(roll.said.items()))
        if first[:4] != count4:
            (wanted,) = U32.unpack(first[:4])
            text = f"rank {other} called grow({wanted}), rank {rank} grow({count}): wanted the same on all ranks"
            self._fail_growth(group, roll, text.encode(), Status.REFUSED)
        elif group.gone:
            self._fail_growth(group, roll, *_gone(group, next(iter(group.gone))))
        else:
            self._after(seconds8, lambda: self._expire_growth(group, roll, count))
            self._close_growths()

    def _close_growths(self) -> None:
        for group, roll in list(self._growing):
            count = U32.unpack(next(iter(roll.said.values()))[:4])[0]
            if len(roll.said) == group.size and len(self._lobby) >= count:
                if self._doubts():
                    self._after(DOUBT, self._close_growths)
                    return
                self._growing.remove((group, roll))
                self._take_in(group, roll, count)

    def _take_in(self, group: Group, roll: Roll, count: int) -> None:
        """The members keep their ranks, the newcomers have those that follow. All are of the new group from now on, so
        that who dies before it has said a word there is missed by the others."""
        taken, self._lobby = self._lobby[:count], self._lobby[count:]
        name, told = os.urandom(NAME_BYTES), roll.said[0][4:]
        size = group.size + count
        try:
            made = self._create(name, size)
        except RefusedError as error:
            self._lobby = taken + self._lobby
            self._fail_growth(group, roll, str(error).encode(), Status.REFUSED)
            return
        group.growths = {number: each for number, each in group.growths.items() if each is not roll}
        log.info("%d newcomers for a group of %d", count, group.size)
        waiting = sorted(roll.waiting.items())
        roll.waiting.clear()
        places = [*waiting, *((group.size + i, (each.member, each.request)) for i, each in enumerate(taken))]
        for rank, (member, _) in places:
            made.members[rank] = made.reserved[rank] = member
            member.ranks[name] = rank
        self._on_growth()
        for rank, (member, request) in places:
            member.send(Op.REPLY, pack([name, U32.pack(rank), U32.pack(size), told]), request)

    def _expire_growth(self, group: Group, roll: Roll, count: int) -> None:
        if any(each is roll for _, each in self._growing):
            late = _silent(group, roll)
            text = f"{spell_ranks(late)} never came to grow()" if late else f"grow({count}) found {len(self._lobby)}"
            text += "" if late else f" newcomer{'s' if len(self._lobby) != 1 else ''}"
            self._fail_growth(group, roll, text.encode(), Status.TIMEOUT)

    def _fail_growth(self, group: Group, roll: Roll, body: bytes, status: Status) -> None:
        self._growing = [each for each in self._growing if each[1] is not roll]
        self._fail(group, roll, body, status)

    def _fail(self, group: Group, roll: Roll, body: bytes, status: Status) -> None:
        roll.failed = body, status
        roll.answer(body, status)
        _forget(group)

    def _enter(
        self,
        group: Group,
        rolls: dict[int, Roll],
        number: int,
        rank: int,
        member: Member,
        request: int,
        said: bytes,
    ) -> Roll | None:
        """The roll in which `rank` waits now; None where it was answered at once."""
        roll = rolls.setdefault(number, Roll())
        if rank in roll.said:
            raise RefusedError(f"rank {rank} said twice what it says in decision {number}")
        if roll.failed is not None:
            member.send(Op.REPLY, roll.failed[0], request, roll.failed[1])
            roll.said[rank] = said
            _forget(group)
            return None
        roll.said[rank] = said
        roll.waiting[rank] = (member, request)
        return roll


def tell_left_behind(group: Group, ranks: Iterable[int]) -> None:
    """These are late, and hear it: whatever they wait for does not come any more."""
    text = b"it did not come to shrink() in time, and the others went on without it"
    for rank in sorted(ranks):
        group.members[rank].send(Op.LOST, pack([group.name, U32.pack(rank), text]))


def _finite(seconds8: bytes) -> float:
    """Before anything is kept that would wait for so long."""
    (seconds,) = F64.unpack(seconds8)
    if not math.isfinite(seconds):
        raise RefusedError(f"a timeout of {seconds} seconds: wanted a finite one")
    return float(seconds)


def _silent(group: Group, roll: Roll) -> set[int]:
    """The ranks that could yet say something."""
    return set(range(group.size)) - group.gone.keys() - group.late - roll.said.keys()


def _complete(group: Group, roll: Roll) -> bool:
    """Whether nobody is silent. Most often numbers tell: a look at every rank whenever one comes would be n squared."""
    return len(roll.said) + len(group.gone) + len(group.late) >= group.size and not _silent(group, roll)


def _forget(group: Group) -> None:
    """The failed rolls that nobody will ask for any more."""
    for rolls in (group.agreements, group.growths):
        for number in [n for n, roll in rolls.items() if roll.failed is not None and _complete(group, roll)]:
            del rolls[number]


def _gone(group: Group, rank: int) -> tuple[bytes, Status]:
    text = f"{spell_gone(rank, group.gone[rank])}; grow() needs all ranks: the others go on by shrink(), and then grow"
    return pack([U32.pack(rank), text.encode()]), Status.LOST
