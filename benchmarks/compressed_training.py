"""What compression of slow edges does to training: bytes, time and loss, with and without error feedback.

    python benchmarks/compressed_training.py [--steps 20] [--formats none,bf16,fp8,int8] [--rate 1gbit]

Two ranks of this host pose as two hosts: islands of one rank each, over TCP. With `--rate` they are two hosts to the
kernel, network namespaces that are joined by a link of that rate (tc(8)'s words); that needs root, ip(8) and tc(8).
DistributedDataParallel trains the small model of `benchmarks/training.py` on the same batches each time; only its
gradients travel. Needs PyTorch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from places import Place
from shaped import shaped
from shapes import SHAPES
from training import Job, dtype_of

SECONDS = 900.0
SHAPE = replace(SHAPES["small"], batch=8)  # of both ranks


def train(form: str, feedback: bool, places: Sequence[Place], steps: int, home: Path) -> dict[str, Any]:
    """Losses of all steps, tokens a second but for the first step, and what hetcoll counted."""
    env = {"HETCOLL_COMPRESS": form} | ({} if feedback else {"HETCOLL_COMPRESS_FEEDBACK": "0"})
    if not places[0].host:
        env |= {"HETCOLL_ISLANDS": "0|1", "HETCOLL_TRANSPORT": "tcp"}
    job = Job(form, "hetcoll", places, home / "log", env, dtype=dtype_of(places), rate=1e-3, seconds=SECONDS)
    try:
        job.ask({"do": "make", "way": "ddp", "shape": asdict(SHAPE), "steps": steps, "bucket": 4})
        found = job.ask({"do": "turn", "first": 0, "steps": steps})[0]
        counters = job.ask({"do": "counters"})[0]
    finally:
        job.close()
    rate = SHAPE.batch * SHAPE.length / found["seconds"]
    return {"losses": found["losses"], "tokens_per_second": rate, "counters": counters}


def told(name: str, found: dict[str, Any], exact: dict[str, Any]) -> str:
    counters, losses = found["counters"], found["losses"]
    sent = counters.get("compressed_after", 0) / max(counters.get("compressed_before", 1), 1) or 1.0
    apart = max(abs(a - b) / b for a, b in zip(losses, exact["losses"], strict=True))
    return (
        f"{name:22} bytes {sent:.3f}, final loss {losses[-1]:.5f}, largest relative difference of a step's loss "
        f"{apart:.1e}, {found['tokens_per_second']:.0f} tokens/s, "
        f"{found['tokens_per_second'] / exact['tokens_per_second']:.2f} of uncompressed"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--formats", default="none,bf16,fp8,int8")
    parser.add_argument("--rate", help="of the link between two hosts that are made for it, such as 1gbit")
    parser.add_argument("--json", help="also write all results to this file")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as home, contextlib.ExitStack() as stack:
        hosts = stack.enter_context(shaped(2, args.rate, 256 << 10)).hosts if args.rate else ["", ""]
        places = [Place(host=host) for host in hosts]
        exact = train("none", True, places, args.steps, Path(home))
        for form in args.formats.split(","):
            for feedback in (True, False) if form != "none" else (True,):
                name = form if feedback else f"{form} without feedback"
                found = exact if form == "none" else train(form, feedback, places, args.steps, Path(home))
                results[name] = found
                print(told(name, found, exact), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
