"""All-reduces among the GPUs of one host as one kernel a rank, where that is faster than copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hetcoll._native as _native

from ..calls import Call
from ..types import Collective, ReduceOp
from ..vendors.devices.kernels.source import exchange_name, oneshot_name
from ..vendors.devices.kernels.table import ONESHOT_RANKS, Exchange, Oneshot
from .message_kernel import STATE_BYTES as MESSAGE_STATE_BYTES
from .slots import AREA_WORDS, BLOCKS, RING_SLOT_BYTES, RING_SLOTS

if TYPE_CHECKING:
    from ..vendors.devices.base import Device
    from .shared import GpuShare

_SMALL = 64 << 10  # bytes up to which a kernel of words beats copies
_ONE_SHOT, _MOST_ONE_SHOT = 1 << 20, 4 << 20  # bytes that a rank reads up to which each reduces all; of two or three
_MOST_TWO_SHOT = 6 << 20  # of four and more, which each reduce a part beyond _ONE_SHOT
_LEAST_CHUNK, _PACK, _THREADS = 4 << 10, 16, 512
_ONESHOT_STATE = 256
ZERO = _ONESHOT_STATE + 8 * BLOCKS  # where in the state lie 8 bytes that stay 0
MESSAGES = ZERO + 8  # where that of message kernels begins
STATE_BYTES = MESSAGES + MESSAGE_STATE_BYTES


class OneKernel:
    """Binds such calls of rank `rank` of `size`. `state` is device memory of STATE_BYTES, zero at first."""

    def __init__(
        self, queue: _native.DeviceQueue, device: Device, share: GpuShare, state: int, rank: int, size: int
    ) -> None:
        self._queue, self._device, self._share, self._state = queue, device, share, state
        self._rank, self._size = rank, size

    def choose(self, collective: Collective, nbytes: int) -> str | None:
        """Which kernel does it; None where copies are faster, or none can."""
        if collective is not Collective.ALLREDUCE or nbytes == 0 or not 1 < self._size <= ONESHOT_RANKS:
            return None
        if nbytes <= _SMALL:
            return "oneshot"
        reads, most = self._reads(nbytes)
        return "exchange" if reads <= most else None

    def _two_shot(self, nbytes: int) -> bool:
        """Whether each rank reduces a part. Three read a third less then, and wait once more: that takes as long."""
        return self._size > 3 and (self._size - 1) * nbytes > _ONE_SHOT

    def _reads(self, nbytes: int) -> tuple[int, int]:
        """How many bytes a rank reads of its peers in an exchange, and up to how many that beats copies."""
        others = (self._size - 1) * nbytes
        return (2 * others // self._size, _MOST_TWO_SHOT) if self._two_shot(nbytes) else (others, _MOST_ONE_SHOT)

    def bind(self, call: Call) -> _native.KernelShape | None:
        """None where copies are faster, or no kernel does it."""
        size, kernel = self._size, self.choose(call.collective, call.nbytes)
        if kernel is None:
            return None
        arguments: Oneshot | Exchange
        table, segment, item = self._device.kernels(), self._share.segment, call.dtype.itemsize
        if kernel == "oneshot":
            name = oneshot_name(call.dtype, call.op)
            blocks, threads = table.oneshot_launch(call.count, item)
            arguments = Oneshot(state=self._state, words=AREA_WORDS)
            arguments.areas[:size] = segment.areas
        else:
            name = exchange_name(call.dtype, call.op)
            chunk = max(_LEAST_CHUNK, min(RING_SLOT_BYTES, -(-call.nbytes // (BLOCKS * _PACK)) * _PACK))
            blocks, threads = min(BLOCKS, -(-call.nbytes // chunk)), _THREADS
            arguments = Exchange(slots=RING_SLOTS, slot_bytes=RING_SLOT_BYTES, chunk_bytes=chunk)
            arguments.two_shot = self._two_shot(call.nbytes)
            arguments.state = self._state + _ONESHOT_STATE
            arguments.rings[:size], arguments.words[:size] = segment.rings, segment.ring_words
        arguments.count, arguments.rank, arguments.size = call.count, self._rank, size
        arguments.divisor = size if call.op is ReduceOp.AVG else 1
        arguments.abort = segment.aborts[self._share.here]
        return self._queue.bind_kernel(
            function=table.function(name), arguments=bytes(arguments), blocks=blocks, threads=threads
        )
