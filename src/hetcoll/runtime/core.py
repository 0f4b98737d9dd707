"""What every communicator does beneath its operations: come to be, run calls, wait, fail, split, end."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

import numpy as np

from .. import _native, calls, lifetime
from ..buffers import Buffer, element_type, read_buffer
from ..calls import OP_LABELS, Call, check_int
from ..config.env import Config
from ..errors import ArgumentError, ClosedError, CommunicationError, HetcollError, InitError
from ..gpu.open import GpuPaths
from ..health.diagnosis import Diagnosis, Kind, Vigil
from ..health.status_report import Witness
from ..links.wiring import PATIENCE, Check, Wiring
from ..plan.topology import Topology
from ..rendezvous.session import Session
from ..work import DONE, Work, finished
from .compression import Compression, float32_zeros
from .registration import Registration
from .selection import Explanation, Selection

if TYPE_CHECKING:
    from ..gpu.executor import GpuPath
    from ..health.crosscheck import CrossCheck

log = logging.getLogger("hetcoll")

T = TypeVar("T")
P = ParamSpec("P")

_MEETING_BYTES = 1024


class Core:
    """See `hetcoll.Communicator`."""

    def __init__(self, session: Session, group: bytes, rank: int, size: int, config: Config, timeout: float) -> None:
        self._session, self._group, self._config = session, group, config
        self._rank, self._size = rank, size
        self._closed = False
        self._pending: list[Work] = []  # keeps the memory of asynchronous calls alive
        self._pending_lock = threading.Lock()
        self._prune_at = 16
        self._diagnosis = Diagnosis(session, group, rank, size)
        deadline = time.monotonic() + timeout
        with contextlib.ExitStack() as undo:
            session.join(group, rank, size, self._diagnosis.on_event, timeout)
            undo.callback(session.leave, group)
            self._wiring = Wiring(session.control, group, rank, size, config, deadline - time.monotonic())
            undo.callback(self._wiring.close)
            self._engine = self._wiring.engine
            undo.callback(self._engine.close)
            # Weakly, since the engine must not keep its communicator alive.
            self._engine.set_ops(
                OP_LABELS, DONE, _weakly(self._stuck), _weakly(self._interrupted), _weakly(self._log_news)
            )
            self._call: Callable[..., Work | None] = _refuse if config.check else self._engine.call
            self._compression = Compression(self._wiring.topology, config.compress, config.compress_feedback)
            self._selection = Selection(self._wiring, config, self._compression)
            self._witness = Witness(self, self._engine, self._selection.describe)
            self._diagnosis.attach(self._engine, self._witness)
            self._paths = GpuPaths(
                self._wiring,
                self._diagnosis,
                self._selection,
                self._compression,
                config,
                meet=_weakly(self._meet),
                prepare=_weakly(self._prepare),
            )
            undo.pop_all()
        self._cross: CrossCheck | None = None
        if config.check:
            from ..health.crosscheck import CrossCheck  # few jobs need it, and imports count

            self._cross = CrossCheck(rank, self._meet, self._diagnosis)
        lifetime.watch(self)
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
        return self._failure()

    # Running calls.

    def _launch(self, call: Call, async_op: bool, timeout: float | None, stream: object = None) -> Work:
        """The long way: for shapes not seen before, asynchronous calls, deadlines of their own and GPU buffers."""
        self._check_usable()
        seconds = self._seconds(timeout)
        if self._cross is None or async_op or call.label:
            return self._start(call, async_op, seconds, stream)
        converts = self._paths.converts(call, stream)
        self._cross.before(call, converts)
        work = self._start(call, async_op, seconds, stream)
        self._cross.after(call, converts)
        return work

    def _start(self, call: Call, async_op: bool, seconds: float, stream: object) -> Work:
        buffer = call.send or call.recv
        among = None
        if buffer is not None and not call.label:
            self._paths.check_place(buffer)
            if buffer.device != "cpu":
                return self._on_gpu(buffer, stream).launch(call, stream, async_op)
            among = self._paths.on_host()
        finish = None
        if among is not None:
            call, finish = among.converted(call)
        plans = among or self._selection
        witness, thread = self._witness, threading.get_ident()
        witness.calls[thread], witness.preparing = call.describe(), thread
        try:
            shape = self._prepare(lambda check: plans.shape(call, seconds, check), seconds)
            if among is not None:
                among.note(call)
            witness.preparing = None
            send = 0 if call.send is None else call.send.ptr
            recv = 0 if call.recv is None else call.recv.ptr
            residual = self._compression.residual(call, shape, float32_zeros) if call.compress else None
            buffers = (call.send, call.recv)
            return finished(self._run(shape, send, recv, async_op, seconds, buffers, residual=residual), finish)
        finally:
            witness.preparing = None
            witness.calls.pop(thread, None)

    def _on_gpu(self, buffer: Buffer, stream: object) -> GpuPath:
        """The way of calls on a GPU's memory; from the first one on the short way tries it, too."""
        path = self._paths.on_gpu(buffer, stream)
        if not self._config.check:
            self._call = path.call
        return path

    def _meet(self, label: str, blob: bytes, timeout: float | None = None) -> list[bytes]:
        """Every rank's `blob`, by rank. A collective call that is called `label` in errors."""
        if len(blob) > _MEETING_BYTES:
            raise InitError(f"{label}: {len(blob)} bytes to tell the other ranks, room for {_MEETING_BYTES}")
        mine = np.frombuffer(blob.ljust(_MEETING_BYTES), np.uint8)
        rows = np.empty((self._size, _MEETING_BYTES), np.uint8)
        self._launch(calls.meeting(self._rank, label, mine, rows), False, timeout)
        return [row.tobytes().rstrip() for row in rows]

    def _prepare(self, find: Callable[[Check], T], seconds: float) -> T:
        """`find` a bound plan. The first one between two ranks may have to wait until the other one connects."""
        deadline = time.monotonic() + seconds
        vigil: Vigil | None = None

        def check(peers: Collection[int]) -> None:
            nonlocal vigil
            vigil = vigil or self._diagnosis.vigil()
            self._witness.looks += 1
            self._check_usable()
            self._diagnosis.check_present(peers)
            vigil.look()

        try:
            return find(check)
        except InitError as error:
            raise self._diagnosis.unconnected(error, deadline, seconds) from error
        except (HetcollError, _native.PlanError):
            self._check_usable()
            raise
        except BaseException:
            self._give_up()
            raise

    def _run(
        self,
        shape: _native.Shape,
        send: int,
        recv: int,
        async_op: bool,
        seconds: float,
        keep: Any,
        *,
        background: bool = True,
        residual: np.ndarray[Any, Any] | None = None,
    ) -> Work:
        engine, lost = self._engine, 0 if residual is None else residual.ctypes.data
        if async_op:
            ticket = engine.submit(shape, send, recv, background, lost)
            work = Work(
                self,
                ticket,
                keep if residual is None else (keep, residual),
                self._witness.calls.get(threading.get_ident(), ""),
            )
            with self._pending_lock:
                if len(self._pending) >= self._prune_at:
                    self._pending = [w for w in self._pending if not w.done]
                    self._prune_at = 2 * len(self._pending) + 16
                self._pending.append(work)
            return work
        first = min(seconds, PATIENCE)
        status = engine.run(shape, send, recv, first, lost)
        if status is not _native.Status.DONE:
            self._finish(status, engine.pending, seconds, first)
        return DONE

    def _finish(self, status: _native.Status, ticket: _native.Ticket, seconds: float, waited: float) -> None:
        """Wait on after a first attempt that gave up after `waited` of `seconds`; raises what went wrong."""
        deadline = time.monotonic() + seconds - waited
        vigil = self._diagnosis.vigil(waited)
        try:
            while status is _native.Status.TIMED_OUT:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._diagnosis.timeout(seconds)
                vigil.look()
                status = self._engine.wait(ticket, min(left, vigil.seconds()))
            if status is _native.Status.FAILED:
                raise self._diagnosis.error()
        except HetcollError:
            raise
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        """A signal handler raised while a call was under way: nothing may touch its memory any more, nobody wait."""
        self._engine.fail(Kind.ABORTED, self._rank, f"rank {self._rank} was interrupted")
        self._interrupted()

    def _stuck(self, status: _native.Status) -> None:
        """The short way's second half, when a call was not complete in time: waits on, or raises."""
        seconds = self._config.timeout
        self._finish(status, self._engine.pending, seconds, min(PATIENCE, seconds))

    def _wait(self, ticket: _native.Ticket, timeout: float | None) -> None:
        seconds = self._seconds(timeout)
        first = min(seconds, PATIENCE)
        self._finish(self._engine.wait(ticket, first), ticket, seconds, first)

    # Memory.

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32", *, device: str = "cpu") -> np.ndarray[Any, Any]:
        """An uninitialised array in memory that all ranks of this host have mapped, and that is registered with the
        RDMA devices in use: it moves without a staging copy.

        `dtype` is a NumPy dtype, or the name of one of ml_dtypes'. The memory is given back when the last array that
        uses it is gone, which may be after `close`. Alone on a host without RDMA, or over TCP only, it is ordinary
        memory.
        """
        self._check_usable()
        if device != "cpu":
            raise ArgumentError(f"device: wanted 'cpu', got {device!r}")
        kind = element_type(dtype)
        extents = [check_int(n, "shape") for n in (shape if isinstance(shape, Sequence) else (shape,))]
        if min(extents, default=0) < 0:
            raise ArgumentError(f"shape: wanted extents of 0 or more, got {shape!r}")
        nbytes, memory = math.prod(extents) * kind.itemsize, self._wiring.memory
        raw = self._engine.empty(nbytes)
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
            from ..vendor.facts import device_of

            gpu = device_of(buffer)
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
        return found | self._paths.counters()

    def reset_feedback(self) -> None:
        """Forget what compression has lost so far of each buffer, which later calls would add: for new data in the
        memory of old, such as another model's gradients. Local; gives the memory back.
        """
        self._compression.forget()

    # Ending and failing.

    def _seconds(self, timeout: float | None) -> float:
        if timeout is None:
            return self._config.timeout
        if not isinstance(timeout, int | float) or not timeout > 0:
            raise ArgumentError(f"timeout: wanted seconds above 0, got {timeout!r}")
        return float(timeout)

    def _check_usable(self) -> None:
        if self._engine.forked:
            raise ClosedError("this communicator belongs to the parent of this forked process")
        if self._closed:
            raise ClosedError("this communicator was closed")
        self._check_failed()

    def _check_failed(self) -> None:
        if self._engine.failed:
            raise self._diagnosis.error()

    def _failure(self) -> CommunicationError | None:
        return self._diagnosis.known_error() if self._engine.failed else None

    def _interrupted(self) -> None:
        """A signal handler raised inside a call (Ctrl-C): the others must not wait for this rank."""
        self._diagnosis.post(Kind.ABORTED, self._rank, f"rank {self._rank} was interrupted")

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
        """
        if self._closed:
            return
        self._closed = True
        lifetime.forget(self)
        self._call = _refuse
        if self._engine.forked:
            return
        self._log_news()
        if self._paths.gpu is not None:
            self._paths.gpu.close()
        self._engine.close()  # from here on nothing of ours touches the memory of calls in flight
        with self._pending_lock:
            self._pending.clear()
        if self._paths.host is not None:
            self._paths.host.close()
        self._selection.close()
        self._compression.forget()
        self._session.leave(self._group)
        self._wiring.close()

    def abandon(self) -> None:
        """In a forked child: nothing of the parent's may be touched."""
        self._closed, self._call = True, _refuse

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None and not self._closed and not issubclass(kind, CommunicationError):
            self.abort(f"{kind.__name__}: {error}")
        self.close()

    # Telling.

    def explain(self, op: str, nbytes: int, *, compress: str | None = None) -> Explanation:
        """Which algorithm, channels and transports a collective of `nbytes` uses, and why. Local; sends nothing.

        `compress` as the call would have it, on host memory. Of compressed edges it tells what they make of float32.
        """
        self._check_usable()
        self._log_news()
        found = self._selection.explain(op, nbytes, compress)
        return found._replace(paths=found.paths + self._paths.describe(), gpus=self._paths.explain(op, nbytes))

    def _log_news(self) -> None:
        """Tell what links lost, and how they went on: once each."""
        for text in self._engine.events():
            log.warning("%s", text)

    def __repr__(self) -> str:
        state = " closed" if self._closed else ""
        return f"<hetcoll.{type(self).__name__} rank {self._rank} of {self._size}{state}>"


def _weakly(method: Callable[P, T]) -> Callable[P, T]:
    """Calls a method of an object that it does not keep alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        found = reference()
        assert found is not None, "it is in a call"
        return found(*args, **kwargs)

    return call


def _refuse(*args: object) -> None:
    """Stands in for the engine's call after `close` and under HETCOLL_CHECK: the short way needs no test of its own."""
