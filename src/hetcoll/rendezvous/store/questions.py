"""Questions to many processes at once: of a rank to its group, and of who looks on (`hetcoll top`) to all of a job.

Who asks never makes the store, or anyone, wait: it gets what has come by its deadline, or as soon as all have answered
that can.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ..protocol.keys import Member
from ..protocol.wire import NOBODY, U32, U64, Op, pack
from .group import Group


@dataclass(slots=True)
class _Question:
    """`answers` are empty, or 1 and the bytes; `waiting` says which of them is whose that has yet to come. `spell`
    makes the reply of them. `group`: it is to that one. `bodies`: what members are asked with, by group."""

    asker: Member
    request: int
    waiting: dict[Member, int]
    answers: list[bytes]
    spell: Callable[[Iterable[bytes]], bytes]
    group: Group | None = None
    bodies: dict[bytes, bytes] = field(default_factory=dict)


class Questions:
    """All of a store. `find_current` gives a member's group and rank; `groups` are all groups; `after` calls a function
    once so many seconds (a packed double) are over; `told_successors` gives the last SUCCESSORS."""

    def __init__(
        self,
        find_current: Callable[[Member, bytes], tuple[Group, int]],
        groups: Mapping[bytes, Group],
        after: Callable[[bytes, Callable[[], None]], None],
        told_successors: Callable[[], bytes],
    ) -> None:
        self._find_current, self._groups, self._after = find_current, groups, after
        self._told_successors = told_successors
        self._open: dict[int, _Question] = {}
        # Others than those of the store before this one, whose questions may be answered here.
        self._numbers = itertools.count(int.from_bytes(os.urandom(7)))
        self._onlookers: set[Member] = set()

    def looks_on(self, member: Member) -> bool:
        """Whether `member` has asked and is no rank: nobody who ends has to wait for it."""
        return member in self._onlookers and not member.ranks

    def ask_group(self, member: Member, request: int, name: bytes, blob: bytes, seconds8: bytes) -> None:
        """QUERY: ask each rank of a group; a field a rank."""
        group, rank = self._find_current(member, name)
        waiting = {other: position for position, other in group.members.items()}
        answers = [b"\2" + group.words[other] if other in group.words else b"" for other in range(group.size)]
        question = _Question(member, request, waiting, answers, pack, group)
        self._ask(question, [(other, name) for other in waiting], U32.pack(rank), blob, seconds8)

    def ask_all(self, member: Member, request: int, blob: bytes, seconds8: bytes) -> None:
        """SURVEY: ask each process of the job once, as a rank of the first group that it is in."""
        self._onlookers.add(member)
        found: dict[Member, tuple[bytes, bytes]] = {}
        for name, group in self._groups.items():
            for rank, other in group.members.items():
                found.setdefault(other, (name, U32.pack(rank)))

        def spell(answers: Iterable[bytes]) -> bytes:
            rows = (pack((*who, answer)) for who, answer in zip(found.values(), answers, strict=True))
            return pack((self._told_successors(), *rows))

        waiting = {other: position for position, other in enumerate(found)}
        question = _Question(member, request, waiting, [b""] * len(found), spell)
        asked = [(other, name) for other, (name, _) in found.items()]
        self._ask(question, asked, U32.pack(NOBODY), blob, seconds8)

    def _ask(
        self, question: _Question, asked: list[tuple[Member, bytes]], asker: bytes, blob: bytes, seconds8: bytes
    ) -> None:
        number = next(self._numbers)
        self._after(seconds8, lambda: self._close(number))
        self._open[number] = question
        bodies = question.bodies  # the same object for all that can be reached by one frame of a relay's
        for other, name in asked:
            if name not in bodies:
                bodies[name] = pack((name, asker, blob, U64.pack(number)))
            other.send(Op.ASK, bodies[name])
        if not asked:
            self._close(number)

    def answer(self, member: Member, request: int, number8: bytes, blob: bytes) -> None:
        """What a member says."""
        (number,) = U64.unpack(number8)
        question = self._open.get(number)
        position = None if question is None else question.waiting.pop(member, None)
        if question is None or position is None:
            return
        question.answers[position] = b"\1" + blob
        if not question.waiting:
            self._close(number)

    def replace(self, absent: Member, member: Member, name: bytes) -> None:
        """`member` comes, for which `absent` stood in in the group `name`: what that was asked it is asked."""
        for question in self._open.values():
            if (position := question.waiting.pop(absent, None)) is not None:
                question.waiting[member] = position
                member.send(Op.ASK, question.bodies[name])

    def part(self, group: Group | None, member: Member) -> None:
        """`member` is no longer of `group`: it does not answer for it, and asks it no more. None: it is gone."""
        for number, question in list(self._open.items()):
            if group is None or question.group is group:
                question.waiting.pop(member, None)
                if not question.waiting or question.asker is member:
                    self._close(number)

    def drop(self, member: Member) -> None:
        """`member` is gone."""
        self._onlookers.discard(member)
        self.part(None, member)

    def _close(self, number: int) -> None:
        question = self._open.pop(number, None)
        if question is not None:
            question.asker.send(Op.REPLY, question.spell(question.answers), question.request)
