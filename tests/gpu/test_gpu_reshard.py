"""Arrays on fake GPUs of both vendors and on a CPU that change their layout; NumPy can view the fakes' memory."""

from __future__ import annotations

from functools import partial

import ml_dtypes
import numpy as np
import pytest
from blocks import in_batches_of, values
from gpu_kinds import start
from thorough import parametrize
from viewed_gpu import fetched, viewed

import hetcoll
from hetcoll.errors import ArgumentError
from hetcoll.gpu.array import DeviceArray
from hetcoll.plan.layout import Layout
from hetcoll.runtime.reshard import Item, reshard
from hetcoll.vendors.devices import cuda

pytestmark = pytest.mark.fakes


def move(comm: hetcoll.Communicator, pairs: list[tuple[Layout, Layout]], dtypes: list[str], kept: bool) -> None:
    """All at once, twice; `kept`: into arrays that are given."""
    rank, items, wanted = comm.rank, [], []
    for number, ((source, target), dtype) in enumerate(zip(pairs, dtypes, strict=True)):
        nothing = np.empty(0, dtype)
        right = values(number, target, dtype).get(rank, nothing)
        out = viewed(comm, np.zeros_like(right, order="C")) if kept else None
        items.append(Item(viewed(comm, values(number, source, dtype).get(rank, nothing)), source, target, out))
        wanted.append(right)
    for _ in range(2):
        for found, right in zip(reshard(comm._core, lambda: items), wanted, strict=True):
            np.testing.assert_array_equal(fetched(found), right)


def move_all(comm: hetcoll.Communicator) -> None:
    last, others = comm.size - 1, tuple(range(comm.size - 1))
    few = (len(others),)
    shape = (700, 500)
    ends = Layout(shape, (0,), (), ()), Layout(shape, (last,), (), ())
    move(comm, [ends], ["float32"], False)  # the first call on GPUs, which all ranks make, whoever has a part in it
    pairs = [
        (Layout(shape, others, few, (0,)), Layout(shape, (last,), (), ())),  # as it lies
        (Layout(shape, others, few, (1,)), Layout(shape, (last, *others), (comm.size,), (0,))),  # packed
        (Layout(shape, (last,), (), ()), Layout(shape, others, few, (None,))),  # passed on
        (Layout((9, 5), others, few, (None,)), Layout((9, 5), (last, 0), (2,), (1,))),
        (Layout((), others, few, (None,)), Layout((), (last,), (), ())),
    ]
    for kept in (False, True):
        move(comm, pairs, ["float32", "int16", "float32", "float32", "int16"], kept)
    with in_batches_of(500_000):
        move(comm, pairs, ["float32", "int16", "float32", "float32", "int16"], False)


@parametrize("kinds", ["nca", "na", "nnaa"], first=1)
def test_between_gpus_and_a_cpu(kinds: str) -> None:
    ranks = start(kinds)
    try:
        ranks.run(move_all, timeout=90)
    finally:
        (ranks.kill_all if ranks.broken else ranks.close)()


def move_from_cpus_and_gpus(comm: hetcoll.Communicator) -> str:
    """Rank 1 has a GPU, but gives host memory."""
    layout = Layout((2,), (0, 1), (2,), (0,))
    mine = np.zeros(1, np.float32)
    on_gpu = DeviceArray.of(cuda.devices()[0], mine)
    try:
        reshard(comm._core, lambda: [Item(mine if comm.rank else on_gpu, layout, layout)])
    except ArgumentError as error:
        return str(error)
    return ""


def test_host_memory_on_a_rank_with_a_gpu() -> None:
    ranks = start("nn", HETCOLL_DEVICE="auto")
    try:
        wanted = "reshard: wanted arrays on GPUs, as on rank 0, on all ranks without HETCOLL_DEVICE=cpu"
        assert ranks.run(move_from_cpus_and_gpus) == [wanted] * 2
    finally:
        (ranks.kill_all if ranks.broken else ranks.close)()


def move_float8(comm: hetcoll.Communicator, kinds: str) -> None:
    """AMD's GPUs have the older kind, and the same values."""
    kind = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz][kinds[comm.rank] == "a"]
    every = tuple(range(comm.size))
    for rows in (10, 1500):
        source, target = (Layout((rows, 700), every, (comm.size,), (dim,)) for dim in (0, 1))
        mine, right = ((values(0, each)[comm.rank] % 16).astype(np.float32).astype(kind) for each in (source, target))
        items = [Item(viewed(comm, mine), source, target)]
        found = reshard(comm._core, partial(list, items))[0]
        np.testing.assert_array_equal(fetched(found), right)


@pytest.mark.parametrize("kinds", ["nnaa", "nac"])
@pytest.mark.thorough
def test_8_bit_floats_are_converted(kinds: str) -> None:
    ranks = start(kinds)
    try:
        ranks.run(move_float8, kinds, timeout=90)
    finally:
        (ranks.kill_all if ranks.broken else ranks.close)()
