"""``python -m campaign 50000``: so many seeds, in lanes. ``--seed N`` plays one again, as often as ``--times`` says."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter

from .lanes import campaign
from .program import ATTACKS, WIDER, Program, draw


def main() -> int:
    parser = argparse.ArgumentParser(prog="campaign", description=__doc__)
    parser.add_argument("seeds", type=int, nargs="?", default=2000, help="how many (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first one (%(default)s)")
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--times", type=int, default=1, help="how often each is played (%(default)s)")
    parser.add_argument(
        "--only", default="", choices=["", *ATTACKS, "rdma"], help="with this attack in place of the drawn one"
    )
    parser.add_argument("--wider", action="store_true", help="those alone that have a step of `wider`")
    parser.add_argument("--gpus", action="store_true", help="those alone that have GPUs")
    parser.add_argument("--lanes", type=int, default=(os.cpu_count() or 1) + 1, help="at a time (%(default)s)")
    parser.add_argument("--most", type=int, default=10, help="end after so many failures (%(default)s)")
    asked = parser.parse_args()
    seeds = range(asked.first, asked.first + asked.seeds) if asked.seed is None else [asked.seed]
    if asked.seed is not None:
        print(draw(asked.seed, asked.only))
    if asked.wider or asked.gpus:
        seeds = [seed for seed in seeds if _fits(draw(seed, asked.only), asked.wider, asked.gpus)]
    work = [(seed, asked.only) for seed in seeds for _ in range(asked.times)]
    failed, absent = 0, Counter[str]()
    lanes = 1 if asked.only == "rdma" else asked.lanes  # there is one pair of cables
    for done, (seed, problems) in enumerate(campaign(work, lanes), 1):
        if isinstance(problems, str):
            absent[problems] += 1
        elif problems:
            failed += 1
            print(f"{draw(seed, asked.only)}\n" + "\n".join(problems) + "\n", flush=True)
            if failed == asked.most:
                break
        if done % 500 == 0:
            print(f"{done} of {len(work)} played, {failed} failed", flush=True)
    print(f"{failed} failed", *(f"{n} were skipped: {why}" for why, n in absent.items()), sep=", ")
    return failed > 0


def _fits(program: Program, wider: bool, gpus: bool) -> bool:
    steps = not wider or any(step.what in WIDER for step in program.steps)
    return steps and not (gpus and set(program.devices) == {"c"})


if __name__ == "__main__":
    sys.exit(main())
