"""CUDA's and HIP's graphs, as far as the benchmark needs them: calls that are captured once and run again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import cuda, hip

if TYPE_CHECKING:
    from collections.abc import Callable

    from .base import Device


class Graph:
    """What `call` enqueues on `stream` of `device`, captured; calling the graph enqueues it there again."""

    def __init__(self, device: Device, stream: int, call: Callable[[], object]) -> None:
        self._device, self._stream = device, stream
        if device.vendor == "cuda":
            self._calls, self._prefix = cuda._driver(), "cu"
            mode = self._calls.module.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        else:
            self._calls, self._prefix = hip._runtime(), "hip"
            mode = self._calls.module.hipStreamCaptureMode.hipStreamCaptureModeGlobal
        with device.active():
            self._calls(f"{self._prefix}StreamBeginCapture", stream, mode)
            try:
                call()
            finally:
                graph = self._calls(f"{self._prefix}StreamEndCapture", stream)
            name = "cuGraphInstantiate" if device.vendor == "cuda" else "hipGraphInstantiateWithFlags"
            self._graph = self._calls(name, graph, 0)
            self._calls(f"{self._prefix}GraphDestroy", graph)

    def __call__(self) -> None:
        with self._device.active():
            self._calls(f"{self._prefix}GraphLaunch", self._graph, self._stream)

    def close(self) -> None:
        """Destroy it, when all its runs are over."""
        with self._device.active():
            self._calls(f"{self._prefix}GraphExecDestroy", self._graph)
