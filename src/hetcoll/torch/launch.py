"""How a call of torch runs: blocking, in the background, or on a GPU's stream."""

from __future__ import annotations

import collections
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ..communicator import Communicator
from ..types import Format
from ..work import Work as Operation
from . import profiling
from .connect import connect
from .failures import CollectiveTimeoutError, translate, translated
from .futures import Level
from .records import Records
from .tensors import seconds
from .work import HostWork, StreamWork

COLLECTIVES = "collectives"  # the lane of all of them; messages have others
Start = Callable[[dict[str, Any]], Sequence[Operation]]
"""Starts operations of the communicator with these keywords: `async_op`, `timeout`."""


class Launcher(dist.ProcessGroup):
    """The base of `HetcollProcessGroup`: its communicator, and the one way by which operations start on it."""

    def __init__(self, comm: Communicator, store: dist.Store, timeout: float, compress: Format | None = None) -> None:
        super().__init__(comm.rank, comm.size)
        self._store, self._timeout, self._compress = store, timeout, compress
        self._comms = [comm]  # by the level of callbacks that use it, see `_comm`
        self._futures = Level()
        self._streams: dict[tuple[str, torch.device], torch.cuda.Stream] = {}
        self._on_streams: collections.deque[StreamWork] = collections.deque()
        self._usual_timeout = timeout  # what the communicator takes where it is given none
        self._records = Records()

    @property
    def comm(self) -> Communicator:
        """The communicator beneath."""
        return self._comms[0]

    @property
    def _comm(self) -> Communicator:
        """The communicator for operations that this thread starts.

        Those that callbacks of futures start have one of their own: ranks agree on their order, but not on when they
        come among those of the program.
        """
        level = self._futures.of_this_thread().number
        if level == len(self._comms):
            store = dist.PrefixStore(f"callbacks/{level}/", self._store)
            limit, session = self._usual_timeout, self.comm.session
            self._comms.append(connect(store, self.rank(), self.size(), limit, session, self._compress))
        return self._comms[level]

    def _launch(
        self,
        opts: Any,
        tensors: Sequence[torch.Tensor],
        start: Start,
        outputs: Sequence[torch.Tensor],
        after: Callable[[], None] | None = None,
        *,
        lane: str = COLLECTIVES,
        source: int | None = None,
    ) -> dist.Work:
        """Run `start`, and `after` when what it started is complete.

        `opts` are torch's: ``asyncOp`` and ``timeout`` count; None is asynchronous. `tensors` are all that take part;
        where the first one lies decides how it runs. `outputs` is what the future will hold. Operations of one `lane`
        run on one stream of the GPU.
        """
        name = lane if lane != COLLECTIVES else sys._getframe(1).f_code.co_name.lstrip("_")  # of the caller
        call = self._records.begin(name, tensors)
        span = profiling.begin(self, name)
        try:
            with translated():
                work = self._begin(opts, tensors, start, list(outputs), after, lane, source)
        except BaseException as error:
            call.raised = str(error) or type(error).__name__
            if span is not None:
                span.end()
            raise
        call.work = weakref.ref(work)
        if span is not None:
            self._profile(work, span)
        return work

    def _profile(self, work: dist.Work, span: profiling.Span) -> None:
        """See to it that the event of a call that has returned ends: with the operation, on another thread."""
        if isinstance(work, HostWork) and not work.is_completed():
            work.span = span
            self._futures.complete(work.end_span, alone=True)
        else:
            self._futures.complete(span.end, alone=True)
            span.await_end()

    def _begin(
        self,
        opts: Any,
        tensors: Sequence[torch.Tensor],
        start: Start,
        outputs: list[torch.Tensor],
        after: Callable[[], None] | None,
        lane: str,
        source: int | None,
    ) -> dist.Work:
        device = tensors[0].device if tensors else torch.device("cpu")
        if device.type != "cpu":
            return self._enqueue(opts, tensors, device, start, outputs, after, lane, source)
        background = opts is None or opts.asyncOp
        limit = self._limit(opts)
        parts = start({"async_op": background, "timeout": limit})
        work = HostWork(parts, outputs, self._futures, after, limit, source)
        if not background:
            work.wait()
        return work

    def _limit(self, opts: Any) -> float | None:
        """Seconds an operation may take; None: as many as the communicator was made with."""
        limit = None if opts is None else seconds(opts.timeout)
        if limit is None and self._timeout != self._usual_timeout:
            limit = self._timeout
        return limit

    def _enqueue(
        self,
        opts: Any,
        tensors: Sequence[torch.Tensor],
        device: torch.device,
        start: Start,
        outputs: list[torch.Tensor],
        after: Callable[[], None] | None,
        lane: str,
        source: int | None,
    ) -> dist.Work:
        """A blocking call goes to the current stream, another one to a stream of the group that waits for it."""
        current = torch.cuda.current_stream(device)
        if opts is not None and not opts.asyncOp:
            with torch.cuda.device(device):
                start({})
                if after is not None:
                    after()
            return StreamWork(current, outputs, None, self._failure, source)
        stream = self._stream(lane, device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            start({})
            if after is not None:
                after()
            work = StreamWork(stream, outputs, list(tensors), self._failure, source)
        while self._on_streams and self._on_streams[0].is_completed():
            self._on_streams.popleft()
        self._on_streams.append(work)  # nobody else may hold it, and its tensors' memory is in use
        return work

    def _stream(self, lane: str, device: torch.device) -> torch.cuda.Stream:
        found = self._streams.get((lane, device))
        if found is None:
            found = self._streams[lane, device] = torch.cuda.Stream(device)
        return found

    def _failure(self) -> Exception | None:
        error = next((comm.error for comm in self._comms if comm.error is not None), None)
        return None if error is None else translate(error)

    def _error_type(self) -> Any:
        error = self._failure()
        if error is None:
            return c10d.ErrorType.SUCCESS
        timeout = isinstance(error, CollectiveTimeoutError)
        return c10d.ErrorType.TIMEOUT if timeout else c10d.ErrorType.COMM_ERROR

    def prepare(self, device: torch.device) -> None:
        """Set up what the first operation on this device would; all ranks of the group call it."""
        if device.type != "cpu":
            with torch.cuda.device(device):
                self._comm.allreduce(torch.zeros(1, device=device))
                torch.cuda.current_stream(device).synchronize()
