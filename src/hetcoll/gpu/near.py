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

    Ranks of the host are named by their place among them. Where one cannot open another's, its messages go through
    the host's slots; `why_not` says why, by rank.
    """

    def __init__(self, device: Device, share: GpuShare, lender: Lender, meet: Meet, *, rings: bool) -> None:
        self._device, self._here, self._problem = device, share.here, "no other GPU of its library is on this host"
        self._edge_bytes = SLOTS * share.slot_bytes
        self._bases: dict[int, int] = {}  # where this GPU sees that of a place
        self.why_not: dict[int, str] = {}
        self.why_no_rings: str = _why_no_rings(share) if rings else "a library serves all ranks"
        """Why no collective is one kernel; empty where some are."""
        peers = [peer for peer in share.locals if peer != share.rank and not share.topology.far(share.rank, peer)]
        # Slots come first: behind rings, copies into them were up to 1.3 times as slow.
        self._rings = (len(share.locals) - 1) * EDGES * self._edge_bytes
        if peers:
            self._lend(lender, 0 if self.why_no_rings else GPU_RINGS.nbytes)
        told = meet("memory of GPUs", json.dumps(self._shared()).encode())
        for peer in peers:
            handle, offset, problem = json.loads(told[peer])
            place = share.locals.index(peer)
            try:
                base = lender.borrow(device, bytes.fromhex(handle), place) if handle else 0
            except DeviceError as error:
                base, problem = 0, str(error)
            if base:
                self._bases[place] = base + offset
            else:
                self.why_not[peer] = problem
        seen = meet("memory of GPUs that is open", json.dumps(sorted(self._bases)).encode())
        self._seen = [json.loads(seen[peer]) for peer in share.locals]
        blind = [peer for peer, places in zip(share.locals, self._seen, strict=True) if len(places) < len(share.locals)]
        if blind and not self.why_no_rings:
            self.why_no_rings = f"{spell_ranks(blind)} cannot open the memory of all other GPUs"

    def _lend(self, lender: Lender, nbytes: int) -> None:
        """Memory for slots, and so many bytes for rings, if the GPU has room."""
        try:
            at = lender.lend(self._device, self._rings + nbytes)
        except DeviceError as error:
            self._problem = str(error)
        else:
            self._bases[self._here] = at
            clear(self._device, at + self._rings, nbytes)

    def _shared(self) -> tuple[str, int, str]:
        """How others open that of this rank: the handle of its allocation, and where in it it is; or why not."""
        mine = self._bases.get(self._here)
        if mine is None:
            return "", 0, self._problem
        try:
            base = self._device.pointer(mine).base
            return self._device.ipc_handle(base).hex(), mine - base, ""
        except DeviceError as error:
            return "", 0, str(error)

    @property
    def rings(self) -> Rings:
        """Where this GPU sees those of each rank, if they have any."""
        seen = [] if self.why_no_rings else [self._bases[at] + self._rings for at in range(len(self._seen))]
        return Rings(GPU_RINGS, seen)

    def at(self, src: int, dst: int, channel: int, *, captured: bool = False) -> int:
        """Where this GPU sees the slots from `src` to `dst`, of which this rank is one; 0 where they are the host's."""
        if dst not in self._seen[src]:
            return 0
        number = (src - (src > dst)) * EDGES + channel + CHANNELS * captured
        return self._bases[dst] + number * self._edge_bytes


def _why_no_rings(share: GpuShare) -> str:
    if any(share.topology.far(share.rank, peer) for peer in range(len(share.gpus)) if peer != share.rank):
        return "not all ranks share a host's memory"
    if len(share.gpus) > MOST_RANKS:
        return f"wanted 2 to {MOST_RANKS} ranks"
    without = [rank for rank, gpu in enumerate(share.gpus) if not gpu.kernels]
    return f"{spell_ranks(without)} cannot compile any" if without else ""
