"""What every device must do: `hetcoll.vendors.devices.base`, on a GPU or over a fake.

Each check takes a device; `CHECKS` has them all by name.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fold_checks
import kernel_checks
import numpy as np
import pytest
from elements import AVERAGED, NARROW
from kernel_checks import Bytes, Launch

from hetcoll.errors import ArgumentError, DeviceError
from hetcoll.types import DType, ReduceOp
from hetcoll.vendors.devices import base
from hetcoll.vendors.devices.calls import Calls
from hetcoll.vendors.devices.kernels import Cache, KernelTable, modules, source

if TYPE_CHECKING:
    from hetcoll.vendors.devices.base import Device

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


# ---- Identity ----


def check_identity(device: Device) -> None:
    assert device.name
    assert device.arch.startswith({"cuda": "sm_", "hip": "gfx"}[device.vendor])
    assert device.dlpack == {"cuda": 2, "hip": 10}[device.vendor]
    domain, bus, rest = device.bus_id.split(":")
    slot, function = rest.split(".")
    assert [len(x) for x in (domain, bus, slot, function)] == [4, 2, 2, 1]
    assert device.bus_id == device.bus_id.lower()
    assert len(bytes.fromhex(device.uuid)) == 16
    assert device.memory > 1 << 20
    assert device.multiprocessors >= 1
    assert open_device(device.vendor, device.index) is device
    assert device.kernels() is device.kernels()


def check_currency(device: Device) -> None:
    """Work on a device changes nobody's current device; every thread has its own."""
    if device.vendor == "cuda":
        from hetcoll.vendors.devices import cuda as module
    else:
        from hetcoll.vendors.devices import hip as module
    other = module.device(1) if len(module.devices()) > 1 else device
    device.activate()
    other.free(other.allocate(64))
    assert module.current() is device
    other.activate()
    assert module.current() is other
    device.activate()
    seen: list[object] = []

    def elsewhere() -> None:
        other.activate()
        seen.append(module.current())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [other]
    assert module.current() is device


# ---- Memory ----


def check_memory(device: Device) -> None:
    """Copies in every direction, blocking and on a stream."""
    with DeviceMachine(device) as machine:
        data = random_bytes(1_000_003)
        first, second = machine.allocate(data.size), machine.allocate(data.size)
        pinned = machine.allocate(data.size, shared=True)
        (stream,) = machine.streams(1)
        assert first % 256 == 0
        machine.write(first, data)
        device.copy(second, first, data.size)
        np.testing.assert_array_equal(machine.read(second, data.size), data)
        device.copy(pinned, second, data.size, stream)
        device.copy(first, pinned, 1000, stream)
        device.copy(first + 1001, pinned + 3, 77, stream)
        device.synchronize(stream)
        seen = np.frombuffer((ctypes.c_uint8 * data.size).from_address(pinned), np.uint8)
        np.testing.assert_array_equal(seen, data)
        np.testing.assert_array_equal(machine.read(first + 1001, 77), data[3:80])
        device.copy(first, second, 0)


def check_registered(device: Device) -> None:
    """Memory of a file, mapped by the device: each side sees what the other wrote."""
    nbytes = 64 * mmap.PAGESIZE
    fd = os.memfd_create("hetcoll-test")
    try:
        os.posix_fallocate(fd, 0, nbytes)
        with DeviceMachine(device) as machine, mmap.mmap(fd, nbytes) as mapping:
            view = np.frombuffer(mapping, np.uint8)
            address = int(view.ctypes.data)
            at = device.register_host(address, nbytes)
            try:
                data = random_bytes(nbytes)
                there = machine.allocate(nbytes)
                view[:] = data
                device.copy(there, at, nbytes)
                np.testing.assert_array_equal(machine.read(there, nbytes), data)
                counter, zero = at + 128, kernel_checks.integers(machine, 0)[0]
                machine.run([Launch("bump", 1, 1, counter, zero, 1234567)])
                assert view[128:136].view(np.uint64)[0] == 1234567
                with pytest.raises(DeviceError):
                    device.register_host(address, nbytes)
            finally:
                device.unregister_host(address)
            del view
    finally:
        os.close(fd)


def check_pointers(device: Device) -> None:
    """Whose memory an address is in, anywhere in it."""
    with DeviceMachine(device) as machine:
        there, pinned = machine.allocate(1 << 16), machine.allocate(1 << 16, shared=True)
        mine = np.zeros(1 << 16, np.uint8)
        assert device.pointer(there) == base.Pointer("device", device.index, there, 1 << 16)
        assert device.pointer(there + 1000) == base.Pointer("device", device.index, there, 1 << 16)
        found = device.pointer(pinned + 5)
        assert (found.kind, found.device) == ("host", -1)
        address = mine.ctypes.data + 7
        assert device.pointer(address) == base.Pointer("unknown", -1, address, 0)
        managed = _managed(device, 1 << 16)
        assert device.pointer(managed + 9).kind == "managed"
        device.free(managed)
    module = importlib.import_module(type(device).__module__)
    for owner in module.devices():  # memory of every device, by whatever device is asked
        there = owner.allocate(1 << 16)
        for asked in module.devices():
            assert asked.pointer(there + 8) == base.Pointer("device", owner.index, there, 1 << 16)
        owner.free(there)


def _managed(device: Device, nbytes: int) -> int:
    device.activate()
    calls = _driver(device)
    if device.vendor == "cuda":
        return int(calls("cuMemAllocManaged", nbytes, int(calls.module.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL)))
    return int(calls("hipMallocManaged", nbytes, calls.module.hipMemAttachGlobal))


def _driver(device: Device) -> Calls:
    """The vendor's package, for what `Device` has no need of."""
    return device._calls  # type: ignore[attr-defined, no-any-return]


def reverse_theirs(vendor: str, index: int, handle: bytes, nbytes: int) -> None:
    """In another process: turn the bytes of an opened allocation round."""
    device = open_device(vendor, index)
    address = device.open_ipc(handle)
    data = np.empty(nbytes, np.uint8)
    device.copy(data.ctypes.data, address, nbytes)
    turned = np.ascontiguousarray(data[::-1])
    device.copy(address, turned.ctypes.data, nbytes)
    device.synchronize()
    device.close_ipc(address)


def check_ipc(device: Device) -> None:
    """Another process opens an allocation, and both see the same bytes."""
    nbytes = 1 << 16
    with DeviceMachine(device) as machine:
        address = machine.allocate(nbytes)
        data = random_bytes(nbytes, 3)
        machine.write(address, data)
        handle = device.ipc_handle(address)
        assert len(handle) == 64
        arguments = (device.vendor, device.index, handle, nbytes)
        hidden = [name for name in ("rocm", "rocm.bindings") if sys.modules.get(name, 0) is None]
        text = f"import sys; sys.path[:] = {sys.path}; sys.modules.update(dict.fromkeys({hidden}))"
        text += f"; import device_checks; device_checks.reverse_theirs{arguments}"
        subprocess.run([sys.executable, "-c", text], check=True, timeout=SECONDS)
        np.testing.assert_array_equal(machine.read(address, nbytes), data[::-1])


def check_dmabuf(device: Device) -> None:
    """A file descriptor for a network card, or a reason."""
    with DeviceMachine(device) as machine:
        address = machine.allocate(4 << 20)
        try:
            found = device.dmabuf(address + 1000, 1 << 20)
        except DeviceError as error:
            pytest.skip(f"the driver exports no dma-buf: {error}")
        try:
            os.fstat(found.fd)
            assert not os.get_inheritable(found.fd)
            assert found.nbytes == 1 << 20
            assert found.offset == 1000
        finally:
            os.close(found.fd)


def check_refusals(device: Device) -> None:
    """What a driver refuses names the call and the reason, such as opening one's own memory as another process's."""
    with pytest.raises(DeviceError, match=r"[Aa]l+oc") as caught:
        device.allocate(1 << 60)
    assert "emory" in caught.value.code or "EMORY" in caught.value.code
    own = device.allocate(64)
    with pytest.raises(DeviceError):
        device.open_ipc(device.ipc_handle(own))
    device.free(own)
    with pytest.raises(ArgumentError, match="wanted 64 bytes, got 63"):
        device.open_ipc(bytes(63))
    with pytest.raises(DeviceError):
        device.load(b"no image at all" * 10)
    with pytest.raises(ArgumentError, match="no kernel 'reduce_float8_sum'"):
        device.kernels().function("reduce_float8_sum")
    device.free(device.allocate(64))  # none of it stays


# ---- Streams and events ----


def check_events(device: Device) -> None:
    """An event is done when what came before it is; streams wait for it; time passes between two of them."""
    with DeviceMachine(device) as machine:
        one, two = machine.streams(2)
        start, end, plain, unused = device.event(True), device.event(True), device.event(), device.event()
        (counter, zero) = kernel_checks.integers(machine, 0, 0)
        machine.device.kernels().function("bump")
        with held_up(machine, one) as release:
            device.record(plain, one)
            device.wait(two, plain)
            machine.enqueue(Launch("bump", 1, 1, counter, zero, 1), two)
            assert device.query(unused)
            assert not device.query(plain)
            time.sleep(0.05)
            assert not device.query(plain)
            assert ctypes.c_uint64.from_address(counter).value == 0
            release()
            device.synchronize(two)
        assert device.query(plain)
        assert ctypes.c_uint64.from_address(counter).value == 1
        device.record(start, one)
        with held_up(machine, one) as release:
            time.sleep(0.05)
            release()
        device.record(end, one)
        device.synchronize_event(end)
        assert 0.02 < device.elapsed(start, end) < SECONDS
        for event in (start, end, plain, unused):
            device.destroy_event(event)


def check_streams(device: Device) -> None:
    """Streams run beside each other, at any priority that is asked for."""
    with DeviceMachine(device) as machine:
        (counter, zero) = kernel_checks.integers(machine, 0, 0)
        streams = [device.stream(priority) for priority in (-1000, 0, 1000)]
        device.kernels().function("bump")
        with held_up(machine, machine.streams(1)[0]):
            for i, stream in enumerate(streams):
                machine.enqueue(Launch("bump", 1, 1, counter, zero, i + 1), stream)
                device.synchronize(stream)
                assert ctypes.c_uint64.from_address(counter).value == i + 1
        device.synchronize()
        for stream in streams:
            device.destroy_stream(stream)


class Capture:
    """A graph of what a stream gets inside the block; `replay` runs it on any stream.

    `mode` is "global", or "relaxed": then the driver does not refuse what is unsafe during a capture.
    """

    def __init__(self, device: Device, stream: int, mode: str = "global") -> None:
        self.device, self.stream, self.calls, self.mode = device, stream, _driver(device), mode
        self.prefix = "cu" if device.vendor == "cuda" else "hip"

    def __enter__(self) -> Capture:
        self.device.activate()
        module = self.calls.module
        if self.device.vendor == "cuda":
            mode: Any = getattr(module.CUstreamCaptureMode, f"CU_STREAM_CAPTURE_MODE_{self.mode.upper()}")
        else:
            mode = getattr(module.hipStreamCaptureMode, f"hipStreamCaptureMode{self.mode.title()}")
        self.calls(f"{self.prefix}StreamBeginCapture", self.stream, mode)
        return self

    def __exit__(self, *_: object) -> None:
        graph = self.calls(f"{self.prefix}StreamEndCapture", self.stream)
        make = "GraphInstantiate" if self.prefix == "cu" else "GraphInstantiateWithFlags"
        self.graph = self.calls(f"{self.prefix}{make}", graph, 0)
        self.calls(f"{self.prefix}GraphDestroy", graph)

    def replay(self, stream: int) -> None:
        self.calls(f"{self.prefix}GraphLaunch", self.graph, stream)

    def close(self) -> None:
        self.calls(f"{self.prefix}GraphExecDestroy", self.graph)


def check_capture(device: Device) -> None:
    """A capture is seen, survives what the library does meanwhile, and its signals move at every replay."""
    with DeviceMachine(device) as machine:
        one, two = machine.streams(2)
        counters, (base_word, abort) = kernel_checks.integers(machine, 0, 0), kernel_checks.integers(machine, 0, 0)
        assert not device.capturing(one)
        with Capture(device, one) as captured:
            assert device.capturing(one)
            assert not device.capturing(two)
            device.free(device.allocate(64))
            device.free_host(device.allocate_host(64))
            device.kernels().function("reduce_uint16_band")  # loads a module
            machine.enqueue(Launch("bump", 1, 1, counters[0], base_word, 1), one)
            machine.enqueue(Launch("await", 1, 1, counters[1], base_word, 1, abort), one)
            machine.enqueue(Launch("bump", 1, 1, base_word, base_word, 1), one)
        assert not device.capturing(one)
        zero = kernel_checks.integers(machine, 0)[0]
        for replay in (1, 2, 3):
            captured.replay(two)
            machine.run([Launch("await", 1, 1, counters[0], zero, replay, abort)])
            machine.run([Launch("bump", 1, 1, counters[1], zero, replay)])
            device.synchronize(two)
            assert kernel_checks.read_integer(machine, base_word) == replay
        captured.close()


def check_captured_oneshot(device: Device) -> None:
    """The one-shot all-reduce in a graph: every replay is a call of its own."""
    with DeviceMachine(device) as machine:
        ring = kernel_checks.Ring(machine, 2, 1024)
        values = [np.arange(100, dtype=np.float32) + rank for rank in (0, 1)]
        captures = []
        for rank, (dst, _) in enumerate(ring.buffers):
            machine.write(dst, values[rank].view(np.uint8))
            launch = ring.launch(rank, DType.FLOAT32, ReduceOp.SUM, 100, 1, dst, dst)
            device.kernels().function(launch.name)
            stream = machine.streams(2)[rank]
            with Capture(device, stream) as captured:
                machine.enqueue(launch, stream)
            captures.append((captured, stream))
        for _ in range(5):
            for captured, stream in captures:
                captured.replay(stream)
        for captured, stream in captures:
            device.synchronize(stream)
            captured.close()
        want = (values[0] + values[1]) * np.float32(16)
        for dst, _ in ring.buffers:
            np.testing.assert_array_equal(machine.read(dst, 400).view(np.float32), want)
        assert ring.calls() == [(5, 0)] * 2


# ---- For the engine ----


def check_functions(device: Device) -> None:
    """The addresses are the driver's functions, with the signatures that the engine calls them by."""
    names = base.CUDA_FUNCTIONS if device.vendor == "cuda" else base.HIP_FUNCTIONS
    found = dict(device.functions())
    assert set(found) == {*names, "context" if device.vendor == "cuda" else "device"}
    assert all(found[name] for name in names)
    prefix = "cu" if device.vendor == "cuda" else "hip"
    device.activate()
    pointer, word, number = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint
    if device.vendor == "cuda":
        text = pointer()
        named = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(pointer))(found["cuGetErrorName"])
        assert named(2, ctypes.byref(text)) == 0
        assert ctypes.string_at(text.value or 0) == b"CUDA_ERROR_OUT_OF_MEMORY"
    else:
        named_by = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_int)(found["hipGetErrorName"])
        assert named_by(2) == b"hipErrorOutOfMemory"
    if not device.stream_memory_ops:
        pytest.skip("this device's streams neither write nor wait for values")
    write = ctypes.CFUNCTYPE(ctypes.c_int, pointer, word, word, number)(found[f"{prefix}StreamWriteValue64"])
    query = ctypes.CFUNCTYPE(ctypes.c_int, pointer)(found[f"{prefix}StreamQuery"])
    last = (number,) if prefix == "cu" else (number, word)  # HIP's has a mask
    wait = ctypes.CFUNCTYPE(ctypes.c_int, pointer, word, word, *last)(found[f"{prefix}StreamWaitValue64"])
    with DeviceMachine(device) as machine:
        (stream,) = machine.streams(1)
        gate, seen = kernel_checks.integers(machine, 0, 0)
        assert wait(stream, gate, 5, *((0,) if prefix == "cu" else (0, 2**64 - 1))) == 0  # until *gate >= 5
        assert write(stream, seen, 77, 0) == 0
        time.sleep(0.02)
        assert query(stream) == 600  # not ready
        assert ctypes.c_uint64.from_address(seen).value == 0
        ctypes.c_uint64.from_address(gate).value = 6
        device.synchronize(stream)
        assert ctypes.c_uint64.from_address(seen).value == 77


class _Counting:
    """A compiler that counts what it is asked for."""

    def __init__(self, compiler: Any) -> None:
        self.compiler, self.key, self.compiled = compiler, compiler.key, list[str]()

    def compile(self, name: str, text: str) -> bytes:
        self.compiled.append(name)
        return bytes(self.compiler.compile(name, text))


def check_cache(device: Device, directory: str, records: Callable[[], str]) -> None:
    """A module is compiled once; what the driver does not take is compiled again, and that is said."""
    compiler = _Counting(device.kernels()._compiler)
    for _ in range(2):
        table = KernelTable(device, compiler, Cache(Path(directory)))
        assert table.function("bump")
        assert table.function("bump") == table.function("bump")
        assert table.function("await") != table.function("bump")
        assert compiler.compiled == ["signals"]
    (kept,) = Path(directory).iterdir()
    whole = kept.read_bytes()
    for damaged, words in ((whole[:1000], "damaged"), (b"", "damaged")):
        kept.write_bytes(damaged)
        assert KernelTable(device, compiler, Cache(Path(directory))).function("bump")
        assert words in records()
        assert kept.read_bytes() == whole
    # An image that is whole, and that the driver does not take.
    Cache(Path(directory)).put(kept.name, b"made for something else\0")
    assert KernelTable(device, compiler, Cache(Path(directory))).function("bump")
    assert "compiled again" in records()
    assert compiler.compiled == ["signals"] * 4
    assert KernelTable(device, compiler, Cache(Path(directory))).function("bump")
    assert compiler.compiled == ["signals"] * 4


def check_kernels(device: Device, dtype: DType) -> None:
    """Every kernel of a type against the host's."""
    with DeviceMachine(device) as machine:
        operands = kernel_checks.Operands(machine)
        shape = device.kernels().launch
        for op in kernel_checks.reductions(dtype):
            kernel_checks.check_reduce(operands, dtype, op, shape)
        if dtype in AVERAGED:
            kernel_checks.check_scale(operands, dtype, shape)
        kernel_checks.check_oneshot(machine, dtype, 2)
        kernel_checks.check_oneshot(machine, dtype, 3)


def check_folds(device: Device) -> None:
    """What HETCOLL_CHECK does at replays, of both kinds of types."""
    with DeviceMachine(device) as machine:
        for dtype in (DType.FLOAT32, DType.INT16):
            fold_checks.check_folds(machine, dtype)


def check_messages(device: Device) -> None:
    """Between two ranks on one device."""
    with DeviceMachine(device) as machine:
        kernel_checks.check_messages(machine)


def check_codes(device: Device, dtype: DType) -> None:
    """Every code of a narrow type."""
    assert dtype in NARROW
    with DeviceMachine(device) as machine:
        kernel_checks.check_every_code(kernel_checks.Operands(machine), dtype, device.kernels().launch)


def check_waiting_kernels(device: Device) -> None:
    """Signals, aborts, and numbers that wrap."""
    with DeviceMachine(device) as machine:
        kernel_checks.check_signals(machine)
        kernel_checks.check_aborts(machine)
        kernel_checks.check_oneshot_numbers(machine)
        kernel_checks.check_message_numbers(machine)


def check_many_ranks(device: Device) -> None:
    """Some ranks on one device, and the longest messages. (A device may run as few as four streams at once.)"""
    with DeviceMachine(device) as machine:
        ring = kernel_checks.Ring(machine, 4, 65536)
        for count in (1, 1000, 16384):
            ring.check(DType.FLOAT32, ReduceOp.SUM, count)
        ring.check(DType.FLOAT16, ReduceOp.AVG, 8191, divisor=4)


def compile_all(device: Device) -> None:
    """Every module, whatever the cache has."""
    for module in modules():
        assert device.load(device.kernels()._compiler.compile(module, source(module)))


CHECKS: dict[str, Callable[[Device], None]] = {
    check.__name__.removeprefix("check_"): check
    for check in (
        check_identity, check_currency, check_memory, check_registered, check_pointers, check_ipc, check_dmabuf,
        check_refusals, check_events, check_streams, check_capture, check_captured_oneshot, check_functions,
        check_waiting_kernels, check_many_ranks,
    )
}  # fmt: skip
