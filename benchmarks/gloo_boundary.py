"""A process group that is NCCL inside each of two islands, with Gloo for what crosses: hetcoll is held against it.

The fairest form that we know of moving a mixed job's data over the processors. Collectives are hierarchical, so that
every rank sends only what must cross, to the rank of its place in the other island, and all ranks do so at once. What
crosses goes in chunks through pinned memory to Gloo's messages and back; sums are made on the GPU. Copies and messages
of different calls overlap, and streams wait for them without the host (cuStreamWaitValue64), as with hetcoll and NCCL.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "boundary"
CHUNK = 8 << 20  # bytes
WORKERS = 2  # threads for collectives, with a Gloo of their own each, as ProcessGroupGloo has two
Part = tuple[Tensor | None, Tensor | None]  # what goes out, what comes in


def register() -> None:
    dist.Backend.register_backend(NAME, make, extended_api=True, devices=["cpu", "cuda"])


def make(options: Any, _backend_options: object = None) -> Any:
    from hetcoll.torch.process_group import HetcollProcessGroup

    comm: Any = Boundary(options.store, options.group_rank, options.group_size, options.timeout)
    return HetcollProcessGroup(comm, options.store, options.timeout.total_seconds())


class Messenger:
    """A thread that exchanges with one other rank by Gloo, in the order in which it is asked to."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._flag = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._arrived = self._flag.numpy()
        self._asked = 0
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.error: Exception | None = None
        threading.Thread(target=self._work, daemon=True).start()

    def exchange(self, parts: list[Part], peer: int) -> None:
        """Enqueue on the current stream: send and receive these bytes; a chunk of each at a time."""
        from cuda.bindings import driver

        stream = torch.cuda.current_stream()
        arriving = []
        for out, into in parts:
            sent = None
            if out is not None:
                sent = torch.empty(out.numel(), dtype=torch.uint8, pin_memory=True)
                sent.copy_(out, non_blocking=True)
            got = None if into is None else torch.empty(into.numel(), dtype=torch.uint8, pin_memory=True)
            self._asked += 1
            self._jobs.put((None if out is None else stream.record_event(), sent, got, peer, self._asked))
            arriving.append((got, into, self._asked))
        for got, into, number in arriving:
            if into is not None:
                flags = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
                (status,) = driver.cuStreamWaitValue64(stream.cuda_stream, self._flag.data_ptr(), number, flags)
                if int(status):
                    raise RuntimeError(f"cuStreamWaitValue64: {status}")
                into.copy_(got, non_blocking=True)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            ready, sent, got, peer, number = job
            try:
                if ready is not None:
                    ready.synchronize()
                works = [] if got is None else [self._gloo.recv([got], peer, 0)]
                works += [] if sent is None else [self._gloo.send([sent], peer, 0)]
                for work in works:
                    work.wait()
            except Exception as error:
                self.error = error
            self._arrived[0] = number  # also after an error: no stream stays behind

    def barrier(self) -> None:
        self._gloo.barrier().wait()

    def close(self) -> None:
        self._jobs.put(None)


class Boundary:
    """What `HetcollProcessGroup` takes for a communicator: ranks 0 to k-1 are an island, k to 2k-1 the other one."""

    session = None

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self.rank, self.size, self.half = rank, size, size // 2
        self.island, self.place = divmod(rank, self.half)
        self.other = (rank + self.half) % size
        self._store, self._timeout = store, timeout
        inside = dist.PrefixStore(f"island {self.island}/", store)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        self.nccl = dist.ProcessGroupNCCL(inside, self.place, self.half, options) if self.half > 1 else None
        self._workers = [self._messenger(f"collectives {k}") for k in range(WORKERS)]
        self._messages = self._messenger("messages")
        self._turn = 0
        self._grouped: list[tuple[int, Part]] | None = None

    def _messenger(self, name: str) -> Messenger:
        return Messenger(dist.PrefixStore(f"{name}/", self._store), self.rank, self.size, self._timeout)

    @property
    def error(self) -> Exception | None:
        return next((each.error for each in (*self._workers, self._messages) if each.error is not None), None)

    def _cross(self, out: Tensor, into: Tensor) -> None:
        """Bytes of `out` to the other island's rank of this place, `into` from there."""
        worker = self._workers[self._turn]
        self._turn = (self._turn + 1) % WORKERS
        worker.exchange(list(zip(chunks(out), chunks(into), strict=True)), self.other)

    # Collectives, on the current stream.

    def allreduce(self, buffer: Tensor, op: str = "sum", **_: Any) -> None:
        assert op in ("sum", "avg")
        even = buffer.numel() % self.half == 0
        mine = buffer
        if self.nccl is not None:
            if even:
                mine = buffer.chunk(self.half)[self.place]
                self.nccl._reduce_scatter_base(mine, buffer).wait()
            else:
                self.nccl.allreduce([buffer]).wait()
        theirs = torch.empty_like(mine)
        self._cross(mine, theirs)
        mine += theirs
        if self.nccl is not None and even:
            self.nccl._allgather_base(buffer, mine).wait()
        if op == "avg":
            buffer /= self.size

    def allgather(self, mine: Tensor, whole: Tensor, **_: Any) -> None:
        theirs = torch.empty_like(mine)
        self._cross(mine, theirs)
        halves = whole.chunk(2)
        for island, half in enumerate(halves):
            part = mine if island == self.island else theirs
            if self.nccl is None:
                half.copy_(part)
            else:
                self.nccl._allgather_base(half, part).wait()

    def reduce_scatter(self, whole: Tensor, mine: Tensor, op: str = "sum", **_: Any) -> None:
        assert op in ("sum", "avg")
        parts = []
        for half in whole.chunk(2):
            part = torch.empty_like(mine) if self.nccl is not None else half
            if self.nccl is not None:
                self.nccl._reduce_scatter_base(part, half).wait()
            parts.append(part)
        theirs = torch.empty_like(mine)
        self._cross(parts[1 - self.island], theirs)
        torch.add(parts[self.island], theirs, out=mine)
        if op == "avg":
            mine /= self.size

    def broadcast(self, buffer: Tensor, root: int = 0, **_: Any) -> None:
        if self.rank == root:
            self._messages.exchange([(each, None) for each in chunks(buffer)], self.other)
        elif self.other == root:
            self._messages.exchange([(None, each) for each in chunks(buffer)], self.other)
        if self.nccl is not None:
            self.nccl.broadcast([buffer], root % self.half).wait()

    # Messages.

    def send(self, buffer: Tensor, peer: int, **_: Any) -> None:
        self._move(peer, (buffer, None))

    def recv(self, buffer: Tensor, peer: int, **_: Any) -> None:
        self._move(peer, (None, buffer))

    def _move(self, peer: int, part: Part) -> None:
        if self._grouped is not None:
            self._grouped.append((peer, part))
        else:
            self._start([(peer, part)])

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Messages that do not wait for one another."""
        self._grouped = []
        yield
        moves, self._grouped = self._grouped, None
        self._start(moves)

    def _start(self, moves: list[tuple[int, Part]]) -> None:
        inside = [(peer, part) for peer, part in moves if peer // self.half == self.island]
        across = [(peer, part) for peer, part in moves if peer // self.half != self.island]
        works = []
        if inside:
            assert self.nccl is not None
            self.nccl._start_coalescing(torch.device("cuda"))
            for peer, (out, into) in inside:
                if out is not None:
                    self.nccl.send([out], peer % self.half, 0)
                if into is not None:
                    self.nccl.recv([into], peer % self.half, 0)
            works.append(self.nccl._end_coalescing(torch.device("cuda")))
        for peer in {peer for peer, _ in across}:
            outs = [c for p, (out, _) in across if p == peer and out is not None for c in chunks(out)]
            intos = [c for p, (_, into) in across if p == peer and into is not None for c in chunks(into)]
            self._messages.exchange(list(itertools.zip_longest(outs, intos)), peer)
        for work in works:
            work.wait()

    def barrier(self, **_: Any) -> Any:
        import hetcoll

        self._messages.barrier()
        return hetcoll.Work()

    def close(self) -> None:
        for each in (*self._workers, self._messages):
            each.close()

    def abort(self, reason: str = "") -> None:
        self.close()


def chunks(tensor: Tensor) -> list[Tensor]:
    """Its bytes."""
    return list(tensor.detach().reshape(-1).view(torch.uint8).split(CHUNK))
