"""Compressed edges: plans against the checker, the engine against plans and formats, error feedback, failures."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from codec_reference import FORMATS, KINDS, Reference
from elements import NUMPY, assert_same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutants import edited, field_mutants, passes, structural_mutants
from ranks import Ranks
from thorough import examples, parametrize

import hetcoll
from hetcoll import ArgumentError, CollectiveMismatchError, PeerLostError
from hetcoll.plan.algorithms import ALGORITHMS, Hosts, find
from hetcoll.plan.algorithms.hosts import among_hosts
from hetcoll.plan.ir import Op, Plan
from hetcoll.plan.simulator import PlanError, check
from hetcoll.types import Collective, DType, Format

Pool = Callable[..., Ranks]
Launch = Callable[..., Ranks]
Array = np.ndarray[Any, np.dtype[Any]]

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
@settings(max_examples=examples(5), suppress_health_check=[HealthCheck.function_scoped_fixture])
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


PERIOD = 65521  # a prime, after which long arrays repeat themselves: random numbers took most of the time


def reduce_much(comm: hetcoll.Communicator, form: str, count: int) -> tuple[bytes, float, dict[str, int]]:
    """A digest of the result, how far it is from the truth, and what was counted."""
    parts = [make(r, 1, min(count, PERIOD), DType.FLOAT32) for r in range(comm.size)]
    x = np.resize(parts[comm.rank], count)
    comm.allreduce(x, compress=form)
    whole = np.sum(parts, axis=0, dtype=np.float64)
    wrong = np.abs(x - np.resize(whole, count)).max() / np.abs(whole).max()
    return hashlib.sha256(x).digest(), float(wrong), comm.counters()


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
