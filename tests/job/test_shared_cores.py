"""Ranks that the system has put on one core though there are others."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from ranks import Ranks

import hetcoll

Launch = Callable[..., Ranks]
LATE = 0.1  # seconds: who sleeps for that long is woken on its waker's core
CALLS = 500
TIMES, MOST = 8, 80  # that count, and in all
QUIET = LATE / 3  # of all cores together in that time: who else computes has a core that nobody can go to


def busy() -> float:
    """For how many seconds the cores have not been idle, all together."""
    user, nice, system, _idle, _iowait, *others = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")


def cores_after_long_waits(comm: hetcoll.Communicator) -> tuple[list[int], bool]:
    """On which core this rank was in the end, behind each long wait while nobody else computed; and whether it may use
    those that it might before. A communicator that has met somebody on a core goes there less often for seconds: each
    time has one of its own."""
    core, allowed = ctypes.CDLL(None).sched_getcpu, os.sched_getaffinity(0)
    x, found = np.ones(2, np.float32), list[int]()
    for _ in range(MOST):
        part = comm.split(0)
        assert part is not None
        part.allreduce(x)
        part.barrier()
        before = busy()
        if part.rank == 1:
            time.sleep(LATE)
        at = 0
        for _ in range(CALLS):
            part.allreduce(x)
            at = core()
        quiet = np.array([busy() - before < QUIET])
        part.broadcast(quiet)
        part.close()
        if quiet[0]:
            found.append(at)
        if len(found) == TIMES:
            break
    return found, os.sched_getaffinity(0) == allowed


@pytest.mark.calm
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_two_ranks_do_not_stay_on_one_core_after_a_long_wait(launch: Launch) -> None:
    """They end on two cores, where most times they used to be on one for all calls."""
    (first, unbound), (second, unbound_too) = launch(2).run(cores_after_long_waits)
    assert unbound
    assert unbound_too
    if len(first) < TIMES:
        pytest.skip("others compute here all the time")
    together = [a for a, b in zip(first, second, strict=True) if a == b]
    assert len(together) <= TIMES // 4, f"{len(together)} times of {TIMES} both ended on one core"
