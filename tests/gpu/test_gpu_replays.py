"""Replays of calls that are one kernel: what others do not replay ends in bounded time, and names who is missing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from device_checks import Capture
from gpu_calls import device_of_rank
from gpu_places import PLACES, ranks_on
from ranks import Ranks, close_all, wait_until
from thorough import parametrize

import hetcoll
from hetcoll.errors import CollectiveTimeoutError, CommunicationError, PeerLostError
from hetcoll.gpu.array import DeviceArray
from hetcoll.vendors.devices.base import Device
from hetcoll.vendors.devices.kernels.table import AWAITED, ONESHOT_RANKS

Launch = Callable[..., Ranks]
KINDS = {"nn": ["cuda"] * 2, "aa": ["hip"] * 2, "na": ["cuda", "hip"], "nnn": ["cuda"] * 3, "nana": ["cuda", "hip"] * 2}
ONESHOT, EXCHANGE = 100, 100_003  # float32s; of four ranks the latter goes in two shots
CALLS = {"oneshot": ONESHOT, "exchange": EXCHANGE, "recv": 100, "recv packs": 50_001, "send": 100}
RING = 30  # messages: more than a ring takes without a receiver


@pytest.fixture(params=PLACES)
def gpus(request: pytest.FixtureRequest) -> Iterator[Launch]:
    made: list[Ranks] = []

    def start(kinds: str, **env: str) -> Ranks:
        devices = {"HETCOLL_DEVICE": tuple(KINDS[kinds]), "HETCOLL_ISLANDS": "|".join(map(str, range(len(kinds))))}
        made.append(ranks_on(request.param, KINDS[kinds], {**devices, **env}, timeout=100))
        return made[-1]

    yield start
    close_all(made)


class Replays:
    """A graph of one call, which all ranks have replayed once."""

    def __init__(self, comm: hetcoll.Communicator, what: str) -> None:
        self.comm, self.device = comm, device_of_rank(comm.rank)
        self.device.activate()
        self.stream, self.array = self.device.stream(), DeviceArray.of(self.device, np.ones(CALLS[what], np.float32))
        other = 1 - comm.rank
        with Capture(self.device, self.stream) as self.captured:
            if what in ("oneshot", "exchange"):
                comm.allreduce(self.array.buffer(), stream=self.stream)
            elif (comm.rank == 0) == what.startswith("recv"):
                comm.recv(self.array.buffer(), other, stream=self.stream)
            else:
                comm.send(self.array.buffer(), other, stream=self.stream)
        self.replay()
        self.wait()
        comm.barrier()

    def replay(self) -> None:
        self.captured.replay(self.stream)

    def wait(self) -> None:
        self.device.synchronize(self.stream)

    def failure(self) -> CommunicationError | None:
        """What the communicator has failed with."""
        with suppress(CommunicationError):
            self.comm._gpus.executor.check()  # type: ignore[union-attr]
            return None
        try:
            self.comm.barrier()
        except CommunicationError as error:
            return error
        raise AssertionError("a call after a failure went well")

    def await_waiting(self) -> None:
        """Until a kernel of rank 0 says that it waits."""
        segment = self.comm._gpus.executor._segment  # type: ignore[union-attr]
        segment.awaited(0)
        wait_until(lambda: segment._bytes[AWAITED : AWAITED + ONESHOT_RANKS].any(), 20)

    def close(self) -> None:
        self.captured.close()
        self.device.destroy_stream(self.stream)


def replay_alone(comm: hetcoll.Communicator, what: str) -> tuple[CommunicationError, float]:
    """Rank 0 replays, rank 1 does not. What all are told, and how long rank 0's stream took to be free."""
    made = Replays(comm, what)
    begun = time.monotonic()
    if comm.rank == 0:
        for _ in range(RING if what == "send" else 1):
            made.replay()
        made.wait()
    took = time.monotonic() - begun
    error = wait_until(made.failure, 20)
    made.replay()  # nothing waits any more
    made.wait()
    again = made.failure()
    assert str(again) == str(error)
    made.close()
    comm.close()
    return error, took


ALONE = [("nn", "oneshot"), ("aa", "exchange"), ("nn", "recv"), ("aa", "oneshot"), ("nn", "exchange"), ("aa", "recv"),
         ("nn", "recv packs"), ("aa", "recv packs"), ("nn", "send"), ("aa", "send")]  # fmt: skip


@parametrize(("kinds", "what"), ALONE, first=3)
def test_a_replay_that_others_do_not_make_is_found(gpus: Launch, kinds: str, what: str) -> None:
    for error, took in gpus(kinds, HETCOLL_TIMEOUT="2").run(replay_alone, what, timeout=100):
        assert isinstance(error, CollectiveTimeoutError), error
        assert "a kernel waits for rank 1" in str(error)
        assert took < 20


def late(comm: hetcoll.Communicator, what: str, seconds: float) -> list[float]:
    """The last rank replays late again and again, together for longer than the timeout."""
    made, found = Replays(comm, what), []
    for _ in range(4):
        if comm.rank == comm.size - 1:
            made.await_waiting()
            time.sleep(seconds)
        made.replay()
        made.wait()
        found.append(float(made.array.get()[-1]))
    comm.allreduce(made.array.buffer(), stream=made.stream).wait(20)
    found.append(float(made.array.get()[0]))
    made.close()
    return found


@parametrize(("kinds", "what"), [("na", "oneshot"), ("nnn", "exchange"), ("nana", "exchange")], first=1)
def test_a_replay_that_is_late_is_waited_for(gpus: Launch, kinds: str, what: str) -> None:
    ranks, size = gpus(kinds, HETCOLL_TIMEOUT="8"), len(kinds)
    for found in ranks.run(late, what, 2.5, timeout=100):
        assert found == [size**n for n in range(2, 7)]


def die_in_a_replay(comm: hetcoll.Communicator, what: str) -> Any:
    """Ranks 0 and 1 replay, rank 2 does not; rank 1 dies."""
    made = Replays(comm, what)
    if comm.rank < 2:
        made.replay()
    made.await_waiting()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    made.wait()
    took = time.monotonic() - begun
    error = wait_until(made.failure, 20)
    made.close()
    comm.close()
    return error, took


@parametrize("what", ["exchange", "oneshot"], first=1)
def test_a_death_ends_replays(gpus: Launch, what: str) -> None:
    ranks = gpus("nnn")
    ranks.start(die_in_a_replay, what)
    outcomes = ranks.finish(100, only=[0, 2])
    ranks.kill(1)  # it is gone already: nobody need wait for it
    for outcome in outcomes:
        error, took = outcome.value
        assert isinstance(error, PeerLostError), error
        assert error.rank == 1
        assert took < 20


def close_with_one_stuck(comm: hetcoll.Communicator, what: str) -> float:
    made = Replays(comm, what)
    if comm.rank == 0:
        made.replay()
        made.await_waiting()
    begun = time.monotonic()
    comm.close()
    made.wait()
    took = time.monotonic() - begun
    made.close()
    return took


@parametrize("what", ["oneshot", "exchange", "recv"], first=1)
def test_close_ends_what_is_stuck(gpus: Launch, what: str) -> None:
    assert max(gpus("na").run(close_with_one_stuck, what, timeout=100)) < 20


def behind_a_kernel(comm: hetcoll.Communicator) -> tuple[CommunicationError | None, float]:
    """What stands before the replays on all streams is the caller's own, and takes longer than the timeout."""
    made = Replays(comm, "oneshot")
    counter, zero, abort = (DeviceArray.of(made.device, np.zeros(8, np.uint64)) for _ in range(3))
    hold(made.device, made.stream, counter.ptr, zero.ptr, abort.ptr)
    made.replay()
    time.sleep(4.0)
    failure = made.failure()
    side = made.device.stream()
    one = np.ones(1, np.uint64)
    made.device.copy(counter.ptr, one.ctypes.data, 8, side)
    made.wait()
    found = float(made.array.get()[0])
    made.device.destroy_stream(side)
    made.close()
    return failure, found


def hold(device: Device, stream: int, counter: int, zero: int, abort: int) -> None:
    arguments = [int(x).to_bytes(8, "little") for x in (counter, zero, 1, abort)]
    device.launch(device.kernels().function("await"), 1, 1, arguments, stream)


def test_what_stands_before_a_replay_is_not_ours(gpus: Launch) -> None:
    for failure, found in gpus("na", HETCOLL_TIMEOUT="2").run(behind_a_kernel, timeout=100):
        assert failure is None
        assert found == 4.0


def take_beside_a_kernel(comm: hetcoll.Communicator) -> tuple[bool, float]:
    """Whether the kernel on another stream still stood when a copy was taken, and what that held."""
    device = device_of_rank(comm.rank)
    stream, side, stands = device.stream(), device.stream(), device.event()
    array = DeviceArray.of(device, np.full(1000, comm.rank + 1, np.float32))
    counter, zero, abort = (DeviceArray.of(device, np.zeros(8, np.uint64)) for _ in range(3))
    comm.allreduce(array.buffer(), stream=stream).wait(60)
    snapshot = comm._core.gpus.snapshot(array.buffer(), stream)
    snapshot.wait(60)
    hold(device, side, counter.ptr, zero.ptr, abort.ptr)
    device.record(stands, side)
    taken = snapshot.take()
    still = not device.query(stands)
    one = np.ones(1, np.uint64)
    device.copy(counter.ptr, one.ctypes.data, 8, stream)
    device.synchronize(side)
    device.destroy_event(stands)
    for each in (stream, side):
        device.destroy_stream(each)
    return still, float(taken.owner.view(np.float32)[0])


def test_a_copy_is_taken_while_another_stream_stands(gpus: Launch) -> None:
    """To take back its memory a driver would wait for that stream, on which another thread's receive may stand."""
    assert gpus("na").run(take_beside_a_kernel, timeout=60) == [(True, 3.0)] * 2
