"""Memory of GPUs of one host that one library serves, which the others have opened (IPC).

It has rings and areas for collectives that are one kernel a rank, and rings for small messages. For what is taken from
the library by HETCOLL_ALGO, or where sums have the order of ranks, there are slots as well. What comes to a rank has
slots on that rank's GPU, and copy engines of the others write there, over the links between the GPUs. Words of these
slots are the host's, as those of all others (`slots`).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ..errors import DeviceError, spell_ranks
from ..plan.one_kernel import MOST_RANKS
from ..plan.pieces import SLOTS
from ..vendors.devices.kernels.table import MESSAGE_RING
from .slots import CHANNELS, EDGES, GPU_RINGS, Rings

if TYPE_CHECKING:
    from ..vendors.devices.base import Device
    from .shared import GpuShare
    from .vendor_comm import Meet


class NearMemory:
    """What this rank's GPU has of it, and what it has opened of others, both by `share.lender`. Making it is collective
    over all ranks. `slots`: there are some, beside rings.

    Ranks of the host are named by their place among them. Where one cannot open another's slots, its messages go
    through the host's; `why_not` says why, by rank.
    """

    def __init__(self, device: Device, share: GpuShare, meet: Meet, *, slots: bool) -> None:
        ranks, self._edge_bytes = len(share.locals), SLOTS * share.slot_bytes
        self.why_no_rings: str = _why_no_rings(share)
        """Why no collective is one kernel, and no message is a kernel's; empty where some are."""
        peers = [peer for peer in share.locals if peer != share.rank and not share.topology.far(share.rank, peer)]
        wanted = (ranks - 1) * EDGES * self._edge_bytes if slots and peers else 0
        self._slots = _Region(device, share, wanted)
        regions = [self._slots]
        if not self.why_no_rings:
            nbytes = 2 * (GPU_RINGS.nbytes + (ranks - 1) * MESSAGE_RING)
            regions.append(_Region(device, share, nbytes, uncached=True))
        told = meet("memory of GPUs", json.dumps([region.shared() for region in regions]).encode())
        for peer in peers:
            for region, words in zip(regions, json.loads(told[peer]), strict=True):
                region.open(peer, *words)
        mine = [sorted(region.bases) for region in regions], next(iter(regions[-1].why_not.values()), "")
        found = meet("memory of GPUs that is open", json.dumps(mine).encode())
        seen, problems = zip(*(json.loads(found[peer]) for peer in share.locals), strict=True)
        self.why_not, self._seen = self._slots.why_not, [places[0] for places in seen]
        blind = [peer for peer, places in zip(share.locals, seen, strict=True) if len(places[-1]) < ranks]
        if blind and not self.why_no_rings:
            why = next(filter(None, problems), "")
            self.why_no_rings = f"{spell_ranks(blind)} cannot open the memory of all other GPUs: {why}"
        self._rings = [] if self.why_no_rings else [regions[-1].bases[place] for place in range(ranks)]

    @property
    def rings(self) -> tuple[Rings, Rings]:
        """Where this GPU sees those of each rank, if they have any, and those of captured calls."""
        return Rings(GPU_RINGS, self._rings), Rings(GPU_RINGS, [at + GPU_RINGS.nbytes for at in self._rings])

    def message_rings(self, src: int, dst: int) -> tuple[int, int]:
        """Where this GPU sees those of small messages from `src` to `dst`, on whose GPU they are, and of captured
        ones."""
        first = self._rings[dst] + 2 * GPU_RINGS.nbytes + 2 * (src - (src > dst)) * MESSAGE_RING
        return first, first + MESSAGE_RING

    def at(self, src: int, dst: int, channel: int, *, captured: bool = False) -> int:
        """Where this GPU sees the slots from `src` to `dst`, of which this rank is one; 0 where they are the host's."""
        if dst not in self._seen[src]:
            return 0
        number = (src - (src > dst)) * EDGES + channel + CHANNELS * captured
        return self._slots.bases[dst] + number * self._edge_bytes


class _Region:
    """So many bytes of each rank's GPU, zeros where they are `uncached`. `bases`: where this GPU sees that of a place;
    `why_not`: why it does not see that of a rank."""

    def __init__(self, device: Device, share: GpuShare, nbytes: int, *, uncached: bool = False) -> None:
        assert share.lender is not None, "one library serves all ranks"
        self._device, self._locals, self._lender = device, share.locals, share.lender
        self._mine, self._problem = 0, "no other GPU of its library is on this host"
        try:
            self._mine = self._lender.lend(nbytes, uncached=uncached) if nbytes else 0
        except DeviceError as error:
            self._problem = str(error)
        if self._mine and uncached:
            device.clear(self._mine, nbytes)
        self.bases: dict[int, int] = {share.here: self._mine} if self._mine else {}
        self.why_not: dict[int, str] = {}

    def shared(self) -> tuple[str, int, str]:
        """How others open what is here: the handle of its allocation, and where in it it is; or why not."""
        if not self._mine:
            return "", 0, self._problem
        try:
            base = self._device.pointer(self._mine).base
            return self._device.ipc_handle(base).hex(), self._mine - base, ""
        except DeviceError as error:
            return "", 0, str(error)

    def open(self, peer: int, handle: str, offset: int, problem: str) -> None:
        """Open what a rank has, which has `shared` this."""
        place, base = self._locals.index(peer), 0
        try:
            base = self._lender.borrow(bytes.fromhex(handle), place) if handle else 0
        except DeviceError as error:
            problem = str(error)
        if base:
            self.bases[place] = base + offset
        else:
            self.why_not[peer] = problem


def _why_no_rings(share: GpuShare) -> str:
    if any(share.topology.far(share.rank, peer) for peer in range(len(share.gpus)) if peer != share.rank):
        return "not all ranks share a host's memory"
    if len(share.gpus) > MOST_RANKS:
        return f"wanted 2 to {MOST_RANKS} ranks"
    without = [rank for rank, gpu in enumerate(share.gpus) if not gpu.kernels]
    return f"{spell_ranks(without)} cannot compile any" if without else ""
