"""The benchmarks' worker over hetcoll: it verifies what it times, and knows what every rank must get."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from thorough import HOUSE, parametrize

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import worker  # noqa: E402

pytestmark = HOUSE


class Alone:
    """A library with one rank, for the worker's loop. `spoil` breaks one element of every result."""

    rank, size, version = 0, 1, "0"

    def __init__(self, spoil: bool = False) -> None:
        self.spoil = spoil

    def barrier(self) -> None:
        pass

    def bind(self, op: str, send: np.ndarray, recv: np.ndarray) -> worker.Call:
        def call() -> None:
            if op != "broadcast":
                recv[:] = send
            recv[recv.size // 2] += self.spoil

        return call


@pytest.mark.parametrize("op", worker.OPS)
@parametrize("nbytes", [8, 4096, 1 << 20], first=1)
def test_the_worker_verifies_what_it_times(op: str, nbytes: int) -> None:
    row = worker.measure(Alone(), worker.Case(Alone(), op, nbytes, False), 2000.0)
    assert (row["op"], row["nbytes"], row["wrong"]) == (op, nbytes, 0)
    assert row["samples"] >= worker.FEWEST_SAMPLES
    assert 0 < row["best_us"] <= row["median_us"]
    assert worker.measure(Alone(True), worker.Case(Alone(True), op, nbytes, False), 2000.0)["wrong"] == 2


def test_the_worker_reduces_in_one_buffer() -> None:
    bound: list[bool] = []

    class Same(Alone):
        def bind(self, op: str, send: np.ndarray, recv: np.ndarray) -> worker.Call:
            bound.append(send is recv)
            return super().bind(op, send, recv)

    for inplace in (False, True):
        bound.clear()
        row = worker.measure(Same(), worker.Case(Same(), "allreduce", 4096, inplace), 2000.0)
        assert (row["wrong"], bound[0]) == (0, inplace)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("op", [*worker.OPS, *worker.MORE])
def test_the_worker_knows_what_every_rank_must_get(op: str, size: int) -> None:
    nothing = {"bind": lambda *_: None}
    ranks = [worker.Case(SimpleNamespace(rank=r, size=size, **nothing), op, 12 * 1000, False) for r in range(size)]
    for case in ranks:
        case.fill(3)
    total = sum(case.send for case in ranks)
    for case in ranks:
        mine = slice(case.rank * case.part, (case.rank + 1) * case.part)
        if op in ("allreduce", "reduce_scatter", "reduce"):
            right = total[mine] if op == "reduce_scatter" else total
        elif op in ("allgather", "alltoall"):
            right = np.concatenate([other.send if op == "allgather" else other.send[mine] for other in ranks])
        else:
            right = ranks[0].recv if op == "broadcast" else ranks[case.rank - 1].send
        case.recv[:] = right
    assert [case.wrong(3) for case in ranks] == [0] * size
