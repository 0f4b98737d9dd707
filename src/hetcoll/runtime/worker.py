"""Threads that do one thing after another."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from .. import lifetime

_CLOSING = 10.0  # seconds for a thread to end


class Worker:
    """A thread that runs what it is given, in order. It starts with the first of it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of starting and closing
        self._closed = False
        self.thread: threading.Thread | None = None

    def put(self, task: Callable[[], None]) -> bool:
        """Run `task` after all that came before it. False after `close`: it never runs. OSError where no thread can be
        had."""
        with self._lock:
            if self._closed:
                return False
            if self.thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                lifetime.begin(thread)
                self.thread = thread
            self._queue.put(task)
        return True

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            task()
            del task

    def close(self) -> None:
        """End the thread after what it was given so far."""
        with self._lock:
            self._closed = True
        self._queue.put(None)
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(_CLOSING)
