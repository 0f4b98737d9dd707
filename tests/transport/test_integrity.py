"""Bytes that the network spoils: HETCOLL_INTEGRITY over TCP, with HETCOLL_FAULT=corrupt beneath it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from ranks import Ranks, elapsed
from thorough import parametrize

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


def counted(rows: list[tuple[str, bool, dict[str, int]]]) -> list[tuple[int, int]]:
    """On each rank, pieces that were spoiled, and those of them that came right then."""
    return [(counters["spoiled_pieces"], counters["resent_pieces"]) for _, _, counters in rows]


@pytest.mark.parametrize(
    ("integrity", "count", "byte"),
    [("all", 30_000, 5000), ("all", 1_000_000, 300_000), ("sampled", 8, 40), ("sampled", 30_000, 10)],
)
def test_a_spoiled_piece_is_sent_again(launch: Pool, integrity: str, count: int, byte: int) -> None:
    ranks = launch(2, HETCOLL_TRANSPORT="tcp", HETCOLL_INTEGRITY=integrity, HETCOLL_FAULT=f"corrupt={byte},rank=1")
    for turn in range(2):
        for error, right, counters in ranks.run(add_up, count):
            assert not error
            assert right
            assert counters["tcp_reconnects"] >= 1, turn
    (spoiled, resent), other = counted(ranks.run(add_up, count))
    assert spoiled == resent >= 1  # one on each channel that is used
    assert other == (0, 0)
    told = [line for line in ranks.output(0).splitlines() if "spoiled on the way" in line]
    assert len(told) == 1, ranks.output(0)
    assert "rank 0: a connection to rank 1, on host 127.0.0.1, was dropped (what rank 1 sent was spoiled" in told[0]
    assert "came with a wrong checksum (CRC32C)) and was made again" in told[0]


def test_an_edge_that_spoils_again_and_again_is_an_error_that_names_it(launch: Pool) -> None:
    settings = {"HETCOLL_TRANSPORT": "tcp", "HETCOLL_INTEGRITY": "all", "HETCOLL_FAULT": "corrupt_every=9000,rank=1"}
    ranks = launch(2, **settings)
    with elapsed() as took:
        rows = ranks.run(add_up, 30_000)
    assert took[0] < 30
    for error, _, _ in rows:
        assert error.startswith("rank 0 in "), error
        assert "TCP: what rank 1 sent was spoiled on the way: " in error, error
        assert error.count("for the 9th time within a minute") == 1, error
    (spoiled, resent), other = counted(rows)
    assert spoiled >= 9 > resent
    assert other == (0, 0)


def everything(comm: hetcoll.Communicator) -> list[tuple[int, int]]:
    """Collectives of several sizes, and messages whose sender writes over them at once; what was counted."""
    n, me = comm.size, comm.rank
    for count in (1, 500, 40_000, 400_000):
        x = np.arange(count, dtype=np.float32) % 97 + me
        comm.allreduce(x)
        assert (x == n * (np.arange(count) % 97) + sum(range(n))).all(), count
        parts = np.zeros((n, count), np.int32)
        comm.allgather(np.full(count, me + count, np.int32), parts)
        assert (parts == np.arange(n)[:, None] + count).all(), count
        sent, came = np.full(count, me + 1, np.int64), np.zeros(count, np.int64)
        with comm.group():
            comm.send(sent, (me + 1) % n)
            comm.recv(came, (me - 1) % n)
        sent[:] = -1
        assert (came == (me - 1) % n + 1).all(), count
    comm.barrier()
    counters = comm.counters()
    return [(counters["spoiled_pieces"], counters["resent_pieces"])]


@parametrize("byte", [100, 3000, 70_000, 500_000, 1_000_000], first=2)
def test_every_link_may_spoil_a_byte(launch: Pool, byte: int) -> None:
    ranks = launch(3, HETCOLL_TRANSPORT="tcp", HETCOLL_INTEGRITY="all", HETCOLL_FAULT=f"corrupt={byte}")
    rows = [row for rows in ranks.run(everything) for row in rows]
    assert sum(spoiled for spoiled, _ in rows) >= 3
    assert all(spoiled == resent for spoiled, resent in rows), rows


def test_sound_links_are_checked_by_default(launch: Pool) -> None:
    rows = launch(2, HETCOLL_TRANSPORT="tcp").run(add_up, 8)
    for error, right, counters in rows:
        assert not error
        assert right
        assert counters["checked_bytes"] >= 16
        assert counters["spoiled_pieces"] == 0


def small_ones(comm: hetcoll.Communicator) -> tuple[int, int]:
    """How many bytes of 64 messages of 8 bytes this rank checked, and of the next 64, of 1 KiB."""
    counted = []
    for count in (1, 128):
        before = comm.counters()["checked_bytes"]
        for _ in range(64):
            if comm.rank == 0:
                comm.send(np.ones(count), 1)
            else:
                comm.recv(np.zeros(count), 0)
        counted.append(comm.counters()["checked_bytes"] - before)
    return counted[0], counted[1]


def test_one_of_16_small_messages_is_checked(launch: Pool) -> None:
    assert launch(2, HETCOLL_TRANSPORT="tcp").run(small_ones) == [(0, 0), (4 * 8, 4 * 1024)]
