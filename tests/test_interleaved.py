"""Blocking calls between asynchronous ones: a call on the interpreter's lock and the engine's own thread must not wait
for each other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from ranks import Ranks

import hetcoll


def _interleave(comm: hetcoll.Communicator) -> None:
    x, total = np.ones(1000), np.empty(1000)
    for i in range(400):
        work = comm.allreduce(x, total, async_op=True)
        comm.broadcast(x)
        work.wait()
        assert (total == comm.size).all(), i


def test_a_blocking_call_while_another_finishes_in_the_background(pool: Callable[..., Ranks]) -> None:
    pool(3).run(_interleave)
