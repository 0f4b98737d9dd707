"""Why a connection closed, or could not be made, is waited for as long as it may be on its way."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from hetcoll.errors import CommunicationError, InitError, PeerLostError
from hetcoll.health import diagnosis
from hetcoll.health.desync_report import Answer
from hetcoll.health.diagnosis import Diagnosis
from hetcoll.health.verdicts import Kind
from hetcoll.rendezvous.protocol.news import Lost, Verdict

NEVER = 3600.0


class Engine:
    """Of rank 0."""

    failed = False
    failure: tuple[int, int, str] = (Kind.NONE, -1, "")

    def fail(self, kind: int, peer: int, text: str) -> None:
        if not self.failed:
            self.failed, self.failure = True, (kind, peer, text)

    def describe(self) -> str:
        return ""


class Control:
    """Of rank 0: what rank 1 answers. `asked`: somebody has asked."""

    def __init__(self, answer: bytes | None) -> None:
        self.answer, self.asked = answer, threading.Event()

    def query(self, group: bytes, blob: bytes, seconds: float) -> tuple[dict[int, bytes | None], dict[int, bytes]]:
        self.asked.set()
        return {0: Answer(0, {}).encode(), 1: self.answer}, {}

    def post_verdict(self, group: bytes, kind: bytes, blob: bytes, timeout: float) -> Verdict:
        return Verdict(kind, blob, 0)


def diagnosis_of(control: Control) -> Diagnosis:
    found = Diagnosis(SimpleNamespace(control=control), b"", 0, 2)  # type: ignore[arg-type]
    reporter: Any = SimpleNamespace(since=lambda: 1, inside=lambda thread=None: None)
    found.attach(Engine(), reporter)  # type: ignore[arg-type]
    return found


def refused(found: Diagnosis) -> CommunicationError:
    return found.unconnected(InitError("rank 1: connection refused"), (1,), float("inf"), 10.0)


def test_the_death_of_a_rank_that_answers_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "_REASON_SECONDS", 0.0)
    monkeypatch.setattr(diagnosis, "_SILENT_SECONDS", NEVER)
    found = diagnosis_of(control := Control(None))

    def tell() -> None:
        control.asked.wait()
        found.on_event(b"", Lost(1, "its process has ended"))

    thread = threading.Thread(target=tell)
    thread.start()
    error = refused(found)
    thread.join()
    assert isinstance(error, PeerLostError)
    assert error.rank == 1
    assert "its process has ended" in str(error)


def test_of_a_rank_that_answers_no_reason_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "_REASON_SECONDS", 0.0)
    monkeypatch.setattr(diagnosis, "_SILENT_SECONDS", NEVER)
    error = refused(diagnosis_of(Control(Answer(0, {}).encode())))
    assert not isinstance(error, PeerLostError)
    assert "connection refused" in str(error)


def test_a_rank_that_never_answers_is_an_error_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "_REASON_SECONDS", 0.0)
    monkeypatch.setattr(diagnosis, "_SILENT_SECONDS", 0.0)
    found = diagnosis_of(control := Control(None))
    assert "connection refused" in str(refused(found))
    assert control.asked.is_set()
