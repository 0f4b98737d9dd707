"""What every device must do: `hetcoll.vendors.devices.base`, on a GPU or over a fake.

Each check takes a device; `CHECKS` has them all by name.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fold_checks
import kernel_checks
import numpy as np
import pytest
from device_machine import SECONDS, DeviceMachine, driver_of, held_up, open_device
from elements import AVERAGED, NARROW
from kernel_checks import Launch
from memory_checks import check_dmabuf, check_ipc, check_memory, check_pointers, check_refusals, check_registered

from hetcoll.types import DType, ReduceOp
from hetcoll.vendors.devices import base
from hetcoll.vendors.devices.kernels import Cache, KernelTable, modules, source

if TYPE_CHECKING:
    from hetcoll.vendors.devices.base import Device


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
        self.device, self.stream, self.calls, self.mode = device, stream, driver_of(device), mode
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
        cleared = machine.allocate(64)
        assert not device.capturing(one)
        with Capture(device, one) as captured:
            assert device.capturing(one)
            assert not device.capturing(two)
            device.free(device.allocate(64))
            device.free_host(device.allocate_host(64))
            device.clear(cleared, 64)
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
