"""What it takes to make one rank's plan and to bind it, among 8 to 1,024 ranks: nobody runs it, nothing is connected.

    python benchmarks/bind.py                              # all-reduces, by each algorithm
    python benchmarks/bind.py --op allgather --ranks 64 1024 --stretches 64
    python benchmarks/bind.py --prove --algorithms ring tree --ranks 256 1024     # the plans of all ranks
    python benchmarks/bind.py --prove --islands 64 192
    python benchmarks/bind.py --order --islands 500 524 --algorithms islands ring

Of each plan: the time to draw it and to encode it (Python), the bytes that it is encoded in, its steps, and the time to
decode and bind it (C++). Each is the best of a few turns, in CPU time: nothing here waits. With `--hosts` ranks are on
hosts of 8, among which algorithms run. An algorithm that cuts a buffer into stretches has as many as `--stretches`
says, or as it takes at most among so many ranks; `-` stands for what is refused, and the last column says why.

With `--order` it is the plan of a GPU's rank among islands, in pieces and in order, over a buffer of `--bytes`, once,
in a process of its own: its CPU time and peak memory.

With `--prove` the plans of all ranks are drawn and proved, once, in a process of its own: its CPU time and peak memory,
and how many ranks stand for all.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import accumulate, groupby
from typing import TypeVar

from hetcoll import _native
from hetcoll.plan.algorithms import ALGORITHMS, Algorithm, Hosts
from hetcoll.plan.algorithms.among import among
from hetcoll.plan.algorithms.atoms import AMONG
from hetcoll.plan.algorithms.hosts import among_hosts
from hetcoll.plan.algorithms.islands import ISLANDS
from hetcoll.plan.ir import Plan
from hetcoll.plan.order import Frame, ordered
from hetcoll.plan.pieces import cut, slot_bytes
from hetcoll.plan.simulator import prove
from hetcoll.plan.symmetry import symmetry_of
from hetcoll.types import WHOLE, Collective, DType

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
BYTES = 256 << 20  # of the larger buffer
HOST = 8
T = TypeVar("T")


def best(make: Callable[[], T], turns: int) -> tuple[T, float]:
    """What `make` gives, and its best CPU time in ms. A second is enough."""
    times: list[float] = []
    while True:
        start = time.process_time()
        made = make()
        times.append(time.process_time() - start)
        if len(times) >= turns or sum(times) > 1:
            return made, 1e3 * min(times)


def row(entry: Algorithm, size: int, stretches: int, turns: int, among: bool) -> str:
    """A row of the table: the plan of the rank in the middle."""
    name, rank = entry.name, size // 2
    hosts: Hosts | None = None
    if among and entry.stretches is None and entry.collective in AMONG:
        entry = among_hosts(entry, led=False)
        hosts = tuple(tuple(range(first, first + HOST)) for first in range(0, size, HOST))
    pieces = min(stretches, entry.cut(1 << 62, 2, size))  # no more than are taken for the longest buffer
    if pieces > 1:
        name += f", {pieces} stretches"
    try:
        plan, drawn = best(lambda: entry.build(size, rank, hosts=hosts, stretches=pieces), turns)
        encoded, packed = best(plan.encode, turns)
        units = max(plan.send_units, plan.recv_units, 1)
        counts = [BYTES // 4 // units * n for n in (plan.send_units, plan.recv_units)]
        (steps, _), bound = best(lambda: _native.bind_plan(encoded, size, DType.FLOAT32, *counts), turns)
    except ValueError as refused:
        return f"| {name} | {size} | - | - | - | - | - | {refused} |"
    return f"| {name} | {size} | {steps} | {len(encoded)} | {drawn:.2f} | {packed:.2f} | {bound:.3f} |  |"


class Drawn(Sequence[Plan]):
    """The plans of all ranks, each drawn when it is asked for, and not kept."""

    def __init__(self, entry: Algorithm, size: int, hosts: Hosts | None) -> None:
        self._entry, self._size, self._hosts = entry, size, hosts

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, rank: int) -> Plan:  # type: ignore[override]
        return self._entry.build(self._size, rank, hosts=self._hosts)


def among_islands(collective: Collective, name: str, islands: Sequence[int]) -> tuple[Algorithm, Hosts]:
    """An algorithm, and the ranks of the islands of these sizes."""
    ends = list(accumulate(islands))
    hosts = tuple(tuple(range(end - k, end)) for end, k in zip(ends, islands, strict=True))
    return ISLANDS[collective] if name == "islands" else among(ALGORITHMS[collective][name]), hosts


def peak_mb() -> float:
    """Of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def order(collective: Collective, name: str, islands: Sequence[int], nbytes: int) -> str:
    """A row of the table of orders: what `GpuPlans` does in the rank in the middle."""
    entry, hosts = among_islands(collective, name, islands)
    size = sum(islands)
    start = time.process_time()
    frame = Frame(entry.build(size, size // 2, hosts=hosts), entry, hosts)
    share = nbytes if collective in WHOLE else -(-nbytes // size)
    made = cut(nbytes, share, slot_bytes(size, max(islands), far=True), frame.lengths)
    steps = len(ordered(frame, made).order)
    seconds = time.process_time() - start
    sizes = "+".join(f"{n}x{k}" if n > 1 else f"{k}" for k, n in ((k, len([*same])) for k, same in groupby(islands)))
    return f"| {name} | {sizes} | {nbytes} | {steps} | {1e3 * seconds:.1f} | {peak_mb():.0f} |"


def proof(collective: Collective, name: str, size: int, islands: Sequence[int]) -> str:
    """A row of the table of proofs."""
    hosts, label = None, f"{size}"
    if islands:
        size, label = sum(islands), "+".join(map(str, islands))
        entry, hosts = among_islands(collective, name, islands)
    else:
        entry = ALGORITHMS[collective][name]
    plans = Drawn(entry, size, hosts)
    start = time.process_time()
    for rank in range(size):
        plans[rank]
    drawing = time.process_time()
    symmetry = symmetry_of(plans)
    report = prove(plans, symmetry)
    end = time.process_time()
    times = f"{drawing - start:.2f} | {end - drawing:.2f}"
    return f"| {name} | {label} | {report.steps} | {len(symmetry.standing)} | {times} | {peak_mb():.0f} |"


def proofs(collective: Collective, names: Sequence[str], sizes: Sequence[int], islands: Sequence[int]) -> None:
    print("| algorithm | ranks | steps of all | stand for all | draw s | draw and prove s | peak MB |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name in names:
        for size in sizes[: 1 if islands else None]:
            if islands or ALGORITHMS[collective][name].supports(size):
                with ProcessPoolExecutor(1) as alone:
                    print(alone.submit(proof, collective, name, size, islands).result(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    labels = [c.label for c in ALGORITHMS]
    parser.add_argument("--op", choices=labels, default="allreduce", help="which collective (default: allreduce)")
    parser.add_argument("--algorithms", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS, help="how many (default: 8 to 1024)")
    parser.add_argument("--stretches", nargs="+", type=int, default=(1, 64), help="of those cut so (default: 1 64)")
    parser.add_argument("--hosts", action="store_true", help="ranks are on hosts of 8")
    parser.add_argument("--turns", type=int, default=3, help="how often each is done (default: 3)")
    parser.add_argument("--prove", action="store_true", help="prove the plans of all ranks instead")
    parser.add_argument("--islands", nargs="+", type=int, default=(), help="of so many ranks, for --prove and --order")
    parser.add_argument("--order", action="store_true", help="the plan of a GPU's rank among --islands, in order")
    parser.add_argument("--bytes", type=int, default=BYTES, help="of the larger buffer, for --order (default: 256 MiB)")
    args = parser.parse_args()
    if args.order:
        if not args.islands:
            parser.error("--order: wanted --islands, got none")
        print("| algorithm | islands | bytes | steps | ms | peak MB |")
        print("| --- | --- | ---: | ---: | ---: | ---: |")
        for name in args.algorithms or ["islands"]:
            with ProcessPoolExecutor(1) as alone:
                print(alone.submit(order, Collective[args.op.upper()], name, args.islands, args.bytes).result())
        return
    if args.prove:
        collective = Collective[args.op.upper()]
        names = args.algorithms or ([*ALGORITHMS[collective]] if not args.islands else ["islands"])
        proofs(collective, names, args.ranks, args.islands)
        return
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
