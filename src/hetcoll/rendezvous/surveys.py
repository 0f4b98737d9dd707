"""Questions of who is no rank to all processes of a job: of `hetcoll top`, which looks on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .group import Group
from .keys import Member
from .wire import NOBODY, U32, U64, Op, pack

FIRST = 1 << 63  # the number of the first survey: those of groups' questions lie below


@dataclass(slots=True)
class _Survey:
    """Who has yet to answer, and in what follows `asked`, the answers: empty, or 1 and the bytes."""

    asker: Member
    request: int
    asked: list[tuple[Member, bytes, int]]  # a member, a group that it is in, and its rank there
    answers: list[bytes]
    waiting: dict[int, int]  # positions in `asked`, by the id of the member


class Surveys:
    """All of a store. `groups` are its groups; `after` calls a function once so many seconds (a packed double) are
    over. An observer never makes the store, or anyone, wait: it gets what has come by its deadline."""

    def __init__(self, groups: Mapping[bytes, Group], after: Callable[[bytes, Callable[[], None]], None]) -> None:
        self._groups, self._after = groups, after
        self._open: dict[int, _Survey] = {}
        self._numbers = itertools.count(FIRST)
        self._askers: dict[int, Member] = {}

    def looks_on(self, member: Member) -> bool:
        """Whether `member` has asked and is no rank: nobody who ends has to wait for it."""
        return id(member) in self._askers and not member.ranks

    def ask(self, member: Member, request: int, blob: bytes, seconds8: bytes) -> None:
        """SURVEY: ask each process of the job once, as a rank of the first group that it is in."""
        found: dict[int, tuple[Member, bytes, int]] = {}
        for name, group in self._groups.items():
            for rank, each in group.members.items():
                found.setdefault(id(each), (each, name, rank))
        number = next(self._numbers)
        self._after(seconds8, lambda: self._close(number))
        self._askers[id(member)] = member
        asked = list(found.values())
        positions = {id(each): position for position, (each, _, _) in enumerate(asked)}
        self._open[number] = _Survey(member, request, asked, [b""] * len(asked), positions)
        bodies: dict[bytes, bytes] = {}  # the same object for all that can be reached by one frame of a relay's
        for each, name, _ in asked:
            if name not in bodies:
                bodies[name] = pack((name, U32.pack(NOBODY), blob, U64.pack(number)))
            each.send(Op.ASK, bodies[name])
        if not asked:
            self._close(number)

    def answer(self, member: Member, number: int, blob: bytes) -> None:
        """What a member says to the survey of this number."""
        survey = self._open.get(number)
        position = None if survey is None else survey.waiting.pop(id(member), None)
        if survey is None or position is None:
            return
        survey.answers[position] = b"\1" + blob
        if not survey.waiting:
            self._close(number)

    def drop(self, member: Member) -> None:
        """`member` is gone: it answers no more, and asks no more."""
        self._askers.pop(id(member), None)
        for number, survey in list(self._open.items()):
            survey.waiting.pop(id(member), None)
            if survey.asker is member:
                del self._open[number]
            elif not survey.waiting:
                self._close(number)

    def _close(self, number: int) -> None:
        survey = self._open.pop(number, None)
        if survey is None:
            return
        rows = zip(survey.asked, survey.answers, strict=True)
        body = pack(pack((name, U32.pack(rank), answer)) for (_, name, rank), answer in rows)
        survey.asker.send(Op.REPLY, body, survey.request)
