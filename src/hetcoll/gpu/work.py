"""The handle of an operation on streams."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

from ..calls import check_seconds
from ..calls.buffers import read_buffer
from ..errors import CollectiveTimeoutError
from ..work import Work
from . import streams


class Enqueued(Protocol):
    """What a `GpuWork` needs of the executor whose streams it is on."""

    @property
    def idle(self) -> bool: ...

    def check(self) -> None: ...

    def join(self, stream: object) -> None: ...


class GpuWork(Work):
    """An operation on streams. It was enqueued when the call returned."""

    __slots__ = ("_current", "_over", "_path")

    def __init__(self, path: Enqueued, keep: object, what: str, current: Callable[[], int] | None = None) -> None:
        """`current` gives the current stream of the arrays' library; without it their `keep` is asked."""
        super().__init__(None, None, keep, what)
        self._path, self._current, self._over = path, current, False

    def wait(self, timeout: float | None = None) -> None:
        """Block the host until the operation is complete, and it may be what was enqueued since, too."""
        # The watch ends what gets stuck.
        deadline = math.inf if timeout is None else time.monotonic() + check_seconds(timeout)
        pause = 20e-6
        while not self.done:
            if time.monotonic() > deadline:
                raise CollectiveTimeoutError(f"{self._what}: not complete after {timeout:g} s")
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)
        self._path.check()
        self._keep = None

    def wait_stream(self, stream: object = None) -> None:
        """What comes on `stream` later begins after the operation. None: on the current one of the arrays' library."""
        if stream is None and self._current is not None:
            stream = self._current()
        elif stream is None and self._keep is not None:
            array = next(array for array in self._keep if array is not None)
            stream = streams.current(read_buffer(array, "array", writable=False))
        self._path.join(stream)

    @property
    def done(self) -> bool:
        # What is over stays over: the path may be asked by another thread at this moment, or have new calls since.
        self._over = self._over or self._path.idle
        return self._over
