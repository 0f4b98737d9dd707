"""The communicator: what users call.

A call that was made before with the same type and counts is one C++ call (`Engine.call`). Everything else takes the
slow path: `calls/` checks the arguments, and `runtime/core.py` hands the call to what chooses an algorithm, makes and
connects its plan and runs it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, overload

import numpy as np

from . import calls, lifetime
from ._native import Persistent, Status, Ticket, fast_path
from .calls import RECV, SEND, SENDRECV
from .calls.buffers import Array
from .config.env import Config
from .errors import CommunicationError
from .gpu.open import Gpus
from .plan.topology import Topology
from .rendezvous.protocol.unique_id import UniqueId
from .rendezvous.session import Session, coming_together
from .runtime import joining, messages, objects, registration, regroup, results, weights
from .runtime.core import Core, refuse
from .runtime.executor import FastPath
from .runtime.hints import NAMES, OF_WORK, give_hints
from .runtime.persistent import persistent
from .runtime.registration import Registration
from .runtime.results import ExchangeOptions, Options, ReducingOptions
from .types import Collective, Format, FormatName, OpName, ReduceOp
from .work import Work

if TYPE_CHECKING:
    from .runtime.one_sided import Window
    from .runtime.planner import Explanation

A = TypeVar("A", bound=Array)


class Communicator:
    """A group of ranks that run collectives together. `hetcoll.init` makes one, and its methods others.

    Every rank must call the same collectives in the same order; a mismatch is a `CollectiveMismatchError` on every
    rank. `sendbuf` is never written unless it is also where the result goes. Results are bitwise the same on all ranks,
    NaNs as well. `timeout` is in seconds (default: HETCOLL_TIMEOUT, 300), of which 23 days count at most. On a GPU it
    counts from the call, what its stream does before included; a graph has HETCOLL_TIMEOUT's. Errors after a call has
    begun are `CommunicationError`s and leave the communicator fit only for `close`, `agree` and `shrink`. `stream` is
    ignored for host buffers.

    Where one buffer holds a part for each rank, the other may be this rank's part of it, elements ``rank * count`` to
    ``(rank + 1) * count``: then the call works in place. What the root alone needs is not looked at on other ranks.

    Any thread may use a communicator, several at once as well. Collectives run one after another in the order in which
    they were begun here: where several threads begin them it is for the program to see to the same order on all ranks,
    as with ``async_op=True`` under a lock. So with messages of several threads to one rank, or from one.
    """

    _closed = True  # until there is something to close
    _call: FastPath  # what methods with `@fast_path` try first: see `Core.choose_fast_path`

    @classmethod
    def init(cls, size: int, rank: int, unique_id: UniqueId | str | bytes, *, timeout: float | None = None) -> Self:
        """Join as `rank` of `size` the job that `hetcoll.get_unique_id` on one rank described.

        Blocks until all ranks are there; `InitError` after `timeout` seconds (default: HETCOLL_INIT_TIMEOUT, 120) names
        those that never came. `unique_id` may be what `str` or `to_bytes` made of one.
        """
        return joining.init(cls, size, rank, unique_id, timeout)

    @classmethod
    def join(cls, unique_id: UniqueId | str | bytes, *, timeout: float | None = None) -> Self:
        """Come as a newcomer to a job that runs, which takes this process in by `grow`: the communicator that it makes.

        `InitError` where no `grow` takes this process in within `timeout` seconds (default: HETCOLL_INIT_TIMEOUT).
        """
        return joining.join(cls, unique_id, timeout)

    @classmethod
    def enter(
        cls, unique_id: UniqueId, rank: int, size: int, config: Config, timeout: float, *, join: bool = False
    ) -> Self:
        """As `init`, or with `join` as that, with the settings in `config` in place of the environment's. For
        `hetcoll.init`."""
        return (joining.come_in if join else joining.enter)(cls, unique_id, rank, size, config, timeout)

    def __init__(self, session: Session, group: bytes, rank: int, size: int, config: Config, timeout: float) -> None:
        with contextlib.ExitStack() as undo:  # wherever Ctrl-C comes: others may have theirs already
            core = self._core = Core(self, session, group, rank, size, config, timeout, Gpus, undo)
            self._session, self._group, self._rank, self._size, self._config = session, group, rank, size, config
            self._at = rank, size  # where what a call is given is checked
            self._wiring, self._engine, self._diagnosis = core.wiring, core.engine, core.diagnosis
            self._host, self._gpus, self._planner = core.host, core.gpus, core.planner
            undo.callback(lifetime.forget, self)
            lifetime.watch(self, weakly=True)
            undo.pop_all()
            self._closed = False  # from now on it is closed when it is dropped

    @property
    def rank(self) -> int:
        """This rank, in [0, size)."""
        return self._rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._size

    @property
    def local_rank(self) -> int:
        """This rank's position among those of its host."""
        return self._wiring.locals.index(self._rank)

    @property
    def topology(self) -> Topology:
        """Who the ranks are, on which hosts, and what carries data between them."""
        return self._wiring.topology

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def epoch(self) -> int:
        """How often the job has lost or taken in ranks on the way to this communicator: 0 from `init`; `shrink` and
        `grow` add one, `split` none. Above 0 on a newcomer, which has yet to be told what the others know."""
        return self._core.epoch

    @property
    def session(self) -> Session:
        """This process's membership in the job, which all its communicators share."""
        return self._session

    @property
    def error(self) -> CommunicationError | None:
        """What the communicator has failed with, or None. Never blocks, and never changes once it is there."""
        self._host.check_parent()
        return self._failure()

    # Collectives.

    @fast_path(Collective.ALLREDUCE)
    def allreduce(
        self, sendbuf: Array, recvbuf: Array | None = None, op: ReduceOp | OpName = "sum",
        *, stream: object = None, async_op: bool = False, timeout: float | None = None,
        compress: FormatName | None = None, weight: float | None = None,
    ) -> Work:  # fmt: skip
        """Reduce `sendbuf` over all ranks, element by element, into `recvbuf` on every rank; in place without one.

        Both have the same dtype and count, which is the same on all ranks. `op`: a `ReduceOp`, or its name in lower
        case (which is faster), where the dtype has it (`hetcoll.types.supports`). 8- and 16-bit floats are computed in
        float32 and rounded once per reduction.

        `compress`: ``"bf16"``, ``"fp8"`` or ``"int8"``: how sums and averages of float32, float16 and bfloat16
        travel between hosts, or between islands that were asked for; the same on all ranks. What rounding takes
        from this memory is added at the next call on it (`reset_feedback`). ``"none"``: not at all. Default: the
        communicator's setting, for calls of 64 KiB and more.

        `weight`, with ``op="avg"`` and floats or complex numbers: how much this rank's `sendbuf` counts; the result is
        sum(weight x sendbuf) / sum(weight). 0 or more, on all ranks or none; ArgumentError on every rank where all are
        0. Each rank's part is rounded to the dtype before the sum. Waits for all ranks' weights, also with
        ``async_op=True``.
        """
        if weight is not None:
            sendbuf, recvbuf, op = weights.weighed(self._core, sendbuf, recvbuf, op, weight, stream, timeout, compress)
        return self._core.launch(calls.allreduce(*self._at, sendbuf, recvbuf, op), async_op, timeout, stream, compress)

    @overload
    def allgather(self, sendbuf: A, recvbuf: None = None, **options: Unpack[Options]) -> A: ...
    @overload
    def allgather(
        self, sendbuf: Array, recvbuf: Array, *, async_op: bool = False, **options: Unpack[Options]
    ) -> Work: ...
    @fast_path(Collective.ALLGATHER)
    def allgather(
        self, sendbuf: Any, recvbuf: Any = None,
        *, stream: object = None, async_op: bool = False, timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """Gather every rank's `sendbuf` (count elements) into `recvbuf` (size x count) on every rank, by rank.

        Without `recvbuf` the result is returned: a new array like `sendbuf` (NumPy's, PyTorch's, CuPy's), of the shape
        (size, \\*sendbuf.shape).
        """
        if recvbuf is None:
            return results.gathered(self._core, self.allgather, sendbuf, async_op, stream=stream, timeout=timeout)
        return self._core.launch(calls.allgather(*self._at, sendbuf, recvbuf), async_op, timeout, stream)

    @overload
    def reduce_scatter(
        self, sendbuf: A, recvbuf: None = None, op: ReduceOp | OpName = "sum", **options: Unpack[ReducingOptions]
    ) -> A: ...
    @overload
    def reduce_scatter(
        self, sendbuf: Array, recvbuf: Array, op: ReduceOp | OpName = "sum",
        *, async_op: bool = False, **options: Unpack[ReducingOptions],
    ) -> Work: ...  # fmt: skip
    @fast_path(Collective.REDUCE_SCATTER)
    def reduce_scatter(
        self, sendbuf: Any, recvbuf: Any = None, op: ReduceOp | OpName = "sum",
        *, stream: object = None, async_op: bool = False, timeout: float | None = None,
        compress: FormatName | None = None,
    ) -> Any:  # fmt: skip
        """Reduce `sendbuf` (size x count elements) over all ranks and leave part `rank` of it in `recvbuf` (count).

        `op` and `compress` as in `allreduce`. Without `recvbuf` the result is returned, as by `allgather`: of the shape
        ``sendbuf.shape[1:]``, where `sendbuf` has the shape (size, \\*rest).
        """
        if recvbuf is None:
            options = {"stream": stream, "timeout": timeout, "compress": compress}
            return results.scattered(self._core, self.reduce_scatter, sendbuf, async_op, op, **options)
        call = calls.reduce_scatter(*self._at, sendbuf, recvbuf, op)
        return self._core.launch(call, async_op, timeout, stream, compress)

    @fast_path(Collective.BROADCAST)
    def broadcast(
        self, buf: Array, root: int = 0, *, stream: object = None, async_op: bool = False, timeout: float | None = None
    ) -> Work:
        """Copy the root's `buf` into every other rank's. Only the root may pass a read-only array."""
        return self._core.launch(calls.broadcast(*self._at, buf, root), async_op, timeout, stream)

    @fast_path(Collective.REDUCE)
    def reduce(
        self, sendbuf: Array, recvbuf: Array | None = None, op: ReduceOp | OpName = "sum", root: int = 0,
        *, stream: object = None, async_op: bool = False, timeout: float | None = None,
    ) -> Work:  # fmt: skip
        """Reduce `sendbuf` over all ranks into the root's `recvbuf`; in place there, and there only, without one."""
        return self._core.launch(calls.reduce(*self._at, sendbuf, recvbuf, op, root), async_op, timeout, stream)

    @overload
    def gather(
        self, sendbuf: A, recvbuf: None = None, root: int = 0, *, async_op: bool = False, **options: Unpack[Options]
    ) -> A | Work: ...
    @overload
    def gather(
        self, sendbuf: Array, recvbuf: Array, root: int = 0, *, async_op: bool = False, **options: Unpack[Options]
    ) -> Work: ...
    @fast_path(Collective.GATHER)
    def gather(
        self, sendbuf: Any, recvbuf: Any = None, root: int = 0,
        *, stream: object = None, async_op: bool = False, timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """Gather every rank's `sendbuf` (count elements) into the root's `recvbuf` (size x count), by rank.

        Without `recvbuf` the result is returned on the root, as by `allgather`, and a Work on the others.
        """
        if recvbuf is None and calls.check_rank(root, self.size, "root") == self.rank:
            options = {"root": root, "stream": stream, "timeout": timeout}
            return results.gathered(self._core, self.gather, sendbuf, async_op, **options)
        return self._core.launch(calls.gather(*self._at, sendbuf, recvbuf, root), async_op, timeout, stream)

    @fast_path(Collective.SCATTER)
    def scatter(
        self, sendbuf: Array | None = None, recvbuf: Array | None = None, root: int = 0,
        *, stream: object = None, async_op: bool = False, timeout: float | None = None,
    ) -> Work:  # fmt: skip
        """Send part r of the root's `sendbuf` (size x count elements) to rank r's `recvbuf` (count)."""
        return self._core.launch(calls.scatter(*self._at, sendbuf, recvbuf, root), async_op, timeout, stream)

    @overload
    def alltoall(self, sendbuf: A, recvbuf: None = None, **options: Unpack[ExchangeOptions]) -> A: ...
    @overload
    def alltoall(
        self, sendbuf: Array, recvbuf: Array, *, async_op: bool = False, **options: Unpack[ExchangeOptions]
    ) -> Work: ...
    @fast_path(Collective.ALLTOALL)
    def alltoall(
        self, sendbuf: Any, recvbuf: Any = None,
        *, sendcounts: Sequence[int] | None = None, recvcounts: Sequence[int] | None = None,
        stream: object = None, async_op: bool = False, timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """Send part r of `sendbuf` to rank r, and receive part r of `recvbuf` from rank r.

        Parts are equal, or as long as `sendcounts` and `recvcounts` say (elements, one a rank; rank a's
        ``sendcounts[b]`` must be rank b's ``recvcounts[a]``). In place (the same array) only with equal parts. Without
        `recvbuf` the result is returned, as by `allgather`: of the shape of `sendbuf`, or flat with `recvcounts`.
        """
        if recvbuf is None:
            options = {"sendcounts": sendcounts, "recvcounts": recvcounts, "stream": stream, "timeout": timeout}
            return results.exchanged(self.alltoall, sendbuf, async_op, **options)
        call = calls.alltoall(*self._at, sendbuf, recvbuf, sendcounts, recvcounts)
        return self._core.launch(call, async_op, timeout, stream)

    @overload
    def allgatherv(
        self, sendbuf: A, recvbuf: None = None, counts: Sequence[int] = ..., **options: Unpack[Options]
    ) -> A: ...
    @overload
    def allgatherv(
        self, sendbuf: Array, recvbuf: Array, counts: Sequence[int],
        *, async_op: bool = False, **options: Unpack[Options],
    ) -> Work: ...  # fmt: skip
    def allgatherv(
        self, sendbuf: Any, recvbuf: Any = None, counts: Sequence[int] = (),
        *, stream: object = None, async_op: bool = False, timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """`allgather` of unequal parts: rank r contributes ``counts[r]`` elements; the same `counts` on all ranks.

        Without `recvbuf` the result is returned, as by `allgather`, flat.
        """
        if recvbuf is None:
            options = {"counts": counts, "stream": stream, "timeout": timeout}
            return results.joined(self.allgatherv, sendbuf, counts, async_op, **options)
        return self._core.launch(calls.allgatherv(*self._at, sendbuf, recvbuf, counts), async_op, timeout, stream)

    @overload
    def reduce_scatterv(
        self, sendbuf: A, recvbuf: None = None, op: ReduceOp | OpName = "sum",
        *, counts: Sequence[int], **options: Unpack[Options],
    ) -> A: ...  # fmt: skip
    @overload
    def reduce_scatterv(
        self, sendbuf: Array, recvbuf: Array, op: ReduceOp | OpName = "sum",
        *, counts: Sequence[int], async_op: bool = False, **options: Unpack[Options],
    ) -> Work: ...  # fmt: skip
    def reduce_scatterv(
        self, sendbuf: Any, recvbuf: Any = None, op: ReduceOp | OpName = "sum",
        *, counts: Sequence[int], stream: object = None, async_op: bool = False, timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """`reduce_scatter` into unequal parts: rank r receives ``counts[r]`` elements; the same on all ranks.

        Without `recvbuf` the result is returned, as by `reduce_scatter`, flat.
        """
        if recvbuf is None:
            options = {"op": op, "counts": counts, "stream": stream, "timeout": timeout}
            mine = calls.all_counts(counts, self.size)[self.rank : self.rank + 1]
            return results.joined(self.reduce_scatterv, sendbuf, mine, async_op, **options)
        call = calls.reduce_scatterv(*self._at, sendbuf, recvbuf, op, counts)
        return self._core.launch(call, async_op, timeout, stream)

    @fast_path(Collective.BARRIER)
    def barrier(self, *, async_op: bool = False, timeout: float | None = None) -> Work:
        """Return (or be done) only when every rank has called it."""
        return self._core.launch(calls.barrier(), async_op, timeout)

    # Persistent operations.

    def allreduce_init(
        self, sendbuf: Array, recvbuf: Array | None = None, op: ReduceOp | OpName = "sum", *, stream: object = None
    ) -> Persistent:
        """The all-reduce of these arrays, to be started again and again: ``op.start()``, ``op.wait()``, ``op.done``.

        What MPI calls persistent. The arrays belong to the operation from `start` to `wait`. Local; the starts are in
        one order on all ranks, as calls are, and match calls of `allreduce`. On a GPU `wait` blocks the host.
        """
        return persistent(self._core, calls.allreduce, self.allreduce, sendbuf, recvbuf, op, stream=stream)

    def allgather_init(self, sendbuf: Array, recvbuf: Array, *, stream: object = None) -> Persistent:
        """As `allreduce_init`, of `allgather`."""
        return persistent(self._core, calls.allgather, self.allgather, sendbuf, recvbuf, stream=stream)

    def reduce_scatter_init(
        self, sendbuf: Array, recvbuf: Array, op: ReduceOp | OpName = "sum", *, stream: object = None
    ) -> Persistent:
        """As `allreduce_init`, of `reduce_scatter`."""
        return persistent(self._core, calls.reduce_scatter, self.reduce_scatter, sendbuf, recvbuf, op, stream=stream)

    def broadcast_init(self, buf: Array, root: int = 0, *, stream: object = None) -> Persistent:
        """As `allreduce_init`, of `broadcast`."""
        return persistent(self._core, calls.broadcast, self.broadcast, buf, root, stream=stream)

    def alltoall_init(self, sendbuf: Array, recvbuf: Array, *, stream: object = None) -> Persistent:
        """As `allreduce_init`, of `alltoall` with equal parts."""
        return persistent(self._core, calls.alltoall, self.alltoall, sendbuf, recvbuf, stream=stream)

    # Python's objects.

    def broadcast_object(
        self, obj: Any = None, root: int = 0, *, limit: int = objects.LIMIT, timeout: float | None = None
    ) -> Any:
        """The root's `obj`, on every rank; on the root itself the very same.

        Objects travel pickled; one that cannot be is a `BufferTypeError`. They need a job with a secret (`hetcoll run`
        makes one) or ``HETCOLL_OBJECTS=1``, else this is an ArgumentError: see docs/security.md. No byte is unpickled
        before it has proved the job's secret. `limit`: bytes of a pickle, the same on all ranks; a longer one is an
        ArgumentError on its own rank before anything is sent. All this holds for the other calls with objects.
        """
        return objects.broadcast(self._core, obj, root, limit, timeout)

    def allgather_object(self, obj: Any, *, limit: int = objects.LIMIT, timeout: float | None = None) -> list[Any]:
        """Every rank's `obj`, by rank, on every rank."""
        return objects.allgather(self._core, obj, limit, timeout)

    def gather_object(
        self, obj: Any, root: int = 0, *, limit: int = objects.LIMIT, timeout: float | None = None
    ) -> list[Any] | None:
        """Every rank's `obj`, by rank, on the root; None on others."""
        return objects.gather(self._core, obj, root, limit, timeout)

    def scatter_object(
        self, objs: Sequence[Any] | None = None, root: int = 0,
        *, limit: int = objects.LIMIT, timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """Object r of the root's `objs`, one a rank, on rank r."""
        return objects.scatter(self._core, objs, root, limit, timeout)

    def send_object(self, obj: Any, peer: int, *, limit: int = objects.LIMIT, timeout: float | None = None) -> None:
        """Send `obj` to `peer`, which calls `recv_object`. In one order with `send`, and may wait as that does."""
        objects.send(self._core, obj, peer, limit, timeout)

    def recv_object(self, peer: int, *, limit: int = objects.LIMIT, timeout: float | None = None) -> Any:
        """The object that `peer` sends by `send_object`. One that is longer than `limit` is received, dropped, and an
        ArgumentError."""
        return objects.recv(self._core, peer, limit, timeout)

    def shards(self, total: int, weight: float = 1.0, *, least: int = 0, timeout: float | None = None) -> list[slice]:
        """Each rank's part of `total` elements, in proportion to the ranks' `weight`, which is above 0: how fast a rank
        is, for example. Parts follow each other by rank, and have `least` elements or more.

        Collective; `total` and `least` are the same on all ranks. The list is the same on all; this rank's part is at
        `rank`.
        """
        return weights.shards(self._core, total, weight, least, timeout)

    # Point to point.

    @fast_path(SEND)
    def send(
        self, buf: Array, peer: int,
        *, tag: int = 0, stream: object = None, async_op: bool = False, timeout: float | None = None,
    ) -> Work:  # fmt: skip
        """Send `buf` to `peer`, which calls `recv` with as many elements and the same `tag`. Returns when `buf` may be
        reused.

        Messages between two ranks arrive in order. A send may or may not wait for its receive: ranks that send to each
        other first must use `group` or ``async_op=True``.

        Those with a `tag` above 0, of host memory, match by it, whatever their order; those of one tag in their order.
        They hold up no other, are never in a `group`, and cost threads and a communicator for each two ranks. What
        comes before its receive is kept in memory.
        """
        return messages.one_way(self._core, SEND, buf, peer, async_op, timeout, stream, tag)

    @fast_path(RECV)
    def recv(
        self, buf: Array, peer: int,
        *, tag: int = 0, stream: object = None, async_op: bool = False, timeout: float | None = None,
    ) -> Work:  # fmt: skip
        """Receive `buf` from `peer`, which calls `send` with as many elements and the same `tag`.

        With a `tag` above 0 `peer` may be `hetcoll.ANY_SOURCE`: the first rank that sends such a message. `source` of
        the Work says which. It asks all ranks, which takes some 0.2 ms, and up to 5 ms where nobody sends at once.
        """
        return messages.one_way(self._core, RECV, buf, peer, async_op, timeout, stream, tag)

    @fast_path(SENDRECV)
    def sendrecv(
        self, sendbuf: Array, dest: int, recvbuf: Array, source: int,
        *, stream: object = None, async_op: bool = False, timeout: float | None = None,
    ) -> Work:  # fmt: skip
        """Send `sendbuf` to `dest` and receive `recvbuf` from `source` at the same time.

        The other halves may be `send`, `recv` or `sendrecv` calls. Both buffers have one dtype; they do not overlap.
        """
        return messages.both_ways(self._core, sendbuf, dest, recvbuf, source, async_op, timeout, stream)

    def group(self) -> contextlib.AbstractContextManager[None]:
        """Sends and receives inside the ``with`` block start together at its end, which waits for all of them.

        So their order does not matter: every rank may send before it receives. Messages to oneself are allowed here.
        It is of the thread that opens it: what other threads send meanwhile is not held back. Nothing else is allowed
        inside: collectives of this thread are an ArgumentError, as are messages with a `timeout` or `stream` of their
        own.
        """
        return messages.Group(self._core, self._end_group)

    def window(self, buf: Array | None = None, *, signals: int = 1, timeout: float | None = None) -> Window:
        """Let every rank put into `buf` and get from it, without a call of this rank: one-sided messages. Collective.

        `buf` is memory of any length, on the host or on this rank's GPU, or None: this rank offers nothing. All have
        one dtype. The memory stays this rank's, which may read and write it at any time; over RDMA it is registered
        until the window's `close`. `signals` counters tell it what has arrived. The first window makes a communicator
        of the same ranks that carries the messages of all windows, with a thread of the engine's.

        Where all GPUs see a window, and HETCOLL_ALGO asks for `allgather:direct`, `broadcast:direct` or
        `alltoall:pairwise` inside an island, what such a call is given there is pulled by the other ranks' copy engines
        straight out of it. It lies at one offset on all ranks then, in place or not, or in no window on any.
        """
        from .runtime import one_sided  # few jobs need it, and imports count

        return one_sided.open_window(self._core, self._make, buf, signals, timeout)

    # Communicators that come from this one.

    def split(self, color: int | None, key: int = 0, *, compress: FormatName | None = None) -> Self | None:
        """A communicator for each `color`: this rank's, with ranks ordered by `key` and then by rank here.

        Collective over this communicator. A rank with `color` None belongs to none and gets None. Both are 64-bit.
        Where a rank dies meanwhile, whatever its color, it is a PeerLostError on all that have not returned.
        `compress`: as `hetcoll.init` has it; by default as here.
        """
        return regroup.split(self._core, color, key, compress, self._make)

    def shrink(self, *, timeout: float | None = None) -> Self:
        """A communicator of the ranks that are left after a failure, in the order of their ranks here.

        Every rank that goes on calls it; it returns when all ranks of this communicator have called it or are gone.
        Ranks that do not call it within `timeout` seconds (default: HETCOLL_INIT_TIMEOUT) are left out, and when they
        call it later they get an `InitError`. So are those that have called it and then do not answer for half as long:
        the others agree anew, for which they wait half as long again. The new communicator has memory, connections and
        signatures of its own, so nothing that is still under way from before can reach it. This one is afterwards good
        for `close` only.

        The process that hosts the job's store, rank 0's at first, may be among the lost: another one takes its place.
        PeerLostError where none does: less than half of the job's processes find each other, and cannot tell whether
        the others live.
        """
        return regroup.shrink(self._core, timeout, self._make)

    def grow(self, newcomers: int = 1, *, timeout: float | None = None) -> Self:
        """A communicator of these ranks, which keep their numbers, and of so many `newcomers`, which have the next.

        Collective, with the same number on all ranks. Newcomers are processes that call `hetcoll.init` with
        ``join=True``, or `Communicator.join`; those that came first are taken. Their settings are compared as at
        `init`; `compress` they have from here. This communicator stays as it is: close it when it is of no more use.

        All ranks have the new one, or all get the same error, and newcomers an `InitError` or `PeerLostError`:
        `InitError` where a rank or newcomers do not come within `timeout` seconds (default: HETCOLL_INIT_TIMEOUT), or
        settings differ; PeerLostError where a rank of this communicator is lost. Once all are there they have
        HETCOLL_INIT_TIMEOUT to become one. In the place of a newcomer that dies meanwhile the next is awaited.
        """
        return regroup.grow(self._core, newcomers, timeout, self._make)

    def agree(self, flag: int = 1, *, timeout: float | None = None) -> int:
        """The bits that the `flag` of every rank has: the same on all ranks, whoever dies. Also after a failure.

        What ULFM calls so. Collective over the ranks that are alive, in one order on all; a rank that died before it
        called does not count. After a call that may have failed on some ranks only, ``agree(ok)`` tells all whether to
        `shrink`. `flag`: a bool or 64 bits. `InitError` on all where a rank that is alive does not call within
        `timeout` seconds (default: HETCOLL_TIMEOUT), PeerLostError where the job's store is gone.
        """
        return regroup.agree(self._core, flag, timeout)

    def _make(
        self, name: bytes, members: list[int], timeout: float, form: Format | None = None, check: bool = True
    ) -> Self:
        """The communicator called `name` of these ranks, this one among them."""
        config = regroup.configure(self._config, members, form, check)
        # Ctrl-C must not drop it unseen, as what `type(self)(...)` gives: others would take that for a goodbye.
        made = type(self).__new__(type(self))
        with regroup.in_ranks_of_parent(members), coming_together():
            made.__init__(self._session, name, members.index(self._rank), len(members), config, timeout)  # type: ignore[misc]
        return made

    # Memory.

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32", *, device: str = "cpu") -> np.ndarray[Any, Any]:
        """An uninitialised array in memory that all ranks of this host have mapped, and that is registered with the
        RDMA devices in use: it moves without a staging copy.

        `dtype` is a NumPy dtype, a `DType` or its label; some need the package ml_dtypes. The memory is given back when
        the last array that uses it is gone, which may be after `close`. Alone on a host without RDMA, or over TCP only,
        it is ordinary memory. ArgumentError where this rank's part of the shared memory has not so much left, or a
        `shape` is none; MemoryError where there is not so much ordinary memory.
        """
        return registration.empty(self._core, shape, dtype, device)

    def register(self, buf: Any) -> Registration:
        """Announce memory that will be sent from or received into again and again, so that transports that must
        prepare memory do so once. It stays announced until the result's `close`, or the end of its ``with`` block.

        RDMA devices then read and write it where it is, without a staging copy: memory of GPUs as well, as a dma-buf.
        Shared memory and TCP need no preparation, so there it changes nothing; `empty` gives memory that shared memory
        moves without a staging copy. RegistrationError where it cannot be had.
        """
        return registration.register(self._core, buf)

    def reset_feedback(self) -> None:
        """Forget what compression has lost so far of each buffer, which later calls would add: for new data in the
        memory of old, such as another model's gradients. Local; gives the memory back.
        """
        self._host.check_parent()
        self._core.compression.forget()

    # Telling.

    def explain(self, op: str, nbytes: int, *, compress: FormatName | None = None) -> Explanation:
        """Which algorithm, channels and transports a collective of `nbytes` uses, and why. Local; sends nothing.

        `compress` as the call would have it, on host memory. Of compressed edges it tells what they make of float32.
        """
        return self._core.explain(op, nbytes, compress)

    def counters(self) -> dict[str, int]:
        """What this rank has counted since the communicator came to be, for tests and for people.

        ``collectives`` and ``messages`` that were started. ``shm_staged_bytes`` were copied to where ranks of the host
        read them, ``shm_lent_bytes`` are read where they lie, and ``shm_copied_bytes`` came to their place through
        shared memory, by a copy; with RDMA also pieces and bytes sent, copied and lent,
        pieces that were sent again, rails lost, under ``memory_`` what is registered, under ``gpu_`` the
        same of what GPUs send to other hosts; with compression
        ``compressed_before`` and ``compressed_after``, bytes of the messages that it made smaller, ``residual_bytes``
        kept for error feedback and ``residuals_dropped`` for want of room. ``checked_bytes`` came over TCP or
        RDMA with a checksum, and ``spoiled_pieces`` with a wrong one, of which ``resent_pieces`` came right when they
        were sent again (HETCOLL_INTEGRITY). ``tcp_reconnects``: TCP sockets that were reset, or dropped for that, and
        made again. ``stale_refused``, on the rank that hosts the job's store: what ranks asked of their group
        after the others had gone on without them. Also after a failure.
        """
        return self._core.counters()

    def memory(self) -> dict[str, int]:
        """What this rank holds for this communicator now, counted from what holds it. Local; also after a failure.

        Bytes: ``slots`` of shared memory through which its messages leave (address space: a page is taken when it is
        first used), ``arrays`` of `empty` in shared memory, ``pinned`` memory of GPUs' slots (of those that ranks of
        the host share, this rank's part), of copies that checks look at, and of RDMA, ``plans``, ``scratch`` of plans,
        ``residuals`` of compression, and ``sockets``: the most that the kernel may keep in those of its links, and
        copies of what may have to be sent again. Then the number of ``descriptors``, and of ``threads``. The connection
        to the store counts in the communicator of all ranks, and so does the store on the rank that hosts it. What
        vendors' libraries hold is not in it.
        """
        self._host.check_open()
        return self._core.memory()

    def dump(self, most: int = 64) -> str:
        """The last `most` calls of this rank, a line each: number, what, where it was first called so, bytes, when it
        began and how long it took. Local, from any thread, also while a call waits.

        The recorder is always on. It holds 1023 collectives and as many sends and receives. On a GPU a call ends where
        the host does not see it. With ``HETCOLL_SIGUSR2=1`` the signal SIGUSR2 prints this for all communicators.
        """
        return self._core.dump(most)

    def trace(self, path: str, *, timeout: float = 10.0) -> None:
        """Write the last calls of all ranks to `path`, as a trace that Perfetto and Chrome open, on this rank's clock.

        One rank calls it, at any time; the others answer while they wait, too. Between hosts clocks are compared by
        asking: the file says how far they may be off (``otherData``: ``clock_error_us`` by rank, ``silent_ranks``).
        `CommunicationError` when no rank answers within `timeout` seconds.
        """
        self._core.trace(path, timeout)

    def __repr__(self) -> str:
        return f"<{self._name()}{' closed' if self._closed else ''}>"

    def _name(self) -> str:
        return f"hetcoll.{type(self).__name__} rank {self._rank} of {self._size}"

    # Failing and ending.

    def abort(self, reason: str = "") -> None:
        """End every operation in flight, here at once and on the other ranks as soon as they hear of it.

        May be called from any thread, also while another one is stuck in a call, which then raises `AbortedError`.
        Needs no other rank's help. Afterwards only `close`, `agree` and `shrink` are of use.
        """
        self._core.abort(reason)

    def close(self) -> None:
        """Give everything back: links, threads, shared memory. More than once is fine.

        Does not wait for other ranks' calls. Over TCP it waits until what this rank sent has come to their hosts, as
        long as any of it arrives within 5 s.

        Operations still in flight here fail with `AbortedError`; ranks that need this one get a `PeerLostError`.
        A communicator whose last reference goes is closed soon after, with a ResourceWarning. A `Work` refers to its
        communicator until it was waited for.
        """
        if self._closed:
            return
        first = False  # of several threads that close it
        try:
            with self._core.choosing:
                first, self._closed = not self._closed, True
                self._host.closed = True
            if first:
                self._give_back()
        except (KeyboardInterrupt, SystemExit):  # of a signal handler: nobody closes it a second time
            if first:
                lifetime.drop(self._give_back)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None and not self._closed and not issubclass(kind, CommunicationError):
            self._core.lose(error)
        self.close()

    def __del__(self) -> None:
        if self._closed:
            return
        self._closed = self._host.closed = True
        lifetime.drop(self._give_back)
        warnings.warn(f"<{self._name()}> was not closed", ResourceWarning, source=self, stacklevel=2)

    def __reduce_ex__(self, protocol: object) -> Any:
        # A copy would own the same links: when it goes, it would close them under this one.
        raise TypeError(f"<{self._name()}> cannot be copied or pickled; pass it as it is, or split it for another")

    def _give_back(self) -> None:
        lifetime.forget(self)
        with self._core.choosing:
            self._call = refuse
        self._core.close()

    def abandon(self) -> None:
        """In a forked child: nothing of the parent's may be touched."""
        self._closed = self._host.closed = True
        self._call = refuse
        self._engine.abandon()

    # What the engine, a `Work` and a `Group` call. Others find this rank in these frames where a call has no method's.

    def _stuck(self, status: Status) -> None:
        """The fast path's second half: a call without a Python frame was not complete in time."""
        self._host.stuck(status)

    def _wait(self, ticket: Ticket, timeout: float | None) -> None:
        self._host.check_parent()
        self._host.wait(ticket, self._core.seconds(timeout))

    def _check_limit(self, ticket: Ticket, waited: float) -> None:
        if waited >= self._config.timeout:
            self._host.wait(ticket, self._config.timeout, waited)

    def _end_group(self, run: bool) -> None:
        messages.end_group(self._core, run)

    def _check_parent(self) -> None:
        self._host.check_parent()

    def _failure(self) -> CommunicationError | None:
        return self._diagnosis.known_error() if self._engine.failed else None


give_hints(Communicator, NAMES)
give_hints(Work, OF_WORK)
