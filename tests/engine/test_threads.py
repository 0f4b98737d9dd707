"""Several threads of a rank on one communicator: what they may do at once, and what they are told they may not."""

from __future__ import annotations

import functools
import sys
import sysconfig
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ranks import Ranks, wait_until

import hetcoll

Launch = Callable[..., Ranks]
TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "tcp"])
SECONDS = 20.0


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What the calls gave, each on a thread of its own, all begun at once; their errors are raised."""
    start = threading.Barrier(len(calls))
    found: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            start.wait(SECONDS)
            found[i] = calls[i]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]
    return found


def first_allreduces(comm: hetcoll.Communicator, threads: int) -> list[list[float]]:
    """The same call, whose links and plan nothing has made before: on each split again."""
    found = []
    for _ in range(4):
        part = comm.split(0)
        assert part is not None
        arrays = [np.full(1000, comm.rank + 1.0) for _ in range(threads)]
        together(*(functools.partial(part.allreduce, x) for x in arrays))
        found.append([float(x.min()) for x in arrays] + [float(x.max()) for x in arrays])
        comm.barrier()
        part.close()
    return found


@TRANSPORTS
@pytest.mark.parametrize("threads", [2, 5])
def test_threads_that_begin_with_the_same_call(pool: Launch, transport: str, threads: int) -> None:
    for found in pool(3, HETCOLL_TRANSPORT=transport).run(first_allreduces, threads):
        assert found == [[6.0] * 2 * threads] * 4


def first_messages(comm: hetcoll.Communicator) -> int:
    """One thread sends and another receives, to and from every other rank, each rank in another order."""
    me, size = comm.rank, comm.size
    others = [(me + step) % size for step in range(1, size)]

    def meet(part: hetcoll.Communicator, turn: int) -> int:
        got = {peer: np.zeros(3000) for peer in others}

        def send() -> None:
            for peer in others:
                part.send(np.full(3000, 100.0 * turn + me), peer)

        def receive() -> None:
            for peer in reversed(others):
                part.recv(got[peer], peer)

        together(send, receive, part.barrier)
        return sum(not (x == 100.0 * turn + peer).all() for peer, x in got.items())

    wrong = 0
    for turn in range(4):
        part = comm.split(0)
        assert part is not None
        wrong += meet(part, turn)
        comm.barrier()
        part.close()
    return wrong


@TRANSPORTS
def test_threads_that_begin_with_messages(pool: Launch, transport: str) -> None:
    assert pool(3, HETCOLL_TRANSPORT=transport).run(first_messages) == [0, 0, 0]


def a_thread_waits_for_another_rank(comm: hetcoll.Communicator) -> list[float]:
    """Rank 2 is not there yet: who waits for a link to it keeps no other thread from the links to others."""
    x = np.array([10.0 + comm.rank])
    got = [np.zeros(1), np.zeros(1)]

    def exchange(i: int, peer: int) -> None:
        comm.sendrecv(x, peer, got[i], peer)

    if comm.rank == 2:
        comm._session.control.get(b"ranks 0 and 1 have met", SECONDS)
        together(lambda: exchange(0, 0), lambda: exchange(1, 1))
    else:

        def meet() -> None:
            wait_until(lambda: comm._host.reporter.calls)  # the other thread is in its call
            exchange(1, 1 - comm.rank)
            if comm.rank == 0:
                comm._session.control.put(b"ranks 0 and 1 have met", b"")

        together(lambda: exchange(0, 2), meet)
    return [float(each[0]) for each in got]


@TRANSPORTS
def test_a_thread_that_waits_for_a_link_keeps_no_other_one(launch: Launch, transport: str) -> None:
    ranks = launch(3, HETCOLL_TRANSPORT=transport)
    assert ranks.run(a_thread_waits_for_another_rank) == [[12.0, 11.0], [12.0, 10.0], [10.0, 11.0]]


def collectives_in_order(comm: hetcoll.Communicator, times: int) -> int:
    """Threads take turns in an order that they agree on: then each may block in its own call, whatever its size."""
    turn, news, wrong = [0], threading.Condition(), [0]

    def run(mine: int) -> None:
        for i in range(times):
            with news:
                news.wait_for(lambda: turn[0] % 3 == mine, SECONDS)
                x = np.full(1 + 7000 * mine, comm.rank + float(i))
                work = comm.allreduce(x, async_op=True)  # it has its place in the order from here on
                turn[0] += 1
                news.notify_all()
            work.wait()
            wrong[0] += not (x == comm.size * (comm.size - 1) / 2 + comm.size * i).all()

    together(*(functools.partial(run, mine) for mine in range(3)))
    return wrong[0]


@TRANSPORTS
def test_collectives_that_threads_begin_in_one_order(pool: Launch, transport: str) -> None:
    assert pool(3, HETCOLL_TRANSPORT=transport).run(collectives_in_order, 20) == [0, 0, 0]


def all_at_once(comm: hetcoll.Communicator, times: int) -> int:
    """Threads with communicators of their own, ever other sizes and calls that wait and that do not; on one that they
    share a thread that sends, one that receives and one that splits it and closes the parts; and one that looks."""
    parts = [comm.split(0) for _ in range(3)]
    me, size, over = comm.rank, comm.size, threading.Event()
    total = size * (size - 1) / 2

    def hammer(mine: int) -> int:
        part, wrong = parts[mine], 0
        assert part is not None
        for i in range(times):
            x = np.full(1 + 97 * (i % 40), me + float(i + mine))
            y = x.copy()
            work = part.allreduce(x, async_op=True)
            part.allreduce(y, op=hetcoll.ReduceOp.MAX)
            work.wait()
            wrong += not (x == total + size * (i + mine)).all() or not (y == size - 1 + i + mine).all()
        return wrong

    def send() -> int:
        for i in range(times):
            comm.send(np.full(1 + 333 * (i % 8), float(i)), (me + 1) % size)
        return 0

    def receive() -> int:
        got = [np.zeros(1 + 333 * (i % 8)) for i in range(times)]
        for x in got:
            comm.recv(x, (me - 1) % size)
        return sum(not (x == i).all() for i, x in enumerate(got))

    def split() -> int:
        wrong = 0
        for i in range(times // 20):
            part = comm.split(0, key=-me)
            assert part is not None
            x = np.full(50, float(part.rank + i))
            part.allreduce(x)
            wrong += not (x == total + size * i).all()
            comm.barrier()
            part.close()
        return wrong

    def look() -> int:
        while not over.wait(0.01):
            found = comm.counters(), comm.memory(), comm.dump(), comm.explain("allreduce", 64), repr(parts)
            assert all(found)
        return 0

    ended: list[int] = []

    def counted(call: Callable[[], int]) -> int:
        try:
            return call()
        finally:
            ended.append(1)
            if len(ended) == len(work):
                over.set()

    work = [*(functools.partial(hammer, mine) for mine in range(len(parts))), send, receive, split]
    wrong = sum(together(*(functools.partial(counted, each) for each in work), look))
    comm.barrier()
    return wrong


@TRANSPORTS
def test_threads_that_do_everything_at_once(launch: Launch, transport: str) -> None:
    assert launch(2, HETCOLL_TRANSPORT=transport).run(all_at_once, 40) == [0, 0]


def collectives_in_another_order(comm: hetcoll.Communicator) -> str:
    """Two threads, two collectives: ranks that begin them in different orders are told so, none gets wrong data."""
    first, second = np.ones(10), np.ones((comm.size, 10))
    begun = threading.Event()

    def reduce() -> None:
        if comm.rank != 0:
            begun.wait(SECONDS)
        comm.allreduce(first, async_op=True)
        if comm.rank == 0:
            begun.set()

    def exchange() -> None:
        if comm.rank == 0:
            begun.wait(SECONDS)
        comm.alltoall(second, np.empty_like(second), async_op=True)
        if comm.rank != 0:
            begun.set()

    def both() -> None:
        together(reduce, exchange)  # the one that is begun later may hear of it at once
        comm.barrier()

    with pytest.raises(hetcoll.CollectiveMismatchError) as caught:
        both()
    return str(caught.value)


@TRANSPORTS
def test_collectives_that_threads_begin_in_different_orders(launch: Launch, transport: str) -> None:
    said = launch(2, HETCOLL_TRANSPORT=transport).run(collectives_in_another_order)
    assert all("allreduce" in text and "alltoall" in text for text in said), said


def close_beside_calls(comm: hetcoll.Communicator, times: int) -> list[str]:
    """Threads are in calls that cannot end, or begin new ones, when two others close the communicator, and when it is
    closed elsewhere."""
    found = set()

    def run(part: hetcoll.Communicator, call: Callable[[], Any]) -> None:
        try:
            while True:
                call()
        except (hetcoll.AbortedError, hetcoll.ClosedError, hetcoll.PeerLostError) as error:
            found.add(type(error).__name__)
        assert part.closed or comm.rank == 1

    for _ in range(times):
        part = comm.split(0)
        assert part is not None
        peer, x = 1 - comm.rank, np.ones(10)

        def message(part: hetcoll.Communicator = part, peer: int = peer) -> None:
            part.recv(np.zeros(3), peer)  # which nobody sends

        def close(part: hetcoll.Communicator = part) -> None:
            wait_until(lambda: part._engine.collectives > 20 or part.error is not None)
            part.close()

        calls = [
            functools.partial(run, part, message),
            functools.partial(run, part, functools.partial(part.allreduce, x)),
        ]
        together(*calls, *([close, close] if comm.rank == 0 else []))
        part.close()
        with pytest.raises(hetcoll.ClosedError):
            part.barrier()
        comm.barrier()
    return sorted(found)


@TRANSPORTS
def test_threads_close_beside_calls(launch: Launch, transport: str) -> None:
    first, second = launch(2, HETCOLL_TRANSPORT=transport).run(close_beside_calls, 5)
    assert set(first) <= {"AbortedError", "ClosedError"}
    assert second == ["PeerLostError"]


def started_twice(comm: hetcoll.Communicator, times: int) -> int:
    """Of two threads that start one operation at once, one is refused; whoever waits for it waits to its end."""
    refused, x = 0, np.zeros(20_000)
    op = comm.allreduce_init(x)

    def start() -> int:
        try:
            op.start()
        except hetcoll.ArgumentError:
            return 1
        return 0

    def wait() -> bool:
        op.wait()
        return bool((x == comm.size).all())

    for _ in range(times):
        x[:] = 1
        refused += sum(together(start, start))
        assert all(together(wait, wait))
    return refused


def test_threads_that_start_one_operation(pool: Launch) -> None:
    assert pool(2).run(started_twice, 20) == [20, 20]


def test_nothing_turns_the_gil_on(launch: Launch) -> None:
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        pytest.skip("this Python cannot do without")
    assert launch(1).run(has_gil) == [False]


def has_gil(_: hetcoll.Communicator) -> bool:
    return bool(getattr(sys, "_is_gil_enabled")())  # noqa: B009  # of Python 3.13


def groups_at_once(comm: hetcoll.Communicator) -> list[list[float]]:
    """Each thread has a group of its own, and a message outside of it goes at once."""
    peer, inside, done = 1 - comm.rank, threading.Barrier(2), threading.Event()
    first, second, third = np.zeros(5), np.zeros(5), np.zeros(5)

    def grouped(value: float, got: Any) -> None:
        with comm.group():
            comm.send(np.full(5, value), peer)
            inside.wait(SECONDS)
            comm.recv(got, peer)
            inside.wait(SECONDS)
            done.wait(SECONDS)  # the third thread's messages do not wait for these

    def plain() -> None:
        comm.sendrecv(np.full(5, 3.0), peer, third, peer)
        comm.send(np.full(5, 3.0), peer, async_op=True)
        comm.recv(third, peer)
        done.set()

    together(lambda: grouped(1.0, first), lambda: grouped(1.0, second), plain)
    return [x.tolist() for x in (first, second, third)]


def test_groups_of_several_threads(pool: Launch) -> None:
    wanted = [[1.0] * 5, [1.0] * 5, [3.0] * 5]
    assert pool(2).run(groups_at_once) == [wanted] * 2


def quick_groups(comm: hetcoll.Communicator, times: int) -> int:
    """Groups of two threads, one to each other rank, begin and end beside each other: what is in one is only noted."""

    def exchange(peer: int) -> int:
        wrong = 0
        for i in range(times):
            got = np.zeros(4)
            with comm.group():
                comm.recv(got, peer)
                comm.send(np.full(4, i + 1.0), peer)
                wrong += not (got == 0).all()
            wrong += not (got == i + 1).all()
        return wrong

    return sum(together(*(functools.partial(exchange, peer) for peer in range(3) if peer != comm.rank)))


def test_groups_that_begin_and_end_beside_each_other(pool: Launch) -> None:
    assert pool(3).run(quick_groups, 50) == [0, 0, 0]
