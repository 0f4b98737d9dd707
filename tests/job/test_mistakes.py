"""Ranks that call different things: every rank is told who called what, and where."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from calls import f32
from ranks import Outcome, Ranks
from thorough import parametrize

import hetcoll
from hetcoll import CollectiveMismatchError

Launch = Callable[..., Ranks]
TRANSPORTS = parametrize("transport", ["auto", "tcp"], first=1)
FOUND_WITHIN = 8.0  # seconds; what needs two looks at the others takes about four

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
    "counts of allgatherv, as many in all": (
        lambda c: c.allgatherv(f32(1 + (c.rank == 0)), f32(c.size + 1), [2] + [1] * (c.size - 1)),
        lambda c: c.allgatherv(f32(1 + (c.rank == c.size - 1)), f32(c.size + 1), [1] * (c.size - 1) + [2]),
    ),
    "counts of reduce_scatterv, as many in all": (
        lambda c: c.reduce_scatterv(f32(c.size + 1), f32(1 + (c.rank == 0)), counts=[2] + [1] * (c.size - 1)),
        lambda c: c.reduce_scatterv(f32(c.size + 1), f32(1 + (c.rank == c.size - 1)), counts=[1] * (c.size - 1) + [2]),
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
    """`warm`: first both calls as they should be, so that the wrong ones take the fast path."""
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
    assert re.search(r"ranks? [1-9](-\d)? called ", text), text
    assert len(re.findall(rf"at {re.escape(__file__)}:\d+", text)) >= 2, text


COLLECTIVES_ONLY = [name for name in MISTAKES if not re.match("message|everybody|split", name)]


@parametrize(
    ("size", "warm", "transport"),
    [(3, True, "auto"), (2, False, "auto"), (3, False, "tcp"), (2, True, "tcp")],
    first=1,
)
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


WRONG_MESSAGES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    # what rank 0 sends, and how rank 1 receives it
    "count": (lambda c: c.send(f32(4), peer=1), lambda c: c.recv(f32(5), peer=0)),
    "shorter": (lambda c: c.send(f32(1 << 20), peer=1), lambda c: c.recv(f32(5), peer=0)),
    "dtype": (lambda c: c.send(f32(4), peer=1), lambda c: c.recv(np.ones(4, np.int32), peer=0)),
    "empty": (lambda c: c.send(f32(0), peer=1), lambda c: c.recv(f32(1), peer=0)),
    "sendrecv": (
        lambda c: c.sendrecv(f32(4), 1, f32(6), 1),
        lambda c: c.sendrecv(f32(6), 0, f32(5), 0),
    ),
}


def exchange_wrongly(comm: hetcoll.Communicator, name: str) -> None:
    comm.sendrecv(f32(3), 1 - comm.rank, f32(3), 1 - comm.rank)  # a right one goes before it
    WRONG_MESSAGES[name][comm.rank](comm)
    comm.barrier()


@TRANSPORTS
def test_messages_that_do_not_fit(launch: Launch, transport: str) -> None:
    jobs = {name: launch(2, HETCOLL_TRANSPORT=transport) for name in WRONG_MESSAGES}
    for name, ranks in jobs.items():
        ranks.start(exchange_wrongly, name)
    for name, ranks in jobs.items():
        try:
            check_mismatch(ranks.finish(20))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
