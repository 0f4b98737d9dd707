"""What the vendors' libraries can reduce by themselves.

Moving data never needs to know its type: it goes as bytes (`BYTES`, count x itemsize). Reductions do. `native` is None
for those that neither library has: logical and bitwise ones, 16-bit integers, products of complex numbers, fp8 where
the library or the GPU lacks it. Then an island cannot help, and every rank counts as one of its own: the plan then
moves data by messages, and our kernels reduce it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ...types import COMPLEX, DType, ReduceOp

BYTES = DType.UINT8
"""The type that all data moves as: ncclUint8, whose number it has."""

_OCP = {DType.FLOAT8_E4M3FN: 10, DType.FLOAT8_E5M2: 11}
_FNUZ = {DType.FLOAT8_E4M3FNUZ: 10, DType.FLOAT8_E5M2FNUZ: 11}
_FP8_SINCE = 22400  # both types in both libraries
_OR = (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.LOR, ReduceOp.BOR)  # on bool
_AND = (ReduceOp.PROD, ReduceOp.MIN, ReduceOp.LAND, ReduceOp.BAND)


class Native(NamedTuple):
    """ncclDataType_t, ncclRedOp_t, and how many of the library's elements make one of ours."""

    dtype: int
    op: int
    elements: int = 1


def native(dtype: DType, op: ReduceOp, arch: str, version: int) -> Native | None:
    """How the library does a reduction, or None where it does not.

    Parameters
    ----------
    dtype, op
        AVG only where the island is the whole communicator; otherwise it is a SUM, and a division in the plan. The
        library multiplies floats by 1/n before it adds them, which rounds differently than a division in the end.
    arch
        The GPU's: ``sm_90``, ``gfx942:sramecc+:xnack-``.
    version
        `Library.version_code`. Ranks must agree on the answer, so it takes the least of all.
    """
    if dtype is DType.BOOL:  # bytes 0 and 1
        if op in _OR:
            return Native(BYTES, ReduceOp.MAX)
        return Native(BYTES, ReduceOp.MIN) if op in _AND else None
    if op > ReduceOp.AVG:
        return None
    if dtype in COMPLEX:
        part = DType.FLOAT32 if dtype is DType.COMPLEX64 else DType.FLOAT64
        return Native(part, op, 2) if op in (ReduceOp.SUM, ReduceOp.AVG) else None
    if dtype <= DType.BFLOAT16:
        return Native(dtype, op)
    number = _fp8(arch).get(dtype) if version >= _FP8_SINCE else None
    return None if number is None else Native(number, op)


def float8_kind(arch: str) -> str:
    """The kind of 8-bit floats that a GPU computes with: ``OCP``, ``fnuz`` (AMD's older one), or nothing."""
    found = _fp8(arch)
    return "OCP" if found is _OCP else "fnuz" if found is _FNUZ else ""


def _fp8(arch: str) -> dict[DType, int]:
    """The types that the library's two numbers for fp8 stand for on a GPU: OCP's, or AMD's own on gfx94x."""
    if arch.startswith("sm_"):
        return _OCP if int(re.sub(r"\D", "", arch)) >= 90 else {}
    name = arch.partition(":")[0]
    if name.startswith("gfx94"):
        return _FNUZ
    return _OCP if name.startswith(("gfx950", "gfx12")) else {}
