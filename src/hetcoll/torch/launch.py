"""How a call of torch runs: blocking, in the background, or on a GPU's stream."""

from __future__ import annotations

import collections
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from .. import ClosedError, Communicator
from .. import Work as Operation
from ..types import Format
from . import profiling
from .connect import connect
from .failures import CollectiveTimeoutError, translate
from .futures import Level
from .records import Records
from .streams import Lane, capturing, current, on_device
from .tensors import gpu_of, seconds
from .work import HostWork, StreamWork

LaneName = tuple[str, int]  # a kind of call, and the peer of messages that have a lane of their own
COLLECTIVES: LaneName = ("collectives", -1)  # all of them
BATCHES: LaneName = ("batch", -1)  # of messages to and from several, or both ways
Start = Callable[[dict[str, Any]], Sequence[Operation]]
"""Starts operations of the communicator with these keywords: `async_op`, `timeout`."""


class Place(NamedTuple):
    """Of a rank in its group."""

    rank: int
    size: int


class Launcher(dist.ProcessGroup):
    """The base of `HetcollProcessGroup`: its communicator, and the one way by which operations start on it."""

    def __init__(self, comm: Communicator | Place, store: dist.Store, timeout: float, compress: Format | None) -> None:
        self._place = Place(comm.rank, comm.size)
        super().__init__(*self._place)
        self._store, self._timeout, self._compress = store, timeout, compress
        # By the level of callbacks that use it, see `_comm`; none while the group has no ranks.
        self._comms = [] if isinstance(comm, Place) else [comm]
        self._last_failure: Exception | None = None  # of a group that has ended
        self._futures = Level()
        self._gpu_lanes: dict[tuple[LaneName, torch.device], Lane] = {}
        self._in_use: collections.deque[tuple[torch.cuda.Event, list[object]]] = collections.deque()
        self._usual_timeout = timeout  # what the communicator takes where it is given none
        self._records = Records()

    def rank(self) -> int:
        return self._place.rank

    def size(self) -> int:
        return self._place.size

    getRank, getSize = rank, size  # noqa: N815 (what torch's C++ calls)

    @property
    def comm(self) -> Communicator:
        """The communicator beneath. ClosedError once the group has ended, and before it has begun."""
        if not self._comms:
            raise ClosedError("this process group was destroyed, or wants torch.distributed._reconfigure() first")
        return self._comms[0]

    @property
    def _comm(self) -> Communicator:
        """The communicator for operations that this thread starts.

        Those that callbacks of futures start have one of their own: ranks agree on their order, but not on when they
        come among those of the program.
        """
        level = self._futures.of_this_thread().number
        if level >= len(self._comms):
            limit, session = self._usual_timeout, self.comm.session
            store = dist.PrefixStore(f"callbacks/{level}/", self._store)
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
        lane: LaneName = COLLECTIVES,
        source: int | None = None,
    ) -> dist.Work:
        """Run `start`, and `after` when what it started is complete.

        `opts` are torch's: ``asyncOp`` and ``timeout`` count; None is asynchronous. `tensors` are all that take part;
        where the first one lies decides how it runs. `outputs` is what the future will hold. Operations of one `lane`
        run on one stream of the GPU.
        """
        name = lane[0] if lane is not COLLECTIVES else sys._getframe(1).f_code.co_name.lstrip("_")  # of the caller
        call = self._records.begin(name, tensors)
        span = profiling.begin(self, name, tensors)
        try:
            if tensors and not tensors[0].is_cpu:
                work = self._enqueue(opts, tensors, start, outputs, after, lane, source)
            else:
                work = self._run(opts, start, outputs, after, source)
        except BaseException as error:
            found = translate(error) if isinstance(error, Exception) else error
            call.raised = str(found) or type(found).__name__
            if span is not None:
                span.leave()
                span.end()
            if found is error:
                raise
            raise found from error
        call.work = weakref.ref(work)
        if span is not None:
            self._profile(work, span)
        return work

    def _profile(self, work: dist.Work, span: profiling.Span) -> None:
        """See to it that the event of a call that has returned ends: with the operation, on another thread."""
        span.leave()
        if isinstance(work, HostWork) and not work.is_completed():
            work.span = span
            self._futures.complete(work.end_span, alone=True)
        else:
            self._futures.complete(span.end, alone=True)
            span.await_end()

    def _run(
        self,
        opts: Any,
        start: Start,
        outputs: Sequence[torch.Tensor],
        after: Callable[[], None] | None,
        source: int | None,
    ) -> dist.Work:
        background = opts is None or opts.asyncOp
        limit = self._limit(opts)
        how: dict[str, Any] = {} if limit is None else {"timeout": limit}
        if background:
            how["async_op"] = True
        parts = start(how)
        work = HostWork(parts, list(outputs), self._futures, after, limit, source)
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
        start: Start,
        outputs: Sequence[torch.Tensor],
        after: Callable[[], None] | None,
        name: LaneName,
        source: int | None,
    ) -> dist.Work:
        """A blocking call goes to the current stream, another one to a stream of the group that waits for it."""
        device = gpu_of(tensors[0])

        def run() -> None:
            start({})
            if after is not None:
                after()

        if opts is not None and not opts.asyncOp:
            on_device(device.index, run)
            return StreamWork(current(device.index), list(outputs), None, [], self._failure, source)
        lane = self._gpu_lanes.get((name, device)) or self._gpu_lanes.setdefault((name, device), Lane(device.index))
        end = lane.run(run)
        kept: list[object] = [*tensors]
        work = StreamWork(lane.stream, list(outputs), end, kept, self._failure, source)
        kept.append(work)  # nobody else may hold it
        self._let_go()
        self._in_use.append((end, kept))
        return work

    def _let_go(self) -> None:
        """Of the tensors that GPUs do not use any more, or whose users have waited for the GPU."""
        while self._in_use:
            end, kept = self._in_use[0]
            if kept and (capturing() or not (self._failure() or end.query())):
                return
            kept.clear()
            self._in_use.popleft()

    def _failure(self) -> Exception | None:
        for comm in self._comms:
            if (error := comm.error) is not None:
                return translate(error)
        return self._last_failure

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
