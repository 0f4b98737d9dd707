"""What the ranks of one communicator ask each other out of band: what each is in, and by name what else some know."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import HetcollError
from ..rendezvous.control import ON_ITS_WAY
from .desync_report import Answer, Answers, Edge, LastWords
from .stall_detector import PATIENCE

if TYPE_CHECKING:
    from ..rendezvous.protocol.news import Query
    from ..rendezvous.session import Session
    from .status_report import StatusReporter

_SECONDS = 2.0


class Questions:
    """Those of rank `rank`, and its answers to the others'."""

    def __init__(self, session: Session, group: bytes, rank: int) -> None:
        self._session, self._group, self._rank = session, group, rank
        self.asked = -PATIENCE
        """When another rank asked last what this one is in (time.monotonic)."""
        self.answers: dict[str, Callable[[int], Any]] = {}
        """Of questions that have names: what to answer which rank, as JSON."""
        self._farewell: dict[str, dict[str, Any]] = {}  # see `leave_answers`

    def answer(self, question: Query, reporter: StatusReporter | None) -> bytes:
        """On the control connection's thread. Without `reporter` the communicator is still being made."""
        asked = json.loads(question.blob)
        if isinstance(asked, str):
            answer = None if reporter is None else self.answers.get(asked)
            return json.dumps(None if answer is None else answer(question.rank)).encode()
        if question.rank != self._rank:
            self.asked = time.monotonic()
        if reporter is None:
            return Answer(0, {}).encode()
        since, edges = asked
        return reporter.report(since, question.rank, (Edge(*edge) for edge in edges)).encode()

    def ask(self, question: str, seconds: float) -> dict[int, Any]:
        """What the ranks' `answers` to it are, and of those that have left what they wanted told; None from one that
        gave none in time."""
        answers, words = self._session.control.query(self._group, json.dumps(question).encode(), seconds)
        told = {rank: None if blob is None else json.loads(blob) for rank, blob in answers.items()}
        left = {rank: LastWords.decode(blob).answers.get(question, {}) for rank, blob in words.items()}
        return told | {rank: each.get(str(self._rank)) for rank, each in left.items()}

    def survey(
        self, since: int, edges: Iterable[Edge] = (), seconds: float = _SECONDS, deadline: float = math.inf
    ) -> Answers:
        """What every rank is in, and has called since that collective; None from one that is stopped or cut off, and
        has had `seconds`. Empty when the control channel is gone, or `deadline` too near.

        `edges`: of which their sources are to tell what they handed to them.
        """
        seconds = min(seconds, deadline - time.monotonic() - ON_ITS_WAY)
        if seconds <= 0:
            return {}
        try:
            blob = json.dumps((since, list(edges))).encode()
            answers, words = self._session.control.query(self._group, blob, seconds)
            told = {rank: Answer.decode(blob) if blob else None for rank, blob in answers.items()}
            return told | {rank: Answer(LastWords.decode(blob).now, {}) for rank, blob in words.items()}
        except HetcollError:
            return {}

    def leave_answers(self, question: str, answers: Sequence[Any]) -> None:
        """For when this rank has left: what each rank is told then, where that is not 0 or None."""
        self._farewell[question] = {str(rank): each for rank, each in enumerate(answers) if each}

    def last_words(self, now: int) -> bytes:
        """For the goodbye of a rank that has called so many collectives."""
        return LastWords(now, self._farewell).encode()
