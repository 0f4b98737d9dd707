"""One rank of `benchmarks/training.py --gpus`: does what it is told to by lines of JSON on stdin, answers on stdout.

Its process group is hetcoll, as it is or with this rank's GPU posing as AMD's; PyTorch's NCCL; or NCCL inside an island
with Gloo between two of them (gloo_boundary.py).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from llama import Shape, batches, loss_of
from torch import Tensor, nn
from training_ways import PIPELINES, DataParallel, Pipeline

import hetcoll.torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests/support"))

Answer = dict[str, Any]


class Twice(nn.Module):
    """What a layer gives, computed `times` times, forward and backward: a GPU at half its speed."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.times = inner, 1

    def forward(self, x: Tensor) -> Tensor:
        if self.times == 1:
            return self.inner(x)
        return torch.stack([self.inner(x) for _ in range(self.times)]).mean(0)


class Rank:
    """This rank's trainer. `how` is nccl, hetcoll, posing or boundary, or alone: no group at all."""

    def __init__(self, how: str, device: str, dtype: str, rate: float) -> None:
        self.rank, self.rate = int(os.environ["RANK"]), rate
        self.dtype = getattr(torch, dtype)
        self.device = torch.device(device, self.rank) if device == "cuda" else torch.device(device)
        if device == "cuda":
            torch.cuda.set_device(self.device)
        self.undo = contextlib.ExitStack()
        if how == "posing":
            from torch_substitutes import Posing, substitute

            self.undo.enter_context(substitute(Posing))
        elif how == "boundary":
            import gloo_boundary

            gloo_boundary.register()
        hetcoll.torch.register()  # as its entry point does where hetcoll is installed
        if how != "alone":
            dist.init_process_group("hetcoll" if how == "posing" else how)
        self.trainer: DataParallel | Pipeline | None = None
        self.data: list[tuple[Tensor, Tensor]] = []

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()

    def make(
        self, way: str, shape: dict[str, int], steps: int, pieces: int, bucket: int = 25, samples: int = 1
    ) -> Answer:
        """The model, and the batches of all steps. `bucket` is DistributedDataParallel's in MiB, `samples` how many a
        micro-batch of a pipeline has."""
        s = Shape(**shape)
        self.data = [(x.to(self.device), y.to(self.device)) for x, y in batches(s, steps)]
        if way in PIPELINES:
            self.trainer = Pipeline(s, way, self.device, self.dtype, rate=self.rate, samples=samples)
        else:
            self.trainer = DataParallel(s, way, self.device, self.dtype, rate=self.rate, bucket=bucket, pieces=pieces)
        self.settle()
        return {"parameters": sum(each.numel() for each in self.trainer.model.parameters())}

    def turn(self, first: int, steps: int) -> Answer:
        """Train on `steps` batches from `first` on; the time is that of all but the first."""
        assert self.trainer is not None
        losses, start = [], 0.0
        for i in range(first, first + steps):
            if i == first + 1:
                self.settle()
                start = time.perf_counter()
            losses.append(self.trainer.step(*self.data[i]))
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / (steps - 1)
        found = {"seconds": seconds, "losses": self.trainer.means(losses)}
        self.settle()
        if self.device.type == "cuda":
            found["peak"] = torch.cuda.max_memory_allocated()
            torch.cuda.empty_cache()  # for the other jobs on this GPU
        return found

    def balance(self, shape: dict[str, int], steps: int) -> Answer:
        """Seconds a step of DistributedDataParallel at full speed, with the last rank slowed, and that evened out."""
        from hetcoll.torch.balance import Balancer

        s = Shape(**shape)
        self.data = [(x.to(self.device), y.to(self.device)) for x, y in batches(s, steps)]
        trainer = DataParallel(s, "one", self.device, self.dtype, rate=self.rate, bucket=25)
        slow = [Twice(part) for part in trainer.parts]
        model = nn.parallel.DistributedDataParallel(nn.Sequential(*slow), gradient_as_bucket_view=True)
        balancer = Balancer(s.batch, every=2, smoothing=0.0)
        data, found, start = self.data, dict[str, Any](), 0.0
        for phase in ("even", "even", "slowed", "balanced", "balanced"):  # the first time takes memory and compiles
            for part in slow:
                part.times = 2 if phase != "even" and self.rank == dist.get_world_size() - 1 else 1
            measured = balancer.measure if phase == "balanced" else contextlib.nullcontext
            for step, (x, y) in enumerate(data):
                if step == len(data) // 2:
                    self.settle()
                    start = time.perf_counter()
                with measured():
                    output = model(x[balancer.part])
                loss = loss_of(output, y[balancer.part])
                balancer.weigh(loss).backward()
                trainer.optimizer.step()
                trainer.optimizer.zero_grad()
                if step == len(data) - 1:
                    found[f"loss {phase}"] = balancer.mean(loss)
                if phase == "balanced":
                    balancer.update()
            self.settle()
            found[phase] = (time.perf_counter() - start) / (len(data) - len(data) // 2)
        found["shares"] = balancer.shares
        return found

    def drop(self) -> Answer:
        self.trainer, self.data = None, []
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return {}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")  # what libraries print goes to stderr
    os.dup2(2, 1)
    rank = Rank(**json.loads(sys.argv[1]))
    for line in sys.stdin:
        told = json.loads(line)
        found = getattr(rank, told.pop("do"))(**told)
        answers.write(json.dumps(found) + "\n")
        answers.flush()
    if dist.is_initialized():
        dist.destroy_process_group()
    rank.undo.close()


if __name__ == "__main__":
    main()
