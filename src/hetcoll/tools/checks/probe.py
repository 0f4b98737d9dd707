"""What `hetcoll doctor` does to one GPU, in a process of its own that may hang or crash:

``python -m hetcoll.tools.checks.probe cuda 0`` prints the findings as JSON.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING

from ...errors import DeviceError
from ...vendors.devices.kernels import modules
from ...vendors.devices.signals import refusal
from .finding import Finding, Level

if TYPE_CHECKING:
    from ...vendors.devices.base import Device

_GIB = 1 << 30
_PINNED = 64 << 20  # bytes: what the slots between a few GPUs of a host take
_LAUNCH_SECONDS = 10.0


def probe(device: Device) -> Iterator[Finding]:
    """What the device is, and whether it does what collectives need of it."""
    about = f"{device.vendor}:{device.index}"
    memory = f"{device.memory / _GIB:.1f} GiB"
    text = f"{device.name}, {device.arch}, {memory}, {device.multiprocessors} multiprocessors, PCI {device.bus_id}"
    yield Finding(about, Level.FINE, text)
    for name, check, advice in (
        ("kernels", _kernels, _COMPILER[device.vendor]),
        ("pinned memory", _pinned, _PINNING[device.vendor]),
        (
            "mapped memory",
            _mapped,
            "share a host's memory with the container: --ipc=host, and no seccomp against mlock",
        ),
        ("signals", _signals, "nothing to be done: a driver that has them is faster"),
        ("dma-buf", _dmabuf, "for RDMA from GPU memory: the open kernel modules (NVIDIA), Linux 5.12 or later"),
    ):
        level, said = _try(check, device)
        yield Finding(f"{about} {name}", level, said, advice if level is not Level.FINE else "")


_COMPILER = {
    "cuda": "pip install 'hetcoll[cuda]': NVRTC of the driver's own major version; nvidia-smi shows it",
    "hip": "install ROCm's hipRTC and comgr of the same version as the runtime",
}
_PINNING = {
    "cuda": "more memory for the container (its cgroup's limit counts pinned memory)",
    "hip": "more memory for the container, or a higher pages_limit in /sys/module/ttm/parameters",
}


def _try(check: Callable[[Device], tuple[Level, str]], device: Device) -> tuple[Level, str]:
    try:
        return check(device)
    except (DeviceError, OSError) as error:
        return Level.PROBLEM, str(error)


def _bump(device: Device, counter: int, zero: int, value: int) -> None:
    """Run the kernel that writes `value` to `counter`."""
    stream = device.stream()
    done = device.event()
    try:
        arguments = [struct.pack("Q", x) for x in (counter, zero, value)]
        device.launch(device.kernels().function("bump"), 1, 1, arguments, stream)
        device.record(done, stream)
        _wait(lambda: device.query(done), "a kernel of one store")
    finally:
        device.destroy_event(done)
        device.destroy_stream(stream)


def _wait(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _LAUNCH_SECONDS
    while not done():
        if time.monotonic() > deadline:
            raise DeviceError(f"{what} has not ended after {_LAUNCH_SECONDS:.0f} s")
        time.sleep(0.001)


def _word(device: Device, undo: ExitStack) -> int:
    address = device.allocate_host(8)
    undo.callback(device.free_host, address)
    ctypes.c_uint64.from_address(address).value = 0
    return address


def _kernels(device: Device) -> tuple[Level, str]:
    start = time.monotonic()
    with ExitStack() as undo:
        zero, counter = _word(device, undo), _word(device, undo)
        for name in modules()["signals"]:
            device.kernels().function(name)
        _bump(device, counter, zero, 7)
        if ctypes.c_uint64.from_address(counter).value != 7:
            raise DeviceError("a kernel ran and its store is not seen")
    return Level.FINE, f"{device.kernels().compiler}: compiled or kept, loaded, run ({time.monotonic() - start:.1f} s)"


def _pinned(device: Device) -> tuple[Level, str]:
    device.free_host(device.allocate_host(_PINNED))
    return Level.FINE, f"{_PINNED >> 20} MiB at once"


def _mapped(device: Device) -> tuple[Level, str]:
    """Memory that processes share, written by a kernel."""
    nbytes = 1 << 20
    fd = os.memfd_create("hetcoll-doctor", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        mapping = mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)
    word = ctypes.c_uint64.from_buffer(mapping)  # keeps the mapping
    address = ctypes.addressof(word)
    with ExitStack() as undo:
        at = device.register_host(address, nbytes)
        undo.callback(device.unregister_host, address)
        _bump(device, at, _word(device, undo), 9)
    if word.value != 9:
        raise DeviceError("a kernel wrote to it and the host does not see that")
    return Level.FINE, "written by a kernel, read by the host"


def _signals(device: Device) -> tuple[Level, str]:
    """A stream waits for a word of host memory, then writes one."""
    with ExitStack() as undo:
        reason = refusal(device, _word(device, undo))
    if reason is not None:
        return Level.NOTE, f"{reason}: small kernels do it"
    return Level.FINE, "streams wait for values and write them"


def _dmabuf(device: Device) -> tuple[Level, str]:
    address = device.allocate(2 << 20)
    try:
        os.close(device.dmabuf(address, 2 << 20).fd)
    except DeviceError as error:
        return Level.NOTE, f"not exported ({error}): network cards get GPU memory another way, or through host memory"
    finally:
        device.free(address)
    return Level.FINE, "exported"


def main(vendor: str, index: str) -> None:
    """Print the findings of one GPU."""
    device = importlib.import_module(f"hetcoll.vendors.devices.{vendor}").device(int(index))
    print(json.dumps([asdict(finding) for finding in probe(device)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
