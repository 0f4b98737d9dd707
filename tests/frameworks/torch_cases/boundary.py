"""Training over benchmarks/gloo_boundary.py, on CPUs: streams that are always done, and an NCCL that is Gloo's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from .vendors import _losses, _trainer, alone

__all__ = ["alone"]
SECONDS = 30.0


class Handle:
    def __init__(self, running: Future[None]) -> None:
        self.running = running

    def wait(self) -> None:
        self.running.result(SECONDS)


class Nccl:
    """As ProcessGroupNCCL's: messages of two ranks, both ways, come one after another, and each waits for its peer."""

    Options = SimpleNamespace

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        self.gloo = dist.ProcessGroupGloo(store, rank, size, options._timeout)
        self.rank, self.size = rank, size
        self.pairs: dict[int, ThreadPoolExecutor] = {}

    def _in_turn(self, peer: int, message: Callable[[], None]) -> Handle:
        return Handle(self.pairs.setdefault(peer, ThreadPoolExecutor(1)).submit(message))

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Handle:
        def message() -> None:
            self.gloo.send(tensors, peer, tag).wait()
            self.gloo.recv([torch.empty(1)], peer, tag + 1).wait()

        return self._in_turn(peer, message)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Handle:
        def message() -> None:
            self.gloo.recv(tensors, peer, tag).wait()
            self.gloo.send([torch.empty(1)], peer, tag + 1).wait()

        return self._in_turn(peer, message)

    def allreduce(self, tensors: list[Tensor]) -> Any:
        return self.gloo.allreduce(tensors)

    def _reduce_scatter_base(self, mine: Tensor, whole: Tensor) -> Any:
        total = whole.clone()
        work = self.gloo.allreduce([total])
        work.wait()
        mine.copy_(total.chunk(self.size)[self.rank].view_as(mine))
        return work

    def _allgather_base(self, whole: Tensor, mine: Tensor) -> Any:
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        work = self.gloo.allgather([parts], [mine])
        work.wait()
        whole.view(-1).copy_(torch.cat([part.view(-1) for part in parts]))
        return work

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        return self.gloo.broadcast(tensors, options)


class Stream:
    def __init__(self, *_: object) -> None:
        """All that it has to do is done."""

    def record_event(self) -> Stream:
        return self

    def wait_event(self, _: Stream) -> None:
        """See above."""

    def synchronize(self) -> None:
        """See above."""


@contextlib.contextmanager
def _on_cpus() -> Iterator[None]:
    import gloo_boundary

    future = torch.futures.Future
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "current_stream", Stream)
        patch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "set_device", lambda _: None)
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        patch.setattr(torch.futures, "Future", lambda devices: future())
        patch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
        patch.setattr(gloo_boundary, "pinned", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
        gloo_boundary.register()
        yield


def trained(files: dist.Store, rank: int, size: int, way: str) -> list[float]:
    """The losses."""
    with _on_cpus():
        limit = timedelta(seconds=SECONDS)
        dist.init_process_group("boundary", store=files, rank=rank, world_size=size, timeout=limit)
        try:
            return _losses(_trainer(way))
        finally:
            dist.destroy_process_group()
