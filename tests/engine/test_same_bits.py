"""Ranks that add for themselves what others add as well: NaNs have the same bits on all of them, too."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from cases import variant
from ranks import Ranks
from thorough import parametrize

import hetcoll
from hetcoll import _native
from hetcoll.plan.algorithms import ALGORITHMS
from hetcoll.types import Collective

Pool = Callable[..., Ranks]
TYPES = ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128"]
COUNT = 77


def _bits(dtype: str) -> tuple[type, int, int]:
    """The integers as wide as a part of such a number, a NaN among them, and the bits that make NaNs differ."""
    word, nan, free = {
        "float16": (np.uint16, 0x7E00, 0x81FF),
        "bfloat16": (np.uint16, 0x7FC0, 0x803F),
        "float32": (np.uint32, 0x7FC00000, 0x803FFFFF),
        "float64": (np.uint64, 0x7FF8 << 48, 0x8007 << 48 | 0xFFFFFFFFFFFF),
        "float8_e4m3fn": (np.uint8, 0x7F, 0x80),
        "float8_e5m2": (np.uint8, 0x7E, 0x81),
    }[{"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)]
    return word, nan, free


def _numbers(dtype: str, rank: int, size: int) -> np.ndarray:
    """NaNs of all kinds on several ranks at a time, infinities of both signs, and what overflows."""
    word, nan, free = _bits(dtype)
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    random = np.random.default_rng(100 * size + rank)
    values = (3 * random.standard_normal(COUNT)).astype(kind)
    parts = values.view(word)
    width = parts.size // COUNT
    nans = nan | (random.integers(0, 1 << 63, parts.size, np.uint64) & np.uint64(free)).astype(word)
    which = random.integers(0, 4, parts.size) == 0
    parts[which] = nans[which]
    every = np.arange(parts.size) // width % 5
    with np.errstate(all="ignore"):
        largest = np.array(ml_dtypes.finfo(kind).max if kind.kind != "c" else np.finfo(kind).max).astype(kind)
        infinite = np.array(np.inf if dtype != "float8_e4m3fn" else largest).astype(kind)
        extreme = np.array([largest, -largest])[random.integers(0, 2, COUNT)]
        endless = np.array([infinite, -infinite])[random.integers(0, 2, COUNT)]
    real = every[::width]
    values[real == 0] = extreme[real == 0]
    values[real == 1] = endless[real == 1]
    return values


def _everywhere(comm: hetcoll.Communicator, algorithm: str, dtype: str) -> list[bytes]:
    """What each reduction leaves on this rank; each of two calls, the second in place."""
    chosen, found = variant(comm, algo=f"allreduce:{algorithm}"), []
    with np.errstate(all="ignore"):
        for op in ("sum", "avg", "prod") + (() if dtype.startswith("complex") else ("min", "max")):
            x = _numbers(dtype, comm.rank, comm.size)
            y = np.zeros_like(x)
            chosen.allreduce(x, y, op=op)
            chosen.allreduce(x, op=op)
            assert (np.isnan(x) == np.isnan(y)).all()
            found += [x.tobytes(), y.tobytes()]
    return found


def _isas() -> list[str]:
    """The instruction sets of this processor that there are kernels for."""
    before = _native.kernel_isa()
    found = [name for name in ("avx512", "avx2", "baseline") if _native.set_kernel_isa(name)]
    assert _native.set_kernel_isa(before)
    return found


@parametrize("size", [3, 2, 4, 5], first=1)
def test_nans_are_the_same_on_all_ranks(pool: Pool, size: int) -> None:
    there = _isas()
    isas = tuple(there[rank % len(there)] for rank in range(size))
    for algorithm in ALGORITHMS[Collective.ALLREDUCE]:
        for dtype in TYPES:
            found = pool(size, HETCOLL_ISA=isas).run(_everywhere, algorithm, dtype)
            assert all(each == found[0] for each in found), f"{dtype} by {algorithm} among {size}"


def _overflowing(comm: hetcoll.Communicator, algorithm: str) -> None:
    x = np.full(9, (448.0, 448.0, 448.0, -448.0)[comm.rank], np.float32).astype(ml_dtypes.float8_e4m3fn)
    variant(comm, algo=f"allreduce:{algorithm}").allreduce(x, op="prod")
    assert np.isnan(x.astype(np.float32)).all()


@pytest.mark.parametrize("algorithm", ["oneshot", "doubling"])
def test_check_takes_what_overflows_to_nan_for_the_same(pool: Pool, algorithm: str) -> None:
    """Two products overflow, to NaNs of two signs; doubling multiplies these in both orders."""
    pool(4, HETCOLL_CHECK="1").run(_overflowing, algorithm)
