"""How often bytes are copied between ranks of a host: what `counters` says of puts, gets, messages and new layouts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from cases import variant
from ranks import Ranks

import hetcoll
from hetcoll.plan.layout import Layout
from hetcoll.runtime.reshard import Item, reshard

Pool = Callable[..., Ranks]
NBYTES = 1 << 20
FEW = 4 << 10  # more than requests, answers, and what ranks agree on


def counted(comm: hetcoll.Communicator, call: Callable[[], object]) -> tuple[int, int, int]:
    """Bytes that this rank staged, lent and took in shared memory during a call of all ranks."""
    names = ("shm_staged_bytes", "shm_lent_bytes", "shm_copied_bytes")
    comm.barrier()
    before = comm.counters()
    comm.barrier()  # or another rank's call would have begun before
    call()
    comm.barrier()
    after = comm.counters()
    staged, lent, taken = (after[name] - before[name] for name in names)
    return staged, lent, taken


def put(comm: hetcoll.Communicator, reads: str) -> tuple[int, int, int]:
    """From rank 0 to rank 1, which is in no call then."""
    comm = variant(comm, shm_read=reads)
    src, window_memory = np.full(NBYTES, 7, np.uint8), np.zeros(NBYTES, np.uint8)
    with comm.window(window_memory) as window:
        window.put(src, 1 - comm.rank, 0)  # finds out whether memory can be read
        comm.barrier()
        found = counted(comm, lambda: window.put(src, 1, 0) if comm.rank == 0 else None)
        assert (window_memory == 7).all()
    return found


def get(comm: hetcoll.Communicator) -> tuple[int, int, int]:
    dst, window_memory = np.zeros(NBYTES, np.uint8), np.full(NBYTES, 7, np.uint8)
    with comm.window(window_memory) as window:
        found = counted(comm, lambda: window.get(dst, 1, 0) if comm.rank == 0 else None)
        assert comm.rank == 1 or (dst == 7).all()
    return found


def move(comm: hetcoll.Communicator, shared: bool) -> tuple[int, int, int]:
    """An array from rank 0 to rank 1, out of memory that the ranks of the host share, or of rank 0 alone."""
    source, target = Layout((NBYTES,), (0,), (), ()), Layout((NBYTES,), (1,), (), ())
    held = comm.empty(NBYTES * (comm.rank == 0), np.uint8) if shared else np.empty(NBYTES * (comm.rank == 0), np.uint8)
    held[:] = 7
    out = np.zeros(NBYTES * (comm.rank == 1), np.uint8)
    found = counted(comm, lambda: reshard(comm._core, lambda: [Item(held, source, target, out)]))
    assert (out == 7).all()
    return found


def near(found: tuple[int, int, int], *wanted: int) -> bool:
    return all(0 <= got - each * NBYTES < FEW for got, each in zip(found, wanted, strict=True))


def test_a_put_is_copied_once_where_memory_can_be_read(pool: Pool) -> None:
    """By its receiver, out of the sender's memory, to where it belongs: nothing else is copied."""
    sender, receiver = pool(2).run(put, "always", timeout=60)
    if not sender[1]:
        pytest.skip("this system lets no process read another one's memory")
    assert near(sender, 0, 1, 0), sender
    assert near(receiver, 0, 0, 1), receiver


def test_a_put_through_slots_is_copied_twice(pool: Pool) -> None:
    sender, receiver = pool(2).run(put, "never", timeout=60)
    assert near(sender, 1, 0, 0), sender
    assert near(receiver, 0, 0, 1), receiver


def test_a_get_is_copied_twice(pool: Pool) -> None:
    asks, owner = pool(2).run(get, timeout=60)
    assert near(owner, 1, 0, 0), owner
    assert near(asks, 0, 0, 1), asks


@pytest.mark.parametrize("shared", [True, False])
def test_a_new_layout_is_copied_once_out_of_memory_that_is_shared(pool: Pool, shared: bool) -> None:
    """And once more, into slots, out of other memory."""
    holds, wants = pool(2).run(move, shared, timeout=60)
    assert near(holds, 0, 1, 0) if shared else near(holds, 1, 0, 0), holds
    assert near(wants, 0, 0, 1), wants


def test_over_tcp_nothing_passes_shared_memory(pool: Pool) -> None:
    assert pool(2, HETCOLL_TRANSPORT="tcp").run(move, False, timeout=60) == [(0, 0, 0)] * 2
