"""What went wrong, for people: turns the engine's failures and the control channel's news into errors.

The data path can only say "this frame is not mine" or "nothing came". Who did what instead is found out of band: every
rank answers a query from the thread of its control connection, also while its main thread is stuck in a call.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from enum import IntEnum
from types import FrameType
from typing import TYPE_CHECKING, Any

from . import _native
from .control import Event, Left, Lost, Query, StoreLost, Verdict
from .errors import (
    AbortedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    HetcollError,
    PeerLostError,
    spell_ranks,
)

if TYPE_CHECKING:
    from .session import Session

_PACKAGE = os.path.dirname(__file__)
_CALLS = {os.path.join(_PACKAGE, name) for name in ("communicator.py", "work.py", "core.py")}
_QUERY_SECONDS = 2.0
_VERDICT_SECONDS = 2.0


class Kind(IntEnum):
    """native/transport/transport.h: FaultKind."""

    NONE = 0
    MISMATCH = 1
    PEER_GONE = 2
    CORRUPT = 3
    SYSTEM = 4
    TIMEOUT = 5
    ABORTED = 6


_ERRORS: dict[Kind, type[CommunicationError]] = {
    Kind.MISMATCH: CollectiveMismatchError,
    Kind.TIMEOUT: CollectiveTimeoutError,
    Kind.ABORTED: AbortedError,
}


def call_site(frame: FrameType | None) -> str:
    """``file.py:12`` of the innermost frame outside this package."""
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _blocked_call_site() -> str:
    """Where the thread that is inside a call of the communicator stands."""
    for frame in sys._current_frames().values():
        inner: FrameType | None = frame
        while inner is not None:
            if inner.f_code.co_filename in _CALLS:
                return call_site(inner)
            inner = inner.f_back
    return ""


class Diagnosis:
    """The failure side of one communicator."""

    def __init__(self, session: Session, group: bytes, rank: int, size: int) -> None:
        self._session, self._group, self._rank, self._size = session, group, rank, size
        self._lock = threading.Lock()
        self._engine: _native.Engine | None = None
        self._early: list[Lost | Left | Verdict | StoreLost] = []
        self._verdict = threading.Event()
        self._report: tuple[Kind, int, str] | None = None

    def attach(self, engine: _native.Engine, describe: Callable[[int], str], current: Callable[[], str]) -> None:
        """From now on there is something to fail: news that came earlier is delivered now.

        `describe` turns a shape's id into the call that it stands for; `current` is the call that is being set up.
        """
        self._describe, self._current = describe, current
        with self._lock:
            self._engine = engine
            early, self._early = self._early, []
        for event in early:
            self._apply(engine, event)

    # News from the control connection; on its thread.

    def on_event(self, group: bytes, event: Event) -> bytes | None:
        with self._lock:
            engine = self._engine
            if engine is None and not isinstance(event, Query):
                self._early.append(event)
        if engine is None:
            return None
        if isinstance(event, Query):
            return json.dumps(self._answer(engine, json.loads(event.blob))).encode()
        self._apply(engine, event)
        return None

    def _apply(self, engine: _native.Engine, event: Lost | Left | Verdict | StoreLost) -> None:
        if isinstance(event, Lost):
            self._settle(engine, Kind.PEER_GONE, event.rank, f"rank {event.rank} was lost: {event.reason}")
        elif isinstance(event, Left):
            engine.peer_left(event.rank)
        elif isinstance(event, Verdict):
            kind, peer, text = json.loads(event.blob)
            self._settle(engine, Kind(kind), peer, text)
        elif not event.orderly:
            self._settle(engine, Kind.PEER_GONE, -1, f"the process that hosts the job's store was lost: {event.reason}")

    def _settle(self, engine: _native.Engine, kind: Kind, peer: int, text: str) -> None:
        with self._lock:
            if self._report is None:
                self._report = (kind, peer, text)
        engine.fail(kind, peer, text)
        self._verdict.set()

    def _answer(self, engine: _native.Engine, question: dict[str, Any]) -> dict[str, Any]:
        """What this rank did at the sequence number asked for, and what it does now."""
        sequence = engine.collectives
        state = engine.describe()
        inside = self._current() or (self._describe(engine.history(sequence)) if state else "")
        called = self._describe(engine.history(question["sequence"])) if question["sequence"] <= sequence else ""
        site = _blocked_call_site() if inside else ""
        return {"now": sequence, "called": called, "inside": inside, "site": site}

    # Verdicts.

    def post(self, kind: Kind, peer: int, text: str) -> None:
        """Tell every rank, as far as the control channel still works; the first verdict of the group wins."""
        assert self._engine is not None
        try:
            blob = json.dumps([kind, peer, text]).encode()
            verdict = self._session.control.post_verdict(self._group, b"failed", blob, _VERDICT_SECONDS)
            won = json.loads(verdict.blob)
            self._settle(self._engine, Kind(won[0]), won[1], won[2])
        except HetcollError:
            self._settle(self._engine, kind, peer, text)

    def _ask(self, sequence: int) -> dict[int, dict[str, Any] | None]:
        """Every rank's answer; None from one that is stopped or cut off. Empty when the control channel is gone."""
        try:
            blob = json.dumps({"sequence": sequence}).encode()
            answers = self._session.control.query(self._group, blob, _QUERY_SECONDS)
        except HetcollError:
            return {}
        return {rank: json.loads(a) if a else None for rank, a in answers.items()}

    def error(self) -> CommunicationError:
        """The error for the failure that the engine holds. May ask the other ranks what they did."""
        assert self._engine is not None
        number, peer, text = self._engine.failure
        kind = Kind(number)
        if self._report is None:
            if kind is Kind.MISMATCH:
                self.post(kind, peer, self._mismatch(text))
            elif kind is Kind.ABORTED:
                self.post(kind, peer, text)
            elif not self._verdict.wait(_VERDICT_SECONDS):
                # A closed connection has a reason, and the control channel would have told it: a death, an abort.
                self.post(kind, peer, f"rank {self._rank}: {text}")
        kind, peer, text = self._report or (kind, peer, text)
        return PeerLostError(text, peer) if kind is Kind.PEER_GONE else _ERRORS.get(kind, CommunicationError)(text)

    def _mismatch(self, text: str) -> str:
        assert self._engine is not None
        sequence = self._engine.collectives
        sides: dict[str, list[int]] = defaultdict(list)
        for rank, answer in self._ask(sequence).items():
            sides[_side(answer, sequence)].append(rank)
        what = "; ".join(f"{spell_ranks(ranks)} {side}" for side, ranks in sides.items())
        return f"operation #{sequence}: {what or text}"

    def timeout(self, what: str, seconds: float) -> CommunicationError:
        """For a call that did not finish in time: says who is missing and poisons the communicator everywhere."""
        assert self._engine is not None
        sequence, state = self._engine.collectives, self._engine.describe()
        silent: list[int] = []
        behind: list[int] = []
        for rank, answer in self._ask(sequence).items():
            if answer is None:
                silent.append(rank)
            elif answer["now"] < sequence and not answer["inside"]:
                behind.append(rank)
        parts = [f"{what} did not finish in {seconds:g} s on rank {self._rank}"]
        if silent:
            parts.append(f"{spell_ranks(silent)} did not answer (stopped or cut off)")
        if behind:
            parts.append(f"{spell_ranks(behind)} did not call it")
        parts.append(f"rank {self._rank}: {state}")
        self.post(Kind.TIMEOUT, (silent + behind + [-1])[0], "; ".join(parts))
        return self.error()

    def suspicious(self) -> bool:
        """Whether ranks are stuck in different operations; if so the verdict has been posted."""
        assert self._engine is not None
        sequence = self._engine.collectives
        answers = [a for a in self._ask(sequence).values() if a is not None and a["inside"]]
        if len({a["inside"] for a in answers if a["now"] == sequence}) < 2:
            return False
        self.post(Kind.MISMATCH, -1, self._mismatch("ranks are stuck in different operations"))
        return True


def _side(answer: dict[str, Any] | None, sequence: int) -> str:
    if answer is None:
        return "gave no answer"
    what = answer["called"] or answer["inside"]
    if not what:
        return "did not call it"
    still_there = answer["site"] and answer["now"] <= sequence
    return f"called {what}" + (f" at {answer['site']}" if still_there else "")
