"""What this rank tells about its own calls when others ask (`inquiry`), from the thread of its control connection."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from .. import _native
from ..work import Work
from .desync_report import WINDOW, Answer, Called

_PACKAGE = os.path.dirname(__file__)
_CALLS = {os.path.join(_PACKAGE, f"{name}.py") for name in ("communicator", "core", "messages", "regroup", "work")}

_JAX = os.path.join(_PACKAGE, "jax", "handler.py")


def call_site(frame: FrameType | None = None) -> str:
    """``file.py:12`` of the innermost frame outside this package; of the caller's own frames by default.

    A call that comes from a compiled JAX program was written elsewhere: the frame that runs it has that place.
    """
    frame = sys._getframe(1) if frame is None else frame
    while frame is not None and frame.f_code.co_filename.startswith((_PACKAGE, contextlib.__file__)):
        if frame.f_code.co_filename == _JAX and "called_at" in frame.f_locals:
            return str(frame.f_locals["called_at"])
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Witness:
    """Knows what one communicator is doing. `describe` turns the engine's number of a shape into the call it is for.

    `calls` are the calls that took the long way and are not over, by thread. `preparing` is the thread whose call is a
    collective that has no number yet.
    """

    def __init__(self, comm: object, engine: _native.Engine, describe: Callable[[int], Called | None]) -> None:
        self._comm, self._engine, self._describe = comm, engine, describe
        self.calls: dict[int, str] = {}
        self.preparing: int | None = None
        self.looks = 0  # of calls that wait for links to be made, at what they wait for

    def since(self) -> int:
        """The first collective that a question of this rank is about."""
        return max(1, self._engine.collectives - WINDOW // 2)

    def testify(self, since: int, asker: int) -> Answer:
        """This rank's answer to a question of rank `asker`."""
        engine = self._engine
        now, state, inside = engine.collectives, engine.describe(), self.inside()
        preparing = None if self.preparing is None else self.inside(self.preparing)
        calls: dict[int, Called] = {}
        for number in range(since, min(now, since + WINDOW) + 1):
            called = self._describe(engine.history(number))
            if called is not None:
                calls[number] = called
        if preparing is not None:
            calls[now + 1] = preparing
        elif inside is not None and now in calls and calls[now].what == inside.what:
            calls[now] = inside  # with the place where it is now
        return Answer(
            now=now,
            calls=calls,
            inside=inside,
            progress=f"{now} {engine.messages} {engine.moves}",
            alone=engine.settled
            and sum(not thread.name.startswith("hetcoll-") for thread in threading.enumerate()) == 1,
            state=state,
            sent=tuple(self._sent_to(asker)),
            failed=engine.failure if engine.failed and inside is None else None,
            idle=engine.naps + self.looks,
        )

    def inside(self, thread: int | None = None) -> Called | None:
        """The call of the communicator that this thread of the program is in; without one, that any thread is in."""
        for number, frame in sys._current_frames().items():
            if thread not in (None, number):
                continue
            outermost, what = None, ""
            inner: FrameType | None = frame
            while inner is not None:
                if inner.f_code.co_filename in _CALLS:
                    owner = inner.f_locals.get("self")
                    if isinstance(owner, Work) and owner._comm is self._comm:
                        outermost, what = inner, owner._what
                    elif owner is self._comm:
                        outermost = inner
                inner = inner.f_back
            if outermost is not None:
                name = outermost.f_code.co_name
                return Called(what or self.calls.get(number) or self._latest(name), call_site(outermost))
        return None

    def _latest(self, method: str) -> str:
        """The call of `method` that took the short way, and so is the last one that the engine knows."""
        engine = self._engine
        if method in ("send", "recv", "sendrecv", "_end_group"):
            called = self._describe(engine.message_history(engine.messages))
        else:
            called = self._describe(engine.history(engine.collectives))
        return f"{method.removeprefix('_end_')}()" if called is None else called.what

    def received_from(self, peer: int) -> Called | None:
        """The last receive from `peer`."""
        return next(self._messages("recv(", f" from rank {peer}", -1), None)

    def _sent_to(self, peer: int) -> Iterator[Called]:
        """The last sends to `peer`, the latest first, each kind of them once."""
        return self._messages("send(", f" to rank {peer}", 0)

    def _messages(self, begin: str, end: str, half: int) -> Iterator[Called]:
        seen: set[str] = set()
        newest = self._engine.messages
        for number in range(newest, max(0, newest - 256), -1):
            called = self._describe(self._engine.message_history(number))
            if called is None or called.what in seen:
                continue
            seen.add(called.what)
            what = called.what.split(" and ")[half]
            if what.startswith(begin) and what.endswith(end):
                yield called._replace(what=what)
