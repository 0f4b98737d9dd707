"""What a communicator is made of beneath its methods: how it comes to be, runs calls, fails and ends."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy as np

import hetcoll._native as _native

from .. import calls
from ..calls import OP_LABELS, Call
from ..calls.buffers import Buffer
from ..calls.messages import Message, SendRecv
from ..config.env import Config
from ..errors import ArgumentError, BufferTypeError, DeviceError, InitError, spell_told
from ..health.activity import Activity
from ..health.diagnosis import Diagnosis
from ..health.flight_recorder import FlightRecorder, listen
from ..health.stall_detector import PATIENCE
from ..health.status_report import FREE_THREADED
from ..health.verdicts import Kind
from ..lifetime import weakly
from ..links.descriptors import host_identity
from ..links.wiring import Wiring
from ..rendezvous.protocol.unique_id import hosted_here
from ..rendezvous.protocol.wire import WORLD
from ..rendezvous.session import Session
from ..work import DONE, Waiter, Work
from .compression import Compression
from .executor import Executor, FastPath, OpenGpus

if TYPE_CHECKING:
    from .inspection import Inspection
    from .parcels import Pair
    from .planner import Explanation
    from .ranges import Ranges

log = logging.getLogger("hetcoll")


_MEETING_BYTES = 1024


class Owner(Waiter, Protocol):
    """What a `Core` needs of its communicator: who waits for its calls, and in whom others find them."""

    _call: FastPath

    def _stuck(self, status: _native.Status) -> None: ...

    def _make(self, name: bytes, members: list[int], timeout: float, *, check: bool) -> Pair: ...


class Rider(Protocol):
    """What moves data for a communicator beside its calls, on communicators of its own: windows, messages with tags."""

    def counters(self) -> dict[str, int]:
        """What it adds to `Communicator.counters`."""

    def memory(self) -> dict[str, int]:
        """What it adds to `Communicator.memory`."""

    def fail(self, kind: Kind, text: str) -> None:
        """The communicator has failed: nothing may wait, or touch memory, from now on."""

    def leave(self) -> None:
        """Before the communicator is closed: others may yet want what this rank has sent."""

    def close(self) -> None:
        """Give everything back, after `leave`."""


R = TypeVar("R", bound=Rider)


class Core:
    """The parts of one communicator, and what they do together. It does not keep `owner`, that communicator, alive:
    one that nobody refers to any more is closed. `undo` gives everything back where the owner is not made after all."""

    def __init__(
        self,
        owner: Owner,
        session: Session,
        group: bytes,
        rank: int,
        size: int,
        config: Config,
        timeout: float,
        open_gpus: OpenGpus,
        undo: contextlib.ExitStack,
    ) -> None:
        from .host import HostExecutor  # and with these what chooses and draws plans: imports count
        from .planner import Planner

        self._owner = weakref.ref(owner)
        self.session, self.group, self.rank, self.size, self.config = session, group, rank, size, config
        self.splits = self.agreements = self.growths = 0
        self.epoch = 0
        self.batches: dict[int, list[tuple[int, Any, int]]] = {}
        """Of open groups, by thread: kind, buffer and peer of each message. See `messages`."""
        self.diagnosis = diagnosis = Diagnosis(session, group, rank, size)
        deadline = time.monotonic() + timeout
        undo.push(self._leave_unmade)  # first: Ctrl-C may come when this rank has joined, and before anything is noted
        session.join(group, rank, size, diagnosis.on_event, timeout)
        left, patience = deadline - time.monotonic(), min(PATIENCE, config.timeout)
        self.wiring = wiring = Wiring(session.control, group, rank, size, config, left, patience)
        undo.callback(wiring.close)
        self.engine = wiring.engine
        undo.callback(self.engine.close)
        ordered = config.reproducible
        self.compression = Compression(wiring.topology, config.compress, config.compress_feedback, ordered)
        self.planner = Planner(wiring, rank, config.algo, self.compression, ordered)
        parts = (wiring, diagnosis, self.planner)
        host = self.host = HostExecutor(owner, *parts, config.timeout)
        # Weakly, since the engine must not keep its communicator alive.
        on_wait = weakly(host.reporter.tell) if FREE_THREADED else None
        self.engine.set_ops(
            OP_LABELS, DONE, weakly(owner._stuck), weakly(diagnosis.interrupted), weakly(self.log_news), on_wait
        )
        diagnosis.attach(self.engine, host.reporter)
        diagnosis.warn_after = config.warn_after
        self._record()
        undo.callback(self.activity.close)
        self.gpus = host.gpus = open_gpus(*parts, config, meet=weakly(self.meet), prepare=weakly(host.prepare))
        self._riders: dict[type[Rider], Rider] = {}
        self._rider_lock = threading.Lock()
        self.choosing = threading.RLock()  # of the owner's `_call`, which is as the last change wants it
        self.ranges: Ranges | None = None
        if config.nvtx:
            from . import ranges  # only profilers want them

            self.ranges = ranges.find()
        self.inspection: Inspection | None = None
        self.message_check = self.inspect() if config.check == "1" else None
        if config.digest:
            self.inspect()
        if config.check == "sampled":
            self.engine.sample_calls(wiring.topology.some_without_gpu)
        self.choose_fast_path()
        if rank == 0 and log.isEnabledFor(logging.INFO):
            name = group.decode() if group == WORLD else group.hex()[:6]
            log.info("communicator %s: %s", name, wiring.topology.line())
        log.debug("rank %d of %d: %s", rank, size, wiring.topology)

    def _record(self) -> None:
        """Write down what is called from now on, for who asks: this rank's program, others, and those who watch."""
        engine, describe, questions = self.engine, self.planner.described, self.diagnosis.questions
        self.recorder = FlightRecorder(self.rank, self.size, engine, describe, questions.ask)
        job_id, on = self.session.control.unique_id.job_id, host_identity(self.config.host_id)
        self.activity = Activity(job_id, self.group, self.rank, self.size, on, engine, describe)
        questions.answers |= self.recorder.answers() | self.activity.answers()
        if self.config.sigusr2:
            listen()

    def _leave_unmade(self, kind: type[BaseException] | None, *_: object) -> None:
        """What makes a communicator has failed. Others may have it by now."""
        if kind is not None and issubclass(kind, KeyboardInterrupt | SystemExit):
            self.diagnosis.interrupted()
        self.session.leave(self.group)

    # Running calls.

    def launch(
        self, call: Call, async_op: bool, timeout: float | None, stream: object = None, compress: object = None
    ) -> Work:
        """The slow path: for shapes not seen before, asynchronous calls, deadlines of their own and GPU buffers."""
        if compress is not None or self.config.compress:
            self.compression.choose(call, compress)
        self.check_outside_group(call.describe)
        self.host.check_usable()
        seconds = self.seconds(timeout)
        if call.label:
            return self.start(call, async_op, seconds, stream)
        send, due = call.send, False
        if send is not None:  # all ranks know by themselves which calls are sampled
            due = self.engine.take_due(call.collective, send.count, send.dtype, send.device != "cpu")
        try:
            if not due and self.inspection is None:
                return self.start(call, async_op, seconds, stream)
            return self.inspect().collective(call, async_op, seconds, stream, due)
        except (ArgumentError, BufferTypeError):  # a call that is refused no other rank has counted
            if send is not None:
                self.engine.return_due(call.collective, send.count, send.dtype, send.device != "cpu", due)
            raise

    def inspect(self) -> Inspection:
        """What looks at calls, which few jobs, or calls, need: imports count."""
        if self.inspection is None:
            from .inspection import Inspection

            self.inspection = Inspection(self)
        return self.inspection

    def start(self, call: Call, async_op: bool, seconds: float, stream: object) -> Work:
        """The same, unchecked."""
        buffer = call.send or call.recv
        with self.range(call.describe):
            if buffer is None or (call.label and buffer.device == "cpu"):
                return self.host.run(call, stream, async_op, seconds)
            with self.executor(buffer, stream, seconds) as executor:
                return executor.run(call, stream, async_op, seconds)

    def exchange(self, ends: SendRecv, async_op: bool, seconds: float, stream: object) -> Work:
        """A message, or two at once; unchecked."""
        with self.range(ends.describe), self.executor(ends.first, stream, seconds) as executor:
            return executor.exchange(ends, stream, async_op, seconds)

    def exchange_all(self, messages: Sequence[Message], seconds: float) -> None:
        """Messages that are under way together: those on a GPU, and then those on the host; unchecked."""
        on_gpu = [message for message in messages if message.buffer.device != "cpu"]
        for some in (on_gpu, [message for message in messages if message.buffer.device == "cpu"]):
            if some:
                with self.executor(some[0].buffer, None, seconds) as executor:
                    executor.exchange_all(some, seconds)

    @contextlib.contextmanager
    def executor(self, buffer: Buffer, stream: object, seconds: float) -> Iterator[Executor]:
        """What runs calls on such memory, for the ``with`` block; on a GPU's, one thread at a time (`Gpus.on_gpu`)."""
        if self.config.device is not None:
            self.gpus.check_place(buffer)
        if buffer.device == "cpu":
            yield self.host
            return
        with self.gpus.turn:
            executor = self.gpus.on_gpu(buffer, stream, seconds)
            self.choose_fast_path()  # from the first call on, the fast path tries the GPU's, too
            yield executor

    def choose_fast_path(self) -> None:
        """What the methods of calls try first: the host's, or the GPU's once there is one, which takes both. None in
        groups: the slow path tells what is no message."""
        owner = self._owner()
        assert owner is not None, "it is in a call"
        with self.choosing:
            executor = self.gpus.executor or self.host
            refuses = bool(self.batches or self.host.closed or (self.inspection and self.inspection.of_all))
            fast_path = executor.fast_path if self.ranges is None else self.ranges.tracing(executor.fast_path)
            owner._call = refuse if refuses else fast_path
            self.engine.set_starts(not refuses and self.ranges is None)

    def in_group(self) -> bool:
        """Whether this thread is in the block of a `group`."""
        return threading.get_ident() in self.batches

    def check_outside_group(self, what: Callable[[], str]) -> None:
        """ArgumentError in the block of a `group` for what is no send or receive of an array."""
        if self.in_group():
            raise ArgumentError(f"group(): wanted sends and receives only, got {what()}: call it after the block")

    def range(self, what: Callable[[], str]) -> contextlib.AbstractContextManager[None]:
        """The ``with`` block is a call that profilers show, if there is one."""
        return contextlib.nullcontext() if self.ranges is None else self.ranges.around(what())

    def rider(self, kind: type[R], make: Callable[[Callable[[], Owner | None]], R]) -> R:
        """The one of this kind, made where there is none yet; `make` is given who tells the communicator itself."""
        with self._rider_lock:
            if kind not in self._riders:
                self._riders[kind] = make(self._owner)
            return cast("R", self._riders[kind])  # it is of the type that it is kept by

    def meet(self, label: str, blob: bytes, timeout: float | None = None, room: int = _MEETING_BYTES) -> list[bytes]:
        """Every rank's `blob`, by rank, of at most `room` bytes. A collective call that is called `label` in errors."""
        if len(blob) > room:
            raise InitError(f"{label}: {len(blob)} bytes to tell the other ranks, room for {room}")
        mine = np.frombuffer(blob.ljust(room), np.uint8)
        rows = np.empty((self.size, room), np.uint8)
        self.launch(calls.meeting(self.rank, label, mine, rows), False, timeout)
        return [row.tobytes().rstrip() for row in rows]

    def seconds(self, timeout: float | None) -> float:
        """How long a call waits."""
        return self.config.timeout if timeout is None else calls.check_seconds(timeout)

    # Telling, failing and ending.

    def counters(self) -> dict[str, int]:
        """See `Communicator.counters`."""
        self.host.check_open()
        memory = self.wiring.memory
        found = {"collectives": self.engine.collectives, "messages": self.engine.messages} | self.engine.counters()
        found |= self.compression.counters()
        found |= {} if memory is None else {f"memory_{name}": n for name, n in memory.counters.items()}
        for rider in list(self._riders.values()):
            found |= {name: found.get(name, 0) + n for name, n in rider.counters().items()}
        if (store := hosted_here(self.session.control.unique_id.job_id)) is not None:
            found["stale_refused"] = store.refused
        return found | self.gpus.counters()

    def memory(self) -> dict[str, int]:
        """See `Communicator.memory`."""
        found = Counter(self.engine.memory())
        found["plans"] += self.planner.bound_bytes()
        found["residuals"] = self.compression.counters().get("residual_bytes", 0)
        if self.wiring.memory is not None:
            found["pinned"] += self.wiring.memory.counters["bytes"]
        holders = [self.wiring.holds(), self.gpus.holds()]
        if self.group == WORLD:
            holders.append(self.session.control.holds())
        for descriptors, threads, pinned in holders:
            found["descriptors"] += descriptors
            found["threads"] += threads
            found["pinned"] += pinned
        for rider in list(self._riders.values()):
            found.update(rider.memory())
        return dict(found)

    def explain(self, op: str, nbytes: int, compress: str | None) -> Explanation:
        """See `Communicator.explain`."""
        self.host.check_usable()
        self.log_news()
        found = self.planner.explain(op, nbytes, compress, self.host.plans.paths, self.gpus.explain)
        return found._replace(paths=found.paths + self.gpus.describe())

    def dump(self, most: int) -> str:
        """See `Communicator.dump`."""
        self.host.check_parent()
        return self.recorder.dump(calls.check_int(most, "most"))

    def trace(self, path: str, timeout: float) -> None:
        """See `Communicator.trace`."""
        self.host.check_usable()
        self.recorder.trace(path, self.seconds(timeout))

    def log_news(self) -> None:
        """Tell what links lost, and how they went on: once each."""
        for text in self.engine.events():
            log.warning("%s", text)

    def fail(self, kind: Kind, text: str) -> None:
        """End what is in flight, here and on all other ranks."""
        self.engine.fail(kind, self.rank, text := spell_told(text))
        for rider in list(self._riders.values()):
            rider.fail(kind, text)
        self.diagnosis.post(kind, self.rank, text)

    def device_failed(self, error: DeviceError) -> Exception:
        """A GPU that has failed ends the communicator, whoever finds out first. What to raise."""
        self.fail(Kind.SYSTEM, f"rank {self.rank}: {error}")
        return self.diagnosis.error()

    def differ(self, what: str) -> Exception:
        """Ranks have called different things. What to raise."""
        self.fail(Kind.MISMATCH, what)
        return self.diagnosis.error()

    def abort(self, reason: str) -> None:
        """See `Communicator.abort`."""
        if not self.host.closed and not self.engine.forked:
            self.fail(Kind.ABORTED, f"rank {self.rank} called abort()" + (f": {reason}" if reason else ""))

    def lose(self, error: BaseException | None) -> None:
        """An exception leaves the communicator's ``with`` block: the others must not wait for this rank. One that ends
        the program without an error is a goodbye, which `close` says."""
        if self.engine.forked or (isinstance(error, SystemExit) and error.code in (None, 0)):
            return
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else 1  # Python's own rule
            reason = f"sys.exit({error.code!r}) ended it with status {code}"
        else:
            reason = f"it raised {type(error).__name__}: {error}"
        self.fail(Kind.PEER_GONE, f"rank {self.rank} was lost: {reason}")

    def close(self) -> None:
        """Give everything back."""
        if self.engine.forked:
            return
        self.activity.close()
        self.log_news()
        if self.inspection is not None:
            self.inspection.close()
        self.engine.set_starts(False)
        for rider in list(self._riders.values()):
            rider.leave()
        words = self.diagnosis.last_words()
        self.wiring.settle()
        if self.gpus.executor is not None:
            self.gpus.executor.close()
        self.host.close()
        if self.gpus.cpu_rank is not None:
            self.gpus.cpu_rank.close()
        self.planner.forget()
        self.compression.forget()
        self.session.leave(self.group, words)
        self.wiring.close()
        for rider in list(self._riders.values()):
            rider.close()


def refuse(*args: object) -> None:
    """Stands in for the engine's call after `close` and for inspectors: the fast path needs no test of its own."""
