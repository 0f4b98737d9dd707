"""Collectives that HETCOLL_ALGO takes from the library of an island: by copies between the GPUs' own memory."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import unittest.mock
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import fakes
import numpy as np
import pytest
from device_checks import Capture
from gpu_calls import OTHERS, SOME, Called, cases_of, check, device_of_rank, every_reduction, overlap, run_on_gpu
from gpu_kinds import VENDOR, start
from ranks import Ranks
from reference import Case
from thorough import parametrize

import hetcoll
from hetcoll.errors import ArgumentError
from hetcoll.gpu import path_probe
from hetcoll.gpu.array import DeviceArray
from hetcoll.gpu.near import NearMemory
from hetcoll.gpu.slots import GPU_RINGS, Rings
from hetcoll.plan import one_kernel
from hetcoll.types import Collective, DType

DIRECT = "direct,alltoall:pairwise,alltoallv:pairwise"
MANY = 1_100_001  # float32s: some pieces, in slots that come again


@parametrize("kinds", ["nn", "aa", "nnn"], first=1)
def test_every_collective(whole: Any, kinds: str) -> None:
    size = len(kinds)
    counts = (70_001, 5, 300_000)[:size]
    cases = [*cases_of(size, (0, 1, 70_001)), Case("allgatherv", "int16", counts=counts, seed=1)]
    cases += [Case("reduce_scatterv", op="avg", counts=counts, seed=2), Case("alltoallv", "int32", 190_001, seed=3)]
    kinds_of_large = ("allreduce", "allgather", "reduce_scatter", "alltoall")
    cases += [Case(each, count=MANY, inplace=(i + size) % 2 == 1) for i, each in enumerate(kinds_of_large)]
    check(whole(kinds, HETCOLL_ALGO=DIRECT), cases)


@parametrize(("kinds", "types"), [("nn", SOME), ("nn", OTHERS), ("aa", DType)], first=1, ids=["some", "others", "all"])
def test_every_reduction(whole: Any, kinds: str, types: Iterable[DType]) -> None:
    """Also those that the library does not know."""
    check(whole(kinds, HETCOLL_ALGO=DIRECT), every_reduction(list(types)))


@parametrize("algo", ["ring", "tree", "allreduce:halving_doubling,allgather:doubling"], first=0)
def test_other_algorithms(whole: Any, algo: str) -> None:
    kinds = ("allreduce", "allgather", "broadcast", "reduce", "reduce_scatter")
    check(whole("nnnn", HETCOLL_ALGO=algo), [Case(kind, count=900_001, root=3) for kind in kinds])


@parametrize("kinds", ["nn", "aa"], first=1)
def test_calls_on_several_streams(whole: Any, kinds: str) -> None:
    whole(kinds, HETCOLL_ALGO=DIRECT).run(overlap, timeout=100)


@pytest.mark.fakes
@parametrize(("kinds", "queues"), [("nn", 1), ("aaa", 2)], first=1)
def test_streams_that_are_late_and_share_hardware_queues(kinds: str, queues: int) -> None:
    few: dict[str, Any] = {"CUDA_DEVICE_MAX_CONNECTIONS": str(queues), "GPU_MAX_HW_QUEUES": str(queues)}
    with start(kinds, jitter=f"{queues}:100", HETCOLL_ALGO=DIRECT, **few) as ranks:
        check(ranks, [*cases_of(len(kinds), (70_001,)), Case("allreduce", count=MANY), Case("allgather", count=MANY)])


def launches(comm: hetcoll.Communicator, log: str, cases: list[Case]) -> list[tuple[int, int]]:
    """Kernels and calls of the library in each case."""
    called, found = Called(log), []
    run_on_gpu(comm, [Case("allgather")])  # the first call sets all up
    for case in cases:
        called.since()
        run_on_gpu(comm, [case])
        later = called.since()
        library = [name for name in later if name.startswith("nccl") and "AsyncError" not in name]
        found.append((sum("LaunchKernel" in name for name in later), len(library)))
    return found


@pytest.mark.fakes
@parametrize("kinds", ["aa", "nn"], first=1)
def test_what_moves_takes_no_kernel(kinds: str, tmp_path: Path) -> None:
    """Multiprocessors are for sums alone."""
    moving = ("allgather", "alltoall", "broadcast", "gather", "scatter")
    cases = [Case(kind, count=5, inplace=i) for kind in moving for i in (False, True)]
    cases += [Case(kind, count=300_001, inplace=(i + (kinds == "aa")) % 2 == 1) for i, kind in enumerate(moving)]
    cases = [dataclasses.replace(case, inplace=case.inplace and case.collective != "broadcast") for case in cases]
    log = str(tmp_path / "log")
    env = fakes.environments([VENDOR[kind] for kind in kinds], len(kinds), log=log)
    with Ranks(len(kinds), {**env, "HETCOLL_ALGO": DIRECT}, tidy=False) as ranks:  # the log stays open
        for found in ranks.run(launches, log, [*cases, Case("reduce_scatter", count=300_001)], timeout=100):
            assert found[:-1] == [(0, 0)] * len(cases)
            kernels, library = found[-1]
            assert kernels > 0
            assert library == 0


def told(comm: hetcoll.Communicator, *ops: str) -> tuple[list[str], tuple[str, ...]]:
    run_on_gpu(comm, [Case("allgather", count=1009)])
    told = [comm.explain(op, 1 << 20) for op in ops]
    return [each.gpus for each in told], told[0].paths


@parametrize("kinds", ["nn", "aa"], first=1)
def test_the_library_keeps_what_is_not_named(whole: Any, kinds: str) -> None:
    ranks = whole(kinds, HETCOLL_ALGO="allgather:direct")
    for gpus, paths in ranks.run(told, "allgather", "allreduce", timeout=60):
        assert gpus[0].startswith("direct, in pieces of up to ")
        assert gpus[1].startswith("oneshot, one kernel a rank (before one call of ")
        assert "through slots in the receiving GPU's memory (mapped: one host), tried with bytes" in paths[0]
    check(ranks, [Case("allgather", count=MANY), Case("allreduce", count=70_001)])


@pytest.mark.fakes
@parametrize(("kinds", "call"), [("aa", "hipIpcGetMemHandle"), ("nn", "cuIpcOpenMemHandle")], first=1)
def test_gpus_that_do_not_see_each_others_memory_use_the_hosts(kinds: str, call: str) -> None:
    with start(kinds, fail=f"{call}:1+:801", HETCOLL_ALGO=DIRECT) as ranks:
        for _, paths in ranks.run(told, "allgather", timeout=60):
            assert "through slots in the host's memory that both GPUs have mapped (mapped: one host; not in" in paths[0]
            assert call in paths[0]
        check(ranks, [Case("allreduce", count=300_001), Case("allgather", count=MANY), Case("alltoall", count=70_001)])


@pytest.mark.fakes
@parametrize(("kinds", "call"), [("nn", "cuIpcOpenMemHandle"), ("aaa", "hipIpcGetMemHandle")], first=1)
def test_the_library_serves_gpus_that_do_not_see_each_others_memory(kinds: str, call: str) -> None:
    with start(kinds, fail=f"{call}:1+:801") as ranks:
        for gpus, _ in ranks.run(told, "allreduce", timeout=60):
            assert re.match(
                rf"one call of .* not by one kernel: rank.* cannot open the memory of all .*: {call}", gpus[0]
            )
        check(ranks, list(cases_of(len(kinds), (1009,))))


def refused(comm: hetcoll.Communicator) -> str:
    device = device_of_rank(comm.rank)
    try:
        comm.allreduce(DeviceArray(device, 12).buffer())
    except ArgumentError as error:
        return str(error)
    return ""


@pytest.mark.fakes
def test_what_cannot_be_had_is_said_on_the_line_of_the_call() -> None:
    with start("nn", HETCOLL_ALGO="allreduce:chained") as ranks:
        wanted = "HETCOLL_ALGO asks for allreduce by chained, which 2 ranks with GPUs cannot do: wanted "
        for text in ranks.run(refused, timeout=60):
            assert text.startswith(wanted)


def without_rings(comm: hetcoll.Communicator, blank: bool) -> tuple[str, str]:
    """Ranks but the first see their own rings in the place of others', or some where nothing comes."""

    def at(self: NearMemory) -> tuple[Rings, Rings]:
        mine = self._rings[comm.rank]
        others = DeviceArray.of(device_of_rank(comm.rank), np.zeros(GPU_RINGS.nbytes, np.uint8)) if blank else None
        kept.append(others)
        seen = [mine if others is None or place == comm.rank else others.ptr for place in range(comm.size)]
        return Rings(GPU_RINGS, seen), Rings(GPU_RINGS, seen)

    kept: list[DeviceArray | None] = []
    wrong = unittest.mock.patch.object(NearMemory, "rings", property(at)) if comm.rank else contextlib.nullcontext()
    with wrong, unittest.mock.patch.object(path_probe, "SECONDS", 1.0):
        run_on_gpu(comm, [Case("allreduce", count=9)])
    run_on_gpu(comm, [Case("allreduce", count=count) for count in (1009, 70_001)])
    return comm.explain("allreduce", 4).gpus, comm.explain("allgather", 1 << 16).gpus


@unittest.mock.patch.object(one_kernel, "SMALL_NEAR", 64 << 10)  # both kernels have few elements then
def replay_beside_others(comm: hetcoll.Communicator) -> None:
    """Replays on one stream and calls on another, none of which waits for the other's."""
    device, size, rank = device_of_rank(comm.rank), comm.size, comm.rank
    device.activate()
    streams, counts, turns = [device.stream(), device.stream()], (9, 5003, 30_001), 9
    outside, inside = ([DeviceArray.of(device, np.full(n, 1 + rank, np.float32)) for n in counts] for _ in range(2))
    sums = [DeviceArray(device, n) for n in counts]
    comm.allreduce(outside[0].buffer(), sums[0].buffer(), stream=streams[0])
    with Capture(device, streams[1]) as captured:
        for array in inside:
            comm.allreduce(array.buffer(), op="max", stream=streams[1])
            comm.allreduce(array.buffer(), stream=streams[1])
    for _ in range(turns):
        captured.replay(streams[1])
        for array, result in zip(outside, sums, strict=True):
            comm.allreduce(array.buffer(), result.buffer(), stream=streams[0])
    for stream in streams:
        device.synchronize(stream)
    for array, result in zip(inside, sums, strict=True):
        assert (result.get() == size * (size + 1) / 2).all()
        assert (array.get() == float(size) ** (turns + 1)).all()
    captured.close()
    for stream in streams:
        device.destroy_stream(stream)


@parametrize("kinds", ["nn", "aaa"], first=1)
def test_replays_and_other_calls_at_the_same_time(whole: Any, kinds: str) -> None:
    whole(kinds).run(replay_beside_others, timeout=200)


@pytest.mark.fakes
@parametrize(("kinds", "blank", "why"), [
    ("nnn", False, r"rank 1: from rank 0: \d+ of 20011 bytes came wrong, the first at 0"),
    ("aa", True, r"rank [01]: the kernel of some other rank did not come in 1 s"),
], first=1)  # fmt: skip
def test_rings_that_carry_nothing_or_something_else_are_not_used(kinds: str, blank: bool, why: str) -> None:
    with start(kinds) as ranks:
        for told in ranks.run(without_rings, blank, timeout=100):
            for each in told:
                assert each.startswith("one call of ")
                assert re.search(f"not by one kernel: the GPUs do not reach each other's memory: {why}", each), each


@pytest.mark.parametrize("size", range(2, one_kernel.MOST_RANKS + 1))
def test_each_reader_has_areas_of_its_own_with_room_for_the_longest_call(size: int) -> None:
    bases = [GPU_RINGS.nbytes * rank for rank in range(size)]
    areas = [Rings(GPU_RINGS, bases).areas(rank) for rank in range(size)]
    read = {(rank, peer): areas[rank][0][peer] for rank in range(size) for peer in range(size) if peer != rank}
    for rank in range(size):
        peers = [peer for peer in range(size) if peer != rank]
        assert areas[rank][1] == [read[peer, rank] for peer in peers], "a rank writes where each peer reads"
        words = areas[rank][2]
        places = sorted(read[rank, peer] for peer in peers)
        assert all(b - a >= 16 * words for a, b in itertools.pairwise(places))
        assert bases[rank] + GPU_RINGS.area <= places[0]
        assert places[-1] + 16 * words <= bases[rank] + GPU_RINGS.nbytes
    for each in DType:
        longest = one_kernel.SMALL_NEAR // (size - 1) // each.itemsize * each.itemsize
        most = max(
            n for n in range(longest - 64, longest + 1) if n % each.itemsize == 0 and chosen(n, size) == "oneshot"
        )
        item = max(4, each.itemsize)
        assert -(-most // item) * item // 4 <= areas[0][2]


def chosen(nbytes: int, size: int) -> str | None:
    return one_kernel.choose(Collective.ALLREDUCE, nbytes, size, 1)
