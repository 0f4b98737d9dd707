"""What goes wrong on GPUs has a name, on every rank, in bounded time, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import time
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from gpu_calls import device_of_rank
from gpu_places import PLACES, STAND_INS, ranks_on
from ranks import Ranks, close_all
from thorough import parametrize

import hetcoll
from hetcoll.errors import (
    AbortedError,
    BufferTypeError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    PeerLostError,
)
from hetcoll.gpu.array import DeviceArray
from hetcoll.gpu.planner import MOST_INSIDE
from hetcoll.gpu.watchdog import GpuWatch
from hetcoll.health.diagnosis import Diagnosis
from hetcoll.health.verdicts import Kind

Launch = Callable[..., Ranks]
APART, TOGETHER, NEAR = "0|1|2", "", "direct"  # an island each; one for all; one whose GPUs copy to each other
LARGE = 1_100_001  # elements: copies through slots
WAYS = parametrize(("islands", "count"), [(APART, LARGE), (APART, 100), (TOGETHER, LARGE), (NEAR, LARGE)], first=1)


@pytest.fixture(params=PLACES)
def gpus(request: pytest.FixtureRequest) -> Iterator[Launch]:
    made: list[Ranks] = []

    def start(islands: str, **env: str) -> Ranks:
        asked = {APART: {"HETCOLL_ISLANDS": APART}, TOGETHER: {}, NEAR: {"HETCOLL_ALGO": NEAR}}[islands]
        made.append(ranks_on(request.param, ["cuda"] * 3, {**asked, **env}, timeout=60))
        return made[-1]

    yield start
    close_all(made)


def array(comm: hetcoll.Communicator, count: int) -> DeviceArray:
    return DeviceArray.of(device_of_rank(comm.rank), np.ones(count, np.float32))


def warm_up(comm: hetcoll.Communicator, count: int) -> DeviceArray:
    """Kernels are compiled and links made before anything goes wrong."""
    made = array(comm, count)
    comm.allreduce(made.buffer()).wait(60)
    return made


def look_when_called(comm: hetcoll.Communicator) -> list[bool]:
    """Whether all is idle for who watches when a call tells it to, which it does once, before it is enqueued."""
    seen: list[bool] = []
    started = GpuWatch.started

    def look(watch: GpuWatch) -> None:
        seen.append(watch._calls.idle)
        started(watch)

    with unittest.mock.patch.object(GpuWatch, "started", look):
        made = warm_up(comm, 100)
        seen.clear()
        comm.allreduce(made.buffer()).wait(60)
    return seen


def test_a_call_is_watched_before_it_is_enqueued(gpus: Launch) -> None:
    """Enqueuing may wait for a peer for ever, in a library that connects: who saw nothing would not look again."""
    assert gpus(TOGETHER).run(look_when_called) == [[False]] * 3


def warm_up_only(comm: hetcoll.Communicator, count: int) -> None:
    warm_up(comm, count)


def wait_in_vain(comm: hetcoll.Communicator, count: int, absent: int, then: str) -> Any:
    """An all-reduce that `absent` does not make: it does something else."""
    made = warm_up(comm, count)
    comm.barrier()
    if comm.rank == absent:
        time.sleep(0.3)
        if then == "abort":
            comm.abort("enough")
        elif then == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            time.sleep(12.0)
        return None
    begun = time.monotonic()
    try:
        comm.allreduce(made.buffer()).wait(60)
    except CommunicationError as error:
        return error, time.monotonic() - begun
    return None, 0.0


@WAYS
@parametrize(("then", "wanted"), [("die", PeerLostError), ("abort", AbortedError)], first=1)
def test_a_rank_that_is_gone(gpus: Launch, islands: str, count: int, then: str, wanted: type[Exception]) -> None:
    ranks = gpus(islands)
    ranks.run(warm_up_only, count, timeout=100)
    ranks.start(wait_in_vain, count, 1, then)
    outcomes = ranks.finish(100, only=[0, 2])
    if then == "die":
        ranks.kill(1)  # it is gone already: nobody need wait for it
    for outcome in outcomes:
        error, seconds = outcome.value
        assert isinstance(error, wanted), error
        assert "rank 1" in str(error)
        assert seconds < 20


def need_one_that_left(comm: hetcoll.Communicator, count: int, leaver: int, what: str) -> tuple[Any, float]:
    """Rank `leaver` closes after the first call; what the others begin then cannot end without it."""
    made = warm_up(comm, count)
    comm.barrier()
    if comm.rank == leaver:
        comm.close()
        return None, 0.0
    begun = time.monotonic()
    try:
        if what == "recv":
            comm.recv(made.buffer(), leaver).wait(60)
        comm.allreduce(made.buffer()).wait(60)
    except CommunicationError as error:
        return error, time.monotonic() - begun
    return None, 0.0


def check_left(ranks: Ranks, leaver: int, count: int, what: str) -> None:
    for rank, (error, seconds) in enumerate(ranks.run(need_one_that_left, count, leaver, what, timeout=100)):
        if rank != leaver:
            assert isinstance(error, PeerLostError), error
            assert error.rank == leaver
            assert seconds < 20


@WAYS
def test_a_rank_that_has_left_while_it_is_needed(gpus: Launch, islands: str, count: int) -> None:
    check_left(gpus(islands), 1, count, "allreduce")


@parametrize(("islands", "count"), [(APART, LARGE), (APART, 100), (TOGETHER, 100)], first=1)
def test_a_message_of_a_rank_that_has_left(gpus: Launch, islands: str, count: int) -> None:
    check_left(gpus(islands), 0, count, "recv")


@pytest.mark.fakes
def test_an_island_among_hosts_that_a_rank_has_left() -> None:
    """Nothing is shared by its ranks but the library: what that rank has called is known by its goodbye."""
    ranks = ranks_on(STAND_INS, ["cuda"] * 3, {"HETCOLL_HOST_ID": ("a", "b", "b")}, timeout=60)
    try:
        check_left(ranks, 1, 100, "allreduce")
    finally:
        ranks.kill_all()


@WAYS
def test_a_rank_that_never_calls(gpus: Launch, islands: str, count: int) -> None:
    ranks = gpus(islands, HETCOLL_TIMEOUT="4")
    ranks.start(wait_in_vain, count, 1, "nothing")
    for outcome in ranks.finish(100, only=[0, 2]):
        error, seconds = outcome.value
        assert isinstance(error, CollectiveTimeoutError), error
        assert "rank 1 is at GPU call 1" in str(error)
        assert seconds < 20
    ranks.finish(30, only=[1])


def differ(comm: hetcoll.Communicator, count: int) -> Any:
    try:
        made = warm_up(comm, count)  # others may be further already, and have seen that they differ
        comm.allreduce(made.buffer(), op="max" if comm.rank == 1 else "sum").wait(60)
        comm.allreduce(made.buffer()).wait(60)
    except CommunicationError as error:
        return error
    return None


@WAYS
def test_ranks_that_call_different_things(gpus: Launch, islands: str, count: int) -> None:
    for outcome in gpus(islands).run(differ, count, timeout=100):
        assert isinstance(outcome, CollectiveMismatchError), outcome
        assert "op=max" in str(outcome)
        assert "op=sum" in str(outcome)
        assert "test_gpu_failures.py" in str(outcome)


def pass_wrong_things(comm: hetcoll.Communicator) -> None:
    made = warm_up(comm, 100)
    if (other := device_of_rank(comm.rank + 1)).bus_id != device_of_rank(comm.rank).bus_id:  # all may share a real one
        with pytest.raises(BufferTypeError, match="the GPU of rank"):
            comm.allreduce(DeviceArray(other, 100).buffer())
    host = np.ones(100, np.float32)
    with pytest.raises(BufferTypeError):
        comm.allreduce(made.buffer(), host)
    comm.allreduce(made.buffer()).wait(60)
    comm.allreduce(host)


def test_wrong_arguments_leave_all_well(gpus: Launch) -> None:
    gpus(APART).run(pass_wrong_things, timeout=100)


def send_where_it_fails(comm: hetcoll.Communicator) -> tuple[CommunicationError | None, float]:
    other = comm.split(0)
    assert other is not None
    made = [warm_up(each, 100) for each in (comm, other)][1]
    failed = None
    try:
        out, into = (array(comm, MOST_INSIDE).buffer() for _ in range(2))  # longer than a kernel carries
        comm.sendrecv(out, 1 - comm.rank, into, 1 - comm.rank).wait(60)
    except CommunicationError as error:
        failed = error
    other.allreduce(made.buffer()).wait(60)
    return failed, float(made.get()[0])


def test_a_library_that_refuses_one_call_of_a_group_serves_other_communicators() -> None:
    """A group that is left open would hold up whatever the thread enqueues next."""
    ranks = ranks_on(STAND_INS, ["cuda"] * 2, {"HETCOLL_TIMEOUT": "20"}, cuda_fail="ncclSend:1:5")
    try:
        for error, value in ranks.run(send_where_it_fails, timeout=100):
            assert error is not None
            assert "ncclSend" in str(error)
            assert value == 4.0
    finally:
        ranks.kill_all()


def abort_as_others_begin(comm: hetcoll.Communicator) -> float:
    """Rank 1 does not come for the memory that ranks of a host share: it aborts, as Ctrl-C does."""
    start = time.monotonic()

    def give_up(*args: Any) -> int:
        comm.abort("enough")
        raise comm._diagnosis.error()

    if comm.rank == 1:
        unittest.mock.patch("hetcoll.gpu.shared.shared_memory", give_up).start()
    with pytest.raises(AbortedError, match=r"rank 1 called abort\(\): enough"):
        comm.allreduce(array(comm, 100).buffer())
    return time.monotonic() - start


def test_who_waits_for_memory_of_the_host_hears_of_a_failure(gpus: Launch) -> None:
    assert max(gpus(APART).run(abort_as_others_begin, timeout=60)) < 30


def pass_on(comm: hetcoll.Communicator) -> str:
    """Rank 1 aborts in place of a message to rank 0, which would pass it on to rank 2. That one hears of it late."""
    made = warm_up(comm, LARGE)
    for source, dest in ((1, 0), (0, 2)):  # so that there are links
        if comm.rank == source:
            comm.send(made.buffer(), dest).wait(60)
        elif comm.rank == dest:
            comm.recv(made.buffer(), source).wait(60)
    comm.barrier()
    if comm.rank == 1:
        time.sleep(0.3)  # so that the others wait
        comm.abort("enough")
        return "aborted"
    apply = Diagnosis._apply
    try:
        if comm.rank == 0:
            comm.recv(made.buffer(), 1)
            comm.send(made.buffer(), 2).wait(60)
        else:
            work = comm.recv(made.buffer(), 0)

            def hear_late(*args: Any) -> None:
                deadline = time.monotonic() + 1.0
                while not work.done and time.monotonic() < deadline:
                    time.sleep(0.001)
                time.sleep(0.1)
                apply(*args)

            with unittest.mock.patch.object(Diagnosis, "_apply", hear_late):
                work.wait(60)
    except AbortedError as error:
        return str(error)
    return "nothing was wrong"


@parametrize("islands", [APART, TOGETHER, NEAR], first=1)
def test_nothing_wrong_is_passed_on_to_a_rank_that_has_not_heard_of_the_failure(gpus: Launch, islands: str) -> None:
    results = gpus(islands).run(pass_on, timeout=100)
    assert results[0] == results[2] == "rank 1 called abort(): enough"


@pytest.mark.fakes
def test_nothing_wrong_is_passed_on_where_a_link_from_another_host_fails() -> None:
    """Rank 0 and 2 share a host, and no verdict comes before that link has failed."""
    ranks = ranks_on(STAND_INS, ["cuda"] * 3, {"HETCOLL_HOST_ID": ("b", "a", "b")}, timeout=60)
    try:
        results = ranks.run(pass_on, timeout=100)
    finally:
        ranks.kill_all()
    assert results[0] == results[2] == "rank 1 called abort(): enough"


def close_unheard(comm: hetcoll.Communicator) -> float:
    """A link has failed in the engine, and nobody was told: `close` cannot count on a verdict that lets streams go."""
    made = warm_up(comm, LARGE)
    comm.barrier()
    if comm.rank == 0:
        comm.recv(made.buffer(), 1)
        comm._engine.fail(Kind.ABORTED, 1, "a link has failed")
    begun = time.monotonic()
    comm.close()
    return time.monotonic() - begun


def test_close_lets_streams_go_after_a_failure_that_nobody_was_told_of(gpus: Launch) -> None:
    assert max(gpus(APART).run(close_unheard, timeout=60)) < 30
