"""Uneven batches on four ranks, of which two pose as slow."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from hetcoll.torch import balance
from hetcoll.torch.balance import Balancer

BATCH = 48
SPEEDS = (1.0, 1.0, 0.5, 0.5)  # samples a second, of a clock of its own
Speeds = tuple[float, ...]


class _Clock:
    """The time that `hetcoll.torch.balance` sees on this rank: it passes with the samples that the rank computes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        patch.setattr(balance, "time", self)

    def perf_counter(self) -> float:
        return self.now

    def compute(self, samples: int, speeds: Speeds = SPEEDS) -> float:
        """Seconds that they take."""
        seconds = samples / speeds[dist.get_rank()]
        self.now += seconds
        return seconds


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 8, generator=source), torch.randn(BATCH, 2, generator=source)


def shares_follow_the_speed_and_the_loss_is_the_batchs() -> None:
    with pytest.MonkeyPatch.context() as patch:
        _train(_Clock(patch))


def _slowest(seconds: float) -> float:
    """What a step takes: as long as the rank that takes longest."""
    longest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.item()


def _train(clock: _Clock) -> None:
    model, alone = DistributedDataParallel(_model()), _model()
    mine, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone))
    balancer = Balancer(BATCH, every=3, smoothing=0.2)
    assert balancer.shares == [12, 12, 12, 12]
    steps = []
    for step in range(12):
        x, y = _batch(step)
        with balancer.measure():
            steps.append(clock.compute(balancer.share))
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
    assert balancer.shares == [16, 16, 8, 8]
    assert _slowest(steps[0]) == BATCH / 4 / 0.5
    assert _slowest(steps[-1]) == BATCH / sum(SPEEDS)  # two ranks at half speed cost one rank's share, and no more
    for found, wanted_weight in zip(model.module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, wanted_weight, rtol=1e-4, atol=1e-6)


def new_shares_must_be_worth_their_while() -> None:
    slower, much_slower = (0.97, *SPEEDS[1:]), (0.5, *SPEEDS[1:])
    with pytest.MonkeyPatch.context() as patch:
        clock = _Clock(patch)

        def after(balancer: Balancer, *speeds: Speeds) -> tuple[bool, list[int]]:
            for each in speeds:
                with balancer.measure():
                    clock.compute(balancer.share, each)
                changed = balancer.update()
            return changed, balancer.shares

        usual, eager = (Balancer(480, every=1, smoothing=0.0, margin=margin) for margin in (0.05, 0.0))
        assert after(usual, SPEEDS) == after(eager, SPEEDS) == (True, [160, 160, 80, 80])
        assert after(usual, SPEEDS, slower) == (False, [160, 160, 80, 80])
        assert after(eager, SPEEDS, slower) == (True, [157, 161, 81, 81])
        assert after(usual, much_slower) == (True, [96, 192, 96, 96])


def without_measurements_it_says_so() -> None:
    balancer = Balancer(8, every=1)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() != 1:
            clock = _Clock(patch)
            with balancer.measure():
                clock.compute(balancer.share)
        with pytest.raises(RuntimeError, match=r"none on ranks \[1\]"):
            balancer.update()


def what_cannot_be_is_refused() -> None:
    for wrong, words in (
        ({"least": 0}, "least: wanted 1 or more, got 0"),
        ({"margin": float("nan")}, "margin: wanted 0 or more, got nan"),
        ({"smoothing": 1.0}, "wanted 1 or more, and in"),
    ):
        with pytest.raises(ValueError, match=words):
            Balancer(BATCH, **wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"total: wanted a whole number, got 48\.0"):
        Balancer(48.0)  # type: ignore[arg-type]
