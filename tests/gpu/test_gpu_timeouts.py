"""`timeout=` of one call on a GPU's array: it ends in that time on all ranks, as on host memory, and says no more."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from device_checks import Capture
from gpu_calls import device_of_rank
from gpu_kinds import Own, start
from gpu_places import STAND_INS
from patience import PATIENCE
from ranks import Ranks, wait_until
from thorough import parametrize

import hetcoll
from hetcoll import Work
from hetcoll.calls.buffers import element_type
from hetcoll.errors import ArgumentError, CollectiveTimeoutError, CommunicationError
from hetcoll.gpu.array import DeviceArray

Placed = Callable[..., Ranks]

SECONDS = 2.0  # that a call has
SOON = 15.0 * PATIENCE  # in which it has ended: the communicator's timeout is 300
LARGE, SMALL = 1_100_001, 100  # elements: by copies, by a kernel
APART, TOGETHER, NEAR = {"HETCOLL_ISLANDS": "0|1"}, {}, {"HETCOLL_ALGO": "direct"}
MANY_QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "GPU_MAX_HW_QUEUES": "32"}  # none waits behind another's message
WAYS = [
    ("nn", APART, LARGE),
    ("nn", APART, SMALL),
    ("nn", TOGETHER, SMALL),
    ("nn", TOGETHER, LARGE),
    ("nn", NEAR, LARGE),
    ("na", {}, LARGE),
    ("na", {}, SMALL),
    ("nn", {"HETCOLL_HOST_ID": ("a", "b"), **APART}, LARGE),
    ("nn", {"HETCOLL_HOST_ID": ("a", "b"), **APART}, SMALL),
]
NAMES = [
    "apart",
    "kernel",
    "kernel of an island",
    "library",
    "near",
    "vendors",
    "kernel of two vendors",
    "hosts",
    "hosts, few bytes",
]
Start = Callable[[hetcoll.Communicator, Own, dict[str, Any]], Work]


def each_way(*, first: int) -> pytest.MarkDecorator:
    return parametrize(("kinds", "env", "count"), WAYS, ids=NAMES, first=first)


def allreduce(comm: hetcoll.Communicator, own: Own, how: dict[str, Any]) -> Work:
    return comm.allreduce(own.array, **how)


def recv(comm: hetcoll.Communicator, own: Own, how: dict[str, Any]) -> Work:
    return comm.recv(own.array, 1 - comm.rank, **how)


def send(comm: hetcoll.Communicator, own: Own, how: dict[str, Any]) -> Work:
    return comm.send(own.array, 1 - comm.rank, **how)


def sendrecv(comm: hetcoll.Communicator, own: Own, how: dict[str, Any]) -> Work:
    other = Own(comm, np.zeros(own.get().size, np.float32))
    work = comm.sendrecv(own.array, 1 - comm.rank, other.array, 1 - comm.rank, **how)
    work.wait()  # while `other` lives
    return work


def allreduce_converted(comm: hetcoll.Communicator, own: Own, how: dict[str, Any]) -> Work:
    """Of 8-bit floats that one of the GPUs has in another kind."""
    assert comm._gpus.executor.two_kinds  # type: ignore[union-attr]
    narrow = Own(comm, own.get().astype(element_type("float8_e4m3fn")))
    work = comm.allreduce(narrow.array, **how)
    work.wait()
    return work


CALLED = {sendrecv: "send", allreduce_converted: "allreduce"}


Heard = tuple[CommunicationError | None, float]


def call_alone(
    whole: hetcoll.Communicator, start: Start, count: int, caller: int, first: bool, how: dict[str, Any]
) -> Heard:
    """On a communicator of the same ranks, which alone is of no use afterwards: `whole` goes on."""
    part = whole.split(0)
    assert part is not None
    found = _call_alone(part, start, count, caller, first, how)
    part.close()
    whole.barrier()
    assert whole.error is None
    return found


def _call_alone(
    comm: hetcoll.Communicator, start: Start, count: int, caller: int, first: bool, how: dict[str, Any]
) -> Heard:
    """The other rank does not call, and hears of it. `first`: it is the first call of all."""
    own = Own(comm, np.ones(count, np.float32))
    if not first:
        comm.allreduce(own.array).wait(60 * PATIENCE)
    comm.barrier()
    begun = time.monotonic()
    if comm.rank != caller:
        wait_until(lambda: comm.error, SOON)
        return comm.error, time.monotonic() - begun
    try:
        start(comm, own, {"timeout": SECONDS, **how}).wait()
    except CommunicationError as error:
        return error, time.monotonic() - begun
    return None, 0.0


def check_alone(ranks: Ranks, start: Start, count: int, *, caller: int = 0, first: bool = False, **how: Any) -> None:
    found = ranks.run(call_alone, start, count, caller, first, how, timeout=100)
    for error, took in found:
        assert isinstance(error, CollectiveTimeoutError), error
        assert f"did not finish in {SECONDS:g} s" in str(error)
        assert took < SOON
    assert found[caller][1] > 0.9 * SECONDS
    if not first:
        assert f"{CALLED.get(start, start.__name__)}(" in str(found[0][0])


@each_way(first=4)
def test_a_collective_that_a_rank_does_not_call(whole: Placed, kinds: str, env: Any, count: int) -> None:
    check_alone(whole(kinds, **env), allreduce, count)


@each_way(first=1)
def test_an_asynchronous_one(whole: Placed, kinds: str, env: Any, count: int) -> None:
    check_alone(whole(kinds, **env), allreduce, count, async_op=True)


@each_way(first=4)
def test_a_message_that_is_not_sent(whole: Placed, kinds: str, env: Any, count: int) -> None:
    check_alone(whole(kinds, **env), recv, count)


@parametrize("start", [send, sendrecv], first=1)
@parametrize("async_op", [False, True], first=1)
def test_one_that_is_not_received(whole: Placed, start: Start, async_op: bool) -> None:
    check_alone(whole("nn", **APART), start, 3 * LARGE, async_op=async_op)


@pytest.mark.fakes
@parametrize("async_op", [False, True], first=1)
def test_a_call_that_is_converted(whole: Placed, async_op: bool) -> None:
    check_alone(whole("na"), allreduce_converted, LARGE, async_op=async_op)


@pytest.mark.fakes
@parametrize("caller", [0, 1], first=1)
@parametrize("start", [allreduce, recv], first=1)
@parametrize("kinds", ["nc", "ca"], first=1)
def test_beside_a_rank_without_a_gpu(whole: Placed, kinds: str, start: Start, caller: int) -> None:
    """A GPU's rank calls, or the one without."""
    check_alone(whole(kinds), start, SMALL, caller=caller)


@pytest.mark.fakes
@parametrize(("kinds", "caller"), [("na", 0), ("nc", 0), ("nc", 1)], first=1)
@parametrize("start", [allreduce, recv], first=1)
def test_the_first_call_of_all(placed: Placed, kinds: str, start: Start, caller: int) -> None:
    check_alone(placed(kinds), start, SMALL, caller=caller, first=True)


def end_in_time(comm: hetcoll.Communicator, count: int, pause: float) -> list[float]:
    """Rank 1 is late with calls that have no time of their own: one that is under way all along, and one behind."""
    first, second, third, got, message = (Own(comm, np.ones(count, np.float32)) for _ in range(5))
    comm.allreduce(first.array).wait(60 * PATIENCE)
    waiting = comm.recv(got.array, 1, async_op=True) if comm.rank == 0 else None
    for own, async_op in ((first, False), (second, True)):
        how: dict[str, Any] = {"timeout": pause / 2, "async_op": async_op}
        comm.allreduce(own.array, **how)
        (comm.recv if comm.rank == 1 else comm.send)(message.array, 1 - comm.rank, **how)
    comm.barrier()
    if comm.rank == 1:
        time.sleep(pause)
    last = comm.allreduce(third.array)
    if waiting is None:
        comm.send(first.array, 0)
    else:
        waiting.wait()
    last.wait()
    comm.barrier()
    return [float(each.get()[-1]) for each in (first, second, third, first if waiting is None else got)]


@parametrize(("kinds", "count"), [("nn", SMALL), ("nn", LARGE), ("na", LARGE)], first=1)
def test_calls_that_are_done_in_time_are_forgotten(placed: Placed, kinds: str, count: int) -> None:
    ranks = placed(kinds, **APART, **MANY_QUEUES)
    assert ranks.run(end_in_time, count, 4.0 * PATIENCE, timeout=100) == [[4.0, 2.0, 2.0, 4.0]] * 2


def wait_for_longer(comm: hetcoll.Communicator, pause: float) -> None:
    own = Own(comm, np.ones(LARGE, np.float32))
    comm.allreduce(own.array, timeout=60 * PATIENCE).wait()
    comm.barrier(timeout=60 * PATIENCE)
    if comm.rank == 1:
        time.sleep(2 * pause)
    comm.allreduce(own.array, timeout=60 * PATIENCE).wait()
    comm.barrier(timeout=60 * PATIENCE)
    if comm.rank == 1:
        wait_until(lambda: comm.error, SOON)
    with pytest.raises(CollectiveTimeoutError, match="GPU calls have not moved for"):
        comm.allreduce(own.array).wait()


def test_a_call_may_have_more_time_than_others(placed: Placed) -> None:
    """And those behind it have none of that."""
    pause = 2.0 * PATIENCE
    placed("nn", **APART, HETCOLL_TIMEOUT=f"{pause:g}").run(wait_for_longer, pause, timeout=100)


def capture_with_little_time(comm: hetcoll.Communicator, count: int, pause: float) -> float:
    device = device_of_rank(comm.rank)
    device.activate()
    stream, array = device.stream(), DeviceArray.of(device, np.ones(count, np.float32))
    with Capture(device, stream) as captured:
        comm.allreduce(array.buffer(), stream=stream, timeout=pause / 2)
    if comm.rank == 1:
        time.sleep(pause)
    captured.replay(stream)
    device.synchronize(stream)
    comm.barrier()
    captured.close()
    return float(array.get()[-1])


def test_a_graph_knows_no_time(whole: Placed) -> None:
    assert whole("nn", **APART).run(capture_with_little_time, LARGE, 4.0 * PATIENCE, timeout=100) == [2.0, 2.0]


def pass_wrong_things(comm: hetcoll.Communicator) -> None:
    """Of the arguments of such a call; then all goes on."""
    own = Own(comm, np.ones(SMALL, np.float32))
    comm.allreduce(own.array).wait(60 * PATIENCE)
    for wrong in (0, -1.0, "2"):
        with pytest.raises(ArgumentError, match="timeout: wanted seconds above 0"):
            comm.allreduce(own.array, timeout=wrong)
    for async_op in (False, True):
        with pytest.raises(ArgumentError, match="stream: wanted one of cuda"):
            comm.allreduce(own.array, stream=0x77777, timeout=SECONDS, async_op=async_op)
    comm.allreduce(own.array, timeout=60 * PATIENCE).wait()


@pytest.mark.parametrize("whole", [STAND_INS], indirect=True)  # a real driver does not say what it does with the stream
def test_wrong_arguments_leave_all_well(whole: Placed) -> None:
    whole("nn", **APART).run(pass_wrong_things, timeout=100)


def stay_ahead(comm: hetcoll.Communicator, op: str, count: int, seconds: float) -> int:
    """Some calls are under way all the time. How many there were: as many on all ranks, or the last would wait."""
    device, other, aside = device_of_rank(comm.rank), 1 - comm.rank, comm.split(0)
    assert aside is not None
    device.activate()
    stream, array, came = device.stream(), *(DeviceArray.of(device, np.zeros(count, np.float32)) for _ in range(2))
    under_way: deque[int] = deque()

    def call() -> None:
        if op == "allreduce":
            comm.allreduce(array.buffer(), stream=stream)
        else:
            comm.sendrecv(array.buffer(), other, came.buffer(), other, stream=stream)

    call()  # what the first one makes takes its own time
    events, calls, end = [device.event() for _ in range(4)], 0, time.monotonic() + seconds
    while time.monotonic() < end:
        call()
        device.record(events[calls % len(events)], stream)
        under_way.append(events[calls % len(events)])
        calls += 1
        while len(under_way) == len(events) and time.monotonic() < end:
            if device.query(under_way[0]):
                under_way.popleft()
            else:
                time.sleep(0.001)
    for _ in range(max(aside.allgather_object(calls)) - calls):
        call()
    device.synchronize(stream)
    assert comm.error is None
    for event in events:
        device.destroy_event(event)
    device.destroy_stream(stream)
    return calls


@pytest.mark.fakes
@pytest.mark.parametrize(
    ("op", "env", "count"),
    [
        ("allreduce", {"HETCOLL_REPRODUCIBLE": "1"}, 2000),
        ("allreduce", {}, 1_100_000),
        ("sendrecv", {}, 20),
        ("sendrecv", {}, 1_100_000),
    ],
    ids=["kernels", "library", "kernels, messages", "library, messages"],
)
def test_a_host_that_is_always_ahead_is_not_stuck(op: str, env: dict[str, str], count: int) -> None:
    """The end of the last call never comes: what ends before it shows that things move."""
    seconds = 2.0 * PATIENCE  # many times what all that is under way takes
    with start("nn", HETCOLL_TIMEOUT=str(seconds), jitter="1:3000", **env) as ranks:  # late, where it would compute
        assert min(ranks.run(stay_ahead, op, count, 1.5 * seconds, timeout=100)) > 20
