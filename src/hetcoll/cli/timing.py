"""How `hetcoll perf` times a call: samples in microseconds per call on this rank, and what is reported of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

BUDGET_US = 200_000.0  # aim of one measurement when --iters is not given
MOST_CALLS = 5000
FEWEST_CALLS = 5
BATCH_BELOW_US = 10.0  # faster calls are timed in batches, so that reading the clock does not count
BATCH = 10


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds per call: the mean of all timed calls, the median and the 99th percentile of the samples."""

    mean_us: float
    p50_us: float
    p99_us: float

    @classmethod
    def of(cls, samples: NDArray[np.float64]) -> Timing:
        p50, p99 = np.percentile(samples, [50, 99])
        return cls(float(samples.mean()), float(p50), float(p99))


@dataclass(frozen=True, slots=True)
class Schedule:
    """`samples` samples of `batch` calls each."""

    samples: int
    batch: int

    @classmethod
    def choose(cls, estimate_us: float, iters: int | None) -> Schedule:
        """For calls of about `estimate_us`: `iters` calls, or as many as fill the budget, 5 to 5000."""
        estimate_us = max(estimate_us, 0.01)
        calls = iters if iters is not None else round(min(MOST_CALLS, max(FEWEST_CALLS, BUDGET_US / estimate_us)))
        batch = BATCH if estimate_us < BATCH_BELOW_US and calls >= 5 * BATCH else 1
        return cls(-(-calls // batch), batch)


def take_samples(call: Callable[[], object], schedule: Schedule) -> NDArray[np.float64]:
    """Run the calls one after another; microseconds per call of each sample."""
    samples, calls = schedule.samples, schedule.batch
    stamps = [0] * (samples + 1)
    now = perf_counter_ns
    stamps[0] = now()
    if calls == 1:
        for i in range(1, samples + 1):
            call()
            stamps[i] = now()
    else:
        for i in range(1, samples + 1):
            for _ in repeat(None, calls):
                call()
            stamps[i] = now()
    spent = np.diff(np.asarray(stamps, dtype=np.int64)).astype(np.float64)
    return spent / (1e3 * calls)


def slowest(comm: Any, own: Timing, wrong: int) -> tuple[Timing, int]:
    """The timing of the rank with the largest mean, and the sum of everyone's wrong elements. Collective."""
    mine = np.array([own.mean_us, own.p50_us, own.p99_us, float(wrong)])
    rows = np.empty((comm.size, mine.size))
    comm.allgather(mine, rows.reshape(-1))
    row = rows[int(rows[:, 0].argmax())]
    return Timing(float(row[0]), float(row[1]), float(row[2])), int(rows[:, 3].sum())


def timed(comm: Any, call: Callable[[], object], budget_us: float, fewest: int, most: int) -> Timing:
    """Of as many calls as fill the budget, on the rank that takes the longest. Collective."""
    begun = perf_counter_ns()
    call()
    estimate = agree_on_estimate(comm, (perf_counter_ns() - begun) / 1e3)
    schedule = Schedule.choose(estimate, max(fewest, round(min(float(most), budget_us / max(estimate, 0.1)))))
    comm.barrier()
    found, _ = slowest(comm, Timing.of(take_samples(call, schedule)), 0)
    return found


def agree_on_estimate(comm: Any, own_us: float) -> float:
    """The largest of all ranks' estimates, the same number on all of them. Collective."""
    rows = np.empty(comm.size)
    comm.allgather(np.array([own_us]), rows)
    return float(rows.max())
