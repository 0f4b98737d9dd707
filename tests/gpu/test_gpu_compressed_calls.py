"""Whole calls over compressed edges between GPUs, on fakes of both vendors, and between those and processors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from compressed_calls import COLLECTIVES, KINDS, Calls, make, summed, wanted
from gpu_calls import device_of_rank
from gpu_kinds import start
from ranks import Ranks, kept
from thorough import parametrize

import hetcoll
from hetcoll.calls.buffers import Buffer
from hetcoll.errors import ArgumentError, CollectiveMismatchError
from hetcoll.plan.algorithms import Hosts
from hetcoll.plan.topology import spell_islands
from hetcoll.types import Collective, DType, Format

pytestmark = pytest.mark.fakes


def calls_of(dtype: DType) -> list[tuple[int, str, bool]]:
    """Counts, operations, whether in place. In many pieces the type makes no difference: one type's calls go so."""
    calls = [(6, "sum", True), (70_002, "avg", False)]
    return [*calls, (900_002, "sum", True)] if dtype is DType.FLOAT32 else calls


@parametrize("kind", COLLECTIVES, first=1)
@parametrize(("dtype", "form"), KINDS, first=1)
def test_two_gpus_of_two_vendors(mixed: Any, dtype: DType, form: Format, kind: Collective) -> None:
    """Several calls, with what they lost; the sum has the bits that NumPy's formats give."""
    ranks: Ranks = mixed("na", HETCOLL_ISLANDS="0|1")
    for count, op, inplace in calls_of(dtype):
        said = ranks.run(summed, Calls(kind, count, dtype, form.label, 3, op, inplace))
        want = wanted(kind, ((0,), (1,)), count, dtype, form, 3, op)
        assert [results for results, _ in said] == want, (count, op)


@parametrize("kind", COLLECTIVES, first=1)
@parametrize("form", [Format.INT8, Format.BF16], first=1)
def test_islands_of_two(mixed: Any, form: Format, kind: Collective) -> None:
    """Inside, the vendors' libraries add up what is not compressed."""
    ranks: Ranks = mixed("nnaa", HETCOLL_HOST_ID=("a", "a", "b", "b"))
    before = ranks.run(summed, Calls(kind, 132, DType.FLOAT32, form.label, 1, "sum", True))[0][1]
    said = ranks.run(summed, Calls(kind, 300_004, DType.FLOAT32, form.label, 2, "sum", False))
    want = wanted(kind, ((0, 1), (2, 3)), 300_004, DType.FLOAT32, form, 2, "sum")
    assert [results for results, _ in said] == want
    counters = said[0][1]
    sent, travelled = (counters[key] - before[key] for key in ("compressed_before", "compressed_after"))
    each = 300_004 / (2 if kind is Collective.ALLREDUCE else 4)  # elements that leave a rank
    assert sent == pytest.approx(2 * 4 * each, rel=1e-2)  # of two calls
    assert travelled == pytest.approx(form.factor(4) * sent, rel=2e-2)
    assert counters["residual_bytes"] > 0


@parametrize(("gpus", "islands"), [
    ("naa", ((0,), (1,), (2,))), ("nnaa", ((0, 1), (2,), (3,))), ("nna", ((0, 1), (2,))),
], first=0)  # fmt: skip
def test_reduce_scatters_of_other_islands(mixed: Any, gpus: str, islands: Hosts) -> None:
    """What several islands send, a share in pieces where its owner's island is a different size, averages."""
    ranks: Ranks = mixed(gpus, HETCOLL_ISLANDS=spell_islands(islands))
    for count, op, inplace in ((24, "sum", False), (len(gpus) * 50_001, "avg", True)):
        said = ranks.run(summed, Calls(Collective.REDUCE_SCATTER, count, DType.FLOAT32, "int8", 2, op, inplace))
        want = wanted(Collective.REDUCE_SCATTER, islands, count, DType.FLOAT32, Format.INT8, 2, op)
        assert [results for results, _ in said] == want, (count, op)


@parametrize(("gpus", "settings", "lossy"), [
    ("naa", {"HETCOLL_ISLANDS": "0|1|2"}, True),
    ("nnaa", {"HETCOLL_ISLANDS": "0,1|2|3"}, True),
    ("naaa", {"HETCOLL_ISLANDS": "0|1,2,3"}, True),
    # Islands of several hosts, whose members exchange with one of their own host or of another:
    ("nana", {"HETCOLL_HOST_ID": ("a", "a", "b", "c")}, True),
    ("nana", {"HETCOLL_HOST_ID": ("a", "a", "b", "b")}, False),
], first=1)  # fmt: skip
@parametrize("kind", COLLECTIVES, first=1)
def test_other_islands(mixed: Any, gpus: str, settings: dict[str, Any], lossy: bool, kind: Collective) -> None:
    """Roundings take something where an edge is slow, and no more; all ranks hold the same bits of an all-reduce."""
    size, count = len(gpus), 70_008
    said = mixed(gpus, **settings).run(summed, Calls(kind, count, DType.FLOAT32, "int8", 2, "sum", True))
    for turn in range(2):
        total = sum(make(rank, turn, count, DType.FLOAT32).astype(np.float64) for rank in range(size))
        parts = [total] * size if kind is Collective.ALLREDUCE else np.split(total, size)
        errors = [
            np.abs(np.frombuffer(results[turn], np.float32) - part).max()
            for (results, _), part in zip(said, parts, strict=True)
        ]
        assert max(errors) < (2 * size * 8 / 127 if lossy else 1e-5)
        assert (max(errors) > 1e-4) == lossy
    assert kind is Collective.REDUCE_SCATTER or all(results == said[0][0] for results, _ in said)


@pytest.fixture(scope="module")
def with_cpus() -> Iterator[Any]:
    """Ranks of kinds such as "nac", of which the last has no GPU."""
    with kept(start) as get:
        yield get


@parametrize("kind", COLLECTIVES, first=1)
@parametrize(("dtype", "form", "settings"), [
    (DType.FLOAT32, Format.INT8, {"HETCOLL_HOST_ID": ("a", "b")}),
    *((dtype, form, {"HETCOLL_ISLANDS": "0|1"}) for dtype, form in KINDS),
], first=1)  # fmt: skip
def test_a_gpu_and_a_rank_without_one(
    with_cpus: Any, dtype: DType, form: Format, settings: dict[str, Any], kind: Collective
) -> None:
    """Kernels and processor give the same bits, through the host's slots and through sockets."""
    ranks: Ranks = with_cpus("nc", **settings)
    for count, op, inplace in calls_of(dtype):
        said = ranks.run(summed, Calls(kind, count, dtype, form.label, 3, op, inplace))
        assert [results for results, _ in said] == wanted(kind, ((0,), (1,)), count, dtype, form, 3, op), (count, op)
    assert all(0 < counters["compressed_after"] < counters["compressed_before"] for _, counters in said)


@parametrize(("kinds", "settings"), [
    ("nac", {"HETCOLL_ISLANDS": "0|1|2"}),
    ("nnac", {"HETCOLL_HOST_ID": ("a", "a", "b", "b")}),  # slots inside the hosts, exact
    ("ccaa", {"HETCOLL_ISLANDS": "0,1|2,3"}),
], first=1)  # fmt: skip
@parametrize("kind", COLLECTIVES, first=1)
def test_several_with_and_without_a_gpu(with_cpus: Any, kinds: str, settings: dict[str, Any], kind: Collective) -> None:
    size, count = len(kinds), 300_012
    said = with_cpus(kinds, **settings).run(summed, Calls(kind, count, DType.FLOAT32, "int8", 2, "sum", False))
    for turn in range(2):
        total = sum(make(rank, turn, count, DType.FLOAT32).astype(np.float64) for rank in range(size))
        parts = [total] * size if kind is Collective.ALLREDUCE else np.split(total, size)
        for (results, _), part in zip(said, parts, strict=True):
            assert 1e-4 < np.abs(np.frombuffer(results[turn], np.float32) - part).max() < 2 * size * 8 / 127
    assert kind is Collective.REDUCE_SCATTER or all(results == said[0][0] for results, _ in said)


def disagreeing(comm: hetcoll.Communicator) -> str:
    with pytest.raises(CollectiveMismatchError) as caught:
        summed(comm, Calls(Collective.ALLREDUCE, 1000, DType.FLOAT32, ("int8", "none")[comm.rank], 1, "sum", True))
    return str(caught.value)


def test_formats_that_differ_with_and_without_a_gpu() -> None:
    ranks = start("nc", HETCOLL_ISLANDS="0|1")
    try:
        assert all("compress=int8" in text for text in ranks.run(disagreeing))
    finally:
        ranks.kill_all()


def refused(comm: hetcoll.Communicator) -> None:
    device = device_of_rank(comm.rank)
    with device.active():
        at = device.allocate(4096)
        kind = "cuda" if device.vendor == "cuda" else "rocm"
        whole = Buffer(at, 1024, DType.FLOAT32, comm, kind, device.index)
        half = Buffer(at + 2048 * comm.rank, 512, DType.FLOAT32, comm, kind, device.index)
        with pytest.raises(ArgumentError, match="only sums and averages are compressed, not max"):
            comm.allreduce(whole, op="max", compress="int8", stream=0)
        with pytest.raises(ArgumentError, match="only sums and averages are compressed, not min"):
            comm.reduce_scatter(whole, half, "min", compress="int8", stream=0)
        device.free(at)


def test_what_cannot_be_compressed_is_an_error(mixed: Any) -> None:
    mixed("na", HETCOLL_ISLANDS="0|1").run(refused)


def by_default(comm: hetcoll.Communicator) -> int:
    """A communicator's setting holds for large sums, and for no others. `explain` tells of the calls that there are."""
    device = device_of_rank(comm.rank)
    with device.active():
        at = device.allocate(1 << 20)
        kind = "cuda" if device.vendor == "cuda" else "rocm"
        for count in (100, 1 << 18):
            comm.allreduce(Buffer(at, count, DType.FLOAT32, comm, kind, device.index), stream=0).wait(60)
            whole = Buffer(at, count, DType.FLOAT32, comm, kind, device.index)
            share = Buffer(at + comm.rank * count * 2, count // 2, DType.FLOAT32, comm, kind, device.index)
            comm.reduce_scatter(whole, share, stream=0).wait(60)
        comm.allreduce(Buffer(at, 1 << 18, DType.INT32, comm, kind, device.index), stream=0).wait(60)
        found = comm.counters().get("compressed_before", 0)
        device.free(at)
    assert comm.explain("allreduce", 100).gpus.startswith("oneshot, one kernel a rank")
    told = comm.explain("allreduce", 1 << 18).gpus
    assert told.startswith("islands, in pieces"), told
    assert "(the one that compresses; not by one kernel: none compresses; " in told
    return found


def test_the_setting_of_a_communicator(mixed: Any) -> None:
    for nbytes in mixed("na", HETCOLL_ISLANDS="0|1", HETCOLL_COMPRESS="fp8").run(by_default):
        assert nbytes == (1 << 20) + (1 << 19)  # half of a reduce-scatter's buffer leaves a rank
