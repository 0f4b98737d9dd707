"""Dispatch and combine against plain loops over tokens: what each rank's experts get, and what comes back."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import hetcoll
from hetcoll.experts import Experts, LowLatencyExperts
from hetcoll.gpu.array import DeviceArray
from hetcoll.vendors.devices.base import Device

Array = np.ndarray[Any, np.dtype[Any]]
MOST, HIDDEN, TOPK = 9, 128, 3  # of the experts that tests share
PER_RANK = 2
SECONDS = 90.0  # kernels are compiled
LINKS: dict[str, dict[str, Any]] = {
    "shm": {},
    "late": {"jitter": "1:1000"},
    "hosts": {"HETCOLL_HOST_ID": ("a", "b", "a", "b"), "jitter": "2:300"},
}


class Case(NamedTuple):
    """One dispatch and combine: every rank's ids, and what the tokens and weights are made from."""

    ids: list[list[list[int]]]
    seed: int
    weighted: bool


class Plain(NamedTuple):
    """What should come of it on one rank."""

    x: Array
    weights: Array | None
    received: Array
    counts: list[int]
    out: Array
    result: Array


def eighths(x: Array) -> Array:
    """What travels as 8-bit floats: each 128 elements of a row by a scale of their own."""
    groups = x.astype(np.float32).reshape(-1, 128)
    most = np.maximum(np.abs(groups).max(axis=1, keepdims=True), np.float32(2.0**-100))
    codes = np.clip(groups * (np.float32(448) / most), -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return (codes.astype(np.float32) * (most / np.float32(448))).reshape(x.shape).astype(x.dtype)


def tokens_of(case: Case, rank: int, hidden: int, dtype: Any) -> tuple[Array, Array | None]:
    """A rank's tokens, and the weights of their experts."""
    random, count = np.random.default_rng((case.seed, rank)), len(case.ids[rank])
    x = (random.standard_normal((count, hidden)) * 8.0 ** random.integers(-3, 3, (count, 1))).astype(dtype)
    weights = random.random((count, len(case.ids[rank][0]) if count else TOPK), np.float32)
    return x, weights if case.weighted else None


def plain(
    case: Case, rank: int, size: int, per_rank: int, hidden: int, dtype: Any, fp8: bool, *, alike: bool = False
) -> Plain:
    """By loops. Expert `e` multiplies by ``e + 1``, or by 1 if all are `alike`."""
    everybody = [tokens_of(case, each, hidden, dtype) for each in range(size)]
    seen = [eighths(x) if fp8 else x for x, _ in everybody]

    def made(token: Array, expert: int) -> Array:
        return token * np.asarray(1 if alike else expert + 1, dtype)

    first, received, counts, out = rank * per_rank, [], [], []
    for expert in range(first, first + per_rank):
        counts.append(0)
        for source in range(size):
            for token, ids in zip(seen[source], case.ids[source], strict=True):
                if expert in ids:
                    received.append(token)
                    out.append(made(token, expert))
                    counts[-1] += 1
    x, weights = everybody[rank]
    result = np.zeros_like(x)
    for t, ids in enumerate(case.ids[rank]):
        total = np.zeros(hidden, np.float32)
        for peer in range(size):
            named = [(slot, expert) for slot, expert in enumerate(ids) if expert >= 0 and expert // per_rank == peer]
            part = np.zeros(hidden, np.float32) if named else None
            for slot, expert in named:
                weight = np.float32(1) if weights is None else weights[t, slot]
                part = part + weight * made(seen[rank][t], expert).astype(np.float32)
            if part is not None:
                total = total + part.astype(dtype).astype(np.float32)
        result[t] = total.astype(dtype)
    none = np.empty((0, hidden), dtype)
    return Plain(x, weights, np.array(received) if received else none, counts, np.array(out) if out else none, result)


def shared(comm: hetcoll.Communicator, dtype: str, fp8: bool, hidden: int = HIDDEN) -> Experts:
    """Experts that stay for later calls of a rank."""
    kept: dict[Any, Experts] = vars(comm).setdefault("kept for test_experts", {})
    if (dtype, fp8, hidden) not in kept:
        kept[dtype, fp8, hidden] = Experts(comm, PER_RANK * comm.size, hidden, dtype, MOST, TOPK, fp8=fp8)
    return kept[dtype, fp8, hidden]


def shared_few(comm: hetcoll.Communicator, dtype: str, fp8: bool, hidden: int = HIDDEN) -> LowLatencyExperts:
    """The same of the low-latency form."""
    kept: dict[Any, LowLatencyExperts] = vars(comm).setdefault("kept for test_experts, of few tokens", {})
    if (dtype, fp8, hidden) not in kept:
        kept[dtype, fp8, hidden] = LowLatencyExperts(comm, PER_RANK * comm.size, hidden, dtype, MOST, TOPK, fp8=fp8)
    return kept[dtype, fp8, hidden]


def few_traffic(comm: hetcoll.Communicator, device: Device | None = None) -> None:
    """Of few tokens nothing travels but ids, rows of those that are routed, and their sums, each once to a rank."""
    size, most, hidden, k = comm.size, 16, 256, 2
    ids = np.random.default_rng(7).integers(-1, PER_RANK * size, (size, most, k)).astype(np.int32)
    ids[0] = -1  # of which no sums come back
    to = [(ids // PER_RANK == rank).any(axis=2).sum(axis=1) for rank in range(size)]  # [rank][source]
    with LowLatencyExperts(comm, PER_RANK * size, hidden, "bfloat16", most, k, fp8=True) as experts:
        x = here(np.ones((most, hidden), ml_dtypes.bfloat16), device)
        mine = here(ids[comm.rank], device)
        for turn in range(2):
            comm.barrier()
            before = comm.counters().get("window_bytes", 0)
            comm.barrier()
            received, layout = experts.dispatch(x, mine)
            experts.combine(received, layout)
            if device is not None:
                device.synchronize()
            comm.barrier()
            if turn == 0:
                continue  # it opens the windows
            others = [rank for rank in range(size) if rank != comm.rank]
            wanted = sum(4 * most * k + 16 + (hidden + hidden // 32 + 8) * int(to[comm.rank][each]) for each in others)
            wanted += sum(2 * hidden * int(to[each][comm.rank]) for each in others)
            assert comm.counters()["window_bytes"] - before == wanted
            comm.barrier()


def here(values: Array, device: Device | None) -> Any:
    return values if device is None else DeviceArray.of(device, values)


def there(array: Any) -> Array:
    found: Array = array.get() if isinstance(array, DeviceArray) else array
    return found


def check(
    comm: hetcoll.Communicator, case: Case, dtype: str, fp8: bool, device: Device | None = None, hidden: int = HIDDEN
) -> None:
    """One case on this rank, whose tokens are on the GPU if there is one."""
    check_with(shared(comm, dtype, fp8, hidden), comm, case, device)


def check_with(experts: Experts, comm: hetcoll.Communicator, case: Case, device: Device | None = None) -> None:
    """The same by these experts."""
    kind = np.dtype(getattr(ml_dtypes, experts.dtype.label, experts.dtype.label))
    wanted = plain(case, comm.rank, comm.size, PER_RANK, experts.hidden, kind, experts.fp8)
    ids = np.array(case.ids[comm.rank], np.int32 if case.seed % 2 else np.int64).reshape(-1, TOPK)
    received, layout = experts.dispatch(here(wanted.x, device), here(ids, device))
    assert layout.num_tokens_per_expert == wanted.counts
    assert there(layout.counts).tolist() == wanted.counts
    assert there(received).dtype == kind
    assert there(received).tobytes() == wanted.received.tobytes(), "other tokens came"
    out = here(wanted.out, device)
    weights = None if wanted.weights is None else here(wanted.weights, device)
    for _ in range(1 + case.seed % 2):  # a layout may be used again
        result = there(experts.combine(out, layout, weights))
        assert result.shape == wanted.x.shape
        assert result.tobytes() == wanted.result.tobytes(), "another sum"


def in_rooms(array: Array, counts: list[int], room: int) -> Array:
    """By expert, each with so much room."""
    found = np.zeros((len(counts), room, array.shape[1]), array.dtype)
    for expert, count in enumerate(counts):
        first = sum(counts[:expert])
        found[expert, :count] = array[first : first + count]
    return found


def check_few(
    comm: hetcoll.Communicator, case: Case, dtype: str, fp8: bool, device: Device | None = None, hidden: int = HIDDEN
) -> None:
    """The same of the low-latency form."""
    check_with_few(shared_few(comm, dtype, fp8, hidden), comm, case, device)


def check_with_few(
    experts: LowLatencyExperts, comm: hetcoll.Communicator, case: Case, device: Device | None = None
) -> None:
    """The same by these experts."""
    hidden, kind = experts.hidden, np.dtype(getattr(ml_dtypes, experts.dtype.label, experts.dtype.label))
    wanted = plain(case, comm.rank, comm.size, PER_RANK, hidden, kind, experts.fp8)
    ids = np.array(case.ids[comm.rank], np.int32).reshape(-1, TOPK)
    for _ in range(1 + case.seed // 2 % 3):  # several dispatches, of which the last is combined
        received, layout = experts.dispatch(here(wanted.x, device), here(ids, device))
    counts, got = there(layout.counts).tolist(), there(received)
    assert counts == wanted.counts
    assert got.shape == (PER_RANK, comm.size * MOST, hidden)
    rows = [got[expert, :count] for expert, count in enumerate(counts)]
    assert np.concatenate(rows).tobytes() == wanted.received.tobytes(), "other tokens came"
    out = here(in_rooms(wanted.out, counts, comm.size * MOST), device)
    weights = None if wanted.weights is None else here(wanted.weights, device)
    for turn in range(1 + case.seed % 2):
        into = here(np.zeros_like(wanted.x), device) if turn else None
        result = there(experts.combine(out, layout, weights, out=into))
        assert result.shape == wanted.x.shape
        assert result.tobytes() == wanted.result.tobytes(), "another sum"
