"""Tensors that change their layout: from the ranks that train to those that serve, for example."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from .. import ArgumentError, BufferTypeError, Communicator
from ..runtime import reshard as runtime
from ..runtime.reshard import Layout
from .process_group import HetcollProcessGroup

__all__ = ["Layout", "layout", "reshard", "reshard_all"]

Mesh: TypeAlias = DeviceMesh | Sequence[Any] | torch.Tensor
Target: TypeAlias = Layout | tuple[DeviceMesh, Sequence[Placement]]
Item: TypeAlias = (
    tuple[torch.Tensor, Layout | None, Target] | tuple[torch.Tensor, Layout | None, Target, torch.Tensor | None]
)


def layout(shape: Sequence[int], mesh: Mesh, placements: Sequence[Placement]) -> Layout:
    """A tensor of this global shape over a mesh: torch's DeviceMesh, or ranks in nested lists.

    Placements are torch's ``Shard`` and ``Replicate``, one for each dimension of the mesh, and mean what they mean for
    DTensor, also where shards are uneven or empty, or those of FSDP2 over tensor parallel. ArgumentError for
    ``Partial``, for other kinds, and for a mesh that has a rank twice.
    """
    extent = _listed(shape, "shape")
    ranks, places = _grid(mesh), _listed(placements, "placements")
    cuts: list[int | None] = []
    for placement in places:
        if isinstance(placement, Placement) and placement.is_replicate():
            cuts.append(None)
        elif hasattr(placement, "dim") and type(placement).__name__ in ("Shard", "_StridedShard"):
            cuts.append(placement.dim + len(extent) * (placement.dim < 0))
        else:
            raise ArgumentError(f"placements: wanted Shard and Replicate, got {placement}")
    grid = tuple(ranks.shape)
    order = _order(places, cuts, grid) if len(cuts) == len(grid) else ()
    return Layout(extent, tuple(ranks.flatten().tolist()), grid, tuple(cuts), order)


def _listed(values: Any, name: str) -> tuple[Any, ...]:
    try:
        return tuple(values)
    except TypeError:
        raise ArgumentError(f"{name}: wanted a list, got {values!r}") from None


def _grid(mesh: Mesh) -> torch.Tensor:
    """The ranks of a mesh, on the CPU."""
    try:
        ranks = (mesh.mesh if isinstance(mesh, DeviceMesh) else torch.as_tensor(mesh)).cpu()
    except (TypeError, ValueError, RuntimeError) as error:  # PyTorch's words for lists that are no grid, and numbers
        raise ArgumentError(f"mesh: wanted a DeviceMesh or ranks in nested lists, got {mesh!r}: {error}") from None
    if ranks.is_floating_point() or ranks.is_complex() or ranks.dtype is torch.bool:
        raise ArgumentError(f"mesh: wanted ranks, which are whole numbers, got {mesh!r}")
    return ranks


def _order(placements: Sequence[Any], cuts: list[int | None], grid: tuple[int, ...]) -> tuple[int, ...]:
    """In which the dimensions of the mesh cut: one that strides does so after later ones that cut its dimension into
    `split_factor` before."""
    order: list[int] = []
    for number in reversed(range(len(grid))):
        factor, done, at = getattr(placements[number], "split_factor", 1), 1, 0
        while done < factor and at < len(order):
            if cuts[order[at]] == cuts[number]:
                done *= grid[order[at]]
            at += 1
        if done != factor:
            raise ArgumentError(f"placements: {placements[number]} does not follow from later dimensions of the mesh")
        order.insert(at, number)
    return () if order == sorted(order) else tuple(order)


def reshard(
    tensor: torch.Tensor,
    source: Layout | None,
    target: Target,
    group: dist.ProcessGroup | Communicator | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """A tensor in another layout: every rank of the group calls it, and gets its part.

    `tensor` is this rank's part, contiguous, or a DTensor, whose layout is known (`source` None). A rank that holds
    nothing of the source gives an empty tensor of the right dtype, on the device where its part of the result is to
    lie. `target` is a `layout`, or a DeviceMesh with placements: then the result is a DTensor. Its local part is `out`,
    where that is given, else new; a rank outside the target's mesh gets an empty one. Meshes need no rank in common.

    `group` is one of the backend hetcoll (default: the one of all ranks), or a communicator. Ranks in a `layout` are
    numbered as in the group, those of a DeviceMesh as in the job. Nothing is differentiated. On a GPU the result is
    there once the current stream has come so far.

    Raises
    ------
    ValueError, TypeError
        Before anything is sent, on every rank, where one of them gives another shape, dtype or layout, a mesh with
        a rank outside the group, a tensor that is not its part, or ``Partial``. Of these hetcoll's `ArgumentError` and
        `BufferTypeError`.
    """
    return reshard_all([(tensor, source, target, out)], group)[0]


def reshard_all(items: Sequence[Item], group: dist.ProcessGroup | Communicator | None = None) -> list[torch.Tensor]:
    """As `reshard`, of several tensors at once, such as those of a state dict: ``(tensor, source, target)`` each, or
    ``(tensor, source, target, out)``, in the same order on all ranks. They travel in batches.
    """
    comm = _communicator(group)
    results: list[_Result] = []

    def asked() -> list[runtime.Item]:
        for item in items:
            if not isinstance(item, tuple | list) or not 3 <= len(item) <= 4:
                got = f"{len(item)} of them" if isinstance(item, tuple | list) else type(item).__name__
                raise ArgumentError(f"items: wanted a tensor, source, target and maybe out of each, got {got}")
            results.append(_Result(group, *item))
        return [result.item for result in results]

    locals_ = runtime.reshard(comm._core, asked)
    return [result.wrapped(local) for result, local in zip(results, locals_, strict=True)]


def _communicator(group: dist.ProcessGroup | Communicator | None) -> Communicator:
    if isinstance(group, Communicator):
        return group
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, HetcollProcessGroup):
        raise ArgumentError(f"group: wanted a Communicator or a process group of the backend hetcoll, got {found!r}")
    return found.comm


class _Result:
    """What is asked for one tensor, and what becomes of its local part."""

    def __init__(
        self, group: Any, tensor: torch.Tensor, source: Layout | None, target: Target, out: torch.Tensor | None = None
    ) -> None:
        tensor = _tensor(tensor, "tensor")
        if isinstance(tensor, DTensor):
            if source is not None:
                raise ArgumentError("source: wanted None with a DTensor, which has its own")
            source = _layout_of(group, tensor)
            tensor = tensor.to_local()
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.wait()
        if not isinstance(source, Layout):
            raise ArgumentError(f"source: wanted a layout with a tensor that is no DTensor, got {source!r}")
        self._placed: tuple[DeviceMesh, tuple[Placement, ...]] | None = None
        if isinstance(target, Layout):
            to = target
        else:
            self._placed = placed = _placed(target)
            to = _layout_in(group, source.shape, *placed)
        self._shape = to.shape
        into = None if out is None else _tensor(out, "out")
        if isinstance(into, DTensor):
            if (own := _layout_of(group, into)).boxes != to.boxes:
                raise ArgumentError(f"out: wanted a tensor in the layout {to}, got one in {own}")
            into = into.to_local()
        self.item = runtime.Item(tensor.detach(), source, to, None if into is None else into.detach())

    def wrapped(self, local: torch.Tensor) -> torch.Tensor:
        if self._placed is None:
            return local
        mesh, placements = self._placed
        strides = tuple(math.prod(max(1, each) for each in self._shape[dim + 1 :]) for dim in range(len(self._shape)))
        shape = torch.Size(self._shape)
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=strides)


def _tensor(given: Any, name: str) -> torch.Tensor:
    if not isinstance(given, torch.Tensor):
        raise BufferTypeError(f"{name}: wanted a tensor, got {type(given).__name__}")
    return given


def _placed(target: Any) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    if not (isinstance(target, tuple | list) and len(target) == 2 and isinstance(target[0], DeviceMesh)):
        raise ArgumentError(f"target: wanted a layout, or a DeviceMesh and its placements, got {target!r}")
    return target[0], _listed(target[1], "placements")


def _layout_of(group: Any, tensor: DTensor) -> Layout:
    return _layout_in(group, tensor.shape, tensor.device_mesh, tensor.placements)


def _layout_in(group: Any, shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> Layout:
    """Of torch's mesh, whose ranks are the job's; as a group numbers them."""
    ranks = mesh.mesh
    if isinstance(group, dist.ProcessGroup):
        known = {rank: number for number, rank in enumerate(dist.get_process_group_ranks(group))}
        if outside := [rank for rank in ranks.flatten().tolist() if rank not in known]:
            raise ArgumentError(f"mesh: wanted ranks of the group, got {outside}")
        ranks = ranks.clone().apply_(known.__getitem__)
    elif group is not None and dist.is_initialized() and group.rank != (rank := dist.get_rank()):
        raise ArgumentError(
            f"group: wanted the process group with a DeviceMesh, whose ranks are the job's: rank {rank} of the job is"
            f" rank {group.rank} of this communicator"
        )
    return layout(shape, ranks, placements)
