"""Calls on a GPU that have a time of their own: what `timeout=` says, where that is not the communicator's.

Streams do not know the time. So an event behind such a call says whether it is done, and the watch (`watchdog`) asks
for it. The time counts from the call, what is on its stream before it included, as it does for calls on host memory.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import DeviceError
from ..vendors.devices.base import URGENT
from .lanes import SideStream

if TYPE_CHECKING:
    from ..vendors.devices.base import Device


@dataclass(slots=True, eq=False)
class _Call:
    what: str
    seconds: float
    end: float  # of its time (time.monotonic)
    event: int | None = None  # None: it is being enqueued, for which a library may wait for a peer


class Deadlines:
    """Those of one communicator on this rank's GPU. `usual` seconds are what a call has that says nothing."""

    def __init__(self, device: Device, usual: float) -> None:
        self._device, self._usual = device, usual
        self._lock = threading.Lock()  # of what follows
        self._calls: deque[_Call] = deque()
        self._unused: list[int] = []  # events
        self._side: SideStream | None = None  # of asynchronous calls

    def own(self, what: str, stream: int, seconds: float) -> contextlib.AbstractContextManager[object]:
        """The block enqueues on the stream, which captures nothing, what no queue of calls knows of."""
        return self._timed(_Call(what, seconds, time.monotonic() + seconds), stream, False)

    def call(
        self, describe: Callable[[], str], stream: int, async_op: bool, seconds: float
    ) -> contextlib.AbstractContextManager[tuple[int, bool]]:
        """The block enqueues a call that has so many `seconds` from now on, on the stream given, and asynchronous or
        not as that says: one for which no stream of the user's waits has a stream here, which knows its end. What a
        graph captures has no time of its own."""
        if seconds == self._usual or self._captured(stream):
            return contextlib.nullcontext((stream, async_op))
        return self._timed(_Call(describe(), seconds, time.monotonic() + seconds), stream, async_op)

    @contextlib.contextmanager
    def _timed(self, call: _Call, stream: int, async_op: bool) -> Iterator[tuple[int, bool]]:
        if async_op:
            self._side = self._side or SideStream(self._device, URGENT)
            stream = self._side.behind(stream)
        with self._lock:
            while self._calls and self._done(self._calls[0]):  # the watch looks at the others
                self._drop(self._calls[0])
            self._calls.append(call)
            event = self._unused.pop() if self._unused else self._device.event()
        try:
            yield stream, False
            self._device.record(event, stream)
            call.event = event
        except BaseException:
            with self._lock:
                self._drop(call)
                self._unused.append(event)
            raise

    def _captured(self, stream: int) -> bool:
        try:
            return self._device.capturing(stream)
        except DeviceError:
            return True  # it is no stream of the device, or its capture is broken: the call itself will say so

    @property
    def longest(self) -> float:
        """The most seconds that one of those has that are under way; 0 where there is none."""
        with self._lock:
            return max((call.seconds for call in self._calls), default=0.0)

    @property
    def idle(self) -> bool:
        """Whether none is under way."""
        with self._lock:
            return all(self._done(call) for call in self._calls)

    def over(self) -> _Call | None:
        """A call that is not done and whose time is over, if there is one."""
        with self._lock:
            for call in [call for call in self._calls if self._done(call)]:
                self._drop(call)
            now = time.monotonic()
            return next((call for call in self._calls if now > call.end), None)

    def _drop(self, call: _Call) -> None:
        self._calls.remove(call)
        if call.event is not None:
            self._unused.append(call.event)

    def _done(self, call: _Call) -> bool:
        try:
            return call.event is not None and self._device.query(call.event)
        except DeviceError:
            return True  # the device has failed: who asks whether it is idle tells all ranks

    def close(self) -> None:
        """Give everything back. Nothing may be under way."""
        while self._calls:
            self._drop(self._calls[0])
        while self._unused:
            self._device.destroy_event(self._unused.pop())
        if self._side is not None:
            self._side.close()
