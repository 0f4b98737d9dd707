"""Pieces of one-sided messages, as callers say them: offsets and counts of elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np

import hetcoll._native as _native

from ..calls import check_int
from ..errors import ArgumentError, BufferTypeError

MOST_PIECES = 1 << 20

Offsets = SupportsIndex | Sequence[int] | np.ndarray[Any, Any]
"""Elements: one number, or one for each piece."""

Rows = np.ndarray[Any, np.dtype[np.int64]]


def pieces(
    here_count: int,
    there_count: int,
    here: Offsets,
    there: Offsets,
    count: Offsets | None,
    itemsize: int,
    name: str,
    peer: int,
) -> tuple[Rows, int]:
    """Rows of bytes: offset here, offset in the window, length; and how many bytes that is together. What is empty is
    left out."""
    own = f"{name}_offset"
    if count is None:
        if not (_is_single(here) and _is_single(there)):
            raise ArgumentError("count: wanted one a piece, where there are several")
        count = here_count - check_int(here, own)
    if here is None or there is None:  # which the native function does not take
        raise BufferTypeError(f"{own if here is None else 'offset'}: wanted a whole number, got None")
    return _native.piece_rows(here, there, count, here_count, there_count, itemsize) or _converted(
        here_count, there_count, here, there, count, itemsize, name, peer
    )


def _converted(
    here_count: int,
    there_count: int,
    here: Offsets,
    there: Offsets,
    count: Offsets,
    itemsize: int,
    name: str,
    peer: int,
) -> tuple[Rows, int]:
    """The same of any numbers, and the errors."""
    own = f"{name}_offset"
    columns = [_column(here, own), _column(there, "offset"), _column(count, "count")]
    try:
        rows = np.stack(np.broadcast_arrays(*columns), axis=-1)
    except ValueError:
        lengths = ", ".join(str(len(column)) for column in columns)
        raise ArgumentError(f"{own}, offset, count: wanted as many of each, or one, got {lengths}") from None
    if len(rows) > MOST_PIECES:
        raise ArgumentError(f"offset: wanted at most {MOST_PIECES} pieces a call, got {len(rows)}")
    length = rows[:, 2]
    for at, most, what in ((0, here_count, name), (1, there_count, f"rank {peer}'s window")):
        wrong = (rows[:, at] < 0) | (length < 0) | (length > most) | (rows[:, at] > most - length)
        if wrong.any():
            i = int(wrong.argmax())
            raise ArgumentError(
                f"{(own, 'offset')[at]}: piece {i}, {length[i]} elements from {rows[i, at]} on, is not inside {what}, "
                f"which has {most}"
            )
    rows = rows[length > 0] * itemsize
    return rows, int(rows[:, 2].sum())


def _is_single(values: Offsets) -> bool:
    return not hasattr(values, "__len__") or (isinstance(values, np.ndarray) and values.ndim == 0)


def _column(values: Offsets, name: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    if _is_single(values):
        return np.array([check_int(values, name)], np.int64)
    column = np.atleast_1d(np.asarray(values))
    if column.ndim != 1 or (column.size and column.dtype.kind not in "iu"):
        raise BufferTypeError(f"{name}: wanted whole numbers, one a piece, got {column.dtype} of shape {column.shape}")
    if column.dtype == np.uint64 and column.size and int(column.max()) >= 1 << 63:
        raise ArgumentError(f"{name}: wanted 64 bits, got {column.max()}")
    return column.astype(np.int64)
