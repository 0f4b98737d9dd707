"""What watches a call that does not end."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .desync_report import Answers

PATIENCE = 2.0
"""Seconds after which a stuck call asks what the other ranks do."""
_STAGGER = 0.5  # seconds between the first and the last of many stuck ranks to ask
_LONGEST_PAUSE = 30.0


class Asker(Protocol):
    """What a `StallDetector` needs of the communicator's `Diagnosis`: to ask all ranks, and to tell the user."""

    def look(self, before: Answers, deadline: float) -> Answers: ...

    def warn(self, seconds: float, answers: Answers) -> None: ...


class StallDetector:
    """Over one call that does not end: asks the others what they do after 2, 4, 8, ... seconds of waiting.

    Many ranks get stuck at once. They begin to ask one after another, and who was asked a moment ago does not ask.
    After `warn_after` seconds one of them, the first that waits, logs a warning, once a call.
    """

    def __init__(self, diagnosis: Asker, turn: float, waited: float, deadline: float, warn_after: float) -> None:
        self._diagnosis, self._deadline = diagnosis, deadline
        self._warn_at = time.monotonic() - waited + warn_after + _STAGGER * turn if warn_after else math.inf
        self._start = time.monotonic() - waited
        self._pause = PATIENCE
        self._next = self._start + PATIENCE + _STAGGER * turn
        self._answers: Answers = {}

    def seconds(self) -> float:
        """Until the next look."""
        return max(0.0, min(self._next, self._warn_at) - time.monotonic())

    def look(self) -> None:
        """Ask, if it is time to; raises when the answers say that the call cannot end."""
        now = time.monotonic()
        if now < min(self._next, self._warn_at):
            return
        if now >= self._next:
            self._next += self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        before = self._answers
        self._answers = self._diagnosis.look(before, self._deadline)
        if now < self._warn_at:
            return
        if self._answers is before:  # another rank asked just now
            self._warn_at = now + PATIENCE / 2
        else:
            self._warn_at = math.inf
            self._diagnosis.warn(now - self._start, self._answers)
