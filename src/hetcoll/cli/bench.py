"""One rank's part of `hetcoll perf`: verifies, warms up, times and verifies again, for each size of each sweep."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Iterator
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import ArgumentError
from .cases import MESSAGES, ROOTED, Case, Library, bandwidths, shape
from .on_device import Stream, Talk
from .report import PlanLine, Row
from .sweeps import Job, expand, sizes
from .timing import Schedule, Timing, agree_on_estimate, slowest, take_samples

_HOST_NAME_BYTES = 64
_MOST_CAPTURED = 50  # calls in a graph


class Bench:
    """What the arguments ask for, on `comm`; this rank's buffers are on the GPU of `stream`, if any.

    `library` is measured in the place of hetcoll, whose communicator then serves what is around the calls. All methods
    are collective, and so is making one.
    """

    def __init__(
        self, comm: Any, args: argparse.Namespace, stream: Stream | None = None, library: Library | None = None
    ) -> None:
        self.comm, self._args, self._stream, self._library = comm, args, stream, library
        self._talk = comm if stream is None else Talk(comm, stream)
        self.sweeps = [(job, sizes(args, job.op, comm.size, job.dtype)) for job in expand(args, comm.size)]
        self.hosts = _gather_text(self._talk, socket.gethostname())
        self.devices = _gather_text(self._talk, "host" if stream is None else stream.device.vendor)
        if args.graph and "host" in self.devices:
            raise ArgumentError(f"--graph: wanted a GPU for every rank, rank {self.devices.index('host')} has none")
        self.device = "+".join(dict.fromkeys(self.devices))
        self.plans = {(plan.op, plan.nbytes): plan for plan in self._explained()}

    def _explained(self) -> Iterator[PlanLine]:
        for job, counts in self.sweeps:
            for elements in counts:
                nbytes = shape(job.op, self.comm.size, self.comm.rank, elements, job.root).total * job.dtype.itemsize
                told = self.comm.explain("p2p" if job.op in MESSAGES else job.op, nbytes)
                yield PlanLine(job.op, nbytes, told.algorithm, told.transport, told.channels)

    def measure(self, job: Job, elements: int, place: str) -> Row:
        """One operation at one size, "in" place or "out" of it."""
        comm, args, stream = self.comm, self._args, self._stream
        case = Case(comm, job.op, elements, job.dtype, job.redop, job.root, place == "in", stream, self._library)
        seeds = iter(range(1, 1 << 30))
        wrong, estimate = 0, 0.0
        for _ in range(args.check):
            bad, estimate = self._verified_call(case, next(seeds))
            wrong += bad
        case.fill(next(seeds))
        comm.barrier()
        if args.warmup:
            start = perf_counter_ns()
            for _ in range(args.warmup):
                case.call()
            if stream is not None:
                stream.synchronize()
            estimate = (perf_counter_ns() - start) / 1e3 / args.warmup
        schedule = Schedule.choose(agree_on_estimate(self._talk, estimate), args.iters)
        comm.barrier()
        own = Timing.of(self._samples(case, schedule) / case.messages)
        case.wait()
        if case.repeatable and args.check:
            wrong += case.wrong()
        for _ in range(args.check):
            wrong += self._verified_call(case, next(seeds))[0]
        timing, wrong = slowest(self._talk, own, wrong)
        plan = self.plans[(job.op, case.nbytes)]
        algbw, busbw = bandwidths(job.op, comm.size, case.nbytes, timing.mean_us)
        return Row(
            job.op, self.device, plan.transport, plan.algorithm, comm.size, case.nbytes, case.shape.count,
            "none" if job.op == "barrier" else job.dtype.label, "none" if job.redop is None else job.redop.label,
            job.root if job.op in ROOTED else -1, place, timing.mean_us, timing.p50_us, timing.p99_us, algbw, busbw,
            wrong if args.check else None,
        )  # fmt: skip

    def _samples(self, case: Case, schedule: Schedule) -> NDArray[np.float64]:
        """Microseconds a call of each sample on this rank."""
        args, stream = self._args, self._stream
        if stream is None or case.op == "barrier" or args.cputime:
            return take_samples(case.call, schedule)
        if args.blocking:

            def call() -> None:
                case.call()
                stream.synchronize()

            return take_samples(call, schedule)
        if not args.graph:
            return stream.samples(case.call, schedule)
        calls = min(_MOST_CAPTURED, schedule.samples * schedule.batch)
        graph = stream.captured(case.call, calls)
        try:
            return stream.samples(graph, Schedule(args.graph, 1)) / calls
        finally:
            stream.synchronize()
            graph.close()

    def _verified_call(self, case: Case, seed: int) -> tuple[int, float]:
        """New values, one call, every element compared: how many are wrong, and the microseconds of the call."""
        case.fill(seed)
        self.comm.barrier()
        start = perf_counter_ns()
        case.call()
        case.wait()
        spent = (perf_counter_ns() - start) / 1e3
        return case.wrong(), spent


def _gather_text(comm: Any, text: str) -> list[str]:
    """Every rank's `text`, cut to 64 bytes, in the order of the ranks. Collective."""
    mine = np.zeros(_HOST_NAME_BYTES, np.uint8)
    data = np.frombuffer(text.encode()[:_HOST_NAME_BYTES], np.uint8)
    mine[: data.size] = data
    rows = np.empty(_HOST_NAME_BYTES * comm.size, np.uint8)
    comm.allgather(mine, rows)
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows.reshape(comm.size, -1)]
