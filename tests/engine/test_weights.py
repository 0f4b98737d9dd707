"""Ranks that count for more than others: weighted means, and shards by weight."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import Ranks

import hetcoll
from hetcoll.runtime.weights import shares


@given(st.integers(0, 5), st.lists(st.floats(0.01, 100.0), min_size=1, max_size=9), st.integers(0, 1000))
def test_shares_are_whole_and_in_proportion(least: int, weights: list[float], spare: int) -> None:
    total = least * len(weights) + spare
    found = shares(total, weights, least)
    assert sum(found) == total
    assert min(found) >= least
    if least == 0:
        exact = [total * weight / sum(weights) for weight in weights]
        assert all(abs(a - b) <= 1 for a, b in zip(found, exact, strict=True))


@pytest.mark.parametrize("total", [10**9 + 1, 2**62 + 1])
def test_shares_of_many_elements_are_exact_and_take_no_memory(total: int) -> None:
    assert shares(total, [1.0, 1.0]) == [total // 2 + 1, total // 2]
    assert sum(shares(total, [0.1, 0.7, 1e-300], 0)) == total


def test_the_heaviest_weights_have_a_sum() -> None:
    assert shares(9, [1.7e308, 1.7e308, 1.7e308]) == [3, 3, 3]


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ((10, []), hetcoll.ArgumentError, "weights: wanted one or more, got none"),
        ((10, [1.0, math.nan]), hetcoll.ArgumentError, "weights: wanted a number above 0, got nan"),
        ((10, ["a"]), hetcoll.BufferTypeError, "weights: wanted a number, got 'a'"),
        ((10.0, [1.0]), hetcoll.BufferTypeError, "total: wanted a whole number, got 10"),
        ((10, [1.0, 1e9], -3), hetcoll.ArgumentError, "least: wanted 0 or more, got -3"),
    ],
)
def test_shares_that_there_are_not(wrong: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        shares(*wrong)


def test_weights_may_be_an_array() -> None:
    assert shares(12, np.array([1, 2], np.float32)) == [4, 8]  # type: ignore[arg-type]


def _means(comm: hetcoll.Communicator) -> None:
    rank, size = comm.rank, comm.size
    each = [0.5 + 2 * r for r in range(size)]
    whole = math.fsum(each)
    for dtype, slack in (
        (np.float32, 1e-6), (np.float64, 1e-15), (np.float16, 2e-3), (ml_dtypes.bfloat16, 2e-2),
        (np.complex64, 1e-6), (np.complex128, 1e-15),
    ):  # fmt: skip
        x = np.full((3, 5), rank + 1, dtype)
        want = sum((r + 1) * weight for r, weight in enumerate(each)) / whole
        comm.allreduce(x, out := np.empty_like(x), op="avg", weight=each[rank])
        assert (x == rank + 1).all(), "the input was written"
        np.testing.assert_allclose(out.astype(complex), want, rtol=slack)
        comm.allreduce(x, op="avg", weight=each[rank], async_op=True).wait()
        assert x.tobytes() == out.tobytes()
        assert len({bytes(part) for part in comm.allgather(x.view(np.uint8).reshape(-1))}) == 1
    only = np.full(4, float(rank))
    comm.allreduce(only, op="avg", weight=float(rank == 1))
    assert (only == 1).all()
    comm.allreduce(memoryview(mine := np.full(2, rank, np.float64)), op="avg", weight=1)
    np.testing.assert_allclose(mine, (size - 1) / 2)
    comm.allreduce(np.empty(0), op="avg", weight=1)


def _refuse(comm: hetcoll.Communicator) -> None:
    for wrong, error, words in (
        (lambda: comm.allreduce(np.ones(2), weight=1.0), hetcoll.ArgumentError, "weight: wanted op='avg'"),
        (
            lambda: comm.allreduce(np.ones(2, int), op="avg", weight=1.0),
            hetcoll.BufferTypeError,
            "weight: wanted floats",
        ),
        (lambda: comm.allreduce(np.ones(2), op="avg", weight=-1), hetcoll.ArgumentError, "number of 0 or more, got -1"),
        (lambda: comm.allreduce(np.ones(2), op="avg", weight=math.nan), hetcoll.ArgumentError, "0 or more, got nan"),
        (lambda: comm.allreduce(np.ones(2), op="avg", weight="1"), hetcoll.BufferTypeError, "weight: wanted a number"),
        (
            lambda: comm.allreduce(np.ones(2), op="avg", weight=np.array("x")),  # type: ignore[arg-type]
            hetcoll.BufferTypeError,
            "weight: wanted a number, got array",
        ),
        (lambda: comm.allreduce(np.ones(2), op="avg", weight=0), hetcoll.ArgumentError, "above 0 on some rank"),
        (lambda: comm.allreduce(np.ones(2), op="avg", weight=1, stream=1), hetcoll.ArgumentError, "wanted no stream"),
        (lambda: comm.shards(10, True), hetcoll.BufferTypeError, "weight: wanted a number, got True"),
        (lambda: comm.shards(10, 0), hetcoll.ArgumentError, "weight: wanted a number above 0"),
        (lambda: comm.shards(1, least=1), hetcoll.ArgumentError, "total: wanted 1 or more for each of 3 ranks, got 1"),
        (lambda: comm.shards(10, least=-1), hetcoll.ArgumentError, "least: wanted 0 or more"),
        (lambda: comm.shards(1.5), hetcoll.BufferTypeError, "total: wanted a whole number"),  # type: ignore[arg-type]
    ):
        with pytest.raises(error, match=words):
            wrong()
    comm.barrier()


def _shards(comm: hetcoll.Communicator) -> None:
    parts = comm.shards(100, 1.0 + comm.rank)
    assert parts == [slice(0, 17), slice(17, 50), slice(50, 100)]
    data = np.arange(100)
    assert np.concatenate(comm.allgather_object(data[parts[comm.rank]])).tolist() == data.tolist()
    assert comm.shards(4, 1.0 if comm.rank else 1000.0, least=1) == [slice(0, 2), slice(2, 3), slice(3, 4)]


def _heavy(comm: hetcoll.Communicator) -> None:
    values = np.array([1.0 + comm.rank])
    comm.allreduce(values, op="avg", weight=1.7e308)
    assert values[0] == pytest.approx(2.0)


def _mismatch(comm: hetcoll.Communicator) -> None:
    with pytest.raises(hetcoll.CollectiveMismatchError, match="weight"):
        comm.allreduce(np.ones(2), op="avg", weight=1.0 if comm.rank else None)


def test_weighted_means_and_shards(pool: Callable[..., Ranks]) -> None:
    for case in (_means, _refuse, _shards, _heavy):
        pool(3).run(case)


def test_a_weight_on_one_rank_only_is_a_mismatch(launch: Callable[..., Ranks]) -> None:
    launch(2).run(_mismatch)
