"""Compressed edges between GPUs: the kernels against NumPy bit by bit, and whole calls on stand-ins of both vendors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from codec_reference import rounded, wire
from elements import NUMPY, assert_same, bit_patterns
from kernel_checks import Launch, as_bytes
from plain_kernels import PlainMachine
from ranks import Ranks
from test_gpu import device_of_rank
from test_gpu_mixed import mixed

import hetcoll
from hetcoll.buffers import Buffer
from hetcoll.devices.kernels import codec_names
from hetcoll.errors import ArgumentError
from hetcoll.types import DType, Format

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


# Calls.


def make(rank: int, turn: int, count: int, dtype: DType) -> Array:
    return np.random.default_rng([rank, turn]).standard_normal(count).astype(NUMPY[dtype])


def summed(
    comm: hetcoll.Communicator, count: int, dtype: DType, form: str, turns: int, op: str, inplace: bool
) -> tuple[list[bytes], dict[str, int]]:
    """Results of several calls on the same buffers of this rank's GPU."""
    device = device_of_rank(comm.rank)
    found, size = [], max(1, count * dtype.itemsize)
    with device.active():
        send = device.allocate(size)
        recv = send if inplace else device.allocate(size)
        kind = "cuda" if device.vendor == "cuda" else "rocm"
        buffers = [Buffer(at, count, dtype, comm, kind, device.index) for at in (send, recv)]
        for turn in range(turns):
            x = make(comm.rank, turn, count, dtype)
            device.copy(send, x.ctypes.data, x.nbytes)
            comm.allreduce(buffers[0], buffers[1], op, compress=form, stream=0).wait(60)
            device.copy(x.ctypes.data, recv, x.nbytes)
            found.append(x.tobytes())
        counters = comm.counters()
        comm.reset_feedback()
        for address in {send, recv}:
            device.free(address)
    return found, counters


def of_two(
    islands: Sequence[Sequence[int]], count: int, dtype: DType, form: Format, turns: int, op: str
) -> list[bytes]:
    """What two islands come to: each adds up its own in their type, and what was lost of that comes with the next."""
    lost: list[Array | None] = [None, None]
    found = []
    for turn in range(turns):
        total: Array = np.zeros(count, np.float32)
        for i, members in enumerate(islands):
            own = make(members[0], turn, count, dtype)
            for other in members[1:]:
                own = (own.astype(np.float32) + make(other, turn, count, dtype).astype(np.float32)).astype(own.dtype)
            sent, lost[i] = rounded(own, lost[i], dtype, form)
            total = total + sent.astype(np.float32)
        result = total.astype(NUMPY[dtype])
        if op == "avg":
            result = (result.astype(np.float32) / np.float32(sum(map(len, islands)))).astype(NUMPY[dtype])
        found.append(result.tobytes())
    return found


@pytest.mark.standins
@pytest.mark.parametrize(("dtype", "form"), KINDS)
def test_two_gpus_of_two_vendors(mixed: Any, dtype: DType, form: Format) -> None:
    """Several calls, with what they lost; the sum has the bits that NumPy's formats give."""
    ranks: Ranks = mixed("na", HETCOLL_ISLANDS="0|1")
    for count, op, inplace in ((5, "sum", True), (70_001, "avg", False), (900_001, "sum", True)):
        said = ranks.run(summed, count, dtype, form.label, 3, op, inplace)
        want = of_two([[0], [1]], count, dtype, form, 3, op)
        assert [results for results, _ in said] == [want, want], (count, op)


@pytest.mark.standins
@pytest.mark.parametrize("form", [Format.BF16, Format.INT8])
def test_islands_of_two(mixed: Any, form: Format) -> None:
    """Inside, the vendors' libraries add up what is not compressed."""
    ranks: Ranks = mixed("nnaa", HETCOLL_HOST_ID=("a", "a", "b", "b"))
    before = ranks.run(summed, 33, DType.FLOAT32, form.label, 1, "sum", True)[0][1]
    said = ranks.run(summed, 300_001, DType.FLOAT32, form.label, 2, "sum", False)
    want = of_two([[0, 1], [2, 3]], 300_001, DType.FLOAT32, form, 2, "sum")
    assert [results for results, _ in said] == [want] * 4
    counters = said[0][1]
    sent, travelled = (counters[key] - before[key] for key in ("compressed_before", "compressed_after"))
    assert sent == pytest.approx(2 * 4 * 300_001 / 2, rel=1e-2)  # two calls; half of the buffer leaves each rank
    assert travelled == pytest.approx(form.factor(4) * sent, rel=2e-2)
    assert counters["residual_bytes"] > 0


@pytest.mark.standins
@pytest.mark.parametrize(("gpus", "settings"), [
    ("naa", {"HETCOLL_ISLANDS": "0|1|2"}),
    ("nnaa", {"HETCOLL_ISLANDS": "0,1|2|3"}),
    ("nana", {"HETCOLL_HOST_ID": ("a", "a", "b", "b")}),  # islands within hosts: what passes between them is exact
])  # fmt: skip
def test_other_islands(mixed: Any, gpus: str, settings: dict[str, Any]) -> None:
    """All ranks hold the same bits, and no more is lost than roundings take."""
    said = mixed(gpus, **settings).run(summed, 70_001, DType.FLOAT32, "int8", 2, "sum", True)
    assert all(results == said[0][0] for results, _ in said)
    for turn, result in enumerate(said[0][0]):
        terms = [make(rank, turn, 70_001, DType.FLOAT32).astype(np.float64) for rank in range(len(gpus))]
        error = np.abs(np.frombuffer(result, np.float32) - sum(terms))
        assert error.max() < 2 * len(gpus) * 8 / 127, error.max()
        assert error.max() > 0


def refused(comm: hetcoll.Communicator) -> None:
    device = device_of_rank(comm.rank)
    with device.active():
        at = device.allocate(4096)
        kind = "cuda" if device.vendor == "cuda" else "rocm"
        whole, half = (
            Buffer(at + offset, n, DType.FLOAT32, comm, kind, device.index)
            for offset, n in ((0, 1024), (2048 * comm.rank, 512))
        )
        with pytest.raises(ArgumentError, match="reduce_scatter is not compressed on GPUs, where all-reduce is"):
            comm.reduce_scatter(whole, half, compress="int8", stream=0)
        with pytest.raises(ArgumentError, match="only sums and averages"):
            comm.allreduce(whole, op="max", compress="int8", stream=0)
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
        comm.allreduce(Buffer(at, 1 << 18, DType.INT32, comm, kind, device.index), stream=0).wait(60)
        found = comm.counters().get("compressed_before", 0)
        device.free(at)
    return found


@pytest.mark.standins
def test_the_setting_of_a_communicator(mixed: Any) -> None:
    for nbytes in mixed("na", HETCOLL_ISLANDS="0|1", HETCOLL_COMPRESS="fp8").run(by_default):
        assert nbytes == 1 << 20
