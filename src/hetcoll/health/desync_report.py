"""What stuck ranks ask each other, and what follows from the answers.

A frame that is not the one that was due says only that something is wrong, and ranks that wait for each other do not
even get such a frame. So a rank in trouble asks all of them, out of band, what they have called and what they wait in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from ..errors import spell_ranks

WINDOW = 64  # calls that an answer covers
_LOOKS = 2  # the first may have begun before the others came to rest


class Called(NamedTuple):
    """A call of the communicator, and where in the user's program (``file.py:12``) it was made; "" if not known.

    `exactly` tells the place of this very call from that of the first one with the same arguments.
    """

    what: str
    site: str = ""
    exactly: bool = True

    def __str__(self) -> str:
        if not self.site:
            return self.what
        return f"{self.what} {'at' if self.exactly else 'as first called at'} {self.site}"


class Answer(NamedTuple):
    """What one rank tells about itself.

    `calls` are collectives by number, those that the question was about; the last may be one that is being set up.
    `inside` is the call that a thread of it waits in. `progress` changes whenever it gets any further. `alone` says
    that it has no other thread that could help it on, nor an RDMA link that is being made or mended. `state` is for
    people: how far what is in flight has come. `sent` are its last sends to the rank that asks, the latest first.
    `failed` is what went wrong there (the engine's kind, the rank to blame, for people) where nobody waits who would
    find it and tell. `idle` counts how often it looked at all that it waits for and nothing could move.
    """

    now: int
    calls: Mapping[int, Called]
    inside: Called | None = None
    progress: str = ""
    alone: bool = False
    state: str = ""
    sent: tuple[Called, ...] = ()
    failed: tuple[int, int, str] | None = None
    idle: int = 0

    def encode(self) -> bytes:
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, blob: bytes) -> Answer:
        """What `encode` made."""
        now, calls, inside, progress, alone, state, sent, failed, idle = json.loads(blob)
        return cls(
            now, {int(number): Called(*call) for number, call in calls.items()}, inside and Called(*inside), progress,
            alone, state, tuple(Called(*call) for call in sent), failed and tuple(failed),
            idle,
        )  # fmt: skip


Answers = Mapping[int, Answer | None]
"""By rank; None from one that gave no answer in time."""


def find_mismatch(answers: Answers) -> str:
    """The first collective that ranks called differently, and who called what where; nothing if they agree."""
    known = {rank: answer for rank, answer in answers.items() if answer is not None}
    for number in sorted({number for answer in known.values() for number in answer.calls}):
        calls = {rank: answer.calls[number] for rank, answer in known.items() if number in answer.calls}
        if len({call.what for call in calls.values()}) > 1:
            return f"operation #{number}: {_spell_sides(calls)}"
    return ""


def find_failure(answers: Answers) -> tuple[int, int, str] | None:
    """What went wrong on another rank, told as by that rank; None where nothing did."""
    for rank, answer in answers.items():
        if answer is not None and answer.failed is not None:
            kind, peer, text = answer.failed
            return kind, peer, f"rank {rank}: {text}"
    return None


def find_deadlock(before: Answers, now: Answers) -> str:
    """Who waits in which call, when all ranks wait and none has moved since `before`; nothing if that is not so.

    Ranks with other threads may yet be helped on by them. Ranks that all wait in one collective wait for the network.
    One that has not looked at its links again is slow or prepares its call: what came meanwhile may help it on.
    """
    for rank, answer in now.items():
        earlier = before.get(rank)
        if answer is None or earlier is None or answer.inside is None or earlier.inside is None:
            return ""
        if not answer.alone or answer.progress != earlier.progress or answer.inside != earlier.inside:
            return ""
        if answer.idle < earlier.idle + _LOOKS:
            return ""
    inside = {rank: answer.inside for rank, answer in now.items() if answer is not None and answer.inside is not None}
    numbers = {answer.now for answer in now.values() if answer is not None}
    if len({call.what for call in inside.values()}) < 2 and len(numbers) < 2:
        return ""
    return f"all ranks wait for each other: {_spell_sides(inside)}"


def find_wrong_message(answers: Answers, receiver: int, sender: int, wanted: Called) -> str:
    """Both sides of a message that was not what its receiver wanted."""
    answer = answers.get(sender)
    sides = {receiver: wanted}
    if answer is not None:
        received = wanted.what.rpartition("recv")[2]
        payload = received[: received.find(")") + 1]  # the type and the count
        other = next((call for call in answer.sent if payload not in call.what), None)
        if other is not None:
            sides[sender] = other
    return _spell_sides(sides)


def _spell_sides(calls: Mapping[int, Called]) -> str:
    sides: dict[str, list[int]] = {}
    for rank, call in sorted(calls.items()):
        sides.setdefault(str(call), []).append(rank)
    return "; ".join(f"{spell_ranks(ranks)} called {call}" for call, ranks in sides.items())
