"""Any array as memory: address, count, element type, device.

Order of trial: NumPy arrays directly; then DLPack (dmlc/dlpack, ``dlpack.h``), which PyTorch, JAX and CuPy speak; then
Numba's `__cuda_array_interface__`, which does not say whose GPU it is; then the buffer protocol
(bytes-likes, memoryview, array.array). NumPy arrays of ml_dtypes types are known by their dtype's name, since neither
DLPack nor the buffer protocol can carry them. No array's library is asked to wait for anything: `streams` says how
calls are ordered after the work that fills a GPU's buffers.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

import hetcoll._native as _native

from ..errors import BufferTypeError
from ..types import DType

_DTYPES = tuple(DType)
_BY_NAME = {t.label: t for t in DType}
_FORMATS = {
    "f": DType.FLOAT32, "d": DType.FLOAT64, "e": DType.FLOAT16, "?": DType.BOOL, "b": DType.INT8, "B": DType.UINT8,
    "c": DType.UINT8, "h": DType.INT16, "H": DType.UINT16, "Zf": DType.COMPLEX64, "Zd": DType.COMPLEX128,
}  # fmt: skip
_INTEGERS = {("i", 4): DType.INT32, ("i", 8): DType.INT64, ("u", 4): DType.UINT32, ("u", 8): DType.UINT64}
_DLPACK = {  # (DLDataTypeCode, bits), dlpack.h 1.1
    (0, 8): DType.INT8, (0, 16): DType.INT16, (0, 32): DType.INT32, (0, 64): DType.INT64,
    (1, 8): DType.UINT8, (1, 16): DType.UINT16, (1, 32): DType.UINT32, (1, 64): DType.UINT64,
    (2, 16): DType.FLOAT16, (2, 32): DType.FLOAT32, (2, 64): DType.FLOAT64, (4, 16): DType.BFLOAT16,
    (5, 64): DType.COMPLEX64, (5, 128): DType.COMPLEX128, (6, 8): DType.BOOL,
    (10, 8): DType.FLOAT8_E4M3FN, (11, 8): DType.FLOAT8_E4M3FNUZ, (12, 8): DType.FLOAT8_E5M2,
    (13, 8): DType.FLOAT8_E5M2FNUZ,
}  # fmt: skip
_FIRST_USER_TYPE = 256  # numpy: NPY_USERDEF; below, the buffer protocol knows them
VENDOR_OF = {"cuda": "cuda", "rocm": "hip"}
"""By DLPack's name of a kind of GPU: whose they are (`vendors.devices`)."""
KIND_OF = {vendor: kind for kind, vendor in VENDOR_OF.items()}
_DEVICES = {1: "cpu", 2: "cuda", 3: "cpu", 10: "rocm", 11: "cpu"}  # DLDeviceType; 3 and 11 are pinned host memory
_CUDA_MANAGED = 13
_NO_WAITING = -1  # what `__dlpack__` takes for `stream`, array API standard
KNOWS_ARRAYS = _native.know_arrays(np.zeros((2, 3), np.float32))
"""Whether repeated calls read NumPy's arrays directly; a NumPy with other fields is read by the buffer protocol."""


class SupportsBuffer(Protocol):
    """Python's buffer protocol: bytes-likes, memoryview, array.array, NumPy arrays."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


class SupportsDLPack(Protocol):
    """What PyTorch, JAX, CuPy and NumPy speak. Libraries differ in the arguments."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __dlpack_device__(self) -> Any: ...


class SupportsCudaArrayInterface(Protocol):
    """Numba's protocol."""

    @property
    def __cuda_array_interface__(self) -> Any: ...


class SupportsHetcollBuffer(Protocol):
    """Arrays of this package, which say themselves where they lie."""

    def __hetcoll_buffer__(self) -> Any: ...


@dataclass(slots=True)  # not frozen: that takes a microsecond a call
class Buffer:
    """`count` elements of `dtype` from address `ptr` on, contiguous. `owner` keeps the memory alive."""

    ptr: int
    count: int
    dtype: DType
    owner: Any
    device: str = "cpu"  # or cuda, rocm
    index: int = 0
    """Of the GPU, in this process."""
    stream: int | None = None
    """On which the array's library worked when the buffer was read, where that came for free: see `streams`."""

    @property
    def place(self) -> str:
        """The device, for people."""
        return self.device if self.device == "cpu" else f"{self.device}:{self.index}"

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    def part(self, first: int, count: int) -> Buffer:
        """So many elements from `first` on."""
        at = self.ptr + first * self.dtype.itemsize
        return Buffer(at, count, self.dtype, self.owner, self.device, self.index, self.stream)

    def overlaps(self, other: Buffer) -> bool:
        if not (self.nbytes and other.nbytes):  # what is empty may point anywhere, as a slice of a slice does
            return False
        return self.ptr < other.ptr + other.nbytes and other.ptr < self.ptr + self.nbytes


Array = SupportsBuffer | SupportsDLPack | SupportsCudaArrayInterface | SupportsHetcollBuffer | Buffer
"""What calls take: C-contiguous, of a type in `DType`, and writable where they write."""


def element_type(dtype: Any) -> np.dtype[Any]:
    """`dtype`, a `DType` or what NumPy takes for one, as NumPy's; ml_dtypes' types need that package. BufferTypeError
    for what is not supported."""
    dtype = dtype.label if isinstance(dtype, DType) else dtype
    if isinstance(dtype, str) and dtype in _BY_NAME and not hasattr(np, dtype) and dtype != "bool":
        try:
            import ml_dtypes
        except ImportError:
            raise BufferTypeError(
                f"dtype: {dtype} needs the package ml_dtypes: pip install 'hetcoll[dtypes]'"
            ) from None
        dtype = getattr(ml_dtypes, dtype)
    try:
        found: np.dtype[Any] = np.dtype(dtype)
    except TypeError as error:
        raise BufferTypeError(f"dtype: {error}; supported: {', '.join(_BY_NAME)}") from None
    if found.name not in _BY_NAME or not found.isnative:
        raise BufferTypeError(f"dtype: {found} is not supported; supported: {', '.join(_BY_NAME)}")
    return found


def bytes_at(address: int, nbytes: int, owner: object = None) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Memory of this process, without a copy, as an array that keeps `owner`. Not by numpy.ctypeslib, which is loaded
    at its first use: a rank without descriptors cannot."""
    if nbytes == 0:
        return np.empty(0, np.uint8)
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    memory.owner = owner  # type: ignore[attr-defined]
    return np.frombuffer(memoryview(memory), np.uint8)


def array_of(buffer: Buffer) -> np.ndarray[Any, Any]:
    """A buffer of the host as NumPy has it."""
    return bytes_at(buffer.ptr, buffer.nbytes, buffer.owner).view(element_type(buffer.dtype))


def read_buffer(obj: Any, name: str, *, writable: bool) -> Buffer:
    """`obj` as a buffer. `name` is the parameter's name, for errors.

    Raises BufferTypeError where `obj` is no array, is not contiguous in C order, holds an unsupported type, or is
    read-only although the operation writes it.
    """
    if isinstance(obj, np.ndarray):
        return _from_numpy(obj, name, writable)
    if isinstance(obj, Buffer):
        return obj
    if (known := _native.read_tensor(obj)) is not None:
        address, count, dtype, kind, index, stream = known
        return Buffer(address, count, _DTYPES[dtype], obj, _DEVICES[kind], index, stream)
    if isinstance(obj, _native.Memory):
        return Buffer(obj.address, obj.count, _DTYPES[obj.dtype], obj, _DEVICES[obj.device_type], obj.device)
    if hasattr(obj, "__hetcoll_buffer__"):
        own: Buffer = obj.__hetcoll_buffer__()
        return own
    if hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__") and not isinstance(obj, type):
        return _from_dlpack(obj, name, writable)
    if hasattr(obj, "__cuda_array_interface__") and not isinstance(obj, type):
        return _from_cuda_interface(obj, name, writable)
    if isinstance(obj, np.generic):
        raise BufferTypeError(f"{name}: wanted an array, got the NumPy scalar {obj!r} (scalars cannot be written)")
    try:
        view = memoryview(obj)
    except TypeError:
        raise BufferTypeError(
            f"{name}: wanted an array (NumPy, DLPack, CUDA array interface or the buffer protocol), got"
            f" {type(obj).__name__}; numpy.asarray makes one of numbers; broadcast_object and its like take objects"
        ) from None
    except (BufferError, ValueError) as error:  # it was released, or closed
        raise BufferTypeError(f"{name}: this {type(obj).__name__} cannot be read: {error}") from error
    return _from_memoryview(view, name, writable)


def _from_numpy(array: np.ndarray[Any, Any], name: str, writable: bool) -> Buffer:
    if hasattr(array, "mask") and isinstance(array, np.ma.MaskedArray):  # the latter alone would import it
        raise BufferTypeError(f"{name}: wanted an array without a mask, which would be lost: pass its data or filled()")
    dtype = _BY_NAME.get(array.dtype.name)
    if dtype is None or not array.dtype.isnative:
        raise BufferTypeError(f"{name}: dtype {array.dtype} is not supported; supported: {', '.join(_BY_NAME)}")
    if not array.flags.c_contiguous:
        raise BufferTypeError(
            f"{name}: wanted a C-contiguous array, got shape {array.shape} with strides {array.strides} bytes;"
            " pass numpy.ascontiguousarray(...)"
        )
    if writable and not array.flags.writeable:
        raise BufferTypeError(f"{name}: wanted a writable array, got a read-only one")
    if array.dtype.num >= _FIRST_USER_TYPE:
        _native.know_dtype(array.dtype, dtype)
    return Buffer(array.ctypes.data, array.size, dtype, array)


def _from_memoryview(view: memoryview, name: str, writable: bool) -> Buffer:
    code = view.format.lstrip("@=<") if view.format.lstrip("@=<") else view.format
    dtype = _FORMATS.get(code)
    if dtype is None and code in "ilqILQn" and len(code) == 1:
        dtype = _INTEGERS.get(("i" if code.islower() else "u", view.itemsize))
    if dtype is None:
        raise BufferTypeError(f"{name}: buffer format {view.format!r} is not supported")
    if not view.c_contiguous:
        raise BufferTypeError(f"{name}: wanted a C-contiguous buffer, got strides {view.strides} bytes")
    if writable and view.readonly:
        raise BufferTypeError(f"{name}: wanted a writable buffer, got a read-only {type(view.obj).__name__}")
    address = np.frombuffer(view, np.uint8).ctypes.data if view.nbytes else 0
    return Buffer(address, view.nbytes // view.itemsize, dtype, view)


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class _VersionedTensor(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", _DLTensor),
    )  # fmt: skip


_READ_ONLY_FLAG = 1
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_capsule_valid = ctypes.pythonapi.PyCapsule_IsValid
_capsule_valid.argtypes = (ctypes.py_object, ctypes.c_char_p)


def _from_dlpack(obj: Any, name: str, writable: bool) -> Buffer:
    """The capsule is read and left unconsumed: its destructor gives the exporter's reference back."""
    try:
        kind, index = map(int, obj.__dlpack_device__())
    except (BufferError, RuntimeError, ValueError) as error:  # PyTorch's meta tensors have no memory
        raise BufferTypeError(f"{name}: this {type(obj).__name__} has no memory that DLPack knows: {error}") from error
    device = _DEVICES.get(kind)
    if device is None:
        raise BufferTypeError(f"{name}: {_foreign(kind)}")
    options = {} if device == "cpu" else {"stream": _stream_for_export(obj, device)}
    try:
        try:
            capsule = obj.__dlpack__(max_version=(1, 1), **options)
        except TypeError:  # written before DLPack had versions
            capsule = obj.__dlpack__(**options)
    except (BufferError, RuntimeError) as error:
        problem = f"{name}: this {type(obj).__name__} cannot be exported by DLPack: {error}"
        if "Current device" in str(error):  # PyTorch 2.11 and later
            problem += f" Call torch.cuda.set_device({index}) first"
        raise BufferTypeError(problem) from error
    read_only = False
    if _capsule_valid(capsule, b"dltensor_versioned"):
        versioned = _VersionedTensor.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        read_only = bool(versioned.flags & _READ_ONLY_FLAG)
        tensor = versioned.tensor
    else:
        tensor = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    dtype = _DLPACK.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        raise BufferTypeError(f"{name}: DLPack type (code {tensor.code}, {tensor.bits} bits) is not supported")
    shape = [tensor.shape[i] for i in range(tensor.ndim)]
    if tensor.strides and not _is_contiguous(shape, [tensor.strides[i] for i in range(tensor.ndim)]):
        raise BufferTypeError(f"{name}: wanted a C-contiguous tensor, got shape {tuple(shape)} with other strides")
    if writable and (read_only or type(obj).__module__.startswith("jax")):
        raise BufferTypeError(f"{name}: wanted a writable array, got a read-only {type(obj).__name__}")
    count = math.prod(shape)
    if not tensor.data and count:  # PyTorch's fake tensors say that they are on a CPU
        raise BufferTypeError(f"{name}: this {type(obj).__name__} has no memory: its address is 0")
    if type(obj).__module__ in ("torch", "torch.nn.parameter"):  # what else exports may be read-only
        _native.know_tensor_type(type(obj))
    return Buffer((tensor.data or 0) + tensor.byte_offset, count, dtype, obj, device, 0 if device == "cpu" else index)


def _foreign(kind: int) -> str:
    if kind == _CUDA_MANAGED:
        return "managed memory is not supported, since the driver moves it: pass a copy in device memory"
    return f"memory on an unknown device (DLPack type {kind}) is not supported"


def _stream_for_export(obj: Any, device: str) -> int:
    """JAX has no current stream and runs behind: it is made to order its work before the default stream's."""
    if type(obj).__module__.startswith("jax"):
        return 1 if device == "cuda" else 0
    return _NO_WAITING


def _from_cuda_interface(obj: Any, name: str, writable: bool) -> Buffer:
    """Version 3 and before. The driver knows which GPU's memory it is."""
    described = obj.__cuda_array_interface__
    try:
        dtype = _BY_NAME.get(np.dtype(described["typestr"]).name)
    except TypeError:
        dtype = None
    if dtype is None or described["typestr"].startswith(">"):
        raise BufferTypeError(f"{name}: type {described['typestr']!r} of a CUDA array interface is not supported")
    if described.get("mask") is not None:
        raise BufferTypeError(f"{name}: wanted an array without a mask")
    shape, strides, size = list(described["shape"]), described.get("strides"), dtype.itemsize
    if strides is not None and not _is_contiguous([*shape, size], [*strides, 1]):
        raise BufferTypeError(f"{name}: wanted a C-contiguous array, got shape {tuple(shape)} with other strides")
    address, read_only = described["data"] or (0, False)
    if writable and read_only:
        raise BufferTypeError(f"{name}: wanted a writable array, got a read-only {type(obj).__name__}")
    return Buffer(address or 0, math.prod(shape), dtype, obj, *place_of(address, math.prod(shape), name))


def place_of(address: int, count: int, name: str) -> tuple[str, int]:
    """Device and index of memory that does not say so itself. What is empty lies nowhere, that is on the first GPU."""
    from ..vendors.devices.owner import owner

    vendor, found = owner(address)
    if found.kind == "managed":
        raise BufferTypeError(f"{name}: {_foreign(_CUDA_MANAGED)}")
    if found.kind == "host":
        return "cpu", 0
    if found.kind == "unknown" and count > 0:
        raise BufferTypeError(f"{name}: no GPU's driver knows the memory at {address:#x}")
    return KIND_OF[vendor], max(0, found.device)


def _is_contiguous(shape: list[int], strides: list[int]) -> bool:
    if 0 in shape:
        return True
    expected = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True
