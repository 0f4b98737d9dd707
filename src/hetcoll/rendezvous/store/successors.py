"""The store's side of its own end: which members would take its place, and how those that come to it then go on.

A job that has come together has up to MOST successors: members that listen and serve nobody as yet. All members are
told where. When the store is lost they go to the first of these that is alive, and each tells it what it knows of its
groups: out of that the new store makes its state (`returns`). A host may die with all that run on it: so the successors
are on as many hosts as can be.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable

from ..protocol.keys import Member
from ..protocol.wire import F64, U32, Op, pack, unpack

log = logging.getLogger("hetcoll.successors")

MOST = 3
_GATHER = 0.5  # seconds: who leaves in that time is told of together
SILENCES = 60.0  # seconds in which all notice that a network is cut
_SURE = 1.0  # seconds in which nobody goes elsewhere who was here

After = Callable[[bytes, Callable[[], None]], None]


class Successors:
    """All members, and which of them are successors. `charge` is the body of STAND. `certain`: none before lives."""

    def __init__(self, charge: bytes, after: After, *, certain: bool = True) -> None:
        self._charge, self._after, self._certain = charge, after, certain
        self.host_of: Callable[[Member], str] = lambda _: ""
        """On which host a member is, nothing: on the store's own."""
        self.reaches: Callable[[Member], bool] = lambda _: True
        """Whether a member is here now, as far as can be known."""
        self._members: dict[Member, bool] = {}  # whether the store is in its process
        self._ranks: set[Member] = set()  # those of a group; who waits to be taken in is none of the job's processes
        self._firm: set[Member] = set()  # of these all but newcomers whose group has yet to meet
        self._places: dict[Member, bytes] = {}  # of successors; nothing: asked
        self._sought: set[Member] = set()  # successors of stores before: who has yet to come looks for these
        self._found = False  # perhaps: one of them fell silent, and may serve
        self._unsure: list[Member] = []  # who came before this store was sure to serve
        self._begun = self._due = self._fixed = False
        self.told = b""
        """The last SUCCESSORS, which all members heard."""
        self._sure_until = 0.0  # there is no doubt
        self._silent = 0  # ranks that fell silent of late
        self._before = 0  # ranks but for the one with the store before this one, as they were told there
        self._since = 0  # newcomers, less those that died
        self.cut_off = ""
        """Why this store gives up, if it does: it may be in the smaller part of a job whose network is cut."""

    def add(self, member: Member, *, hosts: bool = False) -> None:
        """A member is there. While the job comes together the first ones, and the first ones of other hosts, are asked
        to listen, so that all are told of them before they go on."""
        known = member in self._members
        self._members[member] = hosts or self._members.get(member, False)
        more = self._count(member)
        if self._begun and not known:
            member.send(Op.SUCCESSORS, self.told)
        if self._begun and more:
            self._refresh_soon()
        elif not self._begun and self._charge:
            self._ask([member])

    def grow(self) -> None:
        """Some that waited are of the job now. All are told before they go on with these: what were more than half
        before may be less."""
        grown = [member for member in self._members if self._count(member)]
        if grown and self._begun:
            self._tell()
            self._refresh_soon()

    def _count(self, member: Member, *, returns: bool = False) -> bool:
        """Whether a member is one of the job's processes now and was not. One that `returns` was told of before."""
        more = bool(member.ranks) and member not in self._ranks
        if more:
            self._ranks.add(member)
            self._since += not returns
        return more

    def take_back(self, member: Member, hosts: bool, places: bytes, told: bytes) -> None:
        """A member of the store before this one, which may be a successor already. It was `told` a list there, as all
        were, which stays until `release`: two that went by different lists might both serve."""
        self._members[member] = hosts
        self._fixed = self._fixed or not self._begun
        self.told = self.told or told
        if told and (self._before or not self._begun):  # not once those are forgotten
            self._before = max(self._before, U32.unpack_from(unpack(told)[0])[0])
        self._unsure.append(member)
        if places:
            self._places[member] = places
            self._sought.add(member)

    def confirm(self) -> None:
        """This store serves: those who came to it may rely on that. Others may have been told another list by now."""
        more = [member for member in self._unsure if self._count(member, returns=True)]
        self._firm.update(more)
        for member in self._unsure:
            member.send(Op.SUCCESSORS, b"" if self._fixed else self.told)
        self._unsure.clear()
        if self._charge and not self._begun:
            self._begun = True
            self._after(F64.pack(SILENCES), self._forget_before)
        if self._begun and more and self._places:
            self._refresh_soon()
        elif self._begun and more:  # if this store died now, perhaps nobody would take its place
            self._refresh()

    def release(self) -> None:
        """Nobody may serve by the list of the store before this one any more who would not hear of another."""
        if self._begun and self._fixed:
            self._fixed = False
            self._refresh()

    def drop(self, member: Member, silent: bool) -> None:
        """A member is gone. `silent`: all that is known is that nothing comes from it any more."""
        if self._members.pop(member, None) is None:
            return
        self._places.pop(member, None)
        self._sure_until = 0.0
        counted, sought = member in self._ranks, member in self._sought
        for some in (self._ranks, self._firm, self._sought):
            some.discard(member)
        self._refresh_soon()
        if not silent and (counted or (member in self._unsure and member.ranks)):
            self._since -= 1
        if silent and counted:
            self._silent += 1
            self._after(F64.pack(SILENCES), self._forget_silence)
        if silent and (counted or sought):
            self._found = self._found or sought
            away = self._silent + self._missing(self._found)
            if self._begun and away > len(self._firm):
                count = away + len(self._firm)
                self.cut_off = f"{away} of {count} processes fell silent, and may go on without this part"

    def doubts(self) -> bool:
        """Whether this store may give up soon: most fell silent, or cannot be reached now. Then others may decide what
        it is asked, and have done so already if it was stopped."""
        now = time.monotonic()
        if not self._begun or now < self._sure_until:  # many may decide at every step
            return False
        here = sum(map(self.reaches, self._firm))
        away = self._silent + len(self._firm) - here
        found = self._found or not all(map(self.reaches, self._sought))
        if (away or found) and away + self._missing(found) > here:
            return True
        self._sure_until = now + _SURE
        return False

    def _missing(self, found: bool) -> int:
        """How many have yet to come from the store before, and may go on elsewhere. Where no store before lives they
        find nobody but one of its list: one that came here and is away (`found`), or has yet to come itself."""
        if self._certain and not (found or self._fixed):
            return 0
        return max(0, self._least - self._silent - len(self._ranks))

    @property
    def _least(self) -> int:
        """How many ranks may be, whether they have come or not, for as long as that matters."""
        return self._before and self._before + self._since

    def _forget_silence(self) -> None:
        """If that one had gone on elsewhere, with more than half of the job, this store had given up by now."""
        self._silent -= 1
        self._refresh_soon()

    def _forget_before(self) -> None:
        """Who has not come by now does not."""
        self._before = 0
        self.release()
        self._refresh_soon()

    def begin(self, members: Iterable[Member]) -> None:
        """A group of these has come together, and with the first one the job."""
        self._firm.update(members)
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
        """Have as many successors as can be, and tell all members, also of their number. In it counts who fell silent
        of late, or may yet come: if it lives, members that go by a lower number may be no more than half with it."""
        self._due = False
        if self._fixed:
            return
        self._ask(self._members)
        if all(self._places.values()):
            self._tell()
        else:
            self._due = True
            self._after(F64.pack(_GATHER), self._tell)  # one may be stopped

    def _ask(self, members: Iterable[Member]) -> None:
        """Have some of these listen, until there are enough, and of enough hosts besides the store's own."""
        hosts = {*map(self.host_of, self._places)}
        for member in members:
            host = self.host_of(member)
            enough = host in hosts or (host and len(hosts - {""}) >= MOST)
            if self._members[member] or member in self._places or (enough and len(self._places) >= MOST):
                continue
            hosts.add(host)
            self._places[member] = b""
            member.send(Op.STAND, self._charge)

    def _tell(self) -> None:
        self._due = False
        others = [each for each in self._ranks if not self._members[each]]
        count = max(len(self._ranks) + self._silent, self._least) - (len(self._ranks) - len(others))
        elsewhere = count - sum(not self.host_of(each) for each in others)
        places = unpack(self.told)[1:] if self._fixed else self._choose()
        self.told = pack((b"".join(map(U32.pack, (count, elsewhere, self._silent))), *places))
        for member in self._members:
            member.send(Op.SUCCESSORS, self.told)

    def _choose(self) -> list[bytes]:
        """Of those that listen one on the store's own host, where newcomers look, and others on as many as there are.

        Who comes before another in a list does so in all later ones, also in those of later stores. So who has missed
        some of them, as one store died after another, goes to the same one as the others."""
        before = unpack(self.told)[1:]
        left = {place: self.host_of(member) for member, place in self._places.items() if place}
        left = dict(sorted(left.items(), key=lambda each: (*before, each[0]).index(each[0])))
        used, chosen = defaultdict[str, float](float, {"": -0.5}), list[bytes]()
        while left and len(chosen) < MOST:
            place = min(left, key=lambda each: used[left[each]])
            used[left.pop(place)] += 1.0
            chosen.append(place)
        return sorted(chosen, key=lambda each: (*before, each).index(each))
