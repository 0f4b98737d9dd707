"""Whether this rank's RDMA devices reach its GPU's memory, and memory of the GPU that they do reach."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import RegistrationError

if TYPE_CHECKING:
    from ..links.wiring import Wiring
    from ..vendors.devices.base import Device

_TRIED = 2 << 20  # bytes: a piece that drivers hand to others


def ruled_out(wiring: Wiring) -> str:
    """Why no RDMA goes from and to this rank's GPU's memory, whatever its ports register; nothing where it may."""
    topology = wiring.topology
    if topology.cross not in ("auto", "direct"):
        return f"HETCOLL_CROSS is {topology.cross}"
    if wiring.local_nics is None:
        return topology.ranks[wiring.rank].no_nics or "no RDMA was looked for, since no rank is on another host"
    return ""


def why_not_direct(wiring: Wiring, device: Device) -> str:
    """Why none goes from and to the memory of `device`; nothing where all of this rank's ports register it."""
    if reason := ruled_out(wiring):
        return reason
    assert wiring.local_nics is not None
    address = device.allocate(_TRIED)
    try:
        wiring.local_nics.memory.lease(address, _TRIED, None, device).close()
    except RegistrationError as error:
        return str(error)
    finally:
        device.free(address)
    return ""
