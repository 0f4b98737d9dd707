"""Short collectives as one kernel a rank: every one from every root, of all ways in any order on the same rings."""

from __future__ import annotations

import random
import time
import unittest.mock
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import run_sequence
from device_checks import Capture
from gpu_calls import BY_KERNEL, SOME, any_cases, by_kernel, check, device_of_rank
from gpu_places import PLACES, ranks_on
from on_gpu import InARow
from ranks import Ranks, close_all, kept, wait_until
from reference import Case, expected, make_input
from thorough import parametrize

import hetcoll
from hetcoll.errors import CollectiveMismatchError, PeerLostError
from hetcoll.gpu.array import DeviceArray
from hetcoll.gpu.slots import RING_SLOTS
from hetcoll.plan import one_kernel
from hetcoll.types import ReduceOp, supports
from hetcoll.vendors.devices.kernels.table import AWAITED, ONESHOT_RANKS

Launch = Callable[..., Ranks]
VENDOR, DEVICE = {"n": "cuda", "a": "hip", "p": "posing"}, {"n": "cuda", "a": "hip", "p": "hip"}
EVERYWHERE = ["na", "np", "nnaa"]  # the second one on real GPUs, too
ALIKE = ["nn", "aaa"]  # through the memory of the GPUs; the first one on real GPUs, too


def launch(place: str, kinds: str, **settings: Any) -> Ranks:
    env = {name: value for name, value in settings.items() if name.isupper()}
    ours = {name: value for name, value in settings.items() if not name.isupper()}
    env |= {"HETCOLL_DEVICE": tuple(DEVICE[kind] for kind in kinds)}
    return ranks_on(place, [VENDOR[kind] for kind in kinds], env, timeout=120, **ours)


@pytest.fixture(scope="module", params=PLACES)
def gpus(request: pytest.FixtureRequest) -> Iterator[Launch]:
    """Ranks of these kinds, which stay whole: NVIDIA's GPUs, AMD's, and those that pose as such."""
    with kept(partial(launch, request.param)) as get:
        yield get


@pytest.fixture(params=PLACES)
def lost(request: pytest.FixtureRequest) -> Iterator[Launch]:
    """The same, for one test."""
    made: list[Ranks] = []

    def start(kinds: str, **settings: Any) -> Ranks:
        made.append(launch(request.param, kinds, **settings))
        return made[-1]

    yield start
    close_all(made)


def explained(comm: hetcoll.Communicator) -> list[str]:
    comm.allreduce(DeviceArray(device_of_rank(comm.rank), 9).buffer()).wait(60)
    return [comm.explain(kind, comm.size * 50_003).gpus.partition(" (before ")[0] for kind in BY_KERNEL]


@parametrize("kinds", ["naa", *ALIKE, *EVERYWHERE], first=2)
def test_short_collectives_are_one_kernel(gpus: Launch, kinds: str) -> None:
    ranks = gpus(kinds)
    told = [f"{'exchange' if 'reduce' in kind else 'gather'}, one kernel a rank" for kind in BY_KERNEL]
    assert ranks.run(explained) == [told] * len(kinds)
    check(ranks, by_kernel(len(kinds)))


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(4))
def test_every_type_that_a_root_reduces(gpus: Launch, part: int) -> None:
    pairs = [(dtype, op) for dtype in SOME for op in ReduceOp if supports(dtype, op)][part::4]
    check(
        gpus("na"),
        [
            Case("reduce", dtype.label, (7, 2001)[at % 2], op.label, at % 2, at % 3 == 0, exact=op is not ReduceOp.AVG)
            for at, (dtype, op) in enumerate(pairs)
        ],
    )


# All ways in any order.

LIMITS = ("MOST_MOVED", "MOST_ALONE", "MOST_ONE_SHOT", "MOST_NEAR")


def in_a_row(comm: hetcoll.Communicator, cases: list[Case], often: float) -> None:
    """The host waits for none of them. Every rank is late at other calls. No size is too large for a kernel."""
    device, dice = device_of_rank(comm.rank), random.Random(comm.rank)
    device.activate()
    streams = [device.stream() for _ in range(2)]

    def pause() -> None:
        if dice.random() < often:
            time.sleep(dice.random() * 0.01)

    with unittest.mock.patch.multiple(one_kernel, **dict.fromkeys(LIMITS, 1 << 30)):
        run_sequence(InARow(comm, device, streams, pause), [(case, True) for case in cases])  # type: ignore[arg-type]
    for stream in streams:
        device.destroy_stream(stream)


@parametrize("kinds", ["nn", *EVERYWHERE, "naaaa", "aaa"], first=2)
def test_all_ways_in_a_row(gpus: Launch, kinds: str) -> None:
    """A rank that gives to nobody or takes from nobody counts on, and overruns no slot."""
    ranks = gpus(kinds)
    for seed in range(2):
        ranks.run(in_a_row, any_cases(len(kinds), seed, 40, 32 << 10), 0.2 * seed, timeout=200)
    ranks.run(in_a_row, any_cases(len(kinds), 7, 12, 1 << 20), 0.0, timeout=200)


def await_waiting(comm: hetcoll.Communicator, rank: int) -> None:
    """Until a kernel of `rank` says that it waits."""
    segment = comm._gpus.executor._segment  # type: ignore[union-attr]
    at = 64 * rank + AWAITED
    wait_until(lambda: segment._bytes[at : at + ONESHOT_RANKS].any(), 20)


def one_comes_late(comm: hetcoll.Communicator, kind: str, root: int, late: int) -> None:
    """The others call more than slots hold; `late` begins when one of them stands still, and finds all of it."""
    device = device_of_rank(comm.rank)
    device.activate()
    stream = device.stream()
    comm.allreduce(DeviceArray(device, 9), stream=stream).wait(60)
    comm._gpus.executor._segment.awaited(comm.rank)  # type: ignore[union-attr]
    comm.barrier()
    if comm.rank == late:
        await_waiting(comm, 0 if late else 1)
    cases = [Case(kind, "int32", 1500 + at, "sum", root, seed=at) for at in range(4 * RING_SLOTS)]
    run_sequence(InARow(comm, device, [stream], lambda: None), [(case, True) for case in cases])  # type: ignore[arg-type]
    device.destroy_stream(stream)


@parametrize("kinds", [*EVERYWHERE, "nn"], first=2)
@pytest.mark.parametrize(
    ("kind", "root", "late"), [("broadcast", 0, 1), ("scatter", 1, 0), ("reduce", 0, 0), ("gather", 1, 1)]
)
def test_who_only_gives_waits_for_who_is_late(gpus: Launch, kinds: str, kind: str, root: int, late: int) -> None:
    gpus(kinds).run(one_comes_late, kind, root, late)


class Captured:
    """A call in a graph, its buffers, and what it has left so far."""

    def __init__(self, comm: hetcoll.Communicator, case: Case, stream: int) -> None:
        self.comm, self.case, self.stream, self.device = comm, case, stream, device_of_rank(comm.rank)
        most = case.count * comm.size
        self.source, self.target = (DeviceArray(self.device, most, case.dtype) for _ in range(2))
        self.left: list[tuple[Case, DeviceArray]] = []
        with Capture(self.device, stream) as self.graph:
            self.call()

    def call(self) -> None:
        comm, case = self.comm, self.case
        send, recv = (x.buffer(0, case.count) for x in (self.source, self.target))
        all_sent, all_received = self.source.buffer(), self.target.buffer()
        match case.collective:
            case "broadcast":
                comm.broadcast(recv, case.root, stream=self.stream)
            case "gather":
                comm.gather(send, all_received, case.root, stream=self.stream)
            case "scatter":
                comm.scatter(all_sent, recv, case.root, stream=self.stream)
            case "reduce":
                comm.reduce(send, recv, root=case.root, stream=self.stream)
            case "allgather":
                comm.allgather(send, all_received, stream=self.stream)
            case "allreduce":
                comm.allreduce(send, recv, stream=self.stream)

    def run(self, seed: int, replay: bool) -> None:
        """With new data, in the graph or not; the host does not wait."""
        case = Case(**{**vars(self.case), "seed": seed})
        given = DeviceArray.of(self.device, make_input(case, self.comm.rank, self.comm.size))
        into = self.target if case.collective == "broadcast" else self.source
        if case.collective not in ("broadcast", "scatter") or self.comm.rank == case.root:
            self.device.copy(into.ptr, given.ptr, given.nbytes, self.stream)
        self.graph.replay(self.stream) if replay else self.call()
        result = DeviceArray(self.device, case.count * self.comm.size, case.dtype)
        self.device.copy(result.ptr, self.target.ptr, result.nbytes, self.stream)
        self.left += [(case, result), (case, given)]

    def check(self) -> None:
        for case, result in self.left[::2]:
            inputs = [make_input(case, rank, self.comm.size) for rank in range(self.comm.size)]
            want = expected(case, inputs, self.comm.rank)
            if want is not None:
                np.testing.assert_array_equal(result.get()[: len(want)], want, err_msg=str(case))
        self.graph.close()


def replay_in_any_order(comm: hetcoll.Communicator) -> None:
    """By turns with the same calls outside of graphs."""
    device, dice = device_of_rank(comm.rank), random.Random(5)
    device.activate()
    stream = device.stream()
    comm.allreduce(DeviceArray(device, 9), stream=stream).wait(60)
    kinds = [(kind, root) for kind in ("broadcast", "reduce", "gather", "scatter") for root in range(comm.size)]
    cases = [Case(kind, "float32", dice.choice([5, 1009, 9001]), root=root) for kind, root in kinds]
    cases += [Case("allgather", "float32", 1500), Case("allreduce", "float32", 20_001)]
    made = [Captured(comm, case, stream) for case in cases]
    for seed in range(40):
        dice.choice(made).run(seed, dice.random() < 0.8)
    device.synchronize(stream)
    for each in made:
        each.check()
    device.destroy_stream(stream)


@parametrize("kinds", EVERYWHERE, first=1)
def test_replays_in_another_order(gpus: Launch, kinds: str) -> None:
    gpus(kinds, HETCOLL_ISLANDS="|".join(map(str, range(len(kinds))))).run(replay_in_any_order, timeout=100)


# What goes wrong.


def from_all_roots(comm: hetcoll.Communicator, kind: str, begun: Path) -> None:
    device = device_of_rank(comm.rank)
    one, all_ = DeviceArray(device, 5001), DeviceArray(device, 5001 * comm.size)
    for turn in range(100_000):
        root = turn % comm.size
        match kind:
            case "broadcast":
                work = comm.broadcast(one.buffer(), root)
            case "reduce":
                work = comm.reduce(one.buffer(), all_.buffer(0, 5001), "max", root)
            case "gather":
                work = comm.gather(one.buffer(), all_.buffer(), root)
            case _:
                work = comm.scatter(all_.buffer(), one.buffer(), root)
        work.wait(60)
        (begun / str(comm.rank)).touch()


@parametrize(
    ("kinds", "kind"),
    [
        ("na", "broadcast"),
        ("nn", "gather"),
        ("np", "reduce"),
        ("naa", "gather"),
        ("nnaa", "scatter"),
        ("aa", "scatter"),
    ],
    first=2,
)
def test_a_killed_rank_is_named(lost: Launch, kinds: str, kind: str, tmp_path: Path) -> None:
    ranks, killed = lost(kinds), len(kinds) - 1
    ranks.start(from_all_roots, kind, tmp_path)
    wait_until(lambda: len(list(tmp_path.iterdir())) == len(kinds), 60)
    ranks.kill(killed)
    for outcome in ranks.finish(120, only=range(killed)):
        assert isinstance(outcome.error, PeerLostError), outcome.trace
        assert f"rank {killed}" in str(outcome.error)


def have_roots_of_their_own(comm: hetcoll.Communicator, kind: str) -> None:
    device, part = device_of_rank(comm.rank), comm.split(0)
    assert part is not None
    one, all_ = DeviceArray(device, 9), DeviceArray(device, 9 * comm.size)
    try:
        for root in (0, comm.rank):
            if kind == "broadcast":
                part.broadcast(one.buffer(), root).wait(60)
            else:
                part.gather(one.buffer(), all_.buffer(), root).wait(60)
        part.barrier()
    finally:
        part.close()


@pytest.mark.parametrize("kind", ["broadcast", "gather"])
def test_roots_that_differ_are_named(gpus: Launch, kind: str) -> None:
    """Also where each rank takes itself for the one that gives, so that none waits."""
    for outcome in gpus("nn", HETCOLL_ISLANDS="0|1").outcomes(have_roots_of_their_own, kind, timeout=120):
        assert isinstance(outcome.error, CollectiveMismatchError), outcome.trace
        for root in (0, 1):
            assert f"rank {root} called {kind}(float32, count=9, root={root})" in str(outcome.error)
