"""Collectives among the GPUs of one host as one kernel a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hetcoll._native as _native

from ..calls import Call
from ..plan import one_kernel
from ..types import REDUCING, WHOLE, Collective, ReduceOp
from ..vendors.devices.kernels.source import exchange_name, gather_bytes, gather_name, oneshot_name
from ..vendors.devices.kernels.table import ONESHOT_RANKS, Exchange, Oneshot
from .message_kernel import STATE_BYTES as MESSAGE_STATE_BYTES
from .slots import GPU_RINGS, HOST_RINGS, RING_SLOT_BYTES, RING_SLOTS, Rings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..vendors.devices.base import Device
    from .shared import GpuShare

_LEAST_CHUNK, _PACK = 4 << 10, 16
_ONESHOT_STATE = 256
ZERO = _ONESHOT_STATE + 8 * max(HOST_RINGS.blocks, GPU_RINGS.blocks)  # where in the state lie 8 bytes that stay 0
MESSAGES = ZERO + 8  # where that of message kernels begins
CAPTURED = MESSAGES + MESSAGE_STATE_BYTES  # where the same of captured calls begins
STATE_BYTES = 2 * CAPTURED

assert one_kernel.MOST_RANKS == ONESHOT_RANKS


class OneKernel:
    """Binds such calls of rank `rank` of `size`, through the first of `rings`, or the second where they are captured: a
    graph may be replayed while other calls are under way. Where there is no second, both go through the first, one
    after another. `state` is device memory of STATE_BYTES, zero at first. `ordered`: sums of narrow floats are rounded
    after each addition, as plans round them."""

    def __init__(
        self,
        queue: _native.DeviceQueue,
        device: Device,
        share: GpuShare,
        rings: Sequence[Rings],
        state: int,
        rank: int,
        size: int,
        *,
        ordered: bool,
    ) -> None:
        self._queue, self._device, self._share = queue, device, share
        self._ways = list(zip(rings, (state, state + CAPTURED), strict=False))
        self._rank, self._size, self._ordered = rank, size, ordered
        self.near = any(each.at for each in rings[1:])
        """Whether these rings are in the GPUs' own memory."""

    def bind(self, call: Call, kernel: str) -> _native.KernelShape:
        """`kernel` is the one that is chosen for it (`plan.one_kernel.choose`)."""
        make, both = self._oneshot if kernel == "oneshot" else self._exchange, []
        for rings, state in self._ways:
            name, arguments, blocks, threads = make(call, rings, state)
            arguments.rank, arguments.size = self._rank, self._size
            arguments.divisor = self._size if call.op is ReduceOp.AVG else 1
            arguments.rounds = self._ordered
            arguments.abort = self._share.segment.aborts[self._share.here]
            both.append(bytes(arguments))
        function = self._device.kernels().function(name)
        return self._queue.bind_kernel(
            function=function, arguments=both[0], captured=both[-1], blocks=blocks, threads=threads
        )

    def _oneshot(self, call: Call, rings: Rings, state: int) -> tuple[str, Oneshot, int, int]:
        """Kernel, argument, blocks and threads."""
        launch = self._device.kernels().oneshot_launch(call.count, call.dtype.itemsize, rings.size.blocks)
        sources, to, words = rings.areas(self._rank)
        arguments = Oneshot(count=call.count, state=state, words=words, copies=len(to))
        arguments.from_[: self._size], arguments.to[: len(to)] = sources, to
        return oneshot_name(call.dtype, call.op), arguments, *launch

    def _exchange(self, call: Call, rings: Rings, state: int) -> tuple[str, Exchange, int, int]:
        """Likewise."""
        size, item, (ring, at) = self._size, call.dtype.itemsize, rings
        takes, gives, cut = one_kernel.way(call.collective, size, self._rank, call.root)
        two_shot = call.collective is Collective.ALLREDUCE and one_kernel.two_shot(call.nbytes, size)
        each = call.nbytes if call.collective in WHOLE else call.nbytes // size
        most = RING_SLOT_BYTES // (size - 1 if cut else 1) // _PACK * _PACK
        chunk = min(most, max(_LEAST_CHUNK, -(-each // (ring.blocks * _PACK)) * _PACK))
        reduces = call.collective in REDUCING
        name = exchange_name(call.dtype, call.op) if reduces else gather_name(call.dtype)
        arguments = Exchange(count=each // (item if reduces else gather_bytes(call.dtype)))
        arguments.first, arguments.sources, arguments.gives = takes.start, len(takes), gives
        arguments.cut, arguments.two_shot = cut, two_shot
        arguments.slots, arguments.slot_bytes, arguments.chunk_bytes = RING_SLOTS, RING_SLOT_BYTES, chunk
        arguments.state = state + _ONESHOT_STATE
        arguments.rings[:size], arguments.words[:size] = at, [each + ring.ring for each in at]
        return name, arguments, min(ring.blocks, -(-each // chunk)), ring.threads
