"""The numbers of hetcoll perf: bandwidths, sizes, and patterns in which every wrong element shows."""

from __future__ import annotations

import argparse

import numpy as np
import pytest
from perf_ranks import FakeComm, World, arguments
from thorough import parametrize

from hetcoll.cli import cases, patterns, sweeps
from hetcoll.types import DType, ReduceOp, supports

# The formulas -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "factor_of_4"),
    [
        ("allreduce", 1.5), ("allgather", 0.75), ("reduce_scatter", 0.75), ("broadcast", 1.0), ("reduce", 1.0),
        ("gather", 0.75), ("scatter", 0.75), ("alltoall", 0.75), ("sendrecv", 1.0), ("alltoallv", 0.75),
        ("allgatherv", 0.75), ("reduce_scatterv", 0.75), ("oneway", 1.0), ("pingpong", 1.0),
    ],
)  # fmt: skip
def test_busbw_is_that_of_nccl_tests(op: str, factor_of_4: float) -> None:
    algbw, busbw = cases.bandwidths(op, 4, 4_000_000, 1000.0)
    assert algbw == pytest.approx(4.0)
    assert busbw == pytest.approx(4.0 * factor_of_4)


def test_one_rank_has_no_bus() -> None:
    assert cases.busbw_factor("allreduce", 1) == 0.0
    assert cases.busbw_factor("allgather", 1) == 0.0


@pytest.mark.parametrize(
    ("op", "send", "recv", "count", "total"),
    [
        ("allreduce", 100, 100, 100, 100), ("allgather", 25, 100, 25, 100), ("reduce_scatter", 100, 25, 25, 100),
        ("broadcast", None, 100, 100, 100), ("alltoall", 100, 100, 25, 100), ("gather", 25, 100, 25, 100),
        ("scatter", 100, 25, 25, 100), ("sendrecv", 100, 100, 100, 100), ("reduce", 100, 100, 100, 100),
        ("oneway", 100, None, 100, 100), ("pingpong", 100, 100, 100, 100),
    ],
)  # fmt: skip
def test_sizes_and_counts_are_those_of_nccl_tests(op: str, send: int, recv: int, count: int, total: int) -> None:
    shape = cases.shape(op, 4, 0, 103 if op in ("allgather", "gather", "scatter", "reduce_scatter") else 100, 0)
    assert (shape.send, shape.recv, shape.count, shape.total) == (send, recv, count, total)


def test_uneven_counts_are_uneven_and_complete() -> None:
    for total in (0, 1, 5, 600, 1009):
        for size in (1, 2, 3, 4, 7):
            parts = cases.uneven(total, size)
            assert sum(parts) == total
            assert len(parts) == size
    assert cases.uneven(600, 3) == (100, 200, 300)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("8", 8), ("4K", 4096), ("4k", 4096), ("64M", 64 << 20), ("1G", 1 << 30), ("2MiB", 2 << 20)]
)
def test_sizes_have_suffixes(text: str, nbytes: int) -> None:
    assert sweeps.parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "K", "-1", "1.5M", "8X", "M8"])
def test_a_bad_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="wanted a size"):
        sweeps.parse_size(text)


def test_sweep_steps_by_factor_or_bytes_and_measures_nothing_twice() -> None:
    assert sweeps.sizes(arguments("allreduce", "-b", "8", "-e", "64", "-f", "2"), "allreduce", 2, DType.FLOAT32) == [
        2, 4, 8, 16,
    ]  # fmt: skip
    assert sweeps.sizes(arguments("allreduce", "-b", "8", "-e", "32", "-i", "8"), "allreduce", 2, DType.FLOAT32) == [
        2, 4, 6, 8,
    ]  # fmt: skip
    counts = sweeps.sizes(arguments("allgather", "-b", "1", "-e", "64", "-f", "2"), "allgather", 4, DType.FLOAT32)
    totals = [cases.shape("allgather", 4, 0, count, 0).total for count in counts]
    assert totals == [4, 8, 16]


def test_jobs_leave_out_what_a_type_has_not() -> None:
    jobs = sweeps.expand(arguments("allreduce", "-d", "complex64", "-o", "all"), 2)
    assert {job.redop for job in jobs} == {ReduceOp.SUM, ReduceOp.PROD, ReduceOp.AVG}
    assert [job.root for job in sweeps.expand(arguments("broadcast", "-r", "-1"), 3)] == [0, 1, 2]
    assert {job.op for job in sweeps.expand(arguments("all"), 2)} == set(cases.OPS)
    with pytest.raises(SystemExit, match="from 0 to 1"):
        sweeps.expand(arguments("broadcast", "-r", "2"), 2)
    with pytest.raises(SystemExit, match="nothing to measure"):
        sweeps.expand(arguments("sendrecv", "--inplace"), 2)
    with pytest.raises(SystemExit, match="nothing to measure"):
        sweeps.expand(arguments("pingpong"), 1)


# The patterns -------------------------------------------------------------------------------------------------------


@parametrize("dtype", list(DType), first=4)
@parametrize("size", [7, 2, 20], first=1)
def test_every_partial_result_is_exact_in_the_element_type(dtype: DType, size: int) -> None:
    """A reduction in the element type, in any order, gives what integers give; else equality proves nothing."""
    kind = patterns.numpy_dtype(dtype)
    for redop in ReduceOp:
        if not supports(dtype, redop) or redop is ReduceOp.AVG:
            continue
        pattern = patterns.Pattern(dtype, size, 7, redop)
        want = pattern.reduced()
        for order in (range(size), reversed(range(size))):
            got = FakeComm(World(size), 0)._reduce([pattern.table(rank) for rank in order], redop.label)
            assert got.dtype == kind
            assert np.array_equal(got, want), (redop, got[:8], want[:8])
        assert len(np.unique(want.astype(np.complex128))) > 1, f"{redop.label} of {dtype.label} is constant"


@pytest.mark.parametrize("dtype", [DType.FLOAT8_E5M2, DType.INT8, DType.FLOAT32, DType.COMPLEX64, DType.BOOL])
def test_a_missing_rank_a_shift_and_a_stale_result_show(dtype: DType) -> None:
    size = 4
    for redop in (ReduceOp.SUM, ReduceOp.PROD):
        pattern = patterns.Pattern(dtype, size, 1, redop)
        right = pattern.reduced()
        buffers = [pattern.table(rank) for rank in range(size)]
        whole = [patterns.Piece(0, right.size, right)]
        assert patterns.count_wrong(right.copy(), whole) == 0
        missing = FakeComm(World(size), 0)._reduce(buffers[1:], redop.label)
        stale = patterns.Pattern(dtype, size, 2, redop).reduced()
        for spoiled in (missing, stale, np.roll(right, 1), np.roll(right, 64)):
            assert patterns.count_wrong(spoiled, whole) > right.size // 100, (dtype, redop)


def test_an_average_may_be_off_by_one_unit_and_no_more() -> None:
    right = np.array([1.0, -2.0, 3.0, 0.5], np.float32)
    piece = [patterns.Piece(0, 4, np.resize(right, patterns.PERIOD))]
    near = np.nextafter(right, np.float32(9))
    assert patterns.count_wrong(near, piece) == 4
    assert patterns.count_wrong(near, piece, rounded=True) == 0
    assert patterns.count_wrong(np.nextafter(near, np.float32(9)), piece, rounded=True) == 4
    assert patterns.count_wrong(-right, piece, rounded=True) == 4


def test_a_bool_that_is_neither_0_nor_1_is_wrong() -> None:
    buffer = np.array([0, 1, 2, 90], np.uint8).view(np.bool_)
    table = np.resize(np.array([False, True, True, True]), patterns.PERIOD)
    assert patterns.count_wrong(buffer, [patterns.Piece(0, 4, table)]) == 2


def test_pieces_wrap_around_the_period() -> None:
    table = np.arange(patterns.PERIOD)
    buffer = np.zeros(3 * patterns.PERIOD + 5, np.int64)
    piece = patterns.Piece(3, 3 * patterns.PERIOD, table, phase=patterns.PERIOD - 2)
    patterns.write(buffer, [piece])
    assert buffer[:7].tolist() == [0, 0, 0, patterns.PERIOD - 2, patterns.PERIOD - 1, 0, 1]
    assert patterns.count_wrong(buffer, [piece]) == 0
    buffer[-3] += 1
    assert patterns.count_wrong(buffer, [piece]) == 1
