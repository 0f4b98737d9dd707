"""How the members of a lost store come to the one that takes its place.

Only one store may serve a job, and several may try: who is stopped while others pass it over knows nothing of that when
it wakes. So a store that takes the place of another waits until more than half of the job have come to it, or nobody is
left who might serve instead (`Claim`). Then it takes, for some seconds, ranks that have not come for members that say
nothing. So long it decides nothing either: one of these may have heard what the lost store decided.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

from ...errors import CommunicationError
from ..connections.pulse import Places, Pulses
from ..protocol.exchanges import FEW
from ..protocol.keys import Member, RefusedError
from ..protocol.past import JOINT, Answered, Past
from ..protocol.wire import F64, MAX_ID, NOBODY, U32, Frame, Op, Status, pack, unpack
from ..uplink import ABSENCE, pack_places
from .group import Group
from .rolls import tell_left_behind
from .successors import SILENCES, After

Waiting = tuple[Member, Frame]

_OF_ALL = JOINT | {Op.POST, Op.LOOK}
"""What is not served until all ranks of a group are here: one may have heard, or told, what it asks for."""


class Claim(NamedTuple):
    """On what a store takes the place of another: it serves once `quorum` processes have come, which are more than half
    of the job; or, where it is `certain` that no store before it lives, once each of its `rivals` has come or is dead,
    who could serve if this one was passed over. These are the places where they listen. It has so many `seconds` for
    that, and ranks then have `grace` to come; but once `most` processes have come, nobody else does: the others were
    on the host of the lost store, where nothing answers."""

    quorum: int
    rivals: tuple[Places, ...]
    certain: bool
    seconds: float
    grace: float
    most: float = math.inf


class Find(Protocol):
    """Gives the group of a name and a size, if there is one or it may be new."""

    def __call__(self, name: bytes, size: int, *, new: bool) -> Group | None: ...


class Absent:
    """In place of a member that has not come to the new store yet."""

    def __init__(self, name: bytes, rank: int) -> None:
        self.name = f"rank {rank}"
        self.ranks = {name: rank}

    def send(self, op: Op, body: bytes, request: int = 0, status: Status = Status.OK) -> None:
        """What it is told it will hear when it comes."""


class Returns:
    """How members of a lost store come to this one, which serves nobody until its `claim` is good.

    `find` gives a group, made where there is none if it may be new, `part` takes a member out of one for a reason,
    `catch_up` tells a member what others of a group were told, `replace` asks it what its `Absent` was asked, `handle`
    serves a frame, `begin_anew` forgets a group that nobody is in any more.
    """

    def __init__(
        self,
        find: Find,
        part: Callable[[Member, bytes, str], None],
        catch_up: Callable[[Member, Group], None],
        replace: Callable[[Member, Member, bytes], None],
        handle: Callable[[Member, Frame], None],
        begin_anew: Callable[[bytes], None],
        after: After,
        claim: Claim | None,
    ) -> None:
        self._find, self._part, self._catch_up, self._handle, self._after = find, part, catch_up, handle, after
        self._replace = replace
        self._begin_anew = begin_anew
        self._claim = claim or Claim(0, (), True, 0.0, 0.0)
        self.waits = claim is not None
        """Whether another store may serve."""
        self._rivals = {pack_places(each): {*map(_token, each)} for each in self._claim.rivals}
        self._before = not self._claim.certain
        self._forget: Callable[[bytes], None] = lambda _: None
        self._complete = 0.0 if self.waits else math.inf  # all groups of up to so many ranks are, or were, known here
        self._came: set[Member] = set()
        self._lost: set[Member] = set()  # at the store before: of these a quorum is not more than half
        self._begun = False
        self._held: list[Waiting] = []  # until it is sure
        self._timers: list[tuple[float, Callable[[], None]]] = []  # which begin then
        self._settling: dict[bytes, list[Waiting]] = {}  # by group: until all of its ranks are here, or are missed
        self._awaited: dict[bytes, Group] = {}  # of which ranks may come that the others have left
        self.alone = ""
        """Why this store gives up, if it does."""
        if claim is not None:
            after(F64.pack(claim.seconds), self._give_up)

    # Whether it may serve.

    def watch(self, pulses: Pulses) -> None:
        """See which of the rivals die: `hear_of_death` is told."""
        self._forget = pulses.forget
        for places in self._claim.rivals:
            for address in places:
                pulses.feel(_token(address), address, "")

    def hear_of_death(self, token: bytes) -> None:
        """Nobody listens at one of the addresses of a rival any more."""
        for listens in self._rivals.values():
            listens.discard(token)
        self._rivals = {places: listens for places, listens in self._rivals.items() if listens}

    def drop(self, member: Member, silent: bool) -> None:
        """A member is gone, and does not count where that is too early. A `silent` one may serve elsewhere."""
        if self.waits:
            self._came.discard(member)
            self._lost.discard(member)
            self._before = self._before or silent

    @property
    def sure(self) -> bool:
        """Whether no other store serves, or ever will before this one has ended."""
        return not self.waits or len(self._came) >= self._claim.quorum or not (self._before or self._rivals)

    @property
    def settled(self) -> bool:
        """Whether this store serves, and nobody else goes by the list of successors that brought it here."""
        return not (self.waits or self._rivals)

    def serve(self) -> None:
        """Serve all from now on."""
        if self.waits:
            self._after(F64.pack(SILENCES), self._forget_rivals)
        self.waits = False
        held, self._held, timers, self._timers = self._held, [], self._timers, []
        for seconds, action in timers:
            self._after(F64.pack(seconds), action)
        self._serve(held)
        if len(self._came) >= self._claim.most:
            self._know(math.inf)
            for group in list(self._awaited.values()):
                self._miss(group, "its host fell silent, as the one of the job's store did")

    def _forget_rivals(self) -> None:
        for listens in self._rivals.values():
            for token in listens:
                self._forget(token)
        self._rivals.clear()

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        """So long after it is sure."""
        if self.waits:
            self._timers.append((seconds, action))
        else:
            self._after(F64.pack(seconds), action)

    # How members come.

    def holds(self, member: Member, frame: Frame) -> bool:
        """Whether a frame has to wait for members that have yet to come; then it is kept."""
        held: list[Waiting] | None = None
        if self.waits and frame.op != Op.RETURN:
            held = self._held
        elif self._settling and frame.op in _OF_ALL:
            held = self._settling.get(next(iter(frame.fields), b""))
        if held is None:
            return False
        held.append((member, frame))
        return True

    def awaits(self, name: bytes) -> bool:
        """Whether ranks of a group may come who have not heard how it ended."""
        return name in self._awaited

    @property
    def over(self) -> bool:
        """Whether nobody is awaited any more, of some that were."""
        return self._begun and not self._settling

    def _give_up(self) -> None:
        if self.waits:
            few, most = len(self._came), self._claim.quorum
            self.alone = f"{few} processes found each other where {most} are more than half of the job"

    def take(self, member: Member, places: bytes, pasts: bytes) -> None:
        """A member comes, perhaps a rival, with what it knows of its groups. What has waited for that is served."""
        for token in self._rivals.pop(places, ()):
            self._forget(token)
        for body in unpack(pasts):
            try:
                past = Past.read(body)
            except (CommunicationError, ValueError, IndexError) as error:
                raise RefusedError(f"what {member.name} tells of its groups came garbled: {error}") from error
            if (group := self._resume(member, past)) is not None:
                self._settle(group)
        if self._complete == 0 and not self._came:
            for most in (float(FEW), math.inf):
                self._later(self._patience(most), partial(self._know, most))
        if member.ranks and member not in self._lost:
            self._came.add(member)

    def _patience(self, size: float) -> float:
        """Seconds in which all ranks of a group of so many come."""
        return self._claim.grace if size <= FEW else max(self._claim.grace, ABSENCE)

    def _know(self, most: float) -> None:
        self._complete = max(self._complete, most)

    def _serve(self, held: list[Waiting]) -> None:
        for member, frame in held:
            self._handle(member, frame)

    def _settle(self, group: Group, *, now: bool = False) -> None:
        """Serve a group from now on if all of its ranks are here, or `now`."""
        if now or (group.formed and not any(isinstance(each, Absent) for each in reversed(group.members.values()))):
            self._serve(self._settling.pop(group.name, []))

    def _resume(self, member: Member, past: Past) -> Group | None:
        """The group that a member was in; none where the others have left it since they lost this one."""
        if len(past.name) > MAX_ID or past.rank >= past.size:
            raise RefusedError(f"rank {past.rank} of {past.size} of a group: wanted a rank below the size")
        self._begun = True
        if past.gone.get(past.rank):  # it was left behind at the store before this one, where nobody may be by now
            self._leave_behind(member, past.name, past.rank)
            return None
        group = self._find(past.name, past.size, new=past.size == 1 or past.size > self._complete)
        if group is None:
            self._leave_behind(member, past.name, past.rank)
            return None
        if not group.resumed:
            group.resumed = True
            self._settling[past.name] = []
            self._awaited[past.name] = group
            seconds = self._patience(group.size)
            why = f"it did not come to the job's new store within {seconds:.3g} s"
            self._later(seconds, lambda: self._miss(group, why))
        present = group.members.get(past.rank)
        if group.gone.get(past.rank):
            self._lose(member)
        if group.gone.get(past.rank) or group.size != past.size or not isinstance(present, Absent | None):
            self._leave_behind(member, past.name, past.rank)
            return group
        if past.rank not in past.gone:
            group.gone.pop(past.rank, None)
            if present is not None:
                self._replace(present, member, past.name)
            group.members[past.rank] = member
            member.ranks[past.name] = past.rank
        if past.formed and not group.formed:
            group.formed = True
            for rank in range(group.size):
                if rank not in group.members and rank not in group.gone:
                    group.members[rank] = Absent(group.name, rank)
        news = self._merge(group, past)
        if group.host != NOBODY:
            member.send(Op.HOST, pack((group.name, U32.pack(group.host))))
        for each in group.members.values() if news else [member]:
            self._catch_up(each, group)
        return group

    @staticmethod
    def _leave_behind(member: Member, name: bytes, rank: int) -> None:
        text = "its connection to the job's store was lost, and the others went on without it"
        member.send(Op.LOST, pack((name, U32.pack(rank), text.encode())))

    def _lose(self, member: Member) -> None:
        self._lost.add(member)
        self._came.discard(member)

    def _merge(self, group: Group, past: Past) -> bool:
        """Whether others of the group have to hear of something."""
        news = bool(past.verdict) and group.verdict is None
        for rank, reason in past.gone.items():
            other = group.members.get(rank)
            if other is None:
                news = news or rank not in group.gone
                group.gone.setdefault(rank, reason)
            elif isinstance(other, Absent):
                self._part(other, group.name, reason)
            elif reason and rank != past.rank:
                self._leave_behind(other, group.name, rank)
                self._lose(other)
                self._part(other, group.name, reason)
        known = len(group.answered)
        group.rolls = max(group.rolls, past.rolls)
        group.verdict = group.verdict or past.verdict or None
        for tag, value in past.told.items():
            group.own.setdefault(tag, {})[past.rank] = value
        for op, some in past.answered.items():
            group.answered.update({(op, each.key): each for each in some})
        if len(group.answered) > known:
            self._leave_late(group)
        elif past.rank in group.late and past.rank in group.members:
            tell_left_behind(group, [past.rank])
        return news

    @staticmethod
    def _leave_late(group: Group) -> None:
        """Who was not in the last roll call was left behind by those that were."""
        last = group.answered.get((Op.SHRINK, U32.pack(group.rolls)))
        if last is not None and last.status == Status.OK:
            _, *went_on = (U32.unpack(field)[0] for field in unpack(last.body))
            group.late = set(group.members) - set(went_on)
            tell_left_behind(group, group.late)

    def _miss(self, group: Group, why: str) -> None:
        """Who has not come by now does not."""
        self._awaited.pop(group.name, None)
        for other in list(group.members.values()):
            if isinstance(other, Absent):
                self._part(other, group.name, why)
        self._settle(group, now=True)
        if not group.members:
            self._begin_anew(group.name)

    @staticmethod
    def answer_again(group: Group | None, member: Member, frame: Frame) -> bool:
        """Answer a request that was sent to the lost store, too, if others have its answer from there."""
        if group is None or frame.op not in JOINT:
            return False
        last: Answered | None = group.answered.get((frame.op, frame.fields[1]))
        if last is None or member.ranks.get(group.name) in (None, *group.late):
            return False
        body = last.body
        if frame.op == Op.GROW and last.status == Status.OK:
            name, _, size, told = unpack(body)
            body = pack((name, U32.pack(member.ranks[group.name]), size, told))
        member.send(Op.REPLY, body, frame.request, last.status)
        return True


def _token(address: tuple[str, int]) -> bytes:
    """Of a place at which a rival listens."""
    return pack_places((address,))
