"""The store's side of its own end: which members would take its place, and how those that come to it then go on.

A job that has come together has up to MOST successors: members that listen and serve nobody as yet. All members are
told where. When the store is lost they go to the first of these that is alive, and each tells it what it knows of its
groups (`past`): out of that the new store makes its state. For some seconds it takes ranks that have not come yet for
members that say nothing. So long it decides nothing either: one of these may have heard what the lost store decided.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Protocol

from ...errors import CommunicationError
from ..protocol.exchanges import FEW
from ..protocol.keys import Member, RefusedError
from ..protocol.past import JOINT, Answered, Past
from ..protocol.wire import F64, MAX_ID, NOBODY, U32, Frame, Op, Status, pack, unpack
from ..uplink import ABSENCE
from .group import Group
from .rolls import tell_left_behind

log = logging.getLogger("hetcoll.successors")

MOST = 3
_GATHER = 0.5  # seconds: who leaves in that time is told of together
_SILENCES = 60.0  # seconds in which all notice that a network is cut

After = Callable[[bytes, Callable[[], None]], None]
Waiting = tuple[Member, Frame]


class Find(Protocol):
    """Gives the group of a name and a size, if there is one or it may be new."""

    def __call__(self, name: bytes, size: int, *, new: bool) -> Group | None: ...


class Successors:
    """All members, and which of them are successors. `charge` is the body of STAND."""

    def __init__(self, charge: bytes, after: After) -> None:
        self._charge, self._after = charge, after
        self._members: dict[Member, bool] = {}  # whether the store is in its process
        self._ranks: set[Member] = set()  # those of a group; who waits to be taken in is none of the job's processes
        self._places: dict[Member, bytes] = {}  # of successors; nothing: asked
        self._unsure: list[Member] = []  # who came before this store was sure to serve
        self._begun = self._due = False
        self.told = b""
        """The last SUCCESSORS, which all members heard."""
        self._silent = 0  # ranks that fell silent of late
        self.cut_off = ""
        """Why this store gives up, if it does: it may be in the smaller part of a job whose network is cut."""

    def add(self, member: Member, *, hosts: bool = False) -> None:
        """A member is there. While the job comes together the first ones are asked to listen, so that all are told of
        them before they go on."""
        known = member in self._members
        self._members[member] = hosts or self._members.get(member, False)
        more = self._count(member)
        if self._begun and not known:
            member.send(Op.SUCCESSORS, self.told)
        if self._begun and more:
            self._refresh_soon()
        elif not self._begun and self._charge:
            self._ask()

    def grow(self) -> None:
        """Some that waited are of the job now. All are told before they go on with these: what were more than half
        before may be less."""
        grown = [member for member in self._members if self._count(member)]
        if grown and self._begun:
            self._tell()
            self._refresh_soon()

    def _count(self, member: Member) -> bool:
        """Whether a member is one of the job's processes now and was not."""
        more = bool(member.ranks) and member not in self._ranks
        if more:
            self._ranks.add(member)
        return more

    def take_back(self, member: Member, hosts: bool, places: bytes, told: bytes) -> None:
        """A member of the store before this one, which may be a successor already. It was `told` a list there, as all
        were, and nobody is told another until most have come: two that went by different lists might both serve."""
        self._members[member] = hosts
        self.told = self.told or told
        self._unsure.append(member)
        if places:
            self._places[member] = places

    def confirm(self) -> None:
        """This store serves: those who came to it may rely on that."""
        for member in self._unsure:
            self._count(member)
            member.send(Op.SUCCESSORS, b"")
        self._unsure.clear()
        if not self._begun and self._charge:
            self._begun = True
            self._refresh_soon()

    def drop(self, member: Member, silent: bool) -> None:
        """A member is gone. `silent`: all that is known is that nothing comes from it any more."""
        if self._members.pop(member, None) is None:
            return
        self._places.pop(member, None)
        counted = member in self._ranks
        self._ranks.discard(member)
        self._refresh_soon()
        if silent and counted:
            self._silent += 1
            self._after(F64.pack(_SILENCES), self._forget_silence)
            if self._begun and self._silent > len(self._ranks):
                count = self._silent + len(self._ranks)
                self.cut_off = f"{self._silent} of {count} processes fell silent, and may go on without this part"

    def _forget_silence(self) -> None:
        """If that one had gone on elsewhere, with more than half of the job, this store had given up by now."""
        self._silent -= 1
        self._refresh_soon()

    def begin(self) -> None:
        """The job has come together."""
        if not self._begun and self._charge:
            self._begun = True
            self._refresh()
            if self._due:  # a newcomer may not have said where it listens; all go on now, and this store may die
                self._tell()

    def stand(self, member: Member, request: int, _: bytes, places: bytes) -> None:
        """A member listens, and says where; nothing: it cannot."""
        if member not in self._places:
            return
        if places:
            self._places[member] = places
        if self._begun and all(self._places.values()):
            self._tell()

    def _refresh_soon(self) -> None:
        if self._begun and not self._due:
            self._due = True
            self._after(F64.pack(_GATHER), self._refresh)

    def _refresh(self) -> None:
        """Have as many successors as can be, and tell all members, also of their number, in which who fell silent of
        late is counted: if it lives, members that go by a lower number may be no more than half with it."""
        self._due = False
        self._ask()
        if all(self._places.values()):
            self._tell()
        else:
            self._due = True
            self._after(F64.pack(_GATHER), self._tell)  # one may be stopped

    def _ask(self) -> None:
        for member, hosts in self._members.items():
            if len(self._places) == MOST:
                break
            if not hosts and member not in self._places:
                self._places[member] = b""
                member.send(Op.STAND, self._charge)

    def _tell(self) -> None:
        self._due = False
        self.told = pack((U32.pack(len(self._ranks) + self._silent), *filter(None, self._places.values())))
        for member in self._members:
            member.send(Op.SUCCESSORS, self.told)


class Absent:
    """In place of a member that has not come to the new store yet."""

    def __init__(self, name: bytes, rank: int) -> None:
        self.name = f"rank {rank}"
        self.ranks = {name: rank}

    def send(self, op: Op, body: bytes, request: int = 0, status: Status = Status.OK) -> None:
        """What it is told it will hear when it comes."""


class Returns:
    """How members of a lost store come to this one, which serves nobody until `quorum` of them have.

    `find` gives a group, made where there is none if it may be new, `part` takes a member out of one for a reason,
    `catch_up` tells a member what others of a group were told, `handle` serves a frame.
    """

    def __init__(
        self,
        find: Find,
        part: Callable[[Member, bytes, str], None],
        catch_up: Callable[[Member, Group], None],
        handle: Callable[[Member, Frame], None],
        after: After,
        quorum: int,
        grace: float,
    ) -> None:
        self._find, self._part, self._catch_up, self._handle, self._after = find, part, catch_up, handle, after
        self._quorum, self._grace = quorum, grace
        self._complete = 0.0 if grace else math.inf  # all groups of up to so many ranks are, or were, known here
        self._came: set[Member] = set()
        self._begun = False
        self._held: list[Waiting] = []  # until the quorum is there
        self._settling: dict[bytes, list[Waiting]] = {}  # by group: until all of its ranks are here, or are missed
        self.alone = ""
        """Why this store gives up, if it does."""
        if quorum > 1:
            after(F64.pack(grace), self._give_up)

    def holds(self, member: Member, frame: Frame) -> bool:
        """Whether a frame has to wait for members that have yet to come; then it is kept."""
        held: list[Waiting] | None = None
        if self.waits and frame.op != Op.RETURN:
            held = self._held
        elif self._settling and (frame.op in JOINT or frame.op == Op.POST):
            held = self._settling.get(next(iter(frame.fields), b""))
        if held is None:
            return False
        held.append((member, frame))
        return True

    @property
    def over(self) -> bool:
        """Whether nobody is awaited any more, of some that were."""
        return self._begun and not self._settling

    @property
    def waits(self) -> bool:
        """Whether too few members have come as yet."""
        return self._quorum > 1

    def _give_up(self) -> None:
        if self.waits:
            self.alone = (
                f"{len(self._came)} processes found each other where {self._quorum} are more than half of the job"
            )

    def take(self, member: Member, pasts: bytes) -> None:
        """A member comes, with what it knows of its groups. What has waited for that is served."""
        for body in unpack(pasts):
            try:
                past = Past.read(body)
            except (CommunicationError, ValueError, IndexError) as error:
                raise RefusedError(f"what {member.name} tells of its groups came garbled: {error}") from error
            if (group := self._resume(member, past)) is not None:
                self._settle(group)
        if self._complete == 0 and not self._came:
            for most in (float(FEW), math.inf):
                self._after(F64.pack(self._patience(most)), partial(self._know, most))
        if member.ranks:
            self._came.add(member)
        if self.waits and len(self._came) >= self._quorum:
            self._quorum, held, self._held = 0, self._held, []
            self._serve(held)

    def _patience(self, size: float) -> float:
        """Seconds in which all ranks of a group of so many come."""
        return self._grace if size <= FEW else max(self._grace, ABSENCE)

    def _know(self, most: float) -> None:
        self._complete = most

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
            seconds = self._patience(group.size)
            self._after(F64.pack(seconds), lambda: self._miss(group, seconds))
        present = group.members.get(past.rank)
        if group.gone.get(past.rank) or group.size != past.size or not isinstance(present, Absent | None):
            self._leave_behind(member, past.name, past.rank)
            return group
        group.gone.pop(past.rank, None)
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
        elif past.rank in group.late:
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

    def _miss(self, group: Group, seconds: float) -> None:
        """Who has not come by now does not."""
        for other in list(group.members.values()):
            if isinstance(other, Absent):
                self._part(other, group.name, f"it did not come to the job's new store within {seconds:.3g} s")
        self._settle(group, now=True)

    @staticmethod
    def answer_again(group: Group | None, member: Member, frame: Frame) -> bool:
        """Answer a request that was sent to the lost store, too, if others have its answer from there."""
        if group is None or frame.op not in JOINT:
            return False
        last: Answered | None = group.answered.get((frame.op, frame.fields[1]))
        if last is None or group.name not in member.ranks:
            return False
        body = last.body
        if frame.op == Op.GROW and last.status == Status.OK:
            name, _, size, told = unpack(body)
            body = pack((name, U32.pack(member.ranks[group.name]), size, told))
        member.send(Op.REPLY, body, frame.request, last.status)
        return True
