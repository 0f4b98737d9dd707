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
    from .slots import SlotSegment
    from .vendor_comm import Meet

_LENGTH = 20_011  # bytes of each rank: several blocks, the last one not full

Gather = Callable[[DeviceArray, DeviceArray, int], None]
"""Enqueue an all-gather by a kernel, out of one array into the other, on a stream."""


def prove(device: Device, rank: int, size: int, here: int, segment: SlotSegment, gather: Gather, meet: Meet) -> str:
    """What went wrong on some rank; nothing where nothing did. Collective over all ranks, and the same on all of them.
    `here`: this rank's place on the host."""
    told = meet("proof of rings", json.dumps(_problem(device, rank, size, here, segment, gather)).encode())
    problems = (f"rank {who}: {problem}" for who, blob in enumerate(told) if (problem := json.loads(blob)))
    return next(problems, "")


def _problem(device: Device, rank: int, size: int, here: int, segment: SlotSegment, gather: Gather) -> str:
    """What went wrong here."""
    mine = DeviceArray.of(device, path_probe.pattern(rank, _LENGTH))
    got = DeviceArray.of(device, np.zeros(size * _LENGTH, np.uint8))
    stream, event = device.stream(), device.event()
    try:
        gather(mine, got, stream)
        device.record(event, stream)
        if not path_probe.idle(device, [event], time.monotonic() + path_probe.SECONDS):
            segment.release_kernels(here)
            path_probe.idle(device, [event], math.inf)
            segment.hold_kernels(here)
            return f"no kernel of all other ranks came in {path_probe.SECONDS:.3g} s"
    finally:
        device.destroy_event(event)
        device.destroy_stream(stream)
    came = got.get().reshape(size, _LENGTH)
    for peer in range(size):
        if problem := path_probe.wrong(_reader(came[peer]), peer, _LENGTH):
            return f"from rank {peer}: {problem}"
    return ""


def _reader(part: path_probe.Bytes) -> Callable[[int, int], path_probe.Bytes]:
    return lambda at, n: part[at : at + n]
