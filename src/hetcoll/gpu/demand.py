"""How large slots are, and how many of them an edge between hosts has, where a host's ranks may pin so much memory.

The size is the same on all ranks of a communicator, since plans are cut by it. So it follows from what all know: slots
are as large as is fast, unless the edges that a rank may need would not fit its part of the budget then. Those are two
channels to each rank of its host, one to every rank elsewhere, and a second one to as many of these as trees and rings
need; or, where even the smallest slots would be too large for that, two to those alone. Where there is room beside all
of these, the kernel of small messages has its rings, and edges elsewhere have more slots than they must.

Examples
--------
>>> Demand(ranks=2, far=6).slot_bytes(512 << 20, 2 << 20) >> 10
2048
>>> Demand(ranks=8, far=56).slot_bytes(128 << 20, 2 << 20) >> 10
256
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import InitError
from ..plan.pieces import LEAST_SLOT, SLOT_STEP, SLOTS
from ..vendors.devices.kernels.table import MESSAGE_RING
from .pinned import WINDOWS
from .slots import WORDS_BYTES, SlotSegment

if TYPE_CHECKING:
    from ..plan.topology import Topology

_CHANNELS = 2  # of most ranks inside a host: messages, and a collective's


@dataclass(frozen=True)
class Demand:
    """What a rank may come to need, whose host has so many `ranks` of the communicator, and that has `far` others."""

    ranks: int
    far: int

    @classmethod
    def of(cls, topology: Topology, host: Sequence[int]) -> Demand:
        """Of the ranks of a host, which may be told to share no memory."""
        staged = len(host) > 1 and topology.far(*host[:2])
        return cls(1, topology.size - 1) if staged else cls(len(host), topology.size - len(host))

    @property
    def few(self) -> int:
        """To how many ranks elsewhere a tree goes from one: a parent, and a child on each level."""
        return min(self.far, (self.ranks + self.far).bit_length())

    def bytes(self, slot: int, far: int, *, rings: bool = False) -> int:
        """With slots of so many bytes, edges to so many ranks elsewhere, two to a few, and the message kernel's rings
        or not."""
        edges = (_CHANNELS * (self.ranks - 1) + 2 * (far + self.few)) * (WORDS_BYTES + SLOTS * slot)
        head = SlotSegment.head_bytes(self.ranks, kernels=self.far == 0)
        return head // self.ranks + edges + rings * (self.ranks - 1) * MESSAGE_RING

    def _fits(self, share: int, sizes: Sequence[int]) -> Iterator[tuple[int, int, bool]]:
        """What fits of these, the best first: a slot's size, ranks elsewhere, whether there are rings."""
        for far, rings, slot in itertools.product((self.far, self.few), (True, False), sizes):
            if self.bytes(slot, far, rings=rings) <= share:
                yield slot, far, rings

    def slot_bytes(self, share: int, fast: int) -> int:
        """Of slots, `fast` ones at best, where a rank may pin `share`; 0 where the smallest are too large."""
        return next(self._fits(share, [*range(fast, LEAST_SLOT, -SLOT_STEP), LEAST_SLOT]), (0, 0, False))[0]

    def beside(self, slot: int, share: int) -> tuple[bool, int]:
        """With slots of that size: whether there is room for the rings, and for how many slots more, where an eighth
        is left to windows."""
        _, far, rings = next(self._fits(share, [slot]))
        left = share - share // WINDOWS - self.bytes(slot, far, rings=rings)
        return rings, max(0, left) // slot


def slots_that_fit(topology: Topology, budget: int, fast: int) -> int:
    """Bytes of a slot, the same on all ranks: `fast`, or fewer where `budget` is too small for that.

    Raises
    ------
    InitError
        Not even the smallest slots fit the budget of some host. It says what would.
    """
    size, demands = topology.size, {len(host): Demand.of(topology, host) for host in topology.hosts}
    found = min(demand.slot_bytes(budget // ranks, fast) for ranks, demand in demands.items())
    if not found:
        needed, ranks = max((ranks * demand.bytes(LEAST_SLOT, demand.few), ranks) for ranks, demand in demands.items())
        raise InitError(
            f"{ranks} ranks of {size} share a host, and need {needed} bytes of pinned memory there for GPUs: wanted"
            f" HETCOLL_PINNED_BYTES={needed} or more, got {budget}"
        )
    return found
