"""Operations that are started again and again."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from ranks import Ranks, wait_until

import hetcoll


def _starts(comm: hetcoll.Communicator) -> None:
    rank, size = comm.rank, comm.size
    for count in (3, 100_000):
        x, out = np.zeros(count), np.zeros(count)
        every, part = np.zeros(size * count), np.zeros(count)
        wide = np.zeros(size * count)
        ops = [
            comm.allreduce_init(x, out), comm.allgather_init(x, every), comm.reduce_scatter_init(wide, part, "max"),
            comm.broadcast_init(root := np.zeros(count), size - 1),
            comm.alltoall_init(wide, other := np.zeros_like(wide)),
        ]  # fmt: skip
        for turn in range(4):
            x[:] = rank + turn
            wide[:] = np.repeat(np.arange(size), count) + rank
            root[:] = 7 + turn if rank == size - 1 else 0
            for op in ops:
                assert op.done
                op.start()
            for op in ops[::-1]:
                op.wait()
                assert op.done
            assert (out == sum(range(size)) + size * turn).all()
            assert (every == np.repeat(np.arange(size) + turn, count)).all()
            assert (part == rank + size - 1).all()
            assert (root == 7 + turn).all()
            assert (other == np.repeat(np.arange(size), count) + rank).all()
    op = comm.allreduce_init(y := np.ones(2))  # in place, and it matches the call
    (op.start(), op.wait()) if rank else comm.allreduce(y)
    assert (y == size).all()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_operations_are_started_again(pool: Callable[..., Ranks], transport: str) -> None:
    pool(3, HETCOLL_TRANSPORT=transport).run(_starts)


def _refuse(comm: hetcoll.Communicator) -> None:
    op = comm.allreduce_init(np.ones(2))
    op.wait()  # nothing was started
    for _ in range(2):
        op.start()
        with pytest.raises(hetcoll.ArgumentError, match=r"start\(\): wanted wait\(\) since the last start"):
            op.start()
        op.wait()
    with pytest.raises(hetcoll.ArgumentError, match="wanted sends and receives only, got allreduce"), comm.group():
        op.start()
    op.start()
    op.wait()
    with pytest.raises(hetcoll.ArgumentError, match="recvbuf: wanted 2 elements"):
        comm.allreduce_init(np.ones(2), np.ones(3))


def _no_python(comm: hetcoll.Communicator) -> None:
    """Started again, it runs no Python."""
    op = comm.allreduce_init(np.ones(2))
    op.start()
    op.wait()
    comm.barrier()
    frames: list[str] = []
    sys.setprofile(lambda frame, event, _: frames.append(frame.f_code.co_name) if event == "call" else None)
    try:
        for _ in range(3):
            op.start()
            op.wait()
    finally:
        sys.setprofile(None)
    assert frames == []


def _dropped(comm: hetcoll.Communicator) -> None:
    """Its memory stays until it is over, although nobody refers to it."""
    x, y = np.full(300_000, 2.0), np.zeros(300_000)
    op = comm.allreduce_init(x, y)
    for _ in range(2):
        op.start()
        op.wait()
    gone = weakref.ref(x)
    comm.barrier()
    if comm.rank == 0:
        op.start()
        assert not op.done
        del op, x
        gc.collect()
        assert gone() is not None
        comm.send(np.ones(1), 1)
    else:
        comm.recv(np.zeros(1), 0)
        op.start()
        op.wait()
    comm.barrier()
    assert (y == 2.0 * comm.size).all()
    if comm.rank == 0:
        other = comm.allreduce_init(np.full(300_000, 2.0))
        other.start()
        del other  # the next one lets go of the first
        wait_until(lambda: gone() is None)
    else:
        comm.allreduce(np.full(300_000, 2.0))
    comm.barrier()


def test_what_cannot_be_started(pool: Callable[..., Ranks]) -> None:
    for case in (_refuse, _no_python):
        pool(2).run(case)


def test_a_dropped_operation_keeps_its_memory(launch: Callable[..., Ranks]) -> None:
    launch(2).run(_dropped)


def _lost(comm: hetcoll.Communicator) -> None:
    op = comm.allreduce_init(np.ones(2))
    op.start()
    op.wait()
    if comm.rank == 0:
        comm.recv(np.ones(1), 1)  # it is in no call now
        comm.abort("enough")
        with pytest.raises(hetcoll.AbortedError, match="enough"):
            op.start()
        comm.close()
        with pytest.raises(hetcoll.ClosedError):
            op.start()
    else:

        def call() -> None:
            op.start()
            op.wait()

        comm.send(np.ones(1), 0)
        with pytest.raises(hetcoll.AbortedError, match="enough"):
            call()


def test_failures_are_told_as_by_calls(launch: Callable[..., Ranks]) -> None:
    launch(2).run(_lost)


def _checked(comm: hetcoll.Communicator) -> None:
    op = comm.allreduce_init(x := np.ones(2))
    for turn in range(3):
        op.start()
        op.wait()
        assert (x == comm.size ** (turn + 1)).all()


def test_under_the_check(launch: Callable[..., Ranks]) -> None:
    launch(2, HETCOLL_CHECK="1").run(_checked)
