"""GPUs of NVIDIA's that pose as AMD's, beside NVIDIA's and ranks without one: HIP's calls made to CUDA's driver, and
NCCL under RCCL's name. On fakes everywhere; on real GPUs it is what those of one vendor can prove of two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from compressed_calls import COLLECTIVES, KINDS, Calls, summed, wanted
from gpu_calls import cases_of, check, every_reduction, exchange, overlap
from gpu_kinds import device_of, run_on_own
from gpu_places import PLACES, ranks_on
from ranks import Ranks, kept
from reference import Case
from thorough import parametrize

import hetcoll
from hetcoll.errors import AbortedError, CollectiveMismatchError
from hetcoll.gpu.array import DeviceArray
from hetcoll.types import Collective, DType, Format

VENDOR: dict[str, str | None] = {"n": "cuda", "p": "posing", "c": None}
DEVICE = {"n": "cuda", "p": "hip", "c": "cpu"}
Posed = Callable[..., Ranks]


@pytest.fixture(scope="module", params=PLACES)
def posed(request: pytest.FixtureRequest) -> Iterator[Posed]:
    """Ranks of these kinds: ``posed("npc")`` has NVIDIA's GPU, one that poses, and none."""

    def start(kinds: str, **settings: Any) -> Ranks:
        env = {"HETCOLL_DEVICE": tuple(DEVICE[kind] for kind in kinds)}
        env |= {name: value for name, value in settings.items() if name.isupper()}
        ours = {"timeout": 120, **{name: value for name, value in settings.items() if not name.isupper()}}
        return ranks_on(request.param, [VENDOR[kind] for kind in kinds], env, **ours)

    with kept(start) as get:
        yield get


@parametrize("kinds", ["np", "nnpp", "npp", "nnnp"], first=1)
def test_every_collective(posed: Posed, kinds: str) -> None:
    check(posed(kinds), list(cases_of(len(kinds), (5, 70_001))))


@pytest.mark.thorough
def test_every_type_with_every_reduction(posed: Posed) -> None:
    check(posed("np"), every_reduction())


@parametrize("kinds", ["npc", "nppc"], first=0)
def test_every_collective_beside_a_cpu(posed: Posed, kinds: str) -> None:
    check(posed(kinds), list(cases_of(len(kinds), (5, 70_001))), run_on_own)


@pytest.mark.thorough
def test_every_collective_between_hosts(posed: Posed) -> None:
    """Ranks of one machine that say they are on two: pinned slots and sockets."""
    check(posed("npc", HETCOLL_HOST_ID=("a", "b", "b")), list(cases_of(3, (5, 70_001))), run_on_own)


@pytest.mark.thorough
def test_messages_in_many_pieces(posed: Posed) -> None:
    count = (17 << 20) // 4 + 3
    check(posed("np"), [Case("allgather", count=count), Case("allreduce", "int64", 300_003, inplace=True)])


def test_messages(posed: Posed) -> None:
    posed("np").run(exchange, timeout=200)


@pytest.mark.thorough
def test_order_on_streams(posed: Posed) -> None:
    posed("np", jitter="3:200").run(overlap, timeout=200)


@parametrize("kinds", ["np", "nc"], first=1)
@parametrize("kind", COLLECTIVES, first=1)
@parametrize(("dtype", "form"), KINDS, first=3)
def test_compressed_calls(posed: Posed, kinds: str, dtype: DType, form: Format, kind: Collective) -> None:
    """With what the calls before lost, bit by bit."""
    for count, op, inplace in ((6, "sum", True), (70_002, "avg", False)):
        said = posed(kinds, HETCOLL_ISLANDS="0|1").run(summed, Calls(kind, count, dtype, form.label, 2, op, inplace))
        assert [results for results, _ in said] == wanted(kind, ((0,), (1,)), count, dtype, form, 2, op)


def end_badly(comm: hetcoll.Communicator, how: str, array: DeviceArray) -> None:
    if how == "abort" and comm.rank == 0:
        comm.abort("no more")
    elif how == "abort":
        comm.allreduce(array.buffer(), op="max").wait(60)
    else:
        comm.allreduce(array.buffer(), op="max" if comm.rank == 0 else "sum").wait(60)
        comm.allreduce(array.buffer()).wait(60)
    comm.barrier()


def fail(comm: hetcoll.Communicator, how: str) -> None:
    """In a part, so that the communicator stays."""
    part = hetcoll.Communicator.split(comm, 0)
    assert part is not None
    array = DeviceArray.of(device_of(comm), np.ones(1_100_001, np.float32))
    part.allreduce(array.buffer(), op="max").wait(60)
    comm.barrier()
    with pytest.raises(CollectiveMismatchError if how == "mismatch" else AbortedError):
        end_badly(part, how, array)
    part.close()
    array.set(np.ones(1_100_001, np.float32))
    comm.allreduce(array.buffer()).wait(60)
    assert (array.get() == comm.size).all()


@parametrize("how", ["mismatch", "abort"], first=1)
def test_failures(posed: Posed, how: str) -> None:
    """What waits on streams of either side is let go, and both are told."""
    posed("np").run(fail, how, timeout=100)
