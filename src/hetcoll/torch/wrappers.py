"""Functions of `torch.distributed` that decide by the backend's name, or by the exact class of a group, what a group
can do. For groups of ours they ask the group. And two that break with handles or tensors of ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel


def install() -> None:
    """Wrap them where torch's modules, and scripts, look them up."""
    for name, wrapper in (("monitored_barrier", _monitored_barrier), ("batch_isend_irecv", _batch_isend_irecv)):
        wrapped = wrapper(getattr(distributed_c10d, name))
        setattr(distributed_c10d, name, wrapped)
        setattr(dist, name, wrapped)
    Join.notify_join_context = staticmethod(_notify_join_context(Join.notify_join_context))
    DistributedDataParallel._get_ddp_logging_data = _ddp_logging_data(DistributedDataParallel._get_ddp_logging_data)
    shrunk = "_create_shrunk_process_group"  # since PyTorch 2.10
    if hasattr(distributed_c10d, shrunk):
        setattr(distributed_c10d, shrunk, _shrunk_group(getattr(distributed_c10d, shrunk)))
    theirs = getattr(c10d, "_hash_tensors", None)  # builds without NCCL have none
    setattr(c10d, "_hash_tensors", _hash_tensors(theirs))  # noqa: B010 (its type is theirs)


def _ours(group: Any) -> Any:
    """The group, or the default one, if it is of ours."""
    from .process_group import HetcollProcessGroup

    found = dist.group.WORLD if group is None else group
    return found if isinstance(found, HetcollProcessGroup) else None


def _monitored_barrier(theirs: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(theirs)
    def monitored_barrier(
        group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        ours = _ours(group)
        if ours is None:
            theirs(group, timeout, wait_all_ranks)
            return
        limit = timeout if isinstance(timeout, timedelta | None) else timedelta(seconds=timeout)
        ours.monitored_barrier(limit, wait_all_ranks)

    return monitored_barrier


def _batch_of(operations: Any) -> Any:
    """The group of ours that all these operations are on. None where they are not: torch says what is wrong."""
    if type(operations) is not list or not operations:
        return None
    group = getattr(operations[0], "group", None)
    for each in operations:
        if not isinstance(each, dist.P2POp) or each.group is not group:
            return None
    return _ours(group)


def _batch_isend_irecv(theirs: Callable[..., list[dist.Work]]) -> Callable[..., list[dist.Work]]:
    @functools.wraps(theirs)
    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        ours = _batch_of(p2p_op_list)
        return theirs(p2p_op_list) if ours is None else ours.batch(p2p_op_list)

    return batch_isend_irecv


def _notify_join_context(theirs: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """DistributedDataParallel hands the handle on to its reducer in C++, which waits for it later.

    The object in Python must live until then: without it the reducer waits by torch's own method, which never ends.
    And after waiting it wants a future that is complete, which that of a call on host memory may not be yet.
    """
    from .work import HostWork, Waited

    @functools.wraps(theirs)
    def notify_join_context(joinable: Any) -> Any:
        work = theirs(joinable)
        joinable._hetcoll_join_work = Waited(work) if isinstance(work, HostWork) else work
        return joinable._hetcoll_join_work

    return notify_join_context


def _ddp_logging_data(theirs: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """What is logged of DistributedDataParallel names the backend that the script asked for, as `get_backend` does."""

    @functools.wraps(theirs)
    def get_ddp_logging_data(model: Any) -> dict[str, Any]:
        found = theirs(model)
        if _ours(model.process_group) is not None:
            found["backend_name"] = dist.get_backend(model.process_group)
        return found

    return get_ddp_logging_data


def _shrunk_group(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Theirs puts a backend in C++ into a group; what `Inner.shrink` makes is a group already."""

    @functools.wraps(theirs)
    def create_shrunk_process_group(made: Any, ranks: list[int], about: dict[str, Any], is_default: bool) -> Any:
        if _ours(made) is None:
            return theirs(made, ranks, about, is_default)
        made.setGroupName(about["new_group_name"])
        made.setGroupDesc("default:shrunken" if is_default else f"{about['original_group_name']}:shrunk")
        return made

    return create_shrunk_process_group


def _hash_tensors(theirs: Callable[[list[torch.Tensor]], int] | None) -> Callable[[list[torch.Tensor]], int]:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL logs it of objects that "nccl" sends. Theirs asks CUDA to copy from any memory."""

    def hash_tensors(tensors: list[torch.Tensor]) -> int:
        if theirs is not None and all(tensor.is_cuda for tensor in tensors):
            return theirs(tensors)
        copies = [tensor.detach().cpu().clone() for tensor in tensors]  # what NumPy has seen cannot be resized later
        return hash(tuple(copy.numpy().tobytes() for copy in copies))

    return hash_tensors
