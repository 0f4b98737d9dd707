"""Small messages among the GPUs of one host, as one kernel a call on each rank (``devices/kernels/messages.h``).

Which messages are its is chosen by `planner.GpuPlanner.carrier`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..vendors.devices.kernels.source import MESSAGES
from ..vendors.devices.kernels.table import (
    MESSAGE_STATE,
    MESSAGE_THREADS,
    ONESHOT_RANKS,
    KernelTable,
    Messages,
)

if TYPE_CHECKING:
    from ..vendors.devices.base import Device
    from .shared import GpuShare

STATE_BYTES = 2 * ONESHOT_RANKS * MESSAGE_STATE


class Small(NamedTuple):
    """A message that a kernel carries: the number of its buffer, the other rank, bytes."""

    buffer: int
    peer: int
    nbytes: int


Kernel = tuple[int, bytes, int, int, list[int], list[int]]
"""For a native queue: function, arguments, blocks, threads, and of each message its buffer and its end of a ring."""


class Placed(NamedTuple):
    """A kernel that comes before all steps of a plan from this one in its order on, and has this level
    (`order.levels`)."""

    kernel: Kernel
    before: int
    level: int


class MessageKernel:
    """That of this rank, to and from `peers` of its host. `state` is device memory of STATE_BYTES, zero at first."""

    def __init__(self, device: Device, share: GpuShare, peers: Collection[int], state: int) -> None:
        """All rings are mapped now: later a driver might wait for messages that are under way."""
        self._device, self._share, self._state = device, share, state
        self._rings: dict[tuple[int, bool], tuple[int, int]] = {}  # by peer, and whether this rank sends: number, place
        for peer in peers:
            here, there = share.here, share.locals.index(peer)
            for out in (False, True):
                ring = share.segment.message_ring(*((here, there) if out else (there, here)))
                self._rings[peer, out] = 2 * there + out, ring

    def bind(self, messages: Sequence[tuple[bool, Small]]) -> Kernel:
        """The one that carries these, each with whether this rank sends it: one of each rank and direction at most, and
        those that are sent first, since blocks run in their order where a device has no room for all of them."""
        abort = self._share.segment.aborts[self._share.here]
        arguments, blocks, rings = Messages(count=len(messages), abort=abort), 0, []
        for i, (out, (_, peer, nbytes)) in enumerate(messages):
            number, ring = self._rings[peer, out]
            state = self._state + MESSAGE_STATE * number
            made = arguments.message[i] = KernelTable.message(nbytes, ring, state, blocks, number // 2, sends=out)
            rings.append(number)
            blocks += made.blocks
        function = self._device.kernels().function(MESSAGES)
        return function, bytes(arguments), blocks, MESSAGE_THREADS, [m.buffer for _, m in messages], rings
