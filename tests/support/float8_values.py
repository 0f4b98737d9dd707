"""What the rules for 8-bit floats of two kinds give, worked out by ml_dtypes: see hetcoll/gpu/float8.py."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from elements import NUMPY, Array

from hetcoll.types import FNUZ_OF, OCP_OF, DType


def codes_of(dtype: DType) -> Array:
    """All 256."""
    return np.arange(256, dtype=np.uint8).view(NUMPY[dtype])


def converted(values: Array, to: DType) -> Array:
    """In the other kind: finite values beyond its largest become that one; the rest is ml_dtypes'."""
    wide, top = values.astype(np.float32), float(ml_dtypes.finfo(NUMPY[to]).max)
    with np.errstate(all="ignore"):
        return np.where(np.isfinite(wide), np.clip(wide, -top, top), wide).astype(NUMPY[to])


def in_ocp(values: Array) -> Array:
    """What such values are in OCP's kind."""
    dtype = DType[values.dtype.name.upper()]
    return converted(values, OCP_OF[dtype]) if dtype in OCP_OF else values


def common(values: Array) -> Array:
    """What both kinds hold of values of OCP's kind."""
    dtype = DType[values.dtype.name.upper()]
    return converted(converted(values, FNUZ_OF[dtype]), dtype)


def same_values(got: Array, want: Array) -> bool:
    with np.errstate(invalid="ignore"):
        return bool(np.array_equal(got.astype(np.float32), want.astype(np.float32), equal_nan=True))


def steps() -> list[tuple[DType, DType, Any]]:
    """Every conversion: from, to, and what it gives."""
    found: list[tuple[DType, DType, Any]] = []
    for ocp, fnuz in FNUZ_OF.items():
        found += [(ocp, fnuz, converted(codes_of(ocp), fnuz)), (fnuz, ocp, converted(codes_of(fnuz), ocp))]
        found.append((ocp, ocp, common(codes_of(ocp))))
    return found


def check_codes(got: Array, want: Array) -> None:
    """Values alike, and no -0, on which the kinds differ."""
    assert same_values(got, want)
    assert not np.signbit(got.astype(np.float32))[got.astype(np.float32) == 0].any()
