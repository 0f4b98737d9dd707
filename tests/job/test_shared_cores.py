"""Ranks that the system has put on one core though there are others."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable

import numpy as np
import pytest
from ranks import Ranks

import hetcoll

Launch = Callable[..., Ranks]
LATE = 0.1  # seconds: who sleeps for that long is woken on its waker's core
CALLS = 500
TIMES = 8


def cores_after_long_waits(comm: hetcoll.Communicator) -> tuple[list[list[int]], bool]:
    """On which core this rank was after each call behind a long wait, and whether it may use those that it might."""
    core, allowed = ctypes.CDLL(None).sched_getcpu, os.sched_getaffinity(0)
    x = np.ones(2, np.float32)
    times = []
    for _ in range(TIMES):
        comm.barrier()
        if comm.rank == 1:
            time.sleep(LATE)
        found = []
        for _ in range(CALLS):
            comm.allreduce(x)
            found.append(core())
        times.append(found)
    return times, os.sched_getaffinity(0) == allowed


@pytest.mark.calm
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_two_ranks_do_not_stay_on_one_core_after_a_long_wait(launch: Launch) -> None:
    """Each time they were on two cores at the end, where they used to be on one most times for all calls."""
    (first, unbound), (second, unbound_too) = launch(2).run(cores_after_long_waits)
    assert unbound
    assert unbound_too
    together = [a for a, b in zip(first, second, strict=True) if a[-1] == b[-1]]
    assert len(together) <= TIMES // 4, f"{len(together)} times of {TIMES} both ended on one core"
