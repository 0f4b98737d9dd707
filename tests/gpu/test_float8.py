"""8-bit floats of OCP's kind and AMD's older one: conversions of every code, and calls in which both meet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kernel_checks as checks
import numpy as np
import pytest
from elements import NUMPY, Array
from float8_values import check_codes, codes_of, common, converted, in_ocp, same_values, steps
from gpu_kinds import Own, device_of, has_gpu, start
from on_gpu import OnGpu
from plain_kernels import PlainMachine
from ranks import kept
from thorough import parametrize

import hetcoll
from hetcoll import _native
from hetcoll.gpu.float8 import Float8Conversion, two_kinds
from hetcoll.links.facts import Gpu
from hetcoll.types import FNUZ_OF, OCP_OF, DType
from hetcoll.vendors.devices.kernels import convert_name

# Conversions.


@pytest.mark.parametrize(("source", "target", "want"), steps())
def test_every_code_on_a_processor(source: DType, target: DType, want: Array) -> None:
    codes = codes_of(source)
    got = np.empty(256, NUMPY[target])
    _native.convert_float8(got.ctypes.data, codes.ctypes.data, 256, source, target)
    check_codes(got, want)


def test_other_pairs_are_refused() -> None:
    for source, target in ((10, 17), (16, 16), (16, 11), (7, 10), (10, 99)):
        with pytest.raises(ValueError, match="two kinds of one format"):
            _native.convert_float8(0, 0, 0, source, target)


@pytest.mark.parametrize("options", ["-O2 -Werror", "-O1 -fsanitize=undefined -fno-sanitize-recover=all"])
def test_every_code_by_the_gpus_kernels(tmp_path: Path, options: str) -> None:
    """As plain C++, from and to any place."""
    machine = PlainMachine(tmp_path, options)
    operands = checks.Operands(machine)
    for source, target, want in steps():
        name, codes = convert_name(source, target), codes_of(source)
        for places in (((0, 0), (1, 0)), ((0, 0), (0, 0)), ((0, 3), (1, 5))):
            got = operands.run(name, (2, 16), places, [checks.as_bytes(codes)], source)
            check_codes(got.view(NUMPY[target]), want)
    machine.close()


def test_the_limits() -> None:
    """The rules as the docs have them."""
    e4m3 = np.array([448, 256, 240, 2.0**-9, -0.0, np.nan], NUMPY[DType.FLOAT8_E4M3FN])
    assert converted(e4m3, DType.FLOAT8_E4M3FNUZ).astype(float)[:5].tolist() == [240, 240, 240, 2.0**-9, 0]
    small = np.array([2.0**-10, 3 * 2.0**-10, 240], NUMPY[DType.FLOAT8_E4M3FNUZ])
    assert converted(small, DType.FLOAT8_E4M3FN).astype(float).tolist() == [0, 2.0**-8, 240]
    e5m2 = np.array([np.inf, -np.inf, 57344], NUMPY[DType.FLOAT8_E5M2])
    assert np.isnan(common(e5m2).astype(float)).tolist() == [True, True, False]


def test_which_communicators_convert() -> None:
    def gpus(*kinds: str | None) -> list[Gpu]:
        return [Gpu.none("") if kind is None else Gpu("cuda", "", "", "", "", 0, kind, True) for kind in kinds]

    assert not two_kinds(gpus("OCP", "OCP", None))
    assert not two_kinds(gpus("fnuz", "fnuz", None))
    assert not two_kinds(gpus("OCP", ""))
    assert two_kinds(gpus("OCP", None, "fnuz"))
    assert two_kinds(gpus("", "fnuz"))


def test_staged_buffers_overlap_as_the_users_do() -> None:
    memory = np.zeros(100, NUMPY[DType.FLOAT8_E4M3FNUZ])
    whole, part = hetcoll.calls.buffers.read_buffer(memory, "", writable=True), memory[30:60]
    inner = hetcoll.calls.buffers.read_buffer(part, "", writable=True)
    for send, recv in ((whole, inner), (inner, whole), (whole, whole)):
        passage = Float8Conversion(send, recv, True, True)
        first, second = passage.staged(4096)
        assert first is not None
        assert second is not None
        assert second.ptr - first.ptr == recv.ptr - send.ptr
        assert min(first.ptr, second.ptr) == 4096
        assert passage.nbytes == 100
    other = hetcoll.calls.buffers.read_buffer(memory.copy(), "", writable=True)
    first, second = Float8Conversion(inner, other, True, True).staged(4096)
    assert first is not None
    assert second is not None
    assert not first.overlaps(second)


# Calls, on fakes.


@pytest.fixture(scope="module")
def mixed() -> Iterator[Any]:
    with kept(start) as get:
        yield get


class Calls:
    """Calls of one rank, whose arrays are of kind `mine`, and what they must give, in values of OCP's kind."""

    def __init__(self, comm: hetcoll.Communicator, kinds: str, ocp: DType, seed: int) -> None:
        self.rank, self.size = comm.rank, comm.size
        self._types = [NUMPY[FNUZ_OF[ocp] if kind == "f" else ocp] for kind in kinds]
        self._ocp, self._seed = ocp, seed
        self.mine = self._types[self.rank]

    def given(self, rank: int, count: int, salt: int = 0) -> Array:
        """What a rank gives: any codes of its kind."""
        random = np.random.default_rng([self._seed, rank, salt])
        return random.integers(0, 256, count).astype(np.uint8).view(self._types[rank])

    def whole(self, count: int) -> Array:
        return np.concatenate([in_ocp(self.given(rank, count)) for rank in range(self.size)])

    def largest(self, count: int) -> Array:
        """Of all ranks; NaN where one of them has it."""
        return np.max([in_ocp(self.given(r, count)).astype(np.float32) for r in range(self.size)], 0).astype(
            NUMPY[self._ocp]
        )

    def new(self, count: int) -> Array:
        return np.zeros(count, self.mine)

    def check(self, got: Array, want: Array, *, alike: bool = False) -> None:
        """`want` is of OCP's kind; where all ranks get it, it is what both kinds hold."""
        assert got.dtype == self.mine
        want = common(want) if alike else want
        dtype = DType[self.mine.name.upper()]
        assert same_values(got, converted(want, dtype) if dtype in OCP_OF else want)


def run_collectives(on: Any, c: Calls, n: int) -> None:
    rank, size = c.rank, c.size
    send, out = c.given(rank, n), c.new(n)
    on.allreduce(send, out, op="max")
    c.check(out, c.largest(n), alike=True)
    assert same_values(send, c.given(rank, n)), "the input was written"
    on.allreduce(send, op="max")
    c.check(send, c.largest(n), alike=True)

    sums = np.full(n, 192.0 if rank < 2 else 0.0, c.mine)  # 384: beyond what e4m3fnuz holds
    on.allreduce(sums)
    c.check(sums, np.full(n, 384.0, NUMPY[c._ocp]), alike=True)

    every = c.new(n * size)
    on.allgather(c.given(rank, n), every)
    c.check(every, c.whole(n), alike=True)
    every = c.new(n * size)
    every[rank * n : (rank + 1) * n] = c.given(rank, n)
    on.allgather(every[rank * n : (rank + 1) * n], every)
    c.check(every, c.whole(n), alike=True)

    share = slice(rank * n, (rank + 1) * n)
    parts, out = c.given(rank, n * size), c.new(n)
    on.reduce_scatter(parts, out, op="max")
    c.check(out, c.largest(n * size)[share])
    on.reduce_scatter(parts, parts[share], op="max")
    c.check(parts[share], c.largest(n * size)[share])

    for root in range(size):
        buf = c.given(rank, n)
        on.broadcast(buf, root)
        if rank == root:
            assert same_values(buf, c.given(rank, n)), "the root's buffer was written"
        else:
            c.check(buf, in_ocp(c.given(root, n)), alike=True)
        send, out = c.given(rank, n), c.new(n)
        on.reduce(send, out if rank == root else None, "max", root)
        if rank == root:
            c.check(out, c.largest(n))
            on_all = c.new(n * size)
            on.gather(c.given(rank, n), on_all, root)
            c.check(on_all, c.whole(n))
            on.scatter(c.given(rank, n * size), out, root)
        else:
            on.gather(send, None, root)
            on.scatter(None, out, root)
        c.check(out, in_ocp(c.given(root, n * size))[share])

    blocks, out = c.given(rank, n * size), c.new(n * size)
    on.alltoall(blocks, out)
    c.check(out, np.concatenate([in_ocp(c.given(r, n * size))[share] for r in range(size)]))


def run_with_counts(on: Any, c: Calls) -> None:
    rank, size = c.rank, c.size
    counts = [5 + 3 * r for r in range(size)]
    ends = np.cumsum(counts)
    own = slice(int(ends[rank]) - counts[rank], int(ends[rank]))
    every, out = c.new(sum(counts)), c.new(counts[rank])
    on.allgatherv(c.given(rank, counts[rank]), every, counts)
    c.check(every, np.concatenate([in_ocp(c.given(r, counts[r])) for r in range(size)]), alike=True)
    on.reduce_scatterv(c.given(rank, sum(counts)), out, "max", counts=counts)
    c.check(out, c.largest(sum(counts))[own])
    table = [[1 + (a + b) % 3 for b in range(size)] for a in range(size)]
    sent, got = table[rank], [table[r][rank] for r in range(size)]
    out = c.new(sum(got))
    on.alltoall(c.given(rank, sum(sent)), out, sendcounts=sent, recvcounts=got)
    want = [in_ocp(c.given(r, sum(table[r])))[sum(table[r][:rank]) : sum(table[r][: rank + 1])] for r in range(size)]
    c.check(out, np.concatenate(want))


def run_messages(comm: hetcoll.Communicator, c: Calls, n: int) -> None:
    rank, size = c.rank, c.size
    right, left = (rank + 1) % size, (rank - 1) % size
    mine, got = Own(comm, c.given(rank, n)), Own(comm, c.new(n))
    comm.sendrecv(mine.array, right, got.array, left).wait(60)
    c.check(got.get(), in_ocp(c.given(left, n)))
    peers = [(rank + i) % size for i in range(size)]  # each rank begins with itself, and then with another
    into = [Own(comm, c.new(n)) for _ in peers]
    with comm.group():
        for peer, each in zip(peers, into, strict=True):
            comm.send(mine.array, peer)
            comm.recv(each.array, peer)
    comm.barrier()
    assert same_values(into[0].get(), c.given(rank, n))
    for peer, each in zip(peers[1:], into[1:], strict=True):
        c.check(each.get(), in_ocp(c.given(peer, n)))
    into = [Own(comm, c.new(n)) for _ in peers]
    for work in [
        call(array, peer, async_op=True)
        for peer, each in zip(peers[1:], into[1:], strict=True)
        for call, array in ((comm.send, mine.array), (comm.recv, each.array))
    ]:
        work.wait(60)
        assert work.done
        assert work.error is None
    for peer, each in zip(peers[1:], into[1:], strict=True):
        c.check(each.get(), in_ocp(c.given(peer, n)))
    several = [Own(comm, c.given(rank, n, i)) for i in range(3)]
    for work in [comm.allreduce(each.array, op="max", async_op=True) for each in several]:
        work.wait(60)
    for i, each in enumerate(several):
        parts = [in_ocp(c.given(r, n, i)).astype(np.float32) for r in range(size)]
        c.check(each.get(), np.max(parts, 0).astype(NUMPY[c._ocp]), alike=True)


def run_all(comm: hetcoll.Communicator, kinds: str, counts: tuple[int, ...]) -> None:
    device = device_of(comm) if has_gpu(comm) else None
    stream = 0 if device is None else device.stream()
    on: Any = comm if device is None else OnGpu(comm, device, stream)
    for ocp in FNUZ_OF:
        c = Calls(comm, kinds, ocp, 7)
        for n in counts:
            run_collectives(on, c, n)
            run_messages(comm, c, n)
        run_with_counts(on, c)
    if device is not None:
        device.destroy_stream(stream)


def run_large(comm: hetcoll.Communicator, kinds: str) -> None:
    """More than slots take, by copies and by kernels of several pieces."""
    for n in (300_003, 3_000_003):
        c = Calls(comm, kinds, DType.FLOAT8_E4M3FN, 8)
        own, got, peer = Own(comm, c.given(comm.rank, n)), Own(comm, c.new(n)), 1 - comm.rank
        comm.sendrecv(own.array, peer, got.array, peer, async_op=True).wait(60)
        c.check(got.get(), in_ocp(c.given(peer, n)))
        comm.allreduce(own.array, op="max").wait(60)
        c.check(own.get(), c.largest(n), alike=True)


@pytest.mark.fakes
@parametrize(
    ("gpus", "kinds"),
    [("nan", "off"), ("an", "fo"), ("na", "fo"), ("nac", "off"), ("acn", "foo"), ("nnaac", "ooffo")],
    first=1,
)
def test_calls_with_both_kinds(mixed: Any, gpus: str, kinds: str) -> None:
    """The letter o passes OCP's, f the older one; a GPU's rank may pass either."""
    mixed(gpus).run(run_all, kinds, (0, 5, 1009) if len(gpus) == 2 else (1009,), timeout=300)


@pytest.mark.fakes
@pytest.mark.thorough
def test_large_calls_with_both_kinds(mixed: Any) -> None:
    mixed("na").run(run_large, "of", timeout=100)


@pytest.mark.fakes
@pytest.mark.thorough
def test_calls_with_both_kinds_between_hosts(mixed: Any) -> None:
    mixed("nacc", HETCOLL_HOST_ID=("a", "b", "a", "c")).run(run_all, "offo", (1009,), timeout=300)


@pytest.mark.fakes
@pytest.mark.thorough
def test_streams_that_are_late(mixed: Any) -> None:
    few = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "GPU_MAX_HW_QUEUES": "1"}
    mixed("nac", jitter="3:100", **few).run(run_all, "off", (1009,), timeout=300)
