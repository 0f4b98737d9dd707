"""RDMA: devices, the kernel's part, the libraries, ports and addresses, and what memory may be registered."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from ...config.env import environment
from ...links.verbs.library import Library, UnavailableError, load
from ...links.verbs.pci import SYSFS
from ...links.verbs.ports import choose_ports, list_names, list_ports
from .finding import Finding, Level

_DEV = Path("/dev/infiniband")
_CAP_IPC_LOCK = 14  # linux/capability.h
_LEAST_LOCKED = 1 << 30  # bytes
_LOCAL_WRITE = 1  # infiniband/verbs.h: IBV_ACCESS_LOCAL_WRITE
_PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")


def devices(sysfs: Path = SYSFS) -> Iterator[Finding]:
    """What the kernel has."""
    names = list_names(sysfs)
    if names:
        yield Finding("RDMA devices", Level.FINE, ", ".join(names))
    else:
        text = "the kernel has none; between hosts TCP is used"
        yield Finding("RDMA devices", Level.NOTE, text, "where there is a card: load its driver (such as mlx5_ib)")


def modules(sysfs: Path = SYSFS, dev: Path = _DEV) -> Iterator[Finding]:
    """The way from a program to the devices: the module ib_uverbs and its device files."""
    if not list_names(sysfs):
        return
    files = sorted(dev.glob("uverbs*"))
    shut = [str(path) for path in files if not os.access(path, os.R_OK | os.W_OK)]
    if not (sysfs / "module/ib_uverbs").is_dir():
        yield Finding("ib_uverbs", Level.PROBLEM, "the kernel module is not loaded", "modprobe ib_uverbs")
    elif not files:
        yield Finding("ib_uverbs", Level.PROBLEM, f"no {dev}/uverbs*", f"in a container: --device={dev}")
    elif shut:
        text = f"{', '.join(shut)}: permission denied"
        yield Finding("ib_uverbs", Level.PROBLEM, text, "join the group that owns them, or set a udev rule")
    else:
        yield Finding("ib_uverbs", Level.FINE, f"{len(files)} device files in {dev}")


def libraries(sysfs: Path = SYSFS) -> Iterator[Finding]:
    """libibverbs for the engine and pyverbs for the rest. Missing, they are a problem only where there is a device."""
    missing = Level.PROBLEM if list_names(sysfs) else Level.NOTE
    try:
        ctypes.CDLL("libibverbs.so.1")
        yield Finding("libibverbs", Level.FINE, "libibverbs.so.1 can be loaded")
    except OSError as error:
        yield Finding("libibverbs", missing, str(error), "apt install libibverbs1 ibverbs-providers")
    try:
        yield Finding("pyverbs", Level.FINE, load().origin)
    except UnavailableError as error:
        text, _, advice = str(error).rpartition(": ")
        yield Finding("pyverbs", missing, text, advice)


def ports(sysfs: Path = SYSFS) -> Iterator[Finding]:
    """Each port: whether it would be used and by which address, or why not."""
    library = _library(sysfs)
    if library is None:
        return
    config = environment().config
    found, problems = list_ports(library)
    for device, reason in problems.items():
        yield Finding(device, Level.PROBLEM, reason, "see the lines above, and `ibv_devinfo -d " + device + "`")
    chosen, passed = choose_ports(found, config.ib_hca, config.ib_gid_index)
    used = {port.name: gid for port, gid in chosen}
    for port in found:
        text = f"{port.state}, {port.layer}, {port.gbps:g} Gb/s, MTU {port.mtu}"
        if port.name in used:
            yield Finding(port.name, Level.FINE, f"{text}, GID {used[port.name]}")
        elif port.active:
            text, _, advice = f"{text}; {passed[port.name]}".rpartition(": ")
            yield Finding(port.name, Level.NOTE, text or advice, advice if text else "")
        else:
            yield Finding(port.name, Level.NOTE, text, f"check the cable; `ibv_devinfo -d {port.device}`")
    if found and not chosen:
        yield Finding("RDMA ports", Level.PROBLEM, "there are devices, but no port can be used", "see the lines above")


def locked_memory(sysfs: Path = SYSFS) -> Iterator[Finding]:
    """Registered memory is locked, and how much of it a process may lock is limited; not for who has CAP_IPC_LOCK."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield Finding("memlock limit", Level.FINE, "unlimited")
        return
    text = f"{soft >> 10:,} KiB"
    if _may_lock():
        yield Finding("memlock limit", Level.FINE, f"{text}, but this process has CAP_IPC_LOCK")
    elif soft >= _LEAST_LOCKED:
        yield Finding("memlock limit", Level.FINE, text)
    else:
        level = Level.PROBLEM if list_names(sysfs) else Level.NOTE
        advice = (
            "`* - memlock unlimited` in /etc/security/limits.conf; LimitMEMLOCK=infinity for a service; "
            "--ulimit memlock=-1 for a container"
        )
        yield Finding("memlock limit", level, f"{text}: too little to register memory for RDMA", advice)


def gpu_memory(sysfs: Path = SYSFS) -> Iterator[Finding]:
    """Whether a device may reach memory of GPUs: by dma-buf, which is asked for, or by a peer-memory module."""
    library = _library(sysfs)
    if library is None:
        return
    peers = [name for name in _PEER_MODULES if (sysfs / "module" / name).is_dir()]
    for device in list_names(sysfs):
        answer = takes_dma_buf(library, device)
        about = f"{device}: GPU memory"
        if answer is True:
            yield Finding(about, Level.FINE, "dma-buf can be registered")
        elif peers:
            yield Finding(about, Level.FINE, f"no dma-buf, but the module {', '.join(peers)}")
        elif answer is False:
            text = "neither dma-buf nor a peer-memory module: GPU memory would be staged through host memory"
            advice = "Linux 5.12 or later with a driver that supports it (mlx5_ib, irdma), or modprobe nvidia_peermem"
            yield Finding(about, Level.NOTE, text, advice)
        else:
            yield Finding(about, Level.NOTE, f"unknown: {answer}")


def takes_dma_buf(library: Library, device: str) -> bool | str:
    """Whether the device can register a dma-buf, or why that cannot be found out.

    It is asked to register a descriptor that is not open: who cannot says EOPNOTSUPP, who can says EBADF.
    """
    try:
        with library.device.Context(name=device) as context, library.pd.PD(context) as pd:
            library.mr.DmaBufMR(pd, 4096, _LOCAL_WRITE, -1)
    except library.error as error:
        code = getattr(error, "error_code", None)
        if code == errno.EBADF:
            return True
        return False if code in (errno.EOPNOTSUPP, errno.EPROTONOSUPPORT, errno.ENOSYS) else str(error)
    return "a descriptor that is not open was registered"


def _library(sysfs: Path) -> Library | None:
    """pyverbs where it is of use: there are devices. What it lacks is `libraries`' to say."""
    try:
        return load() if list_names(sysfs) else None
    except UnavailableError:
        return None


def _may_lock() -> bool:
    status = Path("/proc/self/status").read_text()
    words = dict(line.split(":", 1) for line in status.splitlines())
    return bool(int(words["CapEff"], 16) >> _CAP_IPC_LOCK & 1)
