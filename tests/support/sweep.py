"""Cases over all collectives, algorithms, counts and places, and what must hold for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cases import run_cases
from ranks import Ranks
from reference import Case

from hetcoll.plan.algorithms import ALGORITHMS
from hetcoll.types import REDUCING, ROOTED, Collective

KINDS = [kind for kind in ALGORITHMS if kind is not Collective.BARRIER]  # which has no result: see test_async.py
NAMES = sorted({name for table in ALGORITHMS.values() for name in table})


def check(pool: Ranks, cases: list[Case], config: dict[str, Any], *, async_op: bool = False) -> None:
    """Run the cases; where all ranks get the same, it must be the same bits."""
    rows = pool.run(run_cases, cases, config, async_op, timeout=60)
    for case, digests in zip(cases, zip(*rows, strict=True), strict=True):
        if case.collective in ("allreduce", "allgather", "allgatherv", "broadcast"):
            assert len(set(digests)) == 1, f"{case}: ranks hold different bits"


def counts_for(size: int, *, large: int) -> list[int]:
    return sorted({0, 1, size - 1, size, size + 1, 7, 61, 1009, large})


def cases_of(collective: Collective, size: int, counts: list[int]) -> Iterator[Case]:
    """Counts x places, and every root with one of the counts; the types and reductions taking turns."""
    types, turn = ["float32", "int64", "bfloat16", "uint8", "complex64", "float64"], 0
    for count in counts:
        every = collective in ROOTED and count == size + 1
        for root in range(size) if every else [turn % size if collective in ROOTED else 0]:
            for inplace in (False, True) if collective is not Collective.BROADCAST else (False,):
                turn += 1
                op = ("sum", "max", "avg", "prod")[turn % 4] if collective in REDUCING else "sum"
                dtype = types[turn % len(types)] if op != "max" else "float32"
                yield Case(collective.label, dtype, count, op, root, inplace, seed=turn, shift=turn % 5)


def collectives_of(name: str, size: int) -> list[Collective]:
    """The collectives that have such an algorithm for so many ranks."""
    return [kind for kind in KINDS if name in ALGORITHMS[kind] and ALGORITHMS[kind][name].supports(size)]
