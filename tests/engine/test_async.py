"""Asynchronous operations: several in flight, waited for in any order, dropped, and mixed with blocking ones."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from ranks import Ranks, wait_until

import hetcoll

Pool = Callable[..., Ranks]
TRANSPORTS = ("shm", "tcp")
COUNT = 50_000  # 400 kB: several slots, so that operations are in flight for a while


class Batch:
    """One asynchronous collective of each kind, and what must come of it."""

    def __init__(self, comm: hetcoll.Communicator, tag: int) -> None:
        n, me = comm.size, comm.rank
        base = np.arange(COUNT) + 1000 * tag
        ranks, root = np.arange(n)[:, None], tag % n
        total = n * base + n * (n - 1) // 2
        self.works: list[hetcoll.Work] = []
        self.expected: list[tuple[np.ndarray, np.ndarray]] = []

        def start(work: hetcoll.Work, got: np.ndarray, wanted: np.ndarray) -> None:
            self.works.append(work)
            self.expected.append((got, wanted))

        mine, rows = base + me, np.ascontiguousarray(base + 10 * me + ranks)
        summed, part = np.zeros_like(base), np.zeros_like(base)
        gathered, swapped = np.zeros_like(rows), np.zeros_like(rows)
        spread = base.copy() if me == root else np.zeros_like(base)
        start(comm.allreduce(mine, summed, async_op=True), summed, total)
        start(comm.allgather(mine, gathered, async_op=True), gathered, base + ranks)
        start(comm.broadcast(spread, root, async_op=True), spread, base)
        start(comm.alltoall(rows, swapped, async_op=True), swapped, base + 10 * ranks + me)
        start(comm.reduce_scatter(rows, part, async_op=True), part, total + 9 * n * (n - 1) // 2 + n * me)
        start(comm.barrier(async_op=True), mine, base + me)

    def check(self, i: int) -> None:
        got, wanted = self.expected[i]
        assert np.array_equal(got, wanted), (i, got, wanted)


def _out_of_order(comm: hetcoll.Communicator) -> None:
    batches = [Batch(comm, tag) for tag in range(3)]
    order = [(batch, i) for batch in batches for i in range(len(batch.works))]
    for at in np.random.default_rng(comm.rank).permutation(len(order)):  # another order on every rank
        batch, i = order[at]
        batch.works[i].wait()
        assert batch.works[i].done
        assert batch.works[i].error is None
        batch.check(i)
        batch.works[i].wait()  # again: nothing happens


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [2, 3])
def test_works_are_waited_for_in_any_order(pool: Pool, size: int, transport: str) -> None:
    pool(size, HETCOLL_TRANSPORT=transport).run(_out_of_order)


def _all_threads(targets: list[Callable[[], None]]) -> None:
    """Run the targets in a thread each, and raise what one of them raised."""
    errors: list[BaseException] = []

    def guarded(target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(target,), daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def _from_threads(comm: hetcoll.Communicator) -> None:
    batch = Batch(comm, 1)

    def wait(i: int) -> None:
        batch.works[i].wait()
        batch.check(i)

    _all_threads([lambda i=i: wait(i) for i in reversed(range(len(batch.works)))])
    work = comm.allreduce(np.ones(COUNT), total := np.empty(COUNT), async_op=True)
    _all_threads([work.wait] * 4)  # several threads wait for one Work
    assert (total == comm.size).all()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_works_are_waited_for_in_other_threads(pool: Pool, transport: str) -> None:
    pool(3, HETCOLL_TRANSPORT=transport).run(_from_threads)


def _dropped(comm: hetcoll.Communicator) -> None:
    """Rank 0 starts and drops its call before rank 1 has begun, so that it is surely in flight."""
    comm.allreduce(np.zeros(COUNT))  # so that the plan is there and starting it waits for nobody
    memory, go = bytearray(COUNT * 8), np.zeros(1)
    array = np.frombuffer(memory)
    array[:] = comm.rank + 1
    alive = weakref.ref(array)
    if comm.rank == 1:
        comm.recv(go, 0)
    work = comm.allreduce(array, async_op=True)
    if comm.rank == 0:
        assert not work.done
        assert work.error is None
        assert "in flight" in repr(work)
    del work, array
    if comm.rank == 0:
        gc.collect()
        assert alive() is not None
        comm.send(go, 1)
    x = np.full(COUNT, 5.0)
    comm.allreduce(x)  # comes after the dropped one and does not disturb it
    assert (x == 10).all()
    comm.barrier()
    wait_until(lambda: (np.frombuffer(memory) == 3).all())
    for _ in range(100):
        comm.allreduce(go, async_op=True).wait()
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_dropped_work_keeps_its_buffers_until_it_is_done(pool: Pool, transport: str) -> None:
    pool(2, HETCOLL_TRANSPORT=transport).run(_dropped)


def _mixed(comm: hetcoll.Communicator) -> None:
    n = comm.size
    x = np.ones(COUNT)
    for i in range(6):
        first = comm.allreduce(x * i, early := np.empty(COUNT), async_op=True)
        comm.allreduce(x, between := np.empty(COUNT))
        second = comm.allgather(x[:100] * comm.rank, rows := np.empty((n, 100)), async_op=True)
        comm.broadcast(root := np.full(10, float(comm.rank)), i % n)
        comm.barrier()
        second.wait()
        first.wait()
        assert (early == n * i).all()
        assert (between == n).all()
        assert (root == i % n).all()
        assert (rows == np.arange(n)[:, None]).all()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_asynchronous_and_blocking_calls_mix(pool: Pool, transport: str) -> None:
    pool(3, HETCOLL_TRANSPORT=transport).run(_mixed)


def _all_send_first(comm: hetcoll.Communicator) -> None:
    n, me = comm.size, comm.rank
    for count in (1, 1000, 100_003):
        outgoing = [np.arange(count) + 100 * me + peer for peer in range(n)]
        incoming = [np.zeros(count, np.int64) for _ in range(n)]
        with comm.group():
            for peer in range(n):  # this rank is one of them
                comm.send(outgoing[peer], peer)
            for peer in reversed(range(n)):
                comm.recv(incoming[peer], peer)
        for peer in range(n):
            assert np.array_equal(incoming[peer], np.arange(count) + 100 * peer + me), (count, peer)


@pytest.mark.parametrize("env", [{"HETCOLL_SHM_BYTES": "4096"}, {}, {"HETCOLL_TRANSPORT": "tcp"}], ids=str)
def test_every_rank_sends_first_in_a_group(pool: Pool, env: dict[str, str]) -> None:
    pool(3, **env).run(_all_send_first)


def _many_messages(comm: hetcoll.Communicator) -> None:
    count, other = 200, 1 - comm.rank
    sent = [np.full(1 + i % 7, i + 1000 * comm.rank) for i in range(count)]
    got = [np.zeros(1 + i % 7, np.int64) for i in range(count)]
    for i in range(count):  # blocking, one way after the other
        for sender in (0, 1):
            if comm.rank == sender:
                comm.send(sent[i], other)
            else:
                comm.recv(got[i], other)
    assert all((g == i + 1000 * other).all() for i, g in enumerate(got))
    for g in got:
        g[:] = -1
    works = [comm.send(s, other, async_op=True) for s in sent]
    works += [comm.recv(g, other, async_op=True) for g in got]
    for work in reversed(works):
        work.wait()
    assert all((g == i + 1000 * other).all() for i, g in enumerate(got))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_many_small_messages_arrive_in_order(pool: Pool, transport: str) -> None:
    pool(2, HETCOLL_TRANSPORT=transport).run(_many_messages)


def _two_communicators(comm: hetcoll.Communicator) -> None:
    with comm.split(0) as first, comm.split(0, -comm.rank) as second:

        def use(own: hetcoll.Communicator, factor: int) -> None:
            for i in range(40):
                x = np.full(1 + 331 * (i % 5), float(factor * i))
                own.allreduce(x)
                assert (x == own.size * factor * i).all(), (factor, i)
                own.broadcast(x := np.full(3, own.rank), i % own.size)
                assert (x == i % own.size).all(), (factor, i)

        _all_threads([lambda: use(first, 1), lambda: use(second, 7)])
        comm.barrier()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_threads_use_a_communicator_each(pool: Pool, transport: str) -> None:
    pool(3, HETCOLL_TRANSPORT=transport).run(_two_communicators)
