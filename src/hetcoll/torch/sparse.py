"""All-reduce of sparse tensors, which DistributedDataParallel wants for the gradients of sparse embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .. import Communicator
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
    size = comm.size
    known = torch.tensor([mine._nnz()], device=tensor.device)
    numbers = torch.empty(size, dtype=torch.int64, device=tensor.device)
    comm.allgather(known, numbers)
    counts = numbers.tolist()
    total, dims = sum(counts), mine.sparse_dim()
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
