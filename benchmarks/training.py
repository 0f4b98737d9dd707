"""Train a small LLaMA-shaped decoder on the ranks of this host, and hold its loss against that of one process.

    python benchmarks/training.py [--ranks 4] [--steps 20] [--ways ddp,fsdp2,pipeline] [--backends hetcoll,gloo]

The text is Python's own reference (the module pydoc_data.topics, which CPython ships), read as bytes. Every way trains
the same model from the same weights on the same batches; what may differ is the order of additions. Needs PyTorch.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

TOLERANCE = 7e-3  # HetCCL's figure for the relative error of the loss
VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class Shape:
    """About 3.1 million parameters."""

    width: int = 256
    layers: int = 4
    heads: int = 8
    shared_heads: int = 4  # keys and values: grouped-query attention
    hidden: int = 688
    length: int = 64
    batch: int = 8


class Block(nn.Module):
    """Attention with rotary positions, then a gated linear unit; each behind an RMS norm and beside a shortcut."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape, self.head = s, s.width // s.heads
        kept = self.head * s.shared_heads
        self.norm1, self.norm2 = nn.RMSNorm(s.width), nn.RMSNorm(s.width)
        self.query, self.out = nn.Linear(s.width, s.width, bias=False), nn.Linear(s.width, s.width, bias=False)
        self.key, self.value = nn.Linear(s.width, kept, bias=False), nn.Linear(s.width, kept, bias=False)
        self.gate, self.up = nn.Linear(s.width, s.hidden, bias=False), nn.Linear(s.width, s.hidden, bias=False)
        self.down = nn.Linear(s.hidden, s.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (self._split(each(y)) for each in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(_rotate(q), _rotate(k), v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, self.head)).transpose(1, 2)


def _rotate(x: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., 2021) on (batch, heads, length, head)."""
    half = x.shape[-1] // 2
    angle = torch.outer(torch.arange(x.shape[-2]), 10000.0 ** (-torch.arange(half) / half))
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def layers(s: Shape) -> list[nn.Module]:
    """The whole model, in order: embedding, blocks, and the way back to bytes."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.RMSNorm(s.width), nn.Linear(s.width, VOCABULARY, bias=False))
    return [nn.Embedding(VOCABULARY, s.width), *(Block(s) for _ in range(s.layers)), head]


def text() -> Tensor:
    found = importlib.util.find_spec("pydoc_data.topics")
    assert found is not None
    assert found.origin is not None
    return torch.frombuffer(bytearray(Path(found.origin).read_bytes()), dtype=torch.uint8).long()


def batches(s: Shape, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and what follows them: (batch, length) each."""
    whole, source = text(), torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(whole) - s.length - 1, (s.batch,), generator=source)
        rows = torch.stack([whole[i : i + s.length + 1] for i in starts.tolist()])
        yield rows[:, :-1], rows[:, 1:]


def loss_of(logits: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), wanted.reshape(-1))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


class DataParallel:
    """One process, DistributedDataParallel or FSDP2: each rank has the model, or a shard of it, and part of a batch."""

    def __init__(self, s: Shape, way: str) -> None:
        parts = layers(s)
        self.model: nn.Module = nn.Sequential(*parts)
        if way == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
            for part in parts:
                fully_shard(part, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        elif way == "ddp":
            self.model = nn.parallel.DistributedDataParallel(self.model, bucket_cap_mb=4)
        self.rank, self.size = (0, 1) if way == "one" else (dist.get_rank(), dist.get_world_size())
        self.optimizer = optimizer_of(self.model)

    def step(self, x: Tensor, y: Tensor) -> float:
        loss = loss_of(self.model(x.chunk(self.size)[self.rank]), y.chunk(self.size)[self.rank])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        found = loss.detach()
        if self.size > 1:
            dist.all_reduce(found, op=dist.ReduceOp.AVG if dist.get_backend() != "gloo" else dist.ReduceOp.SUM)
            found = found / (self.size if dist.get_backend() == "gloo" else 1)
        return float(found)


class Pipeline:
    """A stage a rank, one batch in as many parts as there are samples (1F1B)."""

    def __init__(self, s: Shape) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        parts, cut = layers(s), len(layers(s)) / self.size
        self.model = nn.Sequential(*parts[round(self.rank * cut) : round((self.rank + 1) * cut)])
        stage = PipelineStage(self.model, self.rank, self.size, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, s.batch, loss_fn=loss_of)
        self.optimizer = optimizer_of(self.model)

    def step(self, x: Tensor, y: Tensor) -> float:
        last, losses = self.rank == self.size - 1, []
        if self.rank == 0:
            self.schedule.step(x)
        else:
            self.schedule.step(**({"target": y, "losses": losses} if last else {}))
        self.optimizer.step()
        self.optimizer.zero_grad()
        found = torch.stack(losses).mean().detach() if last else torch.zeros(())
        dist.broadcast(found, self.size - 1)
        return float(found)


def train(way: str, s: Shape, steps: int) -> dict[str, Any]:
    """Losses of all steps, and tokens a second by the median step."""
    trainer = Pipeline(s) if way == "pipeline" else DataParallel(s, way)
    losses, seconds = [], []
    for x, y in batches(s, steps):
        start = time.perf_counter()
        losses.append(trainer.step(x, y))
        seconds.append(time.perf_counter() - start)
    return {"losses": losses, "tokens_per_second": s.batch * s.length / statistics.median(seconds[1:])}


def worker(way: str, backend: str, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    found = train(way, Shape(), steps)
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def launch(way: str, backend: str, ranks: int, steps: int) -> dict[str, Any]:
    words = [sys.executable, "-m", "hetcoll", "run", "-n", str(ranks), "--no-prefix", __file__]
    words += ["--worker", way, backend, str(steps)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise RuntimeError(f"{way} on {backend} failed:\n{done.stdout}{done.stderr}")
    found: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ways", default="ddp,fsdp2,pipeline")
    parser.add_argument("--backends", default="hetcoll,gloo")
    parser.add_argument("--json", help="also write all results to this file")
    parser.add_argument("--worker", nargs=3, metavar=("WAY", "BACKEND", "STEPS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker[0], args.worker[1], int(args.worker[2]))
        return 0
    torch.set_num_threads(1)
    alone = train("one", Shape(), args.steps)
    wanted, worst = alone["losses"][-1], 0.0
    print(f"one process: loss {alone['losses'][0]:.4f} to {wanted:.6f}, {alone['tokens_per_second']:.0f} tokens/s")
    results: dict[str, Any] = {"shape": asdict(Shape()), "one": alone}
    for way in args.ways.split(","):
        for backend in args.backends.split(","):
            found = results[f"{way} {backend}"] = launch(way, backend, args.ranks, args.steps)
            error = abs(found["losses"][-1] - wanted) / wanted
            worst = max(worst, error)
            print(
                f"{way:9} {backend:8} {args.ranks} ranks: loss {found['losses'][-1]:.6f}, relative error {error:.1e}, "
                f"{found['tokens_per_second']:.0f} tokens/s",
                flush=True,
            )
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))
    if worst > TOLERANCE:
        print(f"the largest error is above {TOLERANCE:g}")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
