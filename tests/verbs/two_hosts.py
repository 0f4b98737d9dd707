"""One of two guests that are the two hosts of a job: two_hosts.py HOST, with two ranks on each.

Shared memory inside the guests, RDMA over two networks between them, of which one fails in the middle.
"""

from __future__ import annotations

import os
import sys

import numpy as np
from cables import tool
from cases import run_cases
from sweep import KINDS, cases_of
from two_guests import LOCAL, SIZE, run_ranks

import hetcoll

CASES = [case for kind in KINDS for case in cases_of(kind, SIZE, [5003])]


def add_up(comm: hetcoll.Communicator, calls: int) -> None:
    x = np.empty(100_000, np.float32)
    for i in range(calls):
        x[:] = comm.rank + i
        comm.allreduce(x)
        assert (x == sum(range(SIZE)) + SIZE * i).all(), i


def rank_main(rank: int) -> None:
    """What each rank does."""
    os.environ["RANK"] = str(rank)
    with hetcoll.init() as comm:
        topology = comm.topology
        for peer in range(SIZE):
            wanted = "shm" if peer // LOCAL == rank // LOCAL else "verbs"
            assert peer == rank or topology.transport(rank, peer) == wanted, (rank, peer)
        run_cases(comm, CASES, {})
        far = (rank + LOCAL) % SIZE
        told = comm.explain("p2p", 8)
        assert told.transport == "shm+verbs", told
        assert any(line.startswith(f"rank {far}: ") and "rxe0 to rxe0" in line for line in told.paths), told
        assert comm.counters()["lost_rails"] == 0, told
        comm.barrier()
        if rank == 0:
            tool("ip", "link", "set", "eth1", "down")
        add_up(comm, 10)
        comm.barrier()
        counters = comm.counters()
        assert counters["lost_rails"] > 0, comm.explain("allreduce", 400_000)
        assert counters["links_over_tcp"] == 0, comm.explain("allreduce", 400_000)
        print(f"rank {rank} of {SIZE}: right", flush=True)


if __name__ == "__main__":
    sys.exit(run_ranks(rank_main, int(sys.argv[1]), 150, HETCOLL_IB_BYTES="128K", HETCOLL_IB_TIMEOUT="16"))
