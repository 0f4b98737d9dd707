"""What the programs of two guests share that are the two hosts of a job: where ranks are, and how they run."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable

HOSTS, LOCAL = 2, 2
SIZE = HOSTS * LOCAL


def run_ranks(rank_main: Callable[[int], None], host: int, seconds: float, **env: str) -> int:
    """The exit status of this host's ranks, each of which runs ``rank_main(rank)`` and is ended after `seconds`."""
    os.environ |= {
        "WORLD_SIZE": str(SIZE), "MASTER_ADDR": "10.78.0.1", "MASTER_PORT": "29500", "HETCOLL_SECRET": "sesame",
        "HETCOLL_SOCKET_IFNAME": "=eth0", "HETCOLL_IB_RETRY_CNT": "7", **env,
    }  # fmt: skip
    context = multiprocessing.get_context("fork")  # after the imports, which take seconds here
    ranks = [context.Process(target=rank_main, args=(host * LOCAL + local,)) for local in range(LOCAL)]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + seconds
    for rank in ranks:
        rank.join(max(0.0, deadline - time.monotonic()))
        rank.kill()
        rank.join()
    return max(abs(rank.exitcode or 0) for rank in ranks)
