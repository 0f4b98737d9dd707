"""Graphs that others do not replay, or capture otherwise, or that outlive their communicator end in bounded time."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import subprocess
import sys
import threading
import time
import unittest.mock
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fakes
import numpy as np
import pytest
from device_checks import Capture
from gpu_calls import device_of_rank
from gpu_places import PLACES, ranks_on
from patience import DEADLINE, PATIENCE
from ranks import Ranks, close_all, wait_until
from thorough import parametrize

import hetcoll
from hetcoll.errors import CollectiveMismatchError, CollectiveTimeoutError, CommunicationError
from hetcoll.gpu.array import DeviceArray
from hetcoll.vendors.devices.base import Device

LARGE = 1_100_001  # float32s: more than one kernel does


@pytest.fixture(params=PLACES)
def fresh(request: pytest.FixtureRequest) -> Iterator[Callable[..., Ranks]]:
    """Two ranks of this test's own."""
    made: list[Ranks] = []

    def get(**env: str) -> Ranks:
        made.append(ranks_on(request.param, ["cuda"] * 2, {"HETCOLL_ISLANDS": "0|1", **env}, timeout=60))
        return made[-1]

    yield get
    close_all(made)


def captured_allreduce(comm: hetcoll.Communicator) -> tuple[Device, int, DeviceArray, Capture]:
    device = device_of_rank(comm.rank)
    device.activate()
    stream, array = device.stream(), DeviceArray.of(device, np.ones(LARGE, np.float32))
    with Capture(device, stream) as captured:
        comm.allreduce(array.buffer(), stream=stream)
    captured.replay(stream)
    device.synchronize(stream)
    assert (array.get() == 2).all()
    return device, stream, array, captured


def replay_alone(comm: hetcoll.Communicator, then: str) -> tuple[str, float]:
    """Rank 0 replays, rank 1 does not. What rank 0 is told, and how long its stream took to be free."""
    device, stream, _, captured = captured_allreduce(comm)
    comm.barrier()
    begun, said = time.monotonic(), ""
    if comm.rank == 0:
        captured.replay(stream)
        if then == "abort":
            time.sleep(0.3)
            comm.abort("enough")
        device.synchronize(stream)
    took = time.monotonic() - begun
    if then != "abort" or comm.rank == 0:
        limit = time.monotonic() + PATIENCE * 20
        while not said and time.monotonic() < limit:
            try:
                comm._gpus.executor.check()  # type: ignore[union-attr]
            except CommunicationError as error:
                said = f"{type(error).__name__}: {error}"
            time.sleep(0.05)
    if comm.rank == 0:
        captured.replay(stream)  # nothing waits any more
        device.synchronize(stream)
    captured.close()
    return said, took


def test_a_replay_that_others_do_not_make_is_found(fresh: Any) -> None:
    for said, took in fresh(HETCOLL_TIMEOUT=str(2 * PATIENCE)).run(replay_alone, "nothing", timeout=60):
        assert said.startswith(CollectiveTimeoutError.__name__), said
        assert "rank 0 has begun 2 captured calls; rank 1 has begun 1 captured calls" in said
        assert took < PATIENCE * 10


def test_abort_lets_replays_go(fresh: Any) -> None:
    (said, took), _ = fresh().run(replay_alone, "abort", timeout=60)
    assert "enough" in said
    assert took < 10


def close_with_one_stuck(comm: hetcoll.Communicator) -> float:
    device, stream, _, captured = captured_allreduce(comm)
    comm.barrier()
    if comm.rank == 0:
        captured.replay(stream)
        while comm._gpus.executor.idle:  # type: ignore[union-attr]
            time.sleep(0.01)
    begun = time.monotonic()
    comm.close()
    device.synchronize()
    return time.monotonic() - begun


def test_close_ends_what_is_stuck(fresh: Any) -> None:
    assert max(fresh().run(close_with_one_stuck, timeout=60)) < 20


def close_before_the_graph(comm: hetcoll.Communicator, failed: bool) -> tuple[float, str]:
    """Rank 0's graph outlives the communicator that it has a call of. How long `close` took there, and what it said."""
    part = comm.split(0)
    assert part is not None
    array = DeviceArray.of(device_of_rank(comm.rank), np.ones(LARGE, np.float32))
    part.allreduce(array.buffer())  # sets NCCL up
    device, stream, _, captured = captured_allreduce(part)
    comm.barrier()
    if comm.rank == 1:
        captured.close()
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("hetcoll").addHandler(handler)
    begun = time.monotonic()
    if failed and comm.rank == 0:
        part.abort("enough")
    with unittest.mock.patch("hetcoll.gpu.vendor_comm._END_SECONDS", 2.0):
        part.close()
    took = time.monotonic() - begun
    logging.getLogger("hetcoll").removeHandler(handler)
    if comm.rank == 0:
        captured.close()
    wait_until(lambda: not any("island" in thread.name for thread in threading.enumerate()))
    device.destroy_stream(stream)
    return took, said.getvalue()


@parametrize("failed", [False, True], first=1)
def test_close_does_not_wait_for_graphs_for_ever(fresh: Any, failed: bool) -> None:
    ranks = fresh(HETCOLL_ISLANDS="0,1")
    took, said = ranks.run(close_before_the_graph, failed, timeout=60)[0]
    assert took < 9
    assert "NCCL 2" in said
    assert "has not ended its communicator of ranks 0-1 within 2 s: it waits for graphs" in said


LEAVES = """
import numpy as np
from device_checks import Capture
from gpu_calls import device_of_rank
import hetcoll
from hetcoll.gpu.array import DeviceArray

comm = hetcoll.init()
device = device_of_rank(comm.rank)
device.activate()
stream, array = device.stream(), DeviceArray.of(device, np.ones(1_100_001, np.float32))
comm.allreduce(array.buffer(), stream=stream)
with Capture(device, stream) as captured:
    comm.allreduce(array.buffer(), stream=stream)
print("leaves", array.get()[0])
"""


@pytest.mark.fakes
def test_an_interpreter_ends_with_graphs(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text(LEAVES)
    env = {**os.environ, **fakes.environment("cuda", 2), "HETCOLL_TIMEOUT": "5", "HETCOLL_ISLANDS": "0,1"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-m", "hetcoll", "run", "-n", "2", sys.executable, str(tmp_path / "leaves.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("leaves 2.0") == 2
    assert (done.stdout + done.stderr).count("has not ended its communicator of ranks 0-1 within 5 s") == 2


def capture_something_else(comm: hetcoll.Communicator, eager: bool) -> str:
    device, stream, array, captured = captured_allreduce(comm)
    said = ""
    try:
        if eager and comm.rank == 1:
            comm.allreduce(array.buffer(), stream=stream).wait(30)
        else:
            with contextlib.ExitStack() as undo:
                undo.enter_context(Capture(device, stream))
                device.copy(array.ptr, array.ptr + 64, 32, stream)
                comm.allreduce(array.buffer(0, LARGE - (0 if eager else comm.rank)), stream=stream)
            comm.barrier(timeout=20)
    except CommunicationError as error:
        said = f"{type(error).__name__}: {error}"
    captured.close()
    return said


@parametrize("eager", [False, True], first=1)
def test_ranks_that_capture_different_calls(fresh: Any, eager: bool) -> None:
    for said in fresh(HETCOLL_TIMEOUT="20").run(capture_something_else, eager, timeout=60):
        assert said.startswith(CollectiveMismatchError.__name__), said
        assert "called in a graph, allreduce(" in said
