"""How large slots are, and how many of them an edge between hosts has, where a host's ranks may pin so much memory.

The size is the same on all ranks of a communicator, since plans are cut by it. So it follows from what all know: each
rank's room, which is what it may still pin. Slots are as large as is fast, if the edges that a rank may need fit with
them. Those are three channels to each rank of its host, one to every rank elsewhere, and a second one to as many of
these as trees and rings need; or, where even the smallest slots would be too large for that, two to those alone.
Where there is room beside all of these, kernels have their rings, and edges elsewhere have more slots than they must.

Ranks with GPUs pin what lies between two of them in halves, and alone what lies between one and a rank without. Ranks
of one host soon use all of their edges. They leave most of the room to later communicators (`pinned.Room`), or what the
smallest slots leave. Ranks of several hosts use most edges never.

Examples
--------
>>> Demand(gpus=2, far=6).fit(512 << 20, 2 << 20).slot >> 10
2048
>>> Demand(gpus=8, far=56).fit(128 << 20, 2 << 20).slot >> 10
256
>>> Demand(gpus=2, cpus=62).fit(512 << 20, 1 << 20).slot >> 10
256
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..errors import InitError
from ..plan.pieces import LEAST_SLOT, SLOT_STEP, SLOTS
from ..vendors.devices.kernels.table import MESSAGE_RING
from .pinned import WINDOWS, Room, Told
from .slots import WORDS_BYTES, SlotSegment

if TYPE_CHECKING:
    from ..links.facts import Gpu
    from ..plan.topology import Topology

_SMALL = (SLOT_STEP // 2, SLOT_STEP // 4, LEAST_SLOT)
_CHANNELS = 3  # of two ranks of a host: those of collectives, and of messages,
_SOON = 2  # of which so many are in use soon


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
    """What a rank with a GPU may come to need, on whose host so many ranks of the communicator have `gpus`, this one
    among them, and so many are `cpus`, and that has `far` others. `kernels`: some collectives may be one kernel."""

    gpus: int
    cpus: int = 0
    far: int = 0
    kernels: bool = False

    @classmethod
    def of(cls, topology: Topology, host: Sequence[int], gpus: int, *, kernels: bool = False) -> Demand:
        """Of the ranks of a host, so many of which have one, and which may be told to share no memory. Only a host that
        has all ranks has kernels."""
        if len(host) > 1 and topology.far(*host[:2]):
            return cls(1, 0, topology.size - 1)
        far = topology.size - len(host)
        return cls(gpus, len(host) - gpus, far, kernels and far == 0)

    @property
    def few(self) -> int:
        """To how many ranks elsewhere a tree goes from one: a parent, and a child on each level."""
        return min(self.far, (self.gpus + self.cpus + self.far).bit_length())

    def bytes(self, slot: int, far: int, *, kernels: bool = False, rings: bool = False) -> int:
        """With slots of so many bytes, edges to so many ranks elsewhere, two to a few, and kernels' rings or not."""
        return self._bytes(_CHANNELS, slot, far, kernels, rings)

    def _bytes(self, channels: int, slot: int, far: int, kernels: bool, rings: bool) -> int:
        edges = channels * (self.gpus - 1 + 2 * self.cpus) + 2 * (far + self.few)
        head = SlotSegment.head_bytes(self.gpus + self.cpus, kernels=kernels)
        return head // self.gpus + edges * (WORDS_BYTES + SLOTS * slot) + rings * (self.gpus - 1) * MESSAGE_RING

    def fit(self, room: int, fast: int, least: int = LEAST_SLOT, *, part: int | None = None) -> Fit | None:
        """The best with slots of `fast` bytes, or fewer but no fewer than `least`. Where all ranks share the host it
        takes no more than a `part` of the `room`, if that will do. None where nothing fits `room`."""
        most = room if self.far or part is None else part
        large = [slot for slot in [*range(fast, SLOT_STEP, -SLOT_STEP), SLOT_STEP] if least <= slot <= fast]
        small = [slot for slot in _SMALL if least <= slot <= fast]
        for far in (self.far, self.few):
            for share, kernels, ways in (
                (most, self.kernels, itertools.product((True, False), large)),
                (most, False, itertools.product((True, False), large)),
                (most, False, itertools.product((True, False), small)),
                (room, False, itertools.product((False,), (large + small)[-1:])),
            ):
                for rings, slot in ways:
                    soon, ever = (self._bytes(each, slot, far, kernels, rings) for each in (_SOON, _CHANNELS))
                    if (left := min(share - soon, room - ever)) >= 0:
                        return Fit(slot, far, kernels, rings, max(0, left - room // WINDOWS) // slot)
        return None


def find_rooms(topology: Topology, gpus: Sequence[Gpu], budget: int) -> dict[int, Room]:
    """What the ranks with GPUs of each host may still pin, by the host's first rank; of a host without GPUs nothing."""
    told = {host[0]: [Told(*gpus[rank].pinned) for rank in host if gpus[rank].vendor] for host in topology.hosts}
    return {first: Room.of(each, budget) for first, each in told.items() if each}


def slots_that_fit(
    topology: Topology, gpus: Sequence[Gpu], rooms: Mapping[int, Room], fast: int, *, kernels: bool
) -> int:
    """Bytes of a slot, the same on all ranks: `fast`, or fewer where some rank has too little room for that.

    `rooms` are those of `find_rooms`, and `kernels` says whether some collectives may be one kernel.

    Raises
    ------
    InitError
        Not even the smallest slots fit the room of some rank. It says what would.
    """
    found = fast
    tightest: dict[Demand, Room] = {}
    for host in topology.hosts:
        if (room := rooms.get(host[0])) is not None:
            demand = Demand.of(topology, host, sum(bool(gpus[rank].vendor) for rank in host), kernels=kernels)
            tightest[demand] = min(room, tightest.get(demand, room))
    for demand, room in tightest.items():
        fit = demand.fit(room.all, fast, part=room.part)
        if fit is None:
            needed = demand.bytes(LEAST_SLOT, demand.few)
            wanted = (room.share + needed - room.all) * room.ranks
            raise InitError(
                f"{room.ranks} ranks of a host have GPUs, and each needs {needed} bytes of pinned memory where"
                f" {room.all} are left: wanted HETCOLL_PINNED_BYTES={wanted} or more, got {room.budget}"
            )
        found = min(found, fit.slot)
    return found
