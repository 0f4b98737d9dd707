"""What the fast path reads of an object by itself: the same as the slow path, or nothing; anew at every call."""

from __future__ import annotations

import array
import ctypes
import inspect
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from installed import import_torch
from ranks import Ranks

import hetcoll
from hetcoll import _native
from hetcoll.calls.buffers import KNOWS_ARRAYS, read_buffer
from hetcoll.errors import BufferTypeError
from hetcoll.types import DType, ReduceOp

Launch = Callable[..., Ranks]


def numpy_type(dtype: DType) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, dtype.label, None) or dtype.label)


def both(obj: object, *, writable: bool = True) -> tuple[int, int, int] | None:
    """What the fast path reads, after the slow path has read it."""
    found = read_buffer(obj, "buf", writable=writable)
    short = _native.read_memory(obj, writable)
    assert short in (None, (found.ptr, found.count, found.dtype)), (short, found)
    return short


def test_numpy_arrays_look_as_they_must() -> None:
    assert KNOWS_ARRAYS
    assert not _native.know_arrays(np.zeros((2, 4), np.float32))
    assert not _native.know_arrays(np.zeros((2, 3), np.int32))
    assert not _native.know_arrays(bytearray(24))
    assert _native.know_arrays(np.zeros((2, 3), np.float32))


@pytest.mark.parametrize("dtype", DType, ids=lambda d: d.label)
@pytest.mark.parametrize("shape", [(7,), (2, 3, 4), (), (0,), (3, 0)], ids=str)
def test_numpy_arrays(dtype: DType, shape: tuple[int, ...]) -> None:
    assert both(np.zeros(shape, numpy_type(dtype))) is not None


@pytest.mark.parametrize(
    "obj",
    [bytearray(5), memoryview(bytearray(8)).cast("f"), array.array("h", [1, 2])],
    ids=lambda each: type(each).__name__,
)
def test_bytes_likes(obj: object) -> None:
    assert both(obj) is not None


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def frozen(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    values.flags.writeable = False
    return values


@pytest.mark.parametrize(
    "obj",
    [
        np.zeros(8, BFLOAT16)[::2],
        np.zeros((4, 4), BFLOAT16).T,
        frozen(np.zeros(4, BFLOAT16)),
        np.zeros(4, BFLOAT16.newbyteorder()),
        np.zeros(4, ml_dtypes.int4),
        np.zeros(4, "datetime64[s]"),
        np.zeros(4, ">f8"),
        np.zeros(4)[::2],
        np.ma.MaskedArray(np.zeros(4), [True, False, True, False]),
        b"fixed",
        None,
        3,
    ],
    ids=repr,
)
def test_what_cannot_serve_is_left_to_the_long_way(obj: object) -> None:
    both(np.zeros(4, BFLOAT16))  # its type is known
    assert _native.read_memory(obj, True) is None
    with pytest.raises(BufferTypeError):
        read_buffer(obj, "buf", writable=True)


def test_an_array_is_read_anew_each_time() -> None:
    values = np.zeros(4, BFLOAT16)
    assert both(values) == (values.ctypes.data, 4, DType.BFLOAT16)
    values.resize(1 << 20, refcheck=False)
    assert both(values) == (values.ctypes.data, 1 << 20, DType.BFLOAT16)
    values.resize((4, 1 << 18), refcheck=False)
    assert both(values) == (values.ctypes.data, 1 << 20, DType.BFLOAT16)
    assert both(values.view(np.uint16)) == (values.ctypes.data, 1 << 20, DType.UINT16)
    assert both(values[1]) == (values.ctypes.data + (1 << 19), 1 << 18, DType.BFLOAT16)


# Tensors that export themselves by a C function, as PyTorch's do.


class DlTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


Export = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DlTensor))


class Exchange(ctypes.Structure):
    """dlpack.h 1.3: DLPackExchangeAPI."""

    _fields_ = (
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("previous", ctypes.c_void_p),
        ("functions", ctypes.c_void_p * 3), ("export", Export), ("stream", ctypes.c_void_p),
    )  # fmt: skip


def export(tensor: Any, out: Any) -> int:
    if tensor.broken:
        return -1
    values, target = tensor.values, out.contents
    tensor.shape = (ctypes.c_int64 * values.ndim)(*values.shape)
    tensor.strides = (ctypes.c_int64 * values.ndim)(*(stride // values.itemsize for stride in values.strides))
    code = {"f": 2, "i": 0, "u": 1, "c": 5}[values.dtype.kind]
    target.data, target.byte_offset = values.ctypes.data - 8, 8
    target.device_type, target.device_id, target.ndim = tensor.device, 0, values.ndim
    target.code, target.bits, target.lanes = code, 8 * values.itemsize, 1
    target.shape, target.strides = tensor.shape, tensor.strides if tensor.strided else None
    return 0


def capsule(major: int, previous: int | None, function: Any) -> tuple[Any, Exchange]:
    table = Exchange(major, 3, previous, (ctypes.c_void_p * 3)(), function, None)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(ctypes.addressof(table), b"dlpack_exchange_api", None), table


EXPORT = Export(export)
_, OLD_TABLE = capsule(1, None, EXPORT)
API, TABLE = capsule(2, ctypes.addressof(OLD_TABLE), Export())  # a newer version comes first


class Tensor:
    """Speaks DLPack by both ways. `__module__` says whose it is."""

    __module__ = "torch"
    __dlpack_c_exchange_api__ = API

    def __init__(self, values: np.ndarray[Any, Any], device: int = 1, *, strided: bool = True) -> None:
        self.values, self.device, self.strided, self.broken, self.requires_grad = values, device, strided, False, False

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device, 0)

    def __dlpack__(self, **options: Any) -> object:
        return self.values.__dlpack__(**options)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int8", "uint8", "int16", "int32", "uint64"])
@pytest.mark.parametrize("strided", [True, False])
def test_tensors(dtype: str, strided: bool) -> None:
    for shape in ((5,), (2, 3), (), (0,), (4, 1, 2)):
        assert both(Tensor(np.zeros(shape, dtype), strided=strided)) is not None


def test_a_tensor_is_read_anew_each_time() -> None:
    tensor = Tensor(np.zeros(4))
    assert both(tensor) == (tensor.values.ctypes.data, 4, DType.FLOAT64)
    tensor.values = np.zeros((2, 9), np.int32)
    assert both(tensor) == (tensor.values.ctypes.data, 18, DType.INT32)


def test_tensors_that_are_left_to_the_long_way() -> None:
    both(Tensor(np.zeros(4)))
    gradient, broken, complex_ = Tensor(np.zeros(4)), Tensor(np.zeros(4)), Tensor(np.zeros(4, np.complex64))
    gradient.requires_grad = broken.broken = True
    odd: list[Any] = [gradient, broken, complex_, Tensor(np.zeros(8)[::2]), Tensor(np.zeros((2, 3)).T)]
    odd += [Tensor(np.zeros(4), device) for device in (2, 10, 99)]
    for tensor in odd:
        assert _native.read_memory(tensor, True) is None


def test_what_other_libraries_export_may_be_read_only() -> None:
    other = type("Array", (Tensor,), {"__module__": "elsewhere"})
    assert both(other(np.zeros(4))) is None
    without = type("Without", (Tensor,), {"__dlpack_c_exchange_api__": None})
    assert both(without(np.zeros(4))) is None


def test_torch_tensors() -> None:
    torch = import_torch()
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn):
        assert both(torch.zeros(2, 3, dtype=dtype)) is not None
        assert both(torch.nn.Parameter(torch.zeros(4), requires_grad=False)) is not None
        for odd in (torch.zeros(2, 3, requires_grad=True), torch.zeros(2, 3).T, torch.zeros(3, device="meta")):
            assert _native.read_memory(odd, True) is None


# In calls.


def repeat(comm: hetcoll.Communicator) -> None:
    """After the first call of its kind nothing goes the slow path any more; arrays may be others every time."""
    kinds = [lambda n: np.full(n, comm.rank + 1.0, BFLOAT16), lambda n: Tensor(np.full(n, comm.rank + 1.0, np.float32))]
    core = comm._core
    launch = core.launch
    for new in kinds:
        core.__dict__["launch"] = launch
        comm.allreduce(new(4))
        comm.allreduce(new(50_000))
        core.__dict__["launch"] = None
        for count in (4, 50_000, 4):
            x = new(count)
            comm.allreduce(x)
            values = x.values if isinstance(x, Tensor) else x
            assert (values.astype(np.float64) == 3).all()
    x = np.ones(4, BFLOAT16)
    core.__dict__["launch"] = launch
    comm.allreduce(x)
    x.resize(9, refcheck=False)
    x[:] = 1
    comm.allreduce(x)
    assert (x.astype(np.float64) == 2).all()


def test_repeated_calls(launch: Launch) -> None:
    launch(2).run(repeat)


def send_one_and_fail(comm: hetcoll.Communicator, other: int) -> None:
    comm.send(np.zeros(4), other)
    comm.send(np.zeros(4), -1)


def exchange_in_groups(comm: hetcoll.Communicator) -> None:
    """Messages in groups: known ones, new ones, and both; those to one rank keep their order."""
    other = 1 - comm.rank
    host = comm._host
    exchange = host.exchange
    for turn in range(4):
        host.__dict__["exchange"] = exchange if turn in (0, 2) else None
        for counts in ([4], [4, 4, 4], [9, 4], *([[5]] if turn >= 2 else [])):
            outgoing = [np.full(n, 10.0 * i + comm.rank) for i, n in enumerate(counts)]
            incoming = [np.zeros(n) for n in counts]
            with comm.group():
                for into in incoming:
                    comm.recv(into, other)
                for values in outgoing:
                    comm.send(values, other)
            for i, into in enumerate(incoming):
                assert (into == 10.0 * i + other).all(), (turn, counts, i)
    with pytest.raises(hetcoll.BufferTypeError, match="peer: wanted a rank, got True"), comm.group():
        comm.send(np.zeros(4), True)
    with pytest.raises(hetcoll.ArgumentError, match=r"peer: wanted a rank in \[0, 2\)"), comm.group():
        comm.send(np.zeros(4), 1 << 40)
    with pytest.raises(hetcoll.ArgumentError, match="peer: "), comm.group():
        send_one_and_fail(comm, other)  # then nothing is sent
    comm.barrier()


@pytest.mark.parametrize("env", [{}, {"HETCOLL_TRANSPORT": "tcp", "HETCOLL_CHECK": "sampled"}], ids=["shm", "tcp"])
def test_groups(launch: Launch, env: dict[str, str]) -> None:
    """Also where sums are sampled, which messages are not."""
    launch(2, **env).run(exchange_in_groups)


class Recorder:
    """Has methods of each kind, and says which way their calls went."""

    def __init__(self, answer: object, rank: int = 0) -> None:
        self.answer, self._rank = answer, rank
        self.short: list[tuple[object, ...]] = []

    def _call(self, *words: object) -> object:
        self.short.append(words)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    @_native.fast_path(0)
    def reduced(self, sendbuf: object, recvbuf: object = None, op: str = "sum", *, stream: object = None) -> object:
        """Reduces."""
        return "long", sendbuf, recvbuf, op, stream

    @_native.fast_path(15)
    def exchanged(
        self, sendbuf: object, dest: object, recvbuf: object, source: object, *, stream: object = 0
    ) -> object:
        """Exchanges."""
        return "long", sendbuf, dest, recvbuf, source, stream

    @_native.fast_path(1)
    def gathered_by_all(self, sendbuf: object, recvbuf: object, *, timeout: float | None = None) -> object:
        return "long", sendbuf, recvbuf, timeout

    @_native.fast_path(4)
    def reduced_to(self, sendbuf: object, recvbuf: object = None, op: str = "sum", root: int = 0) -> object:
        return "long", sendbuf, recvbuf, op, root

    @_native.fast_path(5)
    def gathered(self, sendbuf: object, recvbuf: object = None, root: int = 0) -> object:
        return "long", sendbuf, recvbuf, root

    @_native.fast_path(6)
    def scattered(self, sendbuf: object = None, recvbuf: object = None, root: int = 0) -> object:
        return "long", sendbuf, recvbuf, root

    @_native.fast_path(10)
    def met(self, *, async_op: bool = False) -> object:
        return "long", async_op


def test_plain_calls_take_the_fast_path() -> None:
    recorder = Recorder("done")
    assert recorder.reduced("a") == recorder.reduced("a", "b") == recorder.reduced("a", "b", "max") == "done"
    assert recorder.short == [(0, "a", None, "sum", 0), (0, "a", "b", "sum", 0), (0, "a", "b", "max", 0)]
    bound = recorder.reduced
    assert bound("c") == Recorder.reduced(recorder, "c") == "done"
    recorder.short.clear()
    assert recorder.exchanged("a", 3, "b", 4) == recorder.exchanged("a", 0x7FFF, "b", 0) == "done"
    assert recorder.short == [(15, "a", "b", "sum", 3 << 16 | 4), (15, "a", "b", "sum", 0x7FFF << 16)]
    assert [words[4] for words in recorder.short] == [_native.ranks_key(3, 4), _native.ranks_key(0x7FFF, 0)]


@pytest.mark.parametrize(
    ("dest", "source"), [(-1, 0), (0, -1), (0x8000, 0), (0, 0x8000), (1 << 70, 0), (0, -(1 << 70))]
)
def test_no_pair_of_ranks_is_taken_for_another(dest: int, source: int) -> None:
    recorder = Recorder("done")
    assert recorder.exchanged("a", dest, "b", source) == ("long", "a", dest, "b", source, 0)
    assert recorder.short == []
    assert _native.ranks_key(dest, source) == -1


def test_named_arguments_take_the_fast_path_too() -> None:
    recorder = Recorder("done")
    assert recorder.reduced("a", op="max") == recorder.reduced(sendbuf="a", recvbuf="b") == "done"
    assert recorder.reduced("a", stream=None) == "done"  # what it is by default
    assert recorder.short == [(0, "a", None, "max", 0), (0, "a", "b", "sum", 0), (0, "a", None, "sum", 0)]
    recorder.short.clear()
    assert recorder.exchanged("a", dest=1, recvbuf="b", source=2) == recorder.met(async_op=False) == "done"
    assert recorder.short == [(15, "a", "b", "sum", 1 << 16 | 2), (10, bytearray(), None, "sum", 0)]


def test_buffers_of_the_root_are_dropped_elsewhere() -> None:
    there = b"recvbuf"  # a str is an op
    root, other = Recorder("done", rank=3), Recorder("done", rank=1)
    for recorder in (root, other):
        assert recorder.reduced_to("a", there, "max", 3) == recorder.reduced_to("a", root=3) == "done"
        assert recorder.gathered("a", "b", root=3) == recorder.scattered("a", "b", 3) == "done"
    assert root.short == [
        (4, "a", there, "max", 3),
        (4, "a", None, "sum", 3),
        (5, "a", "b", "sum", 3),
        (6, "a", "b", "sum", 3),
    ]
    assert other.short == [
        (4, "a", None, "max", 3),
        (4, "a", None, "sum", 3),
        (5, "a", None, "sum", 3),
        (6, "b", None, "sum", 3),
    ]
    assert other.gathered("a", root=3) == other.scattered(recvbuf="b", root=3) == "done"
    for op in ("max", ReduceOp.MAX):
        assert other.reduced_to("a", op, root=3) == ("long", "a", op, "sum", 3)
    assert root.gathered("a", root=3) == ("long", "a", None, 3)  # the slow path tells what is missing
    assert root.scattered("a", root=3) == ("long", "a", None, 3)


def test_all_other_calls_are_the_method_as_it_is_written() -> None:
    recorder = Recorder(None)
    assert recorder.reduced("a") == ("long", "a", None, "sum", None)  # the fast path would not have it
    assert len(recorder.short) == 1
    recorder.answer = "done"
    assert recorder.reduced("a", "b", stream=3) == ("long", "a", "b", "sum", 3)
    assert recorder.gathered_by_all("a", None) == ("long", "a", None, None)  # in place needs a part of its own
    assert recorder.gathered_by_all("a", "b", timeout=1.0) == ("long", "a", "b", 1.0)
    assert recorder.met(async_op=True) == ("long", True)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'sendbuf'"):
        recorder.reduced()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional arguments"):
        recorder.reduced("a", "b", "max", "more")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="multiple values for argument 'sendbuf'"):
        recorder.reduced("a", sendbuf="b")  # type: ignore[misc]
    with pytest.raises(TypeError, match="unexpected keyword argument 'bufs'"):
        recorder.reduced("a", bufs="b")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'self'"):
        Recorder.reduced(sendbuf="a")  # type: ignore[call-arg]
    assert recorder.exchanged("a", 1, "b", True) == ("long", "a", 1, "b", True, 0)
    assert recorder.exchanged("a", 1, "b", 1.0) == ("long", "a", 1, "b", 1.0, 0)
    assert recorder.exchanged("a", 1, "b", 1, stream=2) == ("long", "a", 1, "b", 1, 2)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'source'"):
        recorder.exchanged("a", 1, "b")  # type: ignore[call-arg]
    assert len(recorder.short) == 1
    recorder.answer = ValueError("from below")
    with pytest.raises(ValueError, match="from below"):
        recorder.reduced("a")


def test_the_method_looks_like_itself() -> None:
    method = hetcoll.Communicator.allreduce
    assert method.__name__ == "allreduce"
    assert (method.__doc__ or "").startswith("Reduce `sendbuf` over all ranks")
    assert list(inspect.signature(method).parameters)[:4] == ["self", "sendbuf", "recvbuf", "op"]
    with pytest.raises(AttributeError, match="nothing"):
        _ = method.nothing  # type: ignore[attr-defined]
