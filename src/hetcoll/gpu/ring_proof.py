"""Kernels carry known bytes between all GPUs, through rings in the memory of these, before a call uses them.

Rings in the host's memory are where copies have been tried (`path_probe`).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from . import path_probe
from .array import DeviceArray

if TYPE_CHECKING:
    from ..vendors.devices.base import Device
    from .shared import GpuShare
    from .vendor_comm import Meet

_LENGTH = 20_011  # bytes of each rank: several blocks, the last one not full

Launch = Callable[[int], object]
"""Enqueue a kernel on a stream."""
Bind = Callable[[DeviceArray, DeviceArray], Launch]
"""What launches an all-gather by a kernel, out of one array into the other: compiled, where that was never done."""


def prove(device: Device, share: GpuShare, bind: Bind, meet: Meet) -> str:
    """What went wrong on some rank; nothing where nothing did. Collective over all ranks, and the same on all of
    them."""
    size = len(share.gpus)
    mine = DeviceArray.of(device, path_probe.pattern(share.rank, _LENGTH))
    got = DeviceArray.of(device, np.zeros(size * _LENGTH, np.uint8))
    launch = bind(mine, got)
    meet("kernels for rings", b"")  # from now on none takes long
    problem = _stuck(device, share, launch) or _wrong(got.get().reshape(size, _LENGTH))
    told = meet("proof of rings", json.dumps(problem).encode())
    problems = (f"rank {who}: {text}" for who, blob in enumerate(told) if (text := json.loads(blob)))
    return next(problems, "")


def _stuck(device: Device, share: GpuShare, launch: Launch) -> str:
    """Whether the kernel does not end here."""
    stream, event = device.stream(), device.event()
    try:
        launch(stream)
        device.record(event, stream)
        if path_probe.idle(device, [event], time.monotonic() + path_probe.SECONDS):
            return ""
        share.segment.release_kernels(share.here)
        path_probe.idle(device, [event], math.inf)
        share.segment.hold_kernels(share.here)
        return f"the kernel of some other rank did not come in {path_probe.SECONDS:.3g} s"
    finally:
        device.destroy_event(event)
        device.destroy_stream(stream)


def _wrong(came: path_probe.Bytes) -> str:
    """What is wrong with what has come, by rank."""
    for peer, part in enumerate(came):
        if problem := path_probe.wrong(_reader(part), peer, _LENGTH):
            return f"from rank {peer}: {problem}"
    return ""


def _reader(part: path_probe.Bytes) -> Callable[[int, int], path_probe.Bytes]:
    return lambda at, n: part[at : at + n]
