"""Communicators that take the place of the one beneath hetcoll's process groups, to bring what there is no GPU for.

`Posing` shows PyTorch's CUDA tensors to hetcoll as AMD's: with the environment of `fakes.posing` everything below a
rank's process group is then HIP's, over a libamdhip64 that calls CUDA's driver. `ThroughGpu` carries CPU tensors over
fake GPUs: their bytes go into a device's memory, the collective takes place there, and they come back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

import hetcoll
from hetcoll.calls.buffers import Buffer, read_buffer

if TYPE_CHECKING:
    from hetcoll.vendors.devices.base import Device


@contextlib.contextmanager
def substitute(wrap: Callable[[hetcoll.Communicator], Any]) -> Iterator[None]:
    """Process groups that are made within get what `wrap` makes of their communicators."""
    from hetcoll.torch import launch, process_group
    from hetcoll.torch.connect import connect as plain

    def connect(*args: Any) -> Any:
        return wrap(plain(*args))

    launch.connect = process_group.connect = connect  # type: ignore[assignment]
    try:
        yield
    finally:
        launch.connect = process_group.connect = plain


class Posing:
    """The communicator of a rank whose GPU poses as AMD's."""

    def __init__(self, comm: hetcoll.Communicator) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._comm, name)
        if not callable(found):
            return found

        def call(*args: Any, **options: Any) -> Any:
            return found(*map(as_rocm, args), **{key: as_rocm(each) for key, each in options.items()})

        return call


def as_rocm(value: Any) -> Any:
    """CUDA tensors as memory of a ROCm device, on the stream that is current; anything else as it is."""
    if not isinstance(value, torch.Tensor) or value.device.type != "cuda":
        return value
    stream = int(torch.cuda.current_stream(value.device).cuda_stream)
    return replace(read_buffer(value, "tensor", writable=False), device="rocm", stream=stream)


class ThroughGpu:
    """The communicator of a rank whose tensors are a CPU's and whose collectives are a GPU's: `device`'s.

    `calls` counts what went that way.
    """

    def __init__(self, comm: hetcoll.Communicator, device: Device) -> None:
        self._comm, self._device, self.calls = comm, device, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._comm, name)
        if not callable(found):
            return found

        def call(*args: Any, **options: Any) -> Any:
            tensors = [each for each in args if isinstance(each, torch.Tensor)]
            if not tensors:
                return found(*args, **options)
            self.calls += 1
            asked, limit = options.pop("async_op", False), options.pop("timeout", None)
            carried = Carried(self._device, tensors, () if name == "send" else tensors[-1:])
            carried.work = found(*map(carried.there, args), **options, stream=0, async_op=True)
            if not asked:
                carried.wait(limit)
            return carried

        return call


class Carried:
    """Tensors that are in a GPU's memory until the operation on them is complete; then the `outputs` come back."""

    work: hetcoll.Work

    def __init__(self, device: Device, tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        self._device, self._outputs = device, outputs
        kind = "cuda" if device.vendor == "cuda" else "rocm"
        self._buffers: dict[int, Buffer] = {}
        with device.active():
            for tensor in tensors:
                host = read_buffer(tensor, "tensor", writable=False)
                there = device.allocate(max(1, host.nbytes))
                device.copy(there, host.ptr, host.nbytes)
                self._buffers[id(tensor)] = Buffer(there, host.count, host.dtype, tensor, kind, device.index)

    def there(self, value: Any) -> Any:
        return self._buffers.get(id(value), value)

    def wait(self, timeout: float | None = None) -> None:
        self.work.wait(timeout)
        self._fetch()

    def _fetch(self) -> None:
        with self._device.active():
            for tensor in self._outputs:
                buffer = self._buffers[id(tensor)]
                self._device.copy(tensor.data_ptr(), buffer.ptr, buffer.nbytes)
            for buffer in self._buffers.values():
                self._device.free(buffer.ptr)
        self._outputs, self._buffers = (), {}

    @property
    def done(self) -> bool:
        if not self.work.done:
            return False
        self._fetch()
        return True

    @property
    def error(self) -> BaseException | None:
        return self.work.error
