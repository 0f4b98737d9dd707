"""Every algorithm of every collective by name, on one rank and on a few; also on one that a split or a shrink left."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from cases import run_cases, truths, variant
from ranks import Ranks
from thorough import parametrize

import hetcoll
from hetcoll.plan.algorithms import ALGORITHMS, known
from hetcoll.types import REDUCING, Collective

Pool = Callable[..., Ranks]
Launch = Callable[..., Ranks]
COUNTS = (0, 1, 7, 3 << 20)  # the last has several stretches, where an algorithm cuts buffers into such


def _calls(comm: hetcoll.Communicator, kind: Collective, count: int) -> None:
    """One collective with a known result."""
    n, rank, root = comm.size, comm.rank, comm.size - 1
    whole, mine = np.arange(n * count, dtype=np.int32), np.arange(rank * count, (rank + 1) * count, dtype=np.int32)
    total = n * np.arange(count, dtype=np.int32)
    each, all_of = np.full(count, -1, np.int32), np.full(n * count, -1, np.int32)
    same = np.arange(count, dtype=np.int32)
    match kind:
        case Collective.ALLREDUCE:
            comm.allreduce(same, each)
            assert (each == total).all()
            comm.allreduce(same)
            assert (same == total).all()
        case Collective.REDUCE_SCATTER:
            comm.reduce_scatter(whole, each)
            assert (each == n * mine).all()
        case Collective.ALLGATHER:
            comm.allgather(mine, all_of)
            assert (all_of == whole).all()
        case Collective.BROADCAST:
            comm.broadcast(same if rank == root else each, root)
            assert rank == root or (each == same).all()
        case Collective.REDUCE:
            comm.reduce(same, each, root=root)
            assert rank != root or (each == total).all()
        case Collective.GATHER:
            comm.gather(mine, all_of, root)
            assert rank != root or (all_of == whole).all()
        case Collective.SCATTER:
            comm.scatter(whole, each, root)
            assert (each == mine).all()
        case Collective.ALLTOALL:
            comm.alltoall(np.repeat(np.arange(n, dtype=np.int32) + n * rank, count), all_of)
            assert (all_of == np.repeat(np.arange(n, dtype=np.int32) * n + rank, count)).all()
        case _:
            comm.barrier()


def _forced(comm: hetcoll.Communicator, counts: tuple[int, ...]) -> None:
    """Every algorithm that supports so many ranks."""
    for kind, table in ALGORITHMS.items():
        for name, entry in table.items():
            if entry.supports(comm.size):
                chosen = variant(comm, algo=f"{kind.label}:{name}")
                assert chosen.explain(kind.label, 1 << 24).algorithm == name
                for count in counts if entry.stretches else counts[:3]:
                    _calls(chosen, kind, count)
                chosen.close()
                del vars(comm)["variants"]


@parametrize("size", [1, 3, 2, 4, 5], first=2)
def test_every_algorithm(launch: Launch, size: int) -> None:
    launch(size).run(_forced, COUNTS if size < 3 else COUNTS[:3], timeout=100)


def _each(comm: hetcoll.Communicator, counts: tuple[int, ...]) -> None:
    """Every collective; of all-reduces, whose algorithms cut buffers, also the largest."""
    for kind in ALGORITHMS:
        for count in counts if kind is Collective.ALLREDUCE else counts[:3]:
            _calls(comm, kind, count)


def _split_alone(comm: hetcoll.Communicator, counts: tuple[int, ...]) -> None:
    part = comm.split(comm.rank)
    assert part is not None
    with part:
        _each(part, counts)


def _shrunk_alone(comm: hetcoll.Communicator, counts: tuple[int, ...]) -> None:
    if comm.rank > 0:
        return
    with comm.shrink(timeout=1) as rest:
        assert rest.size == 1
        _each(rest, counts)


@pytest.mark.parametrize("how", [_split_alone, _shrunk_alone])
@parametrize("algorithm", ["allreduce:chained", "allreduce:staged", "direct,allreduce:tree"], first=1)
def test_one_rank_that_is_left(launch: Launch, algorithm: str, how: Callable[..., None]) -> None:
    launch(2, HETCOLL_ALGO=algorithm).run(how, COUNTS)


def test_logical_reductions_give_truth_values_on_one_rank(pool: Pool) -> None:
    pool(1).run(run_cases, truths((0, 1, 70_001)), {})


def _forced_truths(comm: hetcoll.Communicator) -> None:
    for kind in REDUCING:
        cases = [case for case in truths((7,)) if case.collective == kind.label and case.dtype in ("int8", "uint64")]
        for name, entry in known(kind).items():
            if entry.supports(1):
                run_cases(comm, cases, {"algo": f"{kind.label}:{name}"})


def test_every_algorithm_gives_truth_values_on_one_rank(pool: Pool) -> None:
    pool(1).run(_forced_truths)
