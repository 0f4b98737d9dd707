"""Whether a device's streams can signal through mapped host memory, and the kernels that do it where they cannot.

AMD's streams may refuse to wait for memory that `hipExtMallocWithFlags` did not make for signals
(``GPU_STREAMOPS_CP_WAIT=1``); older drivers, and some virtual machines, have no such operations at all.
"""

from __future__ import annotations

import ctypes
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import Device

log = logging.getLogger("hetcoll")

_GEQ, _ALL_BITS = 0, 2**64 - 1  # of cuStreamWaitValue64 and hipStreamWaitValue64


def refusal(device: Device, word: int) -> str | None:
    """Why a stream does not write to `word`, the device's address of 8 bytes of mapped host memory, and then wait for
    what it wrote; None where it does both, and then `word` holds 1. Waits for the device."""
    if not device.stream_memory_ops:
        return "streams can neither wait for a value nor write one"
    prefix, mask = {"cuda": ("cu", ()), "hip": ("hip", (_ALL_BITS,))}[device.vendor]
    words, number = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64), ctypes.c_uint
    functions = device.functions()
    write = ctypes.CFUNCTYPE(ctypes.c_int, *words, number)(functions[f"{prefix}StreamWriteValue64"])
    wait = ctypes.CFUNCTYPE(ctypes.c_int, *words, number, *(ctypes.c_uint64 for _ in mask))(
        functions[f"{prefix}StreamWaitValue64"]
    )
    device.activate()
    stream = device.stream()
    try:
        error = write(stream, word, 1, 0) or wait(stream, word, 1, _GEQ, *mask)
        device.synchronize(stream)
    finally:
        device.destroy_stream(stream)
    return f"the driver refuses them for mapped host memory (error {error})" if error else None


def signal_kernels(device: Device, word: int, zero: int, abort: int) -> dict[str, int]:
    """What a native queue needs besides the driver's functions where streams refuse `word` (see `refusal`): the kernels
    ``bump`` and ``await``, and the device's addresses of 8 bytes that stay 0 and of the word that ends all waits.

    Nothing where streams signal by themselves.
    """
    reason = refusal(device, word)
    if reason is None:
        return {}
    log.info("%s %d: %s: kernels do it", device.vendor, device.index, reason)
    table = device.kernels()
    return {"bump": table.function("bump"), "await": table.function("await"), "zero": zero, "abort": abort}
