"""What reductions in the order of ranks cost: times beside the default's, by turns, on communicators of the same ranks.

    hetcoll run -n 8 benchmarks/rank_order.py --ops allreduce --sizes 8 16K --settings default ordered ordered:oneshot

A setting is `default` or `ordered`, for what is chosen there, or either with the name of an algorithm. Rank 0 prints
for each operation and size the median of all turns and the fastest turn, both of the slowest rank, in microseconds, and
how many times the first setting's they are. What a rank takes in a turn is the median of its calls; of a reduce, whose
other ranks run ahead of the root, the mean. HETCOLL_TRANSPORT says over what.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import numpy as np

import hetcoll
from hetcoll.cli.sweeps import parse_size
from hetcoll.cli.timing import timed
from hetcoll.cli.tuning import alike

TURN_US = 10_000.0


def variant(comm: hetcoll.Communicator, op: str, setting: str) -> AbstractContextManager[hetcoll.Communicator]:
    """A communicator of the same ranks of that setting. Collective."""
    order, _, name = setting.partition(":")
    algo = f"{op}:{name}" if name else None
    return alike(comm, f"{op} {setting}", algo=algo, reproducible=order == "ordered")


def call(comm: hetcoll.Communicator, op: str, nbytes: int) -> Callable[[], Any]:
    """A call whose larger buffer has about so many bytes, at least an element a rank; the root is rank 0."""
    part = -(-nbytes // (4 * comm.size)) if op == "reduce_scatter" else -(-nbytes // 4)
    whole = np.ones(part * comm.size if op == "reduce_scatter" else part, np.float32)
    result = np.ones(part, np.float32)
    return lambda: getattr(comm, op)(whole, result)


def turn(comm: hetcoll.Communicator, op: str, run: Callable[[], Any]) -> float:
    """What the slowest rank takes in microseconds. Collective."""
    found = timed(comm, run, TURN_US, 10, 1000)
    return found.mean_us if op == "reduce" else found.p50_us


def measure(comm: hetcoll.Communicator, op: str, sizes: Sequence[int], settings: Sequence[str], turns: int) -> None:
    """All sizes of an operation; rank 0 prints. Collective."""
    with ExitStack() as stack:
        children = {setting: stack.enter_context(variant(comm, op, setting)) for setting in settings}
        for nbytes in sizes:
            calls = {setting: call(child, op, nbytes) for setting, child in children.items()}
            times: dict[str, list[float]] = {setting: [] for setting in settings}
            for run in calls.values():
                run()
            for _ in range(turns):
                for setting, child in children.items():
                    times[setting].append(turn(child, op, calls[setting]))
            first = times[settings[0]]
            for setting, found in times.items() if comm.rank == 0 else ():
                chosen = children[setting].explain(op, nbytes).algorithm
                ratio, least = np.median(found) / np.median(first), min(found) / min(first)
                print(
                    f"{comm.size} ranks {op} {nbytes:>9} {setting + ' (' + chosen + ')':<40}"
                    f" {np.median(found):10.1f} us, fastest {min(found):10.1f},"
                    f" times {settings[0]} {ratio:.2f} ({least:.2f})",
                    flush=True,
                )
            comm.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", default=["allreduce"], choices=("allreduce", "reduce", "reduce_scatter"))
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=[8, 16 << 10, 1 << 20])
    parser.add_argument("--settings", nargs="+", default=["default", "ordered"])
    parser.add_argument("--turns", type=int, default=9)
    args = parser.parse_args()
    with hetcoll.init() as comm:
        for op in args.ops:
            measure(comm, op, args.sizes, args.settings, args.turns)


if __name__ == "__main__":
    main()
