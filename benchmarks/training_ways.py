"""The ways of training the decoder of llama.py that benchmarks/training.py compares: each on the default process group.

Every way trains the same model from the same weights on the same batches; what may differ is the order of additions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from llama import Shape, layers, loss_of
from torch import Tensor, nn

PIPELINES = ("pipeline", "overlapped")
WAYS = ("ddp", "fsdp2", *PIPELINES)


def optimizer_of(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    fused = next(model.parameters()).device.type == "cuda"
    return torch.optim.AdamW(model.parameters(), lr=rate, fused=fused)


@contextlib.contextmanager
def made_on(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Modules are made there, of this type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


class DataParallel:
    """One process, DistributedDataParallel or FSDP2: each rank has the model, or a shard of it, and part of a batch.

    `bucket` is DistributedDataParallel's, in MiB; `pieces` into how many a rank's part is cut, one after the other.
    """

    def __init__(
        self, s: Shape, way: str, device: torch.device, dtype: torch.dtype, *, rate: float, bucket: int, pieces: int = 1
    ) -> None:
        with made_on(device, dtype):
            self.parts = layers(s)
        self.model: nn.Module = nn.Sequential(*self.parts)
        if way == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
            for part in self.parts:
                fully_shard(part, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        elif way == "ddp":
            self.model = nn.parallel.DistributedDataParallel(
                self.model, bucket_cap_mb=bucket, gradient_as_bucket_view=True
            )
        self.rank: int = 0 if way == "one" else dist.get_rank()
        self.size: int = 1 if way == "one" else dist.get_world_size()
        self.optimizer, self.pieces = optimizer_of(self.model, rate), pieces

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of this rank's part of the batch."""
        mine = zip(*(part.chunk(self.size)[self.rank].chunk(self.pieces) for part in (x, y)), strict=True)
        losses = []
        for inputs, wanted in mine:
            loss = loss_of(self.model(inputs), wanted)
            (loss / self.pieces).backward()
            losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean()

    def means(self, losses: Sequence[Tensor]) -> list[float]:
        """Of whole batches, from what `step` gave on each rank."""
        found = torch.stack(list(losses))
        if self.size > 1:
            dist.all_reduce(found)
        return [float(each) / self.size for each in found]


class Pipeline:
    """A stage a rank, one batch in micro-batches of so many samples.

    "pipeline" is 1F1B: a stage sends, and waits for what it goes on with, at once, so all of a message's time is lost.
    "overlapped" has twice as many micro-batches under way (interleaved 1F1B, of one stage a rank): each message has as
    long as a micro-batch takes.
    """

    def __init__(
        self, s: Shape, way: str, device: torch.device, dtype: torch.dtype, *, rate: float, samples: int = 1
    ) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        with made_on(device, dtype):
            parts = layers(s)
        first, last = (1 + round(s.layers * k / self.size) for k in (self.rank, self.rank + 1))
        mine = parts[first if self.rank else 0 : last if self.rank < self.size - 1 else None]
        self.model = nn.Sequential(*mine)
        stage = PipelineStage(self.model, self.rank, self.size, device)
        count = s.batch // samples
        self.schedule = (
            Schedule1F1B(stage, count, loss_fn=loss_of)
            if way == "pipeline"
            else ScheduleInterleaved1F1B([stage], count, loss_fn=loss_of)
        )
        self.optimizer = optimizer_of(self.model, rate)
        self.nothing = torch.zeros((), device=device)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of the batch on the last rank, 0 on others."""
        losses: list[Tensor] = []
        if self.rank == 0:
            self.schedule.step(x)
        elif self.rank == self.size - 1:
            self.schedule.step(target=y, losses=losses)
        else:
            self.schedule.step()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if losses else self.nothing

    def means(self, losses: Sequence[Tensor]) -> list[float]:
        """See `DataParallel.means`."""
        found = torch.stack(list(losses))
        dist.all_reduce(found)
        return [float(each) for each in found]
