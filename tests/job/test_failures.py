"""Ranks that die, leave, give up or are interrupted: every other rank is told who and why, in time.

After each of these tests `launch` sees to it that no thread, descriptor, mapping, child or process is left.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from calls import f32
from ranks import Ranks, elapsed, wait_until
from thorough import parametrize
from verdicts import check_lost

import hetcoll
from hetcoll import AbortedError, PeerLostError

Launch = Callable[..., Ranks]
TRANSPORTS = parametrize("transport", ["auto", "tcp"], first=1)

# Ranks that die.


def work_until_told(comm: hetcoll.Communicator, count: int) -> None:
    x = np.ones(count, np.float32)
    for _ in range(1_000_000):
        comm.allreduce(x, op="max")


def idle_then_call(comm: hetcoll.Communicator) -> None:
    comm.barrier()
    wait_until(lambda: comm._engine.failed, 10)
    comm.barrier()


WAYS_TO_WAIT = ("collective", "not yet connected", "message", "asynchronous", "split")


def wait_for_rank(comm: hetcoll.Communicator, rank: int, how: str) -> None:
    """All wait in one kind of call for `rank`, which does nothing."""
    comm.barrier()
    wait_in_a_call(comm, rank, how)


def wait_in_a_call(comm: hetcoll.Communicator, rank: int, how: str) -> None:
    if comm.rank == rank:
        time.sleep(60)
    elif how == "collective":
        comm.allreduce(f32(100_000))
    elif how == "not yet connected":
        comm.alltoall(f32(3 * comm.size), f32(3 * comm.size))
    elif how == "message":
        comm.recv(f32(4), peer=rank)
    elif how == "asynchronous":
        comm.allreduce(f32(4), async_op=True).wait()
    elif how == "split":
        comm.split(0)


@pytest.mark.calm
@pytest.mark.parametrize("transport", ["auto", "tcp"])
@parametrize("victim", [1, 0], first=1)
def test_a_killed_rank_is_named_at_once(launch: Launch, victim: int, transport: str) -> None:
    """Rank 0 hosts the store as well. Within 1 s where memory is shared, within 5 s over TCP."""
    hows = ("working", "working on long ones", "idle", *WAYS_TO_WAIT)
    jobs = {how: launch(3, HETCOLL_TRANSPORT=transport) for how in hows}
    calls: dict[str, tuple[Any, ...]] = {
        "working": (work_until_told, 10), "working on long ones": (work_until_told, 1 << 20), "idle": (idle_then_call,)
    }  # fmt: skip
    for how, ranks in jobs.items():
        ranks.start(*calls.get(how, (wait_for_rank, victim, how)))
    time.sleep(1.0)
    killed = {}
    for how, ranks in jobs.items():
        killed[how] = time.monotonic()
        ranks.kill(victim)
    for how, ranks in jobs.items():
        try:
            check_lost(ranks.finish(15), victim, killed[how], 1.0 if transport == "auto" else 5.0)
        except AssertionError as error:
            raise AssertionError(f"{how}: {error}") from error


# Ranks that leave.


def leave_early(comm: hetcoll.Communicator, how: str, leaver: int) -> None:
    comm.barrier()
    if comm.rank == leaver:
        if how == "close":
            comm.close()
        return
    if how == "close":
        wait_until(lambda: leaver in comm._diagnosis._left)
    comm.allreduce(f32(10))


@pytest.mark.calm
@TRANSPORTS
@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_that_leaves_while_it_is_needed_is_named(launch: Launch, leaver: int, transport: str) -> None:
    """By close(), and by the end of its process; before the others call, or while they wait for it."""
    closing = launch(3, HETCOLL_TRANSPORT=transport)
    # The store, which rank 0's process has, outlives it: not all who wait do so for the leaver itself.
    ending = launch(3, HETCOLL_TRANSPORT=transport, HETCOLL_LINGER="2")
    closing.start(leave_early, "close", leaver)
    ending.start(leave_early, "end", leaver)
    ending.finish(10, only=[leaver])
    time.sleep(0.3)  # the others wait
    asked = time.monotonic()
    ending.end(leaver)
    others = [rank for rank in range(3) if rank != leaver]
    for outcome in [*closing.finish(10, only=others), *ending.finish(10, only=others)]:
        assert isinstance(outcome.error, PeerLostError), f"{outcome.value!r} {outcome.trace}"
        assert outcome.error.rank == leaver, outcome.error
        assert str(outcome.error).count(f"rank {leaver} left while it was needed") == 1
        assert outcome.ended - asked < 2.0
    closing.finish(10, only=[leaver])


def finish_before_others(comm: hetcoll.Communicator) -> list[float]:
    """Rank 0, with the store, closes at once; what it sent still arrives, and the others go on among themselves."""
    x = np.full(100_000, comm.rank + 1.0)
    comm.broadcast(x, root=0)
    rest = comm.split(None if comm.rank == 0 else 0)
    if rest is None:
        comm.close()
        return [float(x[0])]
    time.sleep(0.5)
    y = np.full(4, rest.rank + 1.0)
    rest.allreduce(y)
    rest.close()
    return [float(x[0]), float(y[0])]


@TRANSPORTS
def test_who_needs_no_one_may_leave(launch: Launch, transport: str) -> None:
    ranks = launch(3, HETCOLL_TRANSPORT=transport)
    assert ranks.run(finish_before_others) == [[1.0], [1.0, 3.0], [1.0, 3.0]]


# Ranks that give up.


def abort_from_a_thread(comm: hetcoll.Communicator, how: str) -> None:
    comm.barrier()
    if comm.rank == 1:
        thread = threading.Thread(target=lambda: (time.sleep(0.5), comm.abort("enough")))
        thread.start()
        try:
            wait_for_rank(comm, 0, how)
        finally:
            thread.join()
    else:
        wait_for_rank(comm, 0, how) if comm.rank else wait_until(lambda: comm._engine.failed, 20)
    comm.barrier()


@pytest.mark.calm
@TRANSPORTS
def test_abort_ends_every_wait_everywhere(launch: Launch, transport: str) -> None:
    jobs = {how: launch(3, HETCOLL_TRANSPORT=transport) for how in WAYS_TO_WAIT}
    for how, ranks in jobs.items():
        ranks.start(abort_from_a_thread, how)
    for how, ranks in jobs.items():
        for outcome in ranks.finish(15):
            assert isinstance(outcome.error, AbortedError), f"{how}: {outcome.value!r} {outcome.trace}"
            assert str(outcome.error) == "rank 1 called abort(): enough"
            assert outcome.seconds < 3.0


def abort_without_help(comm: hetcoll.Communicator) -> float:
    comm.barrier()
    if comm.rank == 0:
        return 0.0
    time.sleep(0.5)  # rank 0 is being stopped
    with elapsed() as took:
        comm.abort()
    with pytest.raises(AbortedError), elapsed() as failing:
        comm.barrier()
    assert failing[0] < 0.1
    return took[0]


@pytest.mark.calm
def test_abort_needs_nobody(launch: Launch) -> None:
    """With the process that hosts the store stopped, and so nobody to tell the others."""
    ranks = launch(3)
    ranks.start(abort_without_help)
    ranks.finish(10, only=[0])
    ranks.signal(0, signal.SIGSTOP)
    for outcome in ranks.finish(20, only=[1, 2]):
        assert outcome.error is None, outcome.trace
        assert outcome.value < 4.0
    ranks.signal(0, signal.SIGCONT)


def leave_inside(comm: hetcoll.Communicator, how: BaseException) -> str:
    try:
        with comm:
            comm.barrier()
            if comm.rank == 1:
                raise how
            comm.allreduce(f32(10))
    except (ZeroDivisionError, SystemExit, PeerLostError) as error:
        return f"{type(error).__name__} {getattr(error, 'rank', '')}: {error}; {comm.closed}"
    return "nothing"


@pytest.mark.parametrize(
    ("how", "here", "there"),
    [
        (ZeroDivisionError("of ours"), "ZeroDivisionError : of ours", "was lost: it raised ZeroDivisionError: of ours"),
        (
            ZeroDivisionError("of \udcff"),
            "ZeroDivisionError : of \udcff",
            r"was lost: it raised ZeroDivisionError: of \udcff",
        ),
        (SystemExit(3), "SystemExit : 3", "was lost: sys.exit(3) ended it with status 3"),
        (SystemExit("why"), "SystemExit : why", "was lost: sys.exit('why') ended it with status 1"),
        (SystemExit(0), "SystemExit : 0", "left while it was needed"),
    ],
    ids=["exception", "no UTF-8", "exit 3", "exit why", "exit 0"],
)
@TRANSPORTS
def test_who_leaves_the_with_block_is_lost(
    launch: Launch, transport: str, how: BaseException, here: str, there: str
) -> None:
    ranks = launch(3, HETCOLL_TRANSPORT=transport)
    found = ranks.run(leave_inside, how)
    assert found[1] == f"{here}; True"
    for other in (found[0], found[2]):
        assert other.startswith("PeerLostError 1: ")
        assert f"rank 1 {there}" in other
        assert other.endswith("; True")


def be_interrupted(comm: hetcoll.Communicator, how: str) -> None:
    """Rank 2 gets the signal when it is in the call and has had a moment to get stuck there."""
    comm.barrier()
    main = threading.get_ident()

    def interrupt() -> None:
        wait_until(lambda: comm._host.reporter.inside(main) is not None)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    if comm.rank == 2:
        threading.Thread(target=interrupt).start()
    wait_in_a_call(comm, 0, how)


@pytest.mark.calm
@TRANSPORTS
def test_ctrl_c_in_a_call(launch: Launch, transport: str) -> None:
    jobs = {how: launch(3, HETCOLL_TRANSPORT=transport) for how in WAYS_TO_WAIT}
    for how, ranks in jobs.items():
        ranks.start(be_interrupted, how)
    for how, ranks in jobs.items():
        one, two = ranks.finish(10, only=[1, 2])
        assert isinstance(two.error, KeyboardInterrupt), f"{how}: {two.value!r} {two.trace}"
        assert isinstance(one.error, AbortedError), f"{how}: {one.value!r} {one.trace}"
        assert str(one.error) == "rank 2 was interrupted"
        assert abs(one.ended - two.ended) < 2.0, how
        ranks.signal(0, signal.SIGINT)
        assert isinstance(ranks.finish(10, only=[0])[0].error, KeyboardInterrupt)
