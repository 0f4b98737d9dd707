"""What `hetcoll simulate` predicts over what the engine takes: in namespaces with shaped links, and in one host.

    python benchmarks/predict.py                          # 2, 4 and 8 hosts on 100 and 400 Mbit/s, and shared memory
    python benchmarks/predict.py --rates 200mbit --hosts 4 --sizes 8,64K,4M

What the cluster file says is measured first, by programs that run no collective. Between hosts, while all pairs do the
same through sockets of their own: half of a message's way there and back is work of two cores, as the sender's carries
it into the receiver's socket; what an exchange takes longer is its latency. Inside a host, between two ranks: what an
exchange takes longer than half a way is a core's work for one more message. `pinned` is what all cores copy at once.
Links have the rate and the burst that tc was told, and rest before each call. Of all calls the fastest counts. All else
is predicted, and each ratio is printed; none is left out. Needs root, ip(8) and tc(8) for namespaces; a part that
cannot run is named.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
BURST, REST = 32 << 10, 0.02  # bytes, and seconds after which slow links have them
LONG = 4 << 20
SMALL = bytes(56)  # what the engine sends of a message of 8 B
Times = tuple[float, ...]


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


def seconds(job: Job, nbytes: int, rest: float, calls: int = CALLS) -> float:
    """Of an all-reduce: the fastest of calls, each from a barrier on, since other work on the machine only delays."""
    comm, found = _comm(job), []
    x = np.ones(max(1, nbytes // 4), np.float32)
    for _ in range(calls):
        time.sleep(rest)
        comm.barrier()
        start = time.perf_counter()
        comm.allreduce(x)
        found.append(time.perf_counter() - start)
        x.fill(1.0)
    return min(found)


def between(job: Job, calls: int = 30, each: int = 10) -> Times:
    """Half of a message's way there and back, and an exchange, through a socket to the other one of two hosts."""
    first = _comm(job).rank % 2 == 0
    with _wire(job) as wire:
        way = _least(job, lambda: _there_and_back(wire, first), calls, each)
        return way / 2, _least(job, lambda: _exchange(wire), calls, each)


@contextmanager
def _wire(job: Job) -> Iterator[socket.socket | None]:
    """To the neighbour; None where there is none."""
    comm = _comm(job)
    first, alone = comm.rank % 2 == 0, comm.rank ^ 1 >= comm.size
    where = (f"10.78.0.{comm.rank // 2 * 2 + 1}", 5000)  # of the first one of two hosts: see netns
    with ExitStack() as undo:
        listener = undo.enter_context(socket.create_server(where)) if first and not alone else None
        comm.barrier()
        if alone:
            yield None
            return
        wire = undo.enter_context(listener.accept()[0] if listener else socket.create_connection(where))
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire.setblocking(False)
        yield wire


def _there_and_back(wire: socket.socket | None, first: bool) -> None:
    if wire is not None and first:
        wire.send(SMALL)
        _get(wire)
    elif wire is not None:
        _get(wire)
        wire.send(SMALL)


def _exchange(wire: socket.socket | None) -> None:
    if wire is not None:
        wire.send(SMALL)
        _get(wire)


def _get(wire: socket.socket) -> None:
    got = 0
    while got < len(SMALL):
        try:
            came = wire.recv(len(SMALL) - got)
        except BlockingIOError:
            os.sched_yield()  # where others wait for this core
            continue
        if not came:
            raise ConnectionError("the other end of a measured connection is gone")
        got += len(came)


def _least(job: Job, call: Callable[[], object], calls: int, each: int = 1) -> float:
    """Of calls in a row, so many at a time from a barrier on: the fastest one's part."""
    found = []
    for _ in range(calls):
        _comm(job).barrier()
        start = time.perf_counter()
        for _ in range(each):
            call()
        found.append((time.perf_counter() - start) / each)
    return min(found)


def inside(job: Job) -> Times:
    """Of 8 B half of the way there and back between ranks 0 and 1, and an exchange; of `LONG` the first of these."""
    comm, found = _comm(job), []
    for nbytes, calls, exchanged in ((8, 50, False), (8, 50, True), (LONG, 12, False)):
        x, y = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)

        def call(x: Any = x, y: Any = y, exchanged: bool = exchanged) -> None:
            if exchanged:
                comm.sendrecv(x, comm.rank ^ 1, y, comm.rank ^ 1)
            elif comm.rank == 0:
                comm.send(x, 1)
                comm.recv(y, 1)
            else:
                comm.recv(y, 0)
                comm.send(x, 0)

        if comm.rank < 2:
            call()
            starts = []
            for _ in range(calls):
                start = time.perf_counter()
                call()
                starts.append(time.perf_counter() - start)
            found.append(min(starts) / (1 if exchanged else 2))
    comm.barrier()
    return tuple(found)


def copying(job: Job) -> float:
    """Seconds of a copy of `LONG` while all ranks copy."""
    a, b = np.ones(LONG, np.uint8), np.ones(LONG, np.uint8)
    return _least(job, lambda: np.copyto(b, a), 12)


def leave(job: Job) -> None:
    """Close what was joined, and the store that moved."""
    _comm(job).close()


def close_store(job: Job) -> None:
    """Of rank 0."""
    store._hosted[job.unique_id.job_id].close()


def _comm(job: Job) -> hetcoll.Communicator:
    assert job.comm is not None
    return job.comm


@contextmanager
def joined(size: int, hosts: list[str], algo: str = "") -> Iterator[Ranks]:
    """Ranks of a job, each on its host."""
    env = {"HETCOLL_ALGO": f"allreduce:{algo}" if algo else "", "OMP_NUM_THREADS": "1"}
    with Ranks(size, env, join=False) as ranks:
        ranks.run(join, ranks.run(enter, hosts)[0])
        yield ranks
        ranks.run(leave)
        if hosts:
            ranks.start(close_store, only=[0])
            ranks.finish(only=[0])


def measured(size: int, hosts: list[str], sizes: list[int], algo: str) -> list[float]:
    """The slowest rank's seconds by size."""
    with joined(size, hosts, algo) as ranks:
        return [max(ranks.run(seconds, n, REST if hosts else 0.0, timeout=120)) for n in sizes]


def of_hosts(hosts: list[str], rate: str) -> Cluster:
    """These namespaces with a rank each, as a cluster."""
    with joined(len(hosts), hosts) as ranks:
        half, exchange = map(max, zip(*ranks.run(between), strict=True))
    nic = bits(rate) * FRAMES
    host = {"nic": f"{nic} B/s", "burst": round(BURST * FRAMES), "sockets": "2.5 GB/s"}
    return described(len(hosts), 1, host, {"overhead": f"{half / 2} s", "latency": f"{max(0, exchange - half)} s"})


def of_ranks(size: int, pinned: float) -> Cluster:
    """This machine with so many ranks."""
    with joined(size, []) as ranks:
        half, exchange, long = ranks.run(inside)[0]
    work = max(0, exchange - half)
    host = {"nic": "1 GB/s", "pinned": f"{pinned} B/s", "overhead": f"{work} s"}
    host |= {"latency": f"{max(0, half - 2 * work)} s", "memory": f"{2 * LONG / long} B/s"}
    return described(1, size, host | {"reduce": host["memory"]}, {})


def all_copy(size: int) -> float:
    """Bytes that so many ranks of this machine copy in a second."""
    with joined(size, []) as ranks:
        return size * LONG / float(max(ranks.run(copying)))


def described(hosts: int, ranks: int, host: dict[str, Any], network: dict[str, Any]) -> Cluster:
    """A cluster file with these keys, read."""
    host |= {"name": "here", "count": hosts, "ranks": ranks, "cores": max(1, len(os.sched_getaffinity(0)) // hosts)}
    keys = [[f"{key} = {json.dumps(value)}" for key, value in table.items()] for table in (host, network)]
    return read("\n".join(["[[hosts]]", *keys[0], "[network]", *keys[1]]), "measured")


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
            with shaped(n, rate, burst=f"{BURST >> 10}kb") as net:
                cluster = of_hosts(net.hosts, rate)
                found = {algo: measured(n, net.hosts, sizes, algo) for algo in args.algos}
            for algo, times in found.items():
                label = f"{n} namespaces, {rate}"
                ratios.setdefault("namespaces", []).extend(compare(label, cluster, algo, sizes, times))
    pinned = all_copy(max(args.local)) if args.local else math.nan
    for n in args.local:
        cluster = of_ranks(n, pinned)
        found = {algo: measured(n, [], sizes, algo) for algo in args.algos}
        for algo, times in found.items():
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
