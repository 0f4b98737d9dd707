"""The handle of an operation on streams, over a path that says when it is idle."""

from __future__ import annotations

from hetcoll.gpu.work import GpuWork


class Path:
    """Idle as the list says, one question after another."""

    def __init__(self, answers: list[bool]) -> None:
        self._answers = iter(answers)

    @property
    def idle(self) -> bool:
        return next(self._answers)

    def check(self) -> None:
        """Nothing failed."""

    def join(self, stream: object) -> None:
        """Nobody waits."""


def test_what_is_over_stays_over() -> None:
    """Asked by two threads at once a path answers one of them that it is not idle, and later calls make it busy."""
    work = GpuWork(Path([False, True, False]), None, "allreduce")
    work.wait(60)
    assert work.done
    assert work.done


def test_done_waits_for_nothing() -> None:
    work = GpuWork(Path([False, True]), None, "allreduce")
    assert not work.done
    assert work.done
