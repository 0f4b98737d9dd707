"""The handler that XLA calls, on frames made here: what it reads of them for GPUs, and what it refuses. No JAX, no GPU.

The structs are those of XLA's c_api.h, as native/python/xla_abi.h has them; test_jax.py compares these with the header.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import CFUNCTYPE, POINTER, Structure, addressof, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p
from typing import Any

import pytest

from hetcoll import _native
from hetcoll.calls.buffers import read_buffer
from hetcoll.types import DType

FLOAT32, BFLOAT16, INT4, TOKEN = 11, 16, 21, 17
EXECUTE, INITIALIZE = 3, 2
STREAM, DEVICE = 0x5EED, 3


class Base(Structure):
    _fields_ = (("struct_size", c_size_t), ("extension_start", c_void_p))


class Version(Base):
    _fields_ = (("major", c_int), ("minor", c_int))


class ErrorCreate(Base):
    _fields_ = (("message", c_char_p), ("errc", c_int))


class Get(Base):
    _fields_ = (("ctx", c_void_p), ("out", c_int64))  # a stream, or in the lower half a device's number


Function = CFUNCTYPE(c_void_p, c_void_p)


class Api(Base):
    _fields_ = (("version", Version), ("internal", c_void_p), ("functions", Function * 18))


class Buffer(Base):
    _fields_ = (("dtype", c_int), ("data", c_void_p), ("rank", c_int64), ("dims", POINTER(c_int64)))


class Values(Base):
    _fields_ = (("size", c_int64), ("types", POINTER(c_int)), ("values", POINTER(c_void_p)))


class Span(Structure):
    _fields_ = (("ptr", c_char_p), ("len", c_size_t))


class Attrs(Base):
    _fields_ = (
        ("size", c_int64), ("types", POINTER(c_int)), ("names", POINTER(POINTER(Span))), ("attrs", POINTER(c_void_p)),
    )  # fmt: skip


class CallFrame(Base):
    _fields_ = (
        ("api", POINTER(Api)), ("ctx", c_void_p), ("stage", c_int), ("args", Values), ("rets", Values),
        ("attrs", Attrs), ("future", c_void_p),
    )  # fmt: skip


class Metadata(Structure):
    _fields_ = (("struct_size", c_size_t), ("version", Version), ("traits", c_uint32), ("state", c_int64))


class MetadataExtension(Base):
    _fields_ = (("next", c_void_p), ("metadata", POINTER(Metadata)))


def sized(kind: type[Any], *fields: Any) -> Any:
    return kind(ctypes.sizeof(kind), None, *fields)


class Xla:
    """Stands in for XLA: makes frames, offers its functions, and keeps the errors that the handler makes."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.errors: list[tuple[int, str]] = []
        self.answer: Any = None
        get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
        get_pointer.restype, get_pointer.argtypes = c_void_p, (ctypes.py_object, c_char_p)
        capsule = _native.xla_handler(self._run)
        # The lock of the interpreter is let go of, as XLA does.
        self.handler = CFUNCTYPE(c_void_p, c_void_p)(get_pointer(capsule, b"xla._CUSTOM_CALL_TARGET"))
        unused = Function(lambda _: 0xBAD)
        self._functions = [unused] * 18  # in the order of XLA_FFI_Api
        self._functions[0] = Function(self._error)
        self._functions[4] = Function(lambda at: self._give(at, STREAM))
        self._functions[17] = Function(lambda at: self._give(at, DEVICE))
        self.api = sized(Api, sized(Version, 0, 3), None, (Function * 18)(*self._functions))
        self._alive: list[Any] = []

    def _run(self, *args: Any) -> Any:
        self.calls.append(args)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    def _error(self, at: int) -> int:
        made = ErrorCreate.from_address(at)
        self.errors.append((made.errc, made.message.decode()))
        return len(self.errors)

    @staticmethod
    def _give(at: int, value: int) -> None:
        Get.from_address(at).out = value

    def values(self, *buffers: tuple[int, tuple[int, ...]]) -> Any:
        """Arrays of (XLA's type, shape); their addresses are 0x1000 and on."""
        made = [sized(Buffer, dtype, 0x1000 * (i + 1), len(dims), (c_int64 * len(dims))(*dims))
                for i, (dtype, dims) in enumerate(buffers)]  # fmt: skip
        self._alive.append(made)
        n = len(made)
        return sized(Values, n, (c_int * n)(*[1] * n), (c_void_p * n)(*map(addressof, made)))

    def frame(self, call: bytes, args: Any, rets: Any, stage: int = EXECUTE, name: bytes = b"call") -> Any:
        names, texts = Span(name, len(name)), Span(call, len(call))
        self._alive.append((names, texts))
        attrs = sized(Attrs, 1, (c_int * 1)(4), (POINTER(Span) * 1)(ctypes.pointer(names)),
                      (c_void_p * 1)(addressof(texts)))  # fmt: skip
        return sized(CallFrame, ctypes.pointer(self.api), None, stage, args, rets, attrs, None)

    def call(self, frame: Any) -> Any:
        return self.handler(addressof(frame))


@pytest.fixture(scope="module")
def _xla() -> Xla:
    return Xla()


@pytest.fixture
def xla(_xla: Xla) -> Iterator[Xla]:
    _xla.calls.clear()
    _xla.errors.clear()
    _xla.answer = None
    return _xla


@pytest.mark.parametrize(("device", "kind"), [(b"cuda", "cuda"), (b"rocm", "rocm")])
def test_a_gpu_s_arrays_come_with_its_stream(xla: Xla, device: bytes, kind: str) -> None:
    text = device + b" 0 allgather at train.py:7"
    args, rets = xla.values((TOKEN, ()), (FLOAT32, (5, 2))), xla.values((TOKEN, ()), (FLOAT32, (3, 5, 2)))
    assert xla.call(xla.frame(text, args, rets)) is None
    [(call, x, y, stream)] = xla.calls
    assert (call, stream, xla.errors) == (text, STREAM, [])
    for memory, count in ((x, 10), (y, 30)):
        buffer = read_buffer(memory, "x", writable=True)
        assert (buffer.ptr, buffer.count, buffer.dtype) == (0x2000, count, DType.FLOAT32)
        assert buffer.place == f"{kind}:{DEVICE}"
        assert _native.read_memory(memory, True) is None  # not for the way of host memory


def test_host_arrays_need_no_stream(xla: Xla) -> None:
    args, rets = xla.values((BFLOAT16, (4,)), (TOKEN, ())), xla.values((TOKEN, ()))
    assert xla.call(xla.frame(b"cpu 0 sendrecv 1 -1 at a.py:1", args, rets)) is None
    [(_, x, y, stream)] = xla.calls
    assert (y, stream) == (None, 0)
    assert _native.read_memory(x, True) == (0x1000, 4, int(DType.BFLOAT16))
    assert read_buffer(x, "x", writable=True).place == "cpu"


def test_a_stream_that_xla_does_not_give(xla: Xla) -> None:
    frame = xla.frame(b"cuda 0 allgather at a.py:1", xla.values((FLOAT32, (1,))), xla.values((FLOAT32, (1,))))
    kept = xla.api.functions[4]
    xla.api.functions[4] = xla.api.functions[5]  # fails
    try:
        assert xla.call(frame) == 0xBAD  # XLA's own error, handed back
    finally:
        xla.api.functions[4] = kept
    assert not xla.calls


def test_what_the_runner_says_is_the_error(xla: Xla) -> None:
    frame = xla.frame(b"cpu 0 allreduce sum at a.py:1", xla.values((FLOAT32, (1,))), xla.values((FLOAT32, (1,))))
    xla.answer = (14, "rank 1 was lost")
    assert xla.call(frame) == 1
    xla.answer = RuntimeError("a mistake of ours")
    assert xla.call(frame) == 2
    assert xla.errors[0] == (14, "rank 1 was lost")
    code, text = xla.errors[1]
    assert code == 13
    assert "RuntimeError: a mistake of ours" in text


def test_frames_that_are_not_understood_are_refused(xla: Xla) -> None:
    one = xla.values((FLOAT32, (1,)))
    text = b"cpu 0 allreduce sum at a.py:1"
    longer = xla.values((FLOAT32, (1,)))
    longer.struct_size += 8
    short = xla.values((FLOAT32, (1,)))
    Buffer.from_address(short.values[0]).struct_size -= 8
    odd = xla.values((FLOAT32, (1,)))
    odd.types[0] = 2
    for frame, wanted in (
        (xla.frame(text, longer, one), "a call in a layout that hetcoll does not know"),
        (xla.frame(text, one, short), "an array in a layout that hetcoll does not know"),
        (xla.frame(text, odd, one), "something that is no array"),
        (xla.frame(text, one, one, stage=INITIALIZE), "a call of another stage than execute"),
        (xla.frame(text, one, one, name=b"cell"), "no attribute named call"),
        (xla.frame(text, xla.values((FLOAT32, (1,)), (FLOAT32, (1,))), one), "more than one array"),
        (xla.frame(text, xla.values((INT4, (1,))), one), "elements of type 21"),
    ):
        assert xla.call(frame) == len(xla.errors)
        assert xla.errors[-1] == (9, f"hetcoll: XLA passed {wanted}")
    assert not xla.calls


def test_xla_asks_for_the_version(xla: Xla) -> None:
    metadata = Metadata(ctypes.sizeof(Metadata), sized(Version, -1, -1), 0xFF, 0)
    extension = MetadataExtension(ctypes.sizeof(MetadataExtension), 1, None, ctypes.pointer(metadata))
    frame = sized(CallFrame)
    frame.extension_start = addressof(extension)
    assert xla.call(frame) is None
    assert (metadata.version.major, metadata.version.minor, metadata.traits) == (0, 3, 0)
