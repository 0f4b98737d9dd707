"""Compressed edges between GPUs: the kernels against NumPy bit by bit, and whole calls on stand-ins of both vendors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from codec_reference import rounded, wire
from elements import NUMPY, assert_same, bit_patterns
from kernel_checks import Launch, as_bytes
from mutants import edited, field_mutants, passes, structural_mutants
from plain_kernels import PlainMachine
from ranks import Ranks
from test_gpu import device_of_rank
from test_gpu_mixed import mixed

import hetcoll
from hetcoll.algorithms import Hosts
from hetcoll.algorithms.islands import ISLANDS
from hetcoll.buffers import Buffer
from hetcoll.devices.kernels import codec_names
from hetcoll.errors import ArgumentError
from hetcoll.order import enqueue_order
from hetcoll.pipeline import pipelined
from hetcoll.plan import Plan
from hetcoll.simulator import check, serialisable
from hetcoll.topology import spell_islands
from hetcoll.types import Collective, DType, Format

__all__ = ["mixed"]
Array = np.ndarray[Any, np.dtype[Any]]
KINDS = [
    (d, f)
    for d in (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
    for f in (Format.BF16, Format.FP8, Format.INT8)
    if f.factor(d.itemsize) < 1
]
COUNTS = (1, 31, 32, 33, 4099)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainMachine]:
    names = [f"{dtype.label}_codecs" for dtype in dict.fromkeys(d for d, _ in KINDS)]
    made = PlainMachine(tmp_path_factory.mktemp("kernels"), names)
    yield made
    made.close()


class Memory:
    """Of the machine: what is put there, at `skew` bytes from a multiple of 256, between guards."""

    def __init__(self, machine: PlainMachine, data: Array, skew: int = 0) -> None:
        self.machine, self.data = machine, data
        self.base = machine.allocate(data.nbytes + 1024)
        self.address = self.base + 256 + skew
        machine.write(self.base, np.full(data.nbytes + 1024, 0xA5, np.uint8))
        machine.write(self.address, as_bytes(data))

    def read(self) -> Array:
        around = self.machine.read(self.base, self.data.nbytes + 1024)
        begin = self.address - self.base
        assert (around[:begin] == 0xA5).all()
        assert (around[begin + self.data.nbytes :] == 0xA5).all()
        return around[begin : begin + self.data.nbytes].view(self.data.dtype)


@pytest.mark.parametrize("skew", [0, 1])
@pytest.mark.parametrize(("dtype", "form"), KINDS)
def test_kernels_give_numpys_bits(machine: PlainMachine, dtype: DType, form: Format, skew: int) -> None:
    round_, encode, decode, add = codec_names(dtype, form)
    for count in COUNTS:
        for clean in (True, False):
            x = bit_patterns(dtype, count, count).view(NUMPY[dtype])
            with np.errstate(invalid="ignore", over="ignore"):
                x = np.where(np.isfinite(x.astype(np.float32)), x, 3).astype(x.dtype) if clean else x
                lost = np.random.default_rng(count).standard_normal(count).astype(np.float32)
                want, want_left = rounded(x, lost, dtype, form)
                plain, _ = rounded(x, None, dtype, form)
            src, dst = Memory(machine, x, skew), Memory(machine, np.zeros_like(x), skew)
            kept = Memory(machine, lost)
            machine.run([Launch(round_, 2, 16, dst.address, src.address, kept.address, count)])
            assert_same(dtype, dst.read(), want, x)
            assert_same(DType.FLOAT32, kept.read(), want_left, x)
            machine.run([Launch(round_, 2, 16, src.address, src.address, 0, count)])  # in place, nothing kept
            assert_same(dtype, src.read(), plain, x)
            length = len(wire(plain, dtype, form))
            codes = Memory(machine, np.zeros(length, np.uint8))
            machine.run([Launch(encode, 2, 16, codes.address, src.address, count)])
            if clean or form is not Format.BF16:  # a NaN has many codes there
                assert codes.read().tobytes() == wire(plain, dtype, form)
            machine.run([Launch(decode, 2, 16, dst.address, codes.address, count)])
            assert_same(dtype, dst.read(), plain, x)
            if clean:
                term = np.random.default_rng(1).standard_normal(count).astype(x.dtype)
                other = Memory(machine, term, skew)
                machine.run([Launch(add, 2, 16, other.address, other.address, codes.address, count)])
                with np.errstate(over="ignore"):
                    assert_same(
                        dtype, other.read(), (term.astype(np.float32) + plain.astype(np.float32)).astype(x.dtype), x
                    )


def test_kernels_have_no_undefined_behaviour(tmp_path: Path) -> None:
    options = "-O1 -fsanitize=undefined -fno-sanitize-recover=all"
    machine = PlainMachine(tmp_path, ["float16_codecs"], options)
    for form in (Format.FP8, Format.INT8):
        for skew in (0, 1):
            test_kernels_give_numpys_bits(machine, DType.FLOAT16, form, skew)
    machine.close()


# The plans.

ISLAND_SHAPES: tuple[Hosts, ...] = (
    ((0,), (1,)), ((0,), (1,), (2,)), ((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((0, 3), (1, 2)), ((0, 1), (2,), (3, 4, 5)),
    ((1, 0), (4, 2, 3)),
)  # fmt: skip
COLLECTIVES = (Collective.ALLREDUCE, Collective.REDUCE_SCATTER)


def build(kind: Collective, islands: Hosts, groups: Hosts = (), *, scale: bool = False) -> list[Plan]:
    n = sum(map(len, islands))
    return [ISLANDS[kind].build(n, r, scale=scale, hosts=islands, compress=True, groups=groups) for r in range(n)]


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("islands", ISLAND_SHAPES, ids=str)
def test_plans_are_proved(kind: Collective, islands: Hosts) -> None:
    """Whole and in pieces; no edges but those between islands, or between groups of them, are compressed."""
    joined = ((*islands[0], *islands[1]), *islands[2:])
    for groups in (islands, joined):
        home = {rank: group for group in groups for rank in group}
        for scale in (False, True):
            plans = build(kind, islands, groups, scale=scale)
            for plan in plans:
                assert all(s.compressed == (s.peer not in home[plan.rank]) for s in plan.steps if s.peer >= 0)
            for inplace in (False, True):
                check(plans, scale=scale, inplace=inplace, credits=1)
            pieces = pipelined(plans, (0, 1, 3))
            check(pieces, scale=scale, credits=1)
            serialisable(pieces, enqueue_order(pieces, 2), 2)


@pytest.mark.parametrize("islands", ISLAND_SHAPES[:3], ids=str)
def test_every_single_mistake_is_caught(islands: Hosts) -> None:
    plans = build(Collective.REDUCE_SCATTER, islands)
    for rank, plan in enumerate(plans):
        flipped = (
            (f"step {i} flipped", edited(plan, i, compressed=not s.compressed)) for i, s in enumerate(plan.steps)
        )
        for what, mutant in (*structural_mutants(plan), *field_mutants(plan), *flipped):
            if passes([*plans[:rank], mutant, *plans[rank + 1 :]], scale=False):
                raise AssertionError(f"rank {rank}: {what}\n{plan.dump()}")


# Calls.


def make(rank: int, turn: int, count: int, dtype: DType) -> Array:
    return np.random.default_rng([rank, turn]).standard_normal(count).astype(NUMPY[dtype])


def summed(
    comm: hetcoll.Communicator,
    kind: Collective,
    count: int,
    dtype: DType,
    form: str,
    turns: int,
    op: str,
    inplace: bool,
) -> tuple[list[bytes], dict[str, int]]:
    """Results of several calls on the same buffers of this rank's GPU, and what the last one left of its input."""
    device = device_of_rank(comm.rank)
    found, item = [], dtype.itemsize
    share = count // (1 if kind is Collective.ALLREDUCE else comm.size)
    with device.active():
        send = device.allocate(max(1, count * item))
        recv = device.allocate(max(1, share * item))
        into = recv
        if inplace:
            into = send if kind is Collective.ALLREDUCE else send + comm.rank * share * item
        where = "cuda" if device.vendor == "cuda" else "rocm"
        x, y = (Buffer(at, n, dtype, comm, where, device.index) for at, n in ((send, count), (into, share)))
        for turn in range(turns):
            data = make(comm.rank, turn, count, dtype)
            device.copy(send, data.ctypes.data, data.nbytes)
            getattr(comm, kind.label)(x, y, op, compress=form, stream=0).wait(60)
            result = np.empty(share, data.dtype)
            device.copy(result.ctypes.data, into, result.nbytes)
            found.append(result.tobytes())
            if not inplace:
                left = np.empty_like(data)
                device.copy(left.ctypes.data, send, left.nbytes)
                assert left.tobytes() == data.tobytes(), "the input was changed"
        counters = comm.counters()
        comm.reset_feedback()
        for address in (send, recv):
            device.free(address)
    return found, counters


def wanted(
    kind: Collective, islands: Hosts, count: int, dtype: DType, form: Format, turns: int, op: str
) -> list[list[bytes]]:
    """What comes of it on each rank: islands add up their own in their type, and what was lost of what one sent to
    another comes with the next. All-reduces are of two islands, which add alike."""
    ranks, lost = sum(map(len, islands)), dict[tuple[int, int], Array]()
    share = count // (1 if kind is Collective.ALLREDUCE else ranks)
    found: list[list[bytes]] = [[] for _ in range(ranks)]
    for turn in range(turns):
        sums = [make(members[0], turn, count, dtype) for members in islands]
        for i, members in enumerate(islands):
            for other in members[1:]:
                sums[i] = add(sums[i], make(other, turn, count, dtype))
        for i, members in enumerate(islands):
            for rank in members:
                mine = slice(0, count) if kind is Collective.ALLREDUCE else slice(rank * share, (rank + 1) * share)
                total = sums[i][mine]
                if kind is Collective.ALLREDUCE:  # both islands round what they send
                    total, lost[-1, rank] = rounded(total, lost.get((-1, rank)), dtype, form)
                for d in range(1, len(islands)):
                    other = (i - d) % len(islands)
                    came, lost[other, rank] = rounded(sums[other][mine], lost.get((other, rank)), dtype, form)
                    total = add(total, came)
                if op == "avg":
                    total = (total.astype(np.float32) / np.float32(ranks)).astype(total.dtype)
                found[rank].append(total.tobytes())
    return found


def add(x: Array, y: Array) -> Array:
    return (x.astype(np.float32) + y.astype(np.float32)).astype(x.dtype)


@pytest.mark.standins
@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize(("dtype", "form"), KINDS)
def test_two_gpus_of_two_vendors(mixed: Any, dtype: DType, form: Format, kind: Collective) -> None:
    """Several calls, with what they lost; the sum has the bits that NumPy's formats give."""
    ranks: Ranks = mixed("na", HETCOLL_ISLANDS="0|1")
    for count, op, inplace in ((6, "sum", True), (70_002, "avg", False), (900_002, "sum", True)):
        said = ranks.run(summed, kind, count, dtype, form.label, 3, op, inplace)
        want = wanted(kind, ((0,), (1,)), count, dtype, form, 3, op)
        assert [results for results, _ in said] == want, (count, op)


@pytest.mark.standins
@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("form", [Format.BF16, Format.INT8])
def test_islands_of_two(mixed: Any, form: Format, kind: Collective) -> None:
    """Inside, the vendors' libraries add up what is not compressed."""
    ranks: Ranks = mixed("nnaa", HETCOLL_HOST_ID=("a", "a", "b", "b"))
    before = ranks.run(summed, kind, 132, DType.FLOAT32, form.label, 1, "sum", True)[0][1]
    said = ranks.run(summed, kind, 300_004, DType.FLOAT32, form.label, 2, "sum", False)
    want = wanted(kind, ((0, 1), (2, 3)), 300_004, DType.FLOAT32, form, 2, "sum")
    assert [results for results, _ in said] == want
    counters = said[0][1]
    sent, travelled = (counters[key] - before[key] for key in ("compressed_before", "compressed_after"))
    each = 300_004 / (2 if kind is Collective.ALLREDUCE else 4)  # elements that leave a rank
    assert sent == pytest.approx(2 * 4 * each, rel=1e-2)  # of two calls
    assert travelled == pytest.approx(form.factor(4) * sent, rel=2e-2)
    assert counters["residual_bytes"] > 0


@pytest.mark.standins
@pytest.mark.parametrize(("gpus", "islands"), [
    ("naa", ((0,), (1,), (2,))), ("nnaa", ((0, 1), (2,), (3,))), ("nna", ((0, 1), (2,))),
])  # fmt: skip
def test_reduce_scatters_of_other_islands(mixed: Any, gpus: str, islands: Hosts) -> None:
    """What several islands send, a share in pieces where its owner's island is a different size, averages."""
    ranks: Ranks = mixed(gpus, HETCOLL_ISLANDS=spell_islands(islands))
    for count, op, inplace in ((24, "sum", False), (len(gpus) * 50_001, "avg", True)):
        said = ranks.run(summed, Collective.REDUCE_SCATTER, count, DType.FLOAT32, "int8", 2, op, inplace)
        want = wanted(Collective.REDUCE_SCATTER, islands, count, DType.FLOAT32, Format.INT8, 2, op)
        assert [results for results, _ in said] == want, (count, op)


@pytest.mark.standins
@pytest.mark.parametrize(("gpus", "settings", "lossy"), [
    ("naa", {"HETCOLL_ISLANDS": "0|1|2"}, True),
    ("nnaa", {"HETCOLL_ISLANDS": "0,1|2|3"}, True),
    ("naaa", {"HETCOLL_ISLANDS": "0|1,2,3"}, True),
    # Islands of several hosts, whose members exchange with one of their own host or of another:
    ("nana", {"HETCOLL_HOST_ID": ("a", "a", "b", "c")}, True),
    ("nana", {"HETCOLL_HOST_ID": ("a", "a", "b", "b")}, False),
])  # fmt: skip
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_other_islands(mixed: Any, gpus: str, settings: dict[str, Any], lossy: bool, kind: Collective) -> None:
    """Roundings take something where an edge is slow, and no more; all ranks hold the same bits of an all-reduce."""
    size, count = len(gpus), 70_008
    said = mixed(gpus, **settings).run(summed, kind, count, DType.FLOAT32, "int8", 2, "sum", True)
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


@pytest.mark.standins
def test_what_cannot_be_compressed_is_an_error(mixed: Any) -> None:
    mixed("na", HETCOLL_ISLANDS="0|1").run(refused)


def by_default(comm: hetcoll.Communicator) -> int:
    """A communicator's setting holds for large sums, and for no others."""
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
    return found


@pytest.mark.standins
def test_the_setting_of_a_communicator(mixed: Any) -> None:
    for nbytes in mixed("na", HETCOLL_ISLANDS="0|1", HETCOLL_COMPRESS="fp8").run(by_default):
        assert nbytes == (1 << 20) + (1 << 19)  # half of a reduce-scatter's buffer leaves a rank
