"""The handle of an operation."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, Protocol

import hetcoll._native as _native

log = logging.getLogger("hetcoll")

_RUNNING, _DONE, _FAILED = 0, 1, 2
_PAUSES = (50e-6, 2e-3)  # seconds between looks at what callbacks are for: at first, and at most
_IDLE = 0.2  # seconds until a thread without works ends
_ENDING = 5.0  # seconds for the callbacks that are under way when the interpreter ends


class Waiter(Protocol):
    """What a `Work` needs of the communicator that started it."""

    def _wait(self, ticket: _native.Ticket, timeout: float | None) -> None: ...

    def _check_limit(self, ticket: _native.Ticket, waited: float) -> None: ...

    def _failure(self) -> Exception | None: ...

    def _check_parent(self) -> None: ...


class Work:
    """An operation that was started. Every collective returns one.

    With ``async_op=False`` on host buffers it is done when the call returns. With ``async_op=True`` the buffers belong
    to the operation until `wait` returns or `done` is true; the communicator keeps them alive until then, also when the
    Work itself is dropped. Works may be waited for in any order, from any thread.

    In a forked child, `wait`, `done` and `error` of what was in flight at the fork raise `ClosedError`.
    """

    __slots__ = ("_comm", "_keep", "_ticket", "_what")

    def __init__(
        self, comm: Waiter | None = None, ticket: _native.Ticket | None = None, keep: Any = None, what: str = ""
    ) -> None:
        self._comm, self._ticket, self._keep, self._what = comm, ticket, keep, what

    def wait(self, timeout: float | None = None) -> None:
        """Block until the operation is complete.

        Raises what the operation failed with: `PeerLostError`, `CollectiveMismatchError`, `AbortedError`, or
        `CollectiveTimeoutError` when `timeout` seconds (default: the communicator's) pass first, after which the
        communicator is unusable.
        """
        comm, ticket = self._comm, self._ticket  # another thread may release them
        if ticket is None or comm is None:
            return
        if ticket.state != _DONE or timeout is not None:  # a wrong time is told also of what is over by chance
            comm._wait(ticket, timeout)
        self._release()

    def wait_stream(self, stream: object = None) -> None:
        """Make `stream` wait for the operation. Host buffers have no stream: this is `wait`."""
        self.wait()

    @property
    def done(self) -> bool:
        """Whether the operation is over, successfully or not. Never blocks."""
        comm, ticket = self._comm, self._ticket
        if ticket is None or ticket.state != _RUNNING:
            return True
        if comm is not None:
            comm._check_parent()  # in a forked child nobody would ever see its end
        return False

    @property
    def error(self) -> Exception | None:
        """What the operation failed with, or None while it runs and when it succeeded. Never blocks."""
        comm, ticket = self._comm, self._ticket
        if ticket is None or comm is None or ticket.state == _DONE:
            return None
        comm._check_parent()
        if ticket.state != _FAILED:
            return None
        return comm._failure()

    @property
    def source(self) -> int:
        """The rank that a receive with a tag came from, once it is complete; else -1."""
        return -1

    def add_done_callback(self, callback: Callable[[Work], object]) -> None:
        """Call `callback` with this Work once it is over, successfully or not: `error` says which.

        At once where it is over already, else on a thread that all Works share: a callback is quick and does not wait.
        It starts no collectives, since ranks would start them in different orders. What it raises is logged. A Work on
        host buffers that takes longer than the communicator's timeout is over, with a `CollectiveTimeoutError`. Where
        the interpreter ends first nobody is called.
        """
        if not callable(callback):
            raise TypeError(f"callback: wanted a function of a Work, got {callback!r}")
        if self.done:
            _tell(self, callback)
        else:
            _watch.add(self, callback)

    def __await__(self) -> Generator[Any, None, None]:
        """``await work``: as `wait`, while the event loop of asyncio runs on. Cancelling it ends the waiting only."""
        if not self.done:
            import asyncio  # most programs have no loop, and imports count

            loop, since = asyncio.get_running_loop(), time.monotonic()
            over = asyncio.Event()

            def tell(_: Work) -> None:
                with contextlib.suppress(RuntimeError):  # the loop was closed
                    loop.call_soon_threadsafe(over.set)

            self.add_done_callback(tell)
            yield from over.wait().__await__()
            if not self.done:  # a one-sided message, which stays in flight
                self._check_limit(time.monotonic() - since)
        self.wait()

    def _check_limit(self, waited: float) -> None:
        """CollectiveTimeoutError where `waited` seconds are more than the communicator allows."""
        comm, ticket = self._comm, self._ticket
        if comm is not None and ticket is not None:
            comm._check_limit(ticket, waited)

    def _release(self) -> None:
        self._comm = self._ticket = self._keep = None

    def __repr__(self) -> str:
        return f"<hetcoll.Work {self._what or 'done'}{'' if self.done else ' in flight'}>"


class _Finished(Work):
    """An operation with something left to be done by who finds it complete."""

    __slots__ = ("_finish", "_lock", "_work")

    def __init__(self, work: Work, finish: Callable[[], None]) -> None:
        super().__init__(what=work._what)
        self._work, self._lock = work, threading.Lock()
        self._finish: Callable[[], None] | None = finish

    def wait(self, timeout: float | None = None) -> None:
        self._work.wait(timeout)
        self._end()

    @property
    def done(self) -> bool:
        done = self._work.done
        if done and self._work.error is None:
            self._end()
        return done

    @property
    def error(self) -> Exception | None:
        return self._work.error

    def _check_limit(self, waited: float) -> None:
        self._work._check_limit(waited)

    def _end(self) -> None:
        with self._lock:
            if self._finish is not None:
                self._finish()
            self._finish = None


def finished(work: Work, finish: Callable[[], None]) -> Work:
    """`work`, over only when `finish` was called after it; now, where it is complete."""
    if work is not DONE:
        return _Finished(work, finish)
    finish()
    return work


DONE = Work()
"""What a call returns that was complete on return: there is nothing in it that could differ from one to the next."""


def _tell(work: Work, callback: Callable[[Work], object]) -> None:
    try:
        callback(work)
    except Exception:
        log.exception("a callback of %r", work)


class _Watch:
    """A thread that calls back when works are over. It is there while there are some, and a little longer."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._watched: list[tuple[float, Work, Callable[[Work], object]]] = []
        self._thread: threading.Thread | None = None
        self._ends = False

    def close(self) -> None:
        """The interpreter ends: a thread that were still there would keep what it has seen from being freed."""
        with self._changed:
            self._ends = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(_ENDING)

    def add(self, work: Work, callback: Callable[[Work], object]) -> None:
        with self._changed:
            self._watched.append((time.monotonic(), work, callback))
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="hetcoll-callbacks", daemon=True)
                thread.start()
                self._thread = thread
            self._changed.notify()

    def _run(self) -> None:
        pause, known = _PAUSES[0], 0
        while True:
            with self._changed:
                if not self._watched and (self._ends or not self._changed.wait(_IDLE)):
                    self._thread = None
                    return
                entries = list(self._watched)
            over = [entry for entry in entries if _is_over(entry[1], entry[0])]
            if over or len(entries) != known:
                pause = _PAUSES[0]
            with self._changed:
                self._watched = [entry for entry in self._watched if entry not in over and not self._ends]
                known = len(self._watched)
            for _, work, callback in over:
                _tell(work, callback)
            del entries, over  # they keep the memory of calls
            with self._changed:
                if self._watched:
                    self._changed.wait(pause)
            pause = min(2 * pause, _PAUSES[1])


def _is_over(work: Work, since: float) -> bool:
    try:
        if not work.done:
            work._check_limit(time.monotonic() - since)
            return False
    except Exception:
        log.debug("%r is over", work, exc_info=True)  # whoever looks at it is told the same
    return True


_watch = _Watch()
atexit.register(_watch.close)
os.register_at_fork(after_in_child=_watch.__init__)  # type: ignore[misc]  # the thread is the parent's
