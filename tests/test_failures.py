"""Ranks that disagree, die, stop, leave or are interrupted: every other rank is told who, what and where, in time.

After each of these tests `launch` sees to it that no thread, descriptor, mapping, child or process is left.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ranks import Outcome, Ranks

import hetcoll
from hetcoll import CollectiveMismatchError

Launch = Callable[..., Ranks]
TRANSPORTS = pytest.mark.parametrize("transport", ["auto", "tcp"])
FOUND_WITHIN = 8.0  # seconds; what needs two looks at the others takes about four


# Ranks that call different things.


def f32(count: int) -> Any:
    return np.ones(count, np.float32)


MISTAKES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    # what rank 0 and what all other ranks call
    "count": (lambda c: c.allreduce(f32(4)), lambda c: c.allreduce(f32(5))),
    "empty": (lambda c: c.allreduce(f32(0)), lambda c: c.allreduce(f32(5))),
    "large count": (lambda c: c.allreduce(f32(1 << 20)), lambda c: c.allreduce(f32(4))),
    "dtype": (lambda c: c.allreduce(f32(4)), lambda c: c.allreduce(np.ones(4, np.int32))),
    "dtype of the same size in bytes": (lambda c: c.allreduce(f32(4)), lambda c: c.allreduce(np.ones(2, np.float64))),
    "op": (lambda c: c.allreduce(f32(4)), lambda c: c.allreduce(f32(4), op="max")),
    "root": (lambda c: c.broadcast(f32(4), root=0), lambda c: c.broadcast(f32(4), root=1)),
    "root, nobody sends": (lambda c: c.broadcast(f32(4), root=1), lambda c: c.broadcast(f32(4), root=0)),
    "root of reduce": (lambda c: c.reduce(f32(4), root=0), lambda c: c.reduce(f32(4), root=1)),
    "root of reduce, nobody receives": (lambda c: c.reduce(f32(4), root=1), lambda c: c.reduce(f32(4), root=0)),
    "root of gather": (
        lambda c: c.gather(f32(4), f32(4 * c.size), root=0),
        lambda c: c.gather(f32(4), f32(4 * c.size), root=1),
    ),
    "root of scatter": (
        lambda c: c.scatter(f32(4 * c.size), f32(4), root=0),
        lambda c: c.scatter(f32(4 * c.size), f32(4), root=1),
    ),
    "collective": (lambda c: c.allreduce(f32(4)), lambda c: c.broadcast(f32(4), root=1)),
    "barrier": (lambda c: c.barrier(), lambda c: c.allreduce(f32(4))),
    "gather for allgather": (
        lambda c: c.gather(f32(4), f32(4 * c.size), root=1),
        lambda c: c.allgather(f32(4), f32(4 * c.size)),
    ),
    "reduce for allreduce": (lambda c: c.reduce(f32(4), root=1), lambda c: c.allreduce(f32(4))),
    "counts of allgatherv": (
        lambda c: c.allgatherv(f32(1), f32(c.size), [1] * c.size),
        lambda c: c.allgatherv(f32(1), f32(c.size + 1), [2] + [1] * (c.size - 1)),
    ),
    "alltoall": (
        lambda c: c.alltoall(f32(c.size), f32(c.size)),
        lambda c: c.alltoall(f32(2 * c.size), f32(2 * c.size)),
    ),
    "split": (lambda c: c.split(0), lambda c: c.allreduce(f32(4))),
    "split and barrier": (lambda c: c.split(0), lambda c: c.barrier()),
    "message and collective": (lambda c: c.recv(f32(4), peer=1), lambda c: c.barrier()),
    "everybody receives": (lambda c: c.recv(f32(4), peer=1), lambda c: c.recv(f32(4), peer=0)),
    "everybody sends": (lambda c: c.send(f32(1 << 22), peer=1), lambda c: c.send(f32(1 << 22), peer=0)),
}


def call_one_of(comm: hetcoll.Communicator, name: str, warm: bool, more: bool) -> None:
    """`warm`: both calls were made before, so that they take the short way. `more`: some go on to a next call."""
    first, others = MISTAKES[name]
    if warm:
        for call in (first, others):
            call(comm)
    (first if comm.rank == 0 else others)(comm)
    if more:
        comm.barrier()
        comm.barrier()


def check_mismatch(outcomes: list[Outcome], name: str) -> str:
    for outcome in outcomes:
        assert isinstance(outcome.error, CollectiveMismatchError), f"{outcome.value!r} {outcome.trace}"
        assert outcome.seconds < FOUND_WITHIN
    texts = {str(outcome.error) for outcome in outcomes}
    assert len(texts) == 1, texts
    (text,) = texts
    assert "rank 0 called " in text
    assert re.search(r"ranks? 1(-\d)? called ", text)
    assert len(re.findall(rf"at {re.escape(__file__)}:\d+", text)) >= 2, text
    return text


@TRANSPORTS
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", MISTAKES)
def test_mismatch(launch: Launch, name: str, size: int, transport: str) -> None:
    if name.startswith("everybody") and size > 2:
        pytest.skip("rank 0 has one message only")
    ranks = launch(size, HETCOLL_TRANSPORT=transport)
    print(check_mismatch(ranks.outcomes(call_one_of, name, False, True, timeout=20), name))
