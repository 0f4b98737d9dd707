"""Many ranks with many communicators each, and millions of small calls of every kind: does anything grow?

    hetcoll run -n 64 benchmarks/load.py [--calls 1e7]

Each rank has one communicator of all, and one with each other rank: 64 on 64 ranks. They visit these by turns, in the
same random order; a visit is twenty rounds of calls of every kind, with and without waiting, each of which is checked.
`--calls` counts those of all ranks. When all communicators were used, and ten times on the way, all ranks tell what
they hold. The table has the most of any rank, and how long an all-reduce of 8 bytes took: the median of two ranks' and
of all ranks'.

Ends with status 1 where a rank holds more file descriptors or threads in the end than when all were used, or 2 MiB.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
import time
from pathlib import Path
from statistics import median

import numpy as np

import hetcoll

GROWTH = 2 << 20  # bytes of a rank: what Python's and libc's allocators keep comes and goes
ROUNDS = 20  # of a visit: where ranks share processors, the other one is seldom there
PAGE = os.sysconf("SC_PAGE_SIZE")


def own_bytes() -> int:
    """Memory of this process alone: shared memory is not in it, which appears where it is touched first."""
    resident, shared = (int(word) for word in Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * PAGE


class Visitor:
    """The calls of a rank, which counts and times them."""

    def __init__(self) -> None:
        self.calls = 0
        self.pair_seconds: list[float] = []
        self.all_seconds: list[float] = []
        self.one, self.few = np.zeros(1, np.int64), np.zeros(100, np.float32)
        self.both, self.came = np.zeros(2 * 7, np.int32), np.zeros(7, np.int32)

    def visit(self, comm: hetcoll.Communicator, turn: int) -> None:
        """Calls of every kind on the communicator of two ranks."""
        me, other = comm.rank, 1 - comm.rank
        self.one[0] = turn + me
        start = time.perf_counter()
        comm.allreduce(self.one)
        self.pair_seconds.append(time.perf_counter() - start)
        self.check(self.one[0] == 2 * turn + 1, "all-reduce")

        works = []
        parts = np.split(self.few, 4)
        for k, part in enumerate(parts):
            part[:] = me + k
            works.append(comm.allreduce(part, async_op=True))
        for k, (work, part) in enumerate(zip(works, parts, strict=True)):
            work.wait()
            self.check(part.min() == part.max() == 1 + 2 * k, "all-reduce without waiting")

        comm.broadcast(self.one, root=turn % 2)
        self.check(self.one[0] == 2 * turn + 1, "broadcast")
        mine = np.full(7, turn + me, np.int32)
        comm.allgather(mine, self.both)
        self.check(bool((self.both == np.repeat([turn, turn + 1], 7)).all()), "all-gather")
        comm.sendrecv(mine, other, self.came, other)
        self.check(bool((self.came == turn + other).all()), "sendrecv")
        if me == turn % 2:
            comm.send(mine, other)
        else:
            comm.recv(self.came, other)
            self.check(bool((self.came == turn + other).all()), "message")
        comm.barrier()
        self.calls += 10

    def visit_all(self, comm: hetcoll.Communicator, turn: int) -> None:
        self.one[0] = turn
        start = time.perf_counter()
        comm.allreduce(self.one, op="max")
        self.all_seconds.append(time.perf_counter() - start)
        self.check(self.one[0] == turn, "all-reduce of all")
        self.calls += 1

    @staticmethod
    def check(right: bool, what: str) -> None:
        if not right:
            raise AssertionError(f"{what}: a wrong result")


def tell(comm: hetcoll.Communicator, visitor: Visitor) -> tuple[list[int], list[float]]:
    """Of all ranks: the most bytes, descriptors and threads of any; the medians of their median microseconds."""
    most = np.array([own_bytes(), len(os.listdir("/proc/self/fd")), threading.active_count()], np.int64)
    comm.allreduce(most, op="max")
    times = np.array([1e6 * median(visitor.pair_seconds), 1e6 * median(visitor.all_seconds)])
    everyones = comm.allgather(times).reshape(comm.size, 2)
    visitor.pair_seconds.clear()
    visitor.all_seconds.clear()
    return [int(n) for n in most], [float(x) for x in np.median(everyones, axis=0)]


def run(comm: hetcoll.Communicator, calls: int) -> int:
    begun = time.monotonic()
    pairs = [comm.split(min(comm.rank, comm.rank ^ mask)) for mask in range(1, comm.size)]
    if comm.rank == 0:
        print(f"{comm.size} ranks with {1 + len(pairs)} communicators each, after {time.monotonic() - begun:.1f} s")
        print(f"{'calls':>12} {'MiB a rank':>11} {'descriptors':>12} {'threads':>8} {'pairs us':>9} {'all us':>9}")
    visitor, order, told = Visitor(), random.Random(1), list[list[int]]()

    def visit(pair: hetcoll.Communicator | None, turn: int) -> None:
        assert pair is not None
        for _ in range(ROUNDS):
            visitor.visit(pair, turn)
        visitor.visit_all(comm, turn)

    def report() -> None:
        held, times = tell(comm, visitor)
        told.append(held)
        if comm.rank == 0:
            row = f"{visitor.calls * comm.size:12,} {held[0] / (1 << 20):11.1f} {held[1]:12} {held[2]:8}"
            print(f"{row} {times[0]:9.1f} {times[1]:9.1f}", flush=True)

    for turn, pair in enumerate(pairs):
        visit(pair, turn)
    report()
    before = visitor.calls
    for tenth in range(1, 11):
        while True:
            visit(pairs[order.randrange(len(pairs))], visitor.calls % 1000)
            if (visitor.calls - before) * comm.size >= calls * tenth / 10:
                break
        report()
    if comm.rank == 0:
        print(f"all right, after {time.monotonic() - begun:.1f} s")
    for pair in pairs:
        assert pair is not None
        pair.close()
    first, last = told[0], told[-1]
    grew = last[0] > first[0] + GROWTH or last[1:] > first[1:]
    if grew and comm.rank == 0:
        print(f"it grew: bytes, descriptors and threads were {first} and are {last}", file=sys.stderr)
    return int(grew)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=float, default=1e7, help="of all ranks (1e7)")
    options = parser.parse_args()
    with hetcoll.init() as comm:
        if comm.size & (comm.size - 1) or comm.size < 2:
            parser.error(f"wanted 2, 4, 8, ... ranks, got {comm.size}: each two meet by turns")
        return run(comm, int(options.calls))


if __name__ == "__main__":
    sys.exit(main())
