"""What trains models on a process group: on four ranks each must give the loss that one process has.

Each rank computes that by itself: the model is small. Batches are cut by rank, and losses are means, so gradients are
means over ranks.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

STEPS, ROWS, WIDTH, LR = 4, 8, 16, 0.05
CPU = torch.device("cpu")


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))


def _batches(ranks: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """The whole batch of each step, or this rank's part of it."""
    source = torch.Generator().manual_seed(1)
    rank = dist.get_rank() if ranks > 1 else 0
    for _ in range(STEPS):
        x, y = torch.randn(ROWS, WIDTH, generator=source), torch.randn(ROWS, 4, generator=source)
        yield x.chunk(ranks)[rank], y.chunk(ranks)[rank]


def _mean(loss: Tensor) -> float:
    loss = loss.detach().clone()
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    return loss.item()


def _train(model: nn.Module, optimizer: Any, ranks: int) -> list[float]:
    losses = []
    for x, y in _batches(ranks):
        loss = mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(_mean(loss) if ranks > 1 else loss.item())
    return losses


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=LR)


def _alone(make: Callable[[nn.Module], torch.optim.Optimizer] = _sgd) -> list[float]:
    model = _model()
    return _train(model, make(model), 1)


def _alike(found: list[float], wanted: list[float], tolerance: float = 1e-5) -> None:
    assert len(found) == len(wanted) == STEPS
    assert wanted[-1] < wanted[0], "training does not train"
    for mine, theirs in zip(found, wanted, strict=True):
        assert abs(mine - theirs) <= tolerance * abs(theirs), (found, wanted)


def ddp() -> None:
    n = dist.get_world_size()
    for options in (
        {},
        {"bucket_cap_mb": 0.001},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ):
        model = DistributedDataParallel(_model(), **options)
        _alike(_train(model, _sgd(model), n), _alone())


def ddp_hooks() -> None:
    n = dist.get_world_size()
    for hook, state, tolerance in (
        (default_hooks.allreduce_hook, None, 1e-5),
        (default_hooks.fp16_compress_hook, None, 1e-2),
        (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), None, 1e-2),
    ):
        model = DistributedDataParallel(_model(), bucket_cap_mb=0.001)
        model.register_comm_hook(state, hook)
        _alike(_train(model, _sgd(model), n), _alone(), tolerance)
    model = DistributedDataParallel(_model(), bucket_cap_mb=0.001)
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    _alike(_train(model, _sgd(model), n), _alone())


def ddp_power_sgd() -> None:
    """Its callbacks run all-reduces: with full rank it is exact but for rounding; with several buckets, too."""
    n = dist.get_world_size()
    model = DistributedDataParallel(_model(), bucket_cap_mb=0.001)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=WIDTH, start_powerSGD_iter=2, min_compression_rate=0.1
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    _alike(_train(model, _sgd(model), n), _alone(), 1e-2)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    every = [torch.empty_like(flat) for _ in range(n)]
    dist.all_gather(every, flat)
    assert all(torch.equal(each, flat) for each in every)


def ddp_no_sync() -> None:
    n = dist.get_world_size()
    model, alone = DistributedDataParallel(_model()), _model()
    for (x, y), (whole_x, whole_y) in zip(_batches(n), _batches(), strict=True):
        with model.no_sync():
            mse_loss(model(x), y).backward()
        mse_loss(model(x), y).backward()
        for _ in range(2):
            mse_loss(alone(whole_x), whole_y).backward()
    for mine, theirs in zip(model.module.parameters(), alone.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def ddp_join() -> None:
    """Ranks have different numbers of batches: those that have run out shadow the others' collectives."""
    rank, n = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=LR)
    with Join([model, optimizer]):
        for x, y in itertools.islice(itertools.cycle(_batches(n)), 2 + rank):
            mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    every = [torch.empty_like(flat) for _ in range(n)]
    dist.all_gather(every, flat)
    assert all(torch.equal(each, flat) for each in every)


def ddp_join_divided_by_those_that_are_left() -> None:
    """Here the reducer waits for a call of Python's, for which torch's C++ alone holds the handle."""
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Linear(3, 2, bias=False))
    with model.join(divide_by_initial_world_size=False):
        for _ in range(2 + rank):
            model(torch.ones(1, 3)).sum().backward()
            torch.testing.assert_close(model.module.weight.grad, torch.ones(2, 3))
            model.zero_grad()


def ddp_sparse_embedding() -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.EmbeddingBag(10, 4, sparse=True, mode="sum"))
    model(torch.tensor([[rank, rank + 1]])).sum().backward()
    wanted = torch.zeros(10, 4)
    for r in range(n):
        wanted[[r, r + 1]] += 1 / n
    torch.testing.assert_close(model.module.weight.grad.to_dense(), wanted)


def ddp_buffers() -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    for _ in range(3):
        model(torch.randn(8, 4) + dist.get_rank()).sum().backward()
    model(torch.randn(8, 4))
    mean = model.module[1].running_mean.clone()
    dist.broadcast(mean, 0)


def zero() -> None:
    n = dist.get_world_size()
    model = DistributedDataParallel(_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=LR)
    _alike(_train(model, optimizer, n), _alone(_adam))
    optimizer.consolidate_state_dict(to=1)
    if dist.get_rank() == 1:
        assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))


def fsdp1() -> None:
    n = dist.get_world_size()
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        model = FullyShardedDataParallel(_model(), device_id=CPU, sharding_strategy=strategy, use_orig_params=True)
        _alike(_train(model, _adam(model), n), _alone(_adam))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = FullyShardedDataParallel(
        _model(), device_mesh=mesh, device_id=CPU, sharding_strategy=ShardingStrategy.HYBRID_SHARD, use_orig_params=True
    )
    _alike(_train(model, _adam(model), n), _alone(_adam))


def _sharded(mesh: Any) -> nn.Module:
    model = _model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp2() -> None:
    model = _sharded(init_device_mesh("cpu", (4,)))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    _alike(_train(model, _adam(model), dist.get_world_size()), _alone(_adam))


def hsdp() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = _sharded(mesh)
    _alike(_train(model, _adam(model), dist.get_world_size()), _alone(_adam))


def tensor_parallel() -> None:
    """Every rank has the whole batch and a part of the layers."""
    mesh = init_device_mesh("cpu", (4,))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(_model(), mesh, plan)
    _alike(_train(model, _sgd(model), 1), _alone())


def sequence_parallel() -> None:
    mesh = init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    norm, alone = nn.LayerNorm(8), nn.LayerNorm(8)
    norm = parallelize_module(norm, mesh, SequenceParallel())
    x = torch.randn(2, 12, 8)
    found = norm(distribute_tensor(x, mesh, [Shard(1)]))
    torch.testing.assert_close(found.full_tensor(), alone(x))


def fsdp_with_tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(_model(), mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    optimizer, losses = _sgd(model), []
    part = mesh["data"].get_local_rank()
    for x, y in _batches():
        loss = mse_loss(model(x.chunk(2)[part]), y.chunk(2)[part])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(_mean(loss))
    _alike(losses, _alone())


def dtensor() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    torch.manual_seed(3)
    x, y = torch.randn(8, 6), torch.randn(6, 10)
    left, right = (
        distribute_tensor(x, mesh, [Shard(0), Replicate()]),
        distribute_tensor(y, mesh, [Replicate(), Shard(1)]),
    )
    torch.testing.assert_close((left @ right).full_tensor(), x @ y)
    partial = distribute_tensor(x, mesh, [Shard(1), Shard(1)]) @ distribute_tensor(y, mesh, [Shard(0), Shard(0)])
    torch.testing.assert_close(partial.full_tensor(), x @ y)
    moved = left.redistribute(placements=[Shard(1), Shard(0)])
    torch.testing.assert_close(moved.full_tensor(), x)


def _stages(layers: int = 4) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)]


def pipeline() -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    whole = nn.Sequential(*_stages())
    for kind in (ScheduleGPipe, Schedule1F1B):
        stage = PipelineStage(_stages()[rank], rank, n, CPU)
        schedule = kind(stage, 4, loss_fn=mse_loss)
        x, y = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(5)), torch.ones(8, WIDTH)
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(x)
        elif rank == n - 1:
            schedule.step(target=y, losses=losses)
        else:
            schedule.step()
        wanted = mse_loss(whole(x), y)
        wanted.backward()
        if losses:
            torch.testing.assert_close(torch.stack(losses).mean(), wanted.detach())
        for mine, theirs in zip(stage.submod.parameters(), whole[rank].parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
        whole.zero_grad()


def pipeline_interleaved() -> None:
    """Two stages a rank: messages between the same two ranks belong to several pairs of stages."""
    rank, n = dist.get_rank(), dist.get_world_size()
    whole, parts = nn.Sequential(*_stages(2 * n)), _stages(2 * n)
    stages = [PipelineStage(parts[i], i, 2 * n, CPU) for i in (rank, rank + n)]
    schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=mse_loss)
    x, y = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(5)), torch.ones(8, WIDTH)
    arguments = (x,) if rank == 0 else ()
    schedule.step(*arguments, **({"target": y} if rank == n - 1 else {}))
    mse_loss(whole(x), y).backward()
    for i, stage in zip((rank, rank + n), stages, strict=True):
        for mine, theirs in zip(stage.submod.parameters(), whole[i].parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def checkpoint() -> None:
    """Saved by four ranks' shards, loaded into other ones; also in the background."""
    folder = [tempfile.mkdtemp(prefix="hetcoll-dcp-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, 0)
    model = _sharded(init_device_mesh("cpu", (4,)))
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder[0]}/a")
    other = _sharded(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=f"{folder[0]}/a")
    other.load_state_dict(state["model"])
    for mine, theirs in zip(other.parameters(), _model().parameters(), strict=True):
        assert isinstance(mine, DTensor)
        torch.testing.assert_close(mine.full_tensor(), theirs)
    dist.barrier()
    if dist.get_rank() == 0:
        import shutil

        shutil.rmtree(folder[0])


def compiled() -> None:
    n = dist.get_world_size()
    model = DistributedDataParallel(_model())
    fast = torch.compile(model, backend="aot_eager")
    _alike(_train(fast, _sgd(model), n), _alone())

    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x: Tensor) -> Tensor:
        y = x * 2
        dist.all_reduce(y)
        out = x.new_empty(n * x.shape[0])
        dist.all_gather_into_tensor(out, y)
        return out + 1

    torch.testing.assert_close(function(torch.ones(3)), torch.full((3 * n,), 2.0 * n + 1))
