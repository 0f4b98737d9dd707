"""What it takes to make one rank's plan and to bind it, among 8 to 1,024 ranks: nobody runs it, nothing is connected.

    python benchmarks/bind.py                              # all-reduces, by each algorithm
    python benchmarks/bind.py --op allgather --ranks 64 1024 --stretches 64

Of each plan: the time to draw it and to encode it (Python), the bytes that it is encoded in, its steps, and the time to
decode and bind it (C++). Each is the best of a few turns. With `--hosts` ranks are on hosts of 8, among which
algorithms run. An algorithm that cuts a buffer into stretches has as many as `--stretches` says; `-` stands for what is
refused, and the last column says why.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TypeVar

from hetcoll import _native
from hetcoll.plan.algorithms import ALGORITHMS, Algorithm, Hosts
from hetcoll.plan.algorithms.atoms import AMONG
from hetcoll.plan.algorithms.hosts import among_hosts
from hetcoll.types import Collective, DType

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
BYTES = 256 << 20  # of the larger buffer
HOST = 8
T = TypeVar("T")


def best(make: Callable[[], T], turns: int) -> tuple[T, float]:
    """What `make` gives, and its best time in ms. A second is enough."""
    times: list[float] = []
    while True:
        start = time.perf_counter()
        made = make()
        times.append(time.perf_counter() - start)
        if len(times) >= turns or sum(times) > 1:
            return made, 1e3 * min(times)


def row(entry: Algorithm, size: int, stretches: int, turns: int, among: bool) -> str:
    """A row of the table: the plan of the rank in the middle."""
    name, rank = entry.name, size // 2
    hosts: Hosts | None = None
    if among and entry.stretches is None and entry.collective in AMONG:
        entry = among_hosts(entry, led=False)
        hosts = tuple(tuple(range(first, first + HOST)) for first in range(0, size, HOST))
    cut = stretches if entry.stretches is not None else 1
    if cut > 1:
        name += f", {cut} stretches"
    try:
        plan, drawn = best(lambda: entry.build(size, rank, hosts=hosts, stretches=cut), turns)
        encoded, packed = best(plan.encode, turns)
        units = max(plan.send_units, plan.recv_units, 1)
        counts = [BYTES // 4 // units * n for n in (plan.send_units, plan.recv_units)]
        (steps, _), bound = best(lambda: _native.bind_plan(encoded, size, DType.FLOAT32, *counts), turns)
    except ValueError as refused:
        return f"| {name} | {size} | - | - | - | - | - | {refused} |"
    return f"| {name} | {size} | {steps} | {len(encoded)} | {drawn:.2f} | {packed:.2f} | {bound:.3f} |  |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    labels = [c.label for c in ALGORITHMS]
    parser.add_argument("--op", choices=labels, default="allreduce", help="which collective (default: allreduce)")
    parser.add_argument("--algorithms", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS, help="how many (default: 8 to 1024)")
    parser.add_argument("--stretches", nargs="+", type=int, default=(1, 64), help="of those cut so (default: 1 64)")
    parser.add_argument("--hosts", action="store_true", help="ranks are on hosts of 8")
    parser.add_argument("--turns", type=int, default=3, help="how often each is done (default: 3)")
    args = parser.parse_args()
    print("| algorithm | ranks | steps | bytes | draw ms | encode ms | bind ms | refused |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |")
    for entry in ALGORITHMS[Collective[args.op.upper()]].values():
        if args.algorithms and entry.name not in args.algorithms:
            continue
        for stretches in args.stretches if entry.stretches is not None else (1,):
            for size in args.ranks:
                print(row(entry, size, stretches, args.turns, args.hosts), flush=True)


if __name__ == "__main__":
    main()
