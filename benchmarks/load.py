"""Many ranks with many communicators each, and millions of small calls of every kind: does anything grow?

    hetcoll run -n 64 benchmarks/load.py [--calls 1e7] [-g 2]

Each rank has one communicator of all, and one with each other rank: 64 on 64 ranks. They visit these by turns, in the
same random order; a visit is twenty rounds of calls of every kind, with and without waiting, each of which is checked.
`--calls` counts those of all ranks. With `-g` the first ranks have their arrays on GPUs. When all communicators were
used, and ten times on the way, all ranks tell what they hold. The table has the most of any rank, of its GPU's memory
as well, and how long an all-reduce of 8 bytes took: the median of two ranks' and of all ranks'.

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
from typing import Any, Literal

import numpy as np

import hetcoll
from hetcoll.cli.on_device import Mirror, Stream, choose_device, visible_gpus
from hetcoll.config.env import environment

GROWTH = 2 << 20  # bytes of a rank: what Python's and libc's allocators keep comes and goes
ROUNDS = 20  # of a visit: where ranks share processors, the other one is seldom there
PAGE = os.sysconf("SC_PAGE_SIZE")


def own_bytes() -> int:
    """Memory of this process alone: shared memory is not in it, which appears where it is touched first."""
    resident, shared = (int(word) for word in Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * PAGE


def gpu_bytes(stream: Stream | None) -> int:
    """What is taken of this rank's GPU, by whomever."""
    if stream is None:
        return 0
    if stream.device.vendor == "cuda":
        from cuda.bindings import driver

        error, free, total = driver.cuMemGetInfo()
    else:
        from hip import hip

        error, free, total = hip.hipMemGetInfo()  # type: ignore[no-untyped-call]
    if int(error) != 0:
        raise RuntimeError(f"the driver does not say how much memory is free: {error}")
    return int(total) - int(free)


class Memory:
    """The arrays of a rank: parts of one piece of host memory, which a rank with a GPU brings there and back."""

    def __init__(self, stream: Stream | None) -> None:
        self._left = np.zeros(PAGE, np.uint8)
        self._mirror = None if stream is None else Mirror(stream, [self._left])

    def array(self, count: int, dtype: type[np.generic]) -> np.ndarray[Any, Any]:
        size = -(-count * np.dtype(dtype).itemsize // 64) * 64
        mine, self._left = self._left[:size], self._left[size:]
        return mine[: count * np.dtype(dtype).itemsize].view(dtype)

    def given(self) -> None:
        """What was written here is what calls see."""
        if self._mirror is not None:
            self._mirror.upload()

    def taken(self) -> None:
        """What calls wrote is seen here."""
        if self._mirror is not None:
            self._mirror.download()

    def at(self, array: np.ndarray[Any, Any]) -> Any:
        """What a call gets for `array`."""
        return array if self._mirror is None else self._mirror.buffer(array)


class Visitor:
    """The calls of a rank, which counts and times them."""

    def __init__(self, stream: Stream | None) -> None:
        self.calls = 0
        self.pair_seconds: list[float] = []
        self.all_seconds: list[float] = []
        self.memory = Memory(stream)
        self.one, self.few = self.memory.array(1, np.int64), self.memory.array(100, np.float32)
        self.mine, self.both = self.memory.array(7, np.int32), self.memory.array(2 * 7, np.int32)
        self.came, self.message = self.memory.array(7, np.int32), self.memory.array(7, np.int32)

    def timed(self, comm: hetcoll.Communicator, op: Literal["sum", "max"], seconds: list[float]) -> None:
        """An all-reduce of 8 bytes, until its result can be read here."""
        self.memory.given()
        start = time.perf_counter()
        comm.allreduce(self.memory.at(self.one), op=op)
        self.memory.taken()
        seconds.append(time.perf_counter() - start)

    def visit(self, comm: hetcoll.Communicator, turn: int) -> None:
        """Calls of every kind on the communicator of two ranks."""
        me, other, at = comm.rank, 1 - comm.rank, self.memory.at
        self.one[0] = turn + me
        self.timed(comm, "sum", self.pair_seconds)
        self.check(self.one[0] == 2 * turn + 1, "all-reduce")

        parts = np.split(self.few, 4)
        for k, part in enumerate(parts):
            part[:] = me + k
        self.mine[:] = turn + me
        self.memory.given()
        for work in [comm.allreduce(at(part), async_op=True) for part in parts]:
            work.wait()
        comm.broadcast(at(self.one), root=turn % 2)
        comm.allgather(at(self.mine), at(self.both))
        comm.sendrecv(at(self.mine), other, at(self.came), other)
        if me == turn % 2:
            comm.send(at(self.mine), other)
        else:
            comm.recv(at(self.message), other)
        comm.barrier()
        self.memory.taken()
        for k, part in enumerate(parts):
            self.check(part.min() == part.max() == 1 + 2 * k, "all-reduce without waiting")
        self.check(self.one[0] == 2 * turn + 1, "broadcast")
        self.check(bool((self.both == np.repeat([turn, turn + 1], 7)).all()), "all-gather")
        self.check(bool((self.came == turn + other).all()), "sendrecv")
        self.check(me == turn % 2 or bool((self.message == turn + other).all()), "message")
        self.message[:] = -1
        self.calls += 10

    def visit_all(self, comm: hetcoll.Communicator, turn: int) -> None:
        self.one[0] = turn
        self.timed(comm, "max", self.all_seconds)
        self.check(self.one[0] == turn, "all-reduce of all")
        self.calls += 1

    @staticmethod
    def check(right: bool, what: str) -> None:
        if not right:
            raise AssertionError(f"{what}: a wrong result")


def tell(comm: hetcoll.Communicator, visitor: Visitor, stream: Stream | None) -> tuple[list[int], list[float]]:
    """Of all ranks: the most bytes, descriptors, threads, bytes of a GPU; the medians of their median microseconds."""
    held = [own_bytes(), len(os.listdir("/proc/self/fd")), threading.active_count(), gpu_bytes(stream)]
    memory = Memory(stream)
    mine, everyones = memory.array(6, np.float64), memory.array(6 * comm.size, np.float64)
    mine[:] = *held, 1e6 * median(visitor.pair_seconds), 1e6 * median(visitor.all_seconds)
    memory.given()
    comm.allgather(memory.at(mine), memory.at(everyones))
    memory.taken()
    rows = everyones.reshape(comm.size, 6)
    visitor.pair_seconds.clear()
    visitor.all_seconds.clear()
    return [int(n) for n in rows[:, :4].max(axis=0)], [float(x) for x in np.median(rows[:, 4:], axis=0)]


def run(comm: hetcoll.Communicator, calls: int, stream: Stream | None = None) -> int:
    begun = time.monotonic()
    pairs = [comm.split(min(comm.rank, comm.rank ^ mask)) for mask in range(1, comm.size)]
    if comm.rank == 0:
        print(f"{comm.size} ranks with {1 + len(pairs)} communicators each, after {time.monotonic() - begun:.1f} s")
        print(
            f"{'calls':>12} {'MiB a rank':>11} {'descriptors':>12} {'threads':>8} {'MiB a GPU':>10} "
            f"{'pairs us':>9} {'all us':>9}"
        )
    visitor, order, told = Visitor(stream), random.Random(1), list[list[int]]()

    def visit(pair: hetcoll.Communicator | None, turn: int) -> None:
        assert pair is not None
        for _ in range(ROUNDS):
            visitor.visit(pair, turn)
        visitor.visit_all(comm, turn)

    def report() -> None:
        held, times = tell(comm, visitor, stream)
        told.append(held)
        if comm.rank == 0:
            held_here = f"{held[0] / 2**20:11.1f} {held[1]:12} {held[2]:8} {held[3] / 2**20:10.1f}"
            print(f"{visitor.calls * comm.size:12,} {held_here} {times[0]:9.1f} {times[1]:9.1f}", flush=True)

    for turn, pair in enumerate(pairs):
        visit(pair, turn)
    tell(comm, visitor, stream)  # which makes calls of its own, whose first one takes memory
    visit(pairs[0], 0)
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
    grew = any(now > then + allowed for now, then, allowed in zip(last, first, (GROWTH, 0, 0, GROWTH), strict=True))
    if grew and comm.rank == 0:
        print(f"it grew: bytes, descriptors, threads, a GPU's bytes were {first} and are {last}", file=sys.stderr)
    return int(grew)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=float, default=1e7, help="of all ranks (1e7)")
    parser.add_argument("-g", "--ngpus", type=int, default=0, help="of the ranks of a host so many have a GPU (0)")
    parser.add_argument("--device", default="auto", help="what these are, as hetcoll perf takes it (auto)")
    options = parser.parse_args()
    launch, device = environment().launch, None
    if options.ngpus:
        place = launch.rank if launch.local_rank is None else launch.local_rank
        device = choose_device(options.device, options.ngpus, place, visible_gpus())
    with hetcoll.init(device=device) as comm:
        if comm.size & (comm.size - 1) or comm.size < 2:
            parser.error(f"wanted 2, 4, 8, ... ranks, got {comm.size}: each two meet by turns")
        return run(comm, int(options.calls), None if device is None else Stream.of(device))


if __name__ == "__main__":
    sys.exit(main())
