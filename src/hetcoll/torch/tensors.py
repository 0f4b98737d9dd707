"""Tensors as flat memory, and torch's words for reductions and times as ours."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .. import BufferTypeError, OpName
from ..types import as_seconds
from .names import DEVICES

_NAMES: tuple[tuple[Any, OpName], ...] = (
    (dist.ReduceOp.SUM, "sum"), (dist.ReduceOp.AVG, "avg"), (dist.ReduceOp.PRODUCT, "prod"),
    (dist.ReduceOp.MIN, "min"), (dist.ReduceOp.MAX, "max"), (dist.ReduceOp.BAND, "band"),
    (dist.ReduceOp.BOR, "bor"), (dist.ReduceOp.BXOR, "bxor"), (dist.ReduceOp.PREMUL_SUM, "sum"),
)  # fmt: skip
_OPS = {int(kind): name for kind, name in _NAMES}
_PREMUL = int(dist.ReduceOp.PREMUL_SUM)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as a plain contiguous tensor; in the order of its memory, whatever that of its dimensions.

    Element-wise collectives are right on it when all ranks use the same strides, which is what torch asks for.
    ValueError where the memory has holes or overlaps, or is not strided at all.
    """
    if tensor.requires_grad or type(tensor) is not torch.Tensor:
        tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        raise ValueError(f"tensor: wanted strided memory, got {tensor.layout}")
    if tensor.is_contiguous():
        return tensor
    if not _dense(tensor):
        raise ValueError(
            f"tensor: wanted memory without holes (contiguous), got shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}"
        )
    return tensor.as_strided((tensor.numel(),), (1,))


def gpu_of(tensor: torch.Tensor) -> torch.device:
    """Where a tensor lies that is not on the CPU. BufferTypeError where that is no GPU, as for "meta"."""
    if not tensor.is_cuda:
        raise BufferTypeError(f"tensor: wanted one on {' or '.join(DEVICES)}, got one on {tensor.device}")
    return tensor.device


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """For collectives that move parts of a tensor, or into one: contiguous in the order of its dimensions."""
    if not tensor.is_contiguous():
        raise ValueError(f"tensor: wanted a contiguous one, got shape {tuple(tensor.shape)}, strides {tensor.stride()}")
    return flat(tensor)


def _dense(tensor: torch.Tensor) -> bool:
    wanted = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent != 1 and stride != wanted:
            return False
        wanted *= extent
    return True


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A new flat tensor of all their elements."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def spread(source: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy what `joined` would have made of `tensors` back into them."""
    parts = source.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.detach().copy_(part.view(tensor.shape))


def rows(tensor: torch.Tensor) -> tuple[int, int]:
    """The extent of the first dimension, and elements in each of its entries."""
    first = tensor.shape[0] if tensor.dim() else 1
    return first, tensor.numel() // first if first else 0


def reduction(op: Any) -> tuple[OpName, Any]:
    """hetcoll's name of a reduction, and the factor of a PREMUL_SUM, or None."""
    kind = int(op.op if isinstance(op, dist.ReduceOp) else op)
    name = _OPS.get(kind)
    if name is None:
        raise ValueError(f"op: wanted one of {', '.join(_OPS.values())}, got {op}")
    return name, op.factor if kind == _PREMUL else None


def seconds(timeout: timedelta | None) -> float | None:
    """torch marks a time that nobody set by a negative one, in `Work.wait` by 0. The longest is ours (`as_seconds`)."""
    return None if timeout is None else as_seconds(timeout.total_seconds())
