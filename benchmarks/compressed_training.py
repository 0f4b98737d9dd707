"""What compression of slow edges does to training: bytes, time and loss, with and without error feedback.

    python benchmarks/compressed_training.py [--steps 20] [--formats none,bf16,fp8,int8] [--rate 1gbit]

Two ranks of this host pose as two hosts: islands of one rank each, over TCP. With `--rate` they are two hosts to the
kernel, network namespaces that are joined by a link of that rate (tc(8)'s words); that needs root, ip(8) and tc(8).
DistributedDataParallel trains the model of `benchmarks/training.py` on the same batches each time; only its gradients
travel. Needs PyTorch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from llama import Shape
from training import train

import hetcoll.torch

RANKS = 2
SECONDS = 900.0
HERE = Path(__file__).resolve()


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
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, env=os.environ | ours)
    if done.returncode:
        raise RuntimeError(f"{form} failed:\n{done.stdout}{done.stderr}")
    return result_in(done.stdout)


def result_in(output: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    return found


def launch_on(hosts: list[str], form: str, feedback: bool, steps: int) -> dict[str, Any]:
    """A rank in each of these network namespaces."""
    ours = {"HETCOLL_COMPRESS": form, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": "1",
            "LOCAL_RANK": "0", "MASTER_ADDR": "10.78.0.1", "MASTER_PORT": "29500"}  # fmt: skip
    if not feedback:
        ours["HETCOLL_COMPRESS_FEEDBACK"] = "0"
    words = [sys.executable, str(HERE), "--worker", "--steps", str(steps)]
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", host, *words],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | ours | {"RANK": str(rank)},
        )
        for rank, host in enumerate(hosts)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"{form} failed:\n" + "\n".join(outputs))
    return result_in(outputs[0])


@contextlib.contextmanager
def launcher(rate: str | None) -> Iterator[Callable[[str, bool, int], dict[str, Any]]]:
    """How a job is started: on this host, or on two that this makes. SystemExit says why these cannot be made."""
    if rate is None:
        yield launch
        return
    sys.path.append(str(HERE.parents[1] / "tests/support"))
    from netns import Network

    made = Network(RANKS, rate)
    try:
        try:
            made.make()
        except (OSError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", None) or str(error)
            raise SystemExit(f"two hosts cannot be made here, so that nothing is measured: {why.strip()}") from error
        yield lambda form, feedback, steps: launch_on(made.hosts, form, feedback, steps)
    finally:
        made.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--formats", default="none,bf16,fp8,int8")
    parser.add_argument("--rate", help="of the link between two hosts that are made for it, such as 1gbit")
    parser.add_argument("--json", help="also write all results to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.steps)
        return
    results: dict[str, Any] = {}
    with launcher(args.rate) as start:
        exact = start("none", True, args.steps)
        for form in args.formats.split(","):
            for feedback in (True, False) if form != "none" else (True,):
                found = exact if form == "none" else start(form, feedback, args.steps)
                results[form if feedback else f"{form} without feedback"] = found
                counters, losses = found["counters"], found["losses"]
                sent = counters.get("compressed_after", 0) / max(counters.get("compressed_before", 1), 1) or 1.0
                apart = max(abs(a - b) / b for a, b in zip(losses, exact["losses"], strict=True))
                print(
                    f"{form:5}{'' if feedback else ' without feedback':17} bytes {sent:.3f}, final loss "
                    f"{losses[-1]:.5f}, largest relative difference of a step's loss {apart:.1e}, "
                    f"{found['tokens_per_second']:.0f} tokens/s, "
                    f"{found['tokens_per_second'] / exact['tokens_per_second']:.2f} of uncompressed",
                    flush=True,
                )
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
