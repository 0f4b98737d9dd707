"""The ways of training the decoder of llama.py that benchmarks/training.py compares: each on the default process group.

Every way trains the same model from the same weights on the same batches; what may differ is the order of additions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from llama import layers, loss_of
from shapes import Shape
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from hetcoll.torch.balance import Balancer

PIPELINES = ("pipeline", "overlapped")


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

    `bucket` is DistributedDataParallel's, in MiB; `pieces` into how many a rank's part is cut, one after the other, for
    all of which ranks exchange once.
    "balanced" is DistributedDataParallel whose ranks get as much of a batch as they are fast (`hetcoll.torch.balance`).
    """

    def __init__(
        self, s: Shape, way: str, device: torch.device, dtype: torch.dtype, *, rate: float, bucket: int, pieces: int = 1
    ) -> None:
        with made_on(device, dtype):
            self.parts = layers(s)
        self.model: nn.Module = nn.Sequential(*self.parts)
        if way == "fsdp2":
            mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
            for part in self.parts:
                fully_shard(part, mesh=mesh, reshard_after_forward=pieces == 1)
            fully_shard(self.model, mesh=mesh)
        elif way in ("ddp", "balanced"):
            self.model = nn.parallel.DistributedDataParallel(
                self.model, bucket_cap_mb=bucket, gradient_as_bucket_view=True
            )
        self.rank: int = 0 if way == "one" else dist.get_rank()
        self.size: int = 1 if way == "one" else dist.get_world_size()
        self.optimizer, self.pieces, self.device = optimizer_of(self.model, rate), pieces, device
        self.balancer = Balancer(s.batch, every=2, smoothing=0.0) if way == "balanced" else None

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of this rank's part of the batch; the mean over ranks is the whole batch's."""
        if self.balancer is not None:
            return self._uneven(self.balancer, x, y)
        mine = zip(*(part.chunk(self.size)[self.rank].chunk(self.pieces) for part in (x, y)), strict=True)
        losses = []
        for at, (inputs, wanted) in enumerate(mine):
            with self._exchanging(at == self.pieces - 1):
                loss = loss_of(self.model(inputs), wanted)
                (loss / self.pieces).backward()
            losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean()

    def _exchanging(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Whether what is computed now is the last piece, behind which the gradients are exchanged."""
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            return contextlib.nullcontext() if last else self.model.no_sync()
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
            self.model.set_reshard_after_backward(last)
        return contextlib.nullcontext()

    def _uneven(self, balancer: Balancer, x: Tensor, y: Tensor) -> Tensor:
        with balancer.measure(self.device):
            output = self.model(x[balancer.part])
        loss = balancer.weigh(loss_of(output, y[balancer.part]))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        balancer.update()
        return loss.detach()

    def means(self, losses: Sequence[Tensor]) -> list[float]:
        """Of whole batches, from what `step` gave on each rank."""
        found = torch.stack(list(losses))
        if self.size > 1:
            dist.all_reduce(found)
        return [float(each) / self.size for each in found]


class Pipeline:
    """One batch in micro-batches of so many samples, through `stages` of as many ranks each (0: of one).

    The ranks of a stage share the batch, and average its gradients. "pipeline" is 1F1B: a stage sends, and waits for
    what it goes on with, at once, so all of a message's time is lost. "overlapped" has twice as many micro-batches
    under way (interleaved 1F1B, of one stage a rank): each message has as long as a micro-batch takes.
    """

    def __init__(
        self, s: Shape, way: str, device: torch.device, dtype: torch.dtype, *, rate: float, samples: int = 1,
        stages: int = 0,
    ) -> None:  # fmt: skip
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

        ranks = dist.get_world_size()
        self.stages = stages or ranks
        self.wide = ranks // self.stages
        self.stage, self.part = divmod(dist.get_rank(), self.wide)
        lines = [dist.new_group(list(range(part, ranks, self.wide))) for part in range(self.wide if stages else 0)]
        teams = [dist.new_group(list(range(at, at + self.wide))) for at in range(0, ranks, self.wide) if stages]
        self.team = teams[self.stage] if teams else None
        first, last = stage_of(s, self.stage, self.stages)
        with made_on(device, dtype):
            parts = layers(s, lambda part, at: part if first <= at < last else nn.Identity())
        self.model = nn.Sequential(*parts[first:last])
        group = lines[self.part] if lines else None
        stage = PipelineStage(self.model, self.stage, self.stages, device, group=group)
        count = s.batch // self.wide // samples
        self.schedule = (
            Schedule1F1B(stage, count, loss_fn=loss_of)
            if way == "pipeline"
            else ScheduleInterleaved1F1B([stage], count, loss_fn=loss_of)
        )
        self.optimizer = optimizer_of(self.model, rate)
        self.nothing = torch.zeros((), device=device)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of this rank's part of the batch on ranks of the last stage, 0 on others."""
        losses: list[Tensor] = []
        if self.stage == 0:
            self.schedule.step(x.chunk(self.wide)[self.part])
        elif self.stage == self.stages - 1:
            self.schedule.step(target=y.chunk(self.wide)[self.part], losses=losses)
        else:
            self.schedule.step()
        self._average()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if losses else self.nothing

    def _average(self) -> None:
        """The gradients of the ranks of this stage."""
        if self.wide == 1:
            return
        found = [each.grad for each in self.model.parameters() if each.grad is not None]
        whole = torch.cat([each.flatten() for each in found])
        dist.all_reduce(whole, group=self.team)
        for gradient, mean in zip(found, whole.split([each.numel() for each in found]), strict=True):
            gradient.copy_(mean.view_as(gradient) / self.wide)

    def means(self, losses: Sequence[Tensor]) -> list[float]:
        """See `DataParallel.means`."""
        found = torch.stack(list(losses))
        dist.all_reduce(found)
        return [float(each) / self.wide for each in found]


def stage_of(s: Shape, stage: int, stages: int) -> tuple[int, int]:
    """The first part of a stage, by `layers`, and the one behind its last."""
    first, last = (1 + round(s.layers * k / stages) for k in (stage, stage + 1))
    return first if stage else 0, last if stage < stages - 1 else s.layers + 2
