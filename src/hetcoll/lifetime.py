"""What must be closed when the interpreter ends, and what a forked child must let go of.

A child made by ``os.fork`` inherits copies of our sockets, but not our threads. If it kept them open, peers would not
notice the death of the parent; if it used them, it would speak in the parent's name. So it closes its copies, at once.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger("hetcoll")


class Resource(Protocol):
    """Something with sockets or threads."""

    def close(self) -> None:
        """Give everything back, in order and in bounded time. More than once is fine."""

    def abandon(self) -> None:
        """In a forked child: close the inherited descriptors and nothing else, without taking a lock."""


_open: dict[int, tuple[Resource, Callable[[], None]]] = {}
_watching = 0  # the process whose multiprocessing finalizer is in place


def watch(resource: Resource, at_exit: Callable[[], None] | None = None) -> None:
    """Close `resource` at exit (or call `at_exit`), newest first, and abandon it in forked children."""
    _watch_multiprocessing()
    _open[id(resource)] = (resource, at_exit or resource.close)


def forget(resource: Resource) -> None:
    """`resource` is closed."""
    _open.pop(id(resource), None)


def _close_all() -> None:
    for resource, close in reversed(list(_open.values())):
        try:
            close()
        except Exception:  # the others must be closed all the same
            log.exception("closing %r at exit", resource)


def _abandon_all() -> None:
    for resource, _ in list(_open.values()):
        resource.abandon()
    _open.clear()


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
