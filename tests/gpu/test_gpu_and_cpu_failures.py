"""What becomes of a job of GPUs and CPUs when ranks differ, die, leave or do not come."""

from __future__ import annotations

import os
import resource
import time
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_kinds import Own, start
from ranks import Job, Outcome, wait_until
from thorough import parametrize

import hetcoll
from hetcoll.errors import (
    AbortedError,
    BufferTypeError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    InitError,
    PeerLostError,
)
from hetcoll.gpu.watchdog import GpuWatch

pytestmark = pytest.mark.fakes


def join_and_leave(job: Job) -> None:
    job.join()


def test_all_must_say_what_they_use() -> None:
    with start("nac", join=False, HETCOLL_DEVICE=("auto", "hip", "cpu")) as ranks:
        for outcome in ranks.outcomes(join_and_leave):
            assert isinstance(outcome.error, InitError)
            assert "rank 2 said cpu, and rank 1 a GPU; then all must say which, and rank 0 did not" in str(
                outcome.error
            )


def weigh_what_nobody_scales(comm: hetcoll.Communicator) -> None:
    """Refused before the other ranks are told of it: they are in another call."""
    if comm.rank == 0:
        with pytest.raises(BufferTypeError, match=r"weight: wanted arrays on a GPU that can be scaled.*DeviceArray"):
            comm.allreduce(Own(comm, np.ones(4, np.float32)).array, op="avg", weight=1.0)
    comm.barrier()


def test_a_weight_of_an_array_that_cannot_be_scaled() -> None:
    for outcome in outcomes_of("nc", weigh_what_nobody_scales):
        assert outcome.error is None, outcome


def reduce_until_told(comm: hetcoll.Communicator, counts: tuple[int, ...], begun: Path | None = None) -> None:
    own = Own(comm, np.ones(counts[comm.rank], np.float32))
    for _ in range(100_000):
        comm.allreduce(own.array, op="max").wait(60)
        if begun is not None:
            (begun / str(comm.rank)).touch()


def outcomes_of(kinds: str, function: Callable[..., None], *args: Any) -> list[Outcome]:
    """What it came to on new ranks, which are of no use afterwards."""
    ranks = start(kinds)
    try:
        return ranks.outcomes(function, *args, timeout=120)
    finally:
        ranks.kill_all()


@parametrize("kinds", ["nc", "cac"], first=1)
def test_calls_that_differ(kinds: str) -> None:
    for outcome in outcomes_of(kinds, reduce_until_told, (1009,) * (len(kinds) - 1) + (1010,)):
        assert isinstance(outcome.error, CollectiveMismatchError), outcome.trace
        assert "count=1009" in str(outcome.error)
        assert "count=1010" in str(outcome.error)


def send_differently(comm: hetcoll.Communicator) -> None:
    own = Own(comm, np.ones(9 + comm.rank, np.int16))
    (comm.send(own.array, 1) if comm.rank == 0 else comm.recv(own.array, 0)).wait(60)
    comm.barrier()


@parametrize("kinds", ["nc", "ca"], first=1)
def test_messages_that_differ(kinds: str) -> None:
    for outcome in outcomes_of(kinds, send_differently):
        assert isinstance(outcome.error, CollectiveMismatchError), outcome.trace
        assert "rank 0 called send(int16, count=9) to rank 1" in str(outcome.error)
        assert "rank 1 called recv(int16, count=10) from rank 0" in str(outcome.error)


@parametrize("killed", [0, 2], first=1)
def test_a_killed_rank_is_named(killed: int, tmp_path: Path) -> None:
    """A GPU's rank, and one without."""
    ranks = start("nac")
    try:
        ranks.start(reduce_until_told, (300_001,) * 3, tmp_path)
        wait_until(lambda: len(list(tmp_path.iterdir())) == 3, 60)
        ranks.kill(killed)
        outcomes = ranks.finish(120, only=[rank for rank in range(3) if rank != killed])
    finally:
        ranks.kill_all()
    for outcome in outcomes:
        assert isinstance(outcome.error, PeerLostError), outcome.trace
        assert f"rank {killed}" in str(outcome.error)


def abort_early(comm: hetcoll.Communicator, when: str) -> float:
    """Rank 0 aborts while its way to the others is made or proved, and stays."""

    def abort(*args: Any) -> str:
        comm.abort("enough")
        return "it was aborted"

    unittest.mock.patch("hetcoll.gpu.path_probe.SECONDS", 40.0).start()
    if when == "proved":
        unittest.mock.patch("hetcoll.gpu.path_probe.Bench.exchange", abort).start()
    elif comm.rank == 0:
        usual = GpuWatch.__init__
        unittest.mock.patch.object(GpuWatch, "__init__", lambda *args: (usual(*args), abort())[0]).start()
    own, begun = Own(comm, np.ones(1009, np.float32)), time.monotonic()
    with pytest.raises(AbortedError, match="enough"):
        comm.allreduce(own.array)
    took = time.monotonic() - begun
    comm.agree(0, timeout=60)
    return took


@parametrize("when", ["proved", "made"], first=1)
def test_an_abort_ends_the_proof_of_paths(when: str) -> None:
    for outcome in outcomes_of("ac", abort_early, when):
        assert outcome.error is None, outcome.trace
        assert outcome.value < 30


def reduce_without_descriptors(comm: hetcoll.Communicator) -> None:
    if comm.rank == 0:
        held = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (held, held))
    comm.allreduce(Own(comm, np.ones(5)).array if comm.rank else np.ones(5))


def test_a_rank_that_lacks_descriptors_for_the_first_call_is_named() -> None:
    with start("cn", HETCOLL_TIMEOUT="30") as ranks:
        for outcome in ranks.outcomes(reduce_without_descriptors, timeout=60):
            assert type(outcome.error) is CommunicationError, outcome.trace
            assert "rank 0 in " in str(outcome.error)
            assert "Too many open files" in str(outcome.error)
            assert outcome.seconds < 10


def leave_while_others_need_it(comm: hetcoll.Communicator, leaver: int) -> None:
    """In a reduction to rank 1, who does not wait for all ranks itself."""
    own = Own(comm, np.ones(1009, np.float32))
    comm.allreduce(own.array).wait(60)
    if comm.rank == leaver:
        return comm.close()
    for _ in range(100):
        comm.reduce(own.array, root=1).wait(60)
    raise AssertionError("it did not fail")


@parametrize("leaver", [0, 2], first=1)
def test_a_rank_that_has_left_while_it_is_needed(leaver: int) -> None:
    """A GPU's rank, and one without."""
    for outcome in outcomes_of("nacn", leave_while_others_need_it, leaver):
        if outcome.rank != leaver:
            assert isinstance(outcome.error, PeerLostError), outcome.trace
            assert outcome.error.rank == leaver
            assert outcome.seconds < 50


def reduce_unless(comm: hetcoll.Communicator, absent: int) -> None:
    own = Own(comm, np.ones(1009, np.float32))
    comm.allreduce(own.array).wait(60)
    if comm.rank == absent:
        time.sleep(60)
    comm.allreduce(own.array).wait(60)


@parametrize("absent", [0, 1], first=1)
def test_a_rank_that_does_not_come_is_named(absent: int) -> None:
    ranks = start("nc", HETCOLL_TIMEOUT="2")
    try:
        ranks.start(reduce_unless, absent)
        outcome = ranks.finish(60, only=[1 - absent])[0]
    finally:
        ranks.kill_all()
    assert isinstance(outcome.error, CollectiveTimeoutError), outcome.trace
    assert f"rank {absent}" in str(outcome.error)
