"""One process's membership in a job: the control connection that its communicators share."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from ..errors import HetcollError, InitError
from .control import ControlClient
from .protocol.news import Event, Handler
from .protocol.unique_id import UniqueId
from .protocol.wire import WORLD


class Session:
    """Joins a job's first group, WORLD, or with `joins` none as yet; closes the connection when the last communicator
    of the job has left."""

    def __init__(self, unique_id: UniqueId, rank: int, size: int, timeout: float, *, joins: bool = False) -> None:
        self.rank = rank
        """Of the job."""
        self._handlers: dict[bytes, Handler] = {}
        self._early: dict[bytes, list[Event]] = {WORLD: []}  # of groups being joined: news that came before a handler
        self._lock = threading.Lock()
        first = None if joins else WORLD
        self.control = ControlClient(unique_id, rank, size, timeout, self._dispatch, first)

    def join(self, group: bytes, rank: int, size: int, handler: Handler, timeout: float) -> None:
        """Make `handler` the one that news of `group` goes to; other groups than WORLD are joined first."""
        if group != WORLD:
            with self._lock:
                self._early[group] = []
            try:
                self.control.join(group, rank, size, self._dispatch, timeout=timeout)
            except BaseException:
                self._early.pop(group, None)
                raise
        with self._lock:
            self._handlers[group] = handler
            early = self._early.pop(group, [])
        for event in early:
            handler(group, event)

    def leave(self, group: bytes, words: bytes = b"") -> None:
        """Say goodbye to the group; to the store as well when it was the last. See `ControlClient.leave`."""
        with self._lock:
            self._handlers.pop(group, None)
            last = not self._handlers
        if last:
            self.control.close(group, words)
        else:
            with contextlib.suppress(HetcollError):  # the store may be gone already
                self.control.leave(group, words, timeout=2.0)

    def _dispatch(self, group: bytes, event: Event) -> bytes | None:
        with self._lock:
            handler = self._handlers.get(group)
            if handler is None:
                self._early.get(group, []).append(event)
                return None
        return handler(group, event)


@contextlib.contextmanager
def coming_together() -> Iterator[None]:
    """What the system or the engine refuses while a job comes together is an InitError, with that as its cause."""
    try:
        yield
    except HetcollError:  # some of which are OSErrors too
        raise
    except OSError as error:
        raise InitError(f"the ranks did not come together on this rank: {error}") from error
