"""Ranks as threads, whose collectives are NumPy's, for the tests of hetcoll perf."""

from __future__ import annotations

import argparse
import itertools
import queue
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from hetcoll.cli import sweeps
from hetcoll.types import ReduceOp

SUM = ReduceOp.SUM


class World:
    """Ranks as threads: the collectives in NumPy, written down from their definitions. `fault` may spoil a result."""

    def __init__(self, size: int, fault: Callable[[int, np.ndarray], None] | None = None) -> None:
        self.size, self.fault = size, fault
        self.meeting = threading.Barrier(size, timeout=30)
        self.shared: list[Any] = [None] * size
        self.mail: dict[tuple[int, int], queue.Queue[Any]] = {
            edge: queue.Queue()
            for edge in itertools.product(range(size), repeat=2)  # here, since two ranks may meet at one
        }

    def run(self, work: Callable[[FakeComm], Any]) -> list[Any]:
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            try:
                results[rank] = work(FakeComm(self, rank))
            except BaseException as error:
                errors.append(error)
                self.meeting.abort()

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        if errors:
            raise errors[0]
        return results


class FakeComm:
    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, world.size

    def _everyone(self, mine: Any) -> list[Any]:
        world = self.world
        world.shared[self.rank] = mine.copy() if isinstance(mine, np.ndarray) else mine
        world.meeting.wait()
        everyone = list(world.shared)
        world.meeting.wait()
        return everyone

    def _deliver(self, target: np.ndarray, values: np.ndarray) -> None:
        target[:] = values
        if self.world.fault is not None:
            self.world.fault(self.rank, target)

    def _reduce(self, buffers: list[np.ndarray], op: str) -> np.ndarray:
        ufunc = {"sum": np.add, "avg": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum,
                 "land": np.logical_and, "lor": np.logical_or, "lxor": np.logical_xor, "band": np.bitwise_and,
                 "bor": np.bitwise_or, "bxor": np.bitwise_xor}[op]  # fmt: skip
        total = buffers[0]
        for buffer in buffers[1:]:
            with np.errstate(over="ignore"):  # calls in place, again and again, grow without end
                total = ufunc(total, buffer).astype(total.dtype)
        if op == "avg":
            wide = total.astype(np.complex128 if total.dtype.kind == "c" else np.float64)
            total = wide / self.size if total.dtype.kind not in "iu" else np.trunc(wide / self.size)
        return total.astype(buffers[0].dtype)

    def allreduce(self, send, recv=None, op="sum"):
        self._deliver(send if recv is None else recv, self._reduce(self._everyone(send), op))

    def reduce(self, send, recv=None, op="sum", root=0):
        total = self._reduce(self._everyone(send), op)
        if self.rank == root:
            self._deliver(send if recv is None else recv, total)

    def allgather(self, send, recv):
        self._deliver(recv, np.concatenate(self._everyone(send)))

    def allgatherv(self, send, recv, *, counts):
        everyone = self._everyone(send)
        assert [len(part) for part in everyone] == list(counts)
        self._deliver(recv, np.concatenate(everyone))

    def reduce_scatter(self, send, recv, op="sum"):
        self.reduce_scatterv(send, recv, op, counts=(len(recv),) * self.size)

    def reduce_scatterv(self, send, recv, op="sum", *, counts):
        start = sum(counts[: self.rank])
        self._deliver(recv, self._reduce(self._everyone(send), op)[start : start + counts[self.rank]])

    def broadcast(self, buf, root=0):
        self._deliver(buf, self._everyone(buf)[root])

    def gather(self, send, recv=None, root=0):
        everyone = self._everyone(send)
        if self.rank == root:
            self._deliver(recv, np.concatenate(everyone))

    def scatter(self, send=None, recv=None, root=0):
        whole = self._everyone(send)[root]
        self._deliver(recv, whole[self.rank * len(recv) : (self.rank + 1) * len(recv)])

    def alltoall(self, send, recv, *, sendcounts=None, recvcounts=None):
        sendcounts = sendcounts or (len(send) // self.size,) * self.size
        parts = []
        for source, (buffer, counts) in enumerate(self._everyone((send.copy(), sendcounts))):
            start = sum(counts[: self.rank])
            parts.append(buffer[start : start + counts[self.rank]])
            assert recvcounts is None or len(parts[-1]) == recvcounts[source]
        self._deliver(recv, np.concatenate(parts))

    def sendrecv(self, sendbuf, dest, recvbuf, source):
        everyone = self._everyone((sendbuf.copy(), dest))
        data, to = everyone[source]
        assert to == self.rank
        self._deliver(recvbuf, data)

    def send(self, buf, dest):
        self.world.mail[self.rank, dest].put(buf.copy())

    def recv(self, buf, source):
        self._deliver(buf, self.world.mail[source, self.rank].get(timeout=60))

    def barrier(self):
        self.world.meeting.wait()

    def explain(self, op, nbytes):
        algorithm = "direct" if nbytes <= 4096 else "ring"
        return SimpleNamespace(algorithm=algorithm, transport="shm", channels=1 if nbytes <= 4096 else 2)


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    sweeps.add_arguments(parser)
    return parser.parse_args(words)


ROW_KEYS = [
    "op", "device", "transport", "algorithm", "ranks", "nbytes", "count", "dtype", "redop", "root", "place", "time_us",
    "p50_us", "p99_us", "algbw_gbs", "busbw_gbs", "wrong",
]  # fmt: skip
