"""Memory of GPUs of one host that one library serves, which the others have opened (IPC): for what is taken from the
library, by HETCOLL_ALGO or where sums have the order of ranks.

What comes to a rank has slots on that rank's GPU, and copy engines of the others write there, over the links between
the GPUs. Words of these slots are the host's, as those of all others (`slots`). For sums in order there are rings and
areas as well, for what is one kernel a rank.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ..errors import DeviceError, spell_ranks
from ..plan.one_kernel import MOST_RANKS
from ..plan.pieces import SLOTS
from .array import clear
from .slots import CHANNELS, EDGES, GPU_RINGS, Rings

if TYPE_CHECKING:
    from ..vendors.devices.base import Device
    from .lent import Lender
    from .shared import GpuShare
    from .vendor_comm import Meet


class NearMemory:
    """What this rank's GPU has of it, and what it has opened of others, both by `lender`. Making it is collective over
    all ranks. `rings`: there are some, beside slots.

    Ranks of the host are named by their place among them. Where one cannot open another's slots, its messages go
    through the host's; `why_not` says why, by rank.
    """

    def __init__(self, device: Device, share: GpuShare, lender: Lender, meet: Meet, *, rings: bool) -> None:
        self._device, self._lender, self._locals = device, lender, share.locals
        self._edge_bytes = SLOTS * share.slot_bytes
        self.why_no_rings: str = _why_no_rings(share) if rings else "a library serves all ranks"
        """Why no collective is one kernel; empty where some are."""
        peers = [peer for peer in share.locals if peer != share.rank and not share.topology.far(share.rank, peer)]
        slot_bytes = (len(share.locals) - 1) * EDGES * self._edge_bytes
        mine = [_Region(share.here, self._lent(len(peers) and slot_bytes, uncached=False))]
        if not self.why_no_rings:
            mine.append(_Region(share.here, self._lent(GPU_RINGS.nbytes, uncached=True)))
        told = meet("memory of GPUs", json.dumps([self._shared(region) for region in mine]).encode())
        for peer in peers:
            for region, (handle, offset, problem) in zip(mine, json.loads(told[peer]), strict=True):
                self._open(region, peer, handle, offset, problem)
        seen = meet("memory of GPUs that is open", json.dumps([sorted(region.bases) for region in mine]).encode())
        self._slots, self.why_not = mine[0].bases, mine[0].why_not
        self._rings = mine[-1].bases
        self._seen = [json.loads(seen[peer])[0] for peer in share.locals]
        blind = [peer for peer in share.locals if len(json.loads(seen[peer])[-1]) < len(share.locals)]
        if blind and not self.why_no_rings:
            self.why_no_rings = f"{spell_ranks(blind)} cannot open the memory of all other GPUs"

    def _lent(self, nbytes: int, *, uncached: bool) -> tuple[int, str]:
        """Where so much memory is, and why there is none."""
        if not nbytes:
            return 0, "no other GPU of its library is on this host"
        try:
            at = self._lender.lend(self._device, nbytes, uncached=uncached)
        except DeviceError as error:
            return 0, str(error)
        if uncached:
            clear(self._device, at, nbytes)
        return at, ""

    def _shared(self, region: _Region) -> tuple[str, int, str]:
        """How others open what is here: the handle of its allocation, and where in it it is; or why not."""
        if not region.mine:
            return "", 0, region.problem
        try:
            base = self._device.pointer(region.mine).base
            return self._device.ipc_handle(base).hex(), region.mine - base, ""
        except DeviceError as error:
            return "", 0, str(error)

    def _open(self, region: _Region, peer: int, handle: str, offset: int, problem: str) -> None:
        place, base = self._locals.index(peer), 0
        try:
            base = self._lender.borrow(self._device, bytes.fromhex(handle), place) if handle else 0
        except DeviceError as error:
            problem = str(error)
        if base:
            region.bases[place] = base + offset
        else:
            region.why_not[peer] = problem

    @property
    def rings(self) -> Rings:
        """Where this GPU sees those of each rank, if they have any."""
        seen = [] if self.why_no_rings else [self._rings[place] for place in range(len(self._locals))]
        return Rings(GPU_RINGS, seen)

    def at(self, src: int, dst: int, channel: int, *, captured: bool = False) -> int:
        """Where this GPU sees the slots from `src` to `dst`, of which this rank is one; 0 where they are the host's."""
        if dst not in self._seen[src]:
            return 0
        number = (src - (src > dst)) * EDGES + channel + CHANNELS * captured
        return self._slots[dst] + number * self._edge_bytes


class _Region:
    """What each rank has of one kind. `bases`: where this GPU sees that of a place; `why_not`: why it does not see that
    of a rank."""

    def __init__(self, here: int, lent: tuple[int, str]) -> None:
        self.mine, self.problem = lent
        self.bases = {here: self.mine} if self.mine else {}
        self.why_not: dict[int, str] = {}


def _why_no_rings(share: GpuShare) -> str:
    if any(share.topology.far(share.rank, peer) for peer in range(len(share.gpus)) if peer != share.rank):
        return "not all ranks share a host's memory"
    if len(share.gpus) > MOST_RANKS:
        return f"wanted 2 to {MOST_RANKS} ranks"
    without = [rank for rank, gpu in enumerate(share.gpus) if not gpu.kernels]
    return f"{spell_ranks(without)} cannot compile any" if without else ""
