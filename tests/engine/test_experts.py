"""Tokens of a mixture of experts: dispatched and combined by any routing, against plain loops; 8-bit floats; errors."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from expert_calls import MOST, PER_RANK, TOPK, Case, check, check_few, eighths, few_traffic
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Ranks
from thorough import examples, parametrize

import hetcoll
from hetcoll import ArgumentError, BufferTypeError, ClosedError, CollectiveMismatchError, PeerLostError
from hetcoll.calls.buffers import read_buffer
from hetcoll.experts import Experts, LowLatencyExperts
from hetcoll.experts.few import HostFew
from hetcoll.experts.rows import HostRows, Wire, bytes_of, decode, encode, narrow, widen
from hetcoll.types import DType

Pool = Callable[..., Ranks]
Start = Callable[..., Ranks]


def cases(size: int) -> st.SearchStrategy[Case]:
    """Few tokens or many on each rank, to any experts: also to none, to one of all, to one twice."""
    some = st.integers(-1, PER_RANK * size - 1)
    token = st.one_of(st.lists(some, min_size=TOPK, max_size=TOPK), some.map(lambda expert: [expert] * TOPK))
    tokens = st.one_of(
        st.lists(token, max_size=MOST),
        st.tuples(token, st.integers(0, MOST)).map(lambda pair: [pair[0]] * pair[1]),  # all to one
    )
    return st.builds(Case, st.lists(tokens, min_size=size, max_size=size), st.integers(0, 1 << 30), st.booleans())


@pytest.mark.parametrize("form", [check, check_few])
@parametrize(("dtype", "fp8"), [("bfloat16", True), ("float32", False), ("bfloat16", False)], first=1)
@parametrize(
    ("size", "link"),
    [(3, {}), (2, {"HETCOLL_TRANSPORT": "tcp"}), (1, {}), (4, {"HETCOLL_HOST_ID": ("a", "a", "b", "b")})],
    first=2,
)
def test_any_routing(
    pool: Pool, size: int, link: dict[str, Any], dtype: str, fp8: bool, form: Callable[..., None]
) -> None:
    ranks = pool(size, **link)

    @settings(max_examples=examples(6), deadline=None)
    @given(cases(size))
    def run(case: Case) -> None:
        ranks.run(form, case, dtype, fp8)

    run()


@parametrize(
    ("dtype", "fp8", "hidden"),
    [("float16", True, 128), ("bfloat16", False, 5), ("float16", False, 9), ("float32", True, 256)],
    first=2,
)
def test_other_types_and_lengths(pool: Pool, dtype: str, fp8: bool, hidden: int) -> None:
    ids = [[[0, 3, 1], [5, 5, -1]], [], [[-1, -1, -1], [2, 0, 4], [4, 2, 0]]]
    for seed in range(2):
        pool(3).run(check, Case(ids, seed, True), dtype, fp8, None, hidden)
        pool(3).run(check_few, Case(ids, seed, True), dtype, fp8, None, hidden)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16])
def test_rows_as_eighths(dtype: DType) -> None:
    """The codec against ml_dtypes', over all magnitudes; what is not finite spoils its own group alone."""
    kind, random = np.dtype(getattr(ml_dtypes, dtype.label, dtype.label)), np.random.default_rng(1)
    with np.errstate(over="ignore"):
        x = (random.standard_normal((64, 512)) * 2.0 ** random.integers(-140, 127, (64, 512))).astype(kind)
    x[:8] = (random.standard_normal((8, 512)) * 5).astype(kind)
    x[8], x[9, :128], x[9, 128:] = 0, -0.0, 1
    x[~np.isfinite(x.astype(np.float32))] = 0
    codes = encode(widen(x.view(np.uint8), dtype))
    assert codes.shape == (64, 512 + 16)
    got = narrow(decode(codes, 512), dtype).view(kind)
    assert (got.view(np.uint8) == eighths(x).view(np.uint8)).all()
    x[1, 5], x[2, 300], x[3, 511] = np.inf, np.nan, -np.inf
    got = narrow(decode(encode(widen(x.view(np.uint8), dtype)), 512), dtype).view(kind).astype(np.float32)
    for row, group in ((1, 0), (2, 2), (3, 3)):
        bad = np.isnan(got[row].reshape(4, 128))
        assert bad[group].all()
        assert bad.sum() == 128


def traffic(comm: hetcoll.Communicator) -> None:
    """Nothing travels but the routed tokens, each once to a rank, and their sums; of ids and weights as many rows."""
    size, most, hidden, k = comm.size, 64, 256, 4
    with Experts(comm, 4 * size, hidden, "float32", most, k) as experts:
        ids = np.random.default_rng(comm.rank).integers(-1, 4 * size, (most, k))
        x = np.ones((most, hidden), np.float32)
        received, layout = experts.dispatch(x, ids)  # which opens windows, too
        experts.combine(received, layout)
        comm.barrier()
        before = comm.counters()
        comm.barrier()
        received, layout = experts.dispatch(x, ids)
        experts.combine(received, layout, np.ones((most, k), np.float32))
        comm.barrier()
        found = comm.counters()
        rows = sum(
            (np.random.default_rng(rank).integers(-1, 4 * size, (most, k)) // 4 == to).any(axis=1).sum()
            for rank in range(size) for to in range(size) if rank != to and to == comm.rank
        ) + sum(
            (ids // 4 == to).any(axis=1).sum() for to in range(size) if to != comm.rank
        )  # fmt: skip
        came = sum(
            int((np.random.default_rng(rank).integers(-1, 4 * size, (most, k)) // 4 == comm.rank).any(axis=1).sum())
            for rank in range(size) if rank != comm.rank
        )  # fmt: skip
        headers = 2 * (size - 1) * 16
        assert found["window_bytes"] - before["window_bytes"] == rows * hidden * 4 + 2 * came * k * 4 + headers
        comm.barrier()


def test_only_routed_tokens_travel(pool: Pool) -> None:
    pool(3).run(traffic)
    pool(3).run(few_traffic)


def mistakes(comm: hetcoll.Communicator) -> None:
    """All of them before anything is sent: the calls after them are right."""
    for words, wanted in (
        ({"num_experts": 2 * comm.size + 1}, "num_experts: wanted a multiple"),
        ({"topk": 0}, "topk: wanted 1 or more, got 0"),
        ({"max_tokens": 0}, "max_tokens: wanted 1 to"),
        ({"hidden": 100, "fp8": True}, "hidden: wanted a multiple of 128 with fp8, got 100"),
        ({"dtype": "float64"}, "dtype: wanted float32, float16, bfloat16, got 'float64'"),
        ({"dtype": 1.5}, "dtype: wanted float32, float16, bfloat16, got 1.5"),
        ({"dtype": [1]}, r"dtype: wanted float32, float16, bfloat16, got \[1\]"),
    ):
        sizes: dict[str, Any] = {"num_experts": 2 * comm.size, "hidden": 128, "dtype": np.float32, "max_tokens": 4}
        with pytest.raises(ArgumentError, match=wanted):
            Experts(comm, **(sizes | {"topk": 2} | words))
    with pytest.raises(ArgumentError, match="Experts: wanted the same on all ranks"):
        Experts(comm, 2 * comm.size, 128, np.float32, 4, 2 + comm.rank)
    experts = Experts(comm, np.int64(2 * comm.size), np.int32(4), np.dtype("float32"), np.int64(4), np.uint8(2))
    few = LowLatencyExperts(comm, 2 * comm.size, 4, np.float32, 4, 2)
    x, ids = np.ones((3, 4), np.float32), np.zeros((3, 2), np.int32)
    for arguments, wanted in (
        ((np.ones((5, 4), np.float32), np.zeros((5, 2), np.int32)), "x: wanted at most 4 tokens, got 5"),
        ((np.ones((3, 5), np.float32), ids), r"x: wanted the shape \(any, 4\), got \(3, 5\)"),
        ((x, np.zeros((3, 3), np.int32)), r"topk_ids: wanted the shape \(3, 2\), got \(3, 3\)"),
        ((x, np.full((3, 2), 2 * comm.size)), "topk_ids: wanted experts in .* or -1, got .* of token 0"),
        ((x, np.full((3, 2), -2)), "topk_ids: wanted experts in .* or -1, got -2 of token 0"),
    ):
        with pytest.raises(ArgumentError, match=wanted):
            experts.dispatch(*arguments)
    for arguments, wanted in (
        ((x.astype(np.float16), ids), "x: wanted float32, got float16"),
        ((x, ids.astype(np.float32)), "topk_ids: wanted int32 or int64, got float32"),
        ((x.tolist(), ids), "x: wanted an array with a shape, got list"),
    ):
        with pytest.raises(BufferTypeError, match=wanted):
            experts.dispatch(*arguments)
    for kind in (experts, few):
        for timeout in (0, -1, "a"):  # after which the calls below are as good as before
            with pytest.raises(ArgumentError, match="timeout: wanted seconds above 0, got"):
                kind.dispatch(x, ids, timeout=timeout)
        with comm.group(), pytest.raises(ArgumentError, match="wanted sends and receives only, got experts"):
            kind.dispatch(x, ids)
    received, layout = experts.dispatch(x, ids)
    into, place = few.dispatch(x, ids)
    for combine, made in ((experts.combine, received), (few.combine, into)):
        with pytest.raises(ArgumentError, match=r"layout: wanted .* dispatch, got another"):
            combine(made, None)
    with pytest.raises(ArgumentError, match="timeout: wanted seconds above 0, got 0"):
        experts.combine(received, layout, timeout=0)
    assert (few.combine(into, place) == 2).all()
    with pytest.raises(ArgumentError, match=r"expert_out: wanted the shape"):
        experts.combine(np.ones((1, 4), np.float32), layout)
    with pytest.raises(ArgumentError, match=r"topk_weights: wanted the shape \(3, 2\), got \(2, 2\)"):
        experts.combine(received, layout, np.ones((2, 2), np.float32))
    with pytest.raises(BufferTypeError, match="topk_weights: wanted float32, got float64"):
        experts.combine(received, layout, np.ones((3, 2)))
    assert (experts.combine(received, layout) == 2).all()
    comm.barrier()
    experts.close()
    few.close()
    for call in (
        lambda: experts.dispatch(x, ids), lambda: experts.combine(received, layout), lambda: few.combine(into, place),
    ):  # fmt: skip
        with pytest.raises(ClosedError):
            call()


def test_mistakes_are_refused_before_anything_is_sent(pool: Pool) -> None:
    pool(2).run(mistakes)


def mistakes_of_one_rank(comm: hetcoll.Communicator) -> None:
    """The others have not heard of a call that was refused here: so nothing of it is among what they count."""
    few = LowLatencyExperts(comm, comm.size, 4, "float32", 2, 1)
    x, ids = np.ones((1, 4), np.float32), np.zeros((1, 1), np.int32)
    received, layout = few.dispatch(x, ids)
    if comm.rank == 0:
        for words in ({"timeout": -1}, {"timeout": 0.0}):
            with pytest.raises(ArgumentError, match="timeout: wanted seconds above 0"):
                few.dispatch(2 * x, ids, **words)
            with pytest.raises(ArgumentError, match="timeout: wanted seconds above 0"):
                few.combine(received, layout, **words)
        with comm.group():
            with pytest.raises(ArgumentError, match="wanted sends and receives only, got experts"):
                few.dispatch(2 * x, ids)
            with pytest.raises(ArgumentError, match="wanted sends and receives only, got experts"):
                few.combine(received, layout)
        with pytest.raises(ArgumentError, match="out: wanted memory apart from expert_out"):
            few.combine(received, layout, out=received[0, :1])
    assert (few.combine(received, layout) == 1).all()
    comm.barrier()
    assert isinstance(few._few, HostFew)
    other = 1 - comm.rank
    few._few._settle(None)
    comm.barrier()
    assert few._few._window.signal(other) == 2, "puts of a dispatch and a combine"
    few.close()


def test_what_one_rank_is_refused_no_other_counts(pool: Pool) -> None:
    pool(2).run(mistakes_of_one_rank)


def other_layouts(comm: hetcoll.Communicator) -> None:
    """Those of other experts, which may have had more tokens, or others of them."""
    x, ids = np.ones((3, 4), np.float32), np.zeros((3, 1), np.int32)
    forms: tuple[Any, ...] = (Experts, LowLatencyExperts)
    for kind in forms:
        large, small = kind(comm, comm.size, 4, "float32", 3, 1), kind(comm, comm.size, 4, "float32", 1, 1)
        of_large, of_small = large.dispatch(x, ids), small.dispatch(x[:1], ids[:1])
        with pytest.raises(ArgumentError, match="layout: wanted "):
            small.combine(of_small[0], of_large[1])
        assert (small.combine(*of_small) == 1).all()
        assert (large.combine(*of_large) == 1).all()
        comm.barrier()
        large.close()
        small.close()


def test_layouts_of_other_experts_are_refused(pool: Pool) -> None:
    pool(2).run(other_layouts)


def test_who_puts_tokens_keeps_them() -> None:
    """Also where the call has given up, and the program has no more use for them."""
    x = np.ones((2, 4), np.float32)
    alive = weakref.ref(x)
    packed = HostRows(Wire(4, DType.FLOAT32, False), 2).pack(read_buffer(x, "x", writable=False), 2)
    del x
    gc.collect()
    assert alive() is not None
    assert np.array_equal(bytes_of(packed).view(np.float32), np.ones(8, np.float32))


def other_calls(comm: hetcoll.Communicator) -> str:
    experts = Experts(comm, comm.size, 4, "float32", 2, 1)
    x, ids = np.ones((1, 4), np.float32), np.zeros((1, 1), np.int32)
    received, layout = experts.dispatch(x, ids)
    with pytest.raises(CollectiveMismatchError) as caught:
        experts.dispatch(x, ids) if comm.rank else experts.combine(received, layout)
    return str(caught.value)


def test_ranks_in_different_calls_hear_of_it(launch: Start) -> None:
    for text in launch(2).run(other_calls):
        assert "rank 0 called combine of layout 0, and rank 1 called dispatch of layout 1" in text


def die(comm: hetcoll.Communicator) -> None:
    experts = Experts(comm, comm.size, 4, "float32", 2, 1)
    x, ids = np.ones((1, 4), np.float32), np.zeros((1, 1), np.int32)
    experts.dispatch(x, ids)
    if comm.rank == 1:
        os._exit(3)
    with pytest.raises(PeerLostError) as caught:
        experts.dispatch(x, ids)
    assert caught.value.rank == 1
    with pytest.raises((PeerLostError, ClosedError)):
        experts.dispatch(x, ids)


def test_a_rank_dies(launch: Start) -> None:
    ranks = launch(3)
    ranks.start(die)
    found = ranks.finish()
    ranks.kill(1)
    assert found[1].died == 3
    assert [outcome.problem() for outcome in (found[0], found[2])] == ["", ""]
