"""What every communicator does beneath its operations: come to be, run calls, wait, fail, split, end."""

from __future__ import annotations

import contextlib
import logging
import math
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

import numpy as np

from .. import _native, calls, lifetime
from ..buffers import Buffer, element_type, read_buffer
from ..calls import OP_LABELS, Call, check_int
from ..config.env import Config
from ..errors import ArgumentError, CommunicationError, InitError
from ..health.diagnosis import Diagnosis, Kind
from ..links.wiring import Wiring
from ..plan.topology import Topology
from ..rendezvous.session import Session
from ..work import DONE, Work
from .compression import Compression
from .executor import Executor, FastPath, OpenGpus
from .host import HostExecutor
from .planner import Explanation, Planner
from .registration import Registration

if TYPE_CHECKING:
    from .crosscheck import CrossCheck

log = logging.getLogger("hetcoll")

T = TypeVar("T")
P = ParamSpec("P")

_MEETING_BYTES = 1024


class Core:
    """See `hetcoll.Communicator`."""

    _open_gpus: OpenGpus  # what GPUs need is above this floor
    _closed = True  # until there is something to close

    def __init__(self, session: Session, group: bytes, rank: int, size: int, config: Config, timeout: float) -> None:
        self._session, self._group, self._config = session, group, config
        self._rank, self._size = rank, size
        self._diagnosis = Diagnosis(session, group, rank, size)
        deadline = time.monotonic() + timeout
        with contextlib.ExitStack() as undo:
            session.join(group, rank, size, self._diagnosis.on_event, timeout)
            undo.callback(session.leave, group)
            self._wiring = Wiring(session.control, group, rank, size, config, deadline - time.monotonic())
            undo.callback(self._wiring.close)
            self._engine = self._wiring.engine
            undo.callback(self._engine.close)
            self._call: FastPath = _refuse if config.check else self._engine.call
            self._compression = Compression(self._wiring.topology, config.compress, config.compress_feedback)
            wiring = self._wiring
            self._planner = Planner(lambda: wiring.topology, rank, config.algo, self._compression)
            host = self._host = HostExecutor(
                self, wiring, self._diagnosis, self._planner, self._compression, config.timeout
            )
            # Weakly, since the engine must not keep its communicator alive.
            self._engine.set_ops(
                OP_LABELS, DONE, _weakly(self._stuck), _weakly(host.interrupted), _weakly(self._log_news)
            )
            self._diagnosis.attach(self._engine, host.reporter)
            self._gpus = host.gpus = self._open_gpus(
                wiring,
                self._diagnosis,
                self._planner,
                self._compression,
                config,
                meet=_weakly(self._meet),
                prepare=_weakly(host.prepare),
            )
            undo.pop_all()
        self._cross: CrossCheck | None = None
        if config.check:
            from .crosscheck import CrossCheck  # few jobs need it, and imports count

            self._cross = CrossCheck(rank, _weakly(self._meet), self._diagnosis)
        self._closed = False
        lifetime.watch(self, weakly=True)
        log.info("rank %d of %d: %s", rank, size, self._wiring.topology)

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
    def session(self) -> Session:
        """This process's membership in the job, which all its communicators share."""
        return self._session

    @property
    def error(self) -> CommunicationError | None:
        """What the communicator has failed with, or None. Never blocks, and never changes once it is there."""
        self._check_parent()
        return self._failure()

    # Running calls.

    def _launch(self, call: Call, async_op: bool, timeout: float | None, stream: object = None) -> Work:
        """The slow path: for shapes not seen before, asynchronous calls, deadlines of their own and GPU buffers."""
        self._check_usable()
        seconds = self._seconds(timeout)
        if self._cross is None or async_op or call.label:
            return self._start(call, async_op, seconds, stream)
        converts = self._gpus.converts(call, stream)
        self._cross.before(call, converts)
        work = self._start(call, async_op, seconds, stream)
        self._cross.after(call, converts)
        return work

    def _start(self, call: Call, async_op: bool, seconds: float, stream: object) -> Work:
        buffer = call.send or call.recv
        if buffer is None or call.label:
            return self._host.run(call, stream, async_op, seconds)
        with self._executor(buffer, stream) as executor:
            return executor.run(call, stream, async_op, seconds)

    @contextlib.contextmanager
    def _executor(self, buffer: Buffer, stream: object) -> Iterator[Executor]:
        """What runs calls on such memory, for the ``with`` block; on a GPU's, one thread at a time."""
        self._gpus.check_place(buffer)
        if buffer.device == "cpu":
            yield self._host
            return
        with self._gpus.turn:
            executor = self._gpus.on_gpu(buffer, stream)
            self._choose_fast_path()  # from the first call on, the fast path tries the GPU's, too
            yield executor

    def _choose_fast_path(self) -> None:
        """What the methods of calls try first: the host's, or the GPU's once there is one, which takes both."""
        executor = self._gpus.executor or self._host
        self._call = executor.fast_path if self._takes_fast_path() else _refuse

    def _takes_fast_path(self) -> bool:
        return not self._closed and not self._config.check

    def _meet(self, label: str, blob: bytes, timeout: float | None = None) -> list[bytes]:
        """Every rank's `blob`, by rank. A collective call that is called `label` in errors."""
        if len(blob) > _MEETING_BYTES:
            raise InitError(f"{label}: {len(blob)} bytes to tell the other ranks, room for {_MEETING_BYTES}")
        mine = np.frombuffer(blob.ljust(_MEETING_BYTES), np.uint8)
        rows = np.empty((self._size, _MEETING_BYTES), np.uint8)
        self._launch(calls.meeting(self._rank, label, mine, rows), False, timeout)
        return [row.tobytes().rstrip() for row in rows]

    def _stuck(self, status: _native.Status) -> None:
        """The fast path's second half: a call that has no Python frame has this one, by which others find it."""
        self._host.stuck(status)

    def _wait(self, ticket: _native.Ticket, timeout: float | None) -> None:
        self._check_parent()
        self._host.wait(ticket, self._seconds(timeout))

    # Memory.

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32", *, device: str = "cpu") -> np.ndarray[Any, Any]:
        """An uninitialised array in memory that all ranks of this host have mapped, and that is registered with the
        RDMA devices in use: it moves without a staging copy.

        `dtype` is a NumPy dtype, or the name of one of ml_dtypes'. The memory is given back when the last array that
        uses it is gone, which may be after `close`. Alone on a host without RDMA, or over TCP only, it is ordinary
        memory. ArgumentError where this rank's part of the shared memory has not so much left, or a `shape` is none;
        MemoryError where there is not so much ordinary memory.
        """
        self._check_usable()
        if device != "cpu":
            raise ArgumentError(f"device: wanted 'cpu', got {device!r}")
        kind = element_type(dtype)
        extents = [check_int(n, "shape") for n in (shape if isinstance(shape, Sequence) else (shape,))]
        if min(extents, default=0) < 0:
            raise ArgumentError(f"shape: wanted extents of 0 or more, got {shape!r}")
        if math.prod(n for n in extents if n) * kind.itemsize >= 1 << 63:  # NumPy leaves zeros out as well
            raise ArgumentError(f"shape: wanted less than 2**63 bytes, got {shape!r} of {kind.itemsize} bytes each")
        nbytes, memory = math.prod(extents) * kind.itemsize, self._wiring.memory
        try:
            raw = self._engine.empty(nbytes)
        except ValueError as error:
            raise ArgumentError(f"shape: {error}") from None
        if memory is not None and nbytes >= memory.least:
            raw = memory.empty(nbytes, raw)
        return np.empty(extents, kind) if raw is None else raw.view(kind).reshape(extents)

    def register(self, buf: Any) -> Registration:
        """Announce memory that will be sent from or received into again and again, so that transports that must
        prepare memory do so once. It stays announced until the result's `close`, or the end of its ``with`` block.

        RDMA devices then read and write it where it is, without a staging copy: memory of GPUs as well, as a dma-buf.
        Shared memory and TCP need no preparation, so there it changes nothing; `empty` gives memory that shared memory
        moves without a staging copy. RegistrationError where it cannot be had.
        """
        self._check_usable()
        buffer, memory = read_buffer(buf, "buf", writable=False), self._wiring.memory
        if memory is None or buffer.nbytes == 0:
            return Registration(buffer)
        gpu = None
        if buffer.device != "cpu":
            gpu = self._gpus.device_of(buffer)
        return Registration(buffer, memory.lease(buffer.ptr, buffer.nbytes, buffer.owner, gpu))

    def counters(self) -> dict[str, int]:
        """What this rank has counted since the communicator came to be, for tests and for people.

        ``collectives`` and ``messages`` that were started; with RDMA also pieces and bytes sent, copied and lent,
        pieces that were sent again, rails lost, under ``memory_`` what is registered, under ``gpu_`` the
        same of what GPUs send to other hosts; with compression
        ``compressed_before`` and ``compressed_after``, bytes of the messages that it made smaller, ``residual_bytes``
        kept for error feedback and ``residuals_dropped`` for want of room.
        """
        self._check_usable()
        memory = self._wiring.memory
        found = {"collectives": self._engine.collectives, "messages": self._engine.messages} | self._engine.counters()
        found |= self._compression.counters()
        found |= {} if memory is None else {f"memory_{name}": n for name, n in memory.counters.items()}
        return found | self._gpus.counters()

    def reset_feedback(self) -> None:
        """Forget what compression has lost so far of each buffer, which later calls would add: for new data in the
        memory of old, such as another model's gradients. Local; gives the memory back.
        """
        self._check_parent()
        self._compression.forget()

    # Ending and failing.

    def _seconds(self, timeout: float | None) -> float:
        if timeout is None:
            return self._config.timeout
        if not isinstance(timeout, int | float) or not timeout > 0:
            raise ArgumentError(f"timeout: wanted seconds above 0, got {timeout!r}")
        return float(timeout)

    def _check_parent(self) -> None:
        """ClosedError in a forked child: the links are its parent's."""
        self._host.check_parent()

    def _check_usable(self) -> None:
        self._host.check_usable()

    def _check_failed(self) -> None:
        if self._engine.failed:
            raise self._diagnosis.error()

    def _failure(self) -> CommunicationError | None:
        return self._diagnosis.known_error() if self._engine.failed else None

    def abort(self, reason: str = "") -> None:
        """End every operation in flight, here at once and on the other ranks as soon as they hear of it.

        May be called from any thread, also while another one is stuck in a call, which then raises `AbortedError`.
        Needs no other rank's help. Afterwards only `close` and `shrink` are of use.
        """
        if self._closed or self._engine.forked:
            return
        text = f"rank {self._rank} called abort()" + (f": {reason}" if reason else "")
        self._engine.fail(Kind.ABORTED, self._rank, text)
        self._diagnosis.post(Kind.ABORTED, self._rank, text)

    def close(self) -> None:
        """Give everything back: links, threads, shared memory. Does not wait for other ranks. More than once is fine.

        Operations still in flight here fail with `AbortedError`; ranks that need this one get a `PeerLostError`.
        A communicator whose last reference goes is closed soon after, with a ResourceWarning. A `Work` refers to its
        communicator until it was waited for.
        """
        if not self._closed:
            self._closed = self._host.closed = True
            self._give_back()

    def __del__(self) -> None:
        if self._closed:
            return
        self._closed = self._host.closed = True
        lifetime.drop(self._give_back)
        warnings.warn(f"<{self._name()}> was not closed", ResourceWarning, source=self, stacklevel=2)

    def _give_back(self) -> None:
        lifetime.forget(self)
        self._call = _refuse
        if self._engine.forked:
            return
        self._log_news()
        if self._gpus.executor is not None:
            self._gpus.executor.close()
        self._host.close()
        if self._gpus.cpu_rank is not None:
            self._gpus.cpu_rank.close()
        self._planner.forget()
        self._compression.forget()
        self._session.leave(self._group)
        self._wiring.close()

    def abandon(self) -> None:
        """In a forked child: nothing of the parent's may be touched."""
        self._closed = self._host.closed = True
        self._call = _refuse
        self._engine.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None and not self._closed and not issubclass(kind, CommunicationError):
            self._tell_exit(error)
        self.close()

    def _tell_exit(self, error: BaseException | None) -> None:
        """An exception leaves the ``with`` block: the others must not wait for this rank. One that ends the program
        without an error is a goodbye, which `close` says."""
        if self._engine.forked or (isinstance(error, SystemExit) and error.code in (None, 0)):
            return
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else 1  # Python's own rule
            reason = f"sys.exit({error.code!r}) ended it with status {code}"
        else:
            reason = f"it raised {type(error).__name__}: {error}"
        text = f"rank {self._rank} was lost: {reason}"
        self._engine.fail(Kind.PEER_GONE, self._rank, text)
        self._diagnosis.post(Kind.PEER_GONE, self._rank, text)

    # Telling.

    def explain(self, op: str, nbytes: int, *, compress: str | None = None) -> Explanation:
        """Which algorithm, channels and transports a collective of `nbytes` uses, and why. Local; sends nothing.

        `compress` as the call would have it, on host memory. Of compressed edges it tells what they make of float32.
        """
        self._check_usable()
        self._log_news()
        found = self._planner.explain(op, nbytes, compress, self._host.plans.paths)
        return found._replace(paths=found.paths + self._gpus.describe(), gpus=self._gpus.explain(op, nbytes))

    def _log_news(self) -> None:
        """Tell what links lost, and how they went on: once each."""
        for text in self._engine.events():
            log.warning("%s", text)

    def __repr__(self) -> str:
        return f"<{self._name()}{' closed' if self._closed else ''}>"

    def _name(self) -> str:
        return f"hetcoll.{type(self).__name__} rank {self._rank} of {self._size}"


def _weakly(method: Callable[P, T]) -> Callable[P, T]:
    """Calls a method of an object that it does not keep alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        found = reference()
        assert found is not None, "it is in a call"
        return found(*args, **kwargs)

    return call


def _refuse(*args: object) -> None:
    """Stands in for the engine's call after `close` and under HETCOLL_CHECK: the fast path needs no test of its own."""
