"""A process group that is NCCL inside each of two islands, with Gloo for what crosses: hetcoll is held against it.

The fairest form that we know of moving a mixed job's data over the processors. Collectives are hierarchical, so that
every rank sends only what must cross, to the rank of its place in the other island, and all ranks do so at once. What
crosses goes in chunks through pinned memory to Gloo's messages and back, copies beside messages; sums are made on the
GPU. As with PyTorch's own Gloo, threads carry calls out in the background, two for collectives, and whoever waits for
one waits on the host.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetcoll.torch.process_group import HetcollProcessGroup

NAME = "boundary"
CHUNK = 8 << 20  # bytes
LANES = {"collectives 0": "a", "collectives 1": "b", "batch": "messages", "send": "messages", "recv": "messages"}
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
    """A thread that carries calls out in their order, on a stream. Lanes whose messages meet share carriers."""

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
        stores = {name: dist.PrefixStore(f"{name}/", store) for name in sorted(set(LANES.values()))}
        carriers = {name: Carriers(each, rank, size, timeout) for name, each in stores.items()}
        self._lanes = {name: Lane(carriers[which]) for name, which in LANES.items()}
        self._turn = 0
        self._kept: collections.deque[Call] = collections.deque(maxlen=1000)  # torch's C++ does not keep them
        comm.lanes = list(self._lanes.values())

    def _launch(
        self,
        opts: Any,
        tensors: Sequence[Tensor],
        start: Any,
        outputs: Sequence[Tensor],
        after: Callable[[], None] | None = None,
        *,
        lane: str = "collectives",
        source: int | None = None,
    ) -> dist.Work:
        if not tensors:  # a barrier
            torch.cuda.synchronize()
            self._lanes["send"].gloo.barrier().wait()
        if lane == "collectives":
            lane, self._turn = f"collectives {self._turn}", 1 - self._turn
        carrier = self._lanes[lane]
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
        self.lanes: list[Lane] = []

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
        self._move(peer, (buffer, None))

    def recv(self, buffer: Tensor, peer: int, **_: Any) -> None:
        self._move(peer, (None, buffer))

    def sendrecv(self, out: Tensor, dest: int, into: Tensor, source: int) -> None:
        self._start([(dest, (out, None)), (source, (None, into))])

    def _move(self, peer: int, part: Part) -> None:
        grouped = getattr(HERE, "grouped", None)
        if grouped is not None:
            grouped.append((peer, part))
        else:
            self._start([(peer, part)])

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Messages that do not wait for one another."""
        HERE.grouped = []
        yield
        moves, HERE.grouped = HERE.grouped, None
        self._start(moves)

    def _start(self, moves: list[tuple[int, Part]]) -> None:
        inside = [(peer, part) for peer, part in moves if peer // self.half == self.island]
        nccl, work = HERE.lane.nccl, None
        if len(inside) > 1:
            nccl._start_coalescing()
        for peer, (out, into) in inside:
            if out is not None:
                work = nccl.send([out], peer % self.half, 0)
            if into is not None:
                work = nccl.recv([into], peer % self.half, 0)
        if len(inside) > 1:
            work = nccl._end_coalescing()
        for peer in sorted({peer for peer, _ in moves} - {peer for peer, _ in inside}):
            outs = [c for p, (out, _) in moves if p == peer and out is not None for c in chunks(out)]
            intos = [c for p, (_, into) in moves if p == peer and into is not None for c in chunks(into)]
            HERE.lane.exchange(list(itertools.zip_longest(outs, intos)), peer)
        if work is not None:
            work.wait()

    def answer(self, question: str, function: Callable[[int], Any]) -> None:
        """No rank asks: no receive is from any source."""

    def leave_answers(self, question: str, answers: Sequence[Any]) -> None:
        """See `answer`."""

    def close(self) -> None:
        for lane in self.lanes:
            lane.close()

    def abort(self, reason: str = "") -> None:
        for lane in self.lanes:
            lane.jobs.put(None)


def pinned(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def chunks(tensor: Tensor) -> list[Tensor]:
    """Its bytes."""
    return list(tensor.detach().reshape(-1).view(torch.uint8).split(CHUNK))
