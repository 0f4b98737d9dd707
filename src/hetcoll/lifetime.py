"""What must be closed when the interpreter ends or nobody refers to it any more, and what a forked child lets go of.

A child made by ``os.fork`` inherits copies of our sockets, but not our threads. If it kept them open, peers would not
notice the death of the parent; if it used them, it would speak in the parent's name. So it closes its copies, at once.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import ParamSpec, Protocol, TypeVar

log = logging.getLogger("hetcoll")

T = TypeVar("T")
P = ParamSpec("P")


class Resource(Protocol):
    """Something with sockets or threads."""

    def close(self) -> None:
        """Give everything back, in order and in bounded time. More than once is fine."""

    def abandon(self) -> None:
        """In a forked child: close the inherited descriptors and nothing else, without taking a lock."""


_CLOSING_SECONDS = 5.0
_BEGINNING_SECONDS = 1.0

_open: dict[int, tuple[Callable[[], Resource | None], Callable[[], None] | None]] = {}
_closers: set[threading.Thread] = set()
_watching = 0  # the process whose multiprocessing finalizer is in place


def watch(resource: Resource, at_exit: Callable[[], None] | None = None, *, weakly: bool = False) -> None:
    """Close `resource` at exit (or call `at_exit`, last), newest first, and abandon it in forked children. `weakly`:
    that does not keep it alive."""
    _watch_multiprocessing()
    _open[id(resource)] = (weakref.ref(resource) if weakly else lambda: resource, at_exit)


def begin(thread: threading.Thread) -> None:
    """Start a thread. OSError where none can be had."""
    try:
        thread.start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, f"{thread.name}: {error}") from error


def start(thread: threading.Thread, resource: Resource, at_exit: Callable[[], None] | None = None) -> None:
    """`begin` the thread of `resource`, and `watch` that. Where no thread can be had it is let go of."""
    try:
        begin(thread)
        # Now, since what is watched may be closed on another thread, which waits for this one's.
        watch(resource, at_exit)
    except OSError:
        resource.abandon()
        raise
    except KeyboardInterrupt:
        if _runs(thread):
            resource.close()
        else:
            resource.abandon()
        raise


def _runs(thread: threading.Thread) -> bool:
    """Of one that lasts, whether it was made before Ctrl-C came: Python knows of it a moment later."""
    deadline = time.monotonic() + _BEGINNING_SECONDS
    while not thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.001)
    return thread.is_alive()


def forget(resource: Resource) -> None:
    """`resource` is closed."""
    _open.pop(id(resource), None)


def opened() -> Iterator[tuple[Resource, Callable[[], None]]]:
    """What is open, newest first, each with what is to be called at exit. What has something of its own to do then
    comes last: it waits for others, which may be of this process, and older."""
    newest_first = reversed(list(_open.values()))
    for find, at_exit in sorted(newest_first, key=lambda each: each[1] is not None):
        resource = find()
        if resource is not None:
            yield resource, at_exit or resource.close


def drop(close: Callable[[], None]) -> None:
    """Call `close`, of something that nobody refers to any more, on a thread of its own: the garbage collector may have
    found it on any thread, with any lock held."""

    def run() -> None:
        try:
            close()
        except Exception:
            log.exception("closing what was dropped")
        finally:
            _closers.discard(threading.current_thread())

    closer = threading.Thread(target=run, name="hetcoll-closer", daemon=True)
    _closers.add(closer)
    try:
        closer.start()
    except RuntimeError:  # the interpreter ends, and with it all that is open
        _closers.discard(closer)


def await_drops() -> None:
    """Until all that was dropped so far is closed, or for some seconds."""
    deadline = time.monotonic() + _CLOSING_SECONDS
    for closer in list(_closers):
        while closer.ident is None and closer in _closers and time.monotonic() < deadline:  # about to be started
            time.sleep(0.001)
        if closer.ident is not None:
            closer.join(max(0.0, deadline - time.monotonic()))


def _close_all() -> None:
    await_drops()
    for resource, close in opened():
        try:
            close()
        except Exception:  # the others must be closed all the same
            log.exception("closing %r at exit", resource)


def _abandon_all() -> None:
    for resource, _ in opened():
        resource.abandon()
    _open.clear()
    _closers.clear()


def _watch_multiprocessing() -> None:
    """Children of multiprocessing leave without what is registered with atexit; they have finalizers of their own."""
    global _watching
    util = sys.modules.get("multiprocessing.util")
    if util is not None and _watching != os.getpid():
        _watching = os.getpid()
        if sys.modules["multiprocessing.process"].parent_process() is not None:
            util.Finalize(None, _close_all, exitpriority=100)


atexit.register(_close_all)
os.register_at_fork(after_in_child=_abandon_all)


def weakly(method: Callable[P, T]) -> Callable[P, T]:
    """Calls a method of an object that it does not keep alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        found = reference()
        assert found is not None, "it is in a call"
        return found(*args, **kwargs)

    return call
