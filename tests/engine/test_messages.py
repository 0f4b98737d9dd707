"""Messages between pairs, and blocking calls between asynchronous ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from ranks import Ranks

import hetcoll
from hetcoll.calls.buffers import Buffer


def _interleave(comm: hetcoll.Communicator) -> None:
    x, total = np.ones(1000), np.empty(1000)
    for i in range(400):
        work = comm.allreduce(x, total, async_op=True)
        comm.broadcast(x)
        work.wait()
        assert (total == comm.size).all(), i


def test_a_blocking_call_while_another_finishes_in_the_background(pool: Callable[..., Ranks]) -> None:
    pool(3).run(_interleave)


def _round_the_ring(comm: hetcoll.Communicator) -> None:
    n, me = comm.size, comm.rank
    for count in (0, 1, 1000, 300_000):
        out, into = np.full(count + me, me), np.empty(count + (me - 1) % n, np.int64)
        comm.sendrecv(out, (me + 1) % n, into, (me - 1) % n)  # counts differ from pair to pair
        assert (into == (me - 1) % n).all()
        comm.sendrecv(into, (me - 1) % n, out, (me + 1) % n)
        assert (out == me).all()
    comm.sendrecv(np.arange(5), me, into := np.zeros(5, np.int64), me)
    assert (into == np.arange(5)).all()
    if me == 0:
        comm.sendrecv(np.arange(3.0), 1, back := np.empty(3), 1)  # the other half may be two calls
        assert (back == 7).all()
    elif me == 1:
        comm.recv(got := np.empty(3), 0)
        assert (got == np.arange(3.0)).all()
        comm.send(np.full(3, 7.0), 0)
    wide = np.full(1000 + me, me)  # as above, from a rank that looks like those two
    far = max(n, (me + 1) % n << 16 | (me - 1) % n)
    on_gpu = Buffer(64, 2, hetcoll.DType.FLOAT64, None, "cuda")
    for wrong in (
        lambda: comm.sendrecv(np.zeros(2), n, np.zeros(2), me),
        lambda: comm.sendrecv(np.zeros(2), me, np.zeros(2), -1),
        lambda: comm.sendrecv(wide, 0, np.empty(1000 + (me - 1) % n, int), far),
        lambda: comm.sendrecv(np.zeros(2), me, np.zeros(2), (me + 1) % n),
        lambda: comm.sendrecv(np.zeros(2), me, np.zeros(2, np.int8), me),
        lambda: comm.sendrecv(np.zeros(2), (me + 1) % n, on_gpu, (me - 1) % n),
        lambda: comm.sendrecv(on_gpu, (me + 1) % n, np.zeros(2), (me - 1) % n),
    ):
        with pytest.raises((hetcoll.ArgumentError, hetcoll.BufferTypeError)):
            wrong()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_sendrecv(pool: Callable[..., Ranks], transport: str) -> None:
    pool(3, HETCOLL_TRANSPORT=transport).run(_round_the_ring)
