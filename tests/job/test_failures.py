"""Ranks that disagree, die, stop, leave or are interrupted: every other rank is told who, what and where, in time.

After each of these tests `launch` sees to it that no thread, descriptor, mapping, child or process is left.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import Outcome, Ranks, elapsed, wait_until
from thorough import parametrize
from verdicts import check_lost

import hetcoll
from hetcoll import AbortedError, CollectiveMismatchError, CollectiveTimeoutError, PeerLostError
from hetcoll.rendezvous.membership import Call
from hetcoll.rendezvous.protocol.wire import Op
from hetcoll.rendezvous.uplink import Uplink

Launch = Callable[..., Ranks]
TRANSPORTS = parametrize("transport", ["auto", "tcp"], first=1)
FOUND_WITHIN = 8.0  # seconds; what needs two looks at the others takes about four
BUSY = 2.0  # seconds that a busy machine may add


# Ranks that call different things.


def f32(count: int) -> Any:
    return np.ones(count, np.float32)


MISTAKES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    # what rank 0 and what all other ranks call
    "count": (lambda c: c.allreduce(f32(4)), lambda c: c.allreduce(f32(5))),
    "empty": (lambda c: c.allreduce(f32(0)), lambda c: c.allreduce(f32(5))),
    "large count": (lambda c: c.allreduce(f32(1 << 20)), lambda c: c.allreduce(f32(4))),
    "dtype": (lambda c: c.allreduce(f32(4)), lambda c: c.allreduce(np.ones(4, np.int32))),
    "dtype of the same size in bytes": (lambda c: c.allreduce(f32(4)), lambda c: c.allreduce(np.ones(2, np.float64))),
    "op": (lambda c: c.allreduce(f32(4)), lambda c: c.allreduce(f32(4), op="max")),
    "root": (lambda c: c.broadcast(f32(4), root=0), lambda c: c.broadcast(f32(4), root=1)),
    "root, nobody sends": (lambda c: c.broadcast(f32(4), root=1), lambda c: c.broadcast(f32(4), root=0)),
    "root of reduce": (lambda c: c.reduce(f32(4), root=0), lambda c: c.reduce(f32(4), root=1)),
    "root of reduce, nobody receives": (lambda c: c.reduce(f32(4), root=1), lambda c: c.reduce(f32(4), root=0)),
    "root of gather": (
        lambda c: c.gather(f32(4), f32(4 * c.size), root=0),
        lambda c: c.gather(f32(4), f32(4 * c.size), root=1),
    ),
    "root of scatter": (
        lambda c: c.scatter(f32(4 * c.size), f32(4), root=0),
        lambda c: c.scatter(f32(4 * c.size), f32(4), root=1),
    ),
    "collective": (lambda c: c.allreduce(f32(4)), lambda c: c.broadcast(f32(4), root=1)),
    "barrier": (lambda c: c.barrier(), lambda c: c.allreduce(f32(4))),
    "gather for allgather": (
        lambda c: c.gather(f32(4), f32(4 * c.size), root=1),
        lambda c: c.allgather(f32(4), f32(4 * c.size)),
    ),
    "reduce for allreduce": (lambda c: c.reduce(f32(4), root=1), lambda c: c.allreduce(f32(4))),
    "counts of allgatherv": (
        lambda c: c.allgatherv(f32(1), f32(c.size), [1] * c.size),
        lambda c: c.allgatherv(f32(1 + (c.rank == 0)), f32(c.size + 1), [2] + [1] * (c.size - 1)),
    ),
    "alltoall": (
        lambda c: c.alltoall(f32(c.size), f32(c.size)),
        lambda c: c.alltoall(f32(2 * c.size), f32(2 * c.size)),
    ),
    "split": (lambda c: c.split(0), lambda c: c.allreduce(f32(4))),
    "split and barrier": (lambda c: c.split(0), lambda c: c.barrier()),
    "message and collective": (lambda c: c.recv(f32(4), peer=1), lambda c: c.barrier()),
    "everybody receives": (lambda c: c.recv(f32(4), peer=1), lambda c: c.recv(f32(4), peer=0)),
    "everybody sends": (lambda c: c.send(f32(1 << 22), peer=1), lambda c: c.send(f32(1 << 22), peer=0)),
}


def call_one_of(comm: hetcoll.Communicator, name: str, warm: bool) -> None:
    """`warm`: first both calls as they should be, so that the wrong ones take the fast path."""
    first, others = MISTAKES[name]
    if warm:
        first(comm)
        others(comm)
    (first if comm.rank == 0 else others)(comm)
    comm.barrier()  # who got through the call must be told as well
    comm.barrier()


def check_mismatch(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert isinstance(outcome.error, CollectiveMismatchError), f"{outcome.value!r} {outcome.trace}"
        assert outcome.seconds < FOUND_WITHIN
    (text,) = {str(outcome.error) for outcome in outcomes}
    assert "rank 0 called " in text
    assert re.search(r"ranks? [1-9](-\d)? called ", text), text
    assert len(re.findall(rf"at {re.escape(__file__)}:\d+", text)) >= 2, text


COLLECTIVES_ONLY = [name for name in MISTAKES if not re.match("message|everybody|split", name)]


@parametrize(
    ("size", "warm", "transport"),
    [(3, True, "auto"), (2, False, "auto"), (3, False, "tcp"), (2, True, "tcp")],
    first=1,
)
def test_mismatch(launch: Launch, size: int, warm: bool, transport: str) -> None:
    """All mistakes at a time, each in a job of its own, since most of the time is spent waiting."""
    names = [name for name in MISTAKES if size == 2 or not name.startswith("everybody")]
    if warm:  # where all ranks may call both
        names = COLLECTIVES_ONLY
    jobs = {name: launch(size, HETCOLL_TRANSPORT=transport) for name in names}
    for name, ranks in jobs.items():
        ranks.start(call_one_of, name, warm)
    for name, ranks in jobs.items():
        outcomes = ranks.finish(20)
        try:
            check_mismatch(outcomes)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


WRONG_MESSAGES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    # what rank 0 sends, and how rank 1 receives it
    "count": (lambda c: c.send(f32(4), peer=1), lambda c: c.recv(f32(5), peer=0)),
    "shorter": (lambda c: c.send(f32(1 << 20), peer=1), lambda c: c.recv(f32(5), peer=0)),
    "dtype": (lambda c: c.send(f32(4), peer=1), lambda c: c.recv(np.ones(4, np.int32), peer=0)),
    "empty": (lambda c: c.send(f32(0), peer=1), lambda c: c.recv(f32(1), peer=0)),
    "sendrecv": (
        lambda c: c.sendrecv(f32(4), 1, f32(6), 1),
        lambda c: c.sendrecv(f32(6), 0, f32(5), 0),
    ),
}


def exchange_wrongly(comm: hetcoll.Communicator, name: str) -> None:
    comm.sendrecv(f32(3), 1 - comm.rank, f32(3), 1 - comm.rank)  # a right one goes before it
    WRONG_MESSAGES[name][comm.rank](comm)
    comm.barrier()


@TRANSPORTS
def test_messages_that_do_not_fit(launch: Launch, transport: str) -> None:
    jobs = {name: launch(2, HETCOLL_TRANSPORT=transport) for name in WRONG_MESSAGES}
    for name, ranks in jobs.items():
        ranks.start(exchange_wrongly, name)
    for name, ranks in jobs.items():
        try:
            check_mismatch(ranks.finish(20))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


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


# Ranks that stop, and ranks that do not come.


def call_with_timeout(comm: hetcoll.Communicator, how: str, seconds: float, silent: int) -> None:
    """All but rank `silent` call; they wait `seconds`."""
    x = f32(50_000)
    comm.allreduce(x)
    if comm.rank == silent:
        return
    if how == "timeout=":
        comm.allreduce(x, timeout=seconds)
    elif how == "wait(timeout)":
        comm.allreduce(x, async_op=True).wait(seconds)
    elif how == "recv":
        comm.recv(x, silent, timeout=seconds)
    elif how == "first use":
        comm.alltoall(f32(comm.size), f32(comm.size), timeout=seconds)
    else:
        comm.allreduce(x)


def hear_of_a_failure(comm: hetcoll.Communicator) -> str:
    return type(wait_until(lambda: comm.error, 10)).__name__


HOWS = ("timeout=", "wait(timeout)", "recv", "first use", "HETCOLL_TIMEOUT")


def check_timeout(outcomes: list[Outcome], silent: int, seconds: float, says: str) -> None:
    texts = set()
    for outcome in outcomes:
        if outcome.rank == silent:
            continue
        assert isinstance(outcome.error, CollectiveTimeoutError), f"{outcome.value!r} {outcome.trace}"
        assert isinstance(outcome.error, TimeoutError)
        assert seconds <= outcome.seconds < seconds + 2.0 + BUSY
        texts.add(str(outcome.error))
    assert len(texts) == 1 or "store did not answer" in min(texts), texts  # which could not spread the word
    text = min(texts)
    assert re.search(rf"\w+\(.*count=.*\) .*at {re.escape(__file__)}:\d+ did not finish in {seconds:g} s", text), text
    assert says in text, text
    assert re.search(r"\d+ of \d+ steps done|did not connect|no answer", text), text


@parametrize(("silent", "transport"), [(0, "auto"), (0, "tcp"), (2, "tcp")], first=1)
def test_a_stopped_rank_is_named_when_the_time_is_over(launch: Launch, silent: int, transport: str) -> None:
    env = {"HETCOLL_TRANSPORT": transport, "HETCOLL_TIMEOUT": "1.5"}
    jobs = {how: launch(3, **env) for how in HOWS}
    for how, ranks in jobs.items():
        ranks.start(call_with_timeout, how, 1.5, silent)
    for ranks in jobs.values():
        ranks.finish(10, only=[silent])
        ranks.signal(silent, signal.SIGSTOP)
    for how, ranks in jobs.items():
        others = [rank for rank in range(3) if rank != silent]
        says = "store did not answer" if silent == 0 else "rank 2 did not answer"
        try:
            check_timeout(ranks.finish(15, only=others), silent, 1.5, says)
        except AssertionError as error:
            raise AssertionError(f"{how}: {error}") from error
        ranks.signal(silent, signal.SIGCONT)
    for ranks in jobs.values():  # when it runs again it hears of it, also if it hosts the store
        ranks.start(hear_of_a_failure, only=[silent])
    for ranks in jobs.values():
        assert ranks.finish(15, only=[silent])[0].value == "CollectiveTimeoutError"


def wait_for_a_stopped_store(comm: hetcoll.Communicator, full: bool) -> tuple[float, float]:
    """For how many seconds more than it should a look before the end of the time waits; and for how many the call that
    did not end in time."""
    waits, diagnosis = list[float](), comm._core.diagnosis

    def send(self: Uplink, op: Op, body: bytes, request: int, seconds: float) -> None:
        if full:  # the socket
            waits.append(seconds)
            raise TimeoutError("timed out")

    def wait(self: Call, seconds: float) -> bool:
        waits.append(seconds)
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Uplink, "send", send)
        patch.setattr(Call, "wait", wait)
        late = list[float]()
        for left in (3.0, 1.0, 0.3, 0.0):
            waits.clear()
            diagnosis.look({}, time.monotonic() + left)
            late.append(sum(waits) - left)
        waits.clear()
        assert isinstance(diagnosis.timeout(7.0), CollectiveTimeoutError)
        return max(late), sum(waits)


def test_a_store_that_is_stopped_is_waited_for_2_seconds_after_the_timeout(launch: Launch) -> None:
    for full in (False, True):
        ranks = launch(1)
        ranks.start(wait_for_a_stopped_store, full)
        late, last = ranks.finish(20)[0].value
        assert late <= 0.0
        assert 1.5 <= last <= 2.0


@pytest.mark.calm
def test_who_asks_a_stopped_rank_when_the_time_is_over_does_not_ask_twice(launch: Launch) -> None:
    """The time ends while the others still wait for its answer to a question that they asked before."""
    ranks = launch(3, HETCOLL_TIMEOUT="2.7")
    ranks.start(call_with_timeout, "recv", 2.7, 2)
    ranks.finish(10, only=[2])
    ranks.signal(2, signal.SIGSTOP)
    for outcome in ranks.finish(15, only=[0, 1]):
        assert isinstance(outcome.error, CollectiveTimeoutError), outcome.trace or outcome.value
        assert outcome.seconds < 2.7 + 3.0
    ranks.signal(2, signal.SIGCONT)


@TRANSPORTS
def test_a_rank_that_does_not_call_is_named_when_the_time_is_over(launch: Launch, transport: str) -> None:
    jobs = {how: launch(3, HETCOLL_TRANSPORT=transport, HETCOLL_TIMEOUT="1.5") for how in HOWS}
    for how, ranks in jobs.items():
        ranks.start(call_with_timeout, how, 1.5, 1)
    for how, ranks in jobs.items():
        outcomes = ranks.finish(15)
        try:
            check_timeout(outcomes, 1, 1.5, "" if how == "recv" else "rank 1 did not call it")
        except AssertionError as error:
            raise AssertionError(f"{how}: {error}") from error


def wait_short_then_long(comm: hetcoll.Communicator) -> float:
    """A look at what the others do finds nothing wrong where a rank is just late."""
    x = np.full(4, comm.rank + 1.0)
    comm.allreduce(x)
    if comm.rank == 1:
        time.sleep(4.7)
    comm.allreduce(x)
    if comm.rank == 0:
        time.sleep(2.5)
    comm.recv(x, 0) if comm.rank == 1 else comm.send(x, 1)
    return float(x[0])


def test_patience_with_late_ranks(launch: Launch) -> None:
    jobs = [launch(2, HETCOLL_TRANSPORT=transport) for transport in ("auto", "tcp")]
    for ranks in jobs:
        ranks.start(wait_short_then_long)
    for ranks in jobs:
        assert [outcome.value for outcome in ranks.finish(20)] == [6.0, 6.0]


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
        (SystemExit(3), "SystemExit : 3", "was lost: sys.exit(3) ended it with status 3"),
        (SystemExit("why"), "SystemExit : why", "was lost: sys.exit('why') ended it with status 1"),
        (SystemExit(0), "SystemExit : 0", "left while it was needed"),
    ],
    ids=["exception", "exit 3", "exit why", "exit 0"],
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


# After a failure.


def say(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def use_after_failure(comm: hetcoll.Communicator) -> tuple[set[str], str, bool, str]:
    """What every further call says, the call that failed, and a Work that was done before."""
    before = comm.allreduce(f32(4), async_op=True)
    before.wait()
    caught = say(lambda: comm.allreduce(f32(4 + comm.rank)))
    x = f32(4)
    calls: list[Callable[[], Any]] = [
        lambda: comm.allreduce(x),
        lambda: comm.allreduce(x, async_op=True),
        comm.barrier,
        lambda: comm.send(x, 1 - comm.rank),
        lambda: comm.recv(x, 1 - comm.rank),
        lambda: comm.split(0),
    ]
    before.wait()
    return {say(call) for call in calls}, caught, before.done and before.error is None, repr(comm)


@TRANSPORTS
def test_a_failed_communicator_is_fit_only_for_close(launch: Launch, transport: str) -> None:
    for said, caught, fine, name in launch(2, HETCOLL_TRANSPORT=transport).run(use_after_failure):
        assert said == {caught}
        assert caught.startswith("CollectiveMismatchError: operation #2: ")
        assert fine
        assert name.startswith("<hetcoll.Communicator rank ")


def fail_with_works_in_flight(comm: hetcoll.Communicator) -> list[str]:
    """Several asynchronous calls of which the second is wrong: what each says, waited for out of order.

    The rank that comes later may hear of it while it still launches: the launch says it then."""
    comm.barrier()
    comm.allreduce(f32(1000), async_op=True)
    works, said = [], []
    for count in (1000 + comm.rank, 1000, 50_000):
        try:
            works.append(comm.allreduce(f32(count), async_op=True))
        except hetcoll.CollectiveMismatchError as error:
            said.append(f"{type(error).__name__}: {error}")
    said += [say(work.wait) for work in reversed(works)]
    assert len(said) == 3
    assert all(work.done for work in works)
    assert {f"{type(work.error).__name__}: {work.error}" for work in works} <= set(said)
    return said


@TRANSPORTS
def test_works_in_flight_all_say_what_failed(launch: Launch, transport: str) -> None:
    said = launch(2, HETCOLL_TRANSPORT=transport).run(fail_with_works_in_flight)
    (text,) = set(said[0] + said[1])
    assert text.startswith(
        "CollectiveMismatchError: operation #3: rank 0 called allreduce(float32, count=1000, op=sum)"
    )


def fail_in_the_background(comm: hetcoll.Communicator, begun: Path) -> None:
    """Rank 0 has something in flight that goes wrong, and does not look at it; rank 1 waits for rank 0."""
    comm.barrier()
    if comm.rank == 0:
        for _ in range(3):
            comm.allreduce(f32(1000), async_op=True)
        begun.touch()
        wait_until(lambda: comm._engine.failed, 10)
        time.sleep(60)
    wait_until(begun.exists, 10)
    for _ in range(4):
        comm.allreduce(f32(1000))


@TRANSPORTS
def test_what_fails_unseen_is_told_to_who_asks(launch: Launch, transport: str, tmp_path: Path) -> None:
    ranks = launch(2, HETCOLL_TRANSPORT=transport, HETCOLL_FAULT="duplicate=2,rank=1")
    ranks.start(fail_in_the_background, tmp_path / "begun")
    (one,) = ranks.finish(15, only=[1])
    assert isinstance(one.error, hetcoll.CommunicationError), one.trace
    assert str(one.error).startswith("rank 0: the frame belongs to another operation")
    assert one.seconds < FOUND_WITHIN
    ranks.kill(0)


def fail_in_a_split(comm: hetcoll.Communicator) -> tuple[str, float]:
    """A mistake in one communicator leaves its parent and its siblings alone."""
    child, sibling = comm.split(0), comm.split(comm.rank % 2)
    assert child is not None
    assert sibling is not None
    said = say(lambda: child.allreduce(f32(4 + comm.rank)))
    x, y = np.full(4, comm.rank + 1.0), np.ones(3)
    comm.allreduce(x)
    sibling.allreduce(y)
    child.close()
    comm.allreduce(x)
    return said[: said.find(":")], float(x[0] + y[0])


@TRANSPORTS
def test_a_failure_stays_in_its_communicator(launch: Launch, transport: str) -> None:
    said = launch(3, HETCOLL_TRANSPORT=transport).run(fail_in_a_split)
    assert said == [("CollectiveMismatchError", 6.0 * 3 + n) for n in (2, 1, 2)]


def lose_a_rank_of_the_parent(comm: hetcoll.Communicator, ready: Path) -> tuple[str, float]:
    survivors = comm.split(0 if comm.rank < 2 else 1)
    assert survivors is not None
    comm.barrier()
    (ready / str(comm.rank)).touch()
    if comm.rank == 2:
        time.sleep(60)
    said = say(comm.barrier)
    x = np.full(100_000, comm.rank + 1.0)
    for _ in range(10):
        survivors.allreduce(x)
    return said[: said.find(":")], float(x[0])


@TRANSPORTS
def test_who_has_nothing_to_do_with_a_lost_rank_goes_on(launch: Launch, transport: str, tmp_path: Path) -> None:
    ranks = launch(3, HETCOLL_TRANSPORT=transport)
    ranks.start(lose_a_rank_of_the_parent, tmp_path)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 3, 30)
    ranks.kill(2)
    for outcome in ranks.finish(10, only=[0, 1]):
        assert outcome.value == ("PeerLostError", 3.0 * 2**9), outcome.trace


def slowly_but_surely(comm: hetcoll.Communicator, count: int) -> float:
    """All ranks wait in calls, most of what is in flight is stuck, but one long message crawls on."""
    large, small = f32(count), f32(4)
    with elapsed() as took:
        if comm.rank == 0:
            first = comm.recv(f32(4), 2, async_op=True)
            comm.recv(large, 1)
            comm.send(small, 2)
            first.wait()
        elif comm.rank == 1:
            first = comm.recv(f32(4), 2, async_op=True)
            comm.send(large, 0)
            first.wait()
        else:
            comm.recv(small, 0)
            comm.send(small, 0)
            comm.send(small, 1)
    return took[0]


def test_slow_is_not_stuck(launch: Launch) -> None:
    ranks = launch(3, HETCOLL_FAULT="delay=1,short=1", HETCOLL_SHM_BYTES="4096")
    count, took = 1 << 14, 0.0  # a busy machine needs a minute for what an idle one does in seconds: from short to long
    while took < 4.5:  # it must go on for longer than it takes to look twice
        took = min(ranks.run(slowly_but_surely, count, timeout=60))
        count *= 2
