"""Slots in the memory of GPUs, between those of one host that one library serves: for what is taken from it, by
HETCOLL_ALGO or where sums have the order of ranks.

What comes to a rank has its slots on that rank's GPU. The others have opened them (IPC), so that their copy engines
write over the links between the GPUs. Words of these slots are the host's, as those of all others (`slots`).
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

from ..errors import DeviceError
from ..plan.pieces import SLOTS
from .slots import CHANNELS, EDGES

if TYPE_CHECKING:
    from ..vendors.devices.base import Device
    from .shared import GpuShare
    from .vendor_comm import Meet


class NearSlots:
    """Those that this rank's GPU has, and those that it has opened; `undo` gives both back. Making them is collective
    over all ranks.

    Ranks of the host are named by their place among them. Where one cannot open another's, its messages go through
    the host's slots; `why_not` says why, by rank.
    """

    def __init__(self, device: Device, share: GpuShare, meet: Meet, undo: contextlib.ExitStack) -> None:
        self._device, self._here, self._edge_bytes = device, share.here, SLOTS * share.slot_bytes
        self._bases: dict[int, int] = {}  # where this GPU sees those of a place
        self.why_not: dict[int, str] = {}
        peers = [peer for peer in share.locals if peer != share.rank and not share.topology.far(share.rank, peer)]
        if peers:
            self._bases[self._here] = device.allocate((len(share.locals) - 1) * EDGES * self._edge_bytes)
            undo.callback(device.free, self._bases[self._here])
        told = meet("slots of GPUs", json.dumps(self._shared()).encode())
        for peer in peers:
            handle, offset, problem = json.loads(told[peer])
            try:
                base = device.open_ipc(bytes.fromhex(handle)) if handle else 0
            except DeviceError as error:
                base, problem = 0, str(error)
            if base:
                undo.callback(device.close_ipc, base)
                self._bases[share.locals.index(peer)] = base + offset
            else:
                self.why_not[peer] = problem
        seen = meet("slots of GPUs that are open", json.dumps(sorted(self._bases)).encode())
        self._seen = [json.loads(seen[peer]) for peer in share.locals]

    def _shared(self) -> tuple[str, int, str]:
        """How others open those of this rank: the handle of their allocation, and where in it they are; or why not."""
        mine = self._bases.get(self._here)
        if mine is None:
            return "", 0, "no other GPU of its library is on this host"
        try:
            base = self._device.pointer(mine).base
            return self._device.ipc_handle(base).hex(), mine - base, ""
        except DeviceError as error:
            return "", 0, str(error)

    def at(self, src: int, dst: int, channel: int, *, captured: bool = False) -> int:
        """Where this GPU sees the slots from `src` to `dst`, of which this rank is one; 0 where they are the host's."""
        if dst not in self._seen[src]:
            return 0
        number = (src - (src > dst)) * EDGES + channel + CHANNELS * captured
        return self._bases[dst] + number * self._edge_bytes
