"""HETCOLL_CHECK of calls that a graph captured: every replay is checked, on the GPUs."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import unittest.mock
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import run_case
from device_checks import Capture
from gpu_calls import COLLECTIVES, device_of_rank
from gpu_kinds import start
from gpu_places import PLACES, STAND_INS, ranks_on
from in_graph import InGraph
from ranks import Ranks, close_all, kept, wait_until
from reference import Case
from thorough import parametrize

import hetcoll
from hetcoll.calls import Call
from hetcoll.calls.messages import SendRecv
from hetcoll.errors import CommunicationError
from hetcoll.gpu.array import DeviceArray
from hetcoll.types import DType

COUNT = 20_011  # float32s: some blocks fold them


def begin(place: str, kinds: str, islands: str | None = None) -> Ranks:
    """Ranks of these kinds (see `start`) with HETCOLL_CHECK, every one an island unless said otherwise. Real ones are
    NVIDIA's, and share GPUs where these are few."""
    asked = "|".join(map(str, range(len(kinds)))) if islands is None else islands
    env = {"HETCOLL_CHECK": "1", **({"HETCOLL_ISLANDS": asked} if asked else {})}
    if place == STAND_INS:
        return start(kinds, **env)
    return ranks_on(place, ["cuda"] * len(kinds), {"HETCOLL_DEVICE": "cuda", **env})


@pytest.fixture(scope="module", params=PLACES)
def checked(request: pytest.FixtureRequest) -> Iterator[Callable[..., Ranks]]:
    """`begin`, for ranks that stay whole."""
    with kept(partial(begin, request.param)) as get:
        yield get


@contextlib.contextmanager
def logged() -> Iterator[io.StringIO]:
    """What this rank logs in the block."""
    said, log = io.StringIO(), logging.getLogger("hetcoll")
    log.addHandler(handler := logging.StreamHandler(said))
    try:
        yield said
    finally:
        log.removeHandler(handler)


def run_checked(comm: hetcoll.Communicator, cases: list[Case]) -> str:
    """Each case in a graph, whose results are right in all replays. What is said meanwhile."""
    device = device_of_rank(comm.rank)
    device.activate()
    stream = device.stream()
    comm.allreduce(DeviceArray.of(device, np.ones(1, np.float32)).buffer())
    before = len(replays_of(comm))
    with logged() as said:
        for case in cases:
            run_case(InGraph(comm, device, stream), case)  # type: ignore[arg-type]
        comm.barrier()
    replays = replays_of(comm)[before:]
    assert set(replays) == {2}
    assert len(replays) >= len(cases)
    device.destroy_stream(stream)
    return said.getvalue()


def replays_of(comm: hetcoll.Communicator) -> list[int]:
    """How many of each captured call were checked."""
    return [each.found.replays for each in comm._gpus.executor.replays._captured]  # type: ignore[union-attr]


def run_messages(comm: hetcoll.Communicator) -> str:
    """Of all kinds, also such as are a group on one rank and not on the other."""
    device, rank = device_of_rank(comm.rank), comm.rank
    device.activate()
    stream, other = device.stream(), 1 - rank
    mine, got, own = (DeviceArray(device, COUNT) for _ in range(3))
    with logged() as said:
        with Capture(device, stream) as captured:
            comm.sendrecv(mine.buffer(), other, got.buffer(), other, stream=stream)
            comm.sendrecv(got.buffer(), rank, own.buffer(), rank, stream=stream)
            if rank == 0:
                with comm.group():
                    comm.send(replace(own.buffer(0, 9), stream=stream), 1)
                    comm.send(replace(mine.buffer(0, 9000), stream=stream), 1)
            else:
                comm.recv(got.buffer(0, 9), 0, stream=stream)
                comm.recv(got.buffer(9, 9000), 0, stream=stream, async_op=True).wait_stream(stream)
        for step in range(3):
            mine.set(np.arange(COUNT, dtype=np.float32) * (rank + 1) + step)
            captured.replay(stream)
            device.synchronize(stream)
            assert (own.get() == np.arange(COUNT) * (other + 1) + step).all()
            want = np.concatenate([np.arange(9) * 2 + step, np.arange(9000) + step])
            assert rank == 0 or (got.get()[:9009] == want).all()
        comm.barrier()
    assert replays_of(comm)[-6:] == [3] * 6
    captured.close()
    device.destroy_stream(stream)
    return said.getvalue()


def test_messages_that_are_right_are_passed_without_a_word(checked: Any) -> None:
    assert checked("na").run(run_messages, timeout=60) == ["", ""]


@parametrize(("kinds", "islands"), [("na", None), ("nnn", "0,1|2"), ("nn", ""), ("n", None)], first=1)
def test_what_is_right_is_passed_without_a_word(checked: Any, kinds: str, islands: str | None) -> None:
    size = len(kinds)
    cases = [Case(kind, "float32", 5, "avg", root=size - 1, seed=1) for kind in COLLECTIVES]
    cases += [Case(kind, "float32", COUNT, "min", seed=2, inplace=True) for kind in ("allreduce", "reduce_scatter")]
    cases += [Case("alltoallv", "float32", 1001, seed=3), Case("allgatherv", "float32", counts=(9, 0, 20_001)[:size])]
    assert checked(kinds, islands).run(run_checked, cases, timeout=200) == [""] * size


def run_digested(comm: hetcoll.Communicator) -> list[str]:
    device = device_of_rank(comm.rank)
    device.activate()
    stream, array = device.stream(), DeviceArray.of(device, np.ones(9, np.float32))
    with logged() as said, Capture(device, stream) as captured:
        for _ in range(2):
            comm.allreduce(array.buffer(), stream=stream)
    captured.close()
    device.destroy_stream(stream)
    return said.getvalue().splitlines()


@pytest.mark.fakes
def test_a_digest_says_once_that_it_has_no_replays(tmp_path: Path) -> None:
    with start("n", HETCOLL_DIGEST=str(tmp_path), HETCOLL_ISLANDS="0") as ranks:
        ((line,),) = ranks.run(run_digested, timeout=60)
    assert line.startswith("allreduce(float32, count=9, op=sum) is captured by a graph: HETCOLL_DIGEST has no replays")


class Spoiled:
    """A call that is captured, whose result on rank 0 each replay overwrites with `tail`, an array on the GPU."""

    def __init__(self, comm: hetcoll.Communicator, call: Callable[..., object], result: DeviceArray, tail: Any) -> None:
        self.comm, self.device, self.stream = comm, result.device, result.device.stream()
        self.tail = DeviceArray.of(self.device, tail)
        with contextlib.ExitStack() as undo:
            for name in ("start", "exchange"):
                undo.enter_context(unittest.mock.patch.object(comm._core, name, self._before(name, result)))
            with Capture(self.device, self.stream) as self.captured:
                call(self.stream)

    def _before(self, name: str, result: DeviceArray) -> Callable[..., hetcoll.Work]:
        begin = getattr(self.comm._core, name)

        def start(each: Call | SendRecv, *words: Any, **more: Any) -> hetcoll.Work:
            work: hetcoll.Work = begin(each, *words, **more)
            buffer = each.first if isinstance(each, SendRecv) else each.send or each.recv
            theirs = buffer is None or buffer.device == "cpu" or buffer.dtype is DType.UINT64  # what the ranks tell
            if self.comm.rank == 0 and not theirs:
                at = result.ptr + result.nbytes - self.tail.nbytes
                self.device.copy(at, self.tail.ptr, self.tail.nbytes, self.stream)
            return work

        return start

    def run(self, wrong: Any, said: bool) -> str:
        """Two replays that go well, and one that ends in what is `wrong`. What the communicator fails with. `said`: it
        does so without a call."""
        comm = self.comm
        for turn in range(3):
            comm.barrier()
            if turn == 2:
                self.tail.set(wrong)
            self.captured.replay(self.stream)
            self.device.synchronize(self.stream)
        if said:
            wait_until(lambda: comm._engine.failed, 20)

        def fails() -> str:
            try:
                comm.barrier()
            except CommunicationError as error:
                return str(error)
            return ""

        found: str = wait_until(fails, 20)
        self.captured.close()
        self.device.destroy_stream(self.stream)
        return found


def spoil(comm: hetcoll.Communicator, what: str, dtype: str, right: float, wrong: float, said: bool) -> str:
    """A call on ones that goes well twice, and then not. Who says so is its next call, or the GPU's watchdog."""
    device, size = device_of_rank(comm.rank), comm.size
    device.activate()
    reduces, many = what in ("allreduce", "reduce", "reduce_scatter"), what in ("reduce_scatter", "scatter", "alltoall")
    n = COUNT * size
    ones = DeviceArray.of(device, np.ones(n if many else COUNT).astype(dtype))
    made = DeviceArray(device, n if what in ("allgather", "gather", "alltoall") else COUNT, dtype)
    comm.barrier()
    args: list[Any] = [ones.buffer()] if what == "broadcast" else [ones.buffer(), made.buffer()]
    options: dict[str, Any] = {"op": "avg" if dtype == "int32" else "sum"} if reduces else {}
    if what in ("broadcast", "scatter"):
        options["root"] = 1
    method = getattr(comm, what)
    tail = np.full(1, right).astype(dtype)
    call = Spoiled(comm, lambda stream: method(*args, stream=stream, **options), args[-1].owner, tail)
    return call.run(np.full(1, wrong).astype(dtype), said)


WRONG = [
    ("reduce_scatter", "int32", 1, 2e9, "avg of every 16th 16 bytes from byte 160 on is"),
    ("allreduce", "bfloat16", 2, 3, ""),
    ("allgather", "uint8", 1, 2, "what rank 1 gave came changed"),
    ("broadcast", "float64", 1, 1.5, "what rank 1 gave came changed"),
    ("scatter", "int16", 1, 5, "what rank 1 gave came changed"),
    ("alltoall", "bool", 1, 0, "what rank 1 gave came changed"),
    ("gather", "complex64", 1, 1j, "what rank 1 gave came changed"),
    ("reduce", "float16", 2, 60000, "sum of every 16th"),
]


@pytest.fixture(params=PLACES)
def fresh(request: pytest.FixtureRequest) -> Iterator[Callable[..., Ranks]]:
    """The same, for one test."""
    made: list[Ranks] = []

    def get(kinds: str) -> Ranks:
        made.append(begin(request.param, kinds))
        return made[-1]

    yield get
    close_all(made)


@parametrize(("what", "dtype", "right", "wrong", "how"), WRONG, first=3)
def test_a_replay_that_is_wrong_is_found_on_every_rank(
    fresh: Any, what: str, dtype: str, right: float, wrong: float, how: str
) -> None:
    said = what in ("broadcast", "allgather")
    for text in fresh("nn").run(spoil, what, dtype, right, wrong, said, timeout=60):
        assert f"HETCOLL_CHECK: the result of {what}({dtype}, " in text, text
        if how:
            assert f"on rank 0 is wrong: {how}" in text, text
        else:  # no sum would show it
            assert re.search("is not the same everywhere: rank [01] and rank [01] hold different ones", text), text
        assert ", in replay 3 of the graph that captured it at " in text
        assert "test_gpu_checked_replays.py:" in text


def spoil_message(comm: hetcoll.Communicator) -> str:
    device, ends = device_of_rank(comm.rank), (comm.recv, comm.send)
    device.activate()
    array = DeviceArray.of(device, np.ones(9, np.int16))

    def move(stream: int) -> None:
        ends[comm.rank](array.buffer(), 1 - comm.rank, stream=stream)

    return Spoiled(comm, move, array, np.ones(1, np.int16)).run(np.zeros(1, np.int16), said=True)


def test_a_message_that_is_wrong_in_a_replay_is_found_on_both_ranks(fresh: Any) -> None:
    for text in fresh("na").run(spoil_message, timeout=60):
        assert "HETCOLL_CHECK: rank 0 received something else than rank 1 sent in replay 3 of the graph" in text, text
        assert text.endswith(": recv(int16, count=9) from rank 1"), text


def not_finite(comm: hetcoll.Communicator) -> str:
    """Rank 1's input is not finite in some replays. What is logged, and the last result."""
    device = device_of_rank(comm.rank)
    device.activate()
    stream, array = device.stream(), DeviceArray.of(device, np.ones(COUNT, np.float32))
    with logged() as said:
        with Capture(device, stream) as captured:
            comm.allreduce(array.buffer(), op="avg", stream=stream)
            comm.sendrecv(array.buffer(0, 1), 1 - comm.rank, array.buffer(1, 1), 1 - comm.rank, stream=stream)
        for turn in range(4):
            values = np.ones(COUNT, np.float32)
            if turn in (1, 2) and comm.rank == 1:
                values[[-2, -1]] = np.inf, np.nan
            values[0] = np.inf if turn == 3 else 1
            array.set(values)
            captured.replay(stream)
            device.synchronize(stream)
        comm.barrier()
    assert array.get()[-1] == 1.0
    captured.close()
    return said.getvalue()


def test_what_is_not_finite_is_logged_once(checked: Any) -> None:
    calls = [f"allreduce(float32, count={COUNT}, op=avg)", "send(float32, count=1) to rank "]
    said = f": 1 of {COUNT} elements, the first at 0", ": 1 of 1 elements, the first at 0"
    for rank, text in enumerate(checked("na").run(not_finite, timeout=60)):
        first, second = text.splitlines()
        assert f"the input of {calls[0]} on rank {rank} is not finite in replay {4 - 2 * rank} of the graph" in first
        assert first.endswith(f": 2 of {COUNT} elements, the first at {COUNT - 2}" if rank else said[0])
        assert f"the input of {calls[1]}{1 - rank} on rank {rank} is not finite in replay 4 of the graph" in second
        assert second.endswith(said[1])
