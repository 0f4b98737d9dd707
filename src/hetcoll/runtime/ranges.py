"""Calls as ranges in a profiler's timeline: NVTX for Nsight Systems, ROCTX for AMD's rocprofv3.

The vendors' libraries are opened when ranges are asked for, and only then: without, nothing of this is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from ..calls import RECV, SEND, SENDRECV
from ..types import Collective
from ..work import Work
from .executor import FastPath

log = logging.getLogger("hetcoll")

_LIBRARIES = (  # each with what its functions begin with
    ("libnvToolsExt.so.1", "nvtx"),
    ("librocprofiler-sdk-roctx.so", "roctx"),
    ("libroctx64.so", "roctx"),
)
_NAMES = {SEND: "send", RECV: "recv", SENDRECV: "sendrecv"} | {kind.value: kind.label for kind in Collective}


class Ranges:
    """The ranges of one thread are nested as its calls are."""

    def __init__(self, push: Callable[[bytes], object], pop: Callable[[], object]) -> None:
        self._push, self._pop = push, pop

    @contextlib.contextmanager
    def around(self, what: str) -> Iterator[None]:
        """The ``with`` block is a range of this name."""
        self._push(b"hetcoll " + what.encode())
        try:
            yield
        finally:
            self._pop()

    def tracing(self, fast_path: FastPath) -> FastPath:
        """`fast_path`, whose calls are ranges."""

        def call(kind: int, send: Any, recv: Any, op: Any, where: int) -> Work | None:
            with self.around(_NAMES[kind]):
                return fast_path(kind, send, recv, op, where)

        return call


@cache
def find() -> Ranges | None:
    """By the first library that the system finds; None, with a warning, where it finds none."""
    for name, prefix in _LIBRARIES:
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(name)
            push, pop = library[f"{prefix}RangePushA"], library[f"{prefix}RangePop"]
            push.argtypes = [ctypes.c_char_p]
            return Ranges(push, pop)
    wanted = ", ".join(name for name, _ in _LIBRARIES)
    log.warning("HETCOLL_NVTX: no ranges, since none of these libraries can be opened: %s", wanted)
    return None
