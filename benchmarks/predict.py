"""What `hetcoll simulate` predicts over what the engine takes: in namespaces with shaped links, and in one host.

    python benchmarks/predict.py                          # 2, 4 and 8 hosts on 100 and 400 Mbit/s, and shared memory
    python benchmarks/predict.py --rates 200mbit --hosts 4 --sizes 8,64K,4M

Latency and the rate of shared memory are measured first, between two ranks: halves of a message's way and back.
Of all calls the fastest counts. Links have the rate that tc was told. All else is predicted, and each ratio is printed;
none is left out. Needs root, ip(8) and tc(8) for namespaces; a part that cannot run is named.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests"), str(Path(__file__).parents[1] / "tests/support")]

import netns  # noqa: E402
from ranks import Job, Ranks  # noqa: E402
from shaped import FRAMES, bits, shaped  # noqa: E402

import hetcoll  # noqa: E402
from hetcoll.cli.predict import spans  # noqa: E402
from hetcoll.plan.cluster import Cluster, read  # noqa: E402
from hetcoll.plan.forecast import forecast  # noqa: E402
from hetcoll.rendezvous.store import server as store  # noqa: E402
from hetcoll.types import Collective  # noqa: E402

CALLS = 9


def enter(job: Job, hosts: list[str]) -> Any:
    """Move a rank to its host; rank 0 has the job's store there, instead of the one that it has outside."""
    if not hosts:
        return job.unique_id
    netns.enter(hosts[job.rank % len(hosts)])
    if job.rank != 0:
        return None
    store._hosted[job.unique_id.job_id].close()
    return hetcoll.get_unique_id()


def join(job: Job, unique_id: Any) -> None:
    """Join the job whose store is in rank 0's host."""
    job.unique_id = unique_id
    job.join()


def seconds(job: Job, nbytes: int, calls: int = CALLS) -> float:
    """Of an all-reduce: the fastest of calls, each from a barrier on, since other work on the machine only delays."""
    comm, found = _comm(job), []
    x = np.ones(max(1, nbytes // 4), np.float32)
    for _ in range(calls):
        comm.barrier()
        start = time.perf_counter()
        comm.allreduce(x)
        found.append(time.perf_counter() - start)
        x.fill(1.0)
    return min(found)


def half_way(job: Job, nbytes: int, calls: int = 50) -> float:
    """Half the time of a message from rank 0 to rank 1 and back."""
    comm, found = _comm(job), []
    x = np.ones(max(1, nbytes), np.uint8)
    for _ in range(calls):
        start = time.perf_counter()
        if comm.rank == 0:
            comm.send(x, 1)
            comm.recv(x, 1)
        elif comm.rank == 1:
            comm.recv(x, 0)
            comm.send(x, 0)
        found.append((time.perf_counter() - start) / 2)
    comm.barrier()
    return min(found)


def leave(job: Job) -> None:
    """Close what was joined, and the store that moved."""
    _comm(job).close()


def close_store(job: Job) -> None:
    """Of rank 0."""
    store._hosted[job.unique_id.job_id].close()


def _comm(job: Job) -> hetcoll.Communicator:
    assert job.comm is not None
    return job.comm


def measured(size: int, hosts: list[str], sizes: list[int], algo: str) -> tuple[list[float], float, float]:
    """The slowest rank's seconds by size; and what a message of 8 B and one of 4 MiB takes."""
    env = {"HETCOLL_ALGO": f"allreduce:{algo}", "OMP_NUM_THREADS": "1"}
    with Ranks(size, env, join=False) as ranks:
        ranks.run(join, ranks.run(enter, hosts)[0])
        small = ranks.run(half_way, 8)[0]
        large = ranks.run(half_way, 4 << 20, 12)[0] if not hosts else math.nan
        times = [max(ranks.run(seconds, n, timeout=120)) for n in sizes]
        ranks.run(leave)
        if hosts:
            ranks.start(close_store, only=[0])
            ranks.finish(only=[0])
    return times, small, large


def described(hosts: int, ranks: int, nic: float, latency: float, memory: float) -> Cluster:
    """This machine as a cluster: of namespaces with a rank each, or of one host."""
    cores = max(1, len(os.sched_getaffinity(0)) // hosts)
    return read(
        f"""
        [[hosts]]
        name = "here"
        count = {hosts}
        ranks = {ranks}
        cores = {cores}
        nic = "{nic} B/s"
        memory = "{memory} B/s"
        reduce = "{memory} B/s"
        sockets = "2.5 GB/s"
        latency = "{latency} s"
        [network]
        latency = "{latency} s"
        overhead = "1 us"
        """,
        "measured",
    )


def compare(label: str, cluster: Cluster, algo: str, sizes: list[int], times: list[float]) -> Iterator[float]:
    """Print and give each ratio."""
    tasks = forecast(cluster, Collective.ALLREDUCE, algo).tasks
    for nbytes, took in zip(sizes, times, strict=True):
        said = tasks.run(nbytes).seconds
        print(
            f"{label:<28} {algo:<17} {nbytes:>10} {took * 1e6:>12.1f} {said * 1e6:>12.1f} {said / took:>7.2f}",
            flush=True,
        )
        yield said / took


def main(words: Any = None) -> int:
    """Measure, predict, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="*", default=[2, 4, 8], help="numbers of namespaces")
    parser.add_argument("--rates", nargs="*", default=["100mbit", "400mbit"], help="of each one's link, in tc's words")
    parser.add_argument("--local", type=int, nargs="*", default=[2, 4, 8], help="numbers of ranks in one host")
    parser.add_argument("--algos", nargs="*", default=["ring", "tree", "direct", "halving_doubling"])
    parser.add_argument("--sizes", default="8,64K,1M,16M")
    args = parser.parse_args(words)
    sizes, ratios = spans(args.sizes), dict[str, list[float]]()
    print(f"{'what':<28} {'algorithm':<17} {'bytes':>10} {'took, us':>12} {'said, us':>12} {'ratio':>7}")
    for rate in args.rates:
        for n in args.hosts:
            with shaped(n, rate, burst="32kb") as net:  # what passes at once is not predicted
                found = {algo: measured(n, net.hosts, sizes, algo) for algo in args.algos}
            latency = max(1e-9, min(small for _, small, _ in found.values()) - 2e-6)
            cluster = described(n, 1, bits(rate) * FRAMES, latency, 10e9)
            for algo, (times, _, _) in found.items():
                ratios.setdefault("namespaces", []).extend(
                    compare(f"{n} namespaces, {rate}", cluster, algo, sizes, times)
                )
    for n in args.local:
        found = {algo: measured(n, [], sizes, algo) for algo in args.algos}
        latency, large = min(one[1] for one in found.values()), min(one[2] for one in found.values())
        cluster = described(1, n, 1e9, latency, 2 * (4 << 20) / large)
        for algo, (times, _, _) in found.items():
            ratios.setdefault("shared memory", []).extend(compare(f"{n} ranks, one host", cluster, algo, sizes, times))
    for name, those in ratios.items():
        near = sum(abs(ratio - 1) <= 0.15 for ratio in those)
        mean = math.exp(statistics.fmean(math.log(ratio) for ratio in those))
        print(
            f"{name}: {near} of {len(those)} within 15 %, geometric mean {mean:.2f}, "
            f"from {min(those):.2f} to {max(those):.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
