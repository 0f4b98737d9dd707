"""Arrays on GPUs: where they lie, and on which stream. Their libraries are imitated, down to DLPack."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import fakes
import numpy as np
import pytest
from dlpack_arrays import CODES, Array, Quick
from ranks import Job, Ranks

from hetcoll import _native, calls
from hetcoll.calls.buffers import Buffer, read_buffer
from hetcoll.errors import ArgumentError, BufferTypeError
from hetcoll.gpu import streams
from hetcoll.types import DType
from hetcoll.vendors.devices import owner as owners
from hetcoll.vendors.devices.base import Pointer

# ----------------------------------------------------------------------------------------------------------- DLPack


def read(obj: object, *, writable: bool = True) -> Buffer:
    return read_buffer(obj, "buf", writable=writable)


@pytest.mark.parametrize("dtype", CODES, ids=lambda d: d.label)
@pytest.mark.parametrize("versioned", [True, False])
def test_dlpack_says_where_an_array_lies(dtype: DType, versioned: bool) -> None:
    for kind, device in ((2, "cuda"), (10, "rocm")):
        array = Array(kind, 3, dtype, (2, 5), versioned=versioned)
        found = read(array)
        assert (found.ptr, found.count, found.dtype) == (0x7000, 10, dtype)
        assert (found.device, found.index, found.place) == (device, 3, f"{device}:3")
        assert found.owner is array
        assert array.options["stream"] == -1  # nothing has to wait: calls are ordered after the library's own stream


def test_pinned_host_memory_is_host_memory() -> None:
    for kind in (3, 11):
        array = Array(kind)
        assert (read(array).device, read(array).place) == ("cpu", "cpu")
        assert "stream" not in array.options


def test_managed_memory_is_refused() -> None:
    with pytest.raises(BufferTypeError, match="buf: managed memory is not supported, since the driver moves it"):
        read(Array(13))


def test_gpu_arrays_must_be_plain() -> None:
    assert read(Array(shape=(3, 4), strides=(4, 1))).count == 12
    assert read(Array(shape=(0, 4), strides=(7, 7))).count == 0
    with pytest.raises(BufferTypeError, match=r"buf: wanted a C-contiguous tensor, got shape \(3, 4\)"):
        read(Array(shape=(3, 4), strides=(1, 3)))
    with pytest.raises(BufferTypeError, match="buf: wanted a writable array, got a read-only Array"):
        read(Array(read_only=True))
    assert read(Array(read_only=True), writable=False).count == 4


def test_an_exporter_that_cannot_is_named() -> None:
    class Busy(Array):
        def __dlpack__(self, **options: Any) -> Any:
            raise RuntimeError("Can't export tensors that require gradient")

    with pytest.raises(BufferTypeError, match="buf: this Busy cannot be exported by DLPack: Can't export"):
        read(Busy())


def test_what_pytorch_wants_of_another_gpu_is_said() -> None:
    class Tensor(Array):
        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 1

        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("Can't export tensors on a different CUDA device index. Expected: 1. Current device: 0.")

    with pytest.raises(BufferTypeError, match=r"Current device: 0\. Call torch\.cuda\.set_device\(1\) first$"):
        read(Tensor())


def test_jax_is_made_to_order_its_work_before_the_default_stream() -> None:
    for kind, stream in ((2, 1), (10, 0)):
        array = type("ArrayImpl", (Array,), {"__module__": "jaxlib._jax"})(kind)
        read(array, writable=False)
        assert array.options["stream"] == stream
        with pytest.raises(BufferTypeError, match="wanted a writable array"):
            read(array)


# ------------------------------------------------------------------------------------------------- by a C function


def test_known_tensors_are_read_without_python() -> None:
    read(Quick(2))  # makes the type known
    for kind, device in ((2, "cuda"), (10, "rocm")):
        array = Quick(kind, 5, DType.BFLOAT16, (3, 3))
        assert read(array) == Buffer(0x7000, 9, DType.BFLOAT16, array, device, 5, 0x1000 * kind + 5)
        assert not array.options  # `__dlpack__` was not called
        assert streams.handle(None, read(array)) == 0x1000 * kind + 5
        assert streams.handle(77, read(array)) == 77
        later = read(array)
        array.held.tensor.device_id = 6  # stands for another current stream
        assert streams.handle(None, later) == 0x1000 * kind + 5  # that of the call
        assert streams.current(later) == 0x1000 * kind + 6  # that of now
    assert _native.read_memory(Quick(2), True) is None
    assert read(Quick(3)).device == "cpu"


def test_known_tensors_that_are_read_the_long_way() -> None:
    read(Quick(2))
    gradient = Quick(2)
    gradient.requires_grad = True
    odd = [gradient, Quick(2, 7), Quick(2, dtype=DType.COMPLEX64), Quick(2, shape=(2, 3), strides=(1, 2)), 3]
    for array in odd:
        assert _native.read_tensor(array) is None
    freed = Quick(1)
    freed.held.tensor.data = 0
    assert _native.read_tensor(freed) is None
    on_host = _native.read_tensor(Quick(1))
    assert on_host is not None
    assert on_host[3:] == (1, 0, None)
    assert read(odd[1]).stream is None
    assert read(odd[2]).dtype is DType.COMPLEX64


# -------------------------------------------------------------------------------------------- CUDA array interface


class Numba:
    """Describes itself as Numba's arrays do."""

    def __init__(self, **changes: Any) -> None:
        shape = {"shape": (2, 3), "typestr": "<f4", "data": (0x9000, False), "strides": None, "version": 3, "stream": 0}
        self.__cuda_array_interface__ = shape | changes


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def know(vendor: str, kind: str, device: int) -> None:
        monkeypatch.setattr(owners, "owner", lambda address: (vendor, Pointer(kind, device, address, 64)))  # type: ignore[arg-type]

    return know


def test_the_driver_says_where_such_an_array_lies(place: Callable[..., None]) -> None:
    for vendor, device in (("cuda", "cuda"), ("hip", "rocm")):
        place(vendor, "device", 2)
        array = Numba()
        assert read(array) == Buffer(0x9000, 6, DType.FLOAT32, array, device, 2)
    place("cuda", "host", -1)  # mapped
    assert read(Numba()).device == "cpu"
    place("cuda", "managed", 0)
    with pytest.raises(BufferTypeError, match="buf: managed memory is not supported"):
        read(Numba())
    place("cuda", "unknown", -1)
    with pytest.raises(BufferTypeError, match="buf: no GPU's driver knows the memory at 0x9000"):
        read(Numba())
    assert read(Numba(shape=(0, 3), data=(0, False))).count == 0
    assert read(Numba(shape=(0,), data=None)).count == 0


def test_what_such_an_array_may_be(place: Callable[..., None]) -> None:
    place("cuda", "device", 0)
    for typestr, dtype in (
        ("<f2", DType.FLOAT16),
        ("|b1", DType.BOOL),
        ("<c16", DType.COMPLEX128),
        ("|u1", DType.UINT8),
    ):
        assert read(Numba(typestr=typestr)).dtype is dtype
    assert read(Numba(strides=(12, 4))).count == 6
    assert read(Numba(data=(0x9000, True)), writable=False).count == 6
    for changes, problem in (
        ({"typestr": ">f4"}, "type '>f4' of a CUDA array interface is not supported"),
        ({"typestr": "|V2"}, "type '|V2' of a CUDA array interface is not supported"),
        ({"typestr": "nonsense"}, "type 'nonsense'"),
        ({"strides": (4, 8)}, "wanted a C-contiguous array"),
        ({"mask": object()}, "wanted an array without a mask"),
        ({"data": (0x9000, True)}, "wanted a writable array, got a read-only Numba"),
    ):
        with pytest.raises(BufferTypeError, match=problem.replace("|", r"\|")):
            read(Numba(**changes))


def _owners(job: Job) -> list[tuple[str, str, int]]:
    """What the driver says of memory of the second GPU, pinned, managed and ordinary memory."""
    from cuda.bindings import driver

    from hetcoll.vendors.devices import cuda

    device = cuda.device(1)
    device.activate()
    on_gpu, pinned = device.allocate(64), device.allocate_host(64)
    error, managed = driver.cuMemAllocManaged(64, driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL)
    assert not int(error)
    ordinary = np.zeros(8)
    found = [owners.owner(int(a)) for a in (on_gpu, pinned, managed, ordinary.ctypes.data)]
    placed = read(Numba(data=(on_gpu, False)))
    assert (placed.device, placed.index) == ("cuda", 1)
    driver.cuMemFree(managed)
    device.free_host(pinned)
    device.free(on_gpu)
    return [(vendor, pointer.kind, pointer.device) for vendor, pointer in found]


@pytest.mark.fakes
def test_a_driver_is_asked() -> None:
    with Ranks(1, fakes.environment("cuda", devices=2), join=False) as ranks:
        gpu, pinned, managed, ordinary = ranks.run(_owners)[0]
    assert gpu == ("cuda", "device", 1)
    assert pinned[:2] == ("cuda", "host")
    assert managed[:2] == ("cuda", "managed")
    assert ordinary == ("cuda", "unknown", -1)


# ------------------------------------------------------------------------------------------------------------ calls


def test_both_buffers_lie_on_one_device() -> None:
    gpu, other, host = Array(2, 0), Array(2, 1, address=0x8000), np.zeros(4, np.float32)
    for send, recv, problem in (
        (gpu, other, "got cuda:0 and cuda:1"),
        (host, gpu, "got cpu and cuda:0"),
        (gpu, host, "got cuda:0 and cpu"),
        (gpu, Array(10, address=0x8000), "got cuda:0 and rocm:0"),
    ):
        with pytest.raises(BufferTypeError, match=f"sendbuf and recvbuf: wanted memory of one device, {problem}"):
            calls.allreduce(0, 2, send, recv, "sum")
    assert calls.allreduce(0, 2, gpu, None, "sum").send is not None


# ---------------------------------------------------------------------------------------------------------- streams

BUFFER = Buffer(0x7000, 4, DType.FLOAT32, object(), "cuda", 1)


@pytest.mark.parametrize(
    "stream",
    [
        77,
        np.int64(77),
        SimpleNamespace(__cuda_stream__=lambda: (0, 77), ptr=5),
        SimpleNamespace(__cuda_stream__=(0, 77)),
        SimpleNamespace(cuda_stream=77),
        SimpleNamespace(ptr=77),
    ],
)
def test_streams_come_in_every_library_s_form(stream: object) -> None:
    assert streams.handle(stream, BUFFER) == streams.handle(stream, None) == 77


@pytest.mark.parametrize("stream", ["77", 7.5, True, -1, object(), SimpleNamespace(ptr=None), SimpleNamespace(ptr="x")])
def test_what_is_no_stream_is_refused(stream: object) -> None:
    with pytest.raises(
        ArgumentError, match="stream: wanted None, a handle as an int, or an object with __cuda_stream__"
    ):
        streams.handle(stream, BUFFER)


def test_another_version_of_the_protocol_is_refused() -> None:
    with pytest.raises(ArgumentError, match="wanted version 0 of __cuda_stream__, got 1"):
        streams.handle(SimpleNamespace(__cuda_stream__=lambda: (1, 77)), BUFFER)


def test_without_a_library_it_is_the_default_stream() -> None:
    before = set(sys.modules)
    assert streams.handle(None, BUFFER) == 0
    assert streams.handle(None, None) == 0
    assert not {"torch", "cupy"} & (set(sys.modules) - before)


def test_the_current_stream_is_the_array_s_library_s(monkeypatch: pytest.MonkeyPatch) -> None:
    torch, cupy = ModuleType("torch"), ModuleType("cupy")
    torch.Tensor = type("Tensor", (), {})  # type: ignore[attr-defined]
    cupy.ndarray = type("ndarray", (), {})  # type: ignore[attr-defined]
    torch.cuda = SimpleNamespace(current_stream=lambda index: SimpleNamespace(cuda_stream=100 + index))  # type: ignore[attr-defined]
    device = [0]

    class Device:
        """CuPy's current stream is that of its current device."""

        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            device.append(self.index)

        def __exit__(self, *rest: object) -> None:
            device.pop()

    cupy.cuda = SimpleNamespace(  # type: ignore[attr-defined]
        Device=Device, get_current_stream=lambda: SimpleNamespace(ptr=200 + device[-1])
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    for owner, stream in (
        (torch.Tensor(), 101),
        (cupy.ndarray(), 201),
        (object(), 0),
        (Numba(stream=9), 9),
        (Numba(), 0),
    ):
        assert streams.handle(None, Buffer(0x7000, 4, DType.FLOAT32, owner, "cuda", 1)) == stream
    subclass = type("Parameter", (torch.Tensor,), {})()
    assert streams.handle(None, Buffer(0x7000, 4, DType.FLOAT32, subclass, "rocm", 2)) == 102
    assert device == [0]
