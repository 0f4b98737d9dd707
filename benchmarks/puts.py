"""Measure pieces that are put into a window over RDMA, and got from one: processor time and copies for each byte.

    tests/verbs/guest.py .venv/bin/python benchmarks/puts.py     # in a virtual machine with Soft-RoCE devices

Two ranks at both ends of two cables. Rank 0 puts pieces out of its own part of the window, and out of other memory, and
gets them. The processor time is the whole machine's, which does the devices' work, too, and the ranks' own in user
mode, which looks for news, too. Copies are what links count, for each byte that moved: of who sends (`staged_bytes`),
and of who receives (`copied_bytes`). The processors are emulated, so times mean something beside others of the same
machine and minute alone.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

ENDS = ("=rxe0,rxe2", "=rxe1,rxe3")


def machine_seconds() -> float:
    """What all processors have worked since the start."""
    with open("/proc/stat") as file:
        user, nice, system, _idle, _wait, irq, softirq = map(int, file.readline().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def user_seconds() -> float:
    """What this process has worked itself, without what the kernel did for it: there that is the devices' work."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


def links(comm: Any) -> tuple[int, int]:
    """Bytes that this rank copied to send them, and when they had come. A library that does not count them: -1."""
    counters = comm.counters()
    return counters.get("staged_bytes", -1), counters.get("copied_bytes", -1)


def measured(comm: Any, act: Callable[[], Any], rounds: int) -> list[float]:
    """Of this rank: seconds, the machine's and its own of processors, bytes copied out and in."""
    act()
    comm.barrier()
    before, took, machine, own = links(comm), time.perf_counter(), machine_seconds(), user_seconds()
    for _ in range(rounds):
        act()
    comm.barrier()
    took, machine, own = time.perf_counter() - took, machine_seconds() - machine, user_seconds() - own
    return [took, machine, own, *(b - a for a, b in zip(before, links(comm), strict=True))]


def rank_main(rank: int, port: int, piece: int, count: int, rounds: int, pipe: int) -> None:
    """One rank; writes its measurements as JSON."""
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "HETCOLL_TRANSPORT": "verbs", "HETCOLL_IB_HCA": ENDS[rank], "HETCOLL_IB_BYTES": "512K",
    }  # fmt: skip
    import numpy as np

    import hetcoll

    with hetcoll.init() as comm:
        mine = np.full(piece * count, rank + 1, np.uint8)
        with comm.window(mine) as window:
            at = np.arange(count) * piece
            there = np.random.default_rng(0).permutation(at)
            other = np.full(piece * count, 7, np.uint8)
            put: dict[str, Any] = {"src_offset": at, "count": piece}
            get: dict[str, Any] = {"dst_offset": at, "count": piece}
            ways: dict[str, Callable[[], Any]] = {
                "put, own window": lambda: window.put(mine, 1, there, **put),
                "put, other memory": lambda: window.put(other, 1, there, **put),
                "get, own window": lambda: window.get(mine, 1, there, **get),
            }
            found = {name: measured(comm, act if rank == 0 else lambda: None, rounds) for name, act in ways.items()}
            os.write(pipe, (json.dumps({"rank": rank, **found}) + "\n").encode())
            comm.barrier()


def run(port: int, piece: int, count: int, rounds: int) -> list[dict[str, Any]]:
    """What both ranks measured."""
    context = multiprocessing.get_context("fork")
    out, into = os.pipe()
    ranks = [context.Process(target=rank_main, args=(r, port, piece, count, rounds, into)) for r in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(300)
        each.kill()
    os.close(into)
    with os.fdopen(out) as answer:
        told = sorted((json.loads(line) for line in answer), key=lambda each: each["rank"])
    if len(told) != 2:
        raise SystemExit("puts.py: a rank failed")
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--piece", type=int, default=64 << 10, help="bytes (default 65536)")
    parser.add_argument("--count", type=int, default=64, help="pieces of a call (default 64)")
    parser.add_argument("--rounds", type=int, default=10, help="calls (default 10)")
    parser.add_argument("--launches", type=int, default=3, help="medians of so many (default 3)")
    args = parser.parse_args()
    moved = args.piece * args.count * args.rounds
    told = [run(21000 + i, args.piece, args.count, args.rounds) for i in range(args.launches)]
    print("| | MB/s | machine, s/GB | rank 0 in user mode, s/GB | rank 1 | copies of who sends | of who receives |")
    print("| --- " * 7 + "|")
    for way in [name for name in told[0][0] if name != "rank"]:
        sends, takes = (0, 1) if way.startswith("put") else (1, 0)

        def middle(rank: int, column: int, way: str = way) -> float:
            found: float = statistics.median(each[rank][way][column] for each in told) / moved
            return found

        cells = [f"{1e-6 / middle(0, 0):.1f}", *(f"{middle(r, c) * 1e9:.1f}" for r, c in ((0, 1), (0, 2), (1, 2)))]
        cells += [f"{middle(sends, 3):.3f}", f"{middle(takes, 4):.3f}"]
        print(f"| {way} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
