"""The GPU half of a communicator: from a checked call on device memory to work on streams.

It comes to be at the first call with GPU buffers, which all ranks make together. Ranks tell each other what device they
have; those that one vendor's library serves form islands (`topology`). Between the islands of one host messages pass
through mapped slots (`slots`), by the copy engines of the GPUs; inside an island they are the vendor library's.

A call is a plan like any other, cut into pieces that fit a slot (`pipeline`), in an order that no number of hardware
queues can turn into a deadlock (`order`), and compiled once for its counts into a list of driver calls
(``native/engine/device_program.cc``). Later calls of the same shape only enqueue that list.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import numpy as np

from . import _native
from .algorithms import find
from .algorithms.p2p import CHANNEL
from .buffers import Buffer
from .calls import Call
from .devices.kernels.table import ONESHOT_RANKS
from .errors import ArgumentError, BufferTypeError, CollectiveTimeoutError
from .order import enqueue_order
from .pipeline import offsets, parts, pipelined, ramp
from .plan import Buf, Op, Plan, Span, Step
from .rendezvous.descriptors import new_name, receive_fd, share_fd
from .slots import AREA_WORDS, SLOT_BYTES, SLOTS, SlotSegment
from .types import REDUCING, WHOLE, Collective, DType, ReduceOp
from .wiring import Wiring
from .work import Work

if TYPE_CHECKING:
    from .devices.base import Device

_STREAMS_OUT, _STREAMS_IN = 2, 2
_STAGING_SLOTS = 4
_SMALLEST = 256 << 10  # bytes of the first and the last piece of a message
_GRAIN = 256  # bytes: units begin at multiples, as copy engines and vector loads like it
_SMALL = 32 << 10  # bytes up to which one kernel beats copies
_STATE_BYTES = 256
_KEEP = 256  # bound plans kept; the least recently used go first
_BLOCK, _MOST_BLOCKS, _PER_BLOCK = 512, 64, 32 << 10  # of a reduction: enough for PCIe, little of the GPU


Kernel = tuple[int, int, int, int]  # function, threads in a block, most blocks, bytes for each
Exchange = Callable[[str, bytes], Sequence[bytes]]


class GpuPath:
    """What one communicator keeps on this rank's GPU. All of it is made in `__init__` and given back by `close`."""

    def __init__(self, wiring: Wiring, device: Device, exchange: Exchange, timeout: float) -> None:
        self._wiring, self._device = wiring, device
        self._kind = "cuda" if device.vendor == "cuda" else "rocm"
        self._shapes: OrderedDict[tuple[object, ...], _native.DeviceShape] = OrderedDict()
        self._plans: dict[tuple[object, ...], tuple[list[Plan], tuple[tuple[int, ...], ...]]] = {}
        self._edges: dict[tuple[int, int, int], int] = {}
        self._oneshots: dict[tuple[object, ...], _native.OneshotShape] = {}
        self._scratch, self._scratch_bytes = 0, 0
        self._undo = contextlib.ExitStack()
        mine = {"vendor": device.vendor, "bus": device.bus_id, "name": device.name, "doorbell": new_name()}
        self._ranks = [json.loads(blob) for blob in exchange("gpus()", json.dumps(mine).encode())]
        with contextlib.ExitStack() as undo:
            device.activate()
            streams = [device.stream() for _ in range(_STREAMS_OUT + _STREAMS_IN + 1)]
            for stream in streams:
                undo.callback(device.destroy_stream, stream)
            staging = device.allocate(_STAGING_SLOTS * SLOT_BYTES)
            undo.callback(device.free, staging)
            self._segment = self._share(timeout)
            undo.callback(self._segment.close)
            self._state = device.allocate(_STATE_BYTES)
            undo.callback(device.free, self._state)
            _clear(device, self._state, _STATE_BYTES)
            self._queue = _native.DeviceQueue(
                vendor=device.vendor,
                functions=device.functions(),
                streams_out=_STREAMS_OUT,
                streams_in=_STREAMS_IN,
                streams=streams,
                staging=staging,
                slot_bytes=SLOT_BYTES,
                staging_slots=_STAGING_SLOTS,
            )
            self._undo = undo.pop_all()

    @property
    def device(self) -> Device:
        return self._device

    def _share(self, timeout: float) -> SlotSegment:
        wiring, locals_ = self._wiring, self._wiring.locals
        name, secret = self._ranks[locals_[0]]["doorbell"], wiring.secret
        if wiring.rank == locals_[0]:
            fd = os.memfd_create("hetcoll-slots", os.MFD_CLOEXEC)
        else:
            fd = receive_fd(name, wiring.rank, secret, timeout)
        try:
            if wiring.rank == locals_[0]:
                os.ftruncate(fd, SlotSegment.nbytes(len(locals_)))
                share_fd(name, fd, locals_[1:], secret, timeout)
            return SlotSegment(fd, len(locals_), self._device)
        finally:
            os.close(fd)

    def launch(self, call: Call, stream: object, async_op: bool) -> GpuWork:
        """Enqueue `call` after what is on `stream` now; what comes on it later begins after it, unless `async_op`."""
        handle = self._stream(stream, sendbuf=call.send, recvbuf=call.recv)
        if self._is_small(call):
            assert call.send is not None
            assert call.recv is not None
            self._queue.run_oneshot(self._small(call), call.send.ptr, call.recv.ptr, handle)
            return GpuWork(self._queue, (call.send, call.recv), call.collective.label)
        shape = self._shape(call)
        if shape.scratch_bytes > self._scratch_bytes:
            self._grow_scratch(shape.scratch_bytes)
        send = 0 if call.send is None else call.send.ptr
        recv = 0 if call.recv is None else call.recv.ptr
        self._queue.run(shape, send, recv, self._scratch, 0, handle, not async_op)
        return GpuWork(self._queue, (call.send, call.recv), call.collective.label)

    def message(
        self, send: Buffer | None, dest: int, recv: Buffer | None, source: int, stream: object, async_op: bool
    ) -> GpuWork:
        """Enqueue a message to `dest`, one from `source`, or both at once."""
        handle = self._stream(stream, sendbuf=send, recvbuf=recv)
        shape = self._message(send, dest, recv, source)
        addresses = (0 if send is None else send.ptr, 0 if recv is None else recv.ptr)
        self._queue.run(shape, *addresses, self._scratch, 0, handle, not async_op)
        return GpuWork(self._queue, (send, recv), "a message")

    def _message(self, send: Buffer | None, dest: int, recv: Buffer | None, source: int) -> _native.DeviceShape:
        first = send or recv
        assert first is not None
        counts = (0 if send is None else send.count, 0 if recv is None else recv.count)
        key = (first.dtype, *counts, dest, source)
        return self._keep(key, lambda: self._bind_message(first.dtype, counts, dest, source))

    def _bind_message(self, dtype: DType, counts: tuple[int, int], dest: int, source: int) -> _native.DeviceShape:
        """Piece by piece, sends before receives: what a peer needs is enqueued before what this rank waits for."""
        grain = max(1, _GRAIN // dtype.itemsize)
        cuts = [ramp(-(-max(1, n * dtype.itemsize) // _SMALLEST), SLOT_BYTES // _SMALLEST) for n in counts]
        steps = []
        if dest == self._wiring.rank:
            cuts = [(0, 1), (0, 1)]
            steps.append(Step(Op.COPY, 0, Span(Buf.SEND, 0), Span(Buf.RECV, 0)))
            dest = source = -1
        for k in range(max(map(len, cuts)) - 1):
            for op, buf, peer, ends in ((Op.SEND, Buf.SEND, dest, cuts[0]), (Op.RECV, Buf.RECV, source, cuts[1])):
                if peer >= 0 and k + 1 < len(ends):
                    span = Span(buf, ends[k], ends[k + 1] - ends[k])
                    src, dst = (span, None) if op is Op.SEND else (None, span)
                    steps.append(Step(op, int(op is Op.RECV), src, dst, peer, CHANNEL))
        units = (cuts[0][-1], cuts[1][-1])
        rank, size = self._wiring.rank, self._wiring.size
        plan = Plan(Collective.P2P, "p2p", size, rank, *units, tuple(steps))
        tables = [offsets([n], u, grain) for n, u in zip(counts, units, strict=True)]
        return self._compile(plan, tuple(range(len(steps))), dtype, counts, tables, None, None)

    def _stream(self, stream: object, **buffers: Buffer | None) -> int:
        for name, buffer in buffers.items():
            if buffer is not None and (buffer.device, buffer.index) != (self._kind, self._device.index):
                wanted = f"memory of {self._kind}:{self._device.index}, the GPU of rank {self._wiring.rank}"
                raise BufferTypeError(f"{name}: wanted {wanted}, got some of {buffer.device}:{buffer.index}")
        return int(stream) if stream is not None else 0  # type: ignore[call-overload]

    def _is_small(self, call: Call) -> bool:
        one_host = len(self._wiring.locals) == self._wiring.size <= ONESHOT_RANKS
        return call.collective is Collective.ALLREDUCE and 0 < call.nbytes <= _SMALL and one_host

    def _small(self, call: Call) -> _native.OneshotShape:
        key = (call.dtype, call.op, call.count)
        shape = self._oneshots.get(key)
        if shape is None:
            segment, rank = self._segment, self._wiring.rank
            op = ReduceOp.SUM if call.op is ReduceOp.AVG else call.op
            table = self._device.kernels()
            blocks, threads = table.oneshot_launch(call.count, call.dtype.itemsize)
            shape = self._oneshots[key] = self._queue.bind_oneshot(
                function=table.function(f"oneshot_{call.dtype.label}_{op.label}"),
                areas=segment.areas,
                state=self._state,
                abort=segment.aborts[rank],
                rank=rank,
                words=AREA_WORDS,
                divisor=self._wiring.size if call.op is ReduceOp.AVG else 1,
                count=call.count,
                blocks=blocks,
                threads=threads,
            )
        return shape

    def _shape(self, call: Call) -> _native.DeviceShape:
        key = (
            call.collective, call.dtype, call.op, call.root, call.send_count, call.recv_count, call.send_table,
            call.recv_table,
        )  # fmt: skip
        return self._keep(key, lambda: self._bind(call))

    def _keep(self, key: tuple[object, ...], bind: Callable[[], _native.DeviceShape]) -> _native.DeviceShape:
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = bind()
            if len(self._shapes) > _KEEP:
                self._shapes.popitem(last=False)
        else:
            self._shapes.move_to_end(key)
        return shape

    def _bind(self, call: Call) -> _native.DeviceShape:
        rank, size = self._wiring.rank, self._wiring.size
        item = call.dtype.itemsize
        grain = max(1, _GRAIN // item)
        send_shares, recv_shares = _shares(call, size)
        base = self._base(call)
        longest = item * max(*send_shares, *recv_shares)
        length = parts(base, longest, _SMALLEST, grain * item)
        plans, orders = self._pipelined(call, base, length)
        plan = plans[rank]
        tables = [
            offsets(shares, units // len(shares), grain)
            for shares, units in ((send_shares, plan.send_units), (recv_shares, plan.recv_units))
        ]
        counts = (sum(send_shares), sum(recv_shares))
        return self._compile(plan, orders[rank], call.dtype, counts, tables, *self._kernels(call))

    def _compile(
        self,
        plan: Plan,
        order: Sequence[int],
        dtype: DType,
        counts: tuple[int, int],
        tables: Sequence[Sequence[int]],
        reduce: Kernel | None,
        scale: Kernel | None,
    ) -> _native.DeviceShape:
        return self._queue.bind(
            plan=plan.encode(),
            rank=plan.rank,
            size=plan.size,
            dtype=dtype,
            send_count=counts[0],
            recv_count=counts[1],
            send_table=tables[0],
            recv_table=tables[1],
            order=order,
            edges=[self._edge(step.op, step.peer, step.channel) for step in plan.steps],
            reduce=reduce,
            scale=scale,
            divisor=plan.size,
        )

    def _base(self, call: Call) -> list[Plan]:
        size = self._wiring.size
        collective = call.collective.plain
        name = _ALGORITHMS.get(collective, "direct")
        if collective is Collective.ALLREDUCE and size == 2:
            name = "oneshot"  # as many bytes each way as in two phases, and nothing to wait for in between
        scale = call.op is ReduceOp.AVG
        entry = find(collective, name)
        return [entry.build(size, r, root=call.root, scale=scale) for r in range(size)]

    def _pipelined(self, call: Call, base: list[Plan], length: int) -> tuple[list[Plan], tuple[tuple[int, ...], ...]]:
        key = (call.collective.plain, call.root, call.op is ReduceOp.AVG, length)
        found = self._plans.get(key)
        if found is None:
            plans = pipelined(base, ramp(length, SLOT_BYTES // _SMALLEST))
            found = self._plans[key] = plans, enqueue_order(plans, SLOTS)
        return found

    def _kernels(self, call: Call) -> tuple[Kernel | None, Kernel | None]:
        if call.collective not in REDUCING:
            return None, None
        op = ReduceOp.SUM if call.op is ReduceOp.AVG else call.op
        table, shape = self._device.kernels(), (_BLOCK, _MOST_BLOCKS, _PER_BLOCK)
        reduce = (table.function(f"reduce_{call.dtype.label}_{op.label}"), *shape)
        if call.op is not ReduceOp.AVG:
            return reduce, None
        return reduce, (table.function(f"scale_{call.dtype.label}"), *shape)

    def _edge(self, op: Op, peer: int, channel: int) -> int:
        if peer < 0:
            return 0
        local = self._wiring.locals
        me, other = local.index(self._wiring.rank), local.index(peer)
        src, dst = (me, other) if op is Op.SEND else (other, me)
        number = self._edges.get((src, dst, channel))
        if number is None:
            edge = self._segment.edge(src, dst, channel)
            number = self._edges[src, dst, channel] = self._queue.add_edge(edge.slots, edge.ready, edge.credit, SLOTS)
        return number

    def _grow_scratch(self, nbytes: int) -> None:
        """At least twice as much as before; the old one stays until `close`, since streams may still use it."""
        nbytes = max(nbytes, 2 * self._scratch_bytes)
        self._scratch = self._device.allocate(nbytes)
        self._scratch_bytes = nbytes
        self._undo.callback(self._device.free, self._scratch)

    def abort(self) -> None:
        """Let every stream go that waits for a peer. What is in the buffers afterwards is undefined."""
        self._segment.release(self._wiring.locals.index(self._wiring.rank))

    def close(self, timeout: float = 5.0) -> None:
        """Give everything back, once the device is done or, after `timeout` seconds, made to be."""
        deadline = time.monotonic() + timeout
        while not self._queue.idle():
            if time.monotonic() > deadline:
                self.abort()
            time.sleep(0.001)
        self._shapes.clear()
        self._undo.close()


_ALGORITHMS = {Collective.ALLTOALL: "pairwise"}


def _shares(call: Call, size: int) -> tuple[list[int], list[int]]:
    """The parts by rank that SEND and RECV consist of, in elements; one part where they are not cut by rank."""
    send, recv = call.counts(size)
    if call.collective.plain in WHOLE:
        return [send], [recv]
    match call.collective.plain:
        case Collective.ALLGATHER | Collective.GATHER:
            many = [b - a for a, b in pairwise(call.recv_table)] or [send] * size
            return [send], many
        case Collective.REDUCE_SCATTER | Collective.SCATTER:
            many = [b - a for a, b in pairwise(call.send_table)] or [recv] * size
            return many, [recv]
        case Collective.ALLTOALL if call.send_table:
            return [b - a for a, b in pairwise(call.send_table)], [b - a for a, b in pairwise(call.recv_table)]
        case Collective.ALLTOALL:
            return [send // size] * size, [recv // size] * size
    raise ArgumentError(f"{call.collective.label} on GPU buffers is not supported")


def _clear(device: Device, address: int, nbytes: int) -> None:
    zeros = np.zeros(nbytes, np.uint8)
    device.copy(address, int(zeros.ctypes.data), nbytes)


def device_of(buffer: Buffer) -> Device:
    """The GPU that holds a buffer."""
    module = {"cuda": "cuda", "rocm": "hip"}.get(buffer.device)
    if module is None:
        raise BufferTypeError(f"memory on {buffer.device} is not supported")
    driver = importlib.import_module(f".devices.{module}", __package__)
    reason = driver.why_not()
    if reason is not None:
        raise BufferTypeError(f"the buffers are on {buffer.device}, but {reason}")
    return cast("Device", driver.devices()[buffer.index])


class GpuWork(Work):
    """An operation on streams. It was enqueued when the call returned."""

    __slots__ = ("_queue",)

    def __init__(self, queue: _native.DeviceQueue, keep: object, what: str) -> None:
        super().__init__(None, None, keep, what)
        self._queue = queue

    def wait(self, timeout: float | None = None) -> None:
        """Block the host until the operation is complete."""
        deadline = time.monotonic() + (300.0 if timeout is None else timeout)
        pause = 20e-6
        while not self._queue.idle():
            if time.monotonic() > deadline:
                raise CollectiveTimeoutError(f"{self._what}: not complete after {timeout} s")
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)
        self._keep = None

    def wait_stream(self, stream: object = None) -> None:
        """What comes on `stream` later begins after the operation."""
        self._queue.join(int(stream) if stream else 0)  # type: ignore[call-overload]

    @property
    def done(self) -> bool:
        return self._queue.idle()
