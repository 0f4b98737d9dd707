"""hetcoll on the GPUs of one host beside NCCL and Gloo, by turns in one run; every result is verified.

    python benchmarks/gpus.py --gpus 2 [--write-docs] [--json FILE]
    python benchmarks/gpus.py --gpus 4
    python benchmarks/gpus.py --gpus 1          # beside a rank without a GPU, which --gpus 2 has as well
    python benchmarks/gpus.py --gpus 2 --only messages
    python benchmarks/gpus.py --gpus 2 --only "order and checks"
    python benchmarks/gpus.py --gpus 2 --figures FILE --write-docs      # the tables of a run with --json FILE
    python benchmarks/gpus.py --gpus 2 --only "copy engines"    # what collectives take from products of matrices;
                                  # "out of windows" is hetcoll whose ranks open what they give to the others before

Every measurement is one of `hetcoll perf`, which gpu_worker.py also makes of NCCL, by its C interface, and of
PyTorch. Each library has processes of its own, a rank a GPU, which wait while another one is measured. "Without P2P"
is NCCL_P2P_DISABLE=1, the way of GPUs that no NVLink joins; "sockets" has NCCL_SHM_DISABLE=1 as well. `us` is the
time of a call in a row of them on one stream, `sync` that of one with a wait of the host behind it (-z), `cost` the
host's part (-C): the best of all turns, of the slowest rank. GB/s are those of the larger buffer over `us` (nccl-
tests' algbw). A ratio above 1 means that hetcoll is faster. All-reduces are in place where a peer has no other. "only
the copies" is the limit: what crosses between islands, copied to slots and back without signals, sums or NCCL
(gpu_limits.py); there the ratio is the part of the limit that hetcoll reaches.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import gpu_tables
from gpu_tables import BESIDE, COPIES, Figures, K, M
from places import Place, commands
from ports import free_port
from staying import StayingRanks

from hetcoll.cli.report import Row

HERE = Path(__file__).resolve().parent
SMALL, LARGE = (8, 4 * K, 16 * K, 64 * K), (1 * M, 16 * M, 64 * M, 256 * M)
GPUS = (1, 2, 4)
TURNS, SMALL_TURNS = 3, 15  # a host's calls take two thirds as long in one second as in the next
ALONE, QUEUED = 20, 100  # calls with a wait each, and calls whose cost to the host is measured
SECONDS = 120.0  # for one answer
NO_P2P = {"NCCL_P2P_DISABLE": "1"}
SOCKETS = NO_P2P | {"NCCL_SHM_DISABLE": "1"}
# NVLink multicast cannot be had on every machine that has NVLink.
COMMON = {"NCCL_NVLS_ENABLE": "0", "HETCOLL_TIMEOUT": "60", "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True)
class Peer:
    """A library as the workers know it, and what its processes have in their environment."""

    name: str
    library: str
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """What hetcoll is asked to do, where, beside whom, on which operations and sizes."""

    title: str
    places: tuple[Place, ...]
    env: dict[str, str]
    peers: tuple[Peer, ...]
    points: tuple[tuple[str, int], ...]
    hosts: bool = False  # each rank of hetcoll takes itself for one

    @property
    def gpus(self) -> int:
        return len({place.index for place in self.places if place.kind != "cpu"})

    def place(self, op: str) -> str:
        """PyTorch has no all-reduce out of place."""
        return "in" if op == "allreduce" and {"gloo", "torch"} & {peer.library for peer in self.peers} else "out"


ALLREDUCE = tuple(("allreduce", nbytes) for nbytes in (*SMALL, *LARGE))
HALVES = (("allgather", 256 * M), ("reduce_scatter", 256 * M))
MESSAGES = tuple(("sendrecv", nbytes) for nbytes in (8, 64 * K, M, 8 * M, 64 * M, 256 * M))  # both ways in a ring
SMALL_MESSAGES = tuple(
    (op, nbytes)
    for op in ("sendrecv", "oneway", "pingpong")
    for nbytes in (8, K, 4 * K, 16 * K, 64 * K, 128 * K, 256 * K, 512 * K, M, 2 * M, 4 * M)
)
INSIDE = tuple((op, n) for op in ("sendrecv", "oneway", "pingpong") for n in (8, K, 4 * K, 16 * K, 64 * K, 256 * K, M))
BY_LIBRARY = Peer("hetcoll by the library", "by library")
BY_KERNELS = Peer("hetcoll by kernels", "by kernels")
BY_COPIES = Peer("hetcoll by copies", "by copies", {"HETCOLL_ISLANDS": "0|1"})
EACH = tuple(("alltoall", nbytes) for nbytes in (64 * K, M, 16 * M, 256 * M))
BIG = tuple(("allreduce", nbytes) for nbytes in LARGE)
AMONG = (*(("allreduce", n) for n in (M, 4 * M, 16 * M, 64 * M, 256 * M)),
         *((op, 64 * M) for op in ("allgather", "reduce_scatter", "reduce")))  # fmt: skip
ALGORITHMS = {
    "direct": "direct", "ring": "ring", "tree": "allreduce:tree,reduce:tree",
    "halving": "allreduce:halving_doubling,allgather:doubling,reduce_scatter:halving",
}  # fmt: skip
PRODUCT, NOTHING = ((f"{BESIDE}allreduce", 256 * M),), (("nothing", 0),)
IN_PLACE = " in place"  # behind one that is so, though it need not be
MOVING = tuple((BESIDE + op, 256 * M) for op in (f"allgather{IN_PLACE}", "alltoall", "allgather"))
PRODUCTS = (*MOVING, *((BESIDE + op, 256 * M) for op in ("reduce_scatter", "allreduce")))
BY_ENGINES = {"HETCOLL_ALGO": "direct,alltoall:pairwise"}
OUT_OF_WINDOWS = Peer("hetcoll out of windows", "windows", BY_ENGINES)
COSTS = (
    Peer("in the order of ranks", "hetcoll", {"HETCOLL_REPRODUCIBLE": "1"}),
    Peer("without checks", "hetcoll", {"HETCOLL_CHECK": "0"}),
)
CHECKED = tuple((op, n) for op in ("allreduce", "reduce_scatter", "reduce") for n in (64 * K, M, 16 * M, 256 * M))
NCCL_WINDOWS = Peer("NCCL's copy engines", "nccl windows", {"NCCL_CTA_POLICY": "2", "NCCL_CUMEM_ENABLE": "1"})


def on(gpus: int, ranks: int) -> tuple[Place, ...]:
    """Ranks, which share GPUs where there are fewer."""
    return tuple(Place("cuda", rank % gpus) for rank in range(ranks))


def settings(gpus: int) -> Iterator[Setting]:
    each = on(gpus, gpus)
    if gpus < 4:
        yield Setting("and a rank without one", (*each, Place()), {}, (Peer("Gloo", "gloo"),), ALLREDUCE)
    alone = (BY_COPIES,) if gpus == 1 else (BY_COPIES, Peer("NCCL without P2P", "nccl", NO_P2P))
    if gpus < 4:
        yield Setting("messages between islands 0|1", on(gpus, 2), {"HETCOLL_ISLANDS": "0|1"}, alone, SMALL_MESSAGES)
    if gpus == 1:
        return
    without = Peer("NCCL without P2P", "nccl", NO_P2P)
    for islands in {2: ("0|1",), 4: ("0,1|2,3", "0,1,2|3", "0|1|2,3")}[gpus]:
        points = (*ALLREDUCE, *HALVES, *MESSAGES, *PRODUCT, *NOTHING) if gpus == 2 else (*BIG, *HALVES)
        asked = {"HETCOLL_ISLANDS": islands}
        yield Setting(f"islands {islands}", each, asked, (without, Peer(COPIES, "copies", asked)), points)
    if gpus == 2:
        asked = {"HETCOLL_ISLANDS": "0|1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        yield Setting("islands 0|1, one hardware queue", each, asked, (), tuple(("allreduce", n) for n in (K, *LARGE)))
    for islands in ("0|1|2|3", "0|1|2,3", "0,1|2,3"):
        yield by_algorithm(gpus, islands, without)
    plain = (Peer("NCCL", "nccl"), Peer("PyTorch's NCCL", "torch"))
    yield Setting("messages inside one island", each, {}, (plain[0], BY_LIBRARY, BY_KERNELS), INSIDE)
    yield Setting("one island", each, {}, plain, (*ALLREDUCE, *HALVES, *MESSAGES, *EACH))
    yield Setting("one island, by copy engines", each, BY_ENGINES, (OUT_OF_WINDOWS, Peer("NCCL", "nccl")), PRODUCTS)
    yield Setting("one island, by copy engines beside NCCL's", each, BY_ENGINES, (NCCL_WINDOWS,), MOVING)
    for islands in ("0|1", "0,1") if gpus == 2 else ("0,1|2,3", "0,1,2,3"):
        asked = {"HETCOLL_ISLANDS": islands}
        costs = tuple(replace(peer, env=asked | peer.env) for peer in COSTS)
        yield Setting(f"what order and checks cost, islands {islands}", each, asked, costs, CHECKED)
    if gpus == 2:
        peers = (Peer("NCCL over sockets", "nccl", SOCKETS), Peer("Gloo", "gloo"))
        yield Setting("two hosts, by TCP on loopback", each, {"HETCOLL_ISLANDS": "0|1"}, peers, BIG, hosts=True)


def by_algorithm(gpus: int, islands: str, without: Peer) -> Setting:
    """Four ranks, on two GPUs two to each; what is chosen beside each algorithm. NCCL wants a GPU for each rank."""
    asked, m = {"HETCOLL_ISLANDS": islands}, islands.count("|") + 1
    able = [name for name in ALGORITHMS if name != "halving" or m & (m - 1) == 0]
    peers = [Peer(name, "hetcoll", asked | {"HETCOLL_ALGO": ALGORITHMS[name]}) for name in able]
    where = "" if gpus == 4 else "four ranks on two GPUs, "
    more = (without,) if gpus == 4 else ()
    return Setting(f"{where}islands {islands}, by algorithm", on(gpus, 4), asked, (*peers, *more), AMONG)


class PerfRanks(StayingRanks):
    """Of gpu_worker.py, which measure as `hetcoll perf` does."""

    @classmethod
    def at(cls, name: str, library: str, places: Sequence[Place], env: Mapping[str, str], log: Path) -> Self:
        """Of one library, a rank at each place."""
        words = [[each.python, str(HERE / "gpu_worker.py"), library] for each in places]
        return cls(name, commands(words, {**COMMON, "GPUS_PORT": str(free_port()), **env}, places), log, SECONDS)

    def most(self, **question: Any) -> dict[str, float]:
        """The most of each figure that a rank has."""
        answers = self.ask(question)
        return {name: max(answer[name] for answer in answers) for name in answers[0]}

    def perf(self, op: str, nbytes: int, place: str, *words: str) -> Row:
        """`hetcoll perf` of one size."""
        size = ["-b", str(nbytes), "-e", str(nbytes)]
        return Row(**self.ask({"do": "measure", "words": [op, *size, *words], "place": place})[0])


class Job(PerfRanks):
    """The ranks of one library."""

    @classmethod
    def of(cls, peer: Peer, setting: Setting, log: Path) -> Self:
        places = setting.places
        if setting.hosts and peer.library == "hetcoll":
            places = tuple(replace(place, host_id=f"host{rank}") for rank, place in enumerate(places))
        return cls.at(peer.name, peer.library, places, peer.env, log)

    def measure(self, op: str, nbytes: int, place: str, verified: bool) -> dict[str, float]:
        """One turn. Only a first one is `verified`."""
        if op == "nothing":
            return self.most(do="nothing") | {"wrong": 0.0}
        if op.startswith(BESIDE):
            return self.most(do="product", op=op.removeprefix(BESIDE), nbytes=nbytes)
        row = self.perf(op, nbytes, place, "-c", "1" if verified and self.name != COPIES else "0")
        calls = {"sync": ("-z", "--iters", str(ALONE)), "cost": ("-C", "--iters", str(QUEUED if nbytes < M else ALONE))}
        more = {name: self.perf(op, nbytes, place, "-c", "0", *words).time_us for name, words in calls.items()}
        return {"us": row.time_us, "wrong": row.wrong or 0, **more}


def run(setting: Setting, points: Sequence[tuple[str, int]], home: Path) -> list[tuple[str, int, Figures]]:
    """These points of a setting. Jobs are measured by turns; of each figure the least counts."""
    ours = Peer("hetcoll", "hetcoll", setting.env)
    found = []
    with contextlib.ExitStack() as stack:
        jobs = []
        for peer in (ours, *setting.peers):
            log = home / f"{setting.title} {peer.name}".replace("|", "-")
            jobs.append(Job.of(peer, setting, log))
            stack.callback(jobs[-1].close)
        for op, nbytes in points:
            row: Figures = {}
            for _ in range(TURNS if nbytes >= M else SMALL_TURNS):
                for job in (job for job in jobs if part_of(op, nbytes, job.name)):
                    old = row.get(job.name)
                    seen = job.measure(op, nbytes, setting.place(op), verified=old is None)
                    row[job.name] = seen if old is None else gpu_tables.best(seen, old)
            found.append((op, nbytes, row))
            print(gpu_tables.line(op, nbytes, row), flush=True)
    return found


def part_of(op: str, nbytes: int, name: str) -> bool:
    """Whether the library has to do with this point."""
    if op == "nothing":
        return name == "hetcoll"
    if name == OUT_OF_WINDOWS.name:
        return (op, nbytes) in MOVING
    return name != COPIES or (nbytes >= M and op != "sendrecv" and not op.startswith(BESIDE))


def device() -> str:
    """The first GPU and its driver, or nothing."""
    words = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return "".join(subprocess.run(words, capture_output=True, text=True, timeout=30).stdout.splitlines()[:1])
    except OSError:
        return ""


def about() -> str:
    """The machine and what runs on it."""
    return f"{time.strftime('%Y-%m-%d')}, {device() or 'GPU unknown'}, Python {platform.python_version()}"


def asked(gpus: int, only: str) -> list[Setting]:
    """The one with this title, or those whose titles contain it."""
    every = list(settings(gpus))
    return [each for each in every if each.title == only] or [each for each in every if only in each.title]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All figures, and how they came to be."""
    done = []
    with tempfile.TemporaryDirectory() as home:
        for setting in asked(args.gpus, args.only):
            points = [point for point in setting.points if point[1] <= args.largest]
            print(gpu_tables.heading(args.gpus, setting.title), flush=True)
            found = run(setting, points, Path(home))
            done.append({"setting": setting.title, "ranks": len(setting.places), "points": found})
    only = f' --only "{args.only}"' if args.only else ""
    turns = f"the best of {TURNS} turns, below 1 MiB of {SMALL_TURNS}"
    told = f"{about()}. `python benchmarks/gpus.py --gpus {args.gpus}{only}`, float32, {turns}."
    return {"schema": 1, "about": told, "settings": done}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, choices=GPUS, default=2)
    parser.add_argument("--only", default="", help="the setting with this title, or those that contain it")
    parser.add_argument("--largest", type=int, default=256 * M, help="leave out what is larger, in bytes")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--write-docs", action="store_true", help=f"write the tables into {gpu_tables.PAGE.name}")
    parser.add_argument("--figures", type=Path, metavar="FILE", help="measure nothing: they are in this file of --json")
    args = parser.parse_args(words)
    if args.figures and not args.write_docs:
        parser.error("--figures: wanted with --write-docs")
    document = json.loads(args.figures.read_text()) if args.figures else measure(args)
    if f"--gpus {args.gpus}" not in document["about"]:
        parser.error(f"--gpus {args.gpus}: {args.figures} has other figures: {document['about']}")
    text = json.dumps(document, indent=1) + "\n"
    if args.json:
        args.json.write_text(text)
    if args.write_docs:
        gpu_tables.write(document, args.gpus, [setting.title for setting in settings(args.gpus)])
    rows = (row for setting in document["settings"] for _, _, row in setting["points"])
    return int(any(x.get("wrong") for row in rows for x in row.values()))


if __name__ == "__main__":
    sys.exit(main())
