"""Calls that tests of the life of a communicator make, to see that it works."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hetcoll

LINKS = pytest.mark.parametrize("transport", ["auto", "tcp"])


def f32(count: int) -> Any:
    return np.ones(count, np.float32)


def add(comm: hetcoll.Communicator, count: int = 4) -> float:
    x = np.full(count, comm.rank + 1.0)
    comm.allreduce(x)
    return float(x.sum()) / max(1, count)


def use_everything(comm: hetcoll.Communicator) -> None:
    """Every link, the engine's own thread, scratch memory, and a message longer than the rings."""
    for count in (1, 10, 100_000):
        add(comm, count)
    comm.allreduce(np.ones(1000), async_op=True).wait()
    comm.alltoall(np.ones(comm.size * 300_000), np.ones(comm.size * 300_000))
    comm.barrier()
