"""Whether every rank knows that a communicator has failed. Streams that are let go before pass wrong data to ranks that
would return it without an error.

News of the failure has gone to all when a rank asks, and comes to each before the question does: who answers knows. So
one question is enough for all, whose end the one that asked tells the others. Ranks begin one after another, and who
was asked meanwhile waits for that end: n ranks ask a few times n questions, and not n times n.
"""

from __future__ import annotations

import threading

from ..errors import HetcollError
from .diagnosis import Diagnosis

_QUESTION, _END = "who knows", "all know"
_SECONDS = 2.0  # for which ranks are waited for that do not answer: stopped, or cut off
_APART, _LAST = 1e-3, 0.5  # seconds between the beginnings of two ranks, and until the last ones'


class AllKnow:
    """Made by all ranks before anything fails."""

    def __init__(self, diagnosis: Diagnosis, rank: int) -> None:
        self._diagnosis, self._rank = diagnosis, rank
        self._asked, self._over = threading.Event(), threading.Event()
        diagnosis.questions.answers |= {_QUESTION: lambda _: self._asked.set(), _END: lambda _: self._over.set()}

    def wait(self) -> None:
        """Block, some seconds at most, until every rank that answers knows. To be called once this one does."""
        if self._over.wait(min(self._rank * _APART, _LAST)) or (self._asked.is_set() and self._over.wait(_SECONDS)):
            return
        try:
            self._diagnosis.questions.ask(_QUESTION, _SECONDS)
            self._diagnosis.questions.ask(_END, 0.0)
        except HetcollError:  # the store does not answer, and each rank goes by what it has found itself
            return
