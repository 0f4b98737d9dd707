"""The handle of an operation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import hetcoll._native as _native

_RUNNING, _DONE, _FAILED = 0, 1, 2


class Waiter(Protocol):
    """What a `Work` needs of the communicator that started it."""

    def _wait(self, ticket: _native.Ticket, timeout: float | None) -> None: ...

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
        if ticket.state == _RUNNING or ticket.state == _FAILED:
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

    def _end(self) -> None:
        with self._lock:
            if self._finish is not None:
                self._finish()
            self._finish = None


def finished(work: Work, finish: Callable[[], None] | None) -> Work:
    """`work`, over only when `finish` was called after it; now, where it is complete."""
    if finish is None:
        return work
    if work is not DONE:
        return _Finished(work, finish)
    finish()
    return work


DONE = Work()
"""What a call returns that was complete on return: there is nothing in it that could differ from one to the next."""
