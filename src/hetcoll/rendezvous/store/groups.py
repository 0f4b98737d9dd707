"""What the store does, without its sockets: groups of ranks, exchanges and verdicts; keys are in `keys`, questions
in `questions`, what ranks decide together in `rolls`.

A member is one process; it may be a rank of several groups. Everything a member waits for has a deadline, and is
answered sooner when a rank it waits for is gone. A group is forgotten when all of its ranks have come and gone, or when
those that came have gone and one of them is back: then it begins anew, for ranks that close and start again.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import struct
import time
from collections.abc import Callable
from typing import NoReturn

from ...errors import spell_gone, spell_ranks
from ..protocol.exchanges import Exchange
from ..protocol.keys import Keys, Member, RefusedError
from ..protocol.wire import F64, MAX_ID, U32, WORLD, Frame, Op, Status, pack
from .group import Group
from .questions import Questions
from .returns import Claim, Returns
from .rolls import DOUBT, Rolls
from .successors import Successors

log = logging.getLogger("hetcoll.groups")

MAX_GROUPS = 1 << 16
MAX_SIZE = 1 << 20
MAX_SECONDS = 7 * 86400.0
_MOST_WORDS = 1 << 20  # bytes that are kept of a rank that left: some for each rank of the largest jobs
_GATHER = 0.02  # seconds in which goodbyes are gathered, and told together
_GATHER_A_RANK = 50e-6  # seconds more for each rank: telling all of them takes longer, too


class Groups:
    """The store's state. Not thread-safe: one thread calls it. `clock` is `time.monotonic`.

    `launched`: the process with the store is rank 0 of WORLD, and no other can be. `reserve` is told how many ranks
    WORLD has when the first of them comes, and says why they are too many, or nothing. `charge` is what successors are
    told, nothing: there are to be none. `succeeds`: this store takes the place of another.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        launched: bool = False,
        reserve: Callable[[int], str] = lambda _: "",
        charge: bytes = b"",
        succeeds: Claim | None = None,
    ) -> None:
        self._clock, self._reserve = clock, reserve
        self._launched = launched
        self._groups: dict[bytes, Group] = {}
        self._returning: dict[bytes, list[tuple[Member, int, tuple[bytes, ...]]]] = {}  # JOINs that wait for that
        self._numbers = itertools.count(1)
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._keys = Keys(self._after)
        self.successors = successors = Successors(charge, self._after, certain=succeeds is None or succeeds.certain)
        self.rolls = Rolls(self._of, self._create, self._after, clock, successors.grow, successors.doubts)
        self._questions = Questions(self.rolls.find_current, self._groups, self._after, lambda: successors.told)
        self.returns = Returns(
            self._find, self._part, self._catch_up, self._questions.replace, self.handle, self._begin_anew, self._after,
            succeeds,
        )  # fmt: skip
        self._handlers: dict[int, tuple[int, Callable[..., None]]] = {
            Op.JOIN: (5, self._join),
            Op.LEAVE: (2, self._leave),
            Op.EXCHANGE: (6, self._exchange),
            Op.LOOK: (3, self._look),
            Op.POST: (3, self._post),
            Op.QUERY: (3, self._questions.ask_group),
            Op.ANSWER: (2, self._questions.answer),
            Op.PUT: (2, self._keys.put),
            Op.GET: (2, self._keys.get),
            Op.SHRINK: (3, self.rolls.shrink),
            Op.AGREE: (4, self.rolls.agree),
            Op.GROW: (5, self.rolls.grow),
            Op.ADMIT: (1, self._admit),
            Op.STANDING: (2, self.successors.stand),
            Op.RETURN: (4, self._return),
            Op.SURVEY: (2, self._questions.ask_all),
        }

    # What the server calls.

    def handle(self, member: Member, frame: Frame) -> None:
        """Serve one frame. A frame that makes no sense is refused, and does no harm."""
        if self.alone or self.returns.holds(member, frame):
            return
        try:
            fields = frame.fields
            arity, handler = self._handlers.get(frame.op, (None, None))
            if handler is None or len(fields) != arity:
                raise RefusedError(f"a frame of operation {frame.op} with {len(fields)} fields: wanted {arity}")
            if len(fields[0]) > MAX_ID:
                raise RefusedError(f"a name of {len(fields[0])} bytes: wanted at most {MAX_ID}")
            if frame.status == Status.AGAIN and Returns.answer_again(self._groups.get(fields[0]), member, frame):
                return
            handler(member, frame.request, *fields)
        except (RefusedError, struct.error) as error:
            member.send(Op.REPLY, str(error).encode(), frame.request, Status.REFUSED)

    @property
    def alone(self) -> str:
        """Why this store gives up, if it does. It decides nothing from then on: others may decide otherwise."""
        return self.returns.alone or self.successors.cut_off

    def drop(self, member: Member, reason: str, *, silent: bool = False) -> None:
        """`member` is gone: lost for `reason`, or in order where that is empty. `silent`: it may live elsewhere."""
        self._keys.drop(member)
        self.rolls.drop(member)
        self.successors.drop(member, silent)
        self.returns.drop(member, silent)
        if self.alone:
            return
        self._questions.drop(member)
        for returning in self._returning.values():
            returning[:] = [each for each in returning if each[0] is not member]
        for name in list(member.ranks):
            self._part(member, name, reason)

    def keeps(self, member: Member) -> bool:
        """Whether the store is to go on for `member`: not for who waits to be taken in or looks on."""
        return not (self.rolls.awaits(member) or self._questions.looks_on(member))

    def tick(self) -> float | None:
        """Do what is due; give the seconds until the next deadline, or `None`."""
        now = self._clock()
        while self._timers and self._timers[0][0] <= now and not self.alone:
            heapq.heappop(self._timers)[2]()
        return self._timers[0][0] - now if self._timers else None

    # Membership.

    def _join(self, member: Member, request: int, name: bytes, *rest: bytes) -> None:
        rank4, size4, hosts, seconds8 = rest
        (rank,), (size,) = U32.unpack(rank4), U32.unpack(size4)
        if not (1 <= size <= MAX_SIZE and rank < size):
            raise RefusedError(f"rank {rank} of {size}: wanted a rank below the size, and a size from 1 to {MAX_SIZE}")
        if (group := self._groups.get(name)) is None:
            if name == WORLD and (problem := self._reserve(size)):
                raise RefusedError(f"the job's {size} ranks do not fit the process that hosts its store: {problem}")
            group = self._create(name, size)
        if group.gone.get(rank) == "":
            self._returning.setdefault(name, []).append((member, request, rest))
            self._after(seconds8, lambda: self._expire_return(name, member, request, rank))
            self._begin_anew(name)
            return
        if group.reserved.get(rank) is member:
            del group.reserved[rank]
        else:
            self._check_joining(group, name, member, rank, size, hosts == b"\1")
        if hosts == b"\1":
            group.host = rank
            self._push(group, Op.HOST, name, rank4)
        self._tell_leaving(group, name)
        group.members[rank] = member
        member.ranks[name] = rank
        self.successors.add(member, hosts=hosts == b"\1")
        member.send(Op.REPLY, pack([U32.pack(group.host)]), request)
        self._catch_up(member, group)

    @staticmethod
    def _catch_up(member: Member, group: Group) -> None:
        """Tell a member what the others of a group were told."""
        left = [gone for gone, reason in group.gone.items() if not reason]
        if left:
            member.send(Op.LEFT, pack([group.name, *map(U32.pack, left)]))
        for gone, reason in group.gone.items():
            if reason:
                member.send(Op.LOST, group.spell_loss(gone))
        if group.verdict is not None:
            member.send(Op.VERDICT, group.verdict)

    def _admit(self, member: Member, request: int, seconds8: bytes) -> None:
        self.successors.add(member)
        self.rolls.admit(member, request, seconds8)

    def _return(self, member: Member, request: int, hosts: bytes, places: bytes, told: bytes, pasts: bytes) -> None:
        """A member of the store before this one."""
        self.successors.take_back(member, hosts == b"\1", places, told)
        self.returns.take(member, places, pasts)
        for name, rank in member.ranks.items() if hosts == b"\1" else ():
            self._groups[name].host = rank
            self._push(self._groups[name], Op.HOST, name, U32.pack(rank))
        self._serve_if_sure()

    def hear_of_death(self, token: bytes) -> None:
        """Of a process that might serve in this one's place: see `Returns.watch`."""
        self.returns.hear_of_death(token)
        self._serve_if_sure()

    def _serve_if_sure(self) -> None:
        if self.returns.sure:
            self.successors.confirm()
            self.returns.serve()
        if self.returns.settled:
            self.successors.release()

    def _find(self, name: bytes, size: int, *, new: bool) -> Group | None:
        return self._groups.get(name) or (self._create(name, size) if new else None)

    def _create(self, name: bytes, size: int) -> Group:
        if len(self._groups) >= MAX_GROUPS:
            raise RefusedError(f"{len(self._groups)} groups are open: wanted fewer than {MAX_GROUPS}")
        group = self._groups[name] = Group(name, size)
        return group

    def _check_joining(self, group: Group, name: bytes, member: Member, rank: int, size: int, hosts: bool) -> None:
        if group.mixed:
            raise RefusedError(group.mixed)
        if group.size != size:
            others = spell_ranks(group.members) if group.members else "an earlier rank"
            text = f"rank {rank} ({member.name}) says that the job has {size} ranks; {others} said {group.size}"
            self._refuse_mixing(group, text)
        if rank in group.members:
            other = group.members[rank].name
            text = f"two processes say that they are rank {rank}: {other} came first, then {member.name}"
            self._refuse_mixing(group, text)
        if self._launched and name == WORLD and rank == 0 and not hosts:
            text = f"two processes say that they are rank 0: the one that hosts the job's store, then {member.name}"
            self._refuse_mixing(group, text)
        if rank in group.gone:
            what = "and cannot come back to this group: a newcomer enters by join=True (HETCOLL_JOIN=1)"
            self.rolls.refuse(f"{spell_gone(rank, group.gone[rank])}, {what}")
        if name in member.ranks:
            raise RefusedError(f"{member.name} is rank {member.ranks[name]} of this group, and cannot be {rank} too")

    def _refuse_mixing(self, group: Group, text: str) -> NoReturn:
        """Two jobs seem to have come to this store. Nobody can tell their ranks apart, so a group that is still forming
        fails for all. One that stands goes on: whoever comes to it later does no harm by being refused."""
        text += "; are two jobs started with the same MASTER_ADDR and MASTER_PORT, or one rank twice?"
        if group.formed:
            log.warning("%s The job goes on as it is.", text)
            raise RefusedError(text)
        group.mixed = text
        for exchange in group.exchanges.values():
            exchange.answer(text.encode(), Status.REFUSED)
        group.exchanges.clear()
        raise RefusedError(text)

    def _begin_anew(self, name: bytes) -> None:
        """Forget a group that nobody is in any more; who waited for that enters the new one."""
        if (group := self._groups.get(name)) is None or group.members or self.returns.awaits(name):
            return
        if not (group.mixed or len(group.gone) >= group.size or self._returning.get(name)):
            return
        del self._groups[name]
        for member, request, rest in self._returning.pop(name, []):
            try:
                self._join(member, request, name, *rest)
            except RefusedError as error:
                member.send(Op.REPLY, str(error).encode(), request, Status.REFUSED)

    def _expire_return(self, name: bytes, member: Member, request: int, rank: int) -> None:
        returning = self._returning.get(name, [])
        left = [each for each in returning if each[0] is not member or each[1] != request]
        if len(left) < len(returning):
            returning[:] = left
            text = f"rank {rank} left and is back, but {spell_ranks(self._groups[name].members)} did not leave"
            member.send(Op.REPLY, text.encode(), request, Status.TIMEOUT)

    def keep_words(self, member: Member, fields: list[bytes]) -> None:
        """The last words of a member that leaves a group: the group's name and these, if any."""
        if len(fields) == 2 and fields[0] in member.ranks and 0 < len(fields[1]) <= _MOST_WORDS:
            self._groups[fields[0]].words[member.ranks[fields[0]]] = fields[1]

    def _leave(self, member: Member, request: int, name: bytes, words: bytes) -> None:
        self._of(member, name)
        self.keep_words(member, [name, words])
        self._part(member, name, "")
        member.send(Op.REPLY, b"", request)

    def _part(self, member: Member, name: bytes, reason: str) -> None:
        group, rank = self._groups[name], member.ranks.pop(name)
        del group.members[rank]
        group.gone[rank] = reason
        if reason:
            self._tell_leaving(group, name)  # in the order in which they went
            body = group.spell_loss(rank)
            for other in group.members.values():
                other.send(Op.LOST, body)
        else:
            self._gather_leaving(group, name, rank)
        for tag, exchange in list(group.exchanges.items()):
            _, request = exchange.waiting.pop(rank, (member, 0))
            if request:  # of another of its threads
                text = f"rank {rank} left the group while it exchanged {tag!r}"
                member.send(Op.REPLY, text.encode(), request, Status.REFUSED)
            if reason or rank not in exchange.rows:
                self._fail_exchange(group, tag, rank)
        self.rolls.part(group, rank, member)
        self._questions.part(group, member)
        self._begin_anew(name)

    def _gather_leaving(self, group: Group, name: bytes, rank: int) -> None:
        """A job ends with goodbyes of all ranks at about the same time: those who are still there hear of many at once,
        and most of none. Telling each of every other one takes n² messages."""
        if not group.leaving:
            seconds = _GATHER + _GATHER_A_RANK * group.size
            self._after(F64.pack(seconds), lambda: self._tell_leaving(group, name))
        group.leaving.append(rank)

    def _tell_leaving(self, group: Group, name: bytes) -> None:
        if not group.leaving:
            return
        body = pack([name, *map(U32.pack, group.leaving)])
        group.leaving.clear()
        for member in group.members.values():
            member.send(Op.LEFT, body)

    def _of(self, member: Member, name: bytes) -> tuple[Group, int]:
        if name not in member.ranks:
            raise RefusedError(f"{member.name} is not a member of the group {name!r}")
        return self._groups[name], member.ranks[name]

    def _push(self, group: Group, op: Op, *fields: bytes) -> None:
        body = pack(fields)
        for member in group.members.values():
            member.send(op, body)

    def _after(self, seconds8: bytes, action: Callable[[], None]) -> None:
        (seconds,) = F64.unpack(seconds8)
        if not math.isfinite(seconds):
            raise RefusedError(f"a timeout of {seconds} seconds: wanted a finite one")
        due = self._clock() + min(max(seconds, 0.0), MAX_SECONDS)
        heapq.heappush(self._timers, (due, next(self._numbers), action))

    # Exchanges.

    def _exchange(self, member: Member, request: int, name: bytes, tag: bytes, *rest: bytes) -> None:
        group, rank = self.rolls.find_current(member, name)
        if len(tag) > MAX_ID:
            raise RefusedError(f"a tag of {len(tag)} bytes: wanted at most {MAX_ID}")
        exchange = group.exchanges.setdefault(tag, Exchange())
        if group.mixed:
            raise RefusedError(group.mixed)
        if rank in exchange.waiting:
            raise RefusedError(f"rank {rank} exchanges {tag!r} twice at a time")
        if exchange.failed:
            member.send(Op.REPLY, exchange.failed, request, Status.TIMEOUT)
            return
        shared, alike, own, seconds8 = rest
        exchange.add(tag, rank, member, request, (shared, alike, own))
        if len(exchange.rows) == group.size:
            self._finish_exchange(group, tag, exchange)
            return
        gone = [other for other in group.gone if other not in exchange.rows]
        if gone:
            self._fail_exchange(group, tag, gone[0])
            return
        self._after(seconds8, lambda: self._expire_exchange(group, tag, exchange))

    def _finish_exchange(self, group: Group, tag: bytes, exchange: Exchange) -> None:
        """All have told: answer, unless it failed meanwhile."""
        if self.successors.doubts():
            self._after(DOUBT, lambda: self._finish_exchange(group, tag, exchange))
        elif group.exchanges.get(tag) is exchange:
            group.formed = True
            self.successors.begin(group.members.values())
            if any(exchange.own.values()):
                group.own[tag] = exchange.own
            group.exchanges.pop(tag).finish(group.size)

    def _look(self, member: Member, request: int, name: bytes, tag: bytes, ranks: bytes) -> None:
        group, _ = self._of(member, name)
        told = group.own.get(tag, {})
        wanted = [rank for (rank,) in U32.iter_unpack(ranks)]
        unknown = [rank for rank in wanted if rank not in told]
        if lost := [rank for rank in unknown if rank in group.gone]:  # with the store that it told
            member.send(Op.REPLY, group.spell_needed(lost[0], tag), request, Status.LOST)
            return
        if unknown:
            raise RefusedError(f"{spell_ranks(unknown)} told nothing of its own in {tag!r}")
        member.send(Op.REPLY, pack(told[rank] for rank in wanted), request)

    def _fail_exchange(self, group: Group, tag: bytes, rank: int) -> None:
        group.exchanges.pop(tag).answer(group.spell_needed(rank, tag), Status.LOST)

    def _expire_exchange(self, group: Group, tag: bytes, exchange: Exchange) -> None:
        if group.exchanges.get(tag) is not exchange or exchange.failed or len(exchange.rows) == group.size:
            return
        late = [rank for rank in range(group.size) if rank not in exchange.rows]
        absent = [rank for rank in late if rank not in group.members]
        text = f"{spell_ranks(late)} never came to {tag.decode(errors='replace')!r}"
        if absent:
            text += f"; {spell_ranks(absent)} of {group.size} never joined the job"
        exchange.failed = text.encode()
        exchange.answer(exchange.failed, Status.TIMEOUT)

    # Verdicts.

    def _post(self, member: Member, request: int, name: bytes, kind: bytes, blob: bytes) -> None:
        group, rank = self.rolls.find_current(member, name)
        if group.verdict is None:
            group.verdict = pack([name, kind, blob, U32.pack(rank)])
            for other in group.members.values():
                other.send(Op.VERDICT, group.verdict)
        member.send(Op.REPLY, group.verdict, request)
