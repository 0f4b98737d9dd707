"""The handles of messages with tags: see `tags`."""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol

import numpy as np

import hetcoll._native as _native

from ..calls import check_seconds
from ..calls.buffers import Buffer
from ..errors import ArgumentError
from ..health.desync_report import Called
from ..health.status_report import call_site
from ..health.verdicts import Kind
from ..types import ANY_SOURCE, DType
from ..work import Work
from .executor import Row

SLICE = 0.02  # seconds between looks at whether the group has failed
_NO_CHECKSUM: Row = np.empty(0, np.uint8)


class Pair(Protocol):
    """What tagged messages need of the communicator of two ranks on which they go."""

    _engine: _native.Engine

    @property
    def rank(self) -> int: ...

    def send(self, buf: Any, peer: int, *, async_op: bool) -> Work: ...

    def recv(self, buf: Any, peer: int, *, async_op: bool) -> Work: ...

    def memory(self) -> dict[str, int]: ...

    def close(self) -> None: ...


class Box(Protocol):
    """What a parcel needs of the mailbox whose it is (`tags.Mailbox`)."""

    def check_coming(self, peer: int | None) -> None: ...

    def failure(self) -> Exception | None: ...

    def explain(self, error: Exception, parcel: Parcel) -> Exception: ...

    def fail_all(self, kind: Kind, peer: int, text: str) -> Exception: ...


class Parcel(Work):
    """A send or a receive of a tagged message. `source` is the rank that a complete receive came from."""

    __slots__ = (
        "_begun",
        "_box",
        "_failed",
        "_inner",
        "_limit",
        "_source",
        "buffer",
        "checksum",
        "count",
        "dtype",
        "memory",
        "odd",
        "tag",
        "wanted",
    )

    def __init__(self, box: Box, buffer: Buffer, tag: int, peer: int | None, word: str, limit: float) -> None:
        self.count, self.dtype, self._limit = buffer.count, buffer.dtype.label, limit
        where = "any rank" if peer is None else f"rank {peer}"
        way = "to" if word == "send" else "from"
        what = f"{word}({self.dtype}, count={self.count}, tag={tag}) {way} {where}"
        super().__init__(what=str(Called(what, call_site())))
        self.memory = Buffer(buffer.ptr, buffer.nbytes, DType.UINT8, buffer.owner)
        self.tag, self.wanted, self._source = tag, peer, ANY_SOURCE
        self._box = box
        self._begun = threading.Event()
        self._inner: tuple[Pair, Work] | None = None
        self._failed: Exception | None = None
        self.buffer, self.checksum, self.odd = buffer, _NO_CHECKSUM, ""

    def begin(self, pair: Pair, inner: Work) -> None:
        """The bytes are on their way."""
        self._inner = (pair, inner)
        self._begun.set()

    def end(self, error: Exception | None = None, source: int = ANY_SOURCE) -> None:
        """It is complete, from `source` where it is a receive, or has failed."""
        if not self._begun.is_set():
            self._failed, self._source = error, source
            self._begun.set()

    def wait(self, timeout: float | None = None) -> None:
        seconds = self._limit if timeout is None else check_seconds(timeout)
        deadline = time.monotonic() + seconds
        while not self.done:
            left = deadline - time.monotonic()
            if left <= 0:
                self._time_out(seconds)
            elif not self._begun.is_set():
                self._begun.wait(min(left, SLICE))
                self._box.check_coming(self.wanted)
            elif self._inner is not None:
                pair, inner = self._inner
                if (ticket := inner._ticket) is not None:
                    pair._engine.wait(ticket, min(left, SLICE))
        if (error := self.error) is not None:
            raise error

    def _check_limit(self, waited: float) -> None:
        if waited >= self._limit:
            self._time_out(self._limit)
        elif not self._begun.is_set():
            self._box.check_coming(self.wanted)

    def _time_out(self, seconds: float) -> None:
        self._box.fail_all(Kind.TIMEOUT, -1, f"{self._what} did not finish in {seconds:g} s on {self._box}")

    @property
    def done(self) -> bool:
        if self.error is not None:
            return True
        return self._begun.is_set() and (self._inner is None or self._inner[1].done)

    @property
    def error(self) -> Exception | None:
        if self._failed is not None:
            return self._failed
        inner = None if self._inner is None else self._inner[1]
        if not self._begun.is_set() or (inner is not None and not inner.done):
            return self._box.failure()
        if inner is not None and inner.error is not None:
            return self._box.explain(inner.error, self)
        return ArgumentError(self.odd) if self.odd else None

    @property
    def source(self) -> int:
        return self._source

    def fits(self, dtype: str, count: int) -> bool:
        return (dtype, count) == (self.dtype, self.count)
