"""Tensors that change their layout on four ranks: plain ones, and DTensors beside torch's own redistribution."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from blocks import random_layout
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hetcoll
from hetcoll.torch import layout, reshard, reshard_all


def _whole(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def as_torch_redistributes() -> None:
    """Every pair of placements on a line and on a square of ranks, uneven and empty shards: the bits of torch's own."""
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    one = [Shard(0), Shard(1), Replicate()]
    for mesh, places in ((line, [[each] for each in one]), (square, [list(p) for p in itertools.product(one, one)])):
        whole = _whole(5, 3) if mesh is line else _whole(7, 6)
        for before, after in itertools.product(places, places):
            tensor = distribute_tensor(whole, mesh, before)
            wanted = tensor.redistribute(mesh, after)
            found = reshard(tensor, None, (mesh, after))
            assert isinstance(found, DTensor)
            assert found.placements == wanted.placements
            assert (found.shape, found.stride(), found.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
            assert found.to_local().shape == wanted.to_local().shape
            assert torch.equal(found.to_local(), wanted.to_local())


def from_trainers_to_servers() -> None:
    """Meshes without a rank in common: DTensors where they train, parameters of plain modules where they serve."""
    rank = dist.get_rank()
    trainers, servers = DeviceMesh("cpu", [0, 1, 2]), DeviceMesh("cpu", [3])
    weight, bias = _whole(700, 300), _whole(300, seed=1).to(torch.bfloat16)
    for mesh, places in ((trainers, [Shard(1)]), (trainers, [Replicate()])):
        items = []
        outs = [torch.zeros(700, 300), torch.zeros(300, dtype=torch.bfloat16)] if rank == 3 else [None, None]
        for whole, out in zip((weight, bias), outs, strict=True):
            place = places if whole.dim() == 2 else [Replicate()]
            known = layout(whole.shape, [0, 1, 2], place)
            source = None if rank < 3 else known
            tensor = distribute_tensor(whole, mesh, place) if rank < 3 else whole.new_empty(0)
            items.append((tensor, source, (servers, [Replicate()]), out))
        found = reshard_all(items)
        for one, out, whole in zip(found, outs, (weight, bias), strict=True):
            assert isinstance(one, DTensor)
            assert one.shape == whole.shape
            if rank == 3:
                assert one.to_local().data_ptr() == out.data_ptr()
                assert torch.equal(out, whole)
            else:
                assert one.to_local().numel() == 0


def sharded_twice() -> None:
    """FSDP2 over tensor parallel, with rows that nothing divides: a module's parameters reach one rank whole."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 14), nn.Linear(14, 6))
    whole = {name: each.detach().clone() for name, each in model.state_dict().items()}
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    for each in model:
        fully_shard(each, mesh=mesh["dp"])
    state = model.state_dict()
    assert any(type(place).__name__ == "_StridedShard" for place in state["0.weight"].placements)
    items = [(each, None, layout(each.shape, [2], [Replicate()])) for each in state.values()]
    for (name, right), found in zip(whole.items(), reshard_all(items), strict=True):
        assert torch.equal(found, right) if dist.get_rank() == 2 else found.numel() == 0, name


def in_a_smaller_group() -> None:
    """Ranks of a layout are the group's, those of a mesh the job's."""
    group = dist.new_group([3, 1, 2])
    rank = dist.get_rank()
    mesh = DeviceMesh("cpu", [2, 3])
    if rank == 0:
        return
    whole = _whole(6, 4)
    mine = dist.get_group_rank(group, rank)
    source = layout(whole.shape, [0, 1], [Shard(0)])
    held = whole.chunk(2)[mine].contiguous() if mine < 2 else whole.new_empty(0)
    for chosen in (group, group.comm):
        found = reshard(held, source, layout(whole.shape, [[1], [2]], [Shard(-1), Replicate()]), chosen)
        assert torch.equal(found, whole.chunk(2, 1)[mine - 1] if mine > 0 else whole.new_empty(0))
    placed = reshard(held, source, (mesh, [Shard(1)]), group)
    assert torch.equal(placed.to_local(), whole.chunk(2, 1)[rank - 2] if rank > 1 else whole.new_empty(0))
    with pytest.raises(ValueError, match=r"mesh: wanted ranks of the group, got \[0\]"):
        reshard(held, source, (DeviceMesh("cpu", [0, 1], _init_backend=False), [Shard(1)]), group)


def parameters_with_gradients() -> None:
    """They are read as they are, and the result needs no gradient. All types that move bytes."""
    rank = dist.get_rank()
    source, target = layout((4, 2), [0, 1, 2, 3], [Shard(0)]), layout((4, 2), [3, 1], [Shard(1)])
    found = reshard(nn.Parameter(torch.full((1, 2), float(rank))), source, target)
    assert not found.requires_grad
    if rank in (1, 3):
        assert torch.equal(found, torch.arange(4.0)[:, None])
    for dtype in (torch.float8_e4m3fn, torch.complex64, torch.bool, torch.uint16, torch.float16):
        tensor = torch.arange(8, dtype=torch.uint8).view(4, 2).to(dtype)
        got = reshard(tensor[rank : rank + 1].clone(), source, target)
        if rank in (1, 3):
            assert got.dtype == dtype
            assert torch.equal(got.view(torch.uint8), tensor[:, [0 if rank == 3 else 1]].contiguous().view(torch.uint8))


def what_is_still_under_way() -> None:
    """torch gives such tensors where nothing is differentiated; they wait when they are first read."""
    mesh, whole = init_device_mesh("cpu", (4,)), _whole(8, 3)
    with torch.no_grad():
        late = distribute_tensor(whole, mesh, [Shard(0)]).redistribute(mesh, [Replicate()], async_op=True)
        assert isinstance(late.to_local(), AsyncCollectiveTensor)
        found = reshard(late, None, (mesh, [Shard(0)]))
    assert torch.equal(found.to_local(), whole.chunk(4)[dist.get_rank()])


def _refused(pattern: str, *args: Any, **options: Any) -> None:
    with pytest.raises(ValueError, match=pattern) as found:
        reshard(*args, **options)
    assert isinstance(found.value, hetcoll.ArgumentError)


def what_cannot_be_is_refused_on_all_ranks() -> None:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (4,))
    whole = _whole(8, 3)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    partial = DTensor.from_local(whole, mesh, [Partial()], run_check=False)
    _refused(r"placements: wanted Shard and Replicate, got P", partial, None, (mesh, [Shard(0)]))
    _refused("placements: wanted 1, one for each", rows, None, (mesh, [Shard(0), Shard(1)]))
    _refused(r"of an array of shape \(8, 3\), got 2", rows, None, (mesh, [Shard(2)]))
    _refused("wanted one shape", rows, None, layout((3, 8), [0], [Replicate()]))
    _refused("wanted meshes of ranks below 4", rows, None, layout((8, 3), [0, 7], [Shard(0)]))
    _refused("source: wanted None with a DTensor", rows, layout((8, 3), [0], [Shard(0)]), (mesh, [Shard(0)]))
    _refused("source: wanted a layout with a tensor that is no DTensor", whole, None, (mesh, [Shard(0)]))
    _refused("group: wanted a Communicator or a process group of the backend hetcoll", rows, None, (mesh, [Shard(0)]),
             group="gloo")  # fmt: skip
    with pytest.raises(ValueError, match="wanted each rank once"):
        layout((8, 3), [0, 1, 1], [Shard(0)])
    odd = whole if rank == 1 else rows.to_local()
    _refused(r"array 0: wanted shape \(2, 3\)" if rank == 1 else "reshard: rank 1: array 0: wanted shape",
             odd, layout((8, 3), range(4), [Shard(0)]), (mesh, [Shard(1)]))  # fmt: skip
    assert torch.equal(reshard(rows, None, layout((8, 3), [0], [Replicate()])), whole if rank == 0 else torch.empty(0))


def what_makes_no_sense_is_told_in_our_words() -> None:
    rank, mesh, rows = dist.get_rank(), init_device_mesh("cpu", (4,)), layout((4, 2), [0, 1, 2, 3], [Shard(0)])
    mine = torch.ones(1, 2)
    for wrong, out, words in (
        ((mine, rows, None), None, "target: wanted a layout, or a DeviceMesh and its placements, got None"),
        ((mine, rows, [Shard(0), Replicate()]), None, "target: wanted a layout, or a DeviceMesh"),
        ((mine, rows, (mesh, Shard(1))), None, "placements: wanted a list, got Shard"),
        ((None, rows, rows), None, "tensor: wanted a tensor, got NoneType"),
        ((mine, rows, rows), [1.0], "out: wanted a tensor, got list"),
    ):
        with pytest.raises((ValueError, TypeError), match=words) as found:
            reshard(*wrong, out=out)  # type: ignore[arg-type]
        assert isinstance(found.value, hetcoll.HetcollError)
    with pytest.raises(ValueError, match="source, target and maybe out of each, got 2 of them"):
        reshard_all([(mine, rows)])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"items: wanted .*, got Tensor"):
        reshard_all((mine, rows, rows))  # type: ignore[arg-type]
    for args, words in (
        (((4.5, 2), [0], [Shard(0)]), r"shape: wanted whole numbers, got \(4\.5, 2\)"),
        ((4, [0], [Shard(0)]), "shape: wanted a list, got 4"),
        (((4, 2), None, [Shard(0)]), "mesh: wanted a DeviceMesh or ranks in nested lists, got None"),
        (((4, 2), [[0, 1], [2]], [Shard(0)]), "mesh: wanted a DeviceMesh or ranks in nested lists"),
        (((4, 2), [0.0, 1.0], [Shard(0)]), "mesh: wanted ranks, which are whole numbers"),
        (((4, 2), [], [Shard(0)]), "mesh: wanted ranks"),
        (((4, 2), [0, 1], ["x"]), "placements: wanted Shard and Replicate, got x"),
        (((4, 2), [0, 1], None), "placements: wanted a list, got None"),
    ):
        with pytest.raises((ValueError, TypeError), match=words) as found:
            layout(*args)  # type: ignore[arg-type]
        assert isinstance(found.value, hetcoll.HetcollError)
    assert torch.equal(reshard(mine * rank, rows, rows), mine * rank)


def results_lie_where_they_say() -> None:
    """A DTensor for the result has the target's layout; and a mesh's ranks, which are the job's, are the group's."""
    rank, mesh, other = dist.get_rank(), init_device_mesh("cpu", (4,)), DeviceMesh("cpu", [3, 2, 1, 0])
    whole = _whole(8, 3)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    out = distribute_tensor(torch.zeros(8, 3), other, [Shard(0)])
    _refused(r"out: wanted a tensor in the layout \(8, 3\) over ranks \(0, 1", rows, None, (mesh, [Shard(0)]), out=out)
    found = reshard(rows, None, (other, [Shard(0)]), out=out)
    assert torch.equal(out.to_local(), whole.chunk(4)[3 - rank])
    assert torch.equal(found.to_local(), out.to_local())
    group = dist.new_group([1, 2, 3])
    pair = DeviceMesh("cpu", [1, 2])
    if rank:
        held = whole if rank == 1 else whole.new_empty(0)
        first = layout(whole.shape, [0], [Replicate()])
        placed = reshard(held, first, (pair, [Shard(0)]), group)
        assert torch.equal(placed.to_local(), whole.chunk(2)[rank - 1] if rank < 3 else whole.new_empty(0))
        _refused(rf"wanted the process group with a DeviceMesh.*rank {rank} of the job is rank {rank - 1} of this",
                 held, first, (pair, [Shard(0)]), group.comm)  # fmt: skip


def blocks_are_those_of_dtensor() -> None:
    """Random shapes and placements over random meshes: each rank's block is the local part that torch makes."""
    import numpy as np
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    rng = np.random.default_rng(dist.get_rank())
    for _ in range(200):
        shape = tuple(map(int, rng.integers(0, 9, rng.integers(1, 4))))
        known = random_layout(rng, shape, 6)
        places = [Replicate() if dim is None else Shard(dim) for dim in known.cuts]
        ranks = torch.tensor(known.ranks).view(known.mesh)
        assert layout(shape, ranks, places) == known
        for rank, at in zip(known.ranks, itertools.product(*map(range, known.mesh)), strict=True):
            local, offset = _compute_local_shape_and_global_offset(shape, known.mesh, list(at), places)
            assert known.shape_on(rank) == tuple(local)
            if math.prod(local):
                assert tuple(begin for begin, _ in known.boxes[rank]) == tuple(offset)
