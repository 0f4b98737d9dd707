"""Where the buffers of `hetcoll perf` and `selftest` are: which rank has which GPU, and the cases' memory on it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

import hetcoll._native as _native

from .. import ArgumentError, DType
from .timing import Schedule

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..vendors.devices.base import Device
    from ..vendors.devices.graphs import Graph

VENDORS = ("cuda", "hip")
_PAGE = 4096
_DLPACK = {"cuda": 2, "hip": 10}  # dlpack.h: kDLCUDA, kDLROCM


def choose_device(wish: str, gpus: int | None, rank: int, visible: Mapping[str, int]) -> str:
    """What a rank's buffers are on: ``cpu``, ``cuda:0``, ``hip:1``, ...

    `wish` is ``cpu``, ``cuda``, ``hip``, ``auto`` or several of them, one for each rank of the host, with commas.
    `gpus` is how many ranks of the host have a GPU, the first ones; None: all of them, of ``auto`` as many as there are
    GPUs. `rank` is this one's place on its host, `visible` the number of GPUs of each vendor.
    """
    words = wish.split(",")
    if len(words) > 1:
        if gpus is not None:
            raise ArgumentError(f"-g, --device: wanted one of them, got -g {gpus} and a device for each rank ({wish})")
        if rank >= len(words):
            raise ArgumentError(f"--device: wanted a device for each rank of the host, got {wish} for rank {rank}")
        word = words[rank]
        return word if word == "cpu" or ":" in word else _numbered(word, words[:rank].count(word), visible)
    if wish == "cpu" or (gpus is not None and rank >= gpus):
        return "cpu"
    vendor = wish if wish != "auto" else next((v for v in VENDORS if visible.get(v)), "cpu")
    if wish == "auto" and gpus is None and rank >= visible.get(vendor, 0):
        return "cpu"
    if vendor == "cpu":
        raise ArgumentError(f"-g: wanted {gpus} GPUs, this machine shows none (hetcoll doctor says why)")
    return vendor if ":" in vendor else _numbered(vendor, rank, visible)


def _numbered(vendor: str, number: int, visible: Mapping[str, int]) -> str:
    if number >= visible.get(vendor, 0):
        raise ArgumentError(
            f"--device: wanted {number + 1} GPUs of {vendor}, this machine shows {visible.get(vendor, 0)} to a rank "
            "(hetcoll doctor says why; -g says how many ranks have one)"
        )
    return f"{vendor}:{number}"


def check_devices(text: str) -> str:
    """ValueError unless `text` is what `choose_device` takes."""
    for word in text.split(","):
        name, colon, number = word.partition(":")
        alone = ("auto", "cpu") if "," not in text else ("cpu",)
        if name not in (*alone, *VENDORS) or (colon and (name not in VENDORS or not number.isdecimal())):
            raise ValueError(text)
    return text


def visible_gpus() -> dict[str, int]:
    """How many GPUs of each vendor this process sees."""
    from ..vendors.devices import cuda, hip

    modules = {"cuda": cuda, "hip": hip}
    return {name: len(modules[name].devices()) if modules[name].why_not() is None else 0 for name in VENDORS}


class Stream:
    """A stream of a GPU, on which calls are enqueued one after another."""

    def __init__(self, device: Device) -> None:
        device.activate()
        self.device, self.handle = device, device.stream()

    @classmethod
    def of(cls, device: str) -> Stream | None:
        """On what `choose_device` chose; None for a CPU."""
        from ..vendors.devices import cuda, hip

        vendor, _, index = device.partition(":")
        return None if vendor == "cpu" else cls({"cuda": cuda, "hip": hip}[vendor].device(int(index)))

    def synchronize(self) -> None:
        """Wait for all that was enqueued."""
        self.device.synchronize(self.handle)

    def samples(self, call: Callable[[], object], schedule: Schedule) -> NDArray[np.float64]:
        """As `timing.take_samples`, by the GPU's clock: calls are enqueued without waiting for them."""
        device = self.device
        events = [device.event(timing=True) for _ in range(schedule.samples + 1)]
        try:
            device.record(events[0], self.handle)
            for event in events[1:]:
                for _ in range(schedule.batch):
                    call()
                device.record(event, self.handle)
            self.synchronize()
            spent = [device.elapsed(a, b) for a, b in pairwise(events)]
        finally:
            for event in events:
                device.destroy_event(event)
        return np.array(spent) * (1e6 / schedule.batch)

    def captured(self, call: Callable[[], object], calls: int) -> Graph:
        """A graph of so many calls."""
        from ..vendors.devices.graphs import Graph

        self.synchronize()
        return Graph(self.device, self.handle, lambda: [call() for _ in range(calls)])


class Mirror:
    """Memory of a GPU beside arrays of host memory. What calls must not touch goes along and comes back, too."""

    def __init__(self, stream: Stream, owners: Iterable[NDArray[np.uint8]]) -> None:
        self.stream, self._owners = stream, list(owners)
        device, self._there = stream.device, dict[int, int]()
        for owner in self._owners:
            taken = device.allocate(owner.nbytes + _PAGE)
            weakref.finalize(self, device.free, taken).atexit = False  # the driver's own end takes it
            self._there[id(owner)] = taken + (owner.ctypes.data - taken) % _PAGE  # as it lies in its page here

    def upload(self) -> None:
        """Host to GPU."""
        self.stream.synchronize()
        for owner in self._owners:
            self.stream.device.copy(self._there[id(owner)], owner.ctypes.data, owner.nbytes)

    def download(self) -> None:
        """GPU to host, when all calls are done."""
        self.stream.synchronize()
        for owner in self._owners:
            self.stream.device.copy(owner.ctypes.data, self._there[id(owner)], owner.nbytes)

    def buffer(self, array: NDArray[Any]) -> _native.Memory:
        """The place on the GPU of an array within one of the owners, for calls on the stream. The mirror keeps it."""
        device, owner, dtype = self.stream.device, _owner(array), DType[array.dtype.name.upper()]
        address = self._there[id(owner)] + array.ctypes.data - owner.ctypes.data
        return _native.Memory(address, array.size, dtype, _DLPACK[device.vendor], device.index, self.stream.handle)


class Talk:
    """`allgather` of a few host values, and barriers, between ranks that must pass memory of their own devices."""

    def __init__(self, comm: Any, stream: Stream) -> None:
        self._comm, self._stream = comm, stream
        self.rank, self.size, self.barrier = comm.rank, comm.size, comm.barrier

    def allgather(self, send: NDArray[Any], recv: NDArray[Any]) -> None:
        """Complete on return."""
        parts = [np.empty(array.nbytes, np.uint8) for array in (send, recv)]
        parts[0][:] = send.view(np.uint8)
        mirror = Mirror(self._stream, parts)
        mirror.upload()
        ends = (mirror.buffer(part.view(send.dtype)) for part in parts)
        self._comm.allgather(*ends)
        mirror.download()
        recv[:] = parts[1].view(recv.dtype)


def _owner(array: NDArray[Any]) -> NDArray[Any]:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
