"""What a communicator holds: `Communicator.memory` against what the system says."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ranks import Ranks

import hetcoll
from hetcoll.errors import ClosedError

CHANNELS = 3  # native/base/message.h


def sockets() -> int:
    """This process's TCP sockets."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{table}") as file:
            inodes |= {line.split()[9] for line in list(file)[1:]}
    names = (os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if is_open(fd))
    return sum(name.startswith("socket:[") and name[8:-1] in inodes for name in names)


def is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def around_a_call(comm: hetcoll.Communicator, nbytes: int) -> list[tuple[dict[str, int], int]]:
    """What it holds, and how many sockets the process has, before and after the first calls."""
    found = [(comm.memory(), sockets())]
    comm.agree(1)  # by the store: who goes ahead connects to who has yet to count
    for _ in range(2):
        comm.allreduce(np.ones(nbytes // 8))
        found.append((comm.memory(), sockets()))
    return found


def test_links_are_made_when_they_are_needed_and_counted(launch: Callable[..., Ranks]) -> None:
    ranks = launch(4, HETCOLL_TRANSPORT="tcp", HETCOLL_ALGO="allreduce:ring")
    for rank, found in enumerate(ranks.run(around_a_call, 1 << 16)):
        (before, none), (after, some), (again, still) = found
        assert (before["plans"], before["sockets"]) == (0, 0), "nothing was called yet"
        made = after["descriptors"] - before["descriptors"]
        assert made == some - none
        assert 2 <= made <= 2 * CHANNELS, "a ring has two neighbours"
        assert after["threads"] == before["threads"] <= 3 + (rank == 0), "no link has a thread"
        assert after["sockets"] > 0
        assert after["plans"] > 0
        same = {"sockets": 0}  # the kernel lets their buffers grow
        assert (again | same, still) == (after | same, some), "a call that was made before takes nothing"


def arrays_of_a_host(comm: hetcoll.Communicator) -> list[dict[str, int]]:
    found = [comm.memory()]
    array = comm.empty(1 << 20, "uint8")
    found.append(comm.memory())
    del array
    found.append(comm.memory())
    return found


def test_shared_memory_is_counted(pool: Callable[..., Ranks]) -> None:
    for before, there, gone in pool(2, HETCOLL_TRANSPORT="shm").run(arrays_of_a_host):
        assert before["slots"] > 0
        assert there["arrays"] - before["arrays"] == 1 << 20
        assert gone["arrays"] == before["arrays"]
        assert before["sockets"] == 0


def parts_count_for_themselves(comm: hetcoll.Communicator) -> tuple[dict[str, int], dict[str, int], Any]:
    part = comm.split(comm.rank % 2)
    assert part is not None
    whole, half = comm.memory(), part.memory()
    part.close()
    with pytest.raises(ClosedError):
        part.memory()
    return whole, half, comm.rank


def test_the_connection_to_the_store_counts_once(pool: Callable[..., Ranks]) -> None:
    for whole, half, rank in pool(4, HETCOLL_TRANSPORT="shm").run(parts_count_for_themselves):
        assert half["threads"] == 0
        assert whole["threads"] == 1 + (rank == 0 and whole["threads"] > 1), "the store may live elsewhere"
        assert half["descriptors"] < whole["descriptors"]


def what_moves_data_aside(comm: hetcoll.Communicator) -> list[dict[str, int]]:
    """Without, with a window, and with messages that have tags besides."""
    found = [comm.memory()]
    window = comm.window(np.zeros(10))
    found.append(comm.memory())
    comm.send(np.ones(1), 1 - comm.rank, tag=1, async_op=True)
    comm.recv(np.ones(1), 1 - comm.rank, tag=1)
    found.append(comm.memory())
    window.close()
    return found


def test_what_moves_data_aside_counts(launch: Callable[..., Ranks]) -> None:
    """Ranks of their own: others may have windows already."""
    for before, window, tags in launch(2, HETCOLL_TRANSPORT="tcp").run(what_moves_data_aside):
        for name in ("descriptors", "threads", "sockets"):
            assert before[name] < window[name], name
        assert window["descriptors"] < tags["descriptors"]


def leave_before_a_link_is_made(comm: hetcoll.Communicator) -> str:
    """Rank 1 does not listen any more; that it has left is heard a little later."""
    meet = comm._session.control.exchange
    meet(comm._group, b"both are here", b"", 10)
    if comm.rank == 1:
        assert comm._wiring._listener is not None
        comm._wiring._listener.close()
    meet(comm._group, b"it does not listen", b"", 10)
    if comm.rank == 1:
        time.sleep(0.2)
        comm.close()
        return ""
    with pytest.raises(hetcoll.PeerLostError) as caught:
        comm.send(np.ones(1), 1)
    assert caught.value.rank == 1
    return str(caught.value)


def test_a_rank_that_leaves_before_it_is_connected_is_named(launch: Callable[..., Ranks]) -> None:
    said, _ = launch(2, HETCOLL_TRANSPORT="tcp").run(leave_before_a_link_is_made)
    assert "rank 1 left while it was needed" in said
