"""Tokens of a mixture of experts on GPUs of both vendors and beside CPUs: any routing, against plain loops; streams."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
from device_checks import Capture
from expert_calls import (
    HIDDEN,
    LINKS,
    MOST,
    PER_RANK,
    SECONDS,
    TOPK,
    Case,
    check,
    check_few,
    check_with,
    few_traffic,
    plain,
    shared,
    shared_few,
)
from gpu_kinds import device_of, has_gpu
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Ranks
from thorough import parametrize

import hetcoll
from hetcoll import (
    ArgumentError,
    DeviceError,
    InitError,
)
from hetcoll.experts import Experts, LowLatencyExperts
from hetcoll.experts.token_blocks import SeenBlocks
from hetcoll.experts.token_kernels import TokenKernels
from hetcoll.experts.window_blocks import WindowBlocks
from hetcoll.gpu.array import DeviceArray
from hetcoll.gpu.mapped import MappedMemory
from hetcoll.gpu.pinned import Pinned, PinnedMemory

Start = Callable[..., Ranks]


def cases(size: int) -> st.SearchStrategy[Case]:
    token = st.lists(st.integers(-1, PER_RANK * size - 1), min_size=TOPK, max_size=TOPK)
    tokens = st.one_of(
        st.lists(token, max_size=MOST),
        st.tuples(token, st.integers(0, MOST)).map(lambda pair: [pair[0]] * pair[1]),  # all to one
    )
    return st.builds(Case, st.lists(tokens, min_size=size, max_size=size), st.integers(0, 1 << 30), st.booleans())


def on_own(
    comm: hetcoll.Communicator, case: Case, dtype: str, fp8: bool, hidden: int = HIDDEN, form: Any = check
) -> int:
    """The case where this rank's tokens are. How many bytes came from GPU to GPU."""
    form(comm, case, dtype, fp8, device_of(comm) if has_gpu(comm) else None, hidden)
    return comm.counters().get("window_direct", 0)


@parametrize(("dtype", "fp8"), [("bfloat16", True), ("float32", False)], first=1)
@parametrize(
    ("kinds", "link"), [("nac", "shm"), ("nan", "late"), ("aca", "shm"), ("cnan", "hosts"), ("aa", "shm")], first=2
)
@pytest.mark.parametrize("form", [check, check_few])
def test_any_routing(whole: Start, kinds: str, link: str, dtype: str, fp8: bool, form: Any) -> None:
    ranks = whole(kinds, **LINKS[link])

    @settings(max_examples=6, deadline=None)
    @given(cases(len(kinds)))
    def run(case: Case) -> None:
        ranks.run(on_own, case, dtype, fp8, HIDDEN, form, timeout=SECONDS)

    run()


def many(comm: hetcoll.Communicator, counts: list[list[int]]) -> None:
    """More tokens than a kernel has threads, then fewer; behind these lies what came before."""
    device = device_of(comm) if has_gpu(comm) else None
    with Experts(comm, PER_RANK * comm.size, HIDDEN, "bfloat16", max(map(max, counts)), TOPK, fp8=True) as experts:
        for turn, each in enumerate(counts):
            random = np.random.default_rng(turn)
            ids = [random.integers(-1, PER_RANK * comm.size, (n, TOPK)).tolist() for n in each]
            check_with(experts, comm, Case(ids, turn, turn != 1), device)
        comm.barrier()


def test_many_tokens_between_hosts(whole: Start) -> None:
    whole("nca", **LINKS["hosts"]).run(many, [[300, 14, 9], [0, 17, 260], [1, 0, 2], [260, 300, 30]])


def calls_of(comm: hetcoll.Communicator) -> None:
    """Of the GPU's a host reads ids, which it checks, and counts, and makes no table of them."""
    device, tokens, k = device_of(comm), 64, 4
    made: dict[str, list[tuple[Any, ...]]] = {"launch": [], "copy": []}

    def noted(name: str) -> Any:
        real = getattr(type(device), name)

        def call(self: Any, *given: Any) -> None:
            made[name].append(given)
            real(self, *given)

        return mock.patch.object(type(device), name, call)

    with Experts(comm, PER_RANK * comm.size, HIDDEN, "float32", tokens, k) as experts, contextlib.ExitStack() as undo:
        random = np.random.default_rng(comm.rank)
        ids = DeviceArray.of(device, random.integers(0, PER_RANK * comm.size, (tokens, k)).astype(np.int32))
        x, weights = DeviceArray(device, (tokens, HIDDEN)), DeviceArray(device, (tokens, k))
        experts.dispatch(x, ids)
        assert blocks_of(experts) is WindowBlocks
        for name in made:
            undo.enter_context(noted(name))
        read = undo.enter_context(mock.patch.object(type(comm._core.gpus), "_read", autospec=True,
                                                    side_effect=type(comm._core.gpus)._read))  # fmt: skip
        received, layout = experts.dispatch(x, ids)
        assert len(made["launch"]) == 5  # number, pack, tell, place, spread
        assert sum(call.args[1].nbytes for call in read.call_args_list) == 4 * tokens * k + 4 * PER_RANK
        experts.combine(received, layout, weights)
        assert len(made["launch"]) == 8  # tell, weigh, sum
        assert read.call_count == 2
        came = layout._route[1].route.came
        assert (
            sum(each[2] for each in made["copy"] if each[2] != 4 * tokens * k) <= 2 * 4 * k * sum(came) + 4 * PER_RANK
        )
        comm.barrier()


@parametrize("kinds", ["nan", "nn", "na", "aa"], first=1)
def test_hosts_make_no_tables_of_gpus_tokens(whole: Start, kinds: str) -> None:
    whole(kinds, **LINKS["hosts"]).run(calls_of, timeout=SECONDS)


def few_on_own(comm: hetcoll.Communicator) -> None:
    few_traffic(comm, device_of(comm) if has_gpu(comm) else None)


def test_only_routed_tokens_travel_between_hosts(whole: Start) -> None:
    for kinds in ("nca", "nan"):  # between GPUs, and with CPUs
        whole(kinds, **LINKS["hosts"]).run(few_on_own, timeout=SECONDS)


def many_dispatches(comm: hetcoll.Communicator) -> None:
    """Streams run ahead of the host's links, and nothing is read or written too early; no graph captures that."""
    device, experts = device_of(comm), shared_few(comm, "float32", False, 2 * HIDDEN)
    kept, stream = [], device.stream()
    for turn in range(7):
        random = np.random.default_rng(turn)
        ids = random.integers(-1, PER_RANK * comm.size, (comm.size, MOST, TOPK))
        wanted = plain(
            Case(ids.tolist(), turn, True), comm.rank, comm.size, PER_RANK, 2 * HIDDEN, np.dtype("f4"), False
        )
        x, mine = DeviceArray.of(device, wanted.x), DeviceArray.of(device, ids[comm.rank].astype(np.int32))
        received, layout = experts.dispatch(x, mine, stream=stream)
        counts, out = DeviceArray(device, PER_RANK, "int32"), None
        device.copy(counts.ptr, layout.counts.ptr, 4 * PER_RANK, stream)
        if turn % 3:
            weights = DeviceArray.of(device, np.ones((MOST, TOPK), np.float32))
            out = [experts.combine(received, layout, weights, stream=stream) for _ in range(turn % 3)]
        kept.append((wanted, ids[comm.rank], x, mine, counts, out))
    device.synchronize(stream)
    for wanted, ids, _, _, counts, out in kept:
        assert counts.get().tolist() == wanted.counts
        for result in out or ():
            times = np.array([sum(each >= 0 for each in row) for row in ids.tolist()], np.float32)[:, None]
            assert np.allclose(result.get(), times * wanted.x, rtol=1e-5)
    device.activate()
    with (
        pytest.raises(ArgumentError, match="host may wait, since not all ranks are GPUs of one host"),
        Capture(device, stream) as captured,
    ):
        experts.dispatch(kept[0][2], kept[0][3], stream=stream)
    captured.close()
    comm.barrier()
    device.destroy_stream(stream)


def no_memory(comm: hetcoll.Communicator) -> None:
    x, ids = DeviceArray(device_of(comm), (4, 8)), DeviceArray(device_of(comm), (4, 1), "int32")
    lacks = mock.patch.object(PinnedMemory, "__init__", side_effect=InitError("none"))
    with (
        LowLatencyExperts(comm, comm.size, 8, "float32", 4, 1) as experts,
        lacks if comm.rank == 1 else contextlib.nullcontext(),
        pytest.raises(InitError, match="memory for experts' tokens on rank 1: none"),
    ):
        experts.dispatch(x, ids)


@parametrize("kinds", ["nan", "nana", "nn", "aa"], first=1)
def test_dispatches_between_hosts_run_ahead(whole: Start, kinds: str) -> None:
    whole(kinds, **LINKS["hosts"]).run(many_dispatches, timeout=SECONDS)
    whole(kinds, **LINKS["hosts"]).run(no_memory)


class Little(NamedTuple):
    """What the host's memory has for tokens of so many elements: bytes that may be pinned; whether rank 1's driver
    refuses them. In how many rounds as many tokens go as may be; 0: otherwise, as between hosts."""

    hidden: int
    nbytes: int
    refused: bool
    rounds: int


def blocks_of(experts: Any) -> type[object]:
    """How tokens travel."""
    return type(experts._way._kernels._blocks)


def on_little(comm: hetcoll.Communicator, case: Case, little: Little) -> int:
    """Both forms, the low-latency one first. How many bytes came from GPU to GPU."""
    rows = max(map(len, case.ids))
    with contextlib.ExitStack() as undo:
        undo.enter_context(mock.patch.object(Pinned, "windows", little.nbytes))
        if little.refused and comm.rank == 1:
            undo.enter_context(mock.patch.object(MappedMemory, "__init__", side_effect=DeviceError("no")))
        on_own(comm, case, "bfloat16", True, little.hidden, check_few)
        offers = undo.enter_context(
            mock.patch.object(TokenKernels, "_offer", autospec=True, side_effect=TokenKernels._offer)
        )
        on_own(comm, case, "bfloat16", True, little.hidden, check)
    way, few = (form(comm, "bfloat16", True, little.hidden) for form in (shared, shared_few))
    assert few._few.direct is (blocks_of(way) is SeenBlocks) is (little.rounds > 0)
    if little.rounds > 0:
        each = -(-MOST // little.rounds)
        assert few._few._kernels.rounds == way._way._kernels.rounds == little.rounds
        assert offers.call_count == max(1, -(-rows // each))
    return comm.counters()["window_direct"]


ROUNDS, NONE = Little(3 * HIDDEN, 9600, refused=False, rounds=5), Little(5 * HIDDEN, 0, refused=False, rounds=0)


@pytest.mark.parametrize("little", [ROUNDS, NONE, Little(7 * HIDDEN, 20000, refused=True, rounds=0)])
def test_little_memory_that_all_gpus_have_mapped(whole: Start, little: Little) -> None:
    ranks = whole("nan", **LINKS["late"])

    @settings(max_examples=3, deadline=None)
    @given(cases(3))
    def run(case: Case) -> None:
        ranks.run(on_little, case, little, timeout=SECONDS)

    run()


@parametrize(
    ("dtype", "fp8", "hidden"),
    [("float16", True, 128), ("bfloat16", False, 5), ("float16", False, 9), ("float32", True, 256)],
    first=2,
)
def test_other_types_and_lengths(whole: Start, dtype: str, fp8: bool, hidden: int) -> None:
    ids = [[[0, 3, 1], [5, 5, -1]], [], [[-1, -1, -1], [2, 0, 4], [4, 2, 0]]]
    for seed in range(2):
        whole("nac").run(on_own, Case(ids, seed, True), dtype, fp8, hidden, timeout=SECONDS)
        whole("nac").run(on_own, Case(ids, seed, True), dtype, fp8, hidden, check_few, timeout=SECONDS)


def test_gpus_of_one_vendor_put_into_each_others_windows(whole: Start) -> None:
    ids = [[[0, 3, 1], [5, 5, -1]], [[2, 0, -1]], [[-1, 1, 3]]]
    ranks, hidden = whole("nan", **LINKS["late"]), NONE.hidden
    before, after = (ranks.run(on_little, Case(ids, 0, True), NONE, timeout=SECONDS) for _ in range(2))
    one = hidden + 4 * hidden // 128 + 2 * hidden  # a token, and its sum
    assert [b - a for a, b in zip(before, after, strict=True)] == [one, 0, one]


def layered(comm: hetcoll.Communicator, hidden: int, nbytes: int) -> type[object]:
    """Dispatches of several layers, each with other tokens, combined in the other order and twice. How they travel."""
    device, experts, kind = device_of(comm), shared(comm, "float32", False, hidden), np.dtype(np.float32)
    kept = []
    for layer in range(5):
        random = np.random.default_rng((layer, 7))
        counts = random.integers(0, MOST + 1, comm.size)
        ids = [random.integers(-1, PER_RANK * comm.size, (n, TOPK)).tolist() for n in counts]
        wanted = plain(Case(ids, layer, True), comm.rank, comm.size, PER_RANK, hidden, kind, False)
        named = np.array(ids[comm.rank], np.int32 if layer % 2 else np.int64).reshape(-1, TOPK)
        with mock.patch.object(Pinned, "windows", nbytes):
            received, layout = experts.dispatch(DeviceArray.of(device, wanted.x), DeviceArray.of(device, named))
        assert received.get().tobytes() == wanted.received.tobytes()
        kept.append((wanted, layout))
    for wanted, layout in [*kept[::-1], *kept]:
        assert wanted.weights is not None
        out, weights = DeviceArray.of(device, wanted.out), DeviceArray.of(device, wanted.weights)
        assert experts.combine(out, layout, weights).get().tobytes() == wanted.result.tobytes()
    return blocks_of(experts)


@parametrize(
    ("kinds", "hidden", "nbytes", "how"),
    [
        ("nan", 2 * HIDDEN, 0, WindowBlocks),
        ("nan", 4 * HIDDEN, 1 << 16, SeenBlocks),
        ("nn", HIDDEN, 0, SeenBlocks),
        ("aaa", HIDDEN, 0, SeenBlocks),
    ],
    first=2,
)
def test_layouts_stay(whole: Start, kinds: str, hidden: int, nbytes: int, how: type[object]) -> None:
    assert set(whole(kinds, **LINKS["late"]).run(layered, hidden, nbytes)) == {how}


def many_of_a_token(comm: hetcoll.Communicator, topk: int, mapped: bool) -> None:
    """More experts of a token than a thread reads at a time, of which some are named again. What is pinned for tokens
    comes back."""
    device, random, kind = device_of(comm), np.random.default_rng(topk), np.dtype(np.float32)
    case = Case(random.integers(-1, PER_RANK * comm.size, (comm.size, 4, topk)).tolist(), topk, True)
    wanted = plain(case, comm.rank, comm.size, PER_RANK, HIDDEN, kind, False)
    with Experts(comm, PER_RANK * comm.size, HIDDEN, "float32", 4, topk) as experts:
        ids = DeviceArray.of(device, np.array(case.ids[comm.rank], np.int32))
        received, layout = experts.dispatch(DeviceArray.of(device, wanted.x), ids)
        assert received.get().tobytes() == wanted.received.tobytes()
        assert wanted.weights is not None
        out, weights = DeviceArray.of(device, wanted.out), DeviceArray.of(device, wanted.weights)
        assert experts.combine(out, layout, weights).get().tobytes() == wanted.result.tobytes()
        comm.barrier()
        pinned = comm.memory()["pinned"]
        host: Any = experts._way._kernels._blocks._host  # type: ignore[union-attr]
    assert (comm.memory()["pinned"] < pinned) is (host is not None) is mapped


@pytest.mark.parametrize(("kinds", "topk"), [("nn", 8), ("nan", 19)])
def test_many_experts_of_a_token(whole: Start, kinds: str, topk: int) -> None:
    whole(kinds, **LINKS["late"]).run(many_of_a_token, topk, len(set(kinds)) > 1, timeout=SECONDS)
