"""All-reduce of sparse tensors, which DistributedDataParallel wants for the gradients of sparse embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .. import Communicator
from .failures import translated
from .tensors import reduction


def allreduce(comm: Communicator, launch: Callable[..., dist.Work], tensor: torch.Tensor, opts: Any) -> dist.Work:
    """Sum a COO tensor over the ranks, in place: gathers every rank's indices and values, and adds what coincides.

    Ranks may have different numbers of values. Blocks until the numbers are known.
    `launch` is the group's `Launcher._launch`.
    """
    name, _ = reduction(opts.reduceOp)
    if name != "sum":
        raise ValueError(f"op: wanted sum for sparse tensors, got {name}")
    mine = tensor.detach().coalesce()
    dims = mine.sparse_dim()
    known = torch.tensor([mine._nnz(), dims, *mine.shape], device=tensor.device)
    every = known.new_empty(comm.size, len(known))
    with translated:
        comm.allgather(known, every)
    told = every.tolist()
    if any(row[1:] != told[0][1:] for row in told):  # indices of one rank would lie outside of another one's tensor
        found = ", ".join(f"{tuple(row[2:])} with {row[1]} on rank {rank}" for rank, row in enumerate(told))
        raise ValueError(f"tensor: wanted one shape, and as many sparse dimensions, on all ranks, got {found}")
    counts = [row[0] for row in told]
    total = sum(counts)
    width = mine.values()[:1].numel() if mine._nnz() else mine.values().new_empty(mine.values().shape[1:]).numel()
    values = mine.values().new_empty(total, *mine.values().shape[1:])
    indices = torch.empty(total, dims, dtype=torch.int64, device=tensor.device)

    def start(how: dict[str, Any]) -> Any:
        return [
            comm.allgatherv(mine.indices().t().contiguous(), indices, [n * dims for n in counts], **how),
            comm.allgatherv(mine.values().contiguous(), values, [n * width for n in counts], **how),
        ]

    def after() -> None:
        whole = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False).coalesce()
        with torch.no_grad():
            tensor.copy_(whole)

    return launch(opts, [tensor], start, [tensor], after)
