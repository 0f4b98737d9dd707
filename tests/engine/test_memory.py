"""`empty` gives memory that moves without a staging copy; `register` announces memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ranks import Ranks
from thorough import parametrize

import hetcoll

Pool = Callable[..., Ranks]
COUNTS = (1, 1000, 4096, 4097, 65_537, 1_000_003)  # below and above what is lent instead of copied


def _collectives(comm: hetcoll.Communicator) -> None:
    n, me = comm.size, comm.rank
    for count in COUNTS:
        a, b = comm.empty(count, "int64"), comm.empty(count, "int64")
        wide, wide2 = comm.empty(count * n, "int64"), comm.empty(count * n, "int64")
        base = np.arange(count)
        for _ in range(2):  # memory lent in one round is written in the next
            a[:] = base + me
            comm.allreduce(a, b)
            assert np.array_equal(b, base * n + n * (n - 1) // 2)
            assert np.array_equal(a, base + me)
            comm.allgather(a, wide)
            assert np.array_equal(wide.reshape(n, count), base + np.arange(n)[:, None])
            comm.alltoall(wide, wide2)
            assert np.array_equal(wide2.reshape(n, count), np.broadcast_to(base + me, (n, count)))
            comm.reduce_scatter(wide, b)
            assert np.array_equal(b, n * (base + me))
            comm.allreduce(a)
            assert np.array_equal(a, base * n + n * (n - 1) // 2)
            comm.broadcast(wide, root=n - 1)
            a[:] = me
            with comm.group():
                comm.send(a, (me + 1) % n)
                comm.recv(b, (me - 1) % n)
            assert np.array_equal(b, np.full(count, (me - 1) % n))


@parametrize("size", [3, 2, 4], first=1)
@parametrize("algo", ["auto", "staged", "ring", "direct", "tree", "allreduce:halving_doubling"], first=1)
def test_lent_memory_gives_the_same_results(pool: Pool, size: int, algo: str) -> None:
    pool(size, **({} if algo == "auto" else {"HETCOLL_ALGO": algo})).run(_collectives)


def test_over_tcp_it_is_ordinary_memory(pool: Pool) -> None:
    pool(2, HETCOLL_TRANSPORT="tcp").run(_collectives)


def _mixed(comm: hetcoll.Communicator) -> None:
    count = 300_000
    mine = comm.empty(count) if comm.rank % 2 else np.empty(count, np.float32)
    mine[:] = comm.rank + 1
    comm.allreduce(mine)
    assert (mine == comm.size * (comm.size + 1) / 2).all()


def test_one_rank_lends_and_the_other_copies(pool: Pool) -> None:
    pool(3).run(_mixed)


def _alive(comm: hetcoll.Communicator) -> tuple[float, Any]:
    kept = comm.empty((3, 5), "bfloat16")
    kept[:] = 2
    view = kept[1:]
    del kept
    gc.collect()
    return float(view.astype(np.float32).sum()), view.shape


def test_a_view_keeps_its_memory(pool: Pool) -> None:
    assert pool(2).run(_alive) == [(20.0, (2, 5))] * 2


def _shared_kib() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssShmem"))


def _recycled(comm: hetcoll.Communicator) -> int:
    before = _shared_kib()
    for _ in range(6):
        block = comm.empty(8 << 20, "uint8")
        block[:] = 1
        del block
    return _shared_kib() - before


def test_memory_is_given_back_at_once(pool: Pool) -> None:
    assert max(pool(2).run(_recycled)) < 1024


def _outlives(job: Any) -> float:
    comm = job.join()
    kept = comm.empty(100_000)
    kept[:] = 1
    comm.close()
    gc.collect()
    kept += 1
    return float(kept.sum())


def test_an_array_may_outlive_its_communicator(launch: Pool) -> None:
    assert launch(2, join=False).run(_outlives) == [200_000.0] * 2


def _refused(comm: hetcoll.Communicator) -> None:
    with pytest.raises(ValueError, match="wanted 1099511627776 bytes in one piece"):
        comm.empty(1 << 40, "uint8")
    with pytest.raises(hetcoll.BufferTypeError, match="dtype: datetime64"):
        comm.empty(3, "datetime64[s]")
    with pytest.raises(hetcoll.ArgumentError, match="device: wanted"):
        comm.empty(3, device="cuda")


def test_what_cannot_be_had_is_refused(pool: Pool) -> None:
    pool(2).run(_refused)


def _registered(comm: hetcoll.Communicator) -> None:
    data = np.ones(70_000, np.float32)
    with comm.register(data) as registration:
        assert registration.nbytes == data.nbytes
        comm.allreduce(data)
    assert registration.nbytes == 0
    assert (data == comm.size).all()
    with pytest.raises(hetcoll.BufferTypeError, match="buf"):
        comm.register(3.0)


def test_registered_memory(pool: Pool) -> None:
    pool(2).run(_registered)
