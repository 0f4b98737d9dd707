"""Compressed edges: formats against NumPy, plans against the checker, the engine against both, and error feedback."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from codec_reference import Reference, rounded, wire
from elements import NUMPY, assert_same, bit_patterns
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutants import edited, field_mutants, passes, structural_mutants
from ranks import Ranks
from thorough import parametrize

import hetcoll
from hetcoll import ArgumentError, CollectiveMismatchError, PeerLostError, _native
from hetcoll.config.env import read_config
from hetcoll.plan.algorithms import ALGORITHMS, Hosts, find
from hetcoll.plan.algorithms.hosts import among_hosts
from hetcoll.plan.ir import Op, Plan
from hetcoll.plan.simulator import PlanError, check
from hetcoll.runtime.compression import LEAST_BYTES
from hetcoll.types import Collective, DType, Format

Pool = Callable[..., Ranks]
Launch = Callable[..., Ranks]
Array = np.ndarray[Any, np.dtype[Any]]

DTYPES = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
FORMATS = (Format.BF16, Format.FP8, Format.INT8)
KINDS = [(d, f) for d in DTYPES for f in FORMATS if f.factor(d.itemsize) < 1]
# What rounding takes at most: of the element itself, and of the largest of its block.
BOUNDS = {Format.BF16: (2**-8, 0), Format.FP8: (2**-4, 2**-17), Format.INT8: (0, 1 / 127)}


# The formats.


@pytest.fixture(params=["baseline", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.kernel_isa()
    if not _native.set_kernel_isa(request.param):
        pytest.skip(f"this processor lacks {request.param}")
    yield request.param
    _native.set_kernel_isa(before)


def native_round(x: Array, residual: Array | None, dtype: DType, form: Format) -> tuple[Array, Array]:
    y, lost = np.empty_like(x), np.zeros(len(x), np.float32) if residual is None else residual.copy()
    _native.round_elements(y.ctypes.data, x.ctypes.data, lost.ctypes.data, len(x), dtype, form)
    return y, lost


def native_wire(x: Array, dtype: DType, form: Format) -> bytes:
    codes = np.empty(2 * len(x) + 64, np.uint8)
    return codes[: _native.encode_elements(codes.ctypes.data, x.ctypes.data, len(x), dtype, form)].tobytes()


@pytest.mark.parametrize(("dtype", "form"), KINDS)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(count=st.integers(0, 200), seed=st.integers(0, 1 << 20), residual=st.booleans(), clean=st.booleans())
def test_formats_are_those_of_numpy(
    isa: str, dtype: DType, form: Format, count: int, seed: int, residual: bool, clean: bool
) -> None:
    """Any bits; the codes are the same, too, and rounding what was rounded changes nothing."""
    x = bit_patterns(dtype, count, seed).view(NUMPY[dtype])
    with np.errstate(invalid="ignore", over="ignore"):
        wide = x.astype(np.float32)
        x = np.where(np.isfinite(wide), wide, 3).astype(x.dtype) if clean else x
        lost = np.random.default_rng(seed).standard_normal(count).astype(np.float32) if residual else None
        y, left = native_round(x, lost, dtype, form)
        want, want_left = rounded(x, lost, dtype, form)
        assert_same(dtype, y, want, x)
        assert_same(DType.FLOAT32, left, want_left, x)
    codes = native_wire(y, dtype, form)
    if clean or form is not Format.BF16:  # a NaN has many codes there
        assert codes == wire(y, dtype, form)
    assert len(codes) == count * (2 if form is Format.BF16 else 1) + (form is not Format.BF16) * -(-count // 32)
    back = np.empty_like(y)
    raw = np.frombuffer(codes + b"\0", np.uint8)
    _native.decode_elements(back.ctypes.data, raw.ctypes.data, count, dtype, form)
    assert_same(dtype, back, y, x)
    _native.round_elements(back.ctypes.data, y.ctypes.data, 0, count, dtype, form)
    assert_same(dtype, back, y, x)


@pytest.mark.parametrize(("dtype", "form"), KINDS)
def test_bounds_of_what_is_lost(isa: str, dtype: DType, form: Format) -> None:
    own, largest = BOUNDS[form]
    rng = np.random.default_rng(7)
    for exponent in (-12, 0, 12):
        x = (rng.standard_normal((500, 32)) * 2.0**exponent).astype(NUMPY[dtype])
        y, lost = native_round(x.reshape(-1), None, dtype, form)
        error = np.abs(x.astype(np.float64) - y.astype(np.float64).reshape(x.shape))
        bound = own * np.abs(x.astype(np.float64)) + largest * np.abs(x.astype(np.float64)).max(axis=1, keepdims=True)
        assert (error <= bound).all(), float((error / bound).max())
        assert (np.abs(lost.reshape(x.shape)) == error).all()


@pytest.mark.parametrize(("dtype", "form"), KINDS)
def test_the_largest_numbers_stay_finite(isa: str, dtype: DType, form: Format) -> None:
    top = float(ml_dtypes.finfo(NUMPY[dtype]).max)
    y, _ = native_round(np.array([top, -top, 1], NUMPY[dtype]), None, dtype, form)
    if form is Format.BF16:  # rounds up, as a conversion does
        assert np.isinf(y[:2].astype(np.float32)).all()
    else:
        assert np.allclose(y[:2].astype(np.float64), [top, -top], rtol=0.13)


def test_a_type_without_the_format() -> None:
    for dtype, form in ((DType.FLOAT16, Format.BF16), (DType.INT32, Format.INT8), (DType.FLOAT32, Format.NONE)):
        with pytest.raises(ValueError, match="no such format"):
            _native.encode_elements(0, 0, 0, dtype, form)


# The plans.

SHAPES: tuple[Hosts, ...] = (
    ((0,), (1,)), ((0,), (1,), (2,)), ((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((0, 3), (1, 2)), ((0, 1), (2,), (3, 4, 5)),
    ((0, 1, 2, 3), (4, 5, 6)), ((1, 0), (4, 2, 3)),
)  # fmt: skip
COLLECTIVES = (Collective.ALLREDUCE, Collective.REDUCE_SCATTER)


def build(kind: Collective, hosts: Hosts, *, scale: bool = False) -> list[Plan]:
    n = sum(map(len, hosts))
    algorithm = among_hosts(find(kind, "direct"), led=False)
    return [algorithm.build(n, r, scale=scale, hosts=hosts, compress=True) for r in range(n)]


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("hosts", SHAPES, ids=str)
def test_plans_are_proved(kind: Collective, hosts: Hosts) -> None:
    home = {rank: host for host in hosts for rank in host}
    for scale in (False, True):
        plans = build(kind, hosts, scale=scale)
        for inplace in (False, True):
            check(plans, scale=scale, inplace=inplace)
        for plan in plans:  # these edges and no others
            assert all(s.compressed == (s.peer not in home[plan.rank]) for s in plan.steps if s.peer >= 0)


@pytest.mark.parametrize("kind", COLLECTIVES)
@parametrize("hosts", SHAPES[:3], ids=str, first=1)
def test_every_single_mistake_is_caught(kind: Collective, hosts: Hosts) -> None:
    plans = build(kind, hosts)
    for rank, plan in enumerate(plans):
        flipped = (
            (f"step {i} flipped", edited(plan, i, compressed=not s.compressed)) for i, s in enumerate(plan.steps)
        )
        for what, mutant in (*structural_mutants(plan), *field_mutants(plan), *flipped):
            if not passes([*plans[:rank], mutant, *plans[rank + 1 :]], scale=False):
                continue
            raise AssertionError(f"rank {rank}: {what}\n{plan.dump()}")


def test_who_keeps_what_it_did_not_round_is_caught() -> None:
    """Each rank must hold what the others got from it."""
    plans = build(Collective.ALLREDUCE, ((0,), (1,)))
    (i,) = (i for i, s in enumerate(plans[0].steps) if s.op is Op.ROUND and s.lane == 6)
    with pytest.raises(PlanError, match="which no step has rounded as a whole"):
        check([edited(plans[0], i, op=Op.COPY), plans[1]])


def test_algorithms_that_do_not_compress_say_so() -> None:
    for kind, table in ALGORITHMS.items():
        for name, algorithm in table.items():
            if not algorithm.compresses and algorithm.supports(4):
                with pytest.raises(ArgumentError, match=f"{kind.label} by {name} compresses no edges"):
                    algorithm.build(4, 0, hosts=((0, 1), (2, 3)), compress=True)


# The engine.

LINKS: dict[str, tuple[int, Hosts, dict[str, Any]]] = {
    "shm, islands": (4, ((0, 1), (2, 3)), {"HETCOLL_ISLANDS": "0,1|2,3"}),
    "tcp, islands": (3, ((0, 2), (1,)), {"HETCOLL_ISLANDS": "0,2|1", "HETCOLL_TRANSPORT": "tcp"}),
    "hosts": (3, ((0,), (1, 2)), {"HETCOLL_HOST_ID": ("a", "b", "b")}),
    "three": (3, ((0,), (1,), (2,)), {"HETCOLL_ISLANDS": "0|1|2", "HETCOLL_SHM_BYTES": "4096"}),
    "stripes": (2, ((0,), (1,)), {"HETCOLL_HOST_ID": ("a", "b"), "HETCOLL_SOCKET_STRIPES": "3"}),
}


def make(rank: int, turn: int, count: int, dtype: DType) -> Array:
    rng = np.random.default_rng((rank, turn, count))
    return (rng.standard_normal(count) * 10.0 ** rng.integers(-3, 3, count)).astype(NUMPY[dtype])


def repeat(
    comm: hetcoll.Communicator,
    kind: Collective,
    count: int,
    dtype: DType,
    form: Format,
    average: bool,
    inplace: bool,
    async_op: bool,
) -> list[bytes]:
    """Three calls on the same buffers; results of each."""
    x = make(comm.rank, 0, count, dtype)
    share = count // comm.size
    y = np.zeros(count if kind is Collective.ALLREDUCE else share, x.dtype)
    if inplace:
        y = x if kind is Collective.ALLREDUCE else x[comm.rank * share :][:share]
    call = getattr(comm, kind.label)
    results = []
    for turn in range(3):
        x[:] = before = make(comm.rank, turn, count, dtype)
        call(x, y, "avg" if average else "sum", compress=form.label, async_op=async_op).wait()
        if not inplace:
            np.testing.assert_array_equal(x, before)
        results.append(y.tobytes())
    comm.reset_feedback()
    return results


@pytest.mark.parametrize("link", LINKS)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(COLLECTIVES), pair=st.sampled_from(KINDS), average=st.booleans(), inplace=st.booleans(),
    async_op=st.booleans(), share=st.one_of(st.integers(0, 80), st.integers(0, 9000)),
)  # fmt: skip
def test_the_engine_does_what_plans_say(
    pool: Pool,
    link: str,
    kind: Collective,
    pair: tuple[DType, Format],
    average: bool,
    inplace: bool,
    async_op: bool,
    share: int,
) -> None:
    size, hosts, env = LINKS[link]
    dtype, form = pair
    count = share if kind is Collective.ALLREDUCE else share * size
    reference = Reference(build(kind, hosts, scale=average), dtype, form)
    got = pool(size, **env).run(repeat, kind, count, dtype, form, average, inplace, async_op)
    for turn in range(3):
        want = reference([make(rank, turn, count, dtype) for rank in range(size)])
        for rank in range(size):
            assert_same(dtype, np.frombuffer(got[rank][turn], want[rank].dtype), want[rank])


def reduce_much(comm: hetcoll.Communicator, form: str, count: int) -> tuple[bytes, float, dict[str, int]]:
    x = make(comm.rank, 1, count, DType.FLOAT32)
    comm.allreduce(x, compress=form)
    whole = sum(make(r, 1, count, DType.FLOAT32).astype(np.float64) for r in range(comm.size))
    return x.tobytes(), float(np.abs(x - whole).max() / np.abs(whole).max()), comm.counters()


@parametrize("form", FORMATS, first=1)
def test_large_sums(launch: Launch, form: Format) -> None:
    count = 3_000_001
    size, _, env = LINKS["hosts"]
    said = launch(size, **env).run(reduce_much, form.label, count)
    assert len({data for data, _, _ in said}) == 1
    assert max(error for _, error, _ in said) < {Format.BF16: 2**-6, Format.FP8: 2**-2, Format.INT8: 3 / 127}[form]
    for _, _, counters in said:
        assert counters["compressed_after"] == pytest.approx(form.factor(4) * counters["compressed_before"], rel=1e-4)
    # Half of the buffer leaves each host and comes back; the residuals are those of an interval.
    assert said[0][2]["compressed_before"] == pytest.approx(4 * count, rel=1e-3)
    assert said[0][2]["residual_bytes"] == 4 * count


def test_results_pass_the_check_across_ranks(pool: Pool) -> None:
    said = pool(2, HETCOLL_ISLANDS="0|1", HETCOLL_CHECK="1").run(reduce_much, "int8", 10_001)
    assert len({data for data, _, _ in said}) == 1


def with_odd_values(comm: hetcoll.Communicator, form: str) -> tuple[list[float], list[float]]:
    x = np.ones(96, np.float32)
    if comm.rank == 1:
        x[[40, 41]] = np.inf, np.nan
    comm.allreduce(x, compress=form)
    odd = x[[0, 40, 41, 95]].tolist()
    x[:] = 1
    comm.allreduce(x, compress=form)  # nothing of it is left
    return odd, sorted(set(x.tolist()))


@pytest.mark.parametrize("form", FORMATS)
def test_infinities_and_nans_come_through(pool: Pool, form: Format) -> None:
    for odd, after in pool(2, HETCOLL_ISLANDS="0|1").run(with_odd_values, form.label):
        assert (odd[0], odd[3]) == (2, 2)
        assert np.isnan(odd[2])
        assert np.isinf(odd[1]) if form is Format.BF16 else np.isnan(odd[1])
        assert after == [2]


# Error feedback.


def average_of_many(comm: hetcoll.Communicator, form: str, turns: int, fresh: bool) -> list[float]:
    """How far the mean of the results of many equal calls is from the truth, after 1, 2, 4, ... of them."""
    truth = np.mean([make(r, 0, 5000, DType.FLOAT32).astype(np.float64) for r in range(comm.size)], axis=0)
    mine, x = make(comm.rank, 0, 5000, DType.FLOAT32), np.empty(5000, np.float32)
    total, found = np.zeros(5000), []
    for turn in range(1, turns + 1):
        x[:] = mine
        if fresh:
            comm.reset_feedback()
        comm.allreduce(x, op="avg", compress=form)
        total += x
        if turn & (turn - 1) == 0:
            found.append(float(np.abs(total / turn - truth).max()))
    return found


@pytest.mark.parametrize("form", FORMATS)
def test_nothing_is_lost_in_the_long_run(pool: Pool, form: Format) -> None:
    """With feedback the error of the sum stays that of one call, so that the mean's falls as 1 / calls."""
    ranks = pool(2, HETCOLL_ISLANDS="0|1")
    errors = ranks.run(average_of_many, form.label, 64, False)[0]
    assert all(error <= 2.5 * errors[0] / 2**k + 1e-4 for k, error in enumerate(errors)), errors
    without = ranks.run(average_of_many, form.label, 64, True)[0]
    assert without[-1] == pytest.approx(without[0])  # the same is lost every time
    assert errors[-1] < without[-1] / 8


def reset(comm: hetcoll.Communicator) -> tuple[list[bytes], list[int]]:
    comm.reset_feedback()  # of what other tests used
    x, found, kept = np.empty(1000, np.float32), [], []
    for turn in range(4):
        x[:] = make(comm.rank, 0, 1000, DType.FLOAT32)
        if turn == 2:
            comm.reset_feedback()
            kept.append(comm.counters()["residual_bytes"])
        comm.allreduce(x, compress="int8")
        found.append(x.tobytes())
        kept.append(comm.counters()["residual_bytes"])
    return found, kept


def test_reset_forgets(pool: Pool) -> None:
    for found, kept in pool(2, HETCOLL_ISLANDS="0|1").run(reset):
        assert found[:2] == found[2:]
        assert found[0] != found[1]
        assert kept == [4000, 4000, 0, 4000, 4000]


def use_buffers(comm: hetcoll.Communicator) -> tuple[list[bytes], dict[str, int]]:
    """Two buffers in turn."""
    found, buffers = [], [np.empty(1000, np.float32), np.empty(1000, np.float32)]
    for turn in range(6):
        x = buffers[turn % 2]
        x[:] = make(comm.rank, 0, 1000, DType.FLOAT32)
        comm.allreduce(x, compress="int8")
        found.append(x.tobytes())
    return found, comm.counters()


@pytest.mark.parametrize(("most", "dropped"), [("8K", 0), ("5000", 5), ("1K", 6), ("0", 0)])
def test_memory_for_feedback_is_bounded(launch: Launch, most: str, dropped: int) -> None:
    ranks = launch(2, HETCOLL_ISLANDS="0|1", HETCOLL_COMPRESS_FEEDBACK=most)
    for found, counters in ranks.run(use_buffers):
        assert counters["residuals_dropped"] == dropped
        assert counters["residual_bytes"] == {"8K": 8000, "5000": 4000}.get(most, 0)
        assert (len(set(found)) == 1) == (most != "8K")  # forgotten before it is used again
    assert ("HETCOLL_COMPRESS_FEEDBACK allows" in ranks.output(0)) == (dropped > 0)


# What is asked for, and what cannot be.


def ask_wrongly(comm: hetcoll.Communicator) -> list[str]:
    f32, half = np.ones(8, np.float32), np.ones(8, np.float16)
    calls: list[Callable[[], object]] = [
        lambda: comm.allreduce(f32, compress="int4"),
        lambda: comm.allreduce(f32, compress=8),  # type: ignore[arg-type]
        lambda: comm.allreduce(f32, op="max", compress="int8"),
        lambda: comm.allreduce(np.ones(8, np.int32), compress="int8"),
        lambda: comm.allreduce(np.ones(8), compress="bf16"),
        lambda: comm.allreduce(half, compress="bf16"),
        lambda: comm.reduce_scatter(half, half[:4].copy(), "min", compress="fp8"),
        lambda: comm.split(0, compress="fp16"),
        lambda: comm.explain("allreduce", 8, compress=""),
    ]
    said = []
    for call in calls:
        with pytest.raises(ArgumentError) as caught:
            call()
        said.append(str(caught.value))
    comm.allreduce(f32)
    assert f32.tolist() == [2] * 8
    return said


def test_what_cannot_be_compressed_is_an_error(pool: Pool) -> None:
    for said in pool(2, HETCOLL_ISLANDS="0|1").run(ask_wrongly):
        assert said == [
            "compress: wanted one of none, bf16, fp8, int8, got 'int4'",
            "compress: wanted one of none, bf16, fp8, int8, got 8",
            "compress: int8 was asked for, but only sums and averages are compressed, not max",
            "compress: int8 was asked for, but only float32, float16, bfloat16 are compressed, not int32",
            "compress: bf16 was asked for, but only float32, float16, bfloat16 are compressed, not float64",
            "compress: bf16 was asked for, but float16 is not wider",
            "compress: fp8 was asked for, but only sums and averages are compressed, not min",
            "compress: wanted one of none, bf16, fp8, int8, got 'fp16'",
            "compress: wanted one of none, bf16, fp8, int8, got ''",
        ]


def ask_in_one_host(comm: hetcoll.Communicator) -> str:
    with pytest.raises(ArgumentError) as caught:
        comm.allreduce(np.ones(8, np.float32), compress="int8")
    return f"{caught.value}; {comm.explain('allreduce', 1 << 20, compress='int8').compress}"


def test_one_host_has_no_slow_edges(pool: Pool) -> None:
    why = "all 2 ranks are in one host"
    said = set(pool(2).run(ask_in_one_host))
    assert said == {f"compress: int8 was asked for, but {why}; int8: not compressed: {why}"}


def use_default(comm: hetcoll.Communicator) -> list[tuple[str, str]]:
    """Which calls the communicator's setting holds for, by the counter."""
    n, said = LEAST_BYTES // 4, []
    cases: dict[str, Callable[[], object]] = {
        "large": lambda: comm.allreduce(np.ones(n, np.float32)),
        "again": lambda: comm.allreduce(np.ones(n, np.float32)),
        "average of halves": lambda: comm.allreduce(np.ones(2 * n, np.float16), op="avg"),
        "shares": lambda: comm.reduce_scatter(np.ones(n, np.float32), np.ones(n // 2, np.float32)),
        "small": lambda: comm.allreduce(np.ones(n - 1, np.float32)),
        "small, asked for": lambda: comm.allreduce(np.ones(2, np.float32), compress="fp8"),
        "max": lambda: comm.allreduce(np.ones(n, np.float32), op="max"),
        "int32": lambda: comm.allreduce(np.ones(n, np.int32)),
        "declined": lambda: comm.allreduce(np.ones(n, np.float32), compress="none"),
        "after that": lambda: comm.allreduce(np.ones(n, np.float32)),
        "broadcast": lambda: comm.broadcast(np.ones(n, np.float32)),
    }
    for name, call in cases.items():
        before = comm.counters().get("compressed_before", 0)
        call()
        said.append((name, comm.counters().get("compressed_before", 0) > before))
    return [name for name, compressed in said if compressed]


def test_the_setting_of_a_communicator(pool: Pool) -> None:
    wanted = ["large", "again", "average of halves", "shares", "small, asked for", "after that"]
    assert pool(2, HETCOLL_ISLANDS="0|1", HETCOLL_COMPRESS="int8").run(use_default) == [wanted] * 2


def look_at_parts(comm: hetcoll.Communicator) -> list[str]:
    said = [comm.explain("allreduce", 1 << 20).compress, comm.explain("allreduce", 100).compress]
    said.append(comm.explain("broadcast", 1 << 20).compress)
    said.append(comm.explain("reduce_scatter", 1 << 20, compress="int8").compress)
    for color, form in ((comm.rank // 2, None), (0, None), (0, "bf16"), (0, "none")):
        part = comm.split(color, compress=form)
        assert part is not None
        said.append(part.explain("allreduce", 1 << 20).compress)
        part.close()
    return said


def test_what_is_told_and_parts(pool: Pool) -> None:
    said = pool(4, HETCOLL_ISLANDS="0,1|2,3", HETCOLL_COMPRESS="fp8").run(look_at_parts)
    fp8 = "0.258 of float32's bytes, with error feedback"
    assert said[1] == [
        f"fp8 to and from rank 3: {fp8}",
        "fp8: not compressed: less than 65536 bytes",
        "fp8: not compressed: broadcast is not compressed",
        f"int8 to and from rank 3: {fp8}",
        "fp8: not compressed: all 2 ranks are in one island",
        f"fp8 to and from rank 3: {fp8}",
        "bf16 to and from rank 3: 0.500 of float32's bytes, with error feedback",
        "",
    ]


def choose_another(comm: hetcoll.Communicator) -> str:
    with pytest.raises(ArgumentError) as caught:
        comm.allreduce(np.ones(8, np.float32), compress="int8")
    return str(caught.value)


def test_another_algorithm_was_asked_for(pool: Pool) -> None:
    said = pool(2, HETCOLL_ISLANDS="0|1", HETCOLL_ALGO="ring").run(choose_another)
    assert set(said) == {"compress: allreduce is compressed by direct, but HETCOLL_ALGO asks for ring"}


def test_the_environment() -> None:
    config = read_config({"HETCOLL_COMPRESS": "Int8", "HETCOLL_COMPRESS_FEEDBACK": "1M"})
    assert (config.compress, config.compress_feedback) == (Format.INT8, 1 << 20)
    assert read_config({"HETCOLL_COMPRESS_FEEDBACK": "0"}).compress_feedback == 0
    with pytest.raises(ArgumentError, match=re.escape("HETCOLL_COMPRESS: wanted none, bf16, fp8 or int8, got 'zip'")):
        read_config({"HETCOLL_COMPRESS": "zip"})


def init_with(job: Any, islands: str, form: str) -> str:
    from hetcoll import job as jobs

    with pytest.raises(ArgumentError) as caught:
        jobs.init(islands=islands, compress=form)
    return str(caught.value)


def test_init_checks_the_name(launch: Launch) -> None:
    (said,) = launch(1, join=False).run(init_with, "0", "gzip")
    assert said == "compress: wanted one of none, bf16, fp8, int8, got 'gzip'"


# Failures.


def disagree(comm: hetcoll.Communicator, forms: tuple[str, str, str], count: int) -> None:
    comm.allreduce(np.ones(count, np.float32), compress=forms[comm.rank])
    comm.barrier()


@pytest.mark.parametrize("forms", [("int8", "fp8", "int8"), ("int8", "int8", "none"), ("none", "bf16", "bf16")])
@parametrize("transport", ["auto", "tcp"], first=1)
def test_ranks_that_disagree(launch: Launch, forms: tuple[str, str, str], transport: str) -> None:
    ranks = launch(3, HETCOLL_ISLANDS="0|1|2", HETCOLL_TRANSPORT=transport)
    texts = set()
    for outcome in ranks.outcomes(disagree, forms, 1000):
        assert isinstance(outcome.error, CollectiveMismatchError), f"{outcome.value!r} {outcome.trace}"
        assert outcome.seconds < 5
        texts.add(str(outcome.error))
    (text,) = texts
    assert "compress=" in text


def settings_disagree(comm: hetcoll.Communicator) -> None:
    comm.allreduce(np.ones(1 << 16, np.float32))


def test_settings_that_disagree(launch: Launch) -> None:
    ranks = launch(2, HETCOLL_ISLANDS="0|1", HETCOLL_COMPRESS=("int8", "none"))
    for outcome in ranks.outcomes(settings_disagree):
        assert isinstance(outcome.error, CollectiveMismatchError), f"{outcome.value!r} {outcome.trace}"


def go_on(comm: hetcoll.Communicator) -> None:
    x = np.ones(1 << 18, np.float32)
    comm.allreduce(x, compress="int8")
    for _ in range(1000):
        comm.allreduce(x, compress="int8")


@parametrize("transport", ["auto", "tcp"], first=1)
def test_a_rank_that_dies(launch: Launch, transport: str) -> None:
    ranks = launch(3, HETCOLL_ISLANDS="0|1|2", HETCOLL_TRANSPORT=transport)
    ranks.start(go_on)
    ranks.kill(1)
    for outcome in ranks.finish(only=[0, 2]):
        assert isinstance(outcome.error, PeerLostError), f"{outcome.value!r} {outcome.trace}"
        assert outcome.seconds < 10
