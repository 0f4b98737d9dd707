"""Terms whose sum depends on the order of the additions, and what they come to in the order of ranks."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
from reference import numpy_type

Array = np.ndarray[Any, Any]
OPS = {"sum": np.add, "avg": np.add, "prod": np.multiply}


def terms(size: int, count: int, dtype: str, seed: int) -> list[Array]:
    """What each rank gives: sums of floats of such different sizes depend on the order of the additions."""
    rng = np.random.default_rng(seed)
    if dtype == "int32":
        return [rng.integers(-99, 99, count, np.int32) for _ in range(size)]
    spread = 1.0 if "8" in dtype else 3.0
    rows = [rng.standard_normal(count) * 10 ** rng.uniform(-spread, spread, count) for _ in range(size)]
    if dtype == "complex64":
        return [(row + 1j * row[::-1]).astype(dtype) for row in rows]
    rows[-1][::97] = np.nan  # whose bits must not depend on the way either
    return [row.astype(numpy_type(dtype)) for row in rows]


def in_rank_order(rows: list[Array], op: str) -> Array:
    """The documented result: one addition after another, each rounded to the type, then a division."""
    with np.errstate(all="ignore"):
        total = reduce(lambda a, b: OPS[op](a, b).astype(a.dtype), rows)
        return (total / np.asarray(len(rows), total.dtype)).astype(total.dtype) if op == "avg" else total


def same(got: Array, want: Array) -> None:
    """Equal bits; NumPy's NaNs have other payloads, and sign."""
    size = got.dtype.itemsize if got.dtype.kind != "c" else got.dtype.itemsize // 2
    finite = ~np.isnan(want)
    assert np.isnan(got[~finite]).all()
    assert got[finite].tobytes() == want[finite].tobytes()
    if (~finite).any() and got.dtype.kind != "c":
        assert len(set(got[~finite].view(f"u{size}").tolist())) == 1
