"""What `hetcoll simulate` predicts over what the engine takes: in namespaces with shaped links, and in one host.

    python benchmarks/predict.py --out found.json         # 2, 4 and 8 hosts on 100 and 400 Mbit/s, and shared memory
    python benchmarks/predict.py --rates 200mbit --hosts 4 --sizes 8,64K,4M --local
    python benchmarks/predict.py --again found.json --markdown    # today's model beside what was measured then

What the cluster file says is measured first, by programs that run no collective: between hosts as `hetcoll tune` does,
by all pairs of hosts at once. Inside a host, between two ranks: what an exchange takes longer than half a way is a
core's work for one more message. `pinned` is what all cores copy at once. Links have the rate and the burst that tc was
told, and rest before each call. A call is from when ranks begin it, on average, until the last one has it; of short
ones the mean of a row counts. Of a launch the fastest call counts, of several launches the middle one. All else is
predicted, and each ratio is printed beside the fastest and the slowest launch, and how many segments TCP sent again in
a call of the middle one ("!" where any): what differs among launches, or is lost, no model meets. None is left out.
Needs root, ip(8) and tc(8) for namespaces.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests"), str(Path(__file__).parents[1] / "tests/support")]

import netns  # noqa: E402
from ranks import Job, Ranks  # noqa: E402
from shaped import FRAMES, bits, shaped  # noqa: E402

import hetcoll  # noqa: E402
from hetcoll.cli import tuning  # noqa: E402
from hetcoll.cli.predict import spans  # noqa: E402
from hetcoll.cli.report import human_size  # noqa: E402
from hetcoll.cli.sweeps import parse_size  # noqa: E402
from hetcoll.plan.cluster import read  # noqa: E402
from hetcoll.plan.forecast import forecast  # noqa: E402
from hetcoll.rendezvous.store import server as store  # noqa: E402
from hetcoll.types import Collective  # noqa: E402

CALLS, SECONDS = 9, 2.0  # of one size in a launch: so many, or for so long, but three
SHORT, SHORT_INSIDE, ROW = 256, 64 << 10, 20  # bytes up to which so many calls in a row are timed: bursts carry them
WAKE = 5  # barriers after a rest
REST = 0.02  # seconds at least
PIECE, LONG = 16 << 10, 4 << 20
NEAR = 0.15
_TCP = "/proc/thread-self/net/snmp"


class Cell(NamedTuple):
    """Of one algorithm and size: seconds of each launch, and segments that TCP sent again in a call of it."""

    algorithm: str
    nbytes: int
    seconds: list[float]
    again: list[float]

    @property
    def took(self) -> float:
        return statistics.median_low(self.seconds)

    @property
    def resent(self) -> float:
        return self.again[self.seconds.index(self.took)]

    @property
    def lost(self) -> bool:
        """Whether TCP sent again a segment or more in a call."""
        return self.resent >= 1

    @property
    def alike(self) -> bool:
        """Whether all launches are as near to the middle one as predictions are to be."""
        return all(abs(each / self.took - 1) <= NEAR for each in self.seconds)


class Place(NamedTuple):
    """Where it was measured, as people read it and as a cluster file, and what was."""

    name: str
    cluster: str
    cells: list[Cell]


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


def called(job: Job, nbytes: int, rest: float, row: int) -> tuple[list[tuple[float, float]], float]:
    """When all-reduces, or rows of them, began, each after a barrier, and ended, by the machine's clock, which is that
    of all hosts here; and how many segments this one sent again in one, on average."""
    comm, found = _comm(job), []
    x, again = np.ones(max(1, nbytes // 4), np.float32), _sent_again()
    begun, enough = time.perf_counter(), np.zeros(1, np.int32)
    while not enough[0]:
        time.sleep(rest)
        for _ in range(WAKE):
            comm.barrier()
        start = time.perf_counter()
        for _ in range(row):
            comm.allreduce(x)
        found.append((start, time.perf_counter()))
        x.fill(1.0)
        enough[0] = len(found) >= CALLS or (len(found) >= 3 and time.perf_counter() - begun > SECONDS)
        comm.allreduce(enough, op="max")
    return found, (_sent_again() - again) / len(found) / row


def _sent_again() -> int:
    names, values = (line.split() for line in Path(_TCP).read_text().splitlines() if line.startswith("Tcp:"))
    return int(values[names.index("RetransSegs")])


def between(job: Job, rest: float) -> tuple[float, float, float] | None:
    """Of this rank and its neighbour, on two hosts: `hetcoll tune`'s latency and overhead, and a core's seconds for a
    byte; nothing of a last one without a neighbour."""
    comm = _comm(job)
    peer = comm.rank ^ 1
    comm.barrier()
    if peer >= comm.size:
        return None
    latency, overhead = tuning.message_to(comm, peer)
    short, piece = (tuning.half_way(comm, peer, nbytes, rest) for nbytes in (8, PIECE))
    return latency, overhead, (piece - short) / (2 * PIECE)


def inside(job: Job) -> tuple[float, ...]:
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
    least = math.inf
    for _ in range(12):
        _comm(job).barrier()
        start = time.perf_counter()
        np.copyto(b, a)
        least = min(least, time.perf_counter() - start)
    return least


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
def joined(size: int, hosts: Sequence[str], algo: str = "") -> Iterator[Ranks]:
    """Ranks of a job, each on its host."""
    env = {"HETCOLL_ALGO": f"allreduce:{algo}" if algo else "", "OMP_NUM_THREADS": "1"}
    with Ranks(size, env, join=False) as ranks:
        ranks.run(join, ranks.run(enter, list(hosts))[0])
        yield ranks
        ranks.run(leave)
        if hosts:
            ranks.start(close_store, only=[0])
            ranks.finish(only=[0])


def measured(size: int, hosts: Sequence[str], args: argparse.Namespace, rest: float = 0.0) -> list[Cell]:
    """All cells of a place, launch after launch of each algorithm in turn."""
    cells = [Cell(algo, nbytes, [], []) for algo in args.algos for nbytes in args.sizes]
    for _ in range(args.launches):
        for algo in args.algos:
            with joined(size, hosts, algo) as ranks:
                for cell in (cell for cell in cells if cell.algorithm == algo):
                    row = ROW if cell.nbytes <= (SHORT if hosts else SHORT_INSIDE) else 1
                    found = ranks.run(called, cell.nbytes, rest, row, timeout=120)
                    cell.seconds.append(min(map(_took, zip(*(times for times, _ in found), strict=True))) / row)
                    cell.again.append(sum(again for _, again in found) if hosts else 0.0)
    return cells


def _took(call: Iterable[tuple[float, float]]) -> float:
    """Seconds of a call of all ranks, which begin it one by one."""
    begun, ended = zip(*call, strict=True)
    return float(max(ended) - statistics.fmean(begun))


def of_hosts(hosts: Sequence[str], rate: str, burst: int, rest: float) -> str:
    """These namespaces with a rank each, as a cluster file: of all pairs the middle one."""
    with joined(len(hosts), hosts) as ranks:
        pairs = [pair for pair in ranks.run(between, rest)[::2] if pair]
    latency, overhead, each = map(statistics.median, zip(*pairs, strict=True))
    host = {"nic": _rate(bits(rate) * FRAMES), "burst": round(burst * FRAMES)}
    host |= {"sockets": _rate(1 / each)} if each > 0 else {}  # else it is lost in what other work does
    return described(len(hosts), 1, host, {"overhead": _time(overhead), "latency": _time(latency)})


def of_ranks(size: int, pinned: float) -> str:
    """This machine with so many ranks."""
    with joined(size, []) as ranks:
        half, exchange, long = ranks.run(inside)[0]
    work = max(0, exchange - half)
    host = {"nic": "1 GB/s", "pinned": _rate(pinned), "overhead": _time(work)}
    host |= {"latency": _time(max(0, half - 2 * work)), "memory": _rate(2 * LONG / long)}
    return described(1, size, host | {"reduce": host["memory"]}, {})


def _rate(value: float) -> str:
    return f"{value / 1e9:.6f} GB/s"


def _time(value: float) -> str:
    return f"{value * 1e6:.3f} us"


def all_copy(size: int) -> float:
    """Bytes that so many ranks of this machine copy in a second."""
    with joined(size, []) as ranks:
        return size * LONG / float(max(ranks.run(copying)))


def described(hosts: int, ranks: int, host: dict[str, Any], network: dict[str, Any]) -> str:
    """A cluster file with these keys."""
    host |= {"name": "here", "count": hosts, "ranks": ranks, "cores": max(1, len(os.sched_getaffinity(0)) // hosts)}
    keys = [[f"{key} = {json.dumps(value)}" for key, value in table.items()] for table in (host, network)]
    return "\n".join(["[[hosts]]", *keys[0], "[network]", *keys[1]])


def places(args: argparse.Namespace) -> Iterator[Place]:
    """Measure one after another."""
    for rate in args.rates:
        for n in args.hosts:
            rest = max(REST, 1.5 * args.burst / bits(rate))
            with shaped(n, rate, burst=args.burst) as net:
                cluster = of_hosts(net.hosts, rate, args.burst, rest)
                yield Place(f"{n} namespaces, {rate}", cluster, measured(n, net.hosts, args, rest))
    pinned = all_copy(max(args.local)) if args.local else math.nan
    for n in args.local:
        yield Place(f"{n} ranks, one host", of_ranks(n, pinned), measured(n, [], args))


def machine() -> dict[str, Any]:
    """What is measured on."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cores, model = len(os.sched_getaffinity(0)), models[0].partition(": ")[2] if models else platform.machine()
    return {"model": model, "cores": cores, "kernel": platform.release()}


def ratios(place: Place) -> list[float]:
    """Prediction over measurement, of each cell."""
    cluster = read(place.cluster, place.name)
    tasks = {
        algo: forecast(cluster, Collective.ALLREDUCE, algo).tasks
        for algo in dict.fromkeys(cell.algorithm for cell in place.cells)
    }
    return [tasks[cell.algorithm].run(cell.nbytes).seconds / cell.took for cell in place.cells]


def told(place: Place) -> Iterator[str]:
    """Rows of a place."""
    for cell, ratio in zip(place.cells, ratios(place), strict=True):
        low, took, high = (f"{1e6 * value:>11.1f}" for value in (min(cell.seconds), cell.took, max(cell.seconds)))
        said, near = f"{1e6 * ratio * cell.took:>11.1f}", " " if abs(ratio - 1) <= NEAR else "*"
        yield (
            f"{place.name:<22} {cell.algorithm:<17} {cell.nbytes:>9} {low} {took} {high} {said} {ratio:>6.2f}{near}"
            f"{cell.resent:>9.1f}{'!' if cell.lost else ''}"
        )


def summary(those: Iterable[Place]) -> Iterator[str]:
    """How many are near, of namespaces and of one host: of all, by size, of cells whose launches are alike, and of
    those in which TCP sent nothing again."""
    rows = [(place.name.split(",")[0].split()[-1], *pair) for place in those
            for pair in zip(place.cells, ratios(place), strict=True)]  # fmt: skip
    for kind in dict.fromkeys(kind for kind, _, _ in rows):
        cells = [(cell, ratio) for each, cell, ratio in rows if each == kind]
        sizes = dict.fromkeys(cell.nbytes for cell, _ in cells)
        yield f"{kind}: {_near(ratio for _, ratio in cells)}"
        yield f"  launches within 15 % of one another: {_near(ratio for cell, ratio in cells if cell.alike)}"
        yield f"  nothing sent again: {_near(ratio for cell, ratio in cells if not cell.lost)}"
        for size in sizes:
            yield f"  {human_size(size)}: {_near(ratio for cell, ratio in cells if cell.nbytes == size)}"


def _near(ratios: Iterable[float]) -> str:
    those = list(ratios)
    if not those:
        return "none"
    near, mean = sum(abs(ratio - 1) <= NEAR for ratio in those), math.exp(statistics.fmean(map(math.log, those)))
    return f"{near} of {len(those)} within 15 %, geometric mean {mean:.2f}, from {min(those):.2f} to {max(those):.2f}"


def markdown(those: Sequence[Place]) -> Iterator[str]:
    """A table of ratios; launches that differ have the range of their times over the middle one's behind it, and
    losses the segments that were sent again in a call."""
    sizes = list(dict.fromkeys(cell.nbytes for place in those for cell in place.cells))
    yield f"| Where | Algorithm | {' | '.join(map(human_size, sizes))} |"
    yield f"| --- | --- |{' ---: |' * len(sizes)}"
    for place in those:
        pairs = zip(place.cells, ratios(place), strict=True)
        by = {(cell.algorithm, cell.nbytes): (cell, ratio) for cell, ratio in pairs}
        for algo in dict.fromkeys(algo for algo, _ in by):
            row = [_spell(*by[algo, size]) if (algo, size) in by else "" for size in sizes]
            yield f"| {place.name} | {algo} | {' | '.join(row)} |"


def _spell(cell: Cell, ratio: float) -> str:
    spread = "" if cell.alike else f" ({min(cell.seconds) / cell.took:.2f} to {max(cell.seconds) / cell.took:.2f})"
    lost = f" ({cell.resent:.0f} sent again)" if cell.lost else ""
    return f"{ratio:.2f}{spread}{lost}"


def main(words: Any = None) -> int:
    """Measure, predict, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="*", default=[2, 4, 8], help="numbers of namespaces")
    parser.add_argument("--rates", nargs="*", default=["100mbit", "400mbit"], help="of each one's link, in tc's words")
    parser.add_argument("--burst", type=parse_size, default=32 << 10, help="of each link, in bytes (default 32K)")
    parser.add_argument("--local", type=int, nargs="*", default=[2, 4, 8], help="numbers of ranks in one host")
    parser.add_argument("--algos", nargs="*", default=["ring", "tree", "direct", "halving_doubling"])
    parser.add_argument("--sizes", type=spans, default="8,64K,1M,16M")
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write what was measured, as JSON, after each place")
    parser.add_argument("--again", type=Path, nargs="+", metavar="FILE", help="predict what was measured there")
    parser.add_argument("--markdown", action="store_true", help="tables of ratios besides")
    args = parser.parse_args(words)
    on, found = machine(), list[Place]()
    if args.again:
        on, found = {}, [_place(one) for file in args.again for one in json.loads(file.read_text())["places"]]
    for key, value in on.items():
        print(f"{key}: {value}")
    heads = "".join(f"{head:>12}" for head in ("fastest, us", "middle, us", "slowest, us", "said, us"))
    print(f"{'what':<22} {'algorithm':<17} {'bytes':>9}{heads} {'ratio':>6} {'resent':>9}")
    for place in list(found) if args.again else places(args):
        if not args.again:
            found.append(place)
        if args.out:
            rows = [each._asdict() | {"cells": [cell._asdict() for cell in each.cells]} for each in found]
            args.out.write_text(json.dumps({"machine": on, "places": rows}))
        print(*told(place), sep="\n", flush=True)
    print(*summary(found), *(markdown(found) if args.markdown else ()), sep="\n")
    return 0


def _place(one: dict[str, Any]) -> Place:
    return Place(one["name"], one["cluster"], [Cell(**cell) for cell in one["cells"]])


if __name__ == "__main__":
    sys.exit(main())
