"""How near two devices are to each other, out of sysfs: the places of their PCI functions in the tree of buses."""

from __future__ import annotations

import re
from collections.abc import Collection
from enum import IntEnum
from pathlib import Path

SYSFS = Path("/sys")

_FUNCTION = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")  # domain:bus:device.function
_ROOT = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")


class Distance(IntEnum):
    """What lies between two PCI functions; NCCL's names for the same in brackets. Smaller is nearer."""

    SAME = 0  # functions of one device
    SWITCH = 1  # one PCI switch (PIX)
    SWITCHES = 2  # several PCI switches (PXB)
    BRIDGE = 3  # one host bridge (PHB)
    NODE = 4  # one NUMA node, or the machine has only one (NODE)
    SYSTEM = 5  # the link between NUMA nodes, or nobody knows (SYS)


def device_folder(device: str, sysfs: Path = SYSFS) -> Path | None:
    """The folder of the PCI function behind the RDMA device; None for one made of software on no such function.

    A software device counts as its Ethernet device does.
    """
    rdma = sysfs / "class/infiniband" / device
    links = [rdma / "device"]
    if (rdma / "parent").is_file():  # of rxe and siw
        links.append(sysfs / "class/net" / (rdma / "parent").read_text().strip() / "device")
    for link in links:
        folder = link.resolve()
        if folder.exists() and _path(folder):
            return folder
    return None


def pci_folder(address: str, sysfs: Path = SYSFS) -> Path | None:
    """The folder of the PCI function `address`, such as ``0000:3b:00.0``, as drivers of GPUs say it."""
    folder = (sysfs / "bus/pci/devices" / address.lower()).resolve()
    return folder if folder.exists() else None


def between(a: Path | None, b: Path | None) -> Distance:
    """The distance of two PCI functions, given by their folders in sysfs."""
    if a is None or b is None:
        return Distance.SYSTEM
    first, second = _path(a), _path(b)
    shared = 0
    while shared < min(len(first), len(second)) and first[shared] == second[shared]:
        shared += 1
    if shared == 0:
        return Distance.NODE if _node(a) == _node(b) else Distance.SYSTEM
    if [part.rpartition(".")[0] for part in first] == [part.rpartition(".")[0] for part in second]:
        return Distance.SAME
    if shared == 1:  # only the host bridge
        return Distance.BRIDGE
    # Below what they share there are a switch's ports: one pair of them, or more where switches are stacked.
    return Distance.SWITCH if max(len(first), len(second)) - shared <= 2 else Distance.SWITCHES


def to_cores(folder: Path | None, cores: Collection[int], sysfs: Path = SYSFS) -> Distance:
    """The distance of a PCI function to some cores: NODE where their NUMA node is its own, or there is only one."""
    nodes = {node: _cores(sysfs, node) for node in _nodes(sysfs)}
    if len(nodes) < 2:
        return Distance.NODE
    home = -1 if folder is None else _node(folder)
    return Distance.NODE if nodes.get(home, set()).intersection(cores) else Distance.SYSTEM


def _path(folder: Path) -> list[str]:
    """The host bridge and the functions from there down to this one."""
    return [part for part in folder.parts if _ROOT.fullmatch(part) or _FUNCTION.fullmatch(part)]


def _node(folder: Path) -> int:
    """The NUMA node of a PCI function, -1 where the firmware does not say."""
    try:
        return int((folder / "numa_node").read_text())
    except (OSError, ValueError):
        return -1


def _nodes(sysfs: Path) -> list[int]:
    return [int(path.name[4:]) for path in (sysfs / "devices/system/node").glob("node[0-9]*")]


def _cores(sysfs: Path, node: int) -> set[int]:
    """The cores of a NUMA node: ``0-3,8`` in sysfs's notation."""
    text = (sysfs / f"devices/system/node/node{node}/cpulist").read_text().strip()
    cores: set[int] = set()
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
