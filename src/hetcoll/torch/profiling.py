"""What `torch.profiler` shows of a process group's calls: an event each, named as torch's own backends name them.

Such an event begins where the call does and ends when the operation is complete (on a GPU: when it is enqueued, as
NCCL's does). torch takes it for asynchronous because another thread ends it. It has no shapes of inputs: only C++ can
make an event that has them and ends on another thread.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist

from .names import NAME

_TITLES = {
    "allreduce": "all_reduce", "allgather": "all_gather", "allgather_coalesced": "all_gather",
    "all_gather_single_coalesced": "all_gather_into_tensor",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor", "alltoall": "all_to_all",
    "all_to_all_single": "all_to_all", "batch": "coalesced",
}  # fmt: skip
_ENDING = 5.0  # seconds that a thread may take to end an event


class Span:
    """An event that has begun on the calling thread."""

    def __init__(self, group: dist.ProcessGroup, operation: str) -> None:
        known = dist.distributed_c10d._world.pg_map.get(group)
        asked = NAME if known is None else known[0]  # what the script calls its backend
        self._record = torch.autograd.profiler.record_function(f"{asked}:{_TITLES.get(operation, operation)}")
        self._over: torch.futures.Future[Any] = torch.futures.Future()
        self._ended = threading.Event()
        self._record.__enter__()
        self._record._call_end_callbacks_on_future(self._over)  # with this thread's profiler, whoever completes it

    def end(self) -> None:
        """On another thread than the one that it began on."""
        self._over.set_result(None)
        self._ended.set()

    def await_end(self) -> None:
        """The profiler may be stopped after it: what has not ended then seems to last until that."""
        self._ended.wait(_ENDING)


def begin(group: dist.ProcessGroup, operation: str) -> Span | None:
    """None where no profiler looks on at this thread."""
    return Span(group, operation) if torch.autograd._profiler_enabled() else None
