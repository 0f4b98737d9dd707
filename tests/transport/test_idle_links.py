"""Connections over which one-sided messages go, and which break while nobody says anything."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
from ranks import Ranks, wait_until
from resetting import destroy, own_connections

import hetcoll


def put_to_all(comm: hetcoll.Communicator, rounds: int) -> None:
    """Behind each round, while nobody says anything, one rank's connections break, and are made again."""
    every = np.zeros((comm.size, 1000), np.int32)
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    wanted = 0

    def whole() -> bool:
        return comm.counters()["tcp_reconnects"] >= wanted

    with comm.window(every) as window:
        for i in range(1, rounds + 1):
            for peer in others:
                window.put(np.full(1000, comm.rank + i, np.int32), peer, comm.rank * 1000, signal=0)
            window.wait_signal(0, i * len(others))
            assert all((every[rank] == rank + i).all() for rank in others)
            comm.agree(1)
            breaks = comm.rank == i % comm.size
            if breaks:
                for sock in own_connections():
                    destroy(sock)
                    sock.close()
            wanted += 2 * (len(others) if breaks else 1)  # requests and answers
            wait_until(whole, 20)
            comm.agree(1)


@pytest.mark.skipif(os.geteuid() != 0, reason="it takes CAP_NET_ADMIN to break a connection")
@pytest.mark.parametrize("size", [2, 10])
def test_connections_that_break_while_nobody_says_anything(launch: Callable[..., Ranks], size: int) -> None:
    """Who sleeps has them made again; of ten ranks poll() tells at whom it is to look."""
    launch(size, HETCOLL_TRANSPORT="tcp").run(put_to_all, 3)
