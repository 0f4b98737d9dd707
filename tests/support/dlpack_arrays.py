"""Arrays of an imitated library, down to DLPack: `Array` exports as most do, `Quick` as PyTorch's do."""

from __future__ import annotations

import ctypes
from typing import Any

from hetcoll.types import DType

CODES = {
    DType.FLOAT16: (2, 16), DType.FLOAT32: (2, 32), DType.FLOAT64: (2, 64), DType.BFLOAT16: (4, 16),
    DType.COMPLEX64: (5, 64), DType.COMPLEX128: (5, 128), DType.BOOL: (6, 8), DType.FLOAT8_E4M3FN: (10, 8),
    DType.FLOAT8_E4M3FNUZ: (11, 8), DType.FLOAT8_E5M2: (12, 8), DType.FLOAT8_E5M2FNUZ: (13, 8),
    DType.INT8: (0, 8), DType.INT16: (0, 16), DType.INT32: (0, 32), DType.INT64: (0, 64),
    DType.UINT8: (1, 8), DType.UINT16: (1, 16), DType.UINT32: (1, 32), DType.UINT64: (1, 64),
}  # fmt: skip
_Shape = ctypes.POINTER(ctypes.c_int64)
_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", _Shape), ("strides", _Shape), ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p), ("deleter", _Deleter),
        ("flags", ctypes.c_uint64), ("tensor", _Tensor),
    )  # fmt: skip


def _capsule(held: ctypes.Structure, name: bytes) -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(ctypes.addressof(held), name, None)


class Array:
    """On GPU `index` of a kind that DLPack has a number for. `options`: what its `__dlpack__` was called with."""

    def __init__(
        self, kind: int = 2, index: int = 0, dtype: DType = DType.FLOAT32, shape: tuple[int, ...] = (4,),
        strides: tuple[int, ...] | None = None, *, versioned: bool = True, read_only: bool = False,
        address: int = 0x7000,
    ) -> None:  # fmt: skip
        self.device, self.versioned, self.options = (kind, index), versioned, dict[str, Any]()
        code, bits = CODES[dtype]
        dimensions = (ctypes.c_int64 * len(shape))(*shape)
        steps = None if strides is None else (ctypes.c_int64 * len(strides))(*strides)
        tensor = _Tensor(address - 8, kind, index, len(shape), code, bits, 1, dimensions, steps, 8)
        if versioned:
            self.held: ctypes.Structure = _Versioned(1, 1, None, _Deleter(), int(read_only), tensor)
        else:
            self.held = _Managed(tensor, None, _Deleter())

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **options: Any) -> Any:
        if "max_version" in options and not self.versioned:
            raise TypeError("written before DLPack had versions")
        self.options = options
        return _capsule(self.held, b"dltensor_versioned" if self.versioned else b"dltensor")


_Export = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_Tensor))
_Current = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


class _Exchange(ctypes.Structure):
    """dlpack.h 1.3: DLPackExchangeAPI."""

    _fields_ = (
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("previous", ctypes.c_void_p),
        ("functions", ctypes.c_void_p * 3), ("export", _Export), ("stream", _Current),
    )  # fmt: skip


def _export(array: Any, out: Any) -> int:
    ctypes.memmove(out, ctypes.addressof(array.held.tensor), ctypes.sizeof(_Tensor))
    return 0


def _stream(kind: int, index: int, out: Any) -> int:
    out[0] = Quick.streams.get((kind, index), 0x1000 * kind + index)
    return -1 if index == 7 else 0


_NAME = b"dlpack_exchange_api"  # which the capsule does not keep
_TABLE = _Exchange(1, 3, None, (ctypes.c_void_p * 3)(), _Export(_export), _Current(_stream))


class Quick(Array):
    """As PyTorch's tensors are, since 2.10."""

    __module__ = "torch"
    __dlpack_c_exchange_api__ = _capsule(_TABLE, _NAME)
    requires_grad = False
    streams: dict[tuple[int, int], int] = {}  # noqa: RUF012 (the library's current ones, by device)
