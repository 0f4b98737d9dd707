"""Checksums of results hold for right ones of every type and reduction, in any order, and not for wrong ones."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import Case, make_values, pairwise, reduced

from hetcoll.calls import Call
from hetcoll.calls.buffers import element_type
from hetcoll.runtime.checksums import Fold, foldable, room
from hetcoll.types import COMPLEX, FLOATS, REDUCTIONS, Collective, DType, Format, ReduceOp

KINDS = [(dtype, op) for dtype in DType for op in sorted(REDUCTIONS[dtype])]
Array = np.ndarray[Any, Any]


def call_of(dtype: DType, op: ReduceOp) -> Call:
    return Call(Collective.ALLREDUCE, None, None, dtype, 1, dtype.itemsize, op)


FOLDABLE = [kind for kind in KINDS if foldable(call_of(*kind))]


def inputs_of(dtype: DType, op: ReduceOp, count: int, size: int, seed: int, *, exact: bool = True) -> list[Array]:
    case = Case("allreduce", dtype.label, count, op.label, seed=seed, exact=exact)
    return [make_values(case, count, rank, size) for rank in range(size)]


def reduce_one_by_one(inputs: Sequence[Array], dtype: DType, op: ReduceOp) -> Array:
    """Sums are rounded to the type each time."""
    if op not in (ReduceOp.SUM, ReduceOp.AVG) or inputs[0].dtype.kind in "biu":
        return reduced(op.label, inputs)
    with np.errstate(over="ignore"):
        total = functools.reduce(functools.partial(pairwise, "sum"), inputs)
        if op is ReduceOp.AVG:
            total = total.astype(np.complex128 if dtype in COMPLEX else np.float64) / len(inputs)
        return total.astype(inputs[0].dtype, copy=True)


def find(inputs: Sequence[Array], result: Array, dtype: DType, op: ReduceOp, parts: int = 1) -> str:
    """What the checksums say, which travel as JSON."""
    fold = Fold(call_of(dtype, op), len(inputs), parts)
    told = [json.dumps(fold.of(each)) for each in inputs]
    assert all(len(each) <= room(parts) for each in told)
    return fold.differs([json.loads(each) for each in told], result)


@pytest.mark.parametrize("dtype", sorted(FLOATS))
def test_bounds_are_those_of_the_type(dtype: DType) -> None:
    info, fold = ml_dtypes.finfo(element_type(dtype.label)), Fold(call_of(dtype, ReduceOp.SUM), 2, 1)
    slope, floor = fold.bounds(1)
    assert fold.most == float(info.max)
    assert floor == 3 * 4 * float(info.smallest_subnormal)
    assert slope == 3 * 2.0**-51 + 4 * 2.0**-info.nmant


@given(
    st.sampled_from(FOLDABLE),
    st.integers(0, 300),
    st.integers(1, 6),
    st.sampled_from([1, 3, 100]),
    st.integers(0, 1 << 20),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_right_results(
    kind: tuple[DType, ReduceOp], count: int, size: int, parts: int, seed: int, exact: bool, random: Any
) -> None:
    inputs = inputs_of(*kind, count, size, seed, exact=exact)
    order = random.sample(inputs, size)
    assert find(inputs, reduce_one_by_one(order, *kind), *kind, parts) == ""


@given(
    st.sampled_from([kind for kind in FOLDABLE if kind[0].itemsize > 1 or kind[0] not in FLOATS]),
    st.integers(1, 16),
    st.integers(1, 6),
    st.integers(0, 1 << 20),
    st.integers(0, 15),
)
def test_one_wrong_element_of_few(kind: tuple[DType, ReduceOp], count: int, size: int, seed: int, at: int) -> None:
    dtype, op = kind
    inputs = inputs_of(dtype, op, count, size, seed)
    result = reduce_one_by_one(inputs, dtype, op)
    at %= count
    change = 1 + sum(abs(complex(each[at])) for each in inputs) / 4  # more than rounding may do
    if dtype is DType.BOOL:
        result[at] = not result[at]
    elif op is ReduceOp.AVG and dtype not in FLOATS:
        return  # each loses less than 1
    elif result.dtype.kind in "iu":
        result[at] ^= 1
    else:
        result[at] = result.dtype.type(result[at] + result.dtype.type(change))
    assert op.label in find(inputs, result, dtype, op)


def test_one_wrong_element_of_many() -> None:
    """Of sums, whose folds lose nothing but what rounding may do: a bit in the middle of a float's fraction."""
    inputs = [np.random.default_rng(rank).standard_normal(1_000_000).astype(np.float32) for rank in range(4)]
    result = reduce_one_by_one(inputs, DType.FLOAT32, ReduceOp.SUM)
    result[123_456] += 1
    assert "every 16th element from 0 on" in find(inputs, result, DType.FLOAT32, ReduceOp.SUM)


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16, DType.FLOAT8_E4M3FN])
def test_what_overflows_is_right_and_what_does_not_is_not(dtype: DType) -> None:
    large = inputs_of(dtype, ReduceOp.MAX, 5, 2, 1)
    for each in large:
        each[3] = each.dtype.type(np.float64(Fold(call_of(dtype, ReduceOp.SUM), 2, 1).most))
    with np.errstate(over="ignore"):
        result = reduce_one_by_one(large, dtype, ReduceOp.SUM)
    assert not np.isfinite(result[3].astype(np.float32))
    assert find(large, result, dtype, ReduceOp.SUM) == ""
    for each in large:
        each[3] = 1
    assert "sum of every 5th element from 3 on is" in find(large, result, dtype, ReduceOp.SUM)


@pytest.mark.parametrize("dtype", [DType.FLOAT64, DType.COMPLEX128])
def test_right_sums_whose_folds_overflow_are_right(dtype: DType) -> None:
    large = [np.full(200, at, element_type(dtype.label)) for at in (5e307, -4e307)]
    result = reduce_one_by_one(large, dtype, ReduceOp.SUM)
    assert np.isfinite(result).all()
    assert find(large, result, dtype, ReduceOp.SUM) == ""


def test_what_has_no_checksum() -> None:
    assert not foldable(call_of(DType.FLOAT32, ReduceOp.PROD))
    assert not foldable(call_of(DType.COMPLEX64, ReduceOp.PROD))
    call = call_of(DType.FLOAT32, ReduceOp.SUM)
    call.compress = Format.BF16
    assert not foldable(call)


@pytest.mark.parametrize(("count", "parts"), [(100_003, 1), (100_003, 3), (40_000, 5), (33, 1), (5, 1), (0, 1)])
def test_long_buffers_are_folded_into_the_lanes_that_short_ones_are(count: int, parts: int) -> None:
    values = np.random.default_rng(count).integers(-1000, 1000, count)
    lanes = min(max(1, 16 // parts), count)
    wanted = [values[lane::lanes] for lane in range(lanes)] if lanes else []
    floats = Fold(call_of(DType.FLOAT32, ReduceOp.SUM), 2, parts).of(values.astype(np.float32))
    assert floats == [
        [each.sum() for each in wanted],
        [np.abs(each).sum() for each in wanted],
        [np.abs(values).max(initial=0)],
    ]
    largest = Fold(call_of(DType.INT64, ReduceOp.MAX), 2, parts).of(values)
    assert largest == [[each.max() for each in wanted]]
