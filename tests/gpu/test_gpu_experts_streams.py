"""Tokens of a mixture of experts on GPUs: streams, graphs, different calls, mistakes, and ranks that die."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
from device_checks import Capture
from expert_calls import (
    HIDDEN,
    LINKS,
    MOST,
    PER_RANK,
    SECONDS,
    TOPK,
    Case,
    plain,
    shared,
    shared_few,
)
from gpu_kinds import device_of
from ranks import Ranks
from thorough import parametrize

import hetcoll
from hetcoll import (
    ArgumentError,
    BufferTypeError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
)
from hetcoll.gpu.array import DeviceArray

Start = Callable[..., Ranks]


def other_calls(comm: hetcoll.Communicator, same: bool) -> None:
    """Ranks that combine different layouts, or of which one combines while the others dispatch."""
    device, experts = device_of(comm), shared(comm, "float32", False)
    x, ids = DeviceArray(device, (2, HIDDEN)), DeviceArray.of(device, np.zeros((2, TOPK), np.int32))
    given = [experts.dispatch(x, ids) for _ in range(2)]
    with pytest.raises(CollectiveMismatchError):  # noqa: PT012 (it may be the next call that says so)
        for _ in range(50):
            if same or comm.rank == 0:
                experts.combine(*given[comm.rank % 2])
            else:
                experts.dispatch(x, ids)
            device.synchronize()
            time.sleep(0.1)


@pytest.mark.parametrize("same", [False, True])
@parametrize("kinds", ["nn", "na"], first=1)
def test_ranks_in_different_calls(placed: Start, kinds: str, same: bool) -> None:
    placed(kinds).run(other_calls, same, timeout=SECONDS)


def on_streams(comm: hetcoll.Communicator) -> None:
    """`x`, ids and weights are what the stream's work before the call makes of them; what comes on it later sees the
    result. Two streams by turns."""
    device, experts = device_of(comm), shared(comm, "float32", False)
    ids = np.tile(np.array([0, PER_RANK, -1], np.int32), (MOST, 1))
    streams, n = [device.stream() for _ in range(2)], MOST * HIDDEN
    x, named, weights = (
        DeviceArray(device, (MOST, HIDDEN)),
        DeviceArray(device, (MOST, TOPK), "int32"),
        DeviceArray(device, (MOST, TOPK)),
    )
    for turn in range(4):
        stream = streams[turn % 2]
        later = [
            DeviceArray.of(device, each)
            for each in (
                np.full((MOST, HIDDEN), turn + 1 + comm.rank, np.float32), ids, np.full((MOST, TOPK), 2, np.float32)
            )
        ]  # fmt: skip
        for array, source in zip((x, named, weights), later, strict=True):
            device.copy(array.ptr, source.ptr, array.nbytes, stream)
        received, layout = experts.dispatch(x, named, stream=stream)
        result = experts.combine(received, layout, weights, stream=stream)
        seen = DeviceArray(device, (MOST, HIDDEN))
        device.copy(seen.ptr, result.ptr, 4 * n, stream)
        device.synchronize(stream)
        assert (seen.get() == 4 * (turn + 1 + comm.rank)).all()
    comm.barrier()
    for stream in streams:
        device.destroy_stream(stream)


@parametrize("kinds", ["na", "nn", "aa"], first=1)
def test_the_order_of_streams(placed: Start, kinds: str) -> None:
    placed(kinds, jitter="1:3000").run(on_streams)


def test_the_order_of_streams_between_hosts(whole: Start) -> None:
    whole("na", **LINKS["hosts"]).run(on_streams)


def mistakes(comm: hetcoll.Communicator) -> None:
    device, experts = device_of(comm), shared(comm, "float32", False)
    x, ids = DeviceArray(device, (2, HIDDEN)), DeviceArray.of(device, np.zeros((2, TOPK), np.int32))
    experts.dispatch(x, ids)
    with pytest.raises(BufferTypeError, match=r"x: wanted memory of \w+:\d+, as before, got some of cpu"):
        experts.dispatch(np.ones((2, HIDDEN), np.float32), ids)
    for form in (shared, shared_few):
        with pytest.raises(BufferTypeError, match=r"topk_ids: wanted memory of \w+:\d+, where x is, got some of cpu"):
            form(comm, "float32", False).dispatch(x, ids.get())
    received, layout = experts.dispatch(x, ids)
    with pytest.raises(
        BufferTypeError, match=r"topk_weights: wanted memory of \w+:\d+, where expert_out is, got some of"
    ):
        experts.combine(received, layout, np.ones((2, TOPK), np.float32))
    stream = device.stream()
    device.activate()
    with (
        pytest.raises(ArgumentError, match="stream: a graph is being captured"),
        Capture(device, stream) as captured,
    ):
        experts.dispatch(x, ids, stream=stream)
    captured.close()
    device.destroy_stream(stream)
    experts.dispatch(x, ids)
    comm.barrier()


@parametrize("kinds", ["nan", "nn"], first=1)
def test_mistakes(whole: Start, kinds: str) -> None:
    whole(kinds, **LINKS["late"]).run(mistakes)


def in_graphs(comm: hetcoll.Communicator, turns: int, fp8: bool) -> None:
    """One graph of a dispatch and a combine, replayed with other tokens, ids and weights; calls outside of it between.
    Then one of a dispatch alone, again and again, whose last replay is combined."""
    device, experts = device_of(comm), shared_few(comm, "float32", fp8)
    device.activate()
    stream, size, rank = device.stream(), comm.size, comm.rank
    x, result, weights = (DeviceArray(device, shape) for shape in ((MOST, HIDDEN), (MOST, HIDDEN), (MOST, TOPK)))
    ids = DeviceArray.of(device, np.full((MOST, TOPK), -1, np.int32))
    with (
        pytest.raises(ArgumentError, match="wanted one on which the host may wait at the first dispatch"),
        Capture(device, stream) as captured,
    ):
        experts.dispatch(x, ids, stream=stream)
    comm.barrier()
    experts.dispatch(x, ids, stream=stream)
    assert experts._few is not None
    assert experts._few.direct  # type: ignore[attr-defined]

    def fill(turn: int) -> tuple[Any, Any]:
        random = np.random.default_rng(turn)
        named = random.integers(-1, PER_RANK * size, (size, MOST, TOPK)) if turn % 3 else np.full((size, MOST, TOPK), 1)
        case = Case(named.tolist(), turn, True)
        wanted = plain(case, rank, size, PER_RANK, HIDDEN, np.dtype(np.float32), fp8, alike=True)
        for array, values in ((x, wanted.x), (weights, wanted.weights), (ids, named[rank].astype(np.int32))):
            array.set(values)
        return wanted, case

    with Capture(device, stream) as captured:
        received, layout = experts.dispatch(x, ids, stream=stream)
        experts.combine(received, layout, weights, out=result, stream=stream)
    for turn in range(turns):
        wanted, _ = fill(turn)
        if turn % 4 == 3:
            received, layout = experts.dispatch(x, ids, stream=stream)
            experts.combine(received, layout, weights, out=result, stream=stream)
        else:
            captured.replay(stream)
        device.synchronize(stream)
        assert layout.counts.get().tolist() == wanted.counts, turn
        assert (result.get() == wanted.result).all(), turn
    captured.close()
    with Capture(device, stream) as captured:
        received, layout = experts.dispatch(x, ids, stream=stream)
    wanted, _ = fill(1)
    for _ in range(5):
        captured.replay(stream)
    got = experts.combine(received, layout, weights, stream=stream)
    device.synchronize(stream)
    assert (got.get() == wanted.result).all()
    comm.barrier()
    captured.close()
    device.destroy_stream(stream)


@pytest.mark.parametrize("fp8", [False, True])
@parametrize("kinds", ["na", "nn", "aa", "nnn"], first=1)
def test_few_tokens_in_graphs(whole: Start, kinds: str, fp8: bool) -> None:
    whole(kinds, jitter="3:300").run(in_graphs, 9, fp8, timeout=SECONDS)


def lose(comm: hetcoll.Communicator, form: Any) -> None:
    device, experts = device_of(comm), form(comm, "float32", False)
    x, ids = DeviceArray(device, (2, HIDDEN)), DeviceArray.of(device, np.zeros((2, TOPK), np.int32))

    def dispatch() -> None:
        experts.dispatch(x, ids)
        device.synchronize()

    if comm.rank == 1:
        dispatch()
        os._exit(3)

    def dispatch_until_told() -> None:
        """It may be the first one, if that ended for the other rank alone."""
        while True:
            dispatch()

    with pytest.raises(PeerLostError) as caught:
        dispatch_until_told()
    assert caught.value.rank == 1


@pytest.mark.parametrize(
    ("kinds", "form", "hosts"), [("nn", shared, "aa"), ("na", shared_few, "aa"), ("na", shared_few, "ab")]
)
def test_a_rank_dies_and_no_gpu_waits_for_it(placed: Start, kinds: str, form: Any, hosts: str) -> None:
    ranks = placed(kinds, HETCOLL_HOST_ID=tuple(hosts))
    ranks.start(lose, form)
    found = ranks.finish(SECONDS)
    ranks.kill(1)
    assert found[1].died == 3
    assert found[0].problem() == ""


def late(comm: hetcoll.Communicator) -> str:
    """All meet in a dispatch, and what rank 1 is to put never comes: no call of the other's would end its wait."""
    device, experts = device_of(comm), shared_few(comm, "float32", False)
    x, ids = DeviceArray(device, (2, HIDDEN)), DeviceArray.of(device, np.zeros((2, TOPK), np.int32))
    experts.dispatch(x, ids)
    device.synchronize()
    if comm.rank == 1:
        blocks: Any = experts._few._kernels._blocks  # type: ignore[union-attr]
        with mock.patch.object(blocks, "_put"):
            experts.dispatch(x, ids)
    else:
        experts.dispatch(x, ids, timeout=1)
        device.synchronize()

    def meet_until_told() -> None:
        while True:
            comm.barrier()
            time.sleep(0.02)

    with pytest.raises(CollectiveTimeoutError) as caught:
        meet_until_told()
    device.synchronize()
    return str(caught.value)


@pytest.mark.parametrize("kinds", ["na"])
def test_streams_wait_for_what_is_put_no_longer_than_they_may(placed: Start, kinds: str) -> None:
    for text in placed(kinds, HETCOLL_HOST_ID=("a", "b")).run(late, timeout=SECONDS):
        assert "rank 0: dispatch of experts did not finish in 1 s" in text
