"""What compression of slow edges does to training: bytes, time and loss, with and without error feedback.

    python benchmarks/compressed_training.py [--steps 20] [--formats none,bf16,fp8,int8]

Two ranks of this host pose as two hosts: islands of one rank each, over TCP. DistributedDataParallel trains the model
of `benchmarks/training.py` on the same batches each time; only its gradients travel. Needs PyTorch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from llama import Shape
from training import train

import hetcoll.torch

RANKS = 2


def worker(steps: int) -> None:
    torch.set_num_threads(1)
    hetcoll.torch.register()  # where it is not installed, but run from its sources
    dist.init_process_group("hetcoll")
    group: Any = dist.group.WORLD
    found = train("ddp", Shape(), steps) | {"counters": group.comm.counters()}
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def launch(form: str, feedback: bool, steps: int) -> dict[str, Any]:
    words = [sys.executable, "-m", "hetcoll", "run", "-n", str(RANKS), "--no-prefix", __file__]
    ours = {"HETCOLL_ISLANDS": "0|1", "HETCOLL_TRANSPORT": "tcp", "HETCOLL_COMPRESS": form, "OMP_NUM_THREADS": "1"}
    if not feedback:
        ours["HETCOLL_COMPRESS_FEEDBACK"] = "0"
    words += ["--worker", "--steps", str(steps)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, env=os.environ | ours)
    if done.returncode:
        raise RuntimeError(f"{form} failed:\n{done.stdout}{done.stderr}")
    found: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--formats", default="none,bf16,fp8,int8")
    parser.add_argument("--json", help="also write all results to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.steps)
        return
    results: dict[str, Any] = {}
    exact = launch("none", True, args.steps)["losses"]
    for form in args.formats.split(","):
        for feedback in (True, False) if form != "none" else (True,):
            found = launch(form, feedback, args.steps)
            results[form if feedback else f"{form} without feedback"] = found
            counters, losses = found["counters"], found["losses"]
            sent = counters.get("compressed_after", 0) / max(counters.get("compressed_before", 1), 1) or 1.0
            apart = max(abs(a - b) / b for a, b in zip(losses, exact, strict=True))
            print(
                f"{form:5}{'' if feedback else ' without feedback':17} bytes {sent:.3f}, final loss {losses[-1]:.5f}, "
                f"largest relative difference of a step's loss {apart:.1e}, {found['tokens_per_second']:.0f} tokens/s",
                flush=True,
            )
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
