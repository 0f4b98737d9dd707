"""How large slots are, and how many of them an edge between hosts has, where a host's ranks may pin so much memory.

The size is the same on all ranks of a communicator, since plans are cut by it. So it follows from what all know: each
rank's room, which is what it may still pin. Slots are as large as is fast, if the edges that a rank may need fit with
them. Those are two channels to each rank of its host, one to every rank elsewhere, and a second one to as many of these
as trees and rings need; or, where even the smallest slots would be too large for that, two to those alone. Where there
is room beside all of these, kernels have their rings, and edges elsewhere have more slots than they must.

Ranks of one host soon use all of their edges. They leave half of the room to later communicators, or what the smallest
slots leave. Ranks of several hosts use most edges never.

Examples
--------
>>> Demand(ranks=2, far=6).fit(512 << 20, 2 << 20).slot >> 10
2048
>>> Demand(ranks=8, far=56).fit(128 << 20, 2 << 20).slot >> 10
256
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..errors import InitError
from ..plan.pieces import LEAST_SLOT, SLOT_STEP, SLOTS
from ..vendors.devices.kernels.table import MESSAGE_RING
from .pinned import WINDOWS
from .slots import WORDS_BYTES, SlotSegment

if TYPE_CHECKING:
    from ..plan.topology import Topology
    from .pinned import Pinned

_CHANNELS = 2  # of most ranks inside a host: messages, and a collective's


class Fit(NamedTuple):
    """What fits: bytes of a slot, edges to so many ranks elsewhere, the rings of collectives' kernels and those of the
    message kernel, and so many slots beside."""

    slot: int
    far: int
    kernels: bool
    rings: bool
    spare: int


@dataclass(frozen=True)
class Demand:
    """What a rank may come to need, whose host has so many `ranks` of the communicator, and that has `far` others.
    `kernels`: some collectives may be one kernel."""

    ranks: int
    far: int
    kernels: bool = False

    @classmethod
    def of(cls, topology: Topology, host: Sequence[int], *, kernels: bool = False) -> Demand:
        """Of the ranks of a host, which may be told to share no memory. Only a host that has all ranks has kernels."""
        staged = len(host) > 1 and topology.far(*host[:2])
        far = topology.size - (1 if staged else len(host))
        return cls(topology.size - far, far, kernels and far == 0)

    @property
    def few(self) -> int:
        """To how many ranks elsewhere a tree goes from one: a parent, and a child on each level."""
        return min(self.far, (self.ranks + self.far).bit_length())

    def bytes(self, slot: int, far: int, *, kernels: bool = False, rings: bool = False) -> int:
        """With slots of so many bytes, edges to so many ranks elsewhere, two to a few, and kernels' rings or not."""
        edges = (_CHANNELS * (self.ranks - 1) + 2 * (far + self.few)) * (WORDS_BYTES + SLOTS * slot)
        head = SlotSegment.head_bytes(self.ranks, kernels=kernels)
        return head // self.ranks + edges + rings * (self.ranks - 1) * MESSAGE_RING

    def fit(self, room: int, fast: int, least: int = LEAST_SLOT) -> Fit | None:
        """The best with slots of `fast` bytes, or fewer but no fewer than `least`. None where nothing fits `room`."""
        smaller, part = [*range(fast, least, -SLOT_STEP), least], room if self.far else room // 2
        for far in (self.far, self.few):
            for share, kernels, sizes in (
                (part, self.kernels, smaller),
                (part, False, smaller),
                (room, False, [least]),
            ):
                for rings, slot in itertools.product((True, False), sizes):
                    left = share - self.bytes(slot, far, kernels=kernels, rings=rings)
                    if left >= 0:
                        return Fit(slot, far, kernels, rings, max(0, left - room // WINDOWS) // slot)
        return None


def slots_that_fit(topology: Topology, pinned: Pinned, rooms: Sequence[int], fast: int, *, kernels: bool) -> int:
    """Bytes of a slot, the same on all ranks: `fast`, or fewer where some rank has too little room for that.

    `rooms` are bytes that each rank may still pin, and `kernels` whether some collectives may be one kernel.

    Raises
    ------
    InitError
        Not even the smallest slots fit the room of some rank. It says what would.
    """
    found = fast
    tightest = {len(host): host for host in sorted(topology.hosts, key=lambda host: -min(rooms[rank] for rank in host))}
    for host in tightest.values():
        demand, room = Demand.of(topology, host, kernels=kernels), min(rooms[rank] for rank in host)
        fit = demand.fit(room, fast)
        if fit is None:
            needed = demand.bytes(LEAST_SLOT, demand.few)
            raise InitError(
                f"{len(host)} ranks of {topology.size} share a host, and each needs {needed} bytes of pinned memory for"
                f" GPUs, of which {room} are left: {pinned.wanted(needed - room)}"
            )
        found = min(found, fit.slot)
    return found
