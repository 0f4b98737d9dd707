"""One rank of a model that is trained or decodes: does what it is told to by lines of JSON on stdin, answers on stdout.

Its process group is hetcoll, as it is, with this rank's GPU posing as AMD's, or through a fake GPU; PyTorch's NCCL or
Gloo; or NCCL inside an island with Gloo between two of them (gloo_boundary.py).
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
from decoding import WARM, Decoder
from llama import batches, loss_of
from shapes import Shape
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


def carried(kind: str) -> contextlib.AbstractContextManager[None]:
    """Process groups made within show tensors to hetcoll as memory of an AMD GPU, or carry them over a fake one."""
    from torch_substitutes import Posing, ThroughGpu, substitute

    if kind == "posing":
        return substitute(Posing)
    from hetcoll.vendors.devices import cuda, hip

    device = {"fake cuda": cuda, "fake hip": hip}[kind].devices()[int(os.environ["HETCOLL_DEVICE"].partition(":")[2])]
    return substitute(lambda comm: ThroughGpu(comm, device))


class Rank:
    """This rank's trainer. `how` is nccl, gloo, hetcoll or boundary, or alone: no group at all. `kind` is the place's
    (places.py)."""

    def __init__(self, how: str, kind: str, device: str, dtype: str, rate: float) -> None:
        self.rate, self.dtype, self.device = rate, getattr(torch, dtype), torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)
        self.undo = contextlib.ExitStack()
        if how == "hetcoll" and (kind == "posing" or kind.startswith("fake")):
            self.undo.enter_context(carried(kind))
        elif how == "boundary":
            import gloo_boundary

            gloo_boundary.register()
        hetcoll.torch.register()  # as its entry point does where hetcoll is installed
        if how != "alone":
            dist.init_process_group(how)
        self.rank = dist.get_rank() if how != "alone" else 0
        self.trainer: DataParallel | Pipeline | None = None
        self.data: list[tuple[Tensor, Tensor]] = []

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()

    def make(
        self, way: str, shape: dict[str, int], steps: int, pieces: int = 1, bucket: int = 25, samples: int = 1,
        stages: int = 0,
    ) -> Answer:  # fmt: skip
        """The model, and the batches of all steps. `bucket` is DistributedDataParallel's in MiB, `samples` how many a
        micro-batch of a pipeline has, `stages` its own, if not one a rank."""
        s = Shape(**shape)
        self.data = [(x.to(self.device), y.to(self.device)) for x, y in batches(s, steps)]
        if way in PIPELINES:
            self.trainer = Pipeline(s, way, self.device, self.dtype, rate=self.rate, samples=samples, stages=stages)
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

    def counters(self) -> Answer:
        """hetcoll's."""
        group: Any = dist.group.WORLD
        found: Answer = group.comm.counters()
        return found

    def decode(self, way: str, shape: dict[str, int], prompt: int, count: int, graphs: bool) -> Answer:
        """Tokens behind prompts of so many bytes of the text, seconds for each but the first ones, and the least gap
        between the best logit and the second best."""
        s, begun = Shape(**shape | {"length": prompt}), 0.0
        decoder = Decoder(s, way, self.device, self.dtype)
        prompts, _ = next(batches(s, 1))

        def begin() -> None:
            nonlocal begun
            self.settle()
            begun = time.perf_counter()

        decoder.decode(prompts, WARM, begin)  # the first time takes memory and connects
        tokens = decoder.decode(prompts, count, begin, graphs)
        self.settle()
        return {"tokens": tokens, "seconds": (time.perf_counter() - begun) / (count - WARM), "gap": decoder.gap}

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
