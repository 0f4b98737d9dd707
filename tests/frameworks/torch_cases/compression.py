"""Compression of slow edges, on four ranks that are two islands."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from hetcoll import ArgumentError
from hetcoll.torch import Options

STEPS, WIDTH = 6, 256


def _counters(group: Any) -> tuple[int, int]:
    found = group.comm.counters()
    return found.get("compressed_before", 0), found.get("compressed_after", 0)


def options() -> None:
    """Of a group: what is large travels in its format, the same on all ranks; other groups are as ever."""
    rank = dist.get_rank()
    group = dist.new_group(pg_options=Options(compress="int8"))
    x = torch.randn(50_000, generator=torch.Generator().manual_seed(rank))
    whole = x.clone()
    dist.all_reduce(whole)
    assert _counters(dist.group.WORLD) == (0, 0)
    small = torch.ones(100)
    dist.all_reduce(small, group=group)
    assert _counters(group) == (0, 0)
    assert (small == 4).all()
    y = x.clone()
    dist.all_reduce(y, group=group)
    before, after = _counters(group)
    assert 0 < after < 0.26 * before
    assert 0 < (y - whole).abs().max() < 0.05 * whole.abs().max()
    everyone = [torch.empty_like(y) for _ in range(4)]
    dist.all_gather(everyone, y)
    assert all(torch.equal(y, other) for other in everyone)
    indices = torch.arange(50_000)
    dist.all_reduce(indices, group=group)  # integers are left alone
    assert torch.equal(indices, 4 * torch.arange(50_000))
    dist.destroy_process_group(group)


def wrong_options() -> None:
    with pytest.raises(ArgumentError, match="compress: wanted one of none, bf16, fp8, int8, got 'zip'"):
        Options(compress="zip")
    with pytest.raises(TypeError, match=r"pg_options: wanted hetcoll\.torch\.Options or none, got 'int8'"):
        dist.new_group(pg_options="int8")


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def _train(model: nn.Module) -> list[float]:
    source, losses = torch.Generator().manual_seed(dist.get_rank()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(STEPS):
        x = torch.randn(8, WIDTH, generator=source)
        loss = mse_loss(model(x), x.roll(1, 1))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        mean: Tensor = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        losses.append(mean.item())
    return losses


def gradients() -> None:
    """DistributedDataParallel: gradients are compressed, the weights stay the same on all ranks, the loss falls."""
    model = _model()
    exact = _train(DistributedDataParallel(copy.deepcopy(model)))
    for form in ("bf16", "fp8", "int8"):
        group = dist.new_group(pg_options=Options(compress=form))
        ours = copy.deepcopy(model)
        losses = _train(DistributedDataParallel(ours, process_group=group))
        assert losses == pytest.approx(exact, rel=2e-3)
        assert losses[-1] < losses[0]
        before, after = _counters(group)
        assert 0 < after < 0.51 * before
        weights = nn.utils.parameters_to_vector(ours.parameters()).detach()
        everyone = [torch.empty_like(weights) for _ in range(4)]
        dist.all_gather(everyone, weights)
        assert all(torch.equal(weights, other) for other in everyone)
        dist.destroy_process_group(group)
