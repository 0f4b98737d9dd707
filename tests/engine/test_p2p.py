"""Messages between two ranks: sizes, types, order, groups, and receives that are posted long before their send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import Fenced, variant
from ranks import Ranks
from thorough import parametrize

import hetcoll

Pool = Callable[..., Ranks]
TRANSPORTS = pytest.mark.parametrize("transport", ["auto", "tcp"])
LINKS: dict[str, dict[str, Any]] = {
    "shm": {},
    "shm-small": {"shm_bytes": 4096},
    "tcp": {"transport": "tcp"},
    "tcp-stripes": {"transport": "tcp", "socket_stripes": 3},
}


def content(count: int, dtype: str, seed: int) -> Any:
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, count * kind.itemsize, np.uint8)
    return raw.view(kind)


def every_pair(comm: hetcoll.Communicator, config: dict[str, Any]) -> None:
    """Every rank to every other, one pair after another, blocking; types and sizes of all kinds, twice each."""
    comm = variant(comm, **config)
    pairs = [(a, b) for a in range(comm.size) for b in range(comm.size) if a != b]
    for turn, dtype in enumerate(("float32", "uint8", "bool", "complex128", "bfloat16", "int16", "float8_e4m3fn")):
        for count in (0, 1, 5, 40, 41, 1023, 8192, 70_001):
            if count == 70_001 and "shm_bytes" in config and turn > 0:
                continue  # a busy machine takes minutes for all types through a ring of 4 KiB
            for sender, receiver in pairs * 2:
                if comm.rank not in (sender, receiver):
                    continue
                values = content(count, dtype, 100 * count + 10 * sender + receiver)
                if comm.rank == sender:
                    out = values.copy()
                    comm.send(out, receiver)
                    assert out.tobytes() == values.tobytes(), "what was sent was written"
                else:
                    into = Fenced(count, dtype, shift=turn % 3)
                    comm.recv(into.array, sender)
                    into.check()
                    assert into.array.tobytes() == values.tobytes(), (dtype, count, sender)


@pytest.mark.parametrize("link", LINKS)
@parametrize("size", [3, 2], first=1)
def test_blocking_messages(pool: Pool, size: int, link: str) -> None:
    pool(size).run(every_pair, LINKS[link])


def unmet(comm: hetcoll.Communicator, call: Callable[[hetcoll.Communicator, int], float], rank: int) -> float:
    """What a call gives on ranks that have no links yet."""
    with comm.split(0) as part:
        found = call(part, rank)
        part.barrier()
        return found


def post_early(comm: hetcoll.Communicator, receiver: int) -> float:
    """The receives are posted before a barrier that the senders pass before they think of sending."""
    n = comm.size
    into = np.zeros((n, 3))
    works = []
    if comm.rank == receiver:
        works = [comm.recv(into[peer], peer, async_op=True) for peer in range(n) if peer != receiver]
    comm.barrier()
    if comm.rank != receiver:
        comm.send(np.full(3, comm.rank + 1.0), receiver)
    for work in works:
        work.wait()
    return float(into.sum())


@TRANSPORTS
@pytest.mark.parametrize("receiver", [0, 1, 2])
def test_receives_may_be_posted_long_before_their_sends(pool: Pool, receiver: int, transport: str) -> None:
    got = pool(3, HETCOLL_TRANSPORT=transport).run(unmet, post_early, receiver, timeout=15)
    assert got[receiver] == 3.0 * (1 + 2 + 3 - receiver - 1)


def send_early(comm: hetcoll.Communicator, sender: int) -> float:
    """The same with sends: asynchronous ones must not wait for their receives, however large they are."""
    large = np.full(1 << 20, comm.rank + 1.0)
    works = []
    if comm.rank == sender:
        works = [comm.send(large, peer, async_op=True) for peer in range(comm.size) if peer != sender]
    comm.barrier()
    if comm.rank != sender:
        comm.recv(large, sender)
    for work in works:
        work.wait()
    return float(large[-1])


@TRANSPORTS
@pytest.mark.parametrize("sender", [0, 2])
def test_sends_may_be_started_long_before_their_receives(pool: Pool, sender: int, transport: str) -> None:
    assert pool(3, HETCOLL_TRANSPORT=transport).run(unmet, send_early, sender, timeout=15) == [sender + 1.0] * 3


def call_early(comm: hetcoll.Communicator, early: int) -> float:
    """One rank starts a collective long before the others come to it, and meanwhile they need it for something else."""
    x, y = np.full(1000, comm.rank + 1.0), np.zeros(4)
    work = comm.allreduce(x, async_op=True) if comm.rank == early else None
    other = (comm.rank + 1) % comm.size
    with comm.group():
        comm.send(np.full(4, 7.0), other)
        comm.recv(y, (comm.rank - 1) % comm.size)
    if work is None:
        comm.allreduce(x)
    else:
        work.wait()
    return float(x[0] + y[0])


@TRANSPORTS
@pytest.mark.parametrize("early", [0, 2])
def test_a_collective_may_be_started_long_before_the_others_come(pool: Pool, early: int, transport: str) -> None:
    assert pool(3, HETCOLL_TRANSPORT=transport).run(unmet, call_early, early, timeout=15) == [13.0] * 3
