"""Formats of compressed edges against NumPy: bits, what is lost, the largest numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from codec_reference import KINDS, rounded, wire
from elements import NUMPY, assert_same, bit_patterns
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thorough import examples

from hetcoll import _native
from hetcoll.types import DType, Format

Array = np.ndarray[Any, np.dtype[Any]]

# What rounding takes at most: of the element itself, and of the largest of its block.
BOUNDS = {Format.BF16: (2**-8, 0), Format.FP8: (2**-4, 2**-17), Format.INT8: (0, 1 / 127)}


@pytest.fixture(params=["baseline", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.kernel_isa()
    if not _native.set_kernel_isa(request.param):
        pytest.skip(f"this processor lacks {request.param}")
    yield request.param
    _native.set_kernel_isa(before)


def native_round(x: Array, residual: Array | None, dtype: DType, form: Format) -> tuple[Array, Array]:
    y, lost = np.empty_like(x), np.zeros(len(x), np.float32) if residual is None else residual.copy()
    _native.round_elements(y.ctypes.data, x.ctypes.data, lost.ctypes.data, len(x), dtype, form)
    return y, lost


def native_wire(x: Array, dtype: DType, form: Format) -> bytes:
    codes = np.empty(2 * len(x) + 64, np.uint8)
    return codes[: _native.encode_elements(codes.ctypes.data, x.ctypes.data, len(x), dtype, form)].tobytes()


@pytest.mark.parametrize(("dtype", "form"), KINDS)
@settings(max_examples=examples(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(count=st.integers(0, 200), seed=st.integers(0, 1 << 20), residual=st.booleans(), clean=st.booleans())
def test_formats_are_those_of_numpy(
    isa: str, dtype: DType, form: Format, count: int, seed: int, residual: bool, clean: bool
) -> None:
    """Any bits; the codes are the same, too, and rounding what was rounded changes nothing."""
    x = bit_patterns(dtype, count, seed).view(NUMPY[dtype])
    with np.errstate(invalid="ignore", over="ignore"):
        wide = x.astype(np.float32)
        x = np.where(np.isfinite(wide), wide, 3).astype(x.dtype) if clean else x
        lost = np.random.default_rng(seed).standard_normal(count).astype(np.float32) if residual else None
        y, left = native_round(x, lost, dtype, form)
        want, want_left = rounded(x, lost, dtype, form)
        assert_same(dtype, y, want, x)
        assert_same(DType.FLOAT32, left, want_left, x)
    codes = native_wire(y, dtype, form)
    if clean or form is not Format.BF16:  # a NaN has many codes there
        assert codes == wire(y, dtype, form)
    assert len(codes) == count * (2 if form is Format.BF16 else 1) + (form is not Format.BF16) * -(-count // 32)
    back = np.empty_like(y)
    raw = np.frombuffer(codes + b"\0", np.uint8)
    _native.decode_elements(back.ctypes.data, raw.ctypes.data, count, dtype, form)
    assert_same(dtype, back, y, x)
    _native.round_elements(back.ctypes.data, y.ctypes.data, 0, count, dtype, form)
    assert_same(dtype, back, y, x)


@pytest.mark.parametrize(("dtype", "form"), KINDS)
def test_bounds_of_what_is_lost(isa: str, dtype: DType, form: Format) -> None:
    own, largest = BOUNDS[form]
    rng = np.random.default_rng(7)
    for exponent in (-12, 0, 12):
        x = (rng.standard_normal((500, 32)) * 2.0**exponent).astype(NUMPY[dtype])
        y, lost = native_round(x.reshape(-1), None, dtype, form)
        error = np.abs(x.astype(np.float64) - y.astype(np.float64).reshape(x.shape))
        bound = own * np.abs(x.astype(np.float64)) + largest * np.abs(x.astype(np.float64)).max(axis=1, keepdims=True)
        assert (error <= bound).all(), float((error / bound).max())
        assert (np.abs(lost.reshape(x.shape)) == error).all()


@pytest.mark.parametrize(("dtype", "form"), KINDS)
def test_the_largest_numbers_stay_finite(isa: str, dtype: DType, form: Format) -> None:
    top = float(ml_dtypes.finfo(NUMPY[dtype]).max)
    y, _ = native_round(np.array([top, -top, 1], NUMPY[dtype]), None, dtype, form)
    if form is Format.BF16:  # rounds up, as a conversion does
        assert np.isinf(y[:2].astype(np.float32)).all()
    else:
        assert np.allclose(y[:2].astype(np.float64), [top, -top], rtol=0.13)


def test_a_type_without_the_format() -> None:
    for dtype, form in ((DType.FLOAT16, Format.BF16), (DType.INT32, Format.INT8), (DType.FLOAT32, Format.NONE)):
        with pytest.raises(ValueError, match="no such format"):
            _native.encode_elements(0, 0, 0, dtype, form)
