"""One rank of benchmarks/gpus.py: measures what lines of JSON on stdin ask for, and answers each with one on stdout.

It measures as `hetcoll perf` does (`hetcoll.cli.bench`): hetcoll itself, or in its place NCCL by its C interface on the
communicator of hetcoll's island, PyTorch's NCCL, PyTorch's Gloo on pinned copies in host memory, or nothing but copies
(gpu_limits.py). "by copies" is hetcoll whose messages are all done by copy engines, "by library" and "by kernels" one
whose messages inside an island all are, as far as they can be, "windows" hetcoll with what ranks give in windows, "nccl
windows" NCCL with all buffers in its own. HETCOLL_DEVICE says where a rank's buffers are: ``cpu``, ``cuda:0``, or
``hip:0`` for a GPU that poses as AMD's.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property, partial
from typing import Any

import numpy as np
from gpu_limits import Copies, Nothing

import hetcoll
from hetcoll.cli.bench import Bench
from hetcoll.cli.cases import REDUCING, Case, Library, bind, in_turn
from hetcoll.cli.on_device import Stream, Talk
from hetcoll.cli.sweeps import add_arguments
from hetcoll.cli.timing import Schedule, agree_on_estimate, take_samples
from hetcoll.gpu import planner
from hetcoll.gpu.array import DeviceArray
from hetcoll.gpu.executor import GpuExecutor
from hetcoll.types import DType, ReduceOp
from hetcoll.vendors.devices.kernels.table import MESSAGE_MOST

FLOAT, SUM = int(DType.FLOAT32), int(ReduceOp.SUM)
EMPTY_CALLS = Schedule(samples=20, batch=10)
CALLS_ALONE = Schedule(samples=10, batch=1)
PAGE, SYMMETRIC = 4096, 1  # NCCL_WIN_COLL_SYMMETRIC
PRODUCTS, AHEAD = 40, 2  # products in a row, and calls that are enqueued before them
_P = ctypes.c_void_p
_REDUCES = ctypes.CFUNCTYPE(ctypes.c_int, _P, _P, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, _P, _P)
_ROOTED = ctypes.CFUNCTYPE(ctypes.c_int, _P, _P, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, _P, _P)
_GATHERS = ctypes.CFUNCTYPE(ctypes.c_int, _P, _P, ctypes.c_size_t, ctypes.c_int, _P, _P)
_MOVES = ctypes.CFUNCTYPE(ctypes.c_int, _P, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, _P, _P)
_GROUPS = ctypes.CFUNCTYPE(ctypes.c_int)

Call = Callable[[], object]


class Nccl:
    """By its C interface, on the communicator of the island that all ranks are."""

    def __init__(self, comm: hetcoll.Communicator, stream: Stream) -> None:
        one = DeviceArray.of(stream.device, np.ones(4, np.float32)).buffer(0, 4)
        comm.allreduce(one, stream=stream.handle)  # makes it
        path = comm._gpus.executor
        assert isinstance(path, GpuExecutor)
        island = path._islands.island
        assert island is not None
        assert island.size == comm.size
        self._functions, self._tail = island.functions(), (island.handle, stream.handle)
        self._path = island.library.path

    def bind(self, case: Case, send: Any, recv: Any) -> Call:
        if case.op == "allgather":
            gather = _GATHERS(self._functions["ncclAllGather"])
            return partial(gather, send.address, recv.address, send.count, FLOAT, *self._tail)
        if case.op in ("allreduce", "reduce_scatter"):
            reduce = _REDUCES(self._functions["ncclAllReduce" if case.op == "allreduce" else "ncclReduceScatter"])
            return partial(reduce, send.address, recv.address, recv.count, FLOAT, SUM, *self._tail)
        if case.op == "reduce":
            into = None if recv is None else recv.address  # at the root alone
            reduce = _ROOTED(self._functions["ncclReduce"])
            return partial(reduce, send.address, into, send.count, FLOAT, SUM, case.root, *self._tail)
        if case.op in ("oneway", "pingpong"):
            peer = case.rank ^ 1
            return in_turn(case, self._move("ncclSend", send, peer), self._move("ncclRecv", recv, peer))
        return self._exchange(case, send, recv)

    def _move(self, name: str, memory: Any, peer: int, first: int = 0, count: int | None = None) -> Call:
        if memory is None:
            return lambda: None
        length = memory.count if count is None else count
        return partial(_MOVES(self._functions[name]), memory.address + 4 * first, length, FLOAT, peer, *self._tail)

    def _exchange(self, case: Case, send: Any, recv: Any) -> Call:
        """A ring of messages, or one to each rank, as a group."""
        if case.op == "sendrecv":
            ends = [("ncclSend", send, (case.rank + 1) % case.size), ("ncclRecv", recv, (case.rank - 1) % case.size)]
            moves = [self._move(*end) for end in ends]
        else:
            share = send.count // case.size
            both = (("ncclSend", send), ("ncclRecv", recv))
            moves = [self._move(*end, peer, peer * share, share) for peer in range(case.size) for end in both]
        start, end = (_GROUPS(self._functions[name]) for name in ("ncclGroupStart", "ncclGroupEnd"))
        calls: list[Call] = [start, *moves, end]

        def call() -> None:
            for each in calls:
                each()

        return call


class NcclWindows(Nccl):
    """On memory that NCCL itself allocates, in symmetric windows."""

    def bind(self, case: Case, send: Any, recv: Any) -> Call:
        mirror, library = case._mirror, ctypes.CDLL(self._path)
        assert mirror is not None
        for owner in mirror._owners:
            taken, window, room = _P(), _P(), ctypes.c_size_t(owner.nbytes + PAGE)
            failed = library.ncclMemAlloc(ctypes.byref(taken), room)
            failed = failed or library.ncclCommWindowRegister(
                _P(self._tail[0]), taken, room, ctypes.byref(window), SYMMETRIC
            )
            if failed or not window.value:
                raise RuntimeError(f"NCCL gives no symmetric window: {failed}, see NCCL_DEBUG=WARN")
            base = taken.value or 0
            mirror._there[id(owner)] = base + (owner.ctypes.data - base) % PAGE
        return super().bind(case, *case._ends())


class Windows:
    """hetcoll, with what each rank gives in a window."""

    def __init__(self, comm: hetcoll.Communicator, _: Stream) -> None:
        self._comm, self._last = comm, contextlib.ExitStack()

    def bind(self, case: Case, send: Any, recv: Any) -> Call:
        self._last.close()
        self._last.callback(self._comm.window(recv if case.inplace else send).close)
        return bind(self._comm, case, send, recv)


class Torch:
    """PyTorch's process group of a backend. Gloo has no GPU: it works on a copy in pinned memory."""

    def __init__(self, comm: hetcoll.Communicator, stream: Stream | None, backend: str) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist, self._copied = torch, dist, backend == "gloo" and stream is not None
        if stream is not None:
            torch.cuda.set_device(stream.device.index)
            torch.cuda.set_stream(torch.cuda.ExternalStream(stream.handle))
        where = f"tcp://127.0.0.1:{os.environ['GPUS_PORT']}"
        dist.init_process_group(backend, init_method=where, rank=comm.rank, world_size=comm.size)

    def _tensor(self, memory: Any) -> Any:
        if isinstance(memory, np.ndarray):
            return self._torch.from_numpy(memory)
        place = (memory.address, False)
        described = {"shape": (memory.count,), "typestr": "<f4", "data": place, "version": 3}
        return self._torch.as_tensor(type("Memory", (), {"__cuda_array_interface__": described})(), device="cuda")

    def bind(self, case: Case, send: Any, recv: Any) -> Call:
        dist, out, into = self._dist, self._tensor(send), self._tensor(recv)
        match case.op:
            case "allreduce" if self._copied:
                host = self._torch.empty(into.shape, pin_memory=True)
                return lambda: (host.copy_(into), dist.all_reduce(host), into.copy_(host))
            case "allreduce":
                return partial(dist.all_reduce, into)  # in place alone
            case "allgather":
                return partial(dist.all_gather_into_tensor, into, out)
            case "reduce_scatter":
                return partial(dist.reduce_scatter_tensor, into, out)
            case "alltoall":
                return partial(dist.all_to_all_single, into, out)
            case "sendrecv":
                ring = (dist.isend, out, (case.rank + 1) % case.size), (dist.irecv, into, (case.rank - 1) % case.size)
                return lambda: [work.wait() for work in dist.batch_isend_irecv([dist.P2POp(*end) for end in ring])]
        raise ValueError(f"{case.op} is not compared with PyTorch")


class OnlyCopies:
    """What crosses between islands; nobody gets a result."""

    def __init__(self, comm: hetcoll.Communicator, stream: Stream) -> None:
        self._copies = Copies(comm, stream.device, stream.handle)

    def bind(self, case: Case, send: Any, recv: Any) -> Call:
        memory = recv if recv.count >= send.count else send
        return self._copies.bind(case.op, memory.address, 4 * memory.count)


class Products:
    """Products of matrices on a stream of their own, beside calls on `stream`."""

    def __init__(self, stream: Stream) -> None:
        import torch

        torch.cuda.set_device(stream.device.index)
        self._torch, self._stream = torch, stream
        self._a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        self._out, self._other = torch.empty_like(self._a), torch.cuda.Stream()

    def run(self, call: Call, calls: int) -> tuple[float, float]:
        """What a product takes beside so many calls, and a call meanwhile, in us by the GPU's clock; nan for no calls.

        The host enqueues most calls while the GPU is at work, as in a training step.
        """
        device, mine = self._stream.device, self._stream.handle
        self._torch.cuda.synchronize()
        start, begin, end, *ends = (device.event(timing=True) for _ in range(3 + calls))
        device.record(start, mine)
        for mark in ends[:AHEAD]:
            call()
            device.record(mark, mine)
        with self._torch.cuda.stream(self._other):
            device.record(begin, self._other.cuda_stream)
            for _ in range(PRODUCTS):
                self._torch.matmul(self._a, self._a, out=self._out)
            device.record(end, self._other.cuda_stream)
        for mark in ends[AHEAD:]:
            call()
            device.record(mark, mine)
        self._torch.cuda.synchronize()
        first, last, *done = (device.elapsed(start, event) * 1e6 for event in (begin, end, *ends))
        for event in (start, begin, end, *ends):
            device.destroy_event(event)
        product = (last - first) / PRODUCTS
        if not calls:
            return product, float("nan")
        if done[-1] < last:
            raise RuntimeError(f"wanted calls for as long as products: these {last:.0f} us, those {done[-1]:.0f}")
        before, after = np.interp([first, last], [0.0, *done], range(calls + 1))  # of the calls, when products are
        return product, (last - first) / float(after - before)


class Rank:
    def __init__(self, library: str) -> None:
        if library == "by copies":
            planner.MOST_BY_KERNEL = 0
        if library in ("by library", "by kernels"):
            planner.MOST_INSIDE = MESSAGE_MOST if library == "by kernels" else 0
        self.stream = Stream.of(os.environ["HETCOLL_DEVICE"])
        self.comm, self._name = hetcoll.init(), library
        self._parser = argparse.ArgumentParser()
        add_arguments(self._parser)

    @cached_property
    def library(self) -> Library | None:
        """What is measured in the place of hetcoll."""
        if self._name in ("gloo", "torch"):
            return Torch(self.comm, self.stream, "gloo" if self._name == "gloo" else "nccl")
        if self._name == "hetcoll" or self._name.startswith("by "):
            return None
        assert self.stream is not None
        kinds: dict[str, Callable[[hetcoll.Communicator, Stream], Library]]
        kinds = {"nccl": Nccl, "nccl windows": NcclWindows, "windows": Windows, "copies": OnlyCopies}
        return kinds[self._name](self.comm, self.stream)

    def measure(self, words: list[str], place: str) -> dict[str, Any]:
        """The `Row` of `hetcoll perf` of one operation at one size, "in" place or "out" of it."""
        bench = Bench(self.comm, self._parser.parse_args(words), self.stream, self.library)
        ((job, (elements,)),) = bench.sweeps
        return asdict(bench.measure(job, elements, place))

    def nothing(self) -> dict[str, float]:
        """What an empty kernel takes: the least that a call on a GPU can."""
        stream = self.stream
        assert stream is not None
        call = Nothing(stream.device, stream.handle)

        def alone() -> None:
            call()
            stream.synchronize()

        found = {"us": stream.samples(call, EMPTY_CALLS), "sync": take_samples(alone, EMPTY_CALLS)}
        return {name: float(np.median(samples)) for name, samples in found.items()}

    def product(self, op: str, nbytes: int) -> dict[str, float]:
        """What calls of `nbytes` take from products of matrices beside them, in us: a product alone and beside, a call
        alone and beside; and how much of the results was wrong."""
        stream = self.stream
        assert stream is not None
        op, inside, _ = op.partition(" in place")
        redop, inplace = ReduceOp.SUM if op in REDUCING else None, bool(inside) or op == "allreduce"
        case = Case(self.comm, op, nbytes // 4, DType.FLOAT32, redop, 0, inplace, stream, self.library)
        wrong = self._verified(case, 1)
        call = float(np.median(stream.samples(case.call, CALLS_ALONE)))
        products = Products(stream)
        alone = min(products.run(case.call, 0)[0] for _ in range(2))
        longer = 2 * PRODUCTS * alone / call  # under way than the products are
        calls = AHEAD + round(agree_on_estimate(Talk(self.comm, stream), longer))
        times: dict[int, list[tuple[float, float]]] = {0: [], calls: []}
        for turn in (0, calls) * 3:  # by turns, since the GPU's clock follows its power
            stream.synchronize()
            self.comm.barrier()
            times[turn].append(products.run(case.call, turn))
        wrong += case.wrong() if case.repeatable else 0
        wrong += self._verified(case, 2)
        alone, beside = (statistics.median(product for product, _ in found) for found in times.values())
        call_beside = statistics.median(each for _, each in times[calls])
        return {"alone": alone, "beside": beside, "call": call, "call_beside": call_beside, "wrong": float(wrong)}

    def _verified(self, case: Case, seed: int) -> int:
        """What one call gets wrong."""
        case.fill(seed)
        self.comm.barrier()
        case.call()
        case.wait()
        return case.wrong()


def main() -> None:
    rank = Rank(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")  # what libraries print goes to stderr
    os.dup2(2, 1)
    for line in sys.stdin:
        told = json.loads(line)
        found = getattr(rank, told.pop("do"))(**told)
        answers.write(json.dumps(found) + "\n")
        answers.flush()
    if rank.stream is not None:
        rank.stream.synchronize()
    rank.comm.barrier()
    rank.comm.close()


if __name__ == "__main__":
    main()
