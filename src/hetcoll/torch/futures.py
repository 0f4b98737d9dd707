"""Futures of operations on host memory, whose callbacks may start operations.

Hooks of DistributedDataParallel such as PowerSGD's run all-reduces in callbacks. Were these to run wherever and when a
future happens to complete, ranks would start their operations in different orders. So callbacks run on a thread of
their own, in the order in which they were attached; what they start goes over a communicator of its own, and the
callbacks that they attach in turn go to another such thread, one level down.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch

from ..runtime.worker import Worker


class Level:
    """Where the futures of some threads' operations complete, and callbacks run: those of the program at level 0, of
    the callbacks there at level 1, and so on."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self._completer = Worker(f"hetcoll-futures-{number}")
        self._callbacks = Worker(f"hetcoll-callbacks-{number}")
        self._below: Level | None = None
        self._lock = threading.Lock()

    def of_this_thread(self) -> Level:
        """The level of operations that the calling thread starts; call it at level 0."""
        level: Level | None = self
        while level is not None:
            thread = level._callbacks.thread
            if thread is not None and thread is threading.current_thread():
                return level._deeper()
            level = level._below
        return self

    def _deeper(self) -> Level:
        with self._lock:
            if self._below is None:
                self._below = Level(self.number + 1)
            return self._below

    def complete(self, task: Callable[[], None], *, alone: bool) -> None:
        """Run `task`, which waits for an operation and completes its future.

        In the order of the operations; `alone` for those that complete in no particular order.
        """
        if alone or not self._completer.put(task):
            self._run_alone(task)

    def call(self, task: Callable[[], None]) -> None:
        """Run a callback, after those before it."""
        if not self._callbacks.put(task):
            self._run_alone(task)

    def _run_alone(self, task: Callable[[], None]) -> None:
        """On a thread of its own: so also after `close`, when somebody may yet wait for a future."""
        threading.Thread(target=task, name=f"hetcoll-future-{self.number}", daemon=True).start()

    def close(self) -> None:
        """End the threads. Operations must have ended before, or failed."""
        if self._below is not None:
            self._below.close()
        self._completer.close()
        self._callbacks.close()


class _Failure:
    """The result of a future that has failed. DistributedDataParallel reads results of futures in C++, where nobody
    knows that one is an error, and takes the first of the tensors that pickle finds there, although there may be none:
    this raises the error there."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.error


def _raise_failure(found: Any) -> Any:
    raise found.error


def fail(future: torch.futures.Future[Any], error: Exception) -> None:
    """Complete a future with an error, which `wait`, `value` and C++ raise. It is one without devices, since those look
    for tensors in any result."""
    future._set_unwrap_func(_raise_failure)
    future.set_result(_Failure(error))


class OrderedFuture(torch.futures.Future[Any]):
    """A future whose callbacks run in the order in which they were attached, on one thread, even if it is done."""

    _root: Level

    @classmethod
    def make(cls, root: Level) -> OrderedFuture:
        made = cls()
        made._root = root
        return made

    def then(self, callback: Callable[[torch.futures.Future[Any]], Any]) -> OrderedFuture:
        """A future of what `callback` makes of this one, complete or failed."""
        made = OrderedFuture.make(self._root)

        def run() -> None:
            self._settle()
            try:
                found = callback(self)
            except Exception as error:
                made.set_exception(error)
            else:
                made.set_result(found)

        self._root.of_this_thread().call(run)
        return made

    def set_exception(self, result: Any) -> None:
        """Complete it with an error: see `fail`."""
        fail(self, result)

    def add_done_callback(self, callback: Callable[[torch.futures.Future[Any]], None]) -> None:
        """Like `then`, for a callback that gives nothing."""
        self.then(callback)

    def _settle(self) -> None:
        with contextlib.suppress(Exception):  # the callback's to see
            self.wait()
