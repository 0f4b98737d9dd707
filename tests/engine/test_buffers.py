"""What counts as a buffer: the right address, count and type, or an error that says what was wanted and what came."""

from __future__ import annotations

import array
import re
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from installed import import_torch

from hetcoll.calls.buffers import Buffer, element_type, read_buffer
from hetcoll.errors import BufferTypeError
from hetcoll.types import DType

EXTENSIONS = [d for d in DType if hasattr(ml_dtypes, d.label)]
NATIVE = [d for d in DType if d not in EXTENSIONS]


def numpy_type(dtype: DType) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, dtype.label) if dtype in EXTENSIONS else dtype.label)


def read(obj: object, *, writable: bool = True) -> Buffer:
    return read_buffer(obj, "buf", writable=writable)


def address(values: np.ndarray[Any, Any]) -> int:
    return values.__array_interface__["data"][0]


class Exporter:
    """Speaks DLPack and nothing else, as a tensor of another library does."""

    def __init__(self, values: np.ndarray[Any, Any], device: int = 1, *, versioned: bool = True) -> None:
        self.values, self.device, self.versioned = values, device, versioned

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device, 0)

    def __dlpack__(self, **options: Any) -> object:
        if options and not self.versioned:
            raise TypeError("written before DLPack had versions")
        return self.values.__dlpack__(**options)


def label(value: DType) -> str:
    return value.label


@pytest.mark.parametrize("dtype", DType, ids=label)
@pytest.mark.parametrize("shape", [(7,), (2, 3, 4), (), (0,), (3, 0)], ids=str)
def test_numpy_arrays(dtype: DType, shape: tuple[int, ...]) -> None:
    values = np.zeros(shape, numpy_type(dtype))
    found = read(values)
    assert (found.ptr, found.count, found.dtype) == (address(values), values.size, dtype)
    assert (found.nbytes, found.device) == (values.nbytes, "cpu")
    assert found.owner is values


def test_a_part_of_an_array_begins_where_it_begins() -> None:
    whole = np.zeros((6, 4), np.float32)
    found = read(whole[2:5])
    assert (found.ptr, found.count) == (address(whole) + 2 * 16, 12)


@pytest.mark.parametrize(
    ("obj", "dtype", "count"),
    [
        (bytearray(5), DType.UINT8, 5),
        (memoryview(bytearray(12)).cast("f"), DType.FLOAT32, 3),
        (memoryview(bytearray(12)).cast("c"), DType.UINT8, 12),
        (memoryview(np.zeros((2, 3), np.complex64)), DType.COMPLEX64, 6),
        (memoryview(np.zeros(2, np.complex128)), DType.COMPLEX128, 2),
        (memoryview(np.zeros(3, np.bool_)), DType.BOOL, 3),
        (memoryview(np.zeros(3, np.float16)), DType.FLOAT16, 3),
        *((array.array(code, [1, 2, 3]), dtype, 3) for code, dtype in (
            ("b", DType.INT8), ("B", DType.UINT8), ("h", DType.INT16), ("H", DType.UINT16), ("i", DType.INT32),
            ("I", DType.UINT32), ("q", DType.INT64), ("Q", DType.UINT64), ("f", DType.FLOAT32), ("d", DType.FLOAT64),
        )),
        (array.array("l", [1]), DType.INT64 if array.array("l").itemsize == 8 else DType.INT32, 1),
    ],
    ids=lambda value: None if isinstance(value, (DType, int)) else type(value).__name__,
)  # fmt: skip
def test_the_buffer_protocol(obj: Any, dtype: DType, count: int) -> None:
    found = read(obj)
    assert (found.dtype, found.count) == (dtype, count)
    assert found.ptr == address(np.frombuffer(obj, np.uint8))
    assert found.nbytes == memoryview(obj).nbytes


def test_bytes_may_be_sent_only() -> None:
    data = b"abc"
    found = read(data, writable=False)
    assert (found.count, found.dtype, found.ptr) == (3, DType.UINT8, address(np.frombuffer(data, np.uint8)))
    with pytest.raises(BufferTypeError, match="buf: wanted a writable buffer, got a read-only bytes"):
        read(data)


def test_a_buffer_keeps_its_memory() -> None:
    data = bytearray(b"abcd")
    held = read(data)
    with pytest.raises(BufferError):
        data.extend(b"more")
    assert held.count == 4


@pytest.mark.parametrize(
    "empty", [bytearray(), array.array("d"), memoryview(b""), np.zeros(0)], ids=lambda each: type(each).__name__
)
def test_nothing_is_a_buffer_too(empty: Any) -> None:
    found = read(empty, writable=False)
    assert (found.count, found.nbytes) == (0, 0)


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("dtype", NATIVE, ids=label)
def test_dlpack(dtype: DType, versioned: bool) -> None:
    values = np.zeros((3, 5), numpy_type(dtype))[1:]
    exporter = Exporter(values, versioned=versioned)
    before = sys.getrefcount(values)
    found = read(exporter)
    assert (found.ptr, found.count, found.dtype, found.device) == (address(values), 10, dtype, "cpu")
    assert found.owner is exporter
    assert sys.getrefcount(values) == before, "the capsule's reference was not given back"


def test_dlpack_of_odd_shapes() -> None:
    assert read(Exporter(np.zeros(()))).count == 1
    assert read(Exporter(np.zeros((4, 0, 2)))).count == 0
    assert read(Exporter(np.zeros((5, 3))[2:3, ::1])).count == 3  # one row: its stride says nothing
    with pytest.raises(BufferTypeError, match=r"buf: wanted a C-contiguous tensor, got shape \(3, 2\)"):
        read(Exporter(np.zeros((2, 3)).T))


def test_dlpack_that_is_read_only() -> None:
    values = np.zeros(3)
    values.flags.writeable = False
    assert read(Exporter(values), writable=False).ptr == address(values)
    with pytest.raises(BufferTypeError, match="buf: wanted a writable array, got a read-only Exporter"):
        read(Exporter(values))


@pytest.mark.parametrize(("device", "text"), [(13, "managed memory is not supported"), (99, "an unknown device")])
def test_dlpack_on_another_device(device: int, text: str) -> None:
    with pytest.raises(BufferTypeError, match=f"buf: .*{text}"):
        read(Exporter(np.zeros(3), device))


def test_what_an_exporter_itself_refuses() -> None:
    with pytest.raises(BufferTypeError, match="buf: this Exporter cannot be exported by DLPack: "):
        read(Exporter(np.zeros(2, "datetime64[s]")))


def test_torch_tensors() -> None:
    torch = import_torch()
    tensor = torch.zeros(3, 4, dtype=torch.bfloat16)
    found = read(tensor)
    assert (found.ptr, found.count, found.dtype) == (tensor.data_ptr(), 12, DType.BFLOAT16)
    with pytest.raises(BufferTypeError, match="C-contiguous"):
        read(tensor.T)


def test_strided_arrays_are_refused() -> None:
    with pytest.raises(
        BufferTypeError, match=r"buf: wanted a C-contiguous array, got shape \(3,\) with strides \(16,\)"
    ):
        read(np.zeros(6)[::2])
    with pytest.raises(BufferTypeError, match="C-contiguous array, got shape"):
        read(np.asfortranarray(np.zeros((2, 3))))
    with pytest.raises(BufferTypeError, match=r"C-contiguous buffer, got strides \(2,\) bytes"):
        read(memoryview(bytearray(6))[::2])


def test_read_only_arrays_may_be_sent_only() -> None:
    values = np.zeros(3)
    values.flags.writeable = False
    assert read(values, writable=False).count == 3
    with pytest.raises(BufferTypeError, match="buf: wanted a writable array, got a read-only one"):
        read(values)


FOREIGN = np.dtype(np.int32).newbyteorder()


@pytest.mark.parametrize(
    "values",
    [
        np.zeros(3, FOREIGN), np.array([object()]), np.zeros(2, "datetime64[s]"), np.zeros(2, "U3"), np.zeros(2, "S3"),
        np.zeros(2, [("x", "i4")]), np.zeros(2, ml_dtypes.int4), np.zeros(2, np.longdouble),
    ],
    ids=lambda values: str(values.dtype),
)  # fmt: skip
def test_types_that_are_not_supported(values: Any) -> None:
    with pytest.raises(BufferTypeError) as caught:
        read(values)
    assert str(caught.value).startswith(f"buf: dtype {values.dtype} is not supported; supported: int8, uint8")


def test_formats_that_are_not_supported() -> None:
    with pytest.raises(BufferTypeError, match="buf: buffer format '>i' is not supported"):
        read(memoryview(np.zeros(3, ">i4")))
    with pytest.raises(BufferTypeError, match="buf: buffer format 'T"):
        read(memoryview(np.zeros(3, [("x", "i4"), ("y", "f4")])))


@pytest.mark.parametrize(
    "obj", [None, 3, 3.0, [1, 2], "text", object(), np.ndarray], ids=lambda each: type(each).__name__
)
def test_what_is_no_array(obj: object) -> None:
    with pytest.raises(BufferTypeError) as caught:
        read(obj)
    wanted = "buf: wanted an array (NumPy, DLPack, CUDA array interface or the buffer protocol)"
    hint = "numpy.asarray makes one of numbers; broadcast_object and its like take objects"
    assert str(caught.value) == f"{wanted}, got {type(obj).__name__}; {hint}"


def test_numpy_scalars_are_no_arrays() -> None:
    with pytest.raises(BufferTypeError, match="buf: wanted an array, got the NumPy scalar"):
        read(np.float32(1))


@pytest.mark.parametrize("mask", [[True, False], False], ids=["masked", "nothing masked"])
def test_masked_arrays_are_refused(mask: Any) -> None:
    """Their mask would be lost, and what it hides would count. Also where nothing is masked yet, as on other ranks."""
    values = np.ma.MaskedArray([1.0, 2.0], mask)
    for writable in (False, True):
        with pytest.raises(BufferTypeError, match=r"buf: wanted an array without a mask.* pass its data or filled\(\)"):
            read(values, writable=writable)
    assert read(values.data).count == read(values.filled(0)).count == 2


def test_overlap_is_of_bytes() -> None:
    whole = np.zeros(10, np.int32)
    first, second = read(whole[:5]), read(whole[5:])
    assert not first.overlaps(second)
    assert first.overlaps(read(whole[4:6]))
    assert first.overlaps(read(whole.view(np.uint8)[19:20]))
    for empty in (whole[3:][:0], whole[:0], whole[10:]):  # in the middle of what is not, or at its ends
        for other in (empty, whole):
            assert not read(empty).overlaps(read(other))
            assert not read(other).overlaps(read(empty))


@pytest.mark.parametrize("dtype", DType, ids=label)
def test_element_type(dtype: DType) -> None:
    assert element_type(dtype.label) == numpy_type(dtype)
    assert element_type(numpy_type(dtype)) == numpy_type(dtype)
    assert element_type(numpy_type(dtype).type) == numpy_type(dtype)


@pytest.mark.parametrize("dtype", ["datetime64[s]", "U3", object, np.longdouble, ml_dtypes.int4], ids=str)
def test_element_types_that_are_not_supported(dtype: Any) -> None:
    with pytest.raises(BufferTypeError, match=r"dtype: .* is not supported; supported: int8, uint8"):
        element_type(dtype)


@pytest.mark.parametrize("dtype", ["float7", 3, ("f4", "x", "y")], ids=str)
def test_what_is_no_element_type(dtype: Any) -> None:
    with pytest.raises(BufferTypeError, match=r"^dtype: .*; supported: int8, uint8"):
        element_type(dtype)


def test_a_type_by_its_number_and_one_whose_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert element_type(DType.INT16) == np.int16
    assert element_type(DType.BFLOAT16) == ml_dtypes.bfloat16
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    for dtype in ("bfloat16", DType.FLOAT8_E5M2):
        with pytest.raises(BufferTypeError, match=re.escape("pip install 'hetcoll[dtypes]'")):
            element_type(dtype)
