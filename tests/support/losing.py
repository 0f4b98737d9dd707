"""Ranks that lose some of them, and what those that are left can do."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import Ranks, wait_until

import hetcoll


def works(comm: hetcoll.Communicator) -> None:
    """All kinds of calls, large and small, give the right results."""
    size, rank = comm.size, comm.rank
    for count in (1, 1000, 300_000):
        x = np.full(count, rank + 1.0)
        comm.allreduce(x)
        assert (x == size * (size + 1) / 2).all()
    everyone = np.empty(size)
    comm.allgather(np.array([float(rank)]), everyone)
    assert everyone.tolist() == list(range(size))
    work = comm.broadcast(np.ones(5000), root=size - 1, async_op=True)
    comm.barrier()
    work.wait()
    with comm.group():
        comm.send(np.array([rank]), (rank + 1) % size)
        comm.recv(got := np.empty(1, np.int64), (rank - 1) % size)
    assert got[0] == (rank - 1) % size
    part = comm.split(rank % 2)
    assert part is not None
    assert part.epoch == comm.epoch
    part.barrier()
    part.close()


def work(comm: hetcoll.Communicator) -> None:
    while True:
        comm.allreduce(np.ones(4))


def lose(comm: hetcoll.Communicator, victim: int) -> None:
    """Wait in a call until rank `victim` is killed, which no call before this one has to do with."""
    comm.agree()  # all have come so far
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(hetcoll.PeerLostError) as caught:
        work(comm)
    assert caught.value.rank == victim


def await_stopped(pid: int) -> None:
    """Until the system has stopped a process that was told to (proc(5))."""
    wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", 20)


def found(ranks: Ranks, *victims: int, seconds: float = 30) -> dict[int, Any]:
    """What the function gave on each rank but the victims, which have died."""
    outcomes = ranks.finish(seconds, only=[rank for rank in range(ranks.size) if rank not in victims])
    problems = "\n".join(filter(None, (outcome.problem() for outcome in outcomes)))
    assert not problems, problems
    for victim in victims:
        ranks.kill(victim)
    return {outcome.rank: outcome.value for outcome in outcomes}
