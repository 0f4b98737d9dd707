"""What `torch.profiler` shows of a process group's calls: two events each, named as those of torch's own backends.

The backend's (``nccl:all_reduce``) begins where the call does and ends when the operation is complete (on a GPU: when
it is enqueued, as NCCL's does). torch takes it for asynchronous because another thread ends it. It has no shapes of
inputs: only C++ can make an event that has them and ends on another thread. So around its beginning lies the operator's
(``c10d::allreduce_``), which has the shapes of all tensors of the call and lasts until that returns.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
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
_OPERATORS = {
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced_",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced_", "all_to_all_single": "alltoall_base_",
    "barrier": "barrier", "send": "send", "batch": "coalesced",
}  # fmt: skip
_ENDING = 5.0  # seconds that a thread may take to end an event


class Span:
    """The events of a call that has begun on the calling thread."""

    def __init__(self, group: dist.ProcessGroup, operation: str, tensors: Sequence[torch.Tensor]) -> None:
        known = dist.distributed_c10d._world.pg_map.get(group)
        asked = NAME if known is None else known[0]  # what the script calls its backend
        self._record = torch.autograd.profiler.record_function(f"{asked}:{_TITLES.get(operation, operation)}")
        self._over: torch.futures.Future[Any] = torch.futures.Future()
        self._ended = threading.Event()
        operator = _OPERATORS.get(operation, f"{operation}_")
        self._operator = torch._C._profiler._RecordFunctionFast(f"c10d::{operator}", list(tensors), {})
        self._operator.__enter__()
        self._record.__enter__()
        self._record._call_end_callbacks_on_future(self._over)  # with this thread's profiler, whoever completes it

    def leave(self) -> None:
        """The call returns, on the thread that began it."""
        self._operator.__exit__(None, None, None)

    def end(self) -> None:
        """On another thread than the one that it began on."""
        self._over.set_result(None)
        self._ended.set()

    def await_end(self) -> None:
        """The profiler may be stopped after it: what has not ended then seems to last until that."""
        self._ended.wait(_ENDING)


def begin(group: dist.ProcessGroup, operation: str, tensors: Sequence[torch.Tensor]) -> Span | None:
    """None where no profiler looks on at this thread."""
    return Span(group, operation, tensors) if torch.autograd._profiler_enabled() else None
