"""Messages between GPUs: one, one each way, or a group that is under way together.

Small ones are a kernel's (`message_kernel`). Others go through slots between islands, inside one by the vendor
library's send and receive. A library connects two ranks for messages when both call it, and holds up the host until
then (NCCL: "Point-to-point communication"); 446 MiB of an H200's memory and 0.2 s a pair is what that takes, so only
ranks that send it something to each other are connected.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol

import hetcoll._native as _native

from ..calls import RECV, SEND
from ..calls.buffers import Buffer
from ..calls.messages import Message, SendRecv
from ..errors import ArgumentError, DeviceError, spell_ranks
from ..runtime.planner import Planner
from ..types import DType
from ..vendors.devices.base import URGENT
from . import float8
from .deadlines import Deadlines
from .lanes import SideStream
from .planner import Carrier, GpuPlanner, by_library
from .plans import GpuPlans
from .shared import GpuShare, Note
from .work import Enqueued, GpuWork

if TYPE_CHECKING:
    from ..vendors.devices.base import Device
    from ..vendors.devices.kernels.table import KernelTable

log = logging.getLogger("hetcoll")

_MESSAGE = "a message"


class Executor(Enqueued, Protocol):
    """What messages need of the executor that runs them (`executor.GpuExecutor`)."""

    @property
    def device(self) -> Device: ...

    def stream(self, stream: object, **buffers: Buffer | None) -> int: ...

    def bound(
        self,
        shape: _native.DeviceShape,
        what: str,
        notes: Sequence[Note],
        message: DType | None = None,
        group: Sequence[DType] = (),
    ) -> _native.GpuCall: ...


class GpuMessages:
    """Those of one communicator on this rank's GPU, by what `choices` says of each."""

    def __init__(
        self,
        path: Executor,
        share: GpuShare,
        plans: GpuPlans[_native.DeviceShape],
        planner: Planner,
        calls: _native.GpuCalls,
        deadlines: Deadlines,
        choices: GpuPlanner,
        convert: float8.OnGpu | None,
    ) -> None:
        self._path, self._share, self._plans, self._planner, self._calls = path, share, plans, planner, calls
        self._choices, self._convert, self._device, self._deadlines = choices, convert, path.device, deadlines
        mates = choices.mates
        self._strangers = mates - {share.rank}
        self.awaited: Collection[int] = ()
        """The ranks that the library connects with this one just now."""
        self._kernels: KernelTable | None = None  # once what the cache has was loaded
        self._bytes = self._device.allocate(2 * len(mates)) if mates else 0
        self._lanes: dict[tuple[int, int], SideStream] = {}  # see `_lane`

    def one(self, ends: SendRecv, stream: object, async_op: bool, seconds: float) -> GpuWork:
        """Enqueue a message, or two at once."""
        send, dest, recv, source = ends
        handle = self._path.stream(stream, sendbuf=send, recvbuf=recv)
        if async_op and (send is None or recv is None or self._choices.by_kernel(ends)):
            handle, async_op = self._lane(dest if send else -1, source if recv else -1, handle)
        conversion = None if self._convert is None else float8.Float8Conversion.of_message(ends, self._share.rank)
        if self._convert is None or conversion is None:
            self._enqueue(ends, handle, async_op, seconds)
        else:
            ways = (dest if send else -1, source if recv else -1)
            with self._convert.around([conversion], handle, async_op, ways) as ([made], on):
                self._enqueue(SendRecv(made.send, dest, made.recv, source), on, False, seconds, again=False)
        return GpuWork(self._path, (send, recv), _MESSAGE)

    def _enqueue(self, ends: SendRecv, stream: int, async_op: bool, seconds: float, *, again: bool = True) -> None:
        """`again`: the fast path may run such a message when it comes again."""
        key = (ends.first.dtype, *ends.counts)

        def bind() -> _native.GpuCall:
            self._load_ahead()
            notes = self._share.notes(ends)
            plan = self._plans.messages(*key, self._choices.carrier)
            bound = self._path.bound(plan, ends.describe(), notes, ends.first.dtype)
            if again:
                self._calls.remember(*ends.key, bound)
            return bound

        with self._deadlines.call(ends.describe, stream, async_op, seconds) as (on, apart):
            self._connect(ends.halves, on)
            self._calls.run(self._planner.bound("gpu message", key, bind), *ends.addresses, on, not apart)

    def _load_ahead(self) -> None:
        """Before the first message: a driver may wait for the device when it loads kernels, and the device will wait
        for messages. Where that cannot be done, as without a compiler, messages need none, and what does will say so.
        """
        if self._kernels is None:
            try:
                self._kernels = self._device.kernels()
                self._kernels.load_kept()
            except DeviceError as error:
                log.info("no kernels are loaded ahead of messages: %s", error)

    @property
    def loading(self) -> str | None:
        """Whose kernels are being loaded just now, perhaps behind messages."""
        return None if self._kernels is None else self._kernels.loading

    def _lane(self, dest: int, source: int, stream: int) -> tuple[int, bool]:
        """Where a message runs that no stream is to wait for: on a stream of its peer and direction, behind what is on
        `stream` now, so that it waits for no other; made at the first one. And whether that is `stream` itself, as in a
        graph, which has an order of its own."""
        if self._device.capturing(stream):
            return stream, True
        if (dest, source) not in self._lanes:
            self._lanes[dest, source] = SideStream(self._device, URGENT)
        return self._lanes[dest, source].behind(stream), False

    def together(self, messages: Sequence[Message]) -> None:
        """Enqueue messages that are under way together."""
        handle = self._path.stream(None, **{f"buf of message {i}": m.buffer for i, m in enumerate(messages)})
        found = [float8.Float8Conversion.of_message(m.alone, self._share.rank) for m in messages]
        conversions = {i: each for i, each in enumerate(found) if each is not None}
        if self._convert is None or not conversions:
            self._group(messages, handle)
            return
        with self._convert.around([*conversions.values()], handle, False) as (made, on):
            converted = dict(zip(conversions, made, strict=True))
            self._group(
                [m._replace(buffer=converted[i].first) if i in converted else m for i, m in enumerate(messages)], on
            )

    def _group(self, messages: Sequence[Message], stream: int) -> None:
        """Enqueue messages, none of which is converted any more. Those to this rank itself match."""
        sends, recvs = ([m for m in messages if m.kind == half] for half in (SEND, RECV))
        key = tuple((m.kind, m.buffer.dtype, m.buffer.count, m.peer) for m in messages)

        def bind() -> _native.GpuCall:
            self._load_ahead()
            out, into = ([(m.peer, m.buffer.nbytes) for m in half] for half in (sends, recvs))
            plan = self._plans.messages(DType.UINT8, out, into, self._choices.carrier, apart=True)
            what = f"group of {', '.join(map(str, messages))}"
            notes = [note for m in messages for note in self._share.notes(m.alone)]
            return self._path.bound(plan, what, notes, DType.UINT8, [m.buffer.dtype for m in (*sends, *recvs)])

        self._connect(messages, stream)
        bound = self._planner.bound("gpu group", key, bind)
        self._calls.run_group(bound, [m.buffer.ptr for m in (*sends, *recvs)], stream, True)

    def _connect(self, messages: Sequence[Message], stream: int) -> None:
        """Before the library's first message to or from each: both ways at once, so that two ranks that send first do
        not wait for each other."""
        if not self._strangers:
            return
        carrier = self._choices.carrier
        peers = [m.peer for m in messages if carrier(m.peer, m.buffer.nbytes) is Carrier.LIBRARY]
        fresh = self._strangers.intersection(peers)
        if not fresh:
            return
        if self._device.capturing(stream):
            raise ArgumentError(
                "stream: a graph is being captured on it, while the vendor's library cannot connect"
                f" {spell_ranks(fresh)} to this one; wanted a message between them before"
            )
        ends = [(peer, 1) for peer in sorted(fresh)]
        plan = self._plans.messages(DType.UINT8, ends, ends, by_library, apart=True)
        bound = self._path.bound(plan, "first message", [], DType.UINT8, [DType.UINT8] * 2 * len(ends))
        self.awaited = fresh
        try:
            self._calls.run_group(bound, [self._bytes + i for i in range(2 * len(ends))], stream, True)
        finally:
            self.awaited = ()
        self._strangers -= fresh

    def close(self) -> None:
        """Give everything back. Nothing may be under way."""
        for lane in self._lanes.values():
            lane.close()
        if self._bytes:
            self._device.free(self._bytes)
