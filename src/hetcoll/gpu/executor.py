"""The GPU half of a communicator: from a checked call on device memory to work on streams.

It comes to be at the first call with GPU buffers, which all ranks make together. Ranks tell each other what device they
have; those that one vendor's library serves form islands (`topology`). Between the islands of one host messages pass
through mapped slots (`slots`), by the copy engines of the GPUs, and between hosts through slots of their own or pinned
ones, by RDMA or sockets (`proxy`); inside an island they are the vendor library's, or a kernel's where they are small.

A call is a plan like any other, cut into pieces that fit a slot (`pipeline`), in an order that no number of hardware
queues can turn into a deadlock (`order`), and compiled once for its counts into a list of driver calls
(``native/gpu/program.cc``). Later calls of the same shape only enqueue that list.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import hetcoll._native as _native

from ..calls import Call, allgather, descriptor
from ..calls.buffers import KIND_OF, Buffer
from ..calls.messages import Message, SendRecv
from ..config.limits import Held
from ..errors import ArgumentError, BufferTypeError
from ..health.diagnosis import Diagnosis
from ..links.wiring import Wiring
from ..runtime.executor import FastPath, Prepare, Seen
from ..runtime.planner import Planner
from ..types import OCP_OF, DType
from ..vendors.devices.base import URGENT
from ..vendors.devices.signals import signal_kernels
from . import float8, path_probe, streams
from .array import DeviceArray, Residual
from .deadlines import Deadlines
from .direct import why_not_direct
from .edges import GpuEdges
from .graphs import GpuGraphs
from .lanes import PassingMemory
from .message_kernel import MessageKernel
from .near import NearMemory
from .one_kernel import CAPTURED, MESSAGES, STATE_BYTES, ZERO, OneKernel
from .p2p import GpuMessages
from .pinned import PinnedMemory
from .planner import Choice, GpuPlanner, Mechanism, by_copies
from .plans import DeviceBinder, GpuPlans
from .proofs import GpuProofs
from .proxy import Proxies
from .pulls import Pulls
from .ring_proof import Launch
from .shared import GpuShare, Note
from .snapshot import Spares
from .standing import GpuStanding
from .vendor_comm import GpuIslands, Meet, unlike_float8
from .watchdog import GpuWatch
from .work import GpuWork

if TYPE_CHECKING:
    from ..vendors.devices.base import Device
    from .replays import Replays

_DLPACK = {"cuda": 2, "rocm": 10}  # dlpack.h: kDLCUDA, kDLROCM

Shape = _native.DeviceShape | _native.KernelShape


class GpuExecutor:
    """What one communicator keeps on this rank's GPU. All of it is made in `__init__` and given back by `close`.

    Calls have `timeout` seconds if they do not say otherwise, the first one, for which all this is made, has `seconds`.
    `capturing`: the call that needs it is being captured into a graph. `meet` exchanges what all ranks must know,
    and `prepare` watches over what connects them. `windows` are those that all GPUs see, by number.
    """

    def __init__(
        self,
        wiring: Wiring,
        diagnosis: Diagnosis,
        device: Device,
        planner: Planner,
        timeout: float,
        seconds: float,
        *,
        capturing: bool,
        meet: Meet,
        prepare: Prepare,
        windows: MutableMapping[int, Seen],
    ) -> None:
        self._wiring, self._diagnosis, self._device = wiring, diagnosis, device
        self._compression, self._planner, self._windows = planner.compression, planner, windows
        self._replays: Replays | None = None
        self._engine, self._kind = wiring.engine, KIND_OF[device.vendor]
        with device.active(), contextlib.ExitStack() as undo:
            no_direct = why_not_direct(wiring, device)
            share = self._share = GpuShare(wiring, diagnosis, device, no_direct, meet, seconds, planner.own_plans)
            undo.callback(share.close)
            self._segment, self._slot_bytes = share.segment, share.slot_bytes
            self._memory = PassingMemory(device, self._slot_bytes)
            undo.callback(self._memory.close)
            self.spares = Spares(device, share.pinned)
            undo.callback(self.spares.close)
            self._state = device.allocate(STATE_BYTES)
            undo.callback(device.free, self._state)
            device.clear(self._state, STATE_BYTES)
            self._queue = self._new_queue()
            undo.callback(self._queue.drop_lanes)
            islands = GpuIslands(wiring, share.gpus, device, meet, seconds, diagnosis, capturing)
            undo.callback(islands.close, timeout)
            self._islands = islands
            if (island := islands.island) is not None:
                self._queue.set_island(island.functions(), island.handle, island.rank, island.size)
            self.two_kinds = float8.two_kinds(share.gpus)
            self._float8 = float8.OnGpu(device) if self.two_kinds else None
            if self._float8 is not None:
                undo.callback(self._float8.close)
            self._proxies = Proxies(wiring, diagnosis, device, share)
            lends, slots = share.lender is not None, planner.own_plans
            near = self._near = NearMemory(device, share, meet, slots=slots) if lends else None
            choices = self.choices = GpuPlanner(planner, share, islands, windows, near)
            self._edges = GpuEdges(wiring, self._queue, share, self._proxies, near if slots else None, prepare, seconds)
            self._graphs = GpuGraphs(device, self._queue, share, self._edges, self._state + ZERO)
            undo.callback(self._graphs.close)
            binder = DeviceBinder(self._queue, device, self._edges.of)
            place = (wiring.rank, wiring.size)
            self.pulls = Pulls(self._queue, self._edges, windows, *place)
            self._plans = GpuPlans(*place, islands, self._slot_bytes, binder, planner, choices)
            rings = (share.segment.rings,) if near is None else near.rings
            self._one_kernel = OneKernel(
                self._queue, device, share, rings, self._state, *place, ordered=planner.ordered
            )
            self._deadlines = Deadlines(device, timeout)
            undo.callback(self._deadlines.close)
            ways = (self._edges, self._proxies)
            self._standing = GpuStanding(wiring.engine, diagnosis, self._queue, share, islands, *ways, self._float8)
            self._watch = GpuWatch(self._standing, self._deadlines, self.look_at_replays, timeout)
            self._calls = self._new_calls()
            parts = (share, self._plans, planner, self._calls, self._deadlines)
            self._proofs = GpuProofs(wiring, device, share, *ways, self._watch, self._enqueue_pattern, undo)
            self.messages = self._standing.messages = GpuMessages(self, *parts, choices, self._float8)
            undo.callback(self.messages.close)
            self._undo = undo.pop_all()

    def _new_queue(self) -> _native.DeviceQueue:
        abort = self._segment.aborts[self._share.here]  # the rest of its cache line is this rank's, too
        signals = signal_kernels(self._device, abort + 8, self._state + ZERO, abort)
        return _native.DeviceQueue(
            vendor=self._device.vendor,
            functions={**self._device.functions(), **signals},
            priority=URGENT,
            staging=self._memory.staging,
            slot_bytes=self._slot_bytes,
        )

    def _new_calls(self) -> _native.GpuCalls:
        return _native.GpuCalls(
            engine=self._engine,
            queue=self._queue,
            device_type=_DLPACK[self._kind],
            device_id=self._device.index,
            differs=self._share.differs,
            refused=self._refused,
            captured=self._captured,
            broken=self._standing.ended,
            started=self._watch.started,
            work=lambda current: GpuWork(self, None, "calls", current),
        )

    def prove(self, meet: Meet, timeout: float) -> None:
        """Try the ways to all ranks of this host, all ranks together: see `path_probe`."""
        choices, given_up = self.choices, self._proofs.inside(meet, timeout)
        no_rings = self._proofs.rings(self._bind_gather, meet) if self._one_kernel.near else ""
        choices.settle(given_up=given_up, no_rings=no_rings, unmapped=self._edges.why_not_captured(None))
        self.look_at_windows()
        states = self._state + MESSAGES, self._state + CAPTURED + MESSAGES
        self._plans.kernel = MessageKernel(self._device, self._share, choices.small, states, self._near)

    def _bind_gather(self, mine: DeviceArray, got: DeviceArray) -> Launch:
        """See `ring_proof.Bind`."""
        call = allgather(self._wiring.rank, self._wiring.size, mine.buffer(), got.buffer())
        bound = self.bound(self._one_kernel.bind(call, "gather"), path_probe.LABEL, [])
        return lambda stream: self._calls.run(bound, mine.ptr, got.ptr, stream, True)

    def _enqueue_pattern(self, out: bool, peer: int, channel: int, address: int, nbytes: int, stream: int) -> None:
        """See `path_probe.Bench`."""
        ends = [(peer, nbytes)]
        sends, recvs = (ends, []) if out else ([], ends)
        plan = self._plans.messages(DType.UINT8, sends, recvs, by_copies, channel=channel, whole=True)
        bound = self.bound(plan, path_probe.LABEL, [], DType.UINT8)
        self._calls.run(bound, address if out else 0, 0 if out else address, stream, True)

    @property
    def device(self) -> Device:
        return self._device

    @property
    def share(self) -> GpuShare:
        """What this rank shares with those of its host."""
        return self._share

    def run(self, call: Call, stream: object, async_op: bool, seconds: float) -> GpuWork:
        """Enqueue `call` after what is on `stream` now; what comes on it later begins after it, unless `async_op`."""
        handle = self.stream(stream, sendbuf=call.send, recvbuf=call.recv)
        self._edges.seconds = seconds
        conversion = None if self._float8 is None else float8.Float8Conversion.of_call(call, self._wiring.rank)
        if self._float8 is None or conversion is None:
            return self._launch(call, handle, async_op, seconds)
        with self._float8.around([conversion], handle, async_op) as ([made], on):
            dtype = OCP_OF.get(call.dtype, call.dtype)
            self._launch(replace(call, send=made.send, recv=made.recv, dtype=dtype), on, False, seconds, again=False)
        return GpuWork(self, (call.send, call.recv), call.collective.label)

    @property
    def fast_path(self) -> FastPath:
        """`Engine.call` for both kinds of memory: on a GPU's, what was called before with the same counts."""
        return self._calls.call

    def exchange(self, ends: SendRecv, stream: object, async_op: bool, seconds: float) -> GpuWork:
        """Enqueue a message, or two at once."""
        self._edges.seconds = seconds
        return self.messages.one(ends, stream, async_op, seconds)

    def exchange_all(self, messages: Sequence[Message], seconds: float) -> None:
        """Enqueue messages that are under way together."""
        self._edges.seconds = seconds
        self.messages.together(messages)

    def pin(self, nbytes: int) -> PinnedMemory:
        """See `runtime.executor.Gpus`."""
        with self._device.active():
            return PinnedMemory(self._device, self._share.pinned, nbytes)

    @contextlib.contextmanager
    def timed(self, what: str, stream: int, seconds: float) -> Iterator[None]:
        """See `runtime.executor.Gpus`."""
        with self._deadlines.own(what, stream, seconds):
            yield
        self._watch.started()

    def _launch(self, call: Call, stream: int, async_op: bool, seconds: float, *, again: bool = True) -> GpuWork:
        """`again`: the fast path may run such a call when it comes again."""
        bound = self.choices.bound(call, lambda choice: self._bind(call, again, choice))
        lost = self._residual(call, bound) if call.compress else 0
        source, target = (0 if buffer is None else buffer.ptr for buffer in (call.send, call.recv))
        with self._deadlines.call(call.describe, stream, async_op, seconds) as (on, apart):
            self._calls.run(bound, source, target, on, not apart, lost)
        return GpuWork(self, (call.send, call.recv), call.collective.label)

    def _residual(self, call: Call, bound: _native.GpuCall) -> int:
        """Where what calls on these buffers have lost is kept, or 0."""
        assert bound.program is not None
        found = self._compression.residual(
            call, bound.program, lambda count: Residual.cleared(self._device, 4 * count, lambda: self.idle)
        )
        return 0 if found is None else found.address

    def _bind(self, call: Call, again: bool, choice: Choice) -> _native.GpuCall:
        what, shape = call.describe(), self._shape(call, choice)
        if choice.place is not None:
            what = f"{what} {choice.place}"
        bound = self.bound(shape, what, [self._share.entry(what)])
        if again and choice.place is None and not choice.aside and (key := call.key) is not None:
            self._calls.remember(*key, bound)
        return bound

    def _shape(self, call: Call, choice: Choice) -> Shape:
        if choice.place is not None:
            return self.pulls.bind(call, choice.place)
        if choice.by is Mechanism.KERNEL:
            return self._one_kernel.bind(call, choice.name)
        shape = self._plans.compile(call, choice)
        shape.by_library = self._islands.whole and (bool(choice.mates) or len(choice.islands) == 1)
        return shape

    def look_at_windows(self) -> None:
        """There are others: where the buffers of some calls are counts, at which the fast path does not look."""
        self._calls.leave_out(sum(1 << each for each in self.choices.watched))

    def bound(
        self,
        shape: Shape,
        what: str,
        notes: Sequence[Note],
        message: DType | None = None,
        group: Sequence[DType] = (),
    ) -> _native.GpuCall:
        """What `GpuCalls` takes. `message` is the type of point-to-point messages, all that their two ranks must
        agree on; in a `group` each has its own."""
        common = descriptor(what if message is None else f"p2p {message.label}")
        kernel = shape if isinstance(shape, _native.KernelShape) else None
        program = shape if isinstance(shape, _native.DeviceShape) else None
        if program is not None and (scratch := self._memory.scratch(program.scratch_bytes)) is not None:
            self._calls.set_scratch(scratch)
        number = self._engine.new_shape()  # by which others ask for a call that is not the engine's to run
        self._planner.note(number, what, 0)  # of several messages, or parts of a collective
        return _native.GpuCall(
            program=program,
            kernel=kernel,
            notes=notes,
            number=number,
            descriptor=common,
            p2p=message is not None,
            descriptors=[descriptor(f"p2p {dtype.label}") for dtype in group],
        )

    def stream(self, stream: object, **buffers: Buffer | None) -> int:
        """The handle of a stream, or of the buffers' current one. BufferTypeError for buffers that lie elsewhere."""
        for name, buffer in buffers.items():
            if buffer is not None and (buffer.device, buffer.index) != (self._kind, self._device.index):
                wanted = f"memory of {self._kind}:{self._device.index}, the GPU of rank {self._wiring.rank}"
                raise BufferTypeError(f"{name}: wanted {wanted}, got some of {buffer.device}:{buffer.index}")
        return streams.handle(stream, next(filter(None, buffers.values()), None))

    @property
    def replays(self) -> Replays:
        """What HETCOLL_CHECK has GPUs do, made by the first call that is captured or sampled."""
        if self._replays is None:
            from .replays import Replays

            self._replays = Replays(self, self._queue, self._calls, self._diagnosis, self._wiring)
            self._undo.callback(self._replays.close)
        return self._replays

    def look_at_replays(self) -> None:
        """Tell of what has been found in replays."""
        if self._replays is not None and not self._engine.failed:
            self._replays.look()

    # Failing.

    def _refused(self, problem: str) -> NoReturn:
        """Nothing was enqueued: the driver does not take the stream."""
        raise ArgumentError(f"stream: wanted one of {self._kind}:{self._device.index}: {problem}")

    def _captured(self, shape: _native.DeviceShape | None, stream: int) -> None:
        """A call is about to become a part of a graph; None: one by kernels alone."""
        if shape is not None and shape.by_library and not shape.by_copies:
            return
        if shape is not None and (scratch := self._graphs.prepare(shape, stream)) is not None:
            self._calls.set_capture_scratch(scratch)
        self._watch.look_for_replays()

    def fail(self) -> None:
        """The communicator has failed: once all ranks know, let every stream and kernel go that waits for a peer, until
        all are idle.

        What is in the buffers of calls in flight is undefined from now on.
        """
        self._watch.fail()

    @property
    def idle(self) -> bool:
        """See `GpuStanding.idle`."""
        return self._standing.idle

    def check(self) -> None:
        """See `GpuStanding.check`."""
        self._standing.check()

    def paths(self) -> tuple[str, ...]:
        """For people: how data goes from this rank's GPU to every other."""
        return tuple(filter(None, (*self._edges.describe_all(self._islands), unlike_float8(self._share.gpus))))

    def counters(self) -> dict[str, int]:
        """Of the RDMA links between this GPU and those of other hosts."""
        return self._proxies.counters()

    def holds(self) -> Held:
        """What proxies hold, the watchdog's thread, and what of the host's memory is pinned for this GPU's slots."""
        held = self._proxies.holds()
        return held._replace(threads=held.threads + 1, pinned=self._share.pinned.held)

    def join(self, stream: object) -> None:
        """What comes on `stream` later begins after everything enqueued so far."""
        self._queue.join(handle := streams.handle(stream, None))
        if self._float8 is not None:
            self._float8.join(handle)

    def close(self, timeout: float = 5.0) -> None:
        """Give everything back, once the device is done or, after `timeout` seconds, made to be."""
        deadline = time.monotonic() + timeout
        with self._watch.patient():
            while not self._watch.quiet():
                if time.monotonic() > deadline:
                    if not self._engine.failed:
                        self._standing.broken(f"its GPU calls had been under way for {timeout:g} s when it closed")
                    self.fail()  # also of what the engine alone has failed with
                time.sleep(0.001)
        self.look_at_replays()  # of calls that have ended since the last look
        self._windows.clear()  # there is nothing left to wait for where one is closed later
        self._replays = None  # what is let go below has no results
        self._segment.release_kernels(self._share.here)  # of a replay that began just now: drivers wait for it below
        self._compression.forget()
        self._proxies.close(deadline)
        self._watch.close()
        self._undo.close()
        self._planner.forget()
        # They hold methods of this object, and no garbage collector looks into them.
        del self._calls, self.messages, self._standing.messages
