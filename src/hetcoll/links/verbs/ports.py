"""The ports of this host's RDMA devices, and which of them to use, at which address.

A port's addresses are its GIDs. On RoCE each is an IP address of the Ethernet device and a protocol: v1, which no
router passes, or v2, which is UDP (InfiniBand specification, annexes A16 and A17). On InfiniBand a GID is a subnet's
prefix and the port's number.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...config.variables import DeviceFilter
from ...plan.rails import ETHERNET, INFINIBAND
from .library import Library, UnavailableError
from .pci import SYSFS

ROCE_V1, ROCE_V2 = "RoCE v1", "RoCE v2"

# infiniband/verbs.h
_ACTIVE = 4  # IBV_PORT_ACTIVE
_STATES = ("no state", "down", "initialising", "armed", "active", "active, deferred")
_LAYERS = {1: INFINIBAND, 2: ETHERNET}
_KINDS = {0: INFINIBAND, 1: ROCE_V1, 2: ROCE_V2}
_WIDTHS = {1: 1, 2: 4, 4: 8, 8: 12, 16: 2}  # lanes
_SPEEDS = {1: 2.5, 2: 5.0, 4: 10.0, 8: 10.0, 16: 14.0, 32: 25.0, 64: 50.0, 128: 100.0}  # Gb/s a lane


@dataclass(frozen=True, slots=True)
class Gid:
    """An address of a port: its place in the port's table, its 16 bytes, its kind, and its Ethernet device's number."""

    index: int
    raw: bytes
    kind: str
    interface: int = 0

    @property
    def address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        """The bytes as an IP address, which they are on RoCE."""
        six = ipaddress.IPv6Address(self.raw)
        return six.ipv4_mapped or six

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET if self.address.version == 4 else socket.AF_INET6

    def __str__(self) -> str:
        return f"{self.index}: {self.address} ({self.kind})"


@dataclass(frozen=True, slots=True)
class Port:
    """What a device says of one port. `mtu` is in bytes, `gbps` the nominal speed in Gb/s, `lid` 0 on Ethernet."""

    device: str
    number: int
    state: str
    layer: str
    lid: int
    mtu: int
    gbps: float
    gids: tuple[Gid, ...]

    @property
    def name(self) -> str:
        """As HETCOLL_IB_HCA has it: ``mlx5_0:1``."""
        return f"{self.device}:{self.number}"

    @property
    def active(self) -> bool:
        return self.state == _STATES[_ACTIVE]


def list_names(sysfs: Path = SYSFS) -> list[str]:
    """The RDMA devices that the kernel has, whether or not this process can use them."""
    folder = sysfs / "class/infiniband"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def list_ports(library: Library) -> tuple[list[Port], dict[str, str]]:
    """All ports of all devices, by name; and the devices that cannot be looked at, with the reason."""
    try:
        found = library.device.get_device_list()
    except library.error as error:  # a kernel without RDMA is an error, too
        return [], ({name: str(error) for name in list_names()})
    ports: list[Port] = []
    problems: dict[str, str] = {}
    for name in sorted(device.name.decode() for device in found):
        try:
            with library.device.Context(name=name) as context:
                count = context.query_device().phys_port_cnt
                gids = _gids(context.query_gid_table(_table_size(context, count)))
                ports += [_port(name, n, context.query_port(n), gids.get(n, ())) for n in range(1, count + 1)]
        except library.error as error:
            problems[name] = str(error)
    return ports, problems


def _table_size(context: Any, ports: int) -> int:
    return sum(int(context.query_port(n).gid_tbl_len) for n in range(1, ports + 1))


def _gids(entries: Sequence[Any]) -> dict[int, tuple[Gid, ...]]:
    """The addresses by port."""
    found: dict[int, list[Gid]] = {}
    for entry in entries:
        # Both halves are numbers that have the bytes of the address in memory.
        halves = (entry.gid_subnet_prefix, entry.gid_interface_id)
        raw = b"".join(int(half).to_bytes(8, "little") for half in halves)
        gid = Gid(entry.gid_index, raw, _KINDS.get(entry.gid_type, f"type {entry.gid_type}"), entry.ndev_ifindex)
        found.setdefault(entry.port_num, []).append(gid)
    return {port: tuple(gids) for port, gids in found.items()}


def _port(device: str, number: int, told: Any, gids: tuple[Gid, ...]) -> Port:
    state = _STATES[told.state] if told.state < len(_STATES) else f"state {told.state}"
    gbps = _SPEEDS.get(told.active_speed, 0.0) * _WIDTHS.get(told.active_width, 1)
    layer = _LAYERS.get(told.link_layer, INFINIBAND)  # 0, unspecified, is what old InfiniBand drivers say
    return Port(device, number, state, layer, told.lid, 128 << told.active_mtu, gbps, gids)


def choose_gid(port: Port, index: int | None = None, family: socket.AddressFamily = socket.AF_INET) -> Gid:
    """The address of a port to use: the one at `index` of its table, where that is given.

    On Ethernet otherwise the first of RoCE v2 that is of the address `family`, one that is no link-local address
    before one that is. On InfiniBand the first.

    Raises
    ------
    UnavailableError
        There is none: says which there are.
    """
    told = f"{port.name} has " + (", ".join(map(str, port.gids)) or "none")
    if index is not None:
        chosen = [gid for gid in port.gids if gid.index == index]
        if not chosen:
            raise UnavailableError(f"HETCOLL_IB_GID_INDEX: wanted a GID at {index}, but {told}")
        return chosen[0]
    if port.layer == INFINIBAND:
        if not port.gids:
            raise UnavailableError(f"{told} GID")
        return port.gids[0]
    version = 4 if family == socket.AF_INET else 6
    fitting = [gid for gid in port.gids if gid.kind == ROCE_V2 and gid.address.version == version]
    if not fitting:
        raise UnavailableError(
            f"wanted a GID of RoCE v2 with an IPv{version} address, but {told}: give its Ethernet device such an "
            "address, or set HETCOLL_IB_GID_INDEX"
        )
    return min(fitting, key=lambda gid: (gid.address.is_link_local, gid.index))


def choose_ports(
    ports: Sequence[Port],
    wanted: DeviceFilter | None = None,
    gid_index: int | None = None,
    family: socket.AddressFamily = socket.AF_INET,
) -> tuple[list[tuple[Port, Gid]], Mapping[str, str]]:
    """The ports to use with their addresses, and why each of the others is not used."""
    chosen: list[tuple[Port, Gid]] = []
    passed: dict[str, str] = {}
    for port in ports:
        if wanted is not None and not wanted.allows(port.device, port.number):
            passed[port.name] = f"HETCOLL_IB_HCA={wanted} leaves it out"
        elif not port.active:
            passed[port.name] = f"its link is {port.state}"
        else:
            try:
                chosen.append((port, choose_gid(port, gid_index, family)))
            except UnavailableError as error:
                passed[port.name] = str(error)
    return chosen, passed
