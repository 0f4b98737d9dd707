"""The machine itself: shared memory, network interfaces."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ...config.env import environment
from ...config.interfaces import choose_interfaces
from ...errors import HetcollError
from .finding import Finding, Level

_SHM = Path("/dev/shm")
_GIB = 1 << 30
_LEAST = _GIB // 4  # containers get 64 MiB unless told otherwise


def shared_memory(folder: Path = _SHM) -> Iterator[Finding]:
    """Memory that ranks of one host share: ours has no name and needs no file system, the vendors' libraries' does."""
    about = str(folder)
    try:
        os.close(os.memfd_create("hetcoll-doctor", os.MFD_CLOEXEC))
    except OSError as error:
        yield Finding("memfd", Level.PROBLEM, f"memfd_create: {error.strerror}", "allow memfd_create(2) in the sandbox")
    try:
        told = os.statvfs(folder)
    except OSError as error:
        yield Finding(about, Level.NOTE, f"{error.strerror}; NCCL and RCCL need it", f"mount a tmpfs at {folder}")
        return
    size, free = told.f_blocks * told.f_frsize, told.f_bavail * told.f_frsize
    text = f"{free / _GIB:.1f} of {size / _GIB:.1f} GiB free"
    if not os.access(folder, os.W_OK):
        yield Finding(about, Level.NOTE, "not writable; NCCL and RCCL need it", f"chmod 1777 {folder}")
    elif free < _LEAST:
        advice = "in a container: --shm-size=8g or --ipc=host; else mount -o remount,size=50% /dev/shm"
        yield Finding(about, Level.NOTE, f"{text}; NCCL and RCCL need more, hetcoll itself does not", advice)
    else:
        yield Finding(about, Level.FINE, text)


def network() -> Iterator[Finding]:
    """The interfaces that TCP would use."""
    try:
        chosen = choose_interfaces(environment().config.socket_ifname)
    except HetcollError as error:
        yield Finding("network", Level.PROBLEM, str(error), "correct HETCOLL_SOCKET_IFNAME, or bring an interface up")
        return
    text = ", ".join(f"{each.name} {each.host}" for each in chosen)
    if not chosen:
        yield Finding("network", Level.PROBLEM, "no interface is up", "ip link set lo up, at least")
    elif all(each.loopback for each in chosen):
        yield Finding("network", Level.NOTE, f"only {text}", "to reach other hosts, bring an interface up")
    else:
        yield Finding("network", Level.FINE, text)
