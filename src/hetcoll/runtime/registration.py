"""Memory that moves without a copy: arrays of `Communicator.empty`, and what `Communicator.register` announced."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ..calls import check_int
from ..calls.buffers import Buffer, element_type, read_buffer
from ..errors import ArgumentError
from .core import Core

if TYPE_CHECKING:
    from ..links.verbs.memory import Lease


class Registration:
    """Keeps the memory alive and announced until `close`. A context manager."""

    def __init__(self, buffer: Buffer, lease: Lease | None = None) -> None:
        self._buffer: Buffer | None = buffer
        self._lease = lease

    @property
    def nbytes(self) -> int:
        """Bytes announced; 0 after `close`."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def close(self) -> None:
        """Take the announcement back. More than once is fine.

        ArgumentError while an operation in flight uses the memory; then it stays announced.
        """
        if self._lease is not None:
            self._lease.close()
        self._buffer = self._lease = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def register(core: Core, buf: Any) -> Registration:
    """See `Communicator.register`."""
    core.host.check_usable()
    buffer, memory = read_buffer(buf, "buf", writable=False), core.wiring.memory
    if memory is None or buffer.nbytes == 0:
        return Registration(buffer)
    gpu = None if buffer.device == "cpu" else core.gpus.device_of(buffer)
    return Registration(buffer, memory.lease(buffer.ptr, buffer.nbytes, buffer.owner, gpu))


def empty(core: Core, shape: int | Sequence[int], dtype: Any, device: str) -> np.ndarray[Any, Any]:
    """See `Communicator.empty`."""
    core.host.check_usable()
    if not isinstance(device, str) or device != "cpu":  # an array of words is no word
        raise ArgumentError(f"device: wanted 'cpu', got {device!r}")
    kind = element_type(dtype)
    extents = [check_int(n, "shape") for n in (shape if isinstance(shape, Sequence) else (shape,))]
    if min(extents, default=0) < 0:
        raise ArgumentError(f"shape: wanted extents of 0 or more, got {shape!r}")
    if math.prod(n for n in extents if n) * kind.itemsize >= 1 << 63:  # NumPy leaves zeros out as well
        raise ArgumentError(f"shape: wanted less than 2**63 bytes, got {shape!r} of {kind.itemsize} bytes each")
    nbytes, memory = math.prod(extents) * kind.itemsize, core.wiring.memory
    try:
        raw = core.engine.empty(nbytes)
        if memory is not None and nbytes >= memory.least:
            raw = memory.empty(nbytes, raw)
        return np.empty(extents, kind) if raw is None else raw.view(kind).reshape(extents)
    except ValueError as error:  # more than there is, or more axes than arrays have
        raise ArgumentError(f"shape: {error}") from None
