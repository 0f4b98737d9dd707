"""The element-wise kernels against NumPy and ml_dtypes: every type, operation and instruction set of this processor.

`native/tests/kernels_test.cc` compares the same kernels with a scalar reference, over every short count and alignment.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from elements import (
    AVERAGED,
    NARROW,
    NUMPY,
    PAIRS,
    Array,
    assert_same,
    bit_patterns,
    pair_id,
    part_type,
    special_values,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import examples

from hetcoll import _native
from hetcoll.types import COMPLEX, FLOATS, DType, ReduceOp, supports

ISAS = ("baseline", "avx2", "avx512")


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.kernel_isa()
    if not _native.set_kernel_isa(request.param):
        pytest.skip(f"this processor lacks {request.param}")
    yield request.param
    assert _native.set_kernel_isa(before)


def extreme(op: ReduceOp, a: Array, b: Array) -> Array:
    """NumPy's maximum or minimum, with -0 below +0."""
    result = (np.maximum if op is ReduceOp.MAX else np.minimum)(a, b)
    if np.issubdtype(a.dtype, np.integer):
        return result
    negative = np.signbit(a) & np.signbit(b) if op is ReduceOp.MAX else np.signbit(a) | np.signbit(b)
    return np.where((a == 0) & (b == 0), np.where(negative, -0.0, 0.0).astype(a.dtype), result)


def arithmetic(op: ReduceOp, a: Array, b: Array) -> Array:
    match op:
        case ReduceOp.SUM:
            return a + b
        case ReduceOp.PROD:
            return a * b
        case ReduceOp.MAX | ReduceOp.MIN:
            return extreme(op, a, b)
        case ReduceOp.LAND:
            return ((a != 0) & (b != 0)).astype(a.dtype)
        case ReduceOp.LOR:
            return ((a != 0) | (b != 0)).astype(a.dtype)
        case ReduceOp.LXOR:
            return ((a != 0) ^ (b != 0)).astype(a.dtype)
        case ReduceOp.BAND:
            return a & b
        case ReduceOp.BOR:
            return a | b
        case ReduceOp.BXOR:
            return a ^ b
    raise AssertionError(op)


BOOL_AS = {
    ReduceOp.SUM: ReduceOp.LOR, ReduceOp.MAX: ReduceOp.LOR, ReduceOp.BOR: ReduceOp.LOR, ReduceOp.PROD: ReduceOp.LAND,
    ReduceOp.MIN: ReduceOp.LAND, ReduceOp.BAND: ReduceOp.LAND, ReduceOp.BXOR: ReduceOp.LXOR,
}  # fmt: skip


def reference(dtype: DType, op: ReduceOp, a: Array, b: Array) -> Array:
    with np.errstate(all="ignore"):
        if dtype is DType.BOOL:
            return arithmetic(BOOL_AS.get(op, op), a, b)
        if dtype in NARROW:
            return arithmetic(op, a.astype(np.float32), b.astype(np.float32)).astype(a.dtype)
        if dtype in COMPLEX and op is ReduceOp.PROD:
            (ar, ai), (br, bi) = a.reshape(-1, 2).T, b.reshape(-1, 2).T
            # NumPy's own product may contract; by parts it cannot.
            return np.stack([ar * br - ai * bi, ar * bi + ai * br], axis=1).reshape(-1)
        return arithmetic(op, a, b)


def reference_scale(dtype: DType, x: Array, divisor: int) -> Array:
    with np.errstate(all="ignore"):
        if dtype in NARROW:
            return (x.astype(np.float32) / np.float32(divisor)).astype(x.dtype)
        if dtype in FLOATS | COMPLEX:
            return x / x.dtype.type(divisor)
        return np.array([(abs(v) // divisor) * (-1 if v < 0 else 1) for v in x.tolist()], dtype=x.dtype)


def test_the_widest_instruction_set_of_the_processor_is_chosen() -> None:
    if platform.machine() != "x86_64":
        pytest.skip("other processors have one set of kernels")
    text = Path("/proc/cpuinfo").read_text()
    flags = set(text.partition("\nflags")[2].partition("\n")[0].split())
    avx2 = {"avx2", "f16c"} <= flags
    avx512 = avx2 and {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags
    assert _native.kernel_isa() == ("avx512" if avx512 else "avx2" if avx2 else "baseline")


def kept(*arrays: Array) -> tuple[Array, ...]:
    """For the tests of all instruction sets, none of which may change them."""
    for array in arrays:
        array.flags.writeable = False
    return arrays


@functools.cache
def reduced(dtype: DType, op: ReduceOp, count: int) -> tuple[Array, ...]:
    """Two operands and what they make."""
    a, b = bit_patterns(dtype, count, 1), bit_patterns(dtype, count, 2)
    return kept(a, b, reference(dtype, op, a, b))


@pytest.mark.parametrize("dtype", DType, ids=pair_id)
def test_reduce_matches_numpy(isa: str, dtype: DType) -> None:
    for op in (op for each, op in PAIRS if each is dtype):
        try:
            check_reduce(dtype, op)
        except AssertionError as error:
            error.add_note(op.label)
            raise


def check_reduce(dtype: DType, op: ReduceOp) -> None:
    for count in (0, 1, 2, 3, 7, 15, 31, 64, 257, 4099):
        a, b, want = reduced(dtype, op, count)
        for stream in (False, True):
            apart, over_a, over_b = np.full_like(a, 1), a.copy(), b.copy()
            _native.reduce_bytes(apart.view(np.uint8), a.view(np.uint8), b.view(np.uint8), dtype, op, stream)
            _native.reduce_bytes(over_a.view(np.uint8), over_a.view(np.uint8), b.view(np.uint8), dtype, op, stream)
            _native.reduce_bytes(over_b.view(np.uint8), a.view(np.uint8), over_b.view(np.uint8), dtype, op, stream)
            for got in (apart, over_a, over_b):
                assert_same(dtype, got, want, a, b)


@functools.cache
def scaled(dtype: DType, count: int | None, divisor: int) -> tuple[Array, ...]:
    """So many elements, or every code, and their quotients."""
    x = all_codes(dtype) if count is None else bit_patterns(dtype, count, 3)
    return kept(x, reference_scale(dtype, x, divisor))


def check_scale(dtype: DType, count: int | None, divisors: tuple[int, ...]) -> None:
    for divisor in divisors:
        x, want = scaled(dtype, count, divisor)
        got = x.copy()
        _native.scale_bytes(got.view(np.uint8), dtype, divisor)
        assert_same(dtype, got, want, x, np.full(x.shape, divisor))


@pytest.mark.parametrize("dtype", AVERAGED, ids=pair_id)
def test_scale_matches_numpy(isa: str, dtype: DType) -> None:
    for count in (0, 1, 5, 31, 1003):
        check_scale(dtype, count, (1, 2, 3, 7, 8, 100, 1000, 16777217, 3000000000))


def test_undefined_pairs_are_refused() -> None:
    pairs = [(dtype, op) for dtype in DType for op in ReduceOp if not supports(dtype, op)]
    assert len(pairs) > 20
    for dtype, op in pairs:
        x = bytearray(dtype.itemsize)
        with pytest.raises(ValueError, match="not defined"):
            _native.reduce_bytes(x, bytes(x), bytes(x), dtype, op, False)


def all_codes(dtype: DType) -> Array:
    return np.arange(1 << (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}").view(NUMPY[dtype])


@pytest.mark.parametrize("dtype", NARROW, ids=pair_id)
def test_every_code_survives_multiplication_by_one(isa: str, dtype: DType) -> None:
    """Decoding and encoding are each other's inverse, on every code."""
    codes = all_codes(dtype)
    got = np.zeros_like(codes)
    one = np.ones_like(codes)
    _native.reduce_bytes(got.view(np.uint8), codes.view(np.uint8), one.view(np.uint8), dtype, ReduceOp.PROD, False)
    assert_same(dtype, got, codes, codes)


@functools.cache
def rounded(dtype: DType, op: ReduceOp) -> tuple[Array, ...]:
    """Two operands and what they make."""
    codes = all_codes(dtype)
    if dtype.itemsize == 1:
        a, b = np.repeat(codes, 256), np.tile(codes, 256)
    else:
        with np.errstate(invalid="ignore"):  # of signalling NaNs, on some processors
            exact = codes.astype(np.float32)
        with np.errstate(all="ignore"):
            near = [(exact * np.float32(2.0**-k)).astype(codes.dtype) for k in (1, 7, 8, 9, 10, 11, 12)]
        a = np.tile(codes, len(near) + 1)
        b = np.concatenate([*near, np.random.default_rng(5).permutation(codes)])
    return kept(a, b, reference(dtype, op, a, b))


@pytest.mark.parametrize("dtype", NARROW, ids=pair_id)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MAX, ReduceOp.MIN], ids=pair_id)
def test_every_code_rounds_as_ml_dtypes(isa: str, dtype: DType, op: ReduceOp) -> None:
    """Every pair of 8-bit codes; every 16-bit code with partners that make ties, carries, overflow and underflow."""
    a, b, want = rounded(dtype, op)
    got = np.zeros_like(a)
    _native.reduce_bytes(got.view(np.uint8), a.view(np.uint8), b.view(np.uint8), dtype, op, False)
    assert_same(dtype, got, want, a, b)


@pytest.mark.parametrize("dtype", NARROW, ids=pair_id)
def test_every_code_divides_as_ml_dtypes(isa: str, dtype: DType) -> None:
    check_scale(dtype, None, (2, 3, 5, 16, 31, 1024))


@st.composite
def operands(draw: st.DrawFn) -> tuple[DType, ReduceOp, Array, Array]:
    dtype, op = draw(st.sampled_from(PAIRS))
    part = part_type(dtype)
    bits = st.one_of(st.sampled_from(special_values(dtype)), st.integers(0, (1 << 8 * part.itemsize) - 1))
    per_element = dtype.itemsize // part.itemsize
    count = draw(st.integers(1, 40)) * per_element
    pair = [np.array(draw(st.lists(bits, min_size=count, max_size=count)), f"u{part.itemsize}") for _ in range(2)]
    return dtype, op, pair[0].view(part), pair[1].view(part)


@settings(max_examples=examples(150))
@given(operands())
def test_any_bits_reduce_as_numpy_and_alike_on_all_instruction_sets(case: tuple[DType, ReduceOp, Array, Array]) -> None:
    dtype, op, a, b = case
    want = reference(dtype, op, a, b)
    before = _native.kernel_isa()
    try:
        for name in ISAS:
            if _native.set_kernel_isa(name):
                got = np.zeros_like(a)
                _native.reduce_bytes(got.view(np.uint8), a.view(np.uint8), b.view(np.uint8), dtype, op, False)
                assert_same(dtype, got, want, a, b)
    finally:
        assert _native.set_kernel_isa(before)


def test_the_order_of_operands_never_shows_in_extremes() -> None:
    """Ranks that reduce in different orders must get the same bits: of zeros and of NaNs too."""
    for dtype in FLOATS:
        bits = np.array(special_values(dtype), f"u{dtype.itemsize}")
        a, b = np.repeat(bits, bits.size), np.tile(bits, bits.size)
        for op in (ReduceOp.MAX, ReduceOp.MIN):
            forward, backward = np.zeros_like(a), np.zeros_like(a)
            _native.reduce_bytes(forward.view(np.uint8), a.view(np.uint8), b.view(np.uint8), dtype, op, False)
            _native.reduce_bytes(backward.view(np.uint8), b.view(np.uint8), a.view(np.uint8), dtype, op, False)
            np.testing.assert_array_equal(forward, backward, err_msg=f"{dtype.label} {op.label}")


def test_an_unknown_instruction_set_is_refused() -> None:
    before = _native.kernel_isa()
    assert not _native.set_kernel_isa("mmx")
    assert _native.kernel_isa() == before
