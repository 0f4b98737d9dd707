"""What calls that copy engines do need to be captured into a CUDA or HIP graph (``native/gpu/capture.h``).

It is made at the first such call, apart from what other calls use: a graph may be replayed while those are under way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import hetcoll._native as _native

from ..errors import ArgumentError
from .lanes import PassingMemory

if TYPE_CHECKING:
    from ..vendors.devices.base import Device
    from .edges import GpuEdges
    from .shared import GpuShare


class GpuGraphs:
    """Captured calls of `queue`, whose signals need a word of device memory at `zero` that stays 0."""

    def __init__(self, device: Device, queue: _native.DeviceQueue, share: GpuShare, edges: GpuEdges, zero: int) -> None:
        self._device, self._queue, self._share, self._edges, self._zero = device, queue, share, edges, zero
        self._memory: PassingMemory | None = None  # once anything was captured

    def prepare(self, shape: _native.DeviceShape, stream: int) -> int | None:
        """See to what `shape` needs to be captured on `stream`. Returns new scratch memory for all that is captured
        from now on, None where what there is suffices.

        Raises
        ------
        ArgumentError
            It cannot be captured: it is compressed, or some rank has no GPU, or is not reached through mapped memory,
            or the communicator is in the middle of another capture. It says which.
        """
        if shape.compressed[0]:
            raise ArgumentError("compress: wanted a call that no graph captures: what it loses is kept elsewhere then")
        among = self._edges.why_not_captured(None if not shape.p2p else shape.edges)
        if (reason := None if shape.by_library else among) is not None:
            raise ArgumentError(
                "stream: a graph is being captured on it; wanted GPUs of one host, as for all calls that they do by"
                f" copies, {reason}"
            )
        if not shape.by_copies:
            return None
        if self._queue.capture_taken(stream):
            raise ArgumentError(
                "stream: a graph is being captured on it; wanted one capture at a time of calls that GPUs do by copies,"
                " got a second one before the end of the first"
            )
        memory = self._memory or self._start()
        self._edges.capture(shape.edges)
        return memory.scratch(shape.scratch_bytes)

    def _start(self) -> PassingMemory:
        share, table = self._share, self._device.kernels()
        kernels = {name: table.function(name) for name in ("bump", "await")}
        words, memory = share.segment.captured(share.here), PassingMemory(self._device, share.slot_bytes)
        try:
            self._queue.set_capture(
                kernels={**kernels, "zero": self._zero, "abort": share.segment.aborts[share.here]},
                staging=memory.staging,
                words=words.device,
                seen=words.host,
            )
        except BaseException:
            memory.close()
            raise
        self._memory = memory
        return memory

    def close(self) -> None:
        """Give everything back. No graph may be replayed any more."""
        if self._memory is not None:
            self._queue.drop_capture()
            self._memory.close()
