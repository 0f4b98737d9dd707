"""Ranks that stop, do not come or are late: who waits for them is told when the time is over, or goes on."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable

import numpy as np
import pytest
from calls import f32
from ranks import Outcome, Ranks, elapsed, wait_until
from thorough import parametrize

import hetcoll
from hetcoll import CollectiveTimeoutError
from hetcoll.health import stall_detector
from hetcoll.health.desync_report import Answer, Edge
from hetcoll.rendezvous.control import ControlClient
from hetcoll.rendezvous.membership import Call
from hetcoll.rendezvous.protocol.wire import Op
from hetcoll.rendezvous.uplink import Uplink
from hetcoll.runtime import host

Launch = Callable[..., Ranks]
TRANSPORTS = parametrize("transport", ["auto", "tcp"], first=1)

BUSY = 2.0  # seconds that a busy machine may add


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


def check_timeout(outcomes: list[Outcome], silent: int, seconds: float, says: str, busy: float = BUSY) -> None:
    texts = set()
    for outcome in outcomes:
        if outcome.rank == silent:
            continue
        assert isinstance(outcome.error, CollectiveTimeoutError), f"{outcome.value!r} {outcome.trace}"
        assert isinstance(outcome.error, TimeoutError)
        assert seconds <= outcome.seconds < seconds + 2.0 + busy
        texts.add(str(outcome.error))
    assert len(texts) == 1 or "store did not answer" in min(texts), texts  # which could not spread the word
    text = min(texts)
    assert re.search(rf"\w+\(.*count=.*\) .*at {re.escape(__file__)}:\d+ did not finish in {seconds:g} s", text), text
    assert says in text, text
    assert re.search(r"\d+ of \d+ steps done|did not connect|no answer", text), text


def stop_and_wait(launch: Launch, silent: int, transport: str, busy: float) -> None:
    """Jobs in which rank `silent` of three is stopped while the others call, in all ways there are."""
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
            check_timeout(ranks.finish(15, only=others), silent, 1.5, says, busy)
        except AssertionError as error:
            raise AssertionError(f"{how}: {error}") from error
        ranks.signal(silent, signal.SIGCONT)
    for ranks in jobs.values():  # when it runs again it hears of it, also if it hosts the store
        ranks.start(hear_of_a_failure, only=[silent])
    for ranks in jobs.values():
        assert ranks.finish(15, only=[silent])[0].value == "CollectiveTimeoutError"


@parametrize(("silent", "transport"), [(0, "auto"), (0, "tcp"), (2, "tcp")], first=1)
def test_a_stopped_rank_is_named_when_the_time_is_over(launch: Launch, silent: int, transport: str) -> None:
    stop_and_wait(launch, silent, transport, BUSY)


@pytest.mark.calm
@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("silent", [0, 2])
def test_a_stopped_rank_is_named_within_2_seconds(launch: Launch, silent: int, transport: str) -> None:
    stop_and_wait(launch, silent, transport, 0.0)


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


def test_a_store_that_is_stopped_is_waited_for_half_a_second_less_than_2_after_the_timeout(launch: Launch) -> None:
    for full in (False, True):
        ranks = launch(1)
        ranks.start(wait_for_a_stopped_store, full)
        late, last = ranks.finish(20)[0].value
        assert late <= 0.0
        assert 1.0 <= last <= 1.501


def ask_again_late(comm: hetcoll.Communicator) -> float:
    """How long the second question of a call whose time is over may take, where the first took 0.7 s."""
    allowed, diagnosis = list[float](), comm._core.diagnosis

    def query(
        self: ControlClient, group: bytes, blob: bytes, seconds: float
    ) -> tuple[dict[int, bytes], dict[int, bytes]]:
        allowed.append(seconds)
        if len(allowed) == 1:
            time.sleep(0.7)
        return {0: Answer(0, {}).encode()}, {}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ControlClient, "query", query)
        patch.setattr("hetcoll.health.diagnosis.unsure", lambda _: [Edge(0, 0, 0)])
        diagnosis.timeout(7.0)
    return allowed[1]


def test_two_questions_after_the_timeout_take_no_longer_than_one(launch: Launch) -> None:
    ranks = launch(1)
    ranks.start(ask_again_late)
    assert ranks.finish(20)[0].value <= 0.3


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


def look_after_a_second(comm: hetcoll.Communicator) -> None:
    """And after two, instead of after two and four: all the time the ranks' engines turn."""
    host.PATIENCE = stall_detector.PATIENCE = 1.0


@pytest.mark.slow
def test_slow_is_not_stuck(launch: Launch) -> None:
    ranks = launch(3, HETCOLL_FAULT="delay=1,short=1", HETCOLL_SHM_BYTES="4096")
    ranks.run(look_after_a_second)
    count, took = 1 << 14, 0.0  # a busy machine needs a minute for what an idle one does in seconds: from short to long
    while took < 2.5:  # it must go on for longer than it takes to look twice
        took = min(ranks.run(slowly_but_surely, count, timeout=60))
        count *= min(8, max(2, int(3.0 / took)))
