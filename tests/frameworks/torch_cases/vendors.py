"""Training whose gradients and activations go through GPUs of two vendors: fakes, with tensors of the CPU."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch_substitutes import ThroughGpu, substitute

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

import llama
from training_ways import PIPELINES, DataParallel, Pipeline

SHAPE = llama.Shape(width=64, layers=4, heads=4, shared_heads=2, hidden=160, length=16, batch=8)
STEPS, RATE = 5, 3e-3
CPU = torch.device("cpu")


def _trainer(way: str) -> DataParallel | Pipeline:
    if way in PIPELINES:
        return Pipeline(SHAPE, way, CPU, torch.float32, rate=RATE)
    return DataParallel(SHAPE, way, CPU, torch.float32, rate=RATE, bucket=1, pieces=SHAPE.batch if way == "one" else 1)


def _losses(trainer: DataParallel | Pipeline) -> list[float]:
    return trainer.means([trainer.step(x, y) for x, y in llama.batches(SHAPE, STEPS)])


def alone(*_: Any) -> list[float]:
    """One process, a sample at a time, as a pipeline's."""
    return _losses(_trainer("one"))


@contextlib.contextmanager
def pretended_build(vendor: str) -> Iterator[None]:
    """PyTorch's version says that it was built for CUDA ("n"), for ROCm ("a") or for neither ("c")."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.version, "cuda", "13.0" if vendor == "n" else None)
        patch.setattr(torch.version, "hip", "7.1.0" if vendor == "a" else None)
        yield


def trained(
    files: dist.Store, rank: int, size: int, way: str, vendors: str
) -> tuple[list[float], str, list[str], dict[str, int]]:
    """Losses, a hash of this rank's parameters, how data reached the others, and what was counted. `vendors` is a
    letter a rank, "c" for one without a GPU."""
    from hetcoll.vendors.devices import cuda, hip

    device = {"n": cuda, "a": hip}[vendors[rank]].devices()[rank] if vendors[rank] != "c" else None
    made: list[Any] = []

    def through(comm: Any) -> Any:
        made.append(comm if device is None else ThroughGpu(comm, device))
        return made[-1]

    with substitute(through), pretended_build(vendors[rank]):
        dist.init_process_group("hetcoll", store=files, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        try:
            trainer = _trainer(way)
            losses = _losses(trainer)
            if device is not None:
                assert sum(each.calls for each in made) >= STEPS, "nothing went through the GPUs"
            state = hashlib.sha256()
            for each in trainer.model.parameters():
                local = each.to_local() if hasattr(each, "to_local") else each
                state.update(local.detach().numpy().tobytes())
            paths = list(made[0].explain("allreduce", 1 << 20).paths)
            return losses, state.hexdigest(), paths, made[0].counters()
        finally:
            dist.destroy_process_group()
