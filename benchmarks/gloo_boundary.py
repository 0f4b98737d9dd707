"""A process group that is NCCL inside each of two islands, with Gloo for what crosses: hetcoll is held against it.

The fairest form that we know of moving a mixed job's data over the processors. Collectives are hierarchical, so that
every rank sends only what must cross, to the rank of its place in the other island, and all ranks do so at once. What
crosses goes in chunks through pinned memory to Gloo's messages and back, copies beside messages; sums are made on the
GPU. As with PyTorch's own Gloo, threads carry calls out in the background, and whoever waits for one waits on the
host: two for collectives, and one for the messages to each rank and for those from each. These have carriers for each
direction, since threads come to them in any order: with one communicator for both, two ranks whose threads receive
first would stand still, whatever order their programs have.
"""

from __future__ import annotations

import collections
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetcoll.torch.launch import COLLECTIVES, LaneName
from hetcoll.torch.process_group import HetcollProcessGroup

NAME = "boundary"
CHUNK = 8 << 20  # bytes
CARRIERS = ("a", "b", "up", "down")  # of collectives by turns, of messages to ranks above and to ranks below
Part = tuple[Tensor | None, Tensor | None]  # what goes out, what comes in


def register() -> None:
    dist.Backend.register_backend(NAME, make, extended_api=True, devices=["cpu", "cuda"])


def make(options: Any, _backend_options: object = None) -> Any:
    return BoundaryGroup(options.store, options.group_rank, options.group_size, options.timeout)


class Carriers:
    """A Gloo of all ranks, and an NCCL of an island."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        half = size // 2
        self.gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo/", store), rank, size, timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        inside = dist.PrefixStore(f"island {rank // half}/", store)
        self.nccl = dist.ProcessGroupNCCL(inside, rank % half, half, options) if half > 1 else None


class Lane:
    """A thread that carries calls out in their order, on a stream."""

    def __init__(self, carriers: Carriers) -> None:
        self.gloo, self.nccl = carriers.gloo, carriers.nccl
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.stream = torch.cuda.Stream(self.device)
        self.jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        torch.cuda.set_device(self.device)
        HERE.lane = self
        with torch.cuda.stream(self.stream):
            while (job := self.jobs.get()) is not None:
                job()

    def exchange(self, parts: Sequence[Part], peer: int) -> None:
        """On the lane's thread: send and receive these bytes; while some are under way, others are copied."""
        staged = []
        for out, into in parts:
            sent, got = (None if each is None else pinned(each.numel()) for each in (out, into))
            if sent is not None:
                sent.copy_(out, non_blocking=True)
            staged.append((self.stream.record_event(), sent, got, into))
        coming = [None if got is None else self.gloo.recv([got], peer, i) for i, (_, _, got, _) in enumerate(staged)]
        going = []
        for i, (ready, sent, _, _) in enumerate(staged):
            if sent is not None:
                ready.synchronize()
                going.append(self.gloo.send([sent], peer, i))
        for work, (_, _, got, into) in zip(coming, staged, strict=True):
            if work is not None:
                work.wait()
                assert into is not None  # since something was received for it
                into.copy_(got, non_blocking=True)
        for work in going:
            work.wait()

    def close(self) -> None:
        self.jobs.put(None)
        self._thread.join(10)


HERE = threading.local()  # `lane`: of the thread that runs


class Call(dist.Work):
    """A call that a lane carries out; `wait` waits on the host until all of it is enqueued there."""

    def __init__(self, device: torch.device, outputs: list[Tensor]) -> None:
        super().__init__()
        self._outputs, self._done = outputs, threading.Event()
        self._error: Exception | None = None
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=[device])
        self._end: torch.cuda.Event | None = None

    def carry_out(self, ready: torch.cuda.Event, run: Callable[[], None]) -> None:
        try:
            HERE.lane.stream.wait_event(ready)
            run()
            self._end = HERE.lane.stream.record_event()
            self._future.set_result(self._outputs)
        except Exception as error:
            self._error = error
            self._future.set_exception(error)
        self._done.set()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._done.wait()
        if self._error is not None:
            raise self._error
        assert self._end is not None
        torch.cuda.current_stream().wait_event(self._end)
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        self.wait()
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._future


class BoundaryGroup(HetcollProcessGroup):
    """hetcoll's words for torch's calls, over `Boundary`; every call is carried out by a lane."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        comm: Any = Boundary(rank, size)
        super().__init__(comm, store, timeout.total_seconds())
        self._carriers = {name: Carriers(dist.PrefixStore(f"{name}/", store), rank, size, timeout) for name in CARRIERS}
        self._lanes = comm.lanes
        self._turn = 0
        self._kept: collections.deque[Call] = collections.deque(maxlen=1000)  # torch's C++ does not keep them

    def _lane(self, kind: str, which: int) -> Lane:
        """The messages to rank `which`, or from it, or every other collective."""
        if (kind, which) not in self._lanes:
            up = which > self.rank() if kind == "send" else which < self.rank()
            name = CARRIERS[which] if kind == COLLECTIVES[0] else "up" if up else "down"
            self._lanes[kind, which] = Lane(self._carriers[name])
        return self._lanes[kind, which]

    def batch(self, operations: Sequence[dist.P2POp]) -> list[dist.Work]:
        """None of them waits for another as it is."""
        return [
            (self.send if each.op is dist.isend else self.recv)([each.tensor], each.group_peer) for each in operations
        ]

    def _launch(
        self,
        opts: Any,
        tensors: Sequence[Tensor],
        start: Any,
        outputs: Sequence[Tensor],
        after: Callable[[], None] | None = None,
        *,
        lane: LaneName = COLLECTIVES,
        source: int | None = None,
    ) -> dist.Work:
        if not tensors:  # a barrier
            torch.cuda.synchronize()
            self._carriers["up"].gloo.barrier().wait()
        if lane == COLLECTIVES:
            lane, self._turn = (COLLECTIVES[0], self._turn), 1 - self._turn
        carrier = self._lane(*lane)
        call = Call(carrier.device, list(outputs))
        ready = torch.cuda.current_stream().record_event()

        def run() -> None:
            if tensors:
                start({})
            if after is not None:
                after()

        self._kept.append(call)
        carrier.jobs.put(lambda: call.carry_out(ready, run))
        if opts is not None and not opts.asyncOp:
            call.wait()
        return call


class Boundary:
    """What `HetcollProcessGroup` takes for a communicator: ranks 0 to k-1 are an island, k to 2k-1 the other one.

    Its methods run on a lane's thread and stream.
    """

    session, error = None, None

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.half = rank, size, size // 2
        self.island, self.place = divmod(rank, self.half)
        self.other = (rank + self.half) % size
        self.lanes: dict[LaneName, Lane] = {}
        nobody = SimpleNamespace(answers={}, leave_answers=lambda *_: None)  # asks: no receive is from any source
        self._core = SimpleNamespace(diagnosis=SimpleNamespace(questions=nobody))

    def _cross(self, out: Tensor, into: Tensor) -> None:
        """`out` to the other island's rank of this place, `into` from there."""
        HERE.lane.exchange(list(zip(chunks(out), chunks(into), strict=True)), self.other)

    def allreduce(self, buffer: Tensor, _recvbuf: None = None, op: str = "sum", **_: Any) -> None:
        assert op in ("sum", "avg")
        buffer = buffer.view(-1)
        nccl, mine, even = HERE.lane.nccl, buffer, buffer.numel() % self.half == 0
        if nccl is not None and even:
            mine = buffer.chunk(self.half)[self.place]
            nccl._reduce_scatter_base(mine, buffer).wait()
        elif nccl is not None:
            nccl.allreduce([buffer]).wait()
        theirs = torch.empty_like(mine)
        self._cross(mine, theirs)
        mine += theirs
        if nccl is not None and even:
            nccl._allgather_base(buffer, mine).wait()
        if op == "avg":
            buffer /= self.size

    def allgather(self, mine: Tensor, whole: Tensor, **_: Any) -> None:
        theirs = torch.empty_like(mine)
        self._cross(mine, theirs)
        for island, half in enumerate(whole.view(-1).chunk(2)):
            part = (mine if island == self.island else theirs).view(-1)
            if HERE.lane.nccl is None:
                half.copy_(part)
            else:
                HERE.lane.nccl._allgather_base(half, part).wait()

    def reduce_scatter(self, whole: Tensor, mine: Tensor, op: str = "sum", **_: Any) -> None:
        assert op in ("sum", "avg")
        parts = []
        for half in whole.view(-1).chunk(2):
            part = half
            if HERE.lane.nccl is not None:
                part = half.new_empty(mine.numel())
                HERE.lane.nccl._reduce_scatter_base(part, half).wait()
            parts.append(part)
        theirs = torch.empty_like(parts[0])
        self._cross(parts[1 - self.island], theirs)
        mine.view(-1).copy_(parts[self.island] + theirs)
        if op == "avg":
            mine /= self.size

    def broadcast(self, buffer: Tensor, root: int = 0, **_: Any) -> None:
        if self.rank == root:
            HERE.lane.exchange([(each, None) for each in chunks(buffer)], self.other)
        elif self.other == root:
            HERE.lane.exchange([(None, each) for each in chunks(buffer)], self.other)
        if HERE.lane.nccl is not None:
            options = dist.BroadcastOptions()
            options.rootRank = root % self.half
            HERE.lane.nccl.broadcast([buffer], options).wait()

    # Messages.

    def send(self, buffer: Tensor, peer: int, **_: Any) -> None:
        if peer // self.half == self.island:
            HERE.lane.nccl.send([buffer], peer % self.half, 0).wait()
        else:
            HERE.lane.exchange([(each, None) for each in chunks(buffer)], peer)

    def recv(self, buffer: Tensor, peer: int, **_: Any) -> None:
        if peer // self.half == self.island:
            HERE.lane.nccl.recv([buffer], peer % self.half, 0).wait()
        else:
            HERE.lane.exchange([(None, each) for each in chunks(buffer)], peer)

    def close(self) -> None:
        for lane in self.lanes.values():
            lane.close()

    def abort(self, reason: str = "") -> None:
        for lane in self.lanes.values():
            lane.jobs.put(None)


def pinned(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def chunks(tensor: Tensor) -> list[Tensor]:
    """Its bytes."""
    return list(tensor.detach().reshape(-1).view(torch.uint8).split(CHUNK))
