"""The host executor: from a checked call on host memory to a plan that the engine has bound, and runs."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

import hetcoll._native as _native

from ..calls import RECV, SEND, Call, descriptor
from ..calls.buffers import Buffer, read_buffer
from ..calls.messages import Message, SendRecv
from ..errors import ClosedError, HetcollError, InitError
from ..health.diagnosis import Diagnosis
from ..health.stall_detector import PATIENCE, StallDetector
from ..health.status_report import FREE_THREADED, StatusReporter
from ..health.verdicts import Kind
from ..links.wiring import Check, Wiring
from ..plan.algorithms import p2p
from ..plan.algorithms.base import stretched
from ..plan.ir import Plan, offsets
from ..types import Collective, ReduceOp
from ..work import DONE, Waiter, Work, finished
from .compression import float32_zeros
from .executor import FastPath, Gpus
from .planner import Planner

CHECKSUM = "checksum"  # what both sides call the bytes that go before a message under HETCOLL_CHECK

T = TypeVar("T")


class HostPlans:
    """Binds calls for one communicator's engine, as its planner chooses, and connects what they need."""

    def __init__(self, wiring: Wiring, planner: Planner) -> None:
        self._wiring, self._engine, self._planner = wiring, wiring.engine, planner
        self._plans: dict[object, tuple[int, Plan | None]] = {}  # the engine's numbers of what was drawn

    def shape(self, call: Call, timeout: float, check: Check) -> _native.Shape:
        """The bound plan of a call; connects what it needs within `timeout` seconds on the first use."""
        return self._planner.bound("host", call.binding, partial(self._bind, call, timeout, check))

    def _bind(self, call: Call, timeout: float, check: Check) -> _native.Shape:
        drawing = self._planner.on_host(call)
        number, plan = self._plan(drawing, partial(self._planner.draw, drawing), timeout, check)
        tables = self._tables(call, plan, drawing.stretches)
        what = call.describe()
        shape = self._engine.bind(
            plan=number,
            dtype=call.dtype,
            op=call.op,
            send_count=call.send_count,
            recv_count=call.recv_count,
            send_table=tables[0],
            recv_table=tables[1],
            descriptor=descriptor(f"{what} by {drawing.algorithm.name}"),
            p2p=False,
            format=call.compress,
        )
        self._planner.note(shape.id, what, call.nbytes)
        if (short := call.key) is not None:
            self._engine.remember(*short, shape)
        return shape

    def point(self, ends: SendRecv, timeout: float, check: Check, word: str = "p2p") -> _native.Shape:
        """The bound plan of a message, or of two at once. `word` is what both sides call it; only "p2p" is an array's,
        which the fast path may send."""
        key, (send, dest, recv, source) = ends.key, ends

        def bind() -> _native.Shape:
            sends, recvs = ((dest,) if send else (), (source,) if recv else ())
            rank, size = self._wiring.rank, self._wiring.size
            drawing = (Collective.P2P, sends, recvs)
            number, _ = self._plan(drawing, partial(p2p, size, rank, sends, recvs), timeout, check)
            shape = self._engine.bind(
                plan=number,
                dtype=key[1],
                op=ReduceOp.SUM,
                send_count=send.count if send else 0,
                recv_count=recv.count if recv else 0,
                send_table=(),
                recv_table=(),
                descriptor=descriptor(f"{word} {key[1].label}"),
                p2p=True,
            )
            what = ends.describe()
            self._planner.note(shape.id, f"checksum: {what}" if word == CHECKSUM else what, ends.nbytes)
            if word == "p2p":
                self._engine.remember(*key, shape)
            return shape

        return self._planner.bound(f"host message {word}", key, bind)

    def paths(self, peers: Collection[int]) -> tuple[str, tuple[str, ...]]:
        """What carries data to these ranks now, and, for people, how data goes to those that shared memory does not
        reach."""
        return self._wiring.transports(peers), self._wiring.paths(peers)

    def _tables(self, call: Call, plan: Plan | None, stretches: int) -> tuple[Sequence[int], Sequence[int]]:
        """The elements at which units of SEND and RECV begin; empty where they are cut evenly."""
        if stretches > 1:
            table = stretched(call.send_count, self._wiring.size, stretches)
            return table, table
        if plan is None or not (plan.crowded or call.send_table or call.recv_table):
            return call.send_table, call.recv_table
        units = plan.send_units, plan.recv_units
        points = plan.points() if plan.crowded else [range(each + 1) for each in units]
        cut = zip(call.shares(self._wiring.size), units, points, strict=True)
        send, recv = (offsets(shares, each // len(shares), at) for shares, each, at in cut)
        return send, recv

    def _plan(self, drawing: object, draw: Callable[[], Plan], timeout: float, check: Check) -> tuple[int, Plan | None]:
        """The engine's number of a plan, and the plan if calls may need offsets inside their shares."""
        found = self._plans.get(drawing)
        if found is None:
            plan = draw()
            self._wiring.ensure(sorted(plan.edges), timeout, check)
            number = self._engine.add_plan(plan.encode(plan.points() if plan.crowded else None))
            found = self._plans[drawing] = number, plan if plan.crowded or plan.pieces > 1 else None
        return found


class HostExecutor:
    """Runs one communicator's calls on host memory: see `executor.Executor`. Also who waits for the engine on behalf of
    all others.

    `owner` is whom a `Work` of an asynchronous call asks; it is not kept alive. `gpus` is set once they can be asked.
    """

    gpus: Gpus

    def __init__(
        self,
        owner: Waiter,
        wiring: Wiring,
        diagnosis: Diagnosis,
        planner: Planner,
        timeout: float,
    ) -> None:
        self._owner_ref = weakref.ref(owner)
        self._engine, self._rank, self._timeout = wiring.engine, wiring.rank, timeout
        self._with_gpus = wiring.topology.some_without_gpu
        self._planner = planner
        self._diagnosis, self._compression = diagnosis, planner.compression
        self.plans = HostPlans(wiring, planner)
        self.reporter = StatusReporter(owner, wiring.rank, wiring.engine, planner.describe)
        self.closed = False
        self._pending: list[Work] = []  # keeps the memory of asynchronous calls alive
        self._pending_lock = threading.Lock()
        self._prune_at = 16

    @property
    def fast_path(self) -> FastPath:
        return self._engine.call

    def run(self, call: Call, stream: object, async_op: bool, seconds: float) -> Work:
        """See `executor.Executor`. Those that make a communicator out of ranks (`call.label`) never ask for GPUs."""
        among, finish = None, None
        if self._with_gpus and (call.send or call.recv) and not call.label:
            among = self.gpus.among_gpus(seconds)
            call, finish = among.converted(call)
        plans = among or self.plans
        reporter, thread = self.reporter, threading.get_ident()
        reporter.calls[thread], reporter.preparing = call.describe(), thread
        try:
            shape = self.prepare(partial(plans.shape, call, seconds), seconds)
            if among is not None:
                among.note(call)
            if reporter.preparing == thread:
                reporter.preparing = None
            send = 0 if call.send is None else call.send.ptr
            recv = 0 if call.recv is None else call.recv.ptr
            residual = self._compression.residual(call, shape, float32_zeros) if call.compress else None
            buffers = (call.send, call.recv)
            work = self._run(shape, send, recv, async_op, seconds, buffers, residual=residual, snapshot=call.snapshot)
            return finished(work, finish) if finish else work
        finally:
            if reporter.preparing == thread:
                reporter.preparing = None
            reporter.calls.pop(thread, None)

    def exchange(
        self, ends: SendRecv, stream: object, async_op: bool, seconds: float, *, background: bool = True
    ) -> Work:
        """See `executor.Executor`. `background`: a thread of the engine's may help it on."""
        among, finish = None, None
        if self._with_gpus:
            among = self.gpus.among_gpus(seconds)
            ends, finish = among.converted_message(ends)
        plans = among or self.plans
        with self._inside(ends.describe()):
            shape = self.prepare(partial(plans.point, ends, seconds), seconds)
            if among is not None:
                among.note_message(ends)
            buffers = (ends.send, ends.recv)
            work = self._run(shape, *ends.addresses, async_op, seconds, buffers, background=background)
            return finished(work, finish) if finish else work

    @contextlib.contextmanager
    def _inside(self, what: str) -> Iterator[None]:
        """This thread is in this message, as other ranks are told."""
        calls, thread = self.reporter.calls, threading.get_ident()
        calls[thread] = what
        try:
            yield
        finally:
            calls.pop(thread, None)

    def exchange_all(self, messages: Sequence[Message], seconds: float) -> None:
        """See `executor.Executor`. Returns when all are complete."""
        outgoing, incoming = (
            [m.buffer for m in messages if m.peer == self._rank and m.kind == k] for k in (SEND, RECV)
        )
        for source, target in zip(outgoing, incoming, strict=True):
            _native.copy_bytes(target.ptr, source.ptr, source.nbytes)
        others = [m.alone for m in messages if m.peer != self._rank]
        works = [self.exchange(ends, None, True, seconds, background=False) for ends in others]
        for work in works:
            work.wait()

    def send_bytes(self, data: np.ndarray[Any, Any], dest: int, seconds: float) -> None:
        """Part of an object, to `recv_bytes` of as many: host memory whatever the ranks' arrays are on."""
        self._move_bytes(SEND, data, dest, seconds, "object")

    def recv_bytes(self, data: np.ndarray[Any, Any], source: int, seconds: float) -> None:
        """The other half of `send_bytes`."""
        self._move_bytes(RECV, data, source, seconds, "object")

    def start_checksum(self, kind: int, row: np.ndarray[Any, Any], peer: int, seconds: float, what: str) -> Work:
        """Begin what goes before `what`, a message of this `kind`, in one order with the host's messages."""
        return self._move_bytes(kind, row, peer, seconds, CHECKSUM, what)

    def _move_bytes(
        self, kind: int, data: np.ndarray[Any, Any], peer: int, seconds: float, word: str, what: str = ""
    ) -> Work:
        message = Message(kind, read_buffer(data, "data", writable=kind == RECV), peer)
        with self._inside(what or str(message)):
            ends = message.alone
            shape = self.prepare(partial(self.plans.point, ends, seconds, word=word), seconds)
            return self._run(shape, *ends.addresses, word == CHECKSUM, seconds, message.buffer)

    def fail(self) -> None:
        """See `executor.Executor`: `Engine.fail` says why, and whoever finds that out has called it."""

    def close(self) -> None:
        """See `executor.Executor`. From here on nothing of ours touches the memory of calls in flight."""
        self._engine.close()
        with self._pending_lock:
            self._pending.clear()

    def check_parent(self) -> None:
        """ClosedError in a forked child: the links are its parent's."""
        if self._engine.forked:
            raise ClosedError("this communicator belongs to the parent of this forked process")

    def check_open(self) -> None:
        """ClosedError where the communicator is closed, or the parent's."""
        self.check_parent()
        if self.closed:
            raise ClosedError("this communicator was closed")

    def check_usable(self) -> None:
        """Raise unless calls may begin."""
        self.check_open()
        if self._engine.failed:
            raise self._diagnosis.error()

    def _owner(self) -> Waiter:
        owner = self._owner_ref()
        assert owner is not None, "it is in a call"
        return owner

    def prepare(self, find: Callable[[Check], T], seconds: float) -> T:
        """`find` a bound plan. The first one between two ranks may have to wait until the other one connects."""
        deadline, thread = time.monotonic() + seconds, threading.get_ident()
        stall_detector: StallDetector | None = None
        told = False

        def check(peers: Collection[int]) -> None:
            nonlocal stall_detector, told
            told = told or (FREE_THREADED and self.reporter.tell(True))
            stall_detector = stall_detector or self._diagnosis.stall_detector(deadline)
            self.reporter.connecting[thread] = tuple(peers)
            self.check_usable()
            self._diagnosis.check_present(peers)
            stall_detector.look()

        try:
            return find(check)
        except InitError as error:
            peers = self.reporter.connecting.get(thread, ())
            raise self._diagnosis.unconnected(error, peers, deadline, seconds) from error
        except (HetcollError, _native.PlanError):
            self.check_usable()
            raise
        except BaseException as error:
            if isinstance(error, OSError) and error.errno is not None:  # not raised by a signal handler
                raise self._diagnosis.unprepared(error) from error
            self.give_up()
            raise
        finally:
            self.reporter.connecting.pop(thread, None)
            if told:
                self.reporter.tell(False)

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
        snapshot: Buffer | None = None,
    ) -> Work:
        engine, lost = self._engine, 0 if residual is None else residual.ctypes.data
        if async_op:
            ticket = engine.submit(shape, send, recv, background, lost, 0 if snapshot is None else snapshot.ptr)
            work = Work(
                self._owner(),
                ticket,
                keep if residual is None and snapshot is None else (keep, residual, snapshot),
                self.reporter.calls.get(threading.get_ident(), ""),
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
        stall_detector = self._diagnosis.stall_detector(deadline, waited)
        try:
            with self.reporter.telling():
                self._wait_on(status, ticket, seconds, deadline, stall_detector)
        except HetcollError:
            raise
        except BaseException:
            self.give_up()
            raise

    def _wait_on(
        self, status: _native.Status, ticket: _native.Ticket, seconds: float, deadline: float, stalls: StallDetector
    ) -> None:
        while status is _native.Status.TIMED_OUT:
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._diagnosis.timeout(seconds)
            stalls.look()
            status = self._engine.wait(ticket, min(left, stalls.seconds()))
        if status is _native.Status.FAILED:
            self.check_parent()
            raise self._diagnosis.error()

    def give_up(self) -> None:
        """A signal handler raised while a call was under way: nothing may touch its memory any more, nobody wait."""
        self._engine.fail(Kind.ABORTED, self._rank, f"rank {self._rank} was interrupted")
        self._diagnosis.interrupted()

    def stuck(self, status: _native.Status) -> None:
        """The fast path's second half, when a call was not complete in time: waits on, or raises."""
        seconds = self._timeout
        self._finish(status, self._engine.pending, seconds, min(PATIENCE, seconds))

    def wait(self, ticket: _native.Ticket, seconds: float, waited: float = 0.0) -> None:
        """Until an asynchronous call is complete, for which `waited` of `seconds` have gone; raises what it failed
        with."""
        self.check_parent()
        first = max(0.0, min(seconds - waited, PATIENCE))
        self._finish(self._engine.wait(ticket, first), ticket, seconds, waited + first)
