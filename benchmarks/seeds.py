"""The experiments of published systems for jobs on GPUs of two vendors, each as one command with one table.

    python benchmarks/seeds.py --list
    python benchmarks/seeds.py collectives --device posing --plot FIGURE.svg
    python benchmarks/seeds.py halves --device posing --ranks 4 --models billion
    python benchmarks/seeds.py forwarding --rate 1gbit
    python benchmarks/seeds.py latency --rate 10gbit
    python benchmarks/seeds.py inference --ranks 2 --models small

`--device` says what the two halves of the ranks are, and with it what a table proves, which its heading says: see
places.py. The defaults are a small form on CPU ranks. Every result is verified: collectives element by element, losses
against one process's, tokens for being those of one process. What is wrong is told, and is the exit status.

halves: each half trains alone, then both together (DistributedDataParallel); "balanced" where the halves are unlike.
forwarding: two stages of a pipeline, one for each half, whose ranks share batches; hosts are network namespaces with
two cards each, so that root, ip(8) and tc(8) are needed. latency: an all-reduce of two such hosts. inference: greedy,
in float32. Sums have another order than one process's, so tokens are the same where the best logit and the second best
are further apart than rounding goes: the table has the least gap, and a token that differs fails the run. What trains
or decodes needs PyTorch.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import gpus
import hosts
import results
from places import DEVICES, islands_of
from seeds_models import SLEEP, Found, forwarding, halves, inference
from shaped import shaped
from shapes import SHAPES

from hetcoll.cli import plot
from hetcoll.cli.cases import bandwidths
from hetcoll.cli.report import Row
from hetcoll.links.tuned import processor

CALM = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
K, M = 1 << 10, 1 << 20
HETCCL = "[HetCCL](https://arxiv.org/abs/2601.22585)"
JOINT = "[Joint Training on AMD and NVIDIA GPUs](https://arxiv.org/abs/2602.18007)"
MIXED = "[HetCCL for mixed-vendor clusters](https://arxiv.org/abs/2605.31000)"
UCC = "an [article on UCC over UCX](https://home.mlops.community/public/blogs/distributed-training-in-mlops-break-gpu-\
vendor-lock-in-distributed-mlops-across-mixed-amd-and-nvidia-clusters)"


# Collectives.


def collectives(args: argparse.Namespace, home: Path) -> Found:
    """Libraries by turns; of each the median round, and of the ratios the median."""
    kinds, islands = DEVICES[args.device], islands_of(args.ranks)
    places = kinds.places(args.ranks, args.hip_python)
    plain = [replace(each, kind={"posing": "cuda"}.get(each.kind, each.kind.split()[0])) for each in places]
    plain = [replace(each, kind="cpu") if each.kind == "fake" else each for each in plain]
    asked = {"hetcoll": ("hetcoll", places, islands if kinds.islands else {})}
    if args.device == "posing":
        asked["as they are"] = ("hetcoll", plain, islands)
    if "Gloo" in args.peers and importlib.util.find_spec("torch"):
        asked["Gloo"] = ("gloo", plain, {})
    found = Found([["operation", "bytes", "hetcoll, µs", "GB/s", *(f"times {name}" for name in list(asked)[1:])]])
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        jobs = {}
        for name, (library, those, env) in asked.items():
            log = home / name.replace(" ", "-")
            jobs[name] = gpus.PerfRanks.at(name, library, those, CALM | env, log)
            stack.callback(jobs[name].close)
        for op in args.ops:
            for nbytes in args.sizes:
                place = "in" if op == "allreduce" and "Gloo" in jobs else "out"  # Gloo has no other
                times = by_turns(jobs, op, nbytes, place, args.rounds, found.wrong)
                ours = statistics.median(times["hetcoll"])
                peers = {name: middle_ratio(times[name], times["hetcoll"]) for name in jobs if name != "hetcoll"}
                rate, bus = bandwidths(op, args.ranks, nbytes, ours)
                cells = [f"{ours:.1f}", f"{rate:.3f}", *(f"{ratio:.2f}" for ratio in peers.values())]
                found.add([op, results.human(nbytes), *cells], {"op": op, "nbytes": nbytes, "us": times})
                told = (op, args.device, "auto", "", args.ranks, nbytes, nbytes // 4, "float32", "sum", -1, place)
                rows.append(Row(*told, ours, ours, ours, rate, bus, 0))
    if args.plot:
        plot.draw(args.plot, {"ranks": args.ranks, "device": args.device, "transport": "auto"}, rows)
    return found


def by_turns(
    jobs: dict[str, gpus.PerfRanks], op: str, nbytes: int, place: str, rounds: int, wrong: list[str]
) -> dict[str, list[float]]:
    """Microseconds of each round; only the first one is verified, which is not one of them."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(rounds + 1):
        for name in reversed(jobs) if turn % 2 else jobs:
            seen = jobs[name].perf(op, nbytes, place, "-w", "1", *(() if turn == 0 else ("-c", "0")))
            if turn:
                times[name].append(seen.time_us)
            elif seen.wrong:
                wrong.append(f"{name}, {op} of {nbytes} B: {seen.wrong} elements")
    return times


def middle_ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


# A slow network.


def latency(args: argparse.Namespace, home: Path) -> Found:
    """Launches in turn; of each library the median launch, of a launch the slowest rank's median."""
    peers = [each for each in hosts.libraries([""], 1) if each.worker == "hetcoll" or each.name in args.peers]
    if args.device != "cpu":
        peers = peers[:1]  # the others are given memory of the host
    told = {8: 175.0, M: 3370.0}
    times: dict[tuple[str, int], list[float]] = {}
    found = Found([["bytes", *(f"{each.name}, µs" for each in peers), "published, µs"]])
    found.notes.append(f"An all-reduce of two hosts over links of {args.rate}, medians of {args.rounds} launches each.")
    with shaped(2, args.rate, 256 << 10) as net:
        for turn in range(args.rounds):
            for each in peers:
                try:
                    measured = launched(each, net.hosts, args, home / str(turn))
                except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                    if each.worker == "hetcoll":
                        raise
                    found.notes.append(f"A launch of {each.name} failed ({type(error).__name__}).")
                    continue
                for nbytes, (us, bad) in measured.items():
                    times.setdefault((each.name, nbytes), []).append(us)
                    if bad:
                        found.wrong.append(f"{each.name}, {nbytes} B: {bad} elements")
    for nbytes in args.sizes:
        each_of = {peer.name: times.get((peer.name, nbytes), []) for peer in peers}
        cells = [f"{statistics.median(those):.0f}" if those else "-" for those in each_of.values()]
        known = f"{told[nbytes]:.0f}" if nbytes in told else ""
        found.add([results.human(nbytes), *cells, known], {"nbytes": nbytes, "us": each_of})
    return found


def launched(
    peer: hosts.Library, names: Sequence[str], args: argparse.Namespace, log: Path
) -> dict[int, tuple[float, int]]:
    """(microseconds, wrong elements) by size, of one launch with a rank on each host."""
    if args.device == "cpu":
        asked = argparse.Namespace(ops=["allreduce"], sizes=args.sizes, budget_ms=args.budget_ms, timeout=args.seconds)
        slept = replace(peer, variables={**SLEEP, **peer.variables})
        return {nbytes: each for (_, nbytes), each in hosts.measured(slept, names, 1, asked).items()}
    log.mkdir()
    places = [
        replace(each, host=name)
        for each, name in zip(DEVICES[args.device].places(2, args.hip_python), names, strict=True)
    ]
    ranks = gpus.PerfRanks.at(peer.name, peer.worker, places, CALM | SLEEP, log / "errors")
    try:
        seen = {nbytes: ranks.perf("allreduce", nbytes, "out") for nbytes in args.sizes}
        return {nbytes: (each.time_us, each.wrong or 0) for nbytes, each in seen.items()}
    finally:
        ranks.close()


@dataclass(frozen=True)
class Experiment:
    """What is asked, who published what, and what its small form has."""

    title: str
    published: str
    run: Callable[[argparse.Namespace, Path], Found]
    ranks: int
    models: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()


EXPERIMENTS = {
    "collectives": Experiment(
        "all-reduce, all-gather and reduce-scatter across the halves", f"17 to 19 times Gloo's bandwidth ({MIXED})",
        collectives, 2, sizes=(8, 64 * K, M, 16 * M)),
    "halves": Experiment(
        "each half alone, both, and their sum", "both are 1.48 times NVIDIA's half and 2.97 times AMD's, up to 97 % "
        f"and on average 90 % of the sum ({HETCCL})", halves, 2, ("small",)),
    "forwarding": Experiment(
        "what it costs that data go through the CPU and its network cards", "TFLOPS a GPU as in the table, on LLaMA-8B "
        f"({JOINT})", forwarding, 4, ("small",)),
    "latency": Experiment(
        "8 B to 1 MiB over slow links", f"175 µs for 8 B and 3.37 ms for 1 MiB over 10 Gbit/s ({UCC})",
        latency, 2, sizes=(8, K, 16 * K, 64 * K, 256 * K, M)),
    "inference": Experiment(
        "decoding by tensor and by pipeline parallel, with the tokens of one process", "no figures",
        inference, 2, ("small",)),
}  # fmt: skip


def about() -> str:
    load, cpus = os.getloadavg()[0], f"{processor()}, {len(os.sched_getaffinity(0))} CPUs"
    where = ", ".join(filter(None, (gpus.device(), cpus)))
    return f"{time.strftime('%Y-%m-%d')}, {where}, load {load:.0f}, Python {platform.python_version()}"


def text(name: str, args: argparse.Namespace, found: Found) -> str:
    """Markdown: a heading with the level of proof, the table, and what stands beside it."""
    experiment = EXPERIMENTS[name]
    head, *rows = found.table
    lines = [head, ["---:" if any(cell[:1].isdigit() for cell in each) else "---" for each in zip(*rows, strict=True)]]
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in (*lines, *rows))
    verdict = "; ".join(["WRONG: " + each for each in found.wrong]) or "Every result was verified."
    heading = f"### {experiment.title} ({args.ranks} ranks: {DEVICES[args.device].proof})"
    return "\n\n".join([heading, table, " ".join([*found.notes, f"Published: {experiment.published}.", verdict])])


def listing() -> str:
    lines = [["experiment", "question", "published"], ["---"] * 3]
    lines += [[name, each.title, each.published] for name, each in EXPERIMENTS.items()]
    proofs = [["device", "what it proves"], ["---"] * 2, *([name, each.proof] for name, each in DEVICES.items())]
    return "\n\n".join("\n".join("| " + " | ".join(row) + " |" for row in rows) for rows in (lines, proofs))


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", nargs="?", choices=EXPERIMENTS)
    parser.add_argument("--list", action="store_true", help="the experiments, and what was published")
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--hip-python", default=sys.executable, help="for AMD's half, whose PyTorch is another build")
    parser.add_argument("--ranks", type=int, help="an even number, on this host")
    parser.add_argument("--models", nargs="+", choices=SHAPES)
    parser.add_argument("--sizes", type=int, nargs="+", metavar="BYTES")
    parser.add_argument("--ops", nargs="+", default=["allreduce", "allgather", "reduce_scatter"])
    parser.add_argument("--rounds", type=int, default=5, help="of each library")
    parser.add_argument("--turns", type=int, default=3, help="of each job in training")
    parser.add_argument("--steps", type=int, default=4, help="of a turn; the first one is not timed")
    parser.add_argument("--batch", type=int, help="of halves: samples of a rank in a step (default: the model's)")
    parser.add_argument("--pieces", type=int, default=1, help="of halves: into how many a rank's samples are cut")
    parser.add_argument("--only", type=int, nargs="+", help="rows of forwarding, from 0")
    parser.add_argument("--way", help="of halves: ddp, fsdp2, balanced, pipeline, overlapped")
    parser.add_argument("--rate", default="10gbit", help="of each card, in tc's words (default 10gbit)")
    parser.add_argument(
        "--peers", nargs="*", default=["Gloo", "Open MPI", "Open MPI UCX"], help="of latency; Gloo of collectives"
    )
    parser.add_argument("--budget-ms", type=float, default=300.0, help="of latency: time for the samples of one size")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=32, help="bytes")
    parser.add_argument("--tokens", type=int, default=32, help="to decode")
    parser.add_argument("--graph", action="store_true", help="of inference: a rank's part of a step as a CUDA graph")
    parser.add_argument("--seconds", type=float, default=600.0, help="for one answer of a rank")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    parser.add_argument("--plot", help="of collectives: draw them, as .png or .svg")
    args = parser.parse_args(words)
    if args.list == bool(args.experiment):
        parser.error("wanted an experiment, or --list")
    if args.experiment:
        chosen = EXPERIMENTS[args.experiment]
        args.ranks, args.models = args.ranks or chosen.ranks, args.models or chosen.models
        args.sizes = args.sizes or chosen.sizes
        if args.ranks < 2 or args.ranks % 2:
            parser.error(f"--ranks: wanted an even number, got {args.ranks}")
        if args.plot:
            plot.check(args.plot)
        if args.tokens < 4:
            parser.error(f"--tokens: wanted 4 or more, so that some are timed, got {args.tokens}")
        if args.graph and args.device not in ("cuda", "hip", "posing", "vendors"):
            parser.error(f"--graph: wanted a --device whose ranks all have a GPU, got {args.device}")
    return args


def main(words: Sequence[str] | None = None) -> int:
    args = parse(words)
    if args.list:
        print(listing())
        return 0
    with tempfile.TemporaryDirectory() as home:
        found = EXPERIMENTS[args.experiment].run(args, Path(home))
    print(about(), text(args.experiment, args, found), sep="\n\n")
    if args.json:
        told = {"schema": 1, "about": about(), "experiment": args.experiment, "proof": DEVICES[args.device].proof}
        args.json.write_text(json.dumps(told | {"figures": found.figures, "wrong": found.wrong}, indent=1) + "\n")
    return int(bool(found.wrong))


if __name__ == "__main__":
    sys.exit(main())
