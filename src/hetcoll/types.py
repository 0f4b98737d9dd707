"""The vocabulary shared by every layer: data types, reductions, collectives.

The numbers are wire values: they travel in plans and in frame signatures, and ``native/base/types.h``
holds the same ones (``tests/plan/test_types.py`` compares them). The first twelve data types and the first five
reductions are NCCL's own numbers (nccl.h), so that an island can hand them through unchanged.
"""

from __future__ import annotations

from enum import IntEnum
from numbers import Real
from typing import Any, Literal

LONGEST = 2e6
"""Seconds, 23 days: poll(2) counts milliseconds in 31 bits. Whoever asks for more waits as long."""


def as_seconds(value: Any) -> float | None:
    """`value` as seconds above 0, of at most LONGEST; None where it is none."""
    number = isinstance(value, float | int | Real) and not isinstance(value, bool)  # Real's own check takes longer
    if not (number and value > 0):
        return None
    return float(value) if value < LONGEST else LONGEST


class Labelled(IntEnum):
    """Numbers that have a label each: the name in lower case."""

    label: str
    """The name in lower case, as calls take it and as it is printed."""

    def __init__(self, number: int) -> None:
        self.label = self.name.lower()


class DType(Labelled):
    """Element types. Values 0-11 are ``ncclDataType_t``; labels are NumPy's and ml_dtypes', e.g. ``float8_e4m3fn``."""

    itemsize: int
    """Bytes per element."""

    INT8 = 0
    UINT8 = 1
    INT32 = 2
    UINT32 = 3
    INT64 = 4
    UINT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9
    FLOAT8_E4M3FN = 10
    FLOAT8_E5M2 = 11
    INT16 = 12
    UINT16 = 13
    COMPLEX64 = 14
    COMPLEX128 = 15
    FLOAT8_E4M3FNUZ = 16
    FLOAT8_E5M2FNUZ = 17
    BOOL = 18


_ITEMSIZE = {
    DType.INT8: 1, DType.UINT8: 1, DType.INT16: 2, DType.UINT16: 2, DType.INT32: 4, DType.UINT32: 4,
    DType.INT64: 8, DType.UINT64: 8, DType.FLOAT16: 2, DType.BFLOAT16: 2, DType.FLOAT32: 4, DType.FLOAT64: 8,
    DType.COMPLEX64: 8, DType.COMPLEX128: 16, DType.FLOAT8_E4M3FN: 1, DType.FLOAT8_E5M2: 1,
    DType.FLOAT8_E4M3FNUZ: 1, DType.FLOAT8_E5M2FNUZ: 1, DType.BOOL: 1,
}  # fmt: skip
for _dtype in DType:
    _dtype.itemsize = _ITEMSIZE[_dtype]


class ReduceOp(Labelled):
    """Reductions. Values 0-4 are ``ncclRedOp_t``; AVG is a sum followed by a scale."""

    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4
    LAND = 5
    LOR = 6
    LXOR = 7
    BAND = 8
    BOR = 9
    BXOR = 10


OpName = Literal["sum", "prod", "max", "min", "avg", "land", "lor", "lxor", "band", "bor", "bxor"]
"""The labels of `ReduceOp`, which calls take as well."""
FormatName = Literal["none", "bf16", "fp8", "int8"]
"""The labels of `Format`, which calls take."""

ANY_SOURCE = -1
"""As the `peer` of a receive with a tag: whichever rank sends such a message."""

FLOATS = frozenset(
    {
        DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64, DType.FLOAT8_E4M3FN,
        DType.FLOAT8_E5M2, DType.FLOAT8_E4M3FNUZ, DType.FLOAT8_E5M2FNUZ,
    }
)  # fmt: skip
FNUZ_OF = {DType.FLOAT8_E4M3FN: DType.FLOAT8_E4M3FNUZ, DType.FLOAT8_E5M2: DType.FLOAT8_E5M2FNUZ}
"""8-bit floats: AMD's older kind, by OCP's."""
OCP_OF = {fnuz: ocp for ocp, fnuz in FNUZ_OF.items()}
COMPLEX = frozenset({DType.COMPLEX64, DType.COMPLEX128})


REDUCTIONS = dict.fromkeys(DType, frozenset(ReduceOp))
"""The reductions that are defined on each type.

Integers: every one (AVG truncates toward zero, as NCCL's does). Floats: SUM PROD MAX MIN AVG. Complex: SUM PROD AVG (no
order). Bool: everything but AVG, with NumPy's meaning (SUM and MAX are or, PROD and MIN are and).
"""
REDUCTIONS |= dict.fromkeys(FLOATS, frozenset(op for op in ReduceOp if op <= ReduceOp.AVG))
REDUCTIONS |= dict.fromkeys(COMPLEX, frozenset({ReduceOp.SUM, ReduceOp.PROD, ReduceOp.AVG}))
REDUCTIONS[DType.BOOL] -= {ReduceOp.AVG}


def supports(dtype: DType, op: ReduceOp) -> bool:
    """Whether `op` is defined on `dtype`: see `REDUCTIONS`."""
    return op in REDUCTIONS[dtype]


class Collective(Labelled):
    """What a plan computes. The v-forms run the plan of their plain form over a table of counts."""

    plain: Collective
    """The collective whose plans this one runs."""

    ALLREDUCE = 0
    ALLGATHER = 1
    REDUCE_SCATTER = 2
    BROADCAST = 3
    REDUCE = 4
    GATHER = 5
    SCATTER = 6
    ALLTOALL = 7
    BARRIER = 8
    P2P = 9
    ALLGATHERV = 10
    REDUCE_SCATTERV = 11
    ALLTOALLV = 12


for _kind in Collective:
    _kind.plain = Collective[_kind.name.removesuffix("V")]

LOGICAL = frozenset({ReduceOp.LAND, ReduceOp.LOR, ReduceOp.LXOR})
"""What makes 0 or 1 of any element."""
REDUCING = frozenset({Collective.ALLREDUCE, Collective.REDUCE_SCATTER, Collective.REDUCE, Collective.REDUCE_SCATTERV})
FROM_ROOT = frozenset({Collective.BROADCAST, Collective.SCATTER})
TO_ROOT = frozenset({Collective.REDUCE, Collective.GATHER})
ROOTED = FROM_ROOT | TO_ROOT
CUT = frozenset({Collective.REDUCE_SCATTER, Collective.SCATTER, Collective.ALLTOALL})
"""Where what a rank gives has a part for each rank; of the forms with counts their plain ones."""
WHOLE = frozenset({Collective.ALLREDUCE, Collective.BROADCAST, Collective.REDUCE})  # buffers are not cut by rank
SAME = frozenset({Collective.ALLREDUCE, Collective.ALLGATHER, Collective.ALLGATHERV, Collective.BROADCAST})
"""What leaves the same on every rank."""


class Format(Labelled):
    """How elements travel over compressed edges; the numbers are those of ``native/kernels/codecs.h``.

    BF16 is float32's upper half, rounded to nearest even. FP8 (E4M3) and INT8 are codes of one byte in blocks of 32,
    times a power of two that the largest magnitude of the block decides, as in OCP's Microscaling formats.

    Examples
    --------
    >>> Format.INT8.factor(4)
    0.2578125
    """

    NONE = 0
    BF16 = 1
    FP8 = 2
    INT8 = 3

    def factor(self, itemsize: int) -> float:
        """Bytes on the wire for each byte of elements of `itemsize` bytes."""
        return {Format.NONE: 1.0, Format.BF16: 2 / itemsize}.get(self, (1 + 1 / 32) / itemsize)
