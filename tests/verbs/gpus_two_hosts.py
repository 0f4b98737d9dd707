"""One of two guests that are the two hosts of a job: gpus_two_hosts.py HOST. Each has two fake GPUs, the first
NVIDIA's and the second AMD's.

The vendors' libraries join the GPUs of a host, and RDMA goes between the hosts over two networks, from memory of one
GPU to that of another, which no processor can touch; one network fails in the middle of a call.
"""

from __future__ import annotations

import os
import sys
import threading

import fakes
import numpy as np
from cables import tool
from gpu_calls import device_of_rank, run_on_gpu
from gpus import GPUS, environment, sealed
from reference import Case
from two_guests import LOCAL, SIZE, run_ranks

import hetcoll
from hetcoll.gpu import path_probe
from hetcoll.gpu.array import DeviceArray

COUNT = 300_000


def add_up(comm: hetcoll.Communicator, calls: int, begun: threading.Event) -> None:
    """`begun` is set when the first call is over and others follow."""
    device = device_of_rank(comm.rank)
    for i in range(calls):
        array = DeviceArray.of(device, np.full(COUNT, comm.rank + i, np.float32))
        comm.allreduce(array.buffer()).wait(60)
        assert (array.get() == sum(range(SIZE)) + SIZE * i).all(), i
        begun.set()


def cut(begun: threading.Event) -> None:
    assert begun.wait(120)
    tool("ip", "link", "set", "eth1", "down")


def rank_main(rank: int) -> None:
    """What each rank does."""
    vendors = "nnaa"
    mine = {name: each[rank] if isinstance(each, tuple) else each for name, each in environment(vendors).items()}
    os.environ |= mine | {"RANK": str(rank), "HETCOLL_ISLANDS": "auto"}
    fakes.load()
    sealed()
    path_probe.SECONDS = 60.0  # four ranks and their fakes share what this machine's processors emulate
    with hetcoll.init() as comm:
        run_on_gpu(comm, [*GPUS, Case("allreduce", count=COUNT, inplace=True)])
        told = comm.explain("allreduce", COUNT * 4).paths
        for peer in range(SIZE):
            if peer == rank:
                continue
            (line,) = [line for line in told if line.startswith(f"from the GPU to that of rank {peer} ")]
            assert ("slots in both GPUs' memory" in line) == (peer // LOCAL != rank // LOCAL), told
            if peer // LOCAL == rank // LOCAL or (peer - rank) % LOCAL == 0:  # others have nothing to do with it
                assert line.endswith(", tried with bytes"), told
        counters = comm.counters()
        assert counters["gpu_direct_bytes"] > COUNT, counters
        assert counters["gpu_staged_bytes"] == counters["gpu_lost_rails"] == 0, told
        begun = threading.Event()
        cutter = threading.Thread(target=cut, args=[begun])
        if rank == 0:
            cutter.start()
        add_up(comm, 8, begun)
        if rank == 0:
            cutter.join()
        add_up(comm, 2, begun)
        counters = comm.counters()
        told = comm.explain("allreduce", COUNT * 4).paths
        assert counters["gpu_lost_rails"] > 0, told
        assert counters["gpu_staged_bytes"] == counters["gpu_links_over_tcp"] == 0, told
        print(f"rank {rank} of {SIZE}: right; {counters['gpu_direct_bytes']} bytes, {counters['gpu_resent']} frames "
              "sent again", flush=True)  # fmt: skip


if __name__ == "__main__":
    sys.exit(run_ranks(rank_main, int(sys.argv[1]), 330, HETCOLL_TIMEOUT="120", HETCOLL_IB_TIMEOUT="14"))
