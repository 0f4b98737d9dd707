"""Ring, tree and halving among islands, on fakes of both vendors and on real GPUs."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from gpu_calls import check, device_of_rank
from gpu_kinds import start_gpus
from gpu_places import PLACES, need_gpus, ranks_on
from ranks import Job, Ranks
from reference import Case
from star import star
from thorough import parametrize

import hetcoll
from hetcoll.errors import ArgumentError
from hetcoll.gpu.array import DeviceArray
from hetcoll.plan.algorithms import register
from hetcoll.types import Collective

KINDS = ("allreduce", "allgather", "reduce_scatter", "broadcast", "reduce")


def cases(size: int, count: int) -> list[Case]:
    """In place and out of place, sums and averages, every rank a root."""
    found = []
    for turn, (kind, inplace) in enumerate(itertools.product(KINDS, (False, True))):
        if not (kind == "broadcast" and inplace):
            op = ("sum", "avg")[turn % 2] if "reduce" in kind else "sum"
            found.append(Case(kind, ("float32", "int32")[turn % 2], count, op, turn % size, inplace, seed=turn))
    return found


@pytest.mark.fakes
@parametrize(
    ("gpus", "islands", "algo"),
    [
        ("nnaa", "0,1|2,3", "ring"),
        ("nnna", "0,1,2|3", "tree"),
        ("nana", "0,2|1|3", "ring"),
        ("nana", "0,2|1|3", "direct"),
        ("nnaa", "0|1|2|3", "tree"),
    ],
    first=1,
)
def test_by_name(gpus: str, islands: str, algo: str) -> None:
    with start_gpus(gpus, HETCOLL_ISLANDS=islands, HETCOLL_ALGO=algo) as ranks:
        check(ranks, [*cases(4, 1009), Case("allreduce", count=1_300_001), Case("broadcast", count=900_001, root=3)])


@pytest.mark.fakes
@pytest.mark.thorough
def test_halving_where_islands_are_a_power_of_two() -> None:
    algo = "allreduce:halving_doubling,reduce_scatter:halving,allgather:doubling"
    with start_gpus("nnaa", HETCOLL_ISLANDS="0,1|2,3", HETCOLL_ALGO=algo) as ranks:
        check(ranks, cases(4, 70_001))


@pytest.mark.fakes
@pytest.mark.thorough
def test_between_hosts_of_unequal_islands() -> None:
    """Three and one on two hosts, by a ring: through sockets, with parts of unequal size."""
    counts = (70_001, 0, 3, 5)
    more = [Case("allgatherv", "int16", counts=counts), Case("reduce_scatterv", op="avg", counts=counts)]
    with start_gpus("nnna", HETCOLL_HOST_ID=("a", "a", "b", "b"), HETCOLL_ALGO="ring") as ranks:
        check(ranks, [*cases(4, 1009), *more])


@pytest.mark.fakes
@parametrize("queues", ["1", "2"], first=0)
def test_streams_that_are_late_and_share_hardware_queues(queues: str) -> None:
    few = {"CUDA_DEVICE_MAX_CONNECTIONS": queues, "GPU_MAX_HW_QUEUES": queues}
    with start_gpus("nnaa", jitter=f"{queues}:100", HETCOLL_ISLANDS="0|1|2,3", HETCOLL_ALGO="ring", **few) as ranks:
        check(ranks, [*cases(4, 1009), Case("allreduce", count=1_300_001)])


def reduce_and_explain(comm: hetcoll.Communicator, nbytes: int) -> str:
    device = device_of_rank(comm.rank)
    array = DeviceArray.of(device, np.full(300_001, comm.rank + 1, np.float32))
    comm.allreduce(array.buffer()).wait(60)
    assert (array.get() == sum(range(1, comm.size + 1))).all()
    return comm.explain("allreduce", nbytes).gpus


def register_and_reduce(job: Job) -> str:
    register(Collective.ALLREDUCE, "star of islands")(star)
    return reduce_and_explain(job.join(), 1 << 20)


@pytest.mark.fakes
def test_what_a_user_writes() -> None:
    asked = {"HETCOLL_ISLANDS": "0,1|2|3", "HETCOLL_ALGO": "allreduce:star of islands"}
    with start_gpus("nnaa", join=False, **asked) as ranks:
        for told in ranks.run(register_and_reduce, timeout=100):
            assert told.startswith("star of islands among islands 0,1|2|3, their libraries inside and messages between")


@pytest.mark.fakes
@pytest.mark.thorough
def test_costs_choose() -> None:
    """Four islands on two hosts: a ring, where each host's card carries the bytes of one."""
    hosts = ("a", "a", "b", "b")
    with start_gpus("nana", HETCOLL_ISLANDS="0|1|2|3", HETCOLL_HOST_ID=hosts) as ranks:
        assert {told.split(",")[0] for told in ranks.run(reduce_and_explain, 1 << 28, timeout=100)} == {"ring"}


def refused(comm: hetcoll.Communicator, op: str) -> str:
    array = DeviceArray(device_of_rank(comm.rank), 12)
    try:
        getattr(comm, op)(array.buffer(), DeviceArray(device_of_rank(comm.rank), 12 * comm.size).buffer())
    except ArgumentError as error:
        return str(error)
    return ""


@pytest.mark.fakes
@pytest.mark.parametrize(
    ("islands", "algo", "op", "why"),
    [
        ("0|1|2,3", "allgather:doubling", "allgather", "which 3 islands of ranks with GPUs cannot do: wanted direct"),
        ("0,1|2,3", "gather:direct", "gather", "on these GPUs islands, over 0,1|2,3, runs it"),
    ],
)
def test_what_cannot_be_had_is_said_on_the_line_of_the_call(islands: str, algo: str, op: str, why: str) -> None:
    with start_gpus("nnaa", HETCOLL_ISLANDS=islands, HETCOLL_ALGO=algo) as ranks:
        for told in ranks.run(refused, op, timeout=60):
            assert f"HETCOLL_ALGO asks for {op} by" in told
            assert why in told


# On real GPUs.


@pytest.mark.cuda
@parametrize("algo", ["ring", "tree"], first=1)
def test_two_islands_of_one(gpus: Any, algo: str) -> None:
    check(gpus(2, env={"HETCOLL_ALGO": algo}), [*cases(2, 70_001), Case("allreduce", count=3_000_001)])


@pytest.mark.cuda
@pytest.mark.parametrize("algo", ["ring", "tree", "allreduce:halving_doubling,reduce_scatter:halving"])
@pytest.mark.parametrize("islands", ["0|1|2|3", "0,1|2,3", "0,1|2|3"])
def test_four_ranks_on_two_gpus(islands: str, algo: str) -> None:
    """Two share each GPU, in different islands."""
    need_gpus(2)
    if ":" in algo and islands.count("|") == 2:
        pytest.skip("halving wants a power of two")
    with Ranks(4, {"HETCOLL_ISLANDS": islands, "HETCOLL_ALGO": algo}, tidy=False) as ranks:
        check(ranks, [*cases(4, 70_001), Case("allreduce", count=3_000_001)])


@pytest.mark.parametrize("place", PLACES)
@parametrize("islands", ["0,1", "0|1"], first=1)
def test_what_a_user_writes_on_two_gpus(place: str, islands: str) -> None:
    """In the place of the library that serves both, and between two islands."""
    asked = {"HETCOLL_ISLANDS": islands, "HETCOLL_ALGO": "allreduce:star of islands"}
    with ranks_on(place, ["cuda"] * 2, asked, join=False) as ranks:
        for told in ranks.run(register_and_reduce, timeout=100):
            assert told.startswith("star of islands, in pieces")
