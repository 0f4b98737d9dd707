"""What stuck ranks ask each other, and what follows from the answers.

A frame that is not the one that was due says only that something is wrong, and ranks that wait for each other do not
even get such a frame. So a rank in trouble asks all of them, out of band, what they have called and what they wait in.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import parser, spell_ranks

WINDOW = 64  # calls that an answer covers
_LOOKS = 2  # the first may have begun before the others came to rest
_MOST_TOLD = 8  # ranks, and messages, of which an error tells


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


class Wait(NamedTuple):
    """A step that nothing but rank `peer` keeps from moving.

    Of a send, `done` bytes of `total` were handed to the link, of a receive they came. `bytes` and `messages` went
    through this end of the link since it was made.
    """

    peer: int
    channel: int
    sends: bool
    done: int
    total: int
    bytes: int
    messages: int


class Edge(NamedTuple):
    """One direction of a link."""

    source: int
    destination: int
    channel: int


class Answer(NamedTuple):
    """What one rank tells about itself.

    `calls` are collectives by number, those that the question was about; the last may be one that is being set up.
    `inside` is the call that a thread of it waits in. `progress` changes whenever it gets any further. `alone` says
    that it has no other thread that could help it on, nor an RDMA link that is being made or mended. `state` is for
    people: how far what is in flight has come. `sent` are its last sends to the rank that asks, the latest first.
    `failed` is what went wrong there (the engine's kind, the rank to blame, for people) where nobody waits who would
    find it and tell. `idle` counts how often it looked at all that it waits for and nothing could move.

    `waits` is what it waits for, since `still` seconds. `connecting` are ranks to which it makes links. `handed` has
    bytes and messages that it ever handed to the edges that the question was about: peer, channel, bytes, messages.
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
    waits: tuple[Wait, ...] = ()
    still: float = 0.0
    connecting: tuple[int, ...] = ()
    handed: tuple[tuple[int, int, int, int], ...] = ()

    def encode(self) -> bytes:
        return json.dumps(self).encode()

    @classmethod
    @parser("a status report")
    def decode(cls, blob: bytes) -> Answer:
        """What `encode` made."""
        found = cls(*json.loads(blob))
        return found._replace(
            calls={int(number): Called(*call) for number, call in found.calls.items()},
            inside=found.inside and Called(*found.inside),
            sent=tuple(Called(*call) for call in found.sent),
            failed=found.failed and (found.failed[0], found.failed[1], found.failed[2]),
            waits=tuple(Wait(*wait) for wait in found.waits),
            connecting=tuple(found.connecting),
            handed=tuple((peer, channel, count, messages) for peer, channel, count, messages in found.handed),
        )


class LastWords(NamedTuple):
    """What is told of a rank that has left: how many collectives it has called; by question what each rank that asks is
    told, by its number."""

    now: int
    answers: Mapping[str, Mapping[str, Any]]

    def encode(self) -> bytes:
        return json.dumps(self).encode()

    @classmethod
    @parser("a rank's last words")
    def decode(cls, blob: bytes) -> LastWords:
        """What `encode` made."""
        now, answers = json.loads(blob)
        return cls(int(now), {str(question): dict(told) for question, told in answers.items()})


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


def find_absent(answers: Answers, left: Collection[int]) -> list[int]:
    """The ranks that left before a collective that another one has called: it cannot end."""
    begun = {rank: answer.now for rank, answer in answers.items() if answer is not None}
    return sorted(rank for rank in left if rank in begun and begun[rank] < max(begun.values()))


def find_deadlock(before: Answers, now: Answers) -> str:
    """Who waits in which call for ranks that wait as well, so that none of them can ever move; nothing unless the
    answers prove it.

    What is slow is not stuck: a message that one rank sends and another one receives is under way, and so are bytes
    that were sent and have not come where they are waited for. Ranks that all wait in one collective wait for the
    network. `doubts` says what to ask about first.
    """
    stuck = _find_hopeless(before, now, _handed(now), assume=False)
    inside = {rank: answer.inside for rank, answer in stuck.items() if answer.inside is not None}
    numbers = {answer.now for answer in stuck.values()}
    if len({call.what for call in inside.values()}) < 2 and len(numbers) < 2:
        return ""
    who = "all ranks" if len(inside) == len(now) else spell_ranks(inside)
    return f"{who} wait for each other: {_spell_sides(inside)}"


def doubts(before: Answers, now: Answers) -> list[Edge]:
    """The edges on which a message may be under way, where nothing else speaks against a deadlock."""
    stuck = _find_hopeless(before, now, {}, assume=True)
    waits = ((rank, wait) for rank, answer in stuck.items() for wait in answer.waits)
    return sorted({Edge(wait.peer, rank, wait.channel) for rank, wait in waits if not wait.sends})


def unsure(answers: Answers) -> list[Edge]:
    """The edges on which a message is waited for that may not have been sent."""
    sending = _sending(answers)
    told = ((rank, answer) for rank, answer in answers.items() if answer is not None)
    waits = ((Edge(wait.peer, rank, wait.channel), wait) for rank, answer in told for wait in answer.waits)
    return sorted({edge for edge, wait in waits if not wait.sends and wait.done == 0 and edge not in sending})


def _handed(answers: Answers) -> dict[Edge, tuple[int, int]]:
    """Bytes and messages that went into edges."""
    return {
        Edge(rank, peer, channel): (count, messages)
        for rank, answer in answers.items()
        if answer is not None
        for peer, channel, count, messages in answer.handed
    }


def _sending(answers: Answers) -> set[Edge]:
    """The edges on which a rank waits to send."""
    told = ((rank, answer) for rank, answer in answers.items() if answer is not None)
    return {Edge(rank, wait.peer, wait.channel) for rank, answer in told for wait in answer.waits if wait.sends}


def _find_hopeless(
    before: Answers, now: Answers, handed: Mapping[Edge, tuple[int, int]], *, assume: bool
) -> dict[int, Answer]:
    """The ranks that wait for nothing but each other, while nothing is under way between them.

    `handed` is what went into the edges; `assume`: where that is not known, everything has come.
    """
    stuck: dict[int, Answer] = {}
    for rank, answer in now.items():
        earlier = before.get(rank)
        if answer is not None and earlier is not None and _stands_still(earlier, answer):
            stuck[rank] = answer
    sending = _sending(now)
    hopeful, waiting = [rank for rank in now if rank not in stuck], defaultdict(set)
    for rank, answer in stuck.items():
        for wait in answer.waits:
            waiting[wait.peer].add(rank)
            if wait.sends:
                continue  # its other end says whether it is received
            edge, came = Edge(wait.peer, rank, wait.channel), (wait.bytes, wait.messages)
            if edge in sending or handed.get(edge, came if assume else None) != came:
                hopeful += [rank, wait.peer]
    while hopeful:
        rank = hopeful.pop()
        stuck.pop(rank, None)
        hopeful += waiting.pop(rank, ())  # who waits for one that may go on may go on
    return stuck


def _stands_still(before: Answer, now: Answer) -> bool:
    """Whether only messages of other ranks can make a rank go on, and none came for a while.

    A rank with other threads may yet be helped on by them; links that are being made need no other rank's call. One
    that has not looked at its links again is slow or prepares its call: what came meanwhile may help it on.
    """
    return (
        now.inside is not None
        and now.alone
        and bool(now.waits)
        and not now.connecting
        and (now.inside, now.progress, now.waits) == (before.inside, before.progress, before.waits)
        and now.idle >= before.idle + _LOOKS
    )


def find_stalls(answers: Answers) -> list[str]:
    """The messages that are under way and do not come, with bytes, those that begun first; for people."""
    handed, sending = _handed(answers), _sending(answers)
    found: list[tuple[bool, str]] = []
    for rank, answer in answers.items():
        for wait in () if answer is None else answer.waits:
            if wait.sends or answer is None:
                continue
            edge, came = Edge(wait.peer, rank, wait.channel), (wait.bytes, wait.messages)
            if wait.done == 0 and edge not in sending and handed.get(edge, came) == came:
                continue  # it was not sent
            none_for = f", none for {answer.still:.0f} s" if answer.still >= 1 else ""
            between = f"from rank {wait.peer} to rank {rank} came"
            found.append((wait.done == 0, f"{_spell_bytes(wait.done, wait.total)} {between}{none_for}"))
    return [text for _, text in sorted(found, key=lambda each: each[0])]


def behind(others: Answers, now: int) -> list[int]:
    """Who has not come to collective number `now`, in which this rank is."""
    answers = ((rank, answer) for rank, answer in others.items() if answer is not None)
    return [rank for rank, answer in answers if now not in answer.calls and answer.now < now]


def spell_missing(stalls: Sequence[str], others: Answers | None, late: Sequence[int]) -> list[str]:
    """What keeps a call from ending, for people: messages that do not move, and what `others` say; None: the store did
    not answer. `late` have not called it."""
    parts = [*stalls[:_MOST_TOLD]]
    if others is None:
        return [*parts, "the job's store did not answer (its process is stopped, cut off or busy)"]
    if silent := [rank for rank, answer in others.items() if answer is None]:
        parts.append(f"{spell_ranks(silent)} did not answer (stopped, cut off or busy)")
    if late:
        parts.append(f"{spell_ranks(late)} did not call it")
    told = [(rank, answer) for rank, answer in others.items() if answer is not None][:_MOST_TOLD]
    return parts + [
        f"rank {rank} is in {answer.inside}" + (f": {state}" if (state := _spell_state(answer)) else "")
        for rank, answer in told
        if answer.inside is not None
    ]


def _spell_state(answer: Answer) -> str:
    if answer.connecting:
        return f"it makes links to {spell_ranks(answer.connecting)}"
    return answer.state


def _spell_bytes(done: int, total: int) -> str:
    """``8.4 of 24 MB``."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if total >= size:
            some, whole = (f"{count / size:.1f}".removesuffix(".0") for count in (done, total))
            return f"{some} of {whole} {unit}"
    return f"{done} of {total} bytes"


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
