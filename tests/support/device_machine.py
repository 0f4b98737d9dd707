"""A device of a vendor's as the checks of kernels and of devices use it."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence

import kernel_checks
import numpy as np
from kernel_checks import Bytes, Launch

from hetcoll.vendors.devices.base import Device
from hetcoll.vendors.devices.calls import Calls

SECONDS = 30.0


def open_device(vendor: str, index: int = 0) -> Device:
    if vendor == "cuda":
        from hetcoll.vendors.devices import cuda as module
    else:
        from hetcoll.vendors.devices import hip as module
    assert module.why_not() is None, module.why_not()
    return module.device(index)


class DeviceMachine:
    """A device as `kernel_checks.Machine`."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._undo = contextlib.ExitStack()
        self._streams: list[int] = []

    def __enter__(self) -> DeviceMachine:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def allocate(self, nbytes: int, shared: bool = False) -> int:
        take, give = (
            (self.device.allocate_host, self.device.free_host) if shared else (self.device.allocate, self.device.free)
        )
        address = take(nbytes)
        self._undo.callback(give, address)
        return address

    def write(self, address: int, data: Bytes) -> None:
        self.device.copy(address, data.ctypes.data, data.size)

    def read(self, address: int, nbytes: int) -> Bytes:
        data = np.empty(nbytes, np.uint8)
        self.device.copy(data.ctypes.data, address, nbytes)
        return data

    def streams(self, count: int) -> list[int]:
        while len(self._streams) < count:
            self._streams.append(self.device.stream())
            self._undo.callback(self.device.destroy_stream, self._streams[-1])
        return self._streams[:count]

    def enqueue(self, launch: Launch, stream: int) -> None:
        function = self.device.kernels().function(launch.name)
        self.device.launch(function, launch.grid, launch.block, launch.arguments, stream)

    def run(self, launches: Sequence[Launch]) -> None:
        for launch in launches:  # loading may wait for what runs
            self.device.kernels().function(launch.name)
        streams = self.streams(len(launches))
        for launch, stream in zip(launches, streams, strict=True):
            self.enqueue(launch, stream)
        for stream in streams:
            self.device.synchronize(stream)


def random_bytes(nbytes: int, seed: int = 0) -> Bytes:
    return np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8)


@contextlib.contextmanager
def held_up(machine: DeviceMachine, stream: int) -> Iterator[Callable[[], None]]:
    """A stream that waits until the function that this gives is called, or until the block ends."""
    counter, zero, abort = kernel_checks.integers(machine, 0, 0, 0)
    machine.device.kernels().function("await")
    machine.enqueue(Launch("await", 1, 1, counter, zero, 1, abort), stream)

    def release() -> None:
        ctypes.c_uint64.from_address(counter).value = 1

    try:
        yield release
    finally:
        release()
        machine.device.synchronize(stream)


def driver_of(device: Device) -> Calls:
    """The vendor's package, for what `Device` has no need of."""
    return device._calls  # type: ignore[attr-defined, no-any-return]
