"""NCCL and RCCL by their C functions, through ctypes: what the tests of the fakes call."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np

SUCCESS, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, IN_PROGRESS = 0, 2, 3, 4, 5, 7
SUM, PROD, MAX, MIN, AVG = range(5)
TYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16")
_UNDEFINED = -(2**31)
_P, _I, _Z = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t


class UniqueId(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 128),)


class Config(ctypes.Structure):
    """The head of ncclConfig_t: the library fills in what a caller's version lacks."""

    _fields_ = (("size", _Z), ("magic", ctypes.c_uint), ("version", ctypes.c_uint), ("blocking", _I))


class CollectiveError(Exception):
    """A call was refused: the library's number, the call, the library's words."""

    def __init__(self, code: int, call: str, why: str) -> None:
        super().__init__(code, call, why)
        self.code = code


class Library:
    """``libnccl.so.2`` or ``librccl.so``."""

    def __init__(self, vendor: str) -> None:
        self.c = ctypes.CDLL({"cuda": "libnccl.so.2", "hip": "librccl.so"}[vendor])
        self.c.ncclGetLastError.restype = ctypes.c_char_p
        self.c.ncclCommInitRank.argtypes = (_P, _I, UniqueId, _I)
        self.c.ncclCommInitRankConfig.argtypes = (_P, _I, UniqueId, _I, _P)

    def call(self, name: str, *args: Any) -> None:
        code = getattr(self.c, name)(*args)
        if code:
            raise CollectiveError(code, name, self.c.ncclGetLastError(None).decode())

    def unique_id(self) -> bytes:
        unique_id = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(unique_id))
        return ctypes.string_at(ctypes.addressof(unique_id), 128)


class Comm:
    """A communicator; collectives take addresses, counts and the names of types."""

    def __init__(self, library: Library, size: int, rank: int, unique_id: bytes, *, blocking: bool = True) -> None:
        self.library, self.size, self.rank = library, size, rank
        self.handle = _P()
        held = UniqueId.from_buffer_copy(unique_id)
        config = Config(ctypes.sizeof(Config), 0xCAFEBEEF, 22809, _UNDEFINED if blocking else 0)
        where = ctypes.byref(self.handle)
        try:
            library.call("ncclCommInitRankConfig", where, size, held, rank, ctypes.byref(config))
        except CollectiveError as error:
            if blocking or error.code != IN_PROGRESS:
                raise

    def call(self, name: str, *args: Any) -> None:
        """A collective whose last two arguments, communicator and stream, are `self` and the last of `args`."""
        *values, stream = args
        types: list[Any] = []
        for value in values:
            if isinstance(value, str):
                types.append(_I(TYPES.index(value)))
            else:
                types.append(_P(value) if value > 2**32 else _Z(value))
        self.library.call(name, *types, self.handle, _P(stream))

    def state(self) -> int:
        state = _I()
        self.library.call("ncclCommGetAsyncError", self.handle, ctypes.byref(state))
        return state.value

    def abort(self) -> None:
        handle, self.handle = self.handle, _P()
        self.library.call("ncclCommAbort", handle)

    def destroy(self) -> None:
        handle, self.handle = self.handle, _P()
        self.library.call("ncclCommDestroy", handle)

    def split(self, color: int, key: int) -> Comm | None:
        out = _P()
        self.library.call("ncclCommSplit", self.handle, _I(color), _I(key), ctypes.byref(out), None)
        if not out:
            return None
        part = Comm.__new__(Comm)
        part.library, part.handle = self.library, out
        return part

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        self.library.call("ncclGroupStart")
        yield
        self.library.call("ncclGroupEnd")

    @contextlib.contextmanager
    def scaled(self, factor: float, dtype: str) -> Iterator[int]:
        """A sum whose operands are multiplied by `factor` first."""
        op = _I()
        value = np.array([factor], dtype)
        kind = _I(TYPES.index(dtype))
        self.library.call("ncclRedOpCreatePreMulSum", ctypes.byref(op), _P(value.ctypes.data), kind, _I(1), self.handle)
        yield op.value
        self.library.call("ncclRedOpDestroy", op, self.handle)
