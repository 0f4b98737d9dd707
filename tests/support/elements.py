"""Arrays of any data type for tests of kernels: random bits, the values where formats bend, and comparison."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from hetcoll.types import COMPLEX, FLOATS, DType, ReduceOp, supports

Array = np.ndarray[Any, np.dtype[Any]]

NUMPY: dict[DType, np.dtype[Any]] = {
    d: np.dtype(getattr(ml_dtypes, d.label, None) or ("bool" if d is DType.BOOL else d.label)) for d in DType
}
NARROW = sorted(d for d in FLOATS if d not in (DType.FLOAT32, DType.FLOAT64))
PAIRS = [(d, op) for d in DType for op in ReduceOp if supports(d, op) and op is not ReduceOp.AVG]
AVERAGED = [d for d in DType if supports(d, ReduceOp.AVG)]


def pair_id(value: DType | ReduceOp) -> str:
    return value.label


def part_type(dtype: DType) -> np.dtype[Any]:
    """The type whose elements are compared: of complex numbers, their halves; of bool, its bytes."""
    if dtype is DType.BOOL:
        return np.dtype(np.uint8)
    return {DType.COMPLEX64: np.dtype(np.float32), DType.COMPLEX128: np.dtype(np.float64)}.get(dtype, NUMPY[dtype])


def integers_like(x: Array) -> Array:
    return x.view(f"u{x.dtype.itemsize}")


def assert_same(dtype: DType, got: Array, want: Array, *inputs: Array) -> None:
    """The same bits, but that any NaN is as good as another."""
    same = integers_like(got) == integers_like(want)
    if dtype in FLOATS | COMPLEX:
        with np.errstate(invalid="ignore"):  # signalling NaNs
            same |= np.isnan(got) & np.isnan(want)
    if not same.all():
        i = int(np.argmin(same))
        raise AssertionError(f"element {i}: {got[i]!r}, not {want[i]!r}, from {[x[i] for x in inputs]}")


def bit_patterns(dtype: DType, count: int, seed: int) -> Array:
    """Random bits, and among them small numbers that meet without overflow."""
    rng = np.random.default_rng(seed + 100 * dtype)
    part = part_type(dtype)
    parts = count * dtype.itemsize // part.itemsize
    x = np.frombuffer(rng.bytes(count * dtype.itemsize), part).copy()
    if dtype is DType.BOOL:
        return np.where(rng.random(parts) < 0.5, x, 0).astype(np.uint8)
    small = rng.integers(-20, 20, parts) if dtype in FLOATS | COMPLEX else rng.integers(0, 20, parts)
    return np.where(rng.random(parts) < 0.4, small.astype(part), x)


def special_values(dtype: DType) -> list[int]:
    """The bit patterns where formats bend: zeros, the smallest and largest numbers, infinities, NaNs, one."""
    bits = 8 * part_type(dtype).itemsize
    ends = [0, 1, 2, (1 << bits - 1) - 1, 1 << bits - 1, (1 << bits - 1) + 1, (1 << bits) - 1]
    if dtype not in FLOATS | COMPLEX:
        return ends
    info = ml_dtypes.finfo(part_type(dtype))
    one = np.ones(1, part_type(dtype))
    numbers = [info.max, info.min, info.smallest_normal, info.smallest_subnormal, one[0], -one[0]]
    edges = [int(integers_like(np.array([v], part_type(dtype)))[0]) for v in numbers]
    around = [(e + step) % (1 << bits) for e in edges for step in (-1, 0, 1)]
    return ends + around
