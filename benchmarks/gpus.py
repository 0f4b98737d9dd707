"""Collectives on real GPUs of one host: time, bandwidth, what a call costs the host; every result is verified.

    HETCOLL_ISLANDS='0|1' hetcoll run -n 2 benchmarks/gpus.py              # two GPUs that no library joins
    HETCOLL_ISLANDS='0,1|2,3' hetcoll run -n 4 benchmarks/gpus.py
    hetcoll run -n 4 benchmarks/gpus.py --vendor                           # one island, beside NCCL's own calls
    NCCL_P2P_DISABLE=1 hetcoll run -n 2 benchmarks/gpus.py --vendor        # what NCCL does without NVLink

Rank r uses GPU r. `us` is the time of a call in a row of them on one stream, the best of three rounds and the slowest
rank's; `sync` that of one call with a wait behind it, the median; `cost` the host's part of a call. `GB/s` is bytes of
the larger buffer over `us` (nccl-tests' algbw).
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable

import numpy as np

import hetcoll
from hetcoll.devices import cuda
from hetcoll.devices.array import DeviceArray
from hetcoll.types import DType, ReduceOp

LARGEST = 256 << 20
SIZES = (8, 64 << 10, 1 << 20, 16 << 20, 64 << 20, LARGEST)
_P = ctypes.c_void_p
_REDUCES = ctypes.CFUNCTYPE(ctypes.c_int, _P, _P, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, _P, _P)
_GATHERS = ctypes.CFUNCTYPE(ctypes.c_int, _P, _P, ctypes.c_size_t, ctypes.c_int, _P, _P)


class Bench:
    """Two buffers of this rank's GPU, and a stream."""

    def __init__(self, comm: hetcoll.Communicator) -> None:
        self.comm, self.device = comm, cuda.devices()[comm.rank]
        self.device.activate()
        self.stream = self.device.stream()
        self.pattern = np.arange(LARGEST // 4, dtype=np.float32) % 977
        self.send = DeviceArray.of(self.device, self.pattern + comm.rank)
        self.recv = DeviceArray(self.device, LARGEST // 4)

    def line(self, name: str, nbytes: int, call: Callable[[], object], wrong: str = "") -> None:
        """Time `call` and print."""
        count = max(4, min(200, 1_200_000_000 // max(nbytes, 4 << 20)))
        for _ in range(3):
            call()
        best = cost = 1e9
        for _ in range(3):
            self.settle()
            start = time.perf_counter()
            for _ in range(count):
                call()
            cost = min(cost, (time.perf_counter() - start) / count)
            self.device.synchronize(self.stream)
            best = min(best, (time.perf_counter() - start) / count)
        alone = []
        for _ in range(min(count, 20)):
            self.settle()
            start = time.perf_counter()
            call()
            self.device.synchronize(self.stream)
            alone.append(time.perf_counter() - start)
        slowest = np.array([best])
        self.comm.allreduce(slowest, op="max")
        us, sync = slowest[0] * 1e6, float(np.median(alone)) * 1e6
        if self.comm.rank == 0:
            print(
                f"{name:22} {nbytes:>10} {us:>10.1f} {nbytes / us / 1e3:>8.1f} {sync:>8.1f} {cost * 1e6:>7.1f} {wrong}"
            )

    def settle(self) -> None:
        self.device.synchronize(self.stream)
        self.comm.barrier()

    def collectives(self) -> None:
        """hetcoll's, on every size."""
        comm, size, stream = self.comm, self.comm.size, self.stream
        for nbytes in SIZES:
            n = nbytes // 4
            send, recv = self.send.buffer(0, n), self.recv.buffer(0, n)
            comm.allreduce(send, recv, stream=stream)
            want = size * self.pattern[:n] + size * (size - 1) // 2
            wrong = int((self.recv.get()[:n] != want).sum())
            self.line("allreduce", nbytes, lambda s=send, r=recv: comm.allreduce(s, r, stream=stream), f"{wrong} wrong")
        n = LARGEST // 4 // size
        share, whole = self.send.buffer(0, n), self.recv.buffer(0, n * size)
        comm.allgather(share, whole, stream=stream)
        wrong = sum(int((row != self.pattern[:n] + r).sum()) for r, row in enumerate(self.rows(n)))
        self.line("allgather", LARGEST, lambda: comm.allgather(share, whole, stream=stream), f"{wrong} wrong")
        parts, mine = self.send.buffer(0, n * size), self.recv.buffer(0, n)
        comm.reduce_scatter(parts, mine, stream=stream)
        want = size * self.pattern[comm.rank * n : (comm.rank + 1) * n] + size * (size - 1) // 2
        wrong = int((self.recv.get()[:n] != want).sum())
        self.line("reduce_scatter", LARGEST, lambda: comm.reduce_scatter(parts, mine, stream=stream), f"{wrong} wrong")

    def rows(self, n: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        return self.recv.get()[: n * self.comm.size].reshape(self.comm.size, n)

    def vendor(self) -> None:
        """The vendor library's own calls, through its C interface, on the communicator that hetcoll made."""
        assert self.comm._gpus is not None
        island = self.comm._gpus._islands.island
        if island is None or island.size != self.comm.size:
            raise SystemExit("--vendor: wanted one island of all ranks")
        types = (int(DType.FLOAT32), int(ReduceOp.SUM))
        functions, tail = island.functions(), (island.handle, self.stream)
        reduce_all, gather = _REDUCES(functions["ncclAllReduce"]), _GATHERS(functions["ncclAllGather"])
        scatter = _REDUCES(functions["ncclReduceScatter"])
        send, recv, n = self.send.ptr, self.recv.ptr, LARGEST // 4 // self.comm.size
        if self.comm.rank == 0:
            print(island.library)
        for nbytes in SIZES:
            self.line("ncclAllReduce", nbytes, lambda c=nbytes // 4: reduce_all(send, recv, c, *types, *tail))
        self.line("ncclAllGather", LARGEST, lambda: gather(send, recv, n, types[0], *tail))
        self.line("ncclReduceScatter", LARGEST, lambda: scatter(send, recv, n, *types, *tail))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vendor", action="store_true", help="time the vendor library's own calls as well")
    args = parser.parse_args()
    with hetcoll.init() as comm:
        bench = Bench(comm)
        if comm.rank == 0:
            print(f"{comm.size} x {bench.device.name}, float32, islands {comm.topology.asked or 'by vendor'}")
            print(f"{'':22} {'bytes':>10} {'us':>10} {'GB/s':>8} {'sync':>8} {'cost':>7}")
        bench.collectives()
        if args.vendor:
            bench.vendor()
        comm.barrier()


if __name__ == "__main__":
    main()
