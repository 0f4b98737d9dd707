"""One rank of benchmarks/gpus.py: measures what it is told to, by lines of JSON on stdin, and answers on stdout.

Its library is hetcoll; NCCL by its C interface, on the communicator of hetcoll's island; PyTorch's NCCL; PyTorch's Gloo
on pinned copies in host memory; or nothing but copies (gpu_limits.py). Memory is PyTorch's where that has CUDA, and
`DeviceArray` otherwise, as for the library "plain", which is hetcoll without PyTorch. "by copies" is hetcoll whose
messages are all done by copy engines. HETCOLL_DEVICE says what a rank
is: ``cpu``, or ``hip`` for a GPU that poses as AMD's.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gpu_limits import Copies, Nothing

import hetcoll
from hetcoll.gpu import message_kernel
from hetcoll.gpu.array import DeviceArray
from hetcoll.gpu.executor import GpuExecutor
from hetcoll.types import DType, ReduceOp
from hetcoll.vendors.devices import cuda, hip
from hetcoll.vendors.devices.base import Device

PERIOD = 977  # prime, and small: sums of float32 are exact
WARM, ROUNDS, ALONE = 3, 2, 20
_P = ctypes.c_void_p
_REDUCES = ctypes.CFUNCTYPE(ctypes.c_int, _P, _P, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, _P, _P)
_GATHERS = ctypes.CFUNCTYPE(ctypes.c_int, _P, _P, ctypes.c_size_t, ctypes.c_int, _P, _P)
_MOVES = ctypes.CFUNCTYPE(ctypes.c_int, _P, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, _P, _P)
_GROUPS = ctypes.CFUNCTYPE(ctypes.c_int)

Call = Callable[[], object]
HALVES = ("oneway", "pingpong")  # of a message each way
CLEARED = 64 << 20  # bytes of a buffer up to which it is cleared before each row


def has_torch() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


class HostArray:
    """Of a rank without a GPU, with what is used of `DeviceArray`."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.values = values

    def buffer(self, start: int, count: int) -> np.ndarray[Any, Any]:
        return self.values[start : start + count]

    def get(self) -> np.ndarray[Any, Any]:
        return self.values


class Rank:
    """This rank's GPU, if it has one, two buffers there of the largest size, and a stream."""

    def __init__(self, library: str, largest: int) -> None:
        if library == "by copies":
            message_kernel._MOST = 0
        self.comm = hetcoll.init()
        self.rank, self.size = self.comm.rank, self.comm.size
        self.next, self.last = (self.rank + 1) % self.size, (self.rank - 1) % self.size  # neighbours in a ring
        wish = os.environ.get("HETCOLL_DEVICE", "")
        self.device = None if wish == "cpu" else self.choose((hip if wish == "hip" else cuda).devices())
        self.pattern = np.arange(largest // 4, dtype=np.float32) % PERIOD
        self.send: DeviceArray | HostArray
        self.recv: DeviceArray | HostArray
        if self.device is None:
            self.send, self.recv = HostArray(self.pattern + self.rank), HostArray(np.zeros_like(self.pattern))
        else:
            self.device.activate()
            self.send = DeviceArray.of(self.device, self.pattern + self.rank)
            self.recv = DeviceArray(self.device, largest // 4)
        self.torch = library != "plain" and self.device is not None and wish != "hip" and has_torch()
        self.stream = 0
        self.only_copies: Copies | None = None
        if self.torch:
            import torch

            torch.cuda.set_device(self.rank % torch.cuda.device_count())
            side = torch.cuda.Stream()
            torch.cuda.set_stream(side)
            self.stream = side.cuda_stream
            self.tensors = [torch.as_tensor(each, device="cuda") for each in (self.send, self.recv)]
        self.bind: Callable[[str, int, int], Call] = {
            "hetcoll": self.hetcoll, "plain": self.hetcoll, "by copies": self.hetcoll,
            "nccl": self.nccl, "torch": self.by_torch,
            "gloo": self.gloo if self.device is not None else self.gloo_of_host, "copies": self.copies,
        }[library]  # fmt: skip

    def part(self, which: int, count: int) -> Any:
        if self.torch:
            return self.tensors[which][:count]
        return (self.send, self.recv)[which].buffer(0, count)

    def in_turn(self, op: str, send: Call, recv: Call) -> Call:
        """The even rank sends first; its peer answers, unless it is one way."""
        mine = (send, recv) if self.rank % 2 == 0 else (recv, send)
        return mine[0] if op == "oneway" else lambda: (mine[0](), mine[1]())

    @staticmethod
    def choose(devices: Sequence[Device]) -> Device:
        """Ranks share GPUs where there are fewer."""
        return devices[int(os.environ["RANK"]) % len(devices)]

    # The libraries. Counts are elements of the two buffers.

    def hetcoll(self, op: str, send: int, recv: int) -> Call:
        out, into = self.part(0, send), self.part(1, recv)
        if op in HALVES:
            halves = (lambda: self.comm.send(out, self.next), lambda: self.comm.recv(into, self.last))
            return self.in_turn(op, *halves)
        call = getattr(self.comm, op)
        if op == "sendrecv":
            return lambda: call(out, self.next, into, self.last)
        return lambda: call(out, into)

    def nccl(self, op: str, send: int, recv: int) -> Call:
        assert isinstance(self.send, DeviceArray)
        assert isinstance(self.recv, DeviceArray)
        self.comm.allreduce(self.send.buffer(0, 4), self.recv.buffer(0, 4), stream=self.stream)
        path = self.comm._gpus.executor
        assert isinstance(path, GpuExecutor)
        island = path._islands.island
        assert island is not None
        assert island.size == self.size
        functions, kind, tail = island.functions(), int(DType.FLOAT32), (island.handle, self.stream)
        ends = (self.send.ptr, self.recv.ptr)
        if op in ("sendrecv", "alltoall", *HALVES):
            return self.nccl_messages(op, send, functions, kind, tail)
        if op == "allgather":
            gather = _GATHERS(functions["ncclAllGather"])
            return lambda: gather(*ends, send, kind, *tail)
        reduce = _REDUCES(functions["ncclAllReduce" if op == "allreduce" else "ncclReduceScatter"])
        return lambda: reduce(*ends, recv, kind, int(ReduceOp.SUM), *tail)

    def nccl_messages(
        self, op: str, count: int, functions: Mapping[str, int], kind: int, tail: tuple[int, int]
    ) -> Call:
        names = ("ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd")
        start, end = (_GROUPS(functions[name]) for name in (names[0], names[3]))
        send, recv = (_MOVES(functions[name]) for name in names[1:3])
        assert isinstance(self.send, DeviceArray)
        assert isinstance(self.recv, DeviceArray)
        n, out, into = count // self.size, self.send.ptr, self.recv.ptr
        if op in HALVES:
            halves = (
                lambda: send(out, count, kind, self.next, *tail),
                lambda: recv(into, count, kind, self.last, *tail),
            )
            return self.in_turn(op, *halves)
        ends = [(out, count, self.next, into, self.last)]
        if op == "alltoall":
            ends = [(out + 4 * n * peer, n, peer, into + 4 * n * peer, peer) for peer in range(self.size)]

        def call() -> None:
            start()
            for source, length, dest, target, origin in ends:
                send(source, length, kind, dest, *tail)
                recv(target, length, kind, origin, *tail)
            end()

        return call

    def group(self, backend: str) -> Any:
        import torch.distributed as dist

        if not dist.is_initialized():
            where = f"tcp://127.0.0.1:{os.environ['GPUS_PORT']}"
            dist.init_process_group(backend, init_method=where, rank=self.rank, world_size=self.size)
        return dist

    def by_torch(self, op: str, send: int, recv: int) -> Call:
        dist, out, into = self.group("nccl"), self.part(0, send), self.part(1, recv)
        if op == "allgather":
            return lambda: dist.all_gather_into_tensor(into, out)
        if op == "reduce_scatter":
            return lambda: dist.reduce_scatter_tensor(into, out)
        if op == "alltoall":
            return lambda: dist.all_to_all_single(into, out)
        if op == "sendrecv":
            ends = ((dist.isend, out, self.next), (dist.irecv, into, self.last))
            return lambda: [work.wait() for work in dist.batch_isend_irecv([dist.P2POp(*end) for end in ends])]
        into.copy_(out)  # it has no all-reduce out of place: the sums grow, and are not verified
        return lambda: dist.all_reduce(into)

    def gloo(self, op: str, send: int, recv: int) -> Call:
        import torch

        assert op == "allreduce", "the only one that is compared"
        dist, out, into = self.group("gloo"), self.part(0, send), self.part(1, recv)
        host = torch.empty(send, pin_memory=True)

        def call() -> None:
            host.copy_(out)
            dist.all_reduce(host)
            into.copy_(host)

        return call

    def gloo_of_host(self, op: str, send: int, recv: int) -> Call:
        import torch

        assert op == "allreduce", "the only one that is compared"
        dist, out, into = self.group("gloo"), *(torch.from_numpy(self.part(which, send)) for which in (0, 1))

        def call() -> None:
            into.copy_(out)
            dist.all_reduce(into)

        return call

    def copies(self, op: str, send: int, recv: int) -> Call:
        assert self.device is not None
        assert isinstance(self.recv, DeviceArray)
        if self.only_copies is None:
            self.only_copies = Copies(self.comm, self.device, self.stream)
        return self.only_copies.bind(op, self.recv.ptr, 4 * max(send, recv))

    # Measuring.

    def synchronize(self) -> None:
        if self.device is not None:
            self.device.synchronize(self.stream)

    def settle(self) -> None:
        self.synchronize()
        self.comm.barrier()

    def row(self, op: str, nbytes: int, calls: int) -> dict[str, float]:
        """The time of one call in a row of so many, once."""
        call = self.bind(op, nbytes // 4, nbytes // 4)
        call()
        self.settle()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        self.synchronize()
        return {"us": 1e6 * (time.perf_counter() - start) / calls}

    def measure(self, op: str, nbytes: int, most: int = 200) -> dict[str, float]:
        """This rank's times of one call in microseconds, in rows of at most so many; `nbytes` is the larger buffer."""
        whole, share = nbytes // 4, nbytes // 4 // self.size
        send, recv = {"allgather": (share, whole), "reduce_scatter": (whole, share)}.get(op, (whole, whole))
        if isinstance(self.recv, DeviceArray) and self.recv.nbytes <= CLEARED:
            self.recv.set(np.zeros_like(self.pattern))  # what another operation left is not to pass for a result
            self.settle()
        call = self.bind(op, send, recv)
        call()
        return self.timed(call, nbytes, most) | {"wrong": self.wrong(op, send, recv)}

    def timed(self, call: Call, nbytes: int, most: int = 200) -> dict[str, float]:
        count = max(4, min(most, 1_200_000_000 // max(nbytes, 4 << 20)))
        for _ in range(WARM):
            call()
        best = cost = float("inf")
        for _ in range(ROUNDS):
            self.settle()
            start = time.perf_counter()
            for _ in range(count):
                call()
            cost = min(cost, (time.perf_counter() - start) / count)
            self.synchronize()
            best = min(best, (time.perf_counter() - start) / count)
        alone = []
        for _ in range(min(count, ALONE)):
            self.settle()
            start = time.perf_counter()
            call()
            self.synchronize()
            alone.append(time.perf_counter() - start)
        found = {"us": best, "sync": statistics.median(alone), "cost": cost}
        return {name: 1e6 * seconds for name, seconds in found.items()}

    def wrong(self, op: str, send: int, recv: int) -> int:
        if self.bind == self.copies or (self.bind == self.by_torch and op == "allreduce"):
            return 0
        if op == "reduce" and self.rank > 0:  # the root has the sum
            return 0
        got, size = self.recv.get()[:recv], self.size
        if op == "allgather":
            want = np.concatenate([self.pattern[:send] + rank for rank in range(size)])
        elif op == "oneway" and self.rank % 2 == 0:
            return 0
        elif op in ("sendrecv", *HALVES):
            want = self.pattern[:recv] + self.last
        elif op == "alltoall":
            n = recv // size
            want = np.concatenate([self.pattern[self.rank * n : (self.rank + 1) * n] + rank for rank in range(size)])
        else:
            first = self.rank * recv if op == "reduce_scatter" else 0
            want = size * self.pattern[first : first + recv] + size * (size - 1) // 2
        return int((got[: len(want)] != want).sum())

    def nothing(self) -> dict[str, float]:
        """What an empty kernel takes: the least that a call on a GPU can."""
        assert self.device is not None
        return self.timed(Nothing(self.device, self.stream), 0) | {"wrong": 0.0}

    def product(self, nbytes: int) -> dict[str, float]:
        """What all-reduces of `nbytes` beside a product of matrices take from it: its time alone and beside, in us."""
        import torch

        a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        out, other = torch.empty_like(a), torch.cuda.Stream()
        call = self.bind("allreduce", nbytes // 4, nbytes // 4)
        times: dict[int, list[float]] = {0: [], 12: []}
        for calls in (0, 12) * 4:  # by turns, since the GPU's clock follows its power
            self.settle()
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(calls):  # longer under way than the products are
                call()
            with torch.cuda.stream(other):
                begin.record()
                for _ in range(40):
                    torch.matmul(a, a, out=out)
                end.record()
            torch.cuda.synchronize()
            times[calls].append(begin.elapsed_time(end) * 1e3 / 40)
        alone, beside = (statistics.median(found[1:]) for found in times.values())
        return {"alone": alone, "beside": beside, "wrong": 0.0}


def main() -> None:
    rank = Rank(sys.argv[1], int(sys.argv[2]))
    answers = os.fdopen(os.dup(1), "w")  # what libraries print goes to stderr
    os.dup2(2, 1)
    for line in sys.stdin:
        told = json.loads(line)
        if told["op"] == "product":
            found = rank.product(told["nbytes"])
        elif told["op"] == "nothing":
            found = rank.nothing()
        else:
            found = rank.row(**told) if "calls" in told else rank.measure(**told)
        answers.write(json.dumps(found) + "\n")
        answers.flush()
    rank.settle()
    rank.comm.close()


if __name__ == "__main__":
    main()
