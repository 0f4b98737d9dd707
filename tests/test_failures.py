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
        lambda c: c.allgatherv(f32(1 + (c.rank == 0)), f32(c.size + 1), [2] + [1] * (c.size - 1)),
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


def call_one_of(comm: hetcoll.Communicator, name: str, warm: bool) -> None:
    """`warm`: first both calls as they should be, so that the wrong ones take the short way."""
    first, others = MISTAKES[name]
    if warm:
        first(comm)
        others(comm)
    (first if comm.rank == 0 else others)(comm)
    comm.barrier()  # who got through the call must be told as well
    comm.barrier()


def check_mismatch(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert isinstance(outcome.error, CollectiveMismatchError), f"{outcome.value!r} {outcome.trace}"
        assert outcome.seconds < FOUND_WITHIN
    (text,) = {str(outcome.error) for outcome in outcomes}
    assert "rank 0 called " in text
    assert re.search(r"ranks? 1(-\d)? called ", text), text
    assert len(re.findall(rf"at {re.escape(__file__)}:\d+", text)) >= 2, text


COLLECTIVES_ONLY = [name for name in MISTAKES if not re.match("message|everybody|split", name)]


@TRANSPORTS
@pytest.mark.parametrize(("size", "warm"), [(2, False), (3, False), (3, True)])
def test_mismatch(launch: Launch, size: int, warm: bool, transport: str) -> None:
    """All mistakes at a time, each in a job of its own, since most of the time is spent waiting."""
    names = [name for name in MISTAKES if size == 2 or not name.startswith("everybody")]
    if warm:  # where all ranks may call both
        names = COLLECTIVES_ONLY
    jobs = {name: launch(size, HETCOLL_TRANSPORT=transport) for name in names}
    for name, ranks in jobs.items():
        ranks.start(call_one_of, name, warm)
    for name, ranks in jobs.items():
        outcomes = ranks.finish(20)
        try:
            check_mismatch(outcomes)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
