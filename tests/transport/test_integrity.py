"""Bytes that the network spoils: HETCOLL_INTEGRITY over TCP, with HETCOLL_FAULT=corrupt beneath it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from ranks import Ranks

import hetcoll
from hetcoll.errors import CommunicationError

Pool = Callable[..., Ranks]


def add_up(comm: hetcoll.Communicator, count: int) -> tuple[str, bool, dict[str, int]]:
    """What an all-reduce, or the barrier behind it, failed with, whether its result is right, and the counters."""
    x = np.arange(count, dtype=np.float32) % 50 + comm.rank
    error = ""
    try:
        comm.allreduce(x)
        comm.barrier()
    except CommunicationError as failure:
        error = str(failure)
    want = comm.size * (np.arange(count) % 50) + sum(range(comm.size))
    return error, bool((x == want).all()), comm.counters()


def test_unchecked_bytes_are_spoiled_unseen(launch: Pool) -> None:
    ranks = launch(2, HETCOLL_TRANSPORT="tcp", HETCOLL_INTEGRITY="off", HETCOLL_FAULT="corrupt=5000,rank=1")
    rows = ranks.run(add_up, 30_000)
    assert not any(error for error, _, _ in rows)
    assert not all(right for _, right, _ in rows)
    assert all(counters["checked_bytes"] == 0 for _, _, counters in rows)


@pytest.mark.parametrize(
    ("integrity", "count", "byte"),
    [("all", 30_000, 5000), ("all", 1_000_000, 300_000), ("sampled", 8, 40), ("sampled", 30_000, 10)],
)
def test_a_spoiled_piece_is_an_error_that_names_the_edge(launch: Pool, integrity: str, count: int, byte: int) -> None:
    ranks = launch(2, HETCOLL_TRANSPORT="tcp", HETCOLL_INTEGRITY=integrity, HETCOLL_FAULT=f"corrupt={byte},rank=1")
    rows = ranks.run(add_up, count)
    for error, _, _ in rows:
        assert error.startswith("rank 0 in "), error
        assert "TCP: what rank 1 sent was spoiled on the way: " in error, error
    assert [counters["spoiled_pieces"] for _, _, counters in rows] == [1, 0]


def test_sound_links_are_checked_by_default(launch: Pool) -> None:
    rows = launch(2, HETCOLL_TRANSPORT="tcp").run(add_up, 8)
    for error, right, counters in rows:
        assert not error
        assert right
        assert counters["checked_bytes"] >= 16
        assert counters["spoiled_pieces"] == 0
