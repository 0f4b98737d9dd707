"""The handle of an operation whose data is checked when it is over (HETCOLL_CHECK)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..errors import HetcollError
from ..work import Work

if TYPE_CHECKING:
    from ..calls.buffers import Buffer
    from .executor import Gpus, Snapshot

log = logging.getLogger("hetcoll")


class Checked(Work):
    """`work`, over when what is `beside` it is over as well, and `look` has been called: what that raises is its error.

    The first thread that finds all complete looks. `copy` begins to copy the result from a GPU behind what is on a
    stream: a stream that waits for the operation may write there next.
    """

    __slots__ = ("_copy", "_error", "_lock", "_look", "_parts", "_raised", "_work")

    def __init__(
        self,
        work: Work,
        beside: Sequence[Work],
        look: Callable[[], None],
        copy: Callable[[object], Work] | None = None,
    ) -> None:
        super().__init__(what=work._what)
        self._work, self._parts, self._copy = work, [work, *beside], copy
        self._look: Callable[[], None] | None = look
        self._lock = threading.Lock()
        self._error: HetcollError | None = None
        self._raised = False

    def wait(self, timeout: float | None = None) -> None:
        for part in list(self._parts):
            part.wait(timeout)
        self._end()
        if self._error is not None:
            self._raised = True
            raise self._error

    def wait_stream(self, stream: object = None) -> None:
        if self._copy is None:
            self.wait()
            return
        self._work.wait_stream(stream)
        with self._lock:
            if self._copy is not None and self._look is not None:
                self._parts.append(self._copy(stream))
            self._copy = None

    @property
    def done(self) -> bool:
        if not all(part.done for part in list(self._parts)):
            return False
        if all(part.error is None for part in self._parts):
            self._end()
        return True

    @property
    def error(self) -> Exception | None:
        if not self.done:
            return None
        return next((part.error for part in self._parts if part.error is not None), self._error)

    def _check_limit(self, waited: float) -> None:
        for part in self._parts:
            part._check_limit(waited)

    def _end(self) -> None:
        with self._lock:
            look, self._look = self._look, None
            if look is None:
                return
            try:
                look()
            except HetcollError as error:
                self._error = error.with_traceback(None)  # whose frames would keep this object alive

    def __del__(self) -> None:
        if self._error is not None and not self._raised:
            log.warning("nobody has waited for %s: %s", self._what or "an operation", self._error)


class Result:
    """What an operation leaves in a buffer, for the host to look at."""

    def __init__(self, gpus: Gpus, buffer: Buffer, copied: Snapshot | None = None) -> None:
        self._gpus, self._buffer, self.copied = gpus, buffer, copied

    @property
    def copy(self) -> Callable[[object], Work] | None:
        """`begin`, of a GPU's memory; None of the host's."""
        return None if self._buffer.device == "cpu" else self.begin

    def begin(self, stream: object) -> Work:
        """Begin to copy it from its GPU behind what is on `stream` now. Where that has begun elsewhere, what comes on
        `stream` later waits for it."""
        if self.copied is None:
            self.copied = self._gpus.snapshot(self._buffer, stream)
        else:
            self.copied.wait_stream(stream)
        return self.copied

    def read(self) -> Buffer:
        """On the host, once all is over."""
        return self._gpus.read(self._buffer) if self.copied is None else self.copied.take()
