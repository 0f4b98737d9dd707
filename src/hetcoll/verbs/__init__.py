"""RDMA's control side: which devices and ports there are, which of them to use, and memory that they may touch.

Everything that happens once is here, on pyverbs; what happens for every message is the engine's (native/transport).

`library` finds pyverbs, `ports` asks it what the machine has and chooses, `pci` says how near a device is.
"""

from __future__ import annotations

from .library import Library, UnavailableError, load
from .pci import Distance
from .ports import Gid, Port, choose_gid, choose_ports, list_ports

__all__ = [
    "Distance",
    "Gid",
    "Library",
    "Port",
    "UnavailableError",
    "choose_gid",
    "choose_ports",
    "list_ports",
    "load",
]
