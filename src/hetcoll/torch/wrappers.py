"""Functions of `torch.distributed` that decide by the backend's name, or by the exact class of a group, what a group
can do. For groups of ours they ask the group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def install() -> None:
    """Wrap them where torch's modules, and scripts, look them up."""
    for name, wrapper in (("monitored_barrier", _monitored_barrier), ("batch_isend_irecv", _batch_isend_irecv)):
        wrapped = wrapper(getattr(distributed_c10d, name))
        setattr(distributed_c10d, name, wrapped)
        setattr(dist, name, wrapped)


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


def _batch_isend_irecv(theirs: Callable[..., list[dist.Work]]) -> Callable[..., list[dist.Work]]:
    @functools.wraps(theirs)
    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        ours = _ours(p2p_op_list[0].group) if p2p_op_list else None
        if ours is None:
            return theirs(p2p_op_list)
        distributed_c10d._check_p2p_op_list(p2p_op_list)
        return ours.batch(p2p_op_list)

    return batch_isend_irecv
