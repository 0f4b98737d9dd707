"""torchft, which trains on through the loss of groups of workers, over hetcoll: https://pytorch.org/torchft

torchft's manager agrees with the others who takes part in a step. When that has changed it configures its process group
anew. `ProcessGroupHetcoll` stands where ProcessGroupGloo and ProcessGroupNCCL do:

    manager = torchft.Manager(pg=ProcessGroupHetcoll(), ...)

Each change makes a job of its own, whose store is in the process of its rank 0. So any process may die.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchft.process_group import ProcessGroupWrapper

from .connect import connect
from .futures import fail
from .process_group import HetcollProcessGroup
from .tensors import seconds
from .work import NO_TIME, StreamWork, Waited

__all__ = ["ProcessGroupHetcoll"]


class _AllReduce(Waited):
    """As the manager and torchft's DistributedDataParallel need it: `wait` does not raise, and `get_future` gives a
    complete future, since callbacks must run while they are attached."""

    def wait(self, timeout: timedelta = NO_TIME) -> bool:
        """Whether it went well."""
        with contextlib.suppress(dist.DistBackendError):
            return super().wait(timeout)
        return False

    def block_current_stream(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        if isinstance(self._inner, StreamWork):
            return self._inner.get_future()
        try:
            return super().get_future()
        except dist.DistBackendError as error:
            future: torch.futures.Future[Any] = torch.futures.Future()
            fail(future, error)
            return future


class ProcessGroupHetcoll(ProcessGroupWrapper):
    """A process group for `torchft.Manager`, for CPU, CUDA and ROCm tensors.

    `timeout`, a `datetime.timedelta`, is for each change, and for operations that bring none of their own: 60 s without
    one. A change that not all come to raises `hetcoll.InitError`, an operation that loses a rank
    `hetcoll.PeerLostError`. The manager takes both as a reason for the next change.
    """

    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> HetcollProcessGroup:
        limit = seconds(self._timeout) or 0.0
        return HetcollProcessGroup(connect(store, rank, world_size, limit, None), store, limit)

    def allreduce(self, tensors: list[torch.Tensor], opts: object) -> dist.Work:
        """See `torch.distributed.all_reduce`, asynchronous. What fails is told by the future and by `errored`."""
        return _AllReduce(super().allreduce(tensors, opts))

    def getBackendName(self) -> str:  # noqa: N802
        return "torchft-hetcoll"

    def errored(self) -> Exception | None:
        """What the group has failed with since the last change, if it has. Never blocks."""
        group = self._pg
        return None if group is None else group._failure()

    def abort(self, errored: bool = True) -> None:
        """Fail every operation in flight, and end the group."""
        group = self._pg
        super().abort(errored)
        if group is not None:
            group.close()

    def shutdown(self) -> None:
        """End the group. Does not wait for other ranks."""
        group = self._pg
        super().shutdown()
        if group is not None:
            group.close()
