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

    def bind(self, sends: Sequence[Small], recvs: Sequence[Small]) -> list[Kernel]:
        """The kernels that carry these, one after another: the first of each rank and direction, then the second of
        each, and so on, so that all ranks have the same messages in the kernels of one number."""
        rounds: list[list[tuple[bool, Small]]] = []
        for out, half in ((True, sends), (False, recvs)):
            seen: dict[int, int] = {}
            for each in half:
                turn = seen[each.peer] = seen.get(each.peer, -1) + 1
                if turn == len(rounds):
                    rounds.append([])
                rounds[turn].append((out, each))
        return [self._kernel(turn) for turn in rounds]

    def _kernel(self, messages: Sequence[tuple[bool, Small]]) -> Kernel:
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
