"""The ports that this rank offers to the others, the nearest first."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from socket import AF_INET, AddressFamily

from ...config.env import Config
from ...config.interfaces import list_interfaces
from ...plan.rails import ETHERNET, MOST_RAILS, Nic
from .library import UnavailableError, load
from .pci import Distance, between, device_folder, to_cores
from .ports import Gid, Port, choose_ports, list_names, list_ports


@dataclass(frozen=True, slots=True)
class Chosen:
    """A port of this host that is to be used, its address, and how near it is."""

    port: Port
    gid: Gid
    distance: Distance

    def nic(self, networks: dict[str, str]) -> Nic:
        """What to tell of it. `networks` are those of the interfaces' addresses."""
        if self.port.layer != ETHERNET:
            return Nic(self.port.name, self.port.layer, self.gid.raw.hex(), self.gid.raw[:8].hex())
        address = str(self.gid.address)
        return Nic(self.port.name, self.port.layer, address, networks.get(address, ""))


def choose(
    config: Config, family: AddressFamily = AF_INET, near: Path | None = None
) -> tuple[list[Chosen], dict[str, str]]:
    """The ports that this rank uses, the nearest first, at most MOST_RAILS of them; and why not the others.

    Nearest to `near`, the PCI function of the rank's GPU, or without it to the cores that the rank may run on.

    Raises
    ------
    UnavailableError
        There is none: says why, and what to do.
    """
    if not list_names():
        raise UnavailableError("this host has no RDMA device")
    ports, problems = list_ports(load())
    usable, passed = choose_ports(ports, config.ib_hca, config.ib_gid_index, family)
    passed = {**problems, **passed}
    if not usable:
        told = "; ".join(f"{name}: {reason}" for name, reason in passed.items())
        raise UnavailableError(f"no port of an RDMA device can be used: {told or 'there is none'}")
    cores = os.sched_getaffinity(0)
    chosen = [Chosen(port, gid, _distance(port.device, near, cores)) for port, gid in usable]
    chosen.sort(key=lambda each: (each.distance, each.port.device, each.port.number))
    passed |= {each.port.name: f"{MOST_RAILS} others are as near" for each in chosen[MOST_RAILS:]}
    return chosen[:MOST_RAILS], passed


def networks() -> dict[str, str]:
    """The IP networks of this host's addresses."""
    return {interface.host: str(interface.network) for interface in list_interfaces()}


def _distance(device: str, near: Path | None, cores: set[int]) -> Distance:
    folder = device_folder(device)
    return to_cores(folder, cores) if near is None else between(folder, near)
