"""Uneven batches for ranks of unequal speed: fast ones get more of each batch, and the loss stays that of the batch.

    balancer = Balancer(global_batch=512)
    for whole in batches:                              # every rank can find its part of the same batch
        x, y = whole.x[balancer.part], whole.y[balancer.part]
        with balancer.measure():
            output = model(x)                          # what runs without communication
        loss = loss_of(output, y)                      # a mean over this rank's samples
        balancer.weigh(loss).backward()
        optimizer.step()
        balancer.update()

`weigh` scales a rank's mean by its share. DistributedDataParallel and FSDP average gradients over ranks, which then
gives the gradient of the mean over all samples: what one process would compute on the whole batch, but for rounding.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from operator import truediv
from typing import Any

import torch
import torch.distributed as dist

from ..runtime.weights import shares

__all__ = ["Balancer", "shares"]


class Balancer:
    """This rank's part of each batch of `global_batch` samples, by how fast the ranks of `group` have been.

    Shares begin equal. Every `every` steps `update` measures them anew; `smoothing` in [0, 1) is how much of the older
    speed remains. They change where that makes steps faster by more than the part `margin`: batches of a new size cost
    memory, and compiled code anew. No rank gets fewer than `least` samples. All ranks pass the same arguments.
    """

    def __init__(
        self,
        global_batch: int,
        group: Any = None,
        *,
        every: int = 10,
        smoothing: float = 0.5,
        least: int = 1,
        margin: float = 0.05,
    ) -> None:
        if every < 1 or not 0 <= smoothing < 1:
            raise ValueError(f"every, smoothing: wanted 1 or more, and in [0, 1), got {every} and {smoothing}")
        if not margin >= 0:  # nor NaN
            raise ValueError(f"margin: wanted 0 or more, got {margin}")
        if least < 1:  # the mean of no samples is NaN, and would be everybody's
            raise ValueError(f"least: wanted 1 or more, got {least}")
        self._group, self._every, self._smoothing = group, every, smoothing
        self._least, self._margin = least, margin
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._total = global_batch
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._steps = 0
        self._spans: list[tuple[int, Any, Any]] = []  # samples, and seconds or events before and after
        self._speed: float | None = None
        self.shares = shares(global_batch, [1.0] * self._size, least)
        """Samples of each rank, the same list on all ranks."""

    @property
    def share(self) -> int:
        """Samples of this rank."""
        return self.shares[self._rank]

    @property
    def part(self) -> slice:
        """Which samples of a batch are this rank's."""
        start = sum(self.shares[: self._rank])
        return slice(start, start + self.share)

    def weigh(self, loss: torch.Tensor) -> torch.Tensor:
        """This rank's mean loss, scaled so that the mean over ranks is the mean over all samples."""
        return loss * (self.share * self._size / self._total)

    def mean(self, loss: torch.Tensor) -> float:
        """The loss of the whole batch, for people; all ranks call it."""
        whole = self.weigh(loss.detach()).double() / self._size
        dist.all_reduce(whole, group=self._group)
        return float(whole)

    @contextlib.contextmanager
    def measure(self, device: torch.device | None = None) -> Iterator[None]:
        """Take the time of this rank's work on its samples.

        Within the block there must be no communication: ranks would measure the slowest of them. The forward pass under
        DistributedDataParallel has none, and the backward pass takes a multiple of it. On a GPU (`device`, default: the
        current one, if there is any) it is the GPU's time, and nothing waits for it here.
        """
        self._device = device or self._device
        if self._device.type != "cpu":
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record(torch.cuda.current_stream(device))
            yield
            after.record(torch.cuda.current_stream(device))
            self._spans.append((self.share, before, after))
        else:
            start = time.perf_counter()
            yield
            self._spans.append((self.share, start, time.perf_counter()))

    def update(self) -> bool:
        """Count a step; every so many, exchange speeds and set the shares. All ranks call it. Whether they changed."""
        self._steps += 1
        if self._steps % self._every:
            return False
        speed = self._measured()
        if speed is not None:
            keep = self._smoothing if self._speed is not None else 0.0
            self._speed = keep * (self._speed or 0.0) + (1 - keep) * speed
        # From where this rank measures: PyTorch sends objects from the host's memory, which a rank with a GPU cannot do
        # beside one without.
        mine = torch.tensor(math.nan if self._speed is None else self._speed, dtype=torch.float64, device=self._device)
        every = [torch.empty_like(mine) for _ in range(self._size)]
        dist.all_gather(every, mine, group=self._group)
        known = [float(each) for each in every]
        if missing := [rank for rank, each in enumerate(known) if math.isnan(each)]:
            raise RuntimeError(f"update: wanted a block of `measure` on every rank, got none on ranks {missing}")
        found = shares(self._total, known, self._least)
        now, then = (max(map(truediv, each, known)) for each in (self.shares, found))  # seconds of a step
        if now <= (1 + self._margin) * then:
            return False
        self.shares = found
        return True

    def _measured(self) -> float | None:
        """Samples a second since the last time, without the slowest step: the first one warms up."""
        times = []
        for samples, before, after in self._spans:
            if isinstance(before, float):
                times.append((after - before, samples))
            else:
                after.synchronize()
                times.append((before.elapsed_time(after) * 1e-3, samples))
        self._spans.clear()
        if len(times) > 1:
            times.remove(max(times, key=lambda pair: pair[0] / pair[1]))
        seconds = sum(each for each, _ in times)
        return sum(samples for _, samples in times) / seconds if seconds > 0 else None
