"""Over what runs on a GPU: streams cannot raise errors or know the time, so a thread looks after them.

It sleeps while nothing is in flight, and looks now and then where calls were captured into graphs: a replayed kernel
that waits says for whom, again and again (``devices/kernels/waits.h``). What does not move for the communicator's
timeout is ended on every rank, by a verdict that says who called what, as is a call that has a time of its own
(`deadlines`) when that is over, and within seconds where a rank that it needs has left. Once all know of a failure
(`health.all_know`), the streams here are let go, again and again until they are idle, since a peer's stream may still
write a word after we did.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Protocol

from .deadlines import Deadlines

_PAUSE = 0.25  # seconds between looks while something is in flight
_RELEASE_PAUSE = 0.01
_REPLAYS_PAUSE = 1.0  # seconds between looks for replays of graphs, which begin without a word to the host
_SAID = 0.5  # seconds for which it holds that a kernel waits: it says so every few milliseconds
_STILL = 2 * _SAID  # seconds without a move after which who left may be missed: what they had sent has come by then


class Watched(Protocol):
    """What is in flight (`standing.GpuStanding`). `waits` are the ranks for whom kernels wait."""

    @property
    def idle(self) -> bool: ...

    def awaited(self) -> Collection[int]:
        """For whom kernels have been seen to wait since the last time; asked where calls were captured."""

    def progress(self) -> int:
        """Grows while something moves."""

    def problem(self) -> str | None:
        """What a library failed with, or None."""

    def still(self, waits: Collection[int]) -> None:
        """Look, again and again, where nothing has moved for a while."""

    def stuck(self, problem: str, waits: Collection[int]) -> None:
        """This does not end."""

    def broken(self, problem: str) -> None:
        """This has failed."""

    def give_up(self) -> None:
        """Once after a failure; it may wait for what comes before streams are let go."""

    def release(self) -> None:
        """Let them go."""


class GpuWatch:
    """Over `calls`. `deadlines` has those that may take others than `timeout` seconds: one that has less ends when they
    are over, and while one has more everything may stand still for longer. `look` is called each time it wakes."""

    def __init__(self, calls: Watched, deadlines: Deadlines, look: Callable[[], None], timeout: float) -> None:
        self._calls, self._deadlines, self._look, self._timeout = calls, deadlines, look, timeout
        self._wake = threading.Event()
        self._failed = threading.Event()
        self._ended = self._patient = self._gave_up = False
        self._pause: float | None = None  # between looks while nothing is known to be in flight; None: there are none
        self._waits: Collection[int] = ()
        self._until = 0.0  # when that no longer holds
        self._thread = threading.Thread(target=self._run, name="hetcoll-gpu-watch", daemon=True)
        self._thread.start()

    def started(self) -> None:
        """Something was enqueued."""
        if not self._wake.is_set():
            self._wake.set()

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """What does not move is left alone for as long as the block runs: it looks after that itself."""
        self._patient = True
        try:
            yield
        finally:
            self._patient = False

    def look_for_replays(self) -> None:
        """From now on something may be in flight at any time."""
        self._pause = _REPLAYS_PAUSE
        self._wake.set()

    def waits(self) -> Collection[int]:
        """For whom kernels wait. Empty where nothing was captured: other calls are seen to be in flight."""
        if self._pause is not None:
            now = time.monotonic()
            if said := self._calls.awaited():
                self._waits, self._until = said, now + _SAID
            elif now > self._until:
                self._waits = ()
        return self._waits

    def quiet(self) -> bool:
        """Whether nothing is in flight, replays that wait for a peer included."""
        waits = self.waits()  # at every look, so that it is news
        return self._calls.idle and not waits and self._deadlines.idle

    def fail(self) -> None:
        """The communicator has failed: soon nothing here waits for a peer any more."""
        self._failed.set()
        self._wake.set()

    def close(self) -> None:
        """End the thread. Nothing may be in flight any more."""
        self._ended = True
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._wake.wait(self._pause)
            self._wake.clear()
            self._look_after()
            self._look()
            if self._ended:
                return

    def _look_after(self) -> None:
        calls, moved, since = self._calls, -1, time.monotonic()
        while not (self._ended or self._failed.is_set() or self.quiet()):
            now, problem = calls.progress(), calls.problem()
            if problem is not None:
                calls.broken(problem)
                self._failed.set()
            elif not self._patient and (late := self._deadlines.over()) is not None:
                calls.stuck(f"{late.what} did not finish in {late.seconds:g} s", self.waits())
                self._failed.set()
            elif now != moved or self._patient:
                moved, since = now, time.monotonic()
            elif (seconds := time.monotonic() - since) > max(self._timeout, self._deadlines.longest):
                calls.stuck(f"GPU calls have not moved for {seconds:.3g} s", self.waits())
                self._failed.set()
            elif seconds > _STILL:
                calls.still(self.waits())
            self._failed.wait(_PAUSE)
            self._look()
        if self._failed.is_set():
            self._let_go()

    def _let_go(self) -> None:
        if not self._gave_up:
            self._gave_up = True
            self._calls.give_up()
        while not (self._ended or self.quiet()):
            self._calls.release()
            time.sleep(_RELEASE_PAUSE)
