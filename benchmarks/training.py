"""Train a LLaMA-shaped decoder on the ranks of this host, and hold its loss against that of one process.

    python benchmarks/training.py [--ranks 4] [--steps 20] [--ways ddp,fsdp2,pipeline,overlapped] [--backends ...]
    python benchmarks/training.py --gpus 2 [--write-docs] [--json FILE]

The first form trains a small model on CPUs; the second one of a billion parameters on GPUs (training_gpus.py).
The text is Python's own reference (the module pydoc_data.topics, which CPython ships), read as bytes. Every way trains
the same model from the same weights on the same batches; what may differ is the order of additions. Needs PyTorch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import training_gpus
from llama import Shape, batches
from training_ways import PIPELINES, WAYS, DataParallel, Pipeline

import hetcoll.torch

TOLERANCE = 7e-3  # HetCCL's figure for the relative error of the loss
RATE = 1e-3
CPU = torch.device("cpu")


def train(way: str, s: Shape, steps: int) -> dict[str, Any]:
    """Losses of all steps, and tokens a second by the median step."""
    trainer = (
        Pipeline(s, way, CPU, torch.float32, rate=RATE)
        if way in PIPELINES
        else DataParallel(s, way, CPU, torch.float32, rate=RATE, bucket=4)
    )
    losses, seconds = [], []
    for x, y in batches(s, steps):
        start = time.perf_counter()
        losses += trainer.means([trainer.step(x, y)])
        seconds.append(time.perf_counter() - start)
    return {"losses": losses, "tokens_per_second": s.batch * s.length / statistics.median(seconds[1:])}


def worker(way: str, backend: str, steps: int) -> None:
    torch.set_num_threads(1)
    hetcoll.torch.register()  # as its entry point does where hetcoll is installed
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


def on_cpus(args: argparse.Namespace) -> int:
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
                f"{way:10} {backend:8} {args.ranks} ranks: loss {found['losses'][-1]:.6f}, relative error {error:.1e}, "
                f"{found['tokens_per_second']:.0f} tokens/s",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    if worst > TOLERANCE:
        print(f"the largest error is above {TOLERANCE:g}")
    return int(worst > TOLERANCE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--backends", default="hetcoll,gloo")
    parser.add_argument("--gpus", type=int, choices=training_gpus.GPUS, help="train the large model on so many GPUs")
    parser.add_argument("--peers", default=",".join(training_gpus.PEERS), help="with --gpus")
    parser.add_argument("--bucket", type=int, default=250, help="with --gpus: MiB of DistributedDataParallel's buckets")
    parser.add_argument("--samples", type=int, default=2, help="with --gpus: in a micro-batch of the pipeline")
    parser.add_argument("--limit", type=float, default=900.0, help="with --gpus: seconds; the rest is left out")
    parser.add_argument("--small", action="store_true", help="with --gpus: a tiny model on CPUs, to try the program")
    parser.add_argument("--json", type=Path, help="also write all results to this file")
    parser.add_argument("--write-docs", action="store_true", help="with --gpus: write the table of training-tables.md")
    parser.add_argument("--worker", nargs=3, metavar=("WAY", "BACKEND", "STEPS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write_docs and (args.small or not args.gpus):
        parser.error("--write-docs: wanted with --gpus and without --small: the table is of the large model on GPUs")
    if args.worker:
        worker(args.worker[0], args.worker[1], int(args.worker[2]))
        return 0
    return training_gpus.main(args, TOLERANCE) if args.gpus else on_cpus(args)


if __name__ == "__main__":
    sys.exit(main())
