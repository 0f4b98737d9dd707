"""What one of several threads makes and all of them use: links to other ranks."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Generic, TypeVar

from ..errors import InitError

K = TypeVar("K", bound=Hashable)

_POLL = 0.05  # seconds between looks at `check` while waiting for another thread


class Making(Generic[K]):
    """Which things are there, by what `there` says, and which a thread is about to make.

    There is no lock over the making: it waits for other ranks, and a thread that waits for one rank must not keep
    another thread from what it needs of a second one.
    """

    def __init__(self, there: Callable[[K], bool]) -> None:
        self._there = there
        self._begun: set[K] = set()
        self._news = threading.Condition()

    @contextlib.contextmanager
    def missing(self, keys: Collection[K]) -> Iterator[list[K]]:
        """For the ``with`` block, whose thread makes them: those of `keys` that are not there and that no other thread
        makes. They may be none."""
        with self._news:
            ours = [key for key in dict.fromkeys(keys) if key not in self._begun and not self._there(key)]
            self._begun.update(ours)
        try:
            yield ours
        finally:
            with self._news:
                self._begun.difference_update(ours)
                self._news.notify_all()

    def wait(self, keys: Collection[K], deadline: float, check: Callable[[], None]) -> bool:
        """Until no thread makes any of `keys`, at most until `deadline` (time.monotonic). Whether all are there: the
        thread that made some may have failed. `check` is called now and then, and raises to end the wait."""
        with self._news:
            while busy := [key for key in keys if key in self._begun]:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise InitError(f"another thread of this rank still connects {busy[:3]}")
                check()
                self._news.wait(min(left, _POLL))
            return all(map(self._there, keys))
