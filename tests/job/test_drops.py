"""Communicators whose last reference goes without `close`: they are closed then, and nothing of them stays."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from calls import LINKS, add, use_everything
from patience import DEADLINE
from ranks import Job, RankError, Ranks, Resources, wait_until
from thorough import parametrize

import hetcoll
from hetcoll import lifetime

Launch = Callable[..., Ranks]


def megabytes() -> float:
    """What of this process is in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def nothing_left(before: Resources) -> None:
    with contextlib.suppress(RankError):
        wait_until(lambda: not Resources.now().left_over(before), 20)
    left = Resources.now().left_over(before)
    assert left == "", left


def split_and_drop(comm: hetcoll.Communicator, times: int) -> tuple[str, float]:
    """No `gc.collect` here: what is not in flight goes with its last reference."""
    warnings.simplefilter("ignore", ResourceWarning)
    for i in range(times + 10):
        if i == 10:
            comm.barrier()
            before, held = Resources.now(), megabytes()
            gc.disable()
        part = comm.split(0)
        assert part is not None
        part.allreduce(np.ones(1000))
        part.allreduce(np.ones(1000), async_op=True).wait()
        part.barrier()
        gone = weakref.ref(part)
        del part
        wait_until(lambda gone=gone: gone() is None, 20)
    comm.barrier()
    gc.enable()
    nothing_left(before)
    return Resources.now().left_over(before), megabytes() - held


@parametrize("transport", ["auto", "tcp"], first=1)
def test_splits_that_are_dropped_leave_nothing(launch: Launch, transport: str) -> None:
    for left, grown in launch(2, HETCOLL_TRANSPORT=transport).run(split_and_drop, 100, timeout=90):
        assert left == ""
        assert grown < 20


def drop_in_every_state(comm: hetcoll.Communicator) -> list[str]:
    """With works in flight and works never waited for, an array that lives on, a failure, a cycle."""
    warnings.simplefilter("ignore", ResourceWarning)
    comm.barrier()  # its own links
    before = Resources.now()
    part = comm.split(0)
    assert part is not None
    use_everything(part)
    works = [part.allreduce(np.ones(100_000), async_op=True) for _ in range(3)]
    lent = part.empty(1000)
    comm.barrier()
    del part
    works[0].wait()  # it needs its communicator until its end
    comm.barrier()
    del works
    lent[:] = comm.rank
    failed = comm.split(0)
    assert failed is not None
    if comm.rank == 0:
        failed.abort("on purpose")
    with pytest.raises(hetcoll.AbortedError):
        failed.barrier()
    del failed
    ring = [comm.split(0)]
    ring.append(ring)  # type: ignore[arg-type]
    del ring
    comm.barrier()
    assert (lent == comm.rank).all()
    del lent
    gc.collect()
    nothing_left(before)
    return [Resources.now().left_over(before), f"{add(comm)}"]


@LINKS
def test_drops_in_every_state(launch: Launch, transport: str) -> None:
    assert launch(2, HETCOLL_TRANSPORT=transport).run(drop_in_every_state) == [["", "3.0"]] * 2


def drop_the_job(job: Job) -> tuple[str, str]:
    """The last communicator of a job takes the job's own connections with it, and says that nobody closed it."""
    before = Resources.now()
    comm = job.join()
    job.comm = None
    add(comm)
    comm.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del comm
        nothing_left(before)
    return str(caught[0].message), caught[0].category.__name__


def test_a_job_that_is_dropped(launch: Launch) -> None:
    said = launch(2, join=False).run(drop_the_job)
    assert said == [(f"<hetcoll.Communicator rank {rank} of 2> was not closed", "ResourceWarning") for rank in range(2)]


INIT_TWICE = """
import gc, sys, warnings
import numpy as np
import hetcoll
from hetcoll import lifetime

def use():
    comm = hetcoll.init()
    comm.allreduce(np.ones(4))

use()
use()
kept = hetcoll.init()
"""


def test_init_anew_after_a_drop_and_an_exit_without_close() -> None:
    """What is open at exit is closed in order, without a word."""
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", INIT_TWICE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "was not closed" in line]
    assert len(said) == 2
    assert all("ResourceWarning: <hetcoll.Communicator rank 0 of 1> was not closed" in line for line in said)


def test_what_is_about_to_be_closed_is_waited_for() -> None:
    """Another thread has just found what was dropped."""
    done: list[int] = []

    def close() -> None:
        done.append(1)
        lifetime._closers.discard(closer)

    closer = threading.Thread(target=close)
    lifetime._closers.add(closer)
    threading.Timer(0.05, closer.start).start()
    lifetime.await_drops()
    assert done
