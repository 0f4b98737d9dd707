"""The handles of operations.

Operations on host memory are complete when the engine says so: `HostWork.wait` blocks. Operations on a GPU's memory
are enqueued on a stream when the call returns: `StreamWork.wait` makes the current stream wait, as ProcessGroupNCCL's
does.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .. import Work as Operation
from .failures import translate, translated
from .futures import Level, OrderedFuture
from .profiling import Span
from .streams import current
from .tensors import seconds

NO_TIME = timedelta(0)
TIMED_OUT = "Timed out waiting (caught collective operation timeout)"  # in torch's words, which scripts look for


class Handle(dist.Work):
    """Of operations of one kind of memory. `source` is the other rank of a message."""

    def __init__(self, source: int | None) -> None:
        super().__init__()
        self._source = source

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        """Of a receive: the rank in the group that it came from."""
        if self._source is None:
            raise RuntimeError("source_rank(): wanted the handle of a receive")
        return self._source

    _source_rank = source_rank


class HostWork(Handle):
    """Operations on host memory that were started together.

    `after` copies what came out of them to where the caller wants it; it runs once, on the first thread that sees the
    operations complete. `limit` is in seconds, None: the group's.
    """

    def __init__(
        self,
        parts: Sequence[Operation],
        outputs: list[torch.Tensor],
        root: Level,
        after: Callable[[], None] | None = None,
        limit: float | None = None,
        source: int | None = None,
    ) -> None:
        super().__init__(source)
        self._parts, self._outputs, self._root, self._after = parts, outputs, root, after
        self._limit = limit
        self._future: OrderedFuture | None = None
        self._lock = threading.Lock()  # of what is done once
        self.span: Span | None = None
        """The operation in the profiler's output."""

    def wait(self, timeout: timedelta = NO_TIME) -> bool:
        """Block until the result is there; raises what went wrong. True."""
        limit = (seconds(timeout) if timeout else None) or self._limit
        with translated:
            for part in self._parts:
                part.wait(limit)
        self._finish()
        if self.span is not None:
            self.span.await_end()
        return True

    def source_rank(self) -> int:
        """See `Handle`; of a receive from any source once it is complete."""
        return next((part.source for part in self._parts if part.source >= 0), super().source_rank())

    _source_rank = source_rank

    def end_span(self) -> None:
        """On another thread: wait for the operation, and end its event in the profiler's output."""
        assert self.span is not None
        with contextlib.suppress(Exception):  # is told to those who wait
            for part in self._parts:
                part.wait(self._limit)
        self.span.end()

    def _finish(self) -> None:
        if self._after is not None:
            with self._lock:
                if self._after is not None:
                    self._after()
                    self._after = None

    def is_completed(self) -> bool:
        if not all(part.done for part in self._parts):
            return False
        if self.exception() is None:
            self._finish()
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        return next((translate(part.error) for part in self._parts if part.error is not None), None)

    def result(self) -> list[torch.Tensor]:
        """The output tensors, once they are complete."""
        self.wait()
        return self._outputs

    def get_future(self) -> OrderedFuture:
        """A future of the output tensors, which a thread of the group's completes."""
        with self._lock:
            if self._future is None:
                self._future = OrderedFuture.make(self._root)
                self._root.of_this_thread().complete(self._announce, alone=self._source is not None)
            return self._future

    def _announce(self) -> None:
        assert self._future is not None
        try:
            self.wait()
        except Exception as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(self._outputs)


class Waited(dist.Work):
    """An operation whose future is complete as soon as there is one: `get_future` waits."""

    def __init__(self, inner: dist.Work) -> None:
        super().__init__()
        self._inner = inner

    def wait(self, timeout: timedelta = NO_TIME) -> bool:
        return bool(self._inner.wait(timeout))

    def result(self) -> Any:
        return self._inner.result()

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._inner.result())
        return future


class StreamWork(Handle):
    """Operations on a GPU's memory that were enqueued on `stream`, whose end `done` marks.

    The group keeps `kept` until `wait`, which empties it, or until the GPU is done, so that the memory of tensors in it
    is not given to others meanwhile. On the caller's own stream nothing is kept: that orders what becomes of their
    memory. As with ProcessGroupNCCL: who waits on another stream than the one that tensors were made on calls
    `Tensor.record_stream`.
    """

    def __init__(
        self,
        stream: torch.cuda.Stream,
        outputs: list[torch.Tensor],
        done: torch.cuda.Event | None,
        kept: list[object],
        failure: Callable[[], Exception | None],
        source: int | None = None,
    ) -> None:
        super().__init__(source)
        self._stream, self._outputs, self._event, self._kept, self._failure = stream, outputs, done, kept, failure

    @property
    def _done(self) -> torch.cuda.Event:
        """The end of the operations. On the caller's own stream few ask for it, so it is marked when one does."""
        if self._event is None:
            self._event = self._stream.record_event()
        return self._event

    def wait(self, timeout: timedelta = NO_TIME) -> bool:
        """Make the current stream wait for the result; raises what the group has failed with, if it has. True.

        With a `timeout` the host waits as well, for so long at most.
        """
        error = self._failure()
        if error is not None:
            raise error
        stream = current(self._stream.device_index)
        if stream is not self._stream:
            self._done.wait(stream)
        self._kept.clear()
        if timeout and (limit := seconds(timeout)) is not None:
            self._wait_on_host(limit)
        return True

    def _wait_on_host(self, limit: float) -> None:
        import time

        deadline = time.monotonic() + limit
        while not self._done.query():
            if (error := self._failure()) is not None:
                raise error
            if time.monotonic() > deadline:
                raise dist.DistBackendError(f"{TIMED_OUT}: not complete after {limit:g} s")
            time.sleep(50e-6)

    def is_completed(self) -> bool:
        return self._failure() is not None or bool(self._done.query())

    def is_success(self) -> bool:
        return self._failure() is None and bool(self._done.query())

    def exception(self) -> Any:
        return self._failure()

    def block_current_stream(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future that is complete at once: its callbacks run on streams that wait for the operation."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=[self._stream.device])
        with torch.cuda.stream(self._stream):
            future.set_result(self._outputs)
        return future


class Bundle(dist.Work):
    """Several operations as one."""

    def __init__(self, works: Sequence[dist.Work], outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self._works, self._outputs = works, outputs

    def wait(self, timeout: timedelta = NO_TIME) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        parts = torch.futures.collect_all([work.get_future() for work in self._works])

        def give(done: torch.futures.Future[Any]) -> list[torch.Tensor]:
            for part in done.value():
                part.value()  # raises what it failed with
            return self._outputs

        return parts.then(give)


class ToSelf(dist.Work):
    """Half of a message to oneself; complete when the other half has been called."""

    def __init__(self, tensor: torch.Tensor, rank: int) -> None:
        super().__init__()
        self._tensor, self._rank, self.done = tensor, rank, False

    def wait(self, timeout: timedelta = NO_TIME) -> bool:
        if not self.done:
            raise RuntimeError(f"rank {self._rank} waits for a message to itself whose other half it has not called")
        return True

    def is_completed(self) -> bool:
        return self.done

    def is_success(self) -> bool:
        return self.done

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return [self._tensor]

    def source_rank(self) -> int:
        return self._rank

    _source_rank = source_rank
