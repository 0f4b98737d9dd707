"""``reproducible=True``: the bits of NumPy's sum over ranks in their order, whatever carries the data and how."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from cases import variant
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ordered_sums import in_rank_order, same, terms
from ranks import Ranks
from thorough import parametrize

import hetcoll
from hetcoll.config.env import Config, read_config
from hetcoll.errors import ArgumentError, InitError
from hetcoll.plan.algorithms import ALGORITHMS
from hetcoll.types import Collective, Format

DTYPES = ["float64", "float32", "float16", "bfloat16", "float8_e5m2", "complex64", "int32"]
NAMES = [None, *(name for name, entry in ALGORITHMS[Collective.ALLREDUCE].items() if entry.ordered)]


def sums(comm: hetcoll.Communicator, dtype: str, count: int, seed: int, cuts: list[int], config: dict[str, Any]) -> int:
    """All that reduces, in whole and in buckets, in place and not. Gives a hash of all results of rank 0."""
    ordered = variant(comm, **config)
    rows, results = terms(comm.size, count, dtype, seed), []
    mine = rows[comm.rank]
    for op in ["prod"] if seed % 3 == 0 else ["sum"] if dtype == "int32" or "complex" in dtype else ["sum", "avg"]:
        want = in_rank_order(rows, op)
        got = mine.copy()
        for a, b in pairwise([0, *cuts, count]):
            ordered.allreduce(got[a:b], op=op)
        same(got, want)
        apart = np.empty_like(mine)
        ordered.allreduce(mine, apart, op=op)
        same(apart, want)
        results.append(apart.tobytes())
        for root in range(comm.size):
            ordered.reduce(mine, apart, op=op, root=root)
            if comm.rank == root:
                same(apart, want)
        edges = [count * r * r // comm.size**2 for r in range(comm.size + 1)]
        counts = [b - a for a, b in pairwise(edges)]
        part = np.empty(counts[comm.rank], mine.dtype)
        ordered.reduce_scatterv(mine, part, op, counts=counts)
        same(part, want[edges[comm.rank] : edges[comm.rank + 1]])
        each = count // comm.size
        part = np.empty(each, mine.dtype)
        ordered.reduce_scatter(mine[: each * comm.size].copy(), part, op)
        same(part, want[comm.rank * each : (comm.rank + 1) * each])
    return hash(tuple(results)) if comm.rank == 0 else 0


LAYOUTS: dict[str, dict[str, Any]] = {
    "3": {},
    "4": {},
    "4 tcp": {"HETCOLL_TRANSPORT": "tcp"},
    "4 aabb": {"HETCOLL_HOST_ID": tuple("aabb")},
    "4 abab": {"HETCOLL_HOST_ID": tuple("abab")},
}
"""The number of ranks, and how they are laid out."""


@parametrize("layout", LAYOUTS, first=2)
def test_the_same_bits_whatever_the_layout(pool: Any, layout: str) -> None:
    ranks = pool(int(layout[0]), **LAYOUTS[layout])

    @settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(st.sampled_from(DTYPES), st.integers(1, 9000), st.integers(0, 99), st.sampled_from(NAMES), st.data())
    def holds(dtype: str, count: int, seed: int, name: str | None, data: Any) -> None:
        cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=3)))
        config = {"reproducible": True} | ({"algo": f"allreduce:{name}"} if name else {})
        ranks.run(sums, dtype, count, seed, cuts, config)

    holds()


@pytest.mark.thorough
def test_large_messages(pool: Any) -> None:
    """Beyond the rings and slots, where slots, stretches and single copies take turns."""
    for name in NAMES:
        config = {"reproducible": True} | ({"algo": f"allreduce:{name}"} if name else {})
        pool(3).run(sums, "float32", 1_500_001, 1, [400_000, 1_000_003], config)


def test_without_it_bits_do_depend(pool: Any) -> None:
    """Or what is tested above would hold anyway."""
    with pytest.raises(AssertionError):
        pool(4).run(sums, "float32", 5000, 1, [], {"algo": "allreduce:doubling"})


def in_parts(comm: hetcoll.Communicator) -> tuple[str, str, list[bool]]:
    part = comm.split(comm.rank % 2)
    assert part is not None
    told = str(comm.explain("allreduce", 1 << 20)), str(comm.explain("broadcast", 1 << 20))
    kept = [comm._config.reproducible, part._config.reproducible]
    with pytest.raises(ArgumentError, match="reproducible: wanted compress=none"):
        comm.split(0, compress="bf16")
    with pytest.raises(ArgumentError, match="bf16 was asked for, but it is reproducible"):
        comm.allreduce(np.ones(1 << 16, np.float32), compress="bf16")
    part.close()
    return *told, kept


def test_the_variable_parts_and_what_is_told() -> None:
    with Ranks(3, {"HETCOLL_REPRODUCIBLE": "1"}) as ranks:
        reducing, other, kept = ranks.run(in_parts)[0]
        assert reducing.endswith("reproducible: reduces in the order of ranks)")
        assert "reproducible" not in other
        assert kept == [True, True]


def test_all_ranks_must_say_the_same() -> None:
    with Ranks(2, {"HETCOLL_REPRODUCIBLE": ("1", "0")}, join=False) as ranks:
        assert ranks.run(refused) == ["HETCOLL_REPRODUCIBLE is True on rank 0 and False on rank 1"] * 2


def refused(job: Any) -> str:
    with pytest.raises(InitError) as caught:
        job.join()
    return str(caught.value)


def test_what_it_refuses() -> None:
    with pytest.raises(ArgumentError, match=r"reproducible: wanted compress=none with it, .* got compress=bf16"):
        Config(reproducible=True, compress=Format.BF16)
    with pytest.raises(ArgumentError, match="HETCOLL_REPRODUCIBLE: wanted 0 or 1, got 'maybe'"):
        read_config({"HETCOLL_REPRODUCIBLE": "maybe"})
    with pytest.raises(ArgumentError, match="reproducible: wanted True or False, got 1"):
        hetcoll.init(reproducible=1)  # type: ignore[arg-type]


def by_another(comm: hetcoll.Communicator) -> str:
    with pytest.raises(ArgumentError) as caught:
        variant(comm, reproducible=True, algo="ring").allreduce(np.ones(9))
    return str(caught.value)


def test_an_algorithm_with_another_order_is_refused(pool: Any) -> None:
    told = pool(3).run(by_another)[0]
    assert told == (
        "reproducible: HETCOLL_ALGO asks for allreduce by ring, which does not reduce in the order of ranks;"
        " wanted one of oneshot, direct, reduce_broadcast, chained, staged"
    )
