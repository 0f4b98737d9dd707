"""Streams: the one that a caller names, or the one on which the library of an array works now.

No library is imported that the process has not imported itself. Handles are the driver's own, as ints; 0 is the
default stream, which is also what a library has that knows no current stream.
"""

from __future__ import annotations

import sys
from typing import Any

import hetcoll._native as _native

from ..calls.buffers import Buffer
from ..errors import ArgumentError

WANTED = "stream: wanted None, a handle as an int, or an object with __cuda_stream__, cuda_stream or ptr"


def handle(stream: Any, buffer: Buffer | None) -> int:
    """The stream on which an operation on `buffer` takes place.

    Parameters
    ----------
    stream
        A handle; or an object that has one: by the protocol `__cuda_stream__` (cuda.core, CuPy), as `cuda_stream`
        (PyTorch, for CUDA and ROCm) or as `ptr` (CuPy). None: the current stream of the library that made the array.
    buffer
        What the operation reads or writes.

    Raises
    ------
    ArgumentError
        `stream` is nothing of that.
    """
    if stream is not None:
        return _named(stream)
    if buffer is None:
        return 0
    return current(buffer) if buffer.stream is None else buffer.stream


def _named(stream: Any) -> int:
    found = stream
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__  # a method; in its first drafts a property
        version, found = protocol() if callable(protocol) else protocol
        if version != 0:
            raise ArgumentError(f"stream: wanted version 0 of __cuda_stream__, got {version}")
    else:
        for name in ("cuda_stream", "ptr"):
            if hasattr(stream, name):
                found = getattr(stream, name)
                break
    if isinstance(found, bool) or not hasattr(found, "__index__") or found.__index__() < 0:
        raise ArgumentError(f"{WANTED}, got {stream!r}")
    return int(found.__index__())


def current(buffer: Buffer) -> int:
    """The current stream of the library that made the buffer's array, on the buffer's GPU and this thread."""
    if (known := _native.read_tensor(buffer.owner)) is not None and known[5] is not None:
        return known[5]
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(buffer.owner, torch.Tensor):
        return int(torch.cuda.current_stream(buffer.index).cuda_stream)
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(buffer.owner, cupy.ndarray):
        with cupy.cuda.Device(buffer.index):
            return int(cupy.cuda.get_current_stream().ptr)
    described = getattr(buffer.owner, "__cuda_array_interface__", None)
    return int((described or {}).get("stream") or 0)  # Numba's, where an array was made on a stream
