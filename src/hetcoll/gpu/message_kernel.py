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
    from .near import NearMemory
    from .shared import GpuShare

STATE_BYTES = 2 * ONESHOT_RANKS * MESSAGE_STATE


class Small(NamedTuple):
    """A message that a kernel carries: the number of its buffer, the other rank, bytes."""

    buffer: int
    peer: int
    nbytes: int


Kernel = tuple[int, bytes, bytes, int, int, list[int], list[int]]
"""For a native queue: function, arguments, those where it is captured, blocks, threads, and of each message its buffer
and its end of a ring."""


class Placed(NamedTuple):
    """A kernel that comes before all steps of a plan from this one in its order on, and has this level
    (`order.levels`)."""

    kernel: Kernel
    before: int
    level: int


class MessageKernel:
    """That of this rank, to and from `peers` of its host. Captured messages have rings and a state of their own where
    rings are in the memory of GPUs (`near`): a graph may be replayed while others are under way. Each of `states` is
    device memory of STATE_BYTES, zero at first."""

    def __init__(
        self, device: Device, share: GpuShare, peers: Collection[int], states: tuple[int, int], near: NearMemory | None
    ) -> None:
        """All rings are mapped now: later a driver might wait for messages that are under way."""
        self._device, self._share = device, share
        self._states = states if near is not None else (states[0], states[0])
        self._rings: dict[tuple[int, bool], tuple[int, tuple[int, int]]] = {}  # by peer, and whether this rank sends
        for peer in peers:
            here, there = share.here, share.locals.index(peer)
            for out in (False, True):
                way = (here, there) if out else (there, here)
                rings = (share.segment.message_ring(*way),) * 2 if near is None else near.message_rings(*way)
                self._rings[peer, out] = 2 * there + out, rings

    def bind(self, messages: Sequence[tuple[bool, Small]]) -> Kernel:
        """The one that carries these, each with whether this rank sends it: one of each rank and direction at most, and
        those that are sent first, since blocks run in their order where a device has no room for all of them."""
        (plain, blocks), (captured, _) = (self._arguments(messages, way) for way in (0, 1))
        function, buffers = self._device.kernels().function(MESSAGES), [m.buffer for _, m in messages]
        ends = [self._rings[m.peer, out][0] for out, m in messages]
        return function, plain, captured, blocks, MESSAGE_THREADS, buffers, ends

    def _arguments(self, messages: Sequence[tuple[bool, Small]], way: int) -> tuple[bytes, int]:
        """By the first or the second of the rings and states; and how many blocks they take."""
        arguments, blocks = Messages(count=len(messages), abort=self._share.segment.aborts[self._share.here]), 0
        for i, (out, (_, peer, nbytes)) in enumerate(messages):
            number, rings = self._rings[peer, out]
            state = self._states[way] + MESSAGE_STATE * number
            made = arguments.message[i] = KernelTable.message(nbytes, rings[way], state, blocks, number // 2, sends=out)
            blocks += made.blocks
        return bytes(arguments), blocks
