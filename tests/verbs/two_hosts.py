"""One of two guests that are the two hosts of a job: two_hosts.py HOST, with two ranks on each.

Shared memory inside the guests, RDMA over two networks between them, of which one fails in the middle.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time

import numpy as np
from cables import tool
from cases import run_cases
from sweep import KINDS, cases_of

import hetcoll

HOSTS, LOCAL = 2, 2
SIZE = HOSTS * LOCAL
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


def main(host: int) -> int:
    os.environ |= {
        "WORLD_SIZE": str(SIZE), "MASTER_ADDR": "10.78.0.1", "MASTER_PORT": "29500", "HETCOLL_SECRET": "sesame",
        "HETCOLL_IB_BYTES": "128K", "HETCOLL_IB_TIMEOUT": "16", "HETCOLL_IB_RETRY_CNT": "7",
        "HETCOLL_SOCKET_IFNAME": "=eth0",
    }  # fmt: skip
    context = multiprocessing.get_context("fork")  # after the imports, which take seconds here
    ranks = [context.Process(target=rank_main, args=(host * LOCAL + local,)) for local in range(LOCAL)]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + 150
    for rank in ranks:
        rank.join(max(0.0, deadline - time.monotonic()))
        rank.kill()
        rank.join()
    return max(abs(rank.exitcode or 0) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
