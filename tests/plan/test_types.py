"""The vocabulary in Python and in C++ is the same: numbers, sizes, which reductions exist, how buffers are cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetcoll import _native
from hetcoll.calls import OP_LABELS
from hetcoll.plan import ir
from hetcoll.plan.algorithms.p2p import LANES as P2P_LANES
from hetcoll.plan.ir import P2P_CHANNEL
from hetcoll.plan.simulator.network import CHANNELS as PROVED_CHANNELS
from hetcoll.plan.simulator.network import LANES as PROVED_LANES
from hetcoll.types import COMPLEX, FLOATS, REDUCING, ROOTED, Collective, DType, ReduceOp, supports

SIZES, REDUCTIONS, CHANNELS, LANES, HEADER_BYTES, STEP_BYTES, MAGIC = _native.wire()
PAIRS = [(dtype, op) for dtype in DType for op in ReduceOp]
HUGE = 1 << 60


def label(value: DType | ReduceOp) -> str:
    return value.label


def test_data_types_have_the_same_numbers_and_sizes() -> None:
    assert [int(dtype) for dtype in DType] == list(range(len(SIZES)))
    assert [dtype.itemsize for dtype in DType] == SIZES


def test_the_first_numbers_are_nccls() -> None:
    """ncclDataType_t and ncclRedOp_t in nccl.h."""
    names = "int8 uint8 int32 uint32 int64 uint64 float16 float32 float64 bfloat16 float8_e4m3fn float8_e5m2"
    assert " ".join(DType(number).label for number in range(12)) == names
    assert [ReduceOp(number).label for number in range(5)] == ["sum", "prod", "max", "min", "avg"]


def test_reductions_have_the_same_numbers() -> None:
    assert [int(op) for op in ReduceOp] == list(range(REDUCTIONS))
    assert [op.label for op in ReduceOp] == list(OP_LABELS)


def test_plans_have_the_same_layout() -> None:
    assert (ir.HEADER.size, ir.STEP.size, ir.MAGIC) == (HEADER_BYTES, STEP_BYTES, MAGIC)
    assert (PROVED_CHANNELS, PROVED_LANES) == (CHANNELS, LANES)  # what is proved is what the engine takes
    assert P2P_CHANNEL == CHANNELS - 1  # which no collective has
    assert 2 * P2P_LANES + 1 <= LANES


def test_kinds_of_types_are_disjoint() -> None:
    assert not FLOATS & COMPLEX
    assert {d for d in DType if d.label.startswith(("float", "bfloat"))} == FLOATS
    assert {d for d in DType if d.label.startswith("complex")} == COMPLEX


def test_v_forms_run_the_plans_of_their_plain_forms() -> None:
    for collective in Collective:
        v_form = collective.label.endswith("v")
        assert collective.plain.label == (collective.label[:-1] if v_form else collective.label)
        assert (collective in REDUCING) == (collective.plain in REDUCING)
    assert not ROOTED & {c for c in Collective if c.plain is not c}


@pytest.mark.parametrize(("dtype", "op"), PAIRS, ids=label)
def test_a_reduction_has_a_kernel_exactly_where_it_is_supported(dtype: DType, op: ReduceOp) -> None:
    a, b, into = (np.zeros(4 * dtype.itemsize, np.uint8) for _ in range(3))
    if supports(dtype, op):
        _native.reduce_bytes(into, a, b, dtype, op, False)
        if op is ReduceOp.AVG:
            _native.scale_bytes(into, dtype, 2)
        assert not into.any(), "nothing but zeros went in"
    else:
        with pytest.raises(ValueError, match="not defined on this type"):
            _native.reduce_bytes(into, a, b, dtype, op, False)


@pytest.mark.parametrize("number", [-1, len(SIZES), 255])
def test_unknown_numbers_are_refused(number: int) -> None:
    memory = np.zeros(16, np.uint8)
    with pytest.raises(ValueError, match="not defined on this type"):
        _native.reduce_bytes(memory, memory, memory, number, ReduceOp.SUM, False)
    with pytest.raises(ValueError, match="no such"):
        _native.reduce_bytes(memory, memory, memory, DType.UINT8, number, False)


@given(st.integers(0, 10_000) | st.integers(HUGE - 1000, HUGE + 1000), st.integers(1, 300))
def test_both_cut_alike(count: int, units: int) -> None:
    offsets = ir.cut(count, units)
    assert offsets == tuple(_native.cut_offset(count, units, unit) for unit in range(units + 1))
    assert (offsets[0], offsets[-1]) == (0, count)
    sizes = np.diff(np.array(offsets))
    assert set(sizes.tolist()) <= {count // units, count // units + 1}


@given(st.integers(0, (1 << 64) - 1), st.integers(1, (1 << 32) - 1), st.data())
def test_no_count_is_too_large_to_cut(count: int, units: int, data: st.DataObject) -> None:
    unit = data.draw(st.integers(0, units))
    assert _native.cut_offset(count, units, unit) == unit * count // units
