"""Values that make mistakes visible, and what the collectives must make of them.

Rank r's input is a stream of small integers: element i of it is ``table(r)[i % PERIOD]``, drawn anew for every rank
and every fill. PERIOD is a prime, so a chunk that lands at the wrong place, comes from the wrong rank or is left over
from an earlier call does not look like the right one. The integers are so small that every partial sum of them is
exact in the element type, whatever the order of the additions; so results are compared for equality, element by
element. The only exception is an average of floats, where the quotient may be rounded: one unit in the last place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import DType, ReduceOp
from ..types import COMPLEX, FLOATS

PERIOD = 65521
_LARGEST = (1 << 20) - 1
_MOST_TWOS = 6  # 2**6 is exact in, and inside the range of, every type
_SIGNIFICAND = {  # bits, with the hidden one
    DType.FLOAT16: 11, DType.BFLOAT16: 8, DType.FLOAT32: 24, DType.FLOAT64: 53, DType.COMPLEX64: 24,
    DType.COMPLEX128: 53, DType.FLOAT8_E4M3FN: 4, DType.FLOAT8_E4M3FNUZ: 4, DType.FLOAT8_E5M2: 3,
    DType.FLOAT8_E5M2FNUZ: 3,
}  # fmt: skip
_UNSIGNED = frozenset({DType.UINT8, DType.UINT16, DType.UINT32, DType.UINT64, DType.BOOL})

Array = NDArray[Any]


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """The NumPy type of `dtype`. bfloat16 and fp8 come from ml_dtypes: ImportError without it."""
    try:
        found: np.dtype[Any] = np.dtype(dtype.label)
    except TypeError:
        import ml_dtypes

        found = np.dtype(getattr(ml_dtypes, dtype.label))
    return found


def exact_limit(dtype: DType) -> int:
    """The largest N, up to 2**20 - 1, such that `dtype` holds every integer from 0 to N exactly."""
    if dtype is DType.BOOL:
        return 1
    if dtype in FLOATS | COMPLEX:
        return min(_LARGEST, 1 << _SIGNIFICAND[dtype])
    return min(_LARGEST, (1 << (8 * dtype.itemsize - (dtype not in _UNSIGNED))) - 1)


@dataclass(frozen=True, slots=True)
class Pattern:
    """The inputs of all `size` ranks for one call, and their reduction. `seed` makes one fill differ from the next."""

    dtype: DType
    size: int
    seed: int
    redop: ReduceOp | None = None

    def table(self, rank: int) -> Array:
        """One period of `rank`'s input, in the element type."""
        return self._typed(self._integers(rank))

    def reduced(self) -> Array:
        """One period of the reduction of all ranks' inputs, in the element type."""
        redop = _on_bool(self.redop) if self.dtype is DType.BOOL else self.redop
        assert redop is not None
        total = self._integers(0)
        for rank in range(1, self.size):
            total = _combine(redop, total, self._integers(rank))
        if redop is ReduceOp.AVG:
            exact: Array = total / self.size
            total = exact if self.dtype in FLOATS | COMPLEX else np.trunc(exact)
        elif redop in (ReduceOp.LAND, ReduceOp.LOR, ReduceOp.LXOR):
            total = (total != 0).astype(np.int64)
        return self._typed(total)

    def _integers(self, rank: int) -> Array:
        """One period of `rank`'s input as integers."""
        random = np.random.default_rng([self.seed, rank])
        signed = self.dtype not in _UNSIGNED
        limit = exact_limit(self.dtype)
        turn = (np.arange(PERIOD) + rank) % self.size  # takes each of 0..size-1 on exactly one rank
        redop = _on_bool(self.redop) if self.dtype is DType.BOOL else self.redop
        if redop in (ReduceOp.LAND, ReduceOp.BAND):  # one rank decides each element, else nearly all were 0
            return np.where(turn == 0, random.integers(0, _decisive(redop, limit), PERIOD), limit)
        if redop in (ReduceOp.LOR, ReduceOp.BOR):
            return np.where(turn == 0, random.integers(0, _decisive(redop, limit), PERIOD), 0)
        if redop is ReduceOp.LXOR:
            return random.integers(0, 2, PERIOD)
        if redop is ReduceOp.PROD:
            values = np.where(turn < _MOST_TWOS, random.integers(1, 3, PERIOD), 1)
            return values * random.choice((-1, 1), PERIOD) if signed else values
        adds = redop in (ReduceOp.SUM, ReduceOp.AVG)
        most = max(1, limit // self.size) if adds else limit
        values = random.integers(-most if signed else 0, most + 1, PERIOD)
        return np.where(turn < limit, values, 0) if adds else values

    def _typed(self, values: Array) -> Array:
        kind = numpy_dtype(self.dtype)
        if self.dtype in COMPLEX and self.redop is not ReduceOp.PROD:
            return (values + 1j * np.roll(values, 1)).astype(kind)
        return values.astype(kind)


def _on_bool(redop: ReduceOp | None) -> ReduceOp | None:
    """NumPy's meaning of an op on bool: SUM and MAX are or, PROD and MIN are and."""
    if redop in (ReduceOp.SUM, ReduceOp.MAX):
        return ReduceOp.LOR
    return ReduceOp.LAND if redop in (ReduceOp.PROD, ReduceOp.MIN) else redop


def _decisive(redop: ReduceOp, limit: int) -> int:
    """The end of the range to draw from: zero must be as likely as not where only zero or not counts."""
    return 2 if redop in (ReduceOp.LAND, ReduceOp.LOR) else limit + 1


def _combine(redop: ReduceOp, a: Array, b: Array) -> Array:
    match redop:
        case ReduceOp.SUM | ReduceOp.AVG:
            return a + b
        case ReduceOp.PROD:
            return a * b
        case ReduceOp.MAX:
            return np.maximum(a, b)
        case ReduceOp.MIN:
            return np.minimum(a, b)
        case ReduceOp.LAND:
            return np.logical_and(a, b).astype(np.int64)
        case ReduceOp.LOR:
            return np.logical_or(a, b).astype(np.int64)
        case ReduceOp.LXOR:
            return np.logical_xor(a, b).astype(np.int64)
        case ReduceOp.BAND:
            return a & b
        case ReduceOp.BOR:
            return a | b
        case ReduceOp.BXOR:
            return a ^ b


@dataclass(frozen=True, slots=True)
class Piece:
    """`count` elements of a buffer from `start` on, which hold a stream from its element `phase` on."""

    start: int
    count: int
    table: Array
    phase: int = 0

    def runs(self) -> list[tuple[slice, Array]]:
        """The piece as runs of at most one period: where each lies in the buffer, and what it must hold."""
        period = np.roll(self.table, -(self.phase % PERIOD))
        stop = self.start + self.count
        begins = range(self.start, stop, PERIOD)
        return [(slice(begin, min(begin + PERIOD, stop)), period[: min(PERIOD, stop - begin)]) for begin in begins]


def write(buffer: Array, pieces: Sequence[Piece]) -> None:
    """Put the pieces into `buffer`."""
    for piece in pieces:
        for where, values in piece.runs():
            buffer[where] = values


def count_wrong(buffer: Array, pieces: Sequence[Piece], *, rounded: bool = False) -> int:
    """How many elements of `buffer` differ from the pieces. `rounded` allows one unit in the last place."""
    wrong = 0
    for piece in pieces:
        for where, values in piece.runs():
            got = buffer[where]
            if got.dtype == np.bool_:  # compare the bytes: a bool that is neither 0 nor 1 is wrong, too
                got, values = got.view(np.uint8), values.view(np.uint8)
            differs = got != values
            if rounded and differs.any():
                differs &= ~_within_one_ulp(got, values)
            wrong += int(np.count_nonzero(differs))
    return wrong


def _within_one_ulp(got: Array, want: Array) -> Array:
    if got.dtype.kind == "c":
        return _within_one_ulp(got.real, want.real) & _within_one_ulp(got.imag, want.imag)
    bits = np.dtype(f"i{got.dtype.itemsize}")
    distance = np.ascontiguousarray(got).view(bits).astype(np.int64) - np.ascontiguousarray(want).view(bits)
    same_sign: Array = np.signbit(got.astype(np.float64)) == np.signbit(want.astype(np.float64))
    near: Array = same_sign & (np.abs(distance) <= 1)
    return near
