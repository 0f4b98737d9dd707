"""``reproducible=True`` where GPUs take part: fakes of both vendors, beside ranks without a GPU."""

from __future__ import annotations

import unittest.mock
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from gpu_kinds import Own, start
from ordered_sums import in_rank_order, same, terms
from thorough import parametrize

import hetcoll
from hetcoll.plan import one_kernel

pytestmark = pytest.mark.fakes


DTYPES, COUNTS = ["float32", "bfloat16"], [1009, 140_001]  # in words of a kernel; in its packs, or by copies


def sums(comm: hetcoll.Communicator, dtypes: list[str], counts: list[int]) -> str:
    """Few elements are added and averaged, many either."""
    for dtype in dtypes:
        for count in counts:
            rows = terms(comm.size, count, dtype, count)
            ops = ("sum", "avg") if count == COUNTS[0] else ("avg",) if dtype == "bfloat16" else ("sum",)
            for op in ops:
                want = in_rank_order(rows, op)
                whole = Own(comm, rows[comm.rank])
                comm.allreduce(whole.array, op=op).wait(60)
                same(whole.get(), want)
                begun = Own(comm, np.zeros_like(want))
                comm.reduce(Own(comm, rows[comm.rank]).array, begun.array, op=op, root=comm.size - 1).wait(60)
                if comm.rank == comm.size - 1:
                    same(begun.get(), want)
                edges = [count * r * r // comm.size**2 for r in range(comm.size + 1)]
                parts = [b - a for a, b in pairwise(edges)]
                mine, given = Own(comm, np.zeros(parts[comm.rank], want.dtype)), Own(comm, rows[comm.rank])
                comm.reduce_scatterv(given.array, mine.array, op, counts=parts).wait(60)
                same(mine.get(), want[edges[comm.rank] : edges[comm.rank + 1]])
    return comm.explain("allreduce", 1 << 24).gpus  # beyond one kernel


@parametrize(
    ("gpus", "env"),
    [
        ("nnaa", {"HETCOLL_ISLANDS": "0,1|2,3"}),
        ("nan", {"HETCOLL_HOST_ID": ("a", "a", "b")}),
    ],
    first=1,
)
def test_gpus_give_the_bits_of_cpus(gpus: str, env: dict[str, Any]) -> None:
    """Also those that one vendor's library would serve, which promises no order."""
    with start(gpus, HETCOLL_REPRODUCIBLE="1", **env) as ranks:
        told = ranks.run(sums, DTYPES, COUNTS)
    assert all("in the order of ranks" in each for each in told)


def over(comm: hetcoll.Communicator, dtypes: list[str]) -> tuple[list[str], tuple[str, ...]]:
    sums(comm, dtypes, COUNTS)
    with unittest.mock.patch.multiple(one_kernel, MOST_ALONE_NEAR=0, SMALL_NEAR=0):
        sums(comm, DTYPES, [300_001])
    told = [comm.explain("allreduce", nbytes) for nbytes in (64 << 10, 1 << 21, 1 << 25)]
    return [each.gpus for each in told], told[0].paths


@parametrize(("kinds", "dtypes"), [("nnn", DTYPES), ("aa", [*DTYPES, "float16"])], first=1, ids=["nnn", "aa"])
def test_gpus_of_one_library_use_the_links_between_them(kinds: str, dtypes: list[str]) -> None:
    """By kernels, and beyond these through slots in their own memory."""
    with start(kinds, HETCOLL_REPRODUCIBLE="1") as ranks:
        for gpus, paths in ranks.run(over, dtypes):
            assert gpus[0].startswith("oneshot, one kernel a rank (before ")
            assert gpus[1].startswith("exchange, one kernel a rank (before ")
            assert "one kernel a rank (before" not in gpus[2]
            assert all("in the order of ranks" in each for each in gpus)
            assert "through slots in the receiving GPU's memory" in paths[0]


@pytest.mark.thorough
def test_gpus_beside_ranks_without() -> None:
    with start("nca", HETCOLL_REPRODUCIBLE="1") as ranks:
        ranks.run(sums, DTYPES, COUNTS)
