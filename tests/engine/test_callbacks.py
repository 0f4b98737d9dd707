"""Works that call back when they are over, and that asyncio's programs await."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import unittest.mock
from collections.abc import Callable

import numpy as np
import pytest
from ranks import Ranks, wait_until

import hetcoll
from hetcoll.runtime.one_sided import Window
from hetcoll.runtime.transfers import Transfer

Pool = Callable[..., Ranks]
COUNT = 50_000  # 400 kB: several slots, so that operations are in flight for a while


def _callbacks(comm: hetcoll.Communicator) -> None:
    before = threading.active_count()
    arrays = [np.full(COUNT, float(i)) for i in range(20)]
    told: list[tuple[int, int, hetcoll.Work]] = []

    def note(i: int) -> Callable[[hetcoll.Work], None]:
        return lambda work: told.append((i, threading.get_ident(), work))

    ready = comm.recv(np.empty(1), 0, async_op=True) if comm.rank else None  # so that rank 1 is not done at once
    works = [comm.allreduce(array, async_op=True) for array in arrays]
    for i, work in enumerate(works):
        work.add_done_callback(note(i))
        work.add_done_callback(note(i))
    assert threading.active_count() <= before + 1
    if comm.rank == 0:
        for peer in range(1, comm.size):
            comm.send(np.zeros(1), peer)
    wait_until(lambda: len(told) == 40)
    assert sorted(i for i, _, _ in told) == sorted([*range(20), *range(20)])
    assert all(work.done and work.error is None and work is works[i] for i, _, work in told)
    assert all((array == i * comm.size).all() for i, array in enumerate(arrays))
    if ready is not None:
        ready.wait()
    for work in works:
        work.wait()
    told.clear()
    comm.allreduce(np.ones(1)).add_done_callback(note(0))  # over already
    assert [thread for _, thread, _ in told] == [threading.get_ident()]


def test_callbacks_run_once_each_on_one_thread(pool: Pool) -> None:
    pool(2).run(_callbacks)


def _raising(comm: hetcoll.Communicator) -> list[str]:
    records: list[logging.LogRecord] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    keeper, called = Keeper(), threading.Event()
    logging.getLogger("hetcoll").addHandler(keeper)

    def fail(work: hetcoll.Work) -> None:
        raise ZeroDivisionError("on purpose")

    message = np.empty(1)
    work = comm.send(message, 1, async_op=True) if comm.rank == 0 else comm.recv(message, 0, async_op=True)
    work.add_done_callback(fail)
    work.add_done_callback(lambda _: called.set())
    assert called.wait(20)
    wait_until(lambda: records)  # it was called at once if the work was over by then
    logging.getLogger("hetcoll").removeHandler(keeper)
    return [str(record.exc_info[1]) for record in records if record.exc_info]


def test_what_a_callback_raises_is_logged_and_others_run(pool: Pool) -> None:
    assert pool(2).run(_raising) == [["on purpose"]] * 2


def _awaits(comm: hetcoll.Communicator) -> None:
    async def main() -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(tick())
        for _ in range(3):
            x, y = np.full(COUNT, comm.rank + 1.0), np.ones(3)
            first, second = comm.allreduce(x, async_op=True), comm.allreduce(y, op="max", async_op=True)
            await second
            await first
            await first  # once more
            assert (x == comm.size * (comm.size + 1) / 2).all()
            assert (y == 1).all()
        if comm.rank == 0:  # the other one begins when the loop has run on
            got = np.empty(1)
            work, seen = comm.recv(got, 1, async_op=True), ticks
            asyncio.get_running_loop().call_later(0.05, comm.send, np.ones(1), 1)
            await work
            assert got[0] == 7
            assert ticks > seen
        else:
            await comm.recv(np.empty(1), 0, async_op=True)
            await comm.send(np.full(1, 7.0), 0, async_op=True)
        beside.cancel()

    asyncio.run(main())


def test_works_are_awaited_while_the_loop_runs(pool: Pool) -> None:
    pool(2).run(_awaits)


def _awaits_one_that_is_lost(comm: hetcoll.Communicator) -> str:
    async def main() -> str:
        work = comm.recv(np.empty(1), 1, async_op=True)
        try:
            async with asyncio.timeout(0.05):
                await work
        except TimeoutError:
            assert not work.done, "only the waiting has ended"
        comm.allreduce(np.ones(1))
        try:
            await work
        except hetcoll.PeerLostError as error:
            return f"rank {error.rank}"
        return "nothing"

    if comm.rank == 1:
        comm.allreduce(np.ones(1))
        comm.close()
        return ""
    return asyncio.run(main())


def test_what_an_awaited_work_failed_with_is_raised() -> None:
    with Ranks(2) as some:
        assert some.run(_awaits_one_that_is_lost) == ["rank 1", ""]


def _awaits_too_long(comm: hetcoll.Communicator, tag: int) -> str:
    if comm.rank == 1:
        wait_until(lambda: comm.error is not None, 25)
        return type(comm.error).__name__

    async def main() -> str:
        start = time.monotonic()
        with pytest.raises(hetcoll.CollectiveTimeoutError, match="did not finish in 1 s"):
            await comm.recv(np.empty(1), 1, tag=tag, async_op=True)
        assert time.monotonic() - start >= 1
        return type(comm.error).__name__

    return asyncio.run(main())


@pytest.mark.parametrize("tag", [0, 3])
def test_a_work_that_is_awaited_for_too_long_is_over(tag: int) -> None:
    with Ranks(2, {"HETCOLL_TIMEOUT": "1"}) as some:
        assert some.run(_awaits_too_long, tag) == ["CollectiveTimeoutError"] * 2


def _awaits_a_signal(comm: hetcoll.Communicator) -> None:
    async def main(window: Window) -> None:
        with pytest.raises(hetcoll.CollectiveTimeoutError, match="a one-sided message is not over after"):
            await window.wait_signal(async_op=True)

    with comm.window() as window:
        with unittest.mock.patch.object(Transfer, "wait", side_effect=AssertionError("the loop stands still")):
            asyncio.run(main(window))
        comm.barrier(timeout=30)


def test_a_signal_that_is_awaited_for_too_long_does_not_hold_the_loop() -> None:
    with Ranks(2, {"HETCOLL_TIMEOUT": "2"}) as some:
        some.run(_awaits_a_signal)


def _awaits_one_that_left(comm: hetcoll.Communicator) -> str:
    if comm.rank == 1:
        comm.close()
        return ""

    async def main() -> str:
        with pytest.raises(hetcoll.PeerLostError, match="rank 1 left while it was needed") as caught:
            await comm.recv(np.empty(1), 1, tag=3, async_op=True)
        return f"rank {caught.value.rank}"

    return asyncio.run(main())


def test_who_awaits_a_message_with_a_tag_of_a_rank_that_left_is_told() -> None:
    with Ranks(2) as some:
        assert some.run(_awaits_one_that_left) == ["rank 1", ""]
