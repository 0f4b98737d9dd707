"""Checksums that say whether a collective's result is what its inputs make: algorithm-based fault tolerance (Huang and
Abraham, 1984).

What is moved has a hash. What is reduced is folded by the same reduction, into a few lanes: the ranks' folds, reduced,
are the fold of the result. That is exact for integers, and for the largest and smallest of floats. For sums of floats
it holds up to what rounding may do, which is worked out from the sum of all magnitudes. Means of integers
are sums of floats that lose less than 1 an element. Products of floats have no such bound, and no checksum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..calls import Call
from ..types import COMPLEX, LOGICAL, DType, Format, ReduceOp

Array = np.ndarray[Any, np.dtype[Any]]
_LANES = 16  # numbers in which a whole buffer is folded, or all parts of one together
_PART = 1 << 11  # elements of a lane that are folded at a time
_WIDE = 64  # rows of lanes that are folded side by side: a row alone is short
_BYTES = 96  # that a lane takes as JSON, at most: three floats; so a hash fits
_FOLDS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add, ReduceOp.PROD: np.multiply, ReduceOp.MAX: np.maximum, ReduceOp.MIN: np.minimum,
    ReduceOp.LAND: np.logical_and, ReduceOp.LOR: np.logical_or, ReduceOp.LXOR: np.logical_xor,
    ReduceOp.BAND: np.bitwise_and, ReduceOp.BOR: np.bitwise_or, ReduceOp.BXOR: np.bitwise_xor,
}  # fmt: skip
_FOLDS[ReduceOp.AVG] = np.add
_OF_BOOL = {ReduceOp.SUM: np.logical_or, ReduceOp.PROD: np.logical_and}


class _Floats(NamedTuple):
    """A type of floats: bits of its fraction, its largest number, and the least above 0."""

    digits: int
    most: float
    least: float


_FLOATS = {
    DType.FLOAT8_E4M3FN: _Floats(4, 448.0, 2.0**-9), DType.FLOAT8_E4M3FNUZ: _Floats(4, 240.0, 2.0**-10),
    DType.FLOAT8_E5M2: _Floats(3, 57344.0, 2.0**-16), DType.FLOAT8_E5M2FNUZ: _Floats(3, 57344.0, 2.0**-17),
    DType.BFLOAT16: _Floats(8, 255 * 2.0**120, 2.0**-133), DType.FLOAT16: _Floats(11, 65504.0, 2.0**-24),
    DType.FLOAT32: _Floats(24, float(np.finfo(np.float32).max), 2.0**-149),
    DType.FLOAT64: _Floats(53, float(np.finfo(np.float64).max), 2.0**-1074),
}  # fmt: skip
_FLOATS |= {DType.COMPLEX64: _FLOATS[DType.FLOAT32], DType.COMPLEX128: _FLOATS[DType.FLOAT64]}


def foldable(call: Call) -> bool:
    """Whether what `call` reduces has a checksum."""
    return call.compress is Format.NONE and not (call.dtype in _FLOATS and call.op is ReduceOp.PROD)


def room(parts: int) -> int:
    """Bytes that the checksum of one of so many parts takes as JSON, at most."""
    return _BYTES * max(1, _LANES // parts)


class Fold:
    """Of the reduction of `call` among `size` ranks, whose buffers are cut into so many parts."""

    def __init__(self, call: Call, size: int, parts: int) -> None:
        self._dtype, self._op, self._size = call.dtype, call.op, size
        self._lanes = max(1, _LANES // parts)
        self._floats = _FLOATS.get(call.dtype)
        self.rounds = call.op is ReduceOp.AVG or (self._floats is not None and call.op is ReduceOp.SUM)
        """Whether results are rounded sums, which have bounds."""
        self._ufunc = _OF_BOOL.get(call.op, _FOLDS[call.op]) if call.dtype is DType.BOOL else _FOLDS[call.op]

    def of(self, values: Array) -> list[list[Any]]:
        """The fold of some elements as JSON has it: exact lanes; or sums, sums of magnitudes, and the largest one."""
        if self.rounds:
            return self._of_sums(values.view(values.real.dtype) if self._dtype in COMPLEX else values)
        if self._op in LOGICAL:
            values = values != 0
        elif self._floats is not None:
            values = values.astype(np.float64)
        return [_lanes(self._ufunc, values, self._lanes).tolist()]

    def _of_sums(self, values: Array) -> list[list[Any]]:
        """In parts that stay in a cache as they are widened."""
        lanes, part, most = min(self._lanes, len(values)), self._lanes * _PART, 0.0
        sums, sizes = np.zeros(lanes), np.zeros(lanes)
        with np.errstate(over="ignore", invalid="ignore"):
            for begin in range(0, len(values), part):
                wide = values[begin : begin + part].astype(np.float64)
                magnitudes = np.abs(wide)
                most = float(np.maximum(most, magnitudes.max()))
                for total, each in ((sums, wide), (sizes, magnitudes)):
                    folded = _lanes(np.add, each, lanes)
                    total[: len(folded)] += folded
        return [sums.tolist(), sizes.tolist(), [most]]

    def differs(self, folds: Sequence[list[list[Any]]], result: Array) -> str:
        """Where the fold of `result` is not what those of all ranks' inputs make; nothing where it is."""
        lanes = self.of(result)[0]
        if self.rounds:
            got = np.array(lanes)
            by = self._size if self._op is ReduceOp.AVG else 1
            with np.errstate(over="ignore", invalid="ignore"):
                wanted, sizes = (np.sum([fold[i] for fold in folds], axis=0) for i in (0, 1))
                wrong = ~(np.abs(got - wanted / by) <= self._bound(sizes / by, result.size))
            wrong &= np.isfinite(sizes)  # else nothing is known of the fold
            if sum(fold[2][0] for fold in folds) > self.most:  # some element may have overflowed
                wrong &= np.isfinite(got) & (self._floats is not None)
            return self._spell(wrong, wanted / by, got)
        exact = np.bool_ if self._op in LOGICAL else np.float64 if self._floats is not None else result.dtype
        got = np.array(lanes, exact)
        wanted = self._ufunc.reduce(np.array([fold[0] for fold in folds], exact), axis=0, dtype=exact)
        return self._spell(got != wanted, wanted, got)

    @property
    def most(self) -> float:
        """Up to which no sum overflows."""
        return float(np.iinfo(self._dtype.label).max) if self._floats is None else self._floats.most

    def _bound(self, sizes: Array, count: int) -> Array:
        slope, floor = self.bounds(math.ceil(count / self._lanes))
        return sizes * slope + floor

    def bounds(self, count: int) -> tuple[float, float]:
        """What rounding may do to a lane of so many elements of the result, and to the folds: for each of the sum of
        the magnitudes, and in any case (Higham, Accuracy and Stability of Numerical Algorithms, 4.2). Numbers below the
        normal ones lose up to the least one each time."""
        each = count + self._size
        folding = each * 2.0**-51
        if self._floats is None:
            return folding, each
        return folding + (self._size + 2) * 2.0 ** (1 - self._floats.digits), each * (
            self._size + 2
        ) * self._floats.least

    def _spell(self, wrong: Array, wanted: Array, got: Array) -> str:
        if not wrong.any():
            return ""
        lane = int(np.argmax(wrong))
        every = f"every {got.size}th element from {lane} on" if got.size > 1 else "all elements"
        return f"{self._op.label} of {every} is {got[lane]}, and of what the ranks gave {wanted[lane]}"


def _lanes(ufunc: np.ufunc, values: Array, lanes: int) -> Array:
    """`values` reduced into so many lanes, or fewer where there are not as many. Integers stay as wide as they are."""
    lanes = min(lanes, len(values))
    if lanes == 0:
        return values
    row, folded = lanes * _WIDE, values
    if len(values) > 2 * row:
        whole = len(values) // row * row
        wide: Array = ufunc.reduce(values[:whole].reshape(-1, row), axis=0, dtype=values.dtype)
        folded = np.concatenate([wide, values[whole:]])
    whole = len(folded) // lanes * lanes
    out: Array = ufunc.reduce(folded[:whole].reshape(-1, lanes), axis=0, dtype=values.dtype)
    rest = len(folded) - whole
    out[:rest] = ufunc(out[:rest], folded[whole:], dtype=values.dtype)
    return out
