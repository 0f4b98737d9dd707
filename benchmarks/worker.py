"""One rank of a sweep over one library: the same measuring loop for all of them.

Started by peers.py in the library's own environment; needs NumPy and the library. Writes FILE.<rank>.json with one row
for each operation and size: the median and the best of this rank's samples, in microseconds per call, and the number
of wrong elements seen. Sizes are nccl-tests': the larger of the two buffers, in bytes.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
from collections.abc import Callable
from functools import partial
from itertools import repeat
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Protocol

import numpy as np

OPS = ("allreduce", "allgather", "reduce_scatter", "broadcast", "alltoall", "sendrecv")
MORE = ("reduce",)  # that only some sweeps have
IN_PLACE = ("allreduce", "reduce")  # Gloo's
PERIOD = 65521  # prime: a chunk in the wrong place does not look right
SAMPLE_US = 100.0  # calls are timed in batches that take about this long, of at most 100
MOST_SAMPLES, FEWEST_SAMPLES = 400, 5

Call = Callable[[], object]


class Library(Protocol):
    """What the loop wants of a library, which it makes once."""

    version: str
    rank: int
    size: int

    @property
    def barrier(self) -> Call: ...

    def bind(self, op: str, send: np.ndarray, recv: np.ndarray) -> Call:
        """The operation from one buffer to the other, once, each time that it is called."""

    def close(self) -> None: ...


class Hetcoll:
    """The library under test, as a user calls it."""

    def __init__(self) -> None:
        import hetcoll

        self.comm = hetcoll.init()
        self.version = hetcoll.__version__
        self.rank, self.size = self.comm.rank, self.comm.size
        self.barrier = self.comm.barrier

    def bind(self, op: str, send: np.ndarray, recv: np.ndarray) -> Call:
        comm = self.comm
        if op == "sendrecv":
            return partial(comm.sendrecv, send, (self.rank + 1) % self.size, recv, (self.rank - 1) % self.size)
        if op == "broadcast":
            return partial(comm.broadcast, recv)
        if op == "reduce":
            return partial(comm.reduce, send, recv if self.rank == 0 else None)
        return partial(getattr(comm, op), send, recv)

    def close(self) -> None:
        self.comm.close()


class Mpi:
    """Any MPI through mpi4py, with buffer arguments in the form that costs mpi4py least."""

    def __init__(self) -> None:
        import mpi4py

        mpi4py.rc.threads = False  # MPI_Init: the fastest level of thread support
        from mpi4py import MPI

        self.mpi, self.comm = MPI, MPI.COMM_WORLD
        self.version = MPI.Get_library_version().splitlines()[0].split(",")[0].strip()
        self.rank, self.size = self.comm.rank, self.comm.size
        self.barrier = self.comm.Barrier

    def bind(self, op: str, send: np.ndarray, recv: np.ndarray) -> Call:
        comm, kind = self.comm, self.mpi.FLOAT
        into = (recv, recv.size, kind)
        out = self.mpi.IN_PLACE if send is recv else (send, send.size, kind)
        match op:
            case "allreduce":
                return partial(comm.Allreduce, out, into, self.mpi.SUM)
            case "allgather":
                return partial(comm.Allgather, out, (recv, send.size, kind))
            case "reduce_scatter":
                return partial(comm.Reduce_scatter_block, (send, recv.size, kind), into, self.mpi.SUM)
            case "broadcast":
                return partial(comm.Bcast, into)
            case "reduce":
                return partial(comm.Reduce, out if self.rank == 0 else (send, send.size, kind), into, self.mpi.SUM, 0)
            case "alltoall":
                block = send.size // self.size
                return partial(comm.Alltoall, (send, block, kind), (recv, block, kind))
        to, source = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        return partial(comm.Sendrecv, out, to, 0, into, source, 0)

    def close(self) -> None:
        self.mpi.Finalize()


class Gloo:
    """PyTorch's Gloo. It has no out-of-place all-reduce or reduce: these are in place."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self.torch, self.dist = torch, dist
        dist.init_process_group("gloo")
        self.version = f"torch {torch.__version__}"
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.barrier = dist.barrier

    def bind(self, op: str, send: np.ndarray, recv: np.ndarray) -> Call:
        dist = self.dist
        out, into = self.torch.from_numpy(send), self.torch.from_numpy(recv)
        match op:
            case "allreduce":
                return partial(dist.all_reduce, into)
            case "allgather":
                return partial(dist.all_gather_single, into, out)
            case "reduce_scatter":
                return partial(dist.reduce_scatter_single, into, out)
            case "broadcast":
                return partial(dist.broadcast, into, 0)
            case "reduce":
                return partial(dist.reduce, into, 0)
            case "alltoall":
                return partial(dist.all_to_all_single, into, out)
        return partial(self._exchange, out, into, (self.rank + 1) % self.size, (self.rank - 1) % self.size)

    def _exchange(self, out: Any, into: Any, to: int, source: int) -> None:
        sending = self.dist.isend(out, to)
        self.dist.recv(into, source)
        sending.wait()

    def close(self) -> None:
        self.dist.destroy_process_group()


LIBRARIES: dict[str, Callable[[], Library]] = {"hetcoll": Hetcoll, "mpi": Mpi, "gloo": Gloo}


PAGES = ("numpy", "malloc", "small", "huge")
HUGE_PAGE = 2 << 20
LEAST_HUGE = 4 << 20  # bytes of an array from which on NumPy asks for huge pages


def aligned(count: int, pages: str = "numpy") -> np.ndarray:
    """`count` float32 that begin at a page, or at a huge one where it has them.

    `pages` are small or huge; by size, as NumPy asks the kernel for them; or as malloc has them: then what the process
    had freed before decides as well, which differs by library and from launch to launch.
    """
    huge = pages == "huge" or (pages == "numpy" and 4 * count >= LEAST_HUGE)
    page = HUGE_PAGE if huge else mmap.PAGESIZE
    length = -(-count * 4 // page) * page + page
    if pages == "malloc":
        memory = np.empty(length, np.uint8)
    else:
        mapping = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
        memory = np.frombuffer(mapping, np.uint8)
    start = -memory.ctypes.data % page
    return memory[start : start + count * 4].view(np.float32)


class Case:
    """One operation at one size: buffers, the call, the input and the right output."""

    def __init__(self, library: Library, op: str, nbytes: int, inplace: bool, pages: str = "numpy") -> None:
        rank, size = library.rank, library.size
        part = max(1, nbytes // 4 // size)
        total = part * size if op in ("allgather", "reduce_scatter", "alltoall") else nbytes // 4
        send_count = part if op == "allgather" else total
        recv_count = part if op == "reduce_scatter" else total
        self.op, self.rank, self.size, self.part, self.inplace = op, rank, size, part, inplace
        self.nbytes = total * 4
        self.send, self.recv = aligned(send_count, pages), aligned(recv_count, pages)
        self.call = library.bind(op, self.recv if inplace else self.send, self.recv)

    def stream(self, rank: int, seed: int, start: int, count: int) -> np.ndarray:
        """`count` elements of what `rank` contributes, from `start` on."""
        table = np.random.default_rng([seed, rank]).integers(-1000, 1001, PERIOD).astype(np.float32)
        return np.resize(np.roll(table, -(start % PERIOD)), count)

    def fill(self, seed: int) -> None:
        """The input, and nonsense where output belongs."""
        self.recv.fill(np.float32(1e30))
        target = self.recv if self.inplace or self.op == "broadcast" else self.send
        target[:] = self.stream(self.rank, seed, 0, target.size)

    def write(self) -> None:
        """The input once more: its lines are then in this core's cache, and in no other one's."""
        target = self.recv if self.inplace or self.op == "broadcast" else self.send
        target += np.float32(0)

    def wrong(self, seed: int) -> int:
        """How many elements of the output differ from what they must be; sums of small integers are exact."""
        op, part, count = self.op, self.part, self.recv.size
        if op == "reduce" and self.rank != 0:
            return 0
        if op in ("allreduce", "reduce_scatter", "reduce"):
            start = self.rank * part if op == "reduce_scatter" else 0
            want = sum(self.stream(rank, seed, start, count) for rank in range(self.size))
        elif op in ("allgather", "alltoall"):
            start = self.rank * part if op == "alltoall" else 0
            want = np.concatenate([self.stream(rank, seed, start, part) for rank in range(self.size)])
        else:
            want = self.stream(0 if op == "broadcast" else (self.rank - 1) % self.size, seed, 0, count)
        return int(np.count_nonzero(self.recv != want))


def verified_call(library: Library, case: Case, seed: int) -> int:
    """Fresh input, one call, every element compared."""
    case.fill(seed)
    library.barrier()
    case.call()
    return case.wrong(seed)


def agree(library: Library, estimate_us: float) -> float:
    """Rank 0's estimate, on all ranks."""
    box = np.array([estimate_us], np.float32)
    library.bind("broadcast", box, box)()
    return float(box[0])


def time_batch(library: Library, case: Case, calls: int) -> float:
    """Microseconds a call, one after the other."""
    library.barrier()
    start = perf_counter_ns()
    for _ in repeat(None, calls):
        case.call()
    return (perf_counter_ns() - start) / 1e3 / calls


def time_written(library: Library, case: Case, calls: int) -> float:
    """The same of calls before each of which the input was written, and then a barrier made."""
    spent = 0
    for _ in repeat(None, calls):
        case.write()
        library.barrier()
        start = perf_counter_ns()
        case.call()
        spent += perf_counter_ns() - start
    return spent / 1e3 / calls


def measure(library: Library, case: Case, budget_us: float, written: bool = False) -> dict[str, Any]:
    """Verify, time batches after a barrier each until the budget is spent, verify again."""
    sample = time_written if written else time_batch
    wrong = verified_call(library, case, 1)
    estimate = 0.0
    for calls in (2, 10, 50):  # the last one's time is the estimate
        if estimate * calls > budget_us:
            break
        estimate = max(agree(library, sample(library, case, calls)), 0.05)
    batch = round(min(100, max(1, SAMPLE_US / estimate)))
    count = round(min(MOST_SAMPLES, max(FEWEST_SAMPLES, budget_us / (estimate * batch))))
    samples = [sample(library, case, batch) for _ in range(count)]
    wrong += verified_call(library, case, 2)
    return {
        "op": case.op, "nbytes": case.nbytes, "median_us": statistics.median(samples), "best_us": min(samples),
        "samples": len(samples), "batch": batch, "wrong": wrong,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", choices=LIBRARIES, required=True)
    parser.add_argument("--ops", nargs="+", choices=[*OPS, *MORE], default=OPS)
    parser.add_argument("--sizes", nargs="+", type=int, required=True)
    parser.add_argument("--budget-ms", type=float, default=60.0, help="time for the samples of one size")
    parser.add_argument("--pages", choices=PAGES, default="numpy", help="of the buffers; see `aligned`")
    parser.add_argument("--inplace", action="store_true", help="all-reduces in one buffer, as Gloo's always are")
    parser.add_argument("--written", action="store_true", help="write the input before each call")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    library = LIBRARIES[args.library]()
    rows = []
    for op in args.ops:
        for nbytes in args.sizes:
            inplace = (op == "allreduce" and args.inplace) or (op in IN_PLACE and args.library == "gloo")
            case = Case(library, op, nbytes, inplace, args.pages)
            rows.append(measure(library, case, args.budget_ms * 1e3, args.written))
    document = {"version": library.version, "rank": library.rank, "size": library.size, "rows": rows}
    partial_file = Path(f"{args.out}.{library.rank}.part")
    partial_file.write_text(json.dumps(document))
    os.replace(partial_file, f"{args.out}.{library.rank}.json")  # complete or not there
    library.barrier()
    library.close()


if __name__ == "__main__":
    main()
