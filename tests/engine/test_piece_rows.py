"""Pieces of one-sided messages: what a call reads at once is what it would read of any numbers, and so are errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hetcoll._native as _native
from hetcoll import ArgumentError, BufferTypeError
from hetcoll.runtime.offsets import MOST_PIECES, _converted, pieces

NUMBERS = st.one_of(st.integers(-3, 40), st.sampled_from([2**31, 2**62, 2**63 - 1, -(2**63), 2**63, 2**64]))
COLUMNS = st.one_of(NUMBERS, st.lists(NUMBERS, max_size=4))


def as_array(values: Any) -> Any:
    try:
        return np.array(values, np.int64) if isinstance(values, list) else values
    except OverflowError:
        return values


def fits(number: int) -> bool:
    return -(2**63) <= number < 2**63


def outcome(call: Any, *arguments: Any) -> Any:
    try:
        rows, nbytes = call(*arguments)
    except (ArgumentError, BufferTypeError) as error:
        return f"{type(error).__name__}: {error}"
    return rows.tolist(), rows.dtype, nbytes


@given(COLUMNS, COLUMNS, COLUMNS, st.integers(0, 40), st.integers(0, 40), st.sampled_from([1, 4, 16]))
def test_both_ways_read_the_same(here: Any, there: Any, count: Any, mine: int, theirs: int, itemsize: int) -> None:
    arrays = [as_array(each) for each in (here, there, count)]
    if isinstance(here, list) and not here:
        arrays[0] = np.empty(0, np.int64)
    wanted = outcome(_converted, mine, theirs, *arrays, itemsize, "src", 1)
    assert outcome(pieces, mine, theirs, *arrays, itemsize, "src", 1) == wanted
    found = _native.piece_rows(*arrays, mine, theirs, itemsize)
    simple = all(isinstance(each, np.ndarray) or (isinstance(each, int) and fits(each)) for each in arrays)
    assert (found is not None) == (simple and not isinstance(wanted, str))


@pytest.mark.parametrize(
    "odd", [np.arange(4, dtype=np.int32), np.arange(8)[::2], [0, 1, 2, 3], np.arange(4, dtype=np.uint64), range(4)]
)
def test_what_needs_a_conversion(odd: Any) -> None:
    assert _native.piece_rows(odd, 0, 1, 10, 10, 4) is None
    assert outcome(pieces, 10, 10, odd, 0, 1, 4, "src", 1)[0] == [[4 * int(at), 0, 4] for at in odd]


def test_rows_outlive_what_they_were_made_of() -> None:
    at = np.arange(1000)
    rows, nbytes = pieces(1000, 1000, at, at[::-1].copy(), 1, 8, "src", 1)
    assert nbytes == 8000
    at[:] = 0
    assert (rows == np.stack([np.arange(1000) * 8, np.arange(1000)[::-1] * 8, np.full(1000, 8)], 1)).all()


def test_too_many() -> None:
    many = np.zeros(MOST_PIECES + 1, np.int64)
    assert _native.piece_rows(many, 0, 1, 10, 10, 4) is None
    with pytest.raises(ArgumentError, match="wanted at most 1048576 pieces a call, got 1048577"):
        pieces(10, 10, many, 0, 1, 4, "src", 1)
