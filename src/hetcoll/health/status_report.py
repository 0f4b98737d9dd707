"""What this rank tells about its own calls when others ask (`desync_report`), from its control connection's thread."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import hetcoll._native as _native

from .desync_report import WINDOW, Answer, Called, Edge, Wait

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_CALLS = {os.path.join(_PACKAGE, f"{name}.py") for name in ("communicator", "work")}

FREE_THREADED = not getattr(sys, "_is_gil_enabled", lambda: True)()
"""Whether Python runs without a GIL."""

_JAX = os.path.join(_PACKAGE, "jax", "handler.py")


def call_site(frame: FrameType | None = None) -> str:
    """``file.py:12`` of the innermost frame outside this package and PyTorch; of the caller's own frames by default.

    A thread that runs nothing but PyTorch's code is somewhere there. A call that comes from a compiled JAX program was
    written elsewhere: the frame that runs it has that place.
    """
    frame, theirs = sys._getframe(1) if frame is None else frame, None
    ours, torch = (_PACKAGE, contextlib.__file__), _folder_of_torch()
    while frame is not None:
        file = frame.f_code.co_filename
        if file == _JAX and "called_at" in frame.f_locals:
            return str(frame.f_locals["called_at"])
        if torch and file.startswith(torch):
            theirs = theirs or frame
        elif not file.startswith(ours):
            break
        frame = frame.f_back
    frame = frame or theirs
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


_asking = threading.RLock()  # or one would end the rest of another


def innermost_frames() -> dict[int, FrameType]:
    """Of each thread. Before 3.12 CPython may collect garbage while it holds the lock of all threads for that, and what
    ends then and starts a thread, as a communicator does that nobody refers to any more, would wait for that lock for
    ever (python/cpython#106883)."""
    with _asking:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


def _folder_of_torch() -> str:
    """Where PyTorch lies, with a slash; "" in programs that have not loaded it."""
    file = getattr(sys.modules.get("torch"), "__file__", None)
    return os.path.join(os.path.dirname(file), "") if file else ""


class StatusReporter:
    """Knows what one communicator is doing. `describe` turns the engine's number of a shape into the call it is for.

    `calls` are the calls that took the slow path and are not over, by thread. `preparing` is the thread whose call is a
    collective that has no number yet.

    What a thread is in, its frames say. Where Python runs without a GIL they are for that thread alone, since to read
    others' while they run may crash: who waits tells (`telling`).
    """

    def __init__(
        self, comm: object, rank: int, engine: _native.Engine, describe: Callable[[int], Called | None]
    ) -> None:
        self._comm = weakref.ref(comm)  # news of the job, which ask us, must not keep it alive
        self._rank, self._engine, self._describe = rank, engine, describe
        self.calls: dict[int, str] = {}
        self.preparing: int | None = None
        self.connecting: dict[int, tuple[int, ...]] = {}  # by thread: the ranks to which it waits to be linked
        self._told: dict[int, Called] = {}  # by thread, without a GIL: the call that it waits in

    def since(self) -> int:
        """The first collective that a question of this rank is about."""
        return max(1, self._engine.collectives - WINDOW // 2)

    def report(self, since: int, asker: int, edges: Iterable[Edge] = ()) -> Answer:
        """This rank's answer to a question of rank `asker`, which also asks what was handed to `edges`."""
        engine = self._engine
        state, waits = engine.describe(), engine.waits_for()
        handed = [
            (edge.destination, edge.channel, *engine.through(edge.destination, edge.channel, True))
            for edge in edges
            if edge.source == self._rank
        ]
        while True:
            now, inside = engine.collectives, self.inside()
            preparing = None if self.preparing is None else self.inside(self.preparing)
            if engine.collectives == now:  # else `preparing` may be of a later call than the next one
                break
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
            idle=engine.naps,
            waits=tuple(Wait(*wait) for wait in waits),
            still=engine.still_seconds,
            connecting=tuple(sorted({peer for peers in list(self.connecting.values()) for peer in peers})),
            handed=tuple(handed),
        )

    def inside(self, thread: int | None = None) -> Called | None:
        """The call of the communicator that this thread of the program is in; without one, that any thread is in."""
        comm, mine = self._comm(), threading.get_ident()
        if comm is None:
            return None
        if thread == mine:
            return self._called(comm, mine, sys._getframe())
        if FREE_THREADED:
            told = {number: Called(what) for number, what in list(self.calls.items())} | self._told
            return next((called for number, called in told.items() if thread in (None, number)), None)
        frames = innermost_frames().items()
        found = (self._called(comm, number, frame) for number, frame in frames if thread in (None, number))
        return next((called for called in found if called is not None), None)

    def _called(self, comm: object, thread: int, frame: FrameType) -> Called | None:
        """The call of the communicator that a thread with this innermost frame is in."""
        outermost, what = None, ""
        inner: FrameType | None = frame
        while inner is not None:
            if inner.f_code.co_filename in _CALLS:
                owner: Any = inner.f_locals.get("self")
                if getattr(owner, "_comm", None) is comm:  # a `Work`
                    outermost, what = inner, owner._what
                elif owner is comm:
                    outermost = inner
            inner = inner.f_back
        if outermost is None:
            return None
        return Called(what or self.calls.get(thread) or self._latest(outermost.f_code.co_name), call_site(outermost))

    def tell(self, waits: bool) -> bool:
        """This thread `waits` in the call that it is in, or no longer. Whether that is news, for who waits: then it
        says so when it is over."""
        thread = threading.get_ident()
        if not waits:
            self._told.pop(thread, None)
        elif thread not in self._told and (called := self.inside(thread)) is not None:
            self._told[thread] = called
            return True
        return False

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """This thread waits in the ``with`` block."""
        news = FREE_THREADED and self.tell(True)
        try:
            yield
        finally:
            if news:
                self.tell(False)

    def _latest(self, method: str) -> str:
        """The call of `method` that took the fast path, and so is the last one that the engine knows."""
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
