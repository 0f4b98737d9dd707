"""Uneven batches on four ranks, of which two pose as slow."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from hetcoll.torch.balance import Balancer

BATCH = 48
SPEEDS = (1.0, 1.0, 0.5, 0.5)  # samples in 2 ms


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 8, generator=source), torch.randn(BATCH, 2, generator=source)


def shares_follow_the_speed_and_the_loss_is_the_batchs() -> None:
    rank = dist.get_rank()
    model, alone = DistributedDataParallel(_model()), _model()
    mine, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone))
    balancer = Balancer(BATCH, every=3, smoothing=0.2)
    assert balancer.shares == [12, 12, 12, 12]
    for step in range(12):
        x, y = _batch(step)
        with balancer.measure():
            time.sleep(0.002 * balancer.share / SPEEDS[rank])
            output = model(x[balancer.part])
        loss = mse_loss(output, y[balancer.part])
        balancer.weigh(loss).backward()
        mine.step()
        mine.zero_grad()
        wanted = mse_loss(alone(x), y)
        wanted.backward()
        theirs.step()
        theirs.zero_grad()
        assert abs(balancer.mean(loss) - wanted.item()) < 1e-5 * wanted.item()
        balancer.update()
    assert sum(balancer.shares) == BATCH
    fast, slow = balancer.shares[:2], balancer.shares[2:]
    assert 1.3 * max(slow) < min(fast), balancer.shares
    for found, wanted_weight in zip(model.module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, wanted_weight, rtol=1e-4, atol=1e-6)


def without_measurements_it_says_so() -> None:
    balancer = Balancer(8, every=1)
    if dist.get_rank() != 1:
        with balancer.measure():
            time.sleep(0.001)
    with pytest.raises(RuntimeError, match=r"none on ranks \[1\]"):
        balancer.update()
