"""Measure hetcoll against Gloo, Open MPI, MPICH and Intel MPI on host buffers, in one interleaved run.

    python benchmarks/peers.py                       # 2 ranks, shared memory and TCP, 8 B to 64 MiB
    python benchmarks/peers.py --ranks 2 4 --rounds 5 --write-docs
    python benchmarks/peers.py --ops allgather --rounds 1 --join r.json --json r.json   # again and again: short parts

Every round launches every library once, in turn, with the same worker (worker.py), and measures the machine's limits
(limits.c). Of a library's launches the best counts, because some are bimodal from launch to launch; the median of the
launches is kept, too. Every result is verified; a wrong element or a launch that fails makes the exit status 1.
Peers are installed with pip into environments of their own at the first run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import results
from libraries import TRANSPORTS, VARIANTS, Variant, prepare, run_group, run_ranks
from results import Line, Point
from worker import OPS, PAGES

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"
SECTION = "sweep"  # of docs/benchmarks.md, and of what follows
LIMITS_PAGE = DOCS / "measurements/cpu-tables.md"
SIZES = [8, 64, 512, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    names = list(dict.fromkeys(variant.name for variant in VARIANTS))
    add("--ops", nargs="+", choices=OPS, default=list(OPS), metavar="OP", help=f"of {', '.join(OPS)}; default all")
    add("--sizes", nargs="+", type=int, default=SIZES, metavar="BYTES", help="default 8 B to 64 MiB")
    add("--ranks", nargs="+", type=int, default=[2], metavar="N", help="numbers of ranks (default 2)")
    add("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS), help="default both")
    add("--libraries", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {', '.join(names)}")
    add("--rounds", type=int, default=3, help="launches of each library (default 3)")
    add("--budget-ms", type=float, default=60.0, help="time for the samples of one size (default 60)")
    add("--inplace", action="store_true", help="all-reduces in one buffer, as training makes them")
    add("--written", action="store_true", help="write the input anew before each call, as programs do")
    add("--pages", choices=PAGES, default="numpy",
        help="of the buffers: huge from 4 MiB on, as NumPy asks (default), malloc's, small, huge")  # fmt: skip
    add("--launch-timeout", type=float, default=300.0, metavar="SECONDS", help="for one launch (default 300)")
    add("--cache", type=Path, default=Path.home() / ".cache/hetcoll-bench", help="where the peers are installed")
    add("--join", nargs="+", type=Path, default=[], metavar="FILE",
        help="results of earlier runs, by --json, that count as well; with --rounds 0 nothing else does")  # fmt: skip
    add("--json", type=Path, help="where to write the results (default: results.json in the cache)")
    add("--write-docs", action="store_true",
        help="write docs/benchmarks.md, docs/measurements and docs/figures/sweep.svg")  # fmt: skip
    add("--install", action="store_true", help="only install the peers")
    return parser.parse_args(words)


def build_limits(cache: Path) -> Path:
    """limits.c, compiled for this machine."""
    cache.mkdir(parents=True, exist_ok=True)
    binary = cache / "limits"
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("g++")
    if compiler is None:
        raise SystemExit("peers.py: a C compiler is needed to measure the machine's limits: apt install gcc")
    source = ["-x", "c", str(HERE / "limits.c")]
    subprocess.run([compiler, "-O3", "-march=native", "-Wall", "-Wextra", "-o", binary, *source], check=True)
    return binary


def chosen_variants(args: argparse.Namespace) -> list[tuple[Variant, str]]:
    """The (variant, transport) pairs of one round. What runs the same over both is launched once for each."""
    return [
        (variant, transport)
        for transport in args.transports
        for variant in VARIANTS
        if transport in variant.transports and variant.name in args.libraries
    ]


def launch(variant: Variant, transport: str, ranks: int, home: Path, args: argparse.Namespace) -> list[Point]:
    """One launch of one library over the whole sweep."""
    with tempfile.TemporaryDirectory(prefix="hetcoll-bench-") as folder:
        out = Path(folder) / "rank"
        words = [str(HERE / "worker.py"), "--library", variant.library, "--out", str(out)]
        words += ["--budget-ms", str(args.budget_ms), "--pages", args.pages]
        words += ["--written"] * args.written + ["--inplace"] * args.inplace
        words += ["--ops", *args.ops, "--sizes", *map(str, args.sizes)]
        run_ranks(variant, home, ranks, words, args.launch_timeout)
        return results.read_launch(out, variant.name, transport, ranks)


def reason(error: Exception) -> str:
    """Why a launch failed, with the end of what it printed."""
    if isinstance(error, subprocess.CalledProcessError):
        said = (error.stderr or error.stdout or "").strip().splitlines()[-3:]
        return f"exit status {error.returncode}: {' / '.join(said)}"
    return f"{type(error).__name__}: {error}"[:300]


def install(args: argparse.Namespace) -> dict[str, Path]:
    """The environments of the chosen libraries, installed where they are missing."""
    names = dict.fromkeys(variant.environment for variant, _ in chosen_variants(args) if variant.environment)
    return {name: prepare(name, args.cache) for name in names}


def measure(args: argparse.Namespace) -> tuple[list[Point], dict[str, Any], list[str]]:
    """All rounds: the points, the machine's limits, what failed."""
    if args.rounds == 0:
        return [], {}, []
    probe = build_limits(args.cache)
    variants = chosen_variants(args)
    homes = install(args)
    points: list[Point] = []
    failures: list[str] = []
    limits = []
    total = args.rounds * len(args.ranks) * len(variants)
    done = 0
    for _ in range(args.rounds):
        limits.append(json.loads(run_group([str(probe)], os.environ, 120)))
        for ranks in args.ranks:
            for variant, transport in variants:
                done += 1
                print(f"[{done}/{total}] {variant.name}, {transport}, {ranks} ranks", file=sys.stderr, flush=True)
                try:
                    points += launch(variant, transport, ranks, homes.get(variant.environment, Path()), args)
                except (subprocess.SubprocessError, ValueError) as error:
                    failures.append(f"{variant.name}, {transport}, {ranks} ranks: {reason(error)}")
    for point in points:
        if point.wrong:
            what = f"{point.op} of {results.human(point.nbytes)}"
            failures.append(f"{point.name}, {point.transport}, {point.ranks} ranks: {what}: {point.wrong} wrong")
    return points, results.best_limits(limits), failures


def describe(args: argparse.Namespace, points: Sequence[Point]) -> dict[str, Any]:
    """The machine, the versions and the command."""
    cpu = next(
        (x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), ""
    )
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"), "cpu": cpu,
        "cpus": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(), "rounds": results.most_launches(points),
        "versions": dict(sorted({point.name: point.version for point in points}.items())),
        "command": "python benchmarks/peers.py " + " ".join(sys.argv[1:]),
    }  # fmt: skip


def print_table(lines: Sequence[Line]) -> None:
    """The short table: ours, the best peer, the ratio, the fraction of the limit."""
    print(f"{'operation':>15} {'transport':>9} {'ranks':>5} {'size':>8} {'hetcoll us':>11} {'best peer us':>12} "
          f"{'ratio':>6} {'(mid)':>6} {'limit us':>9} {'reached':>8}  best peer")  # fmt: skip
    for x in lines:
        peer = results.digits(x.peers[x.best_peer][0]) if x.peers else "-"
        limit, reached = (results.digits(x.limit_us), f"{100 * x.of_limit:.0f} %") if x.limit_us else ("-", "-")
        print(f"{x.op:>15} {x.transport:>9} {x.ranks:>5} {results.human(x.nbytes):>8} {results.digits(x.best_us):>11} "
              f"{peer:>12} {x.ratio:>6.2f} {x.ratio_mid:>6.2f} {limit:>9} {reached:>8}  {x.best_peer}")  # fmt: skip


def write_docs(env: Mapping[str, Any], lines: Sequence[Line], json_file: Path, cache: Path) -> None:
    """The tables of both pages between their marks, all results beside the measurements, and the figure."""
    versions = ", ".join(f"{name} ({version})" for name, version in env["versions"].items())
    about = (
        f"{env['date']}, {env['cpu']}, {env['cpus']} CPUs, {env['system']}, Python {env['python']}; {versions}. "
        f"`{env['command']}`, {env['rounds']} rounds at most, the best of each library's launches, float32. "
        "Times and the machine's limits: "
    )
    document = json.loads(json_file.read_text()) | {"points": []}  # of each launch: a megabyte, for --join alone
    kept = results.keep(json.dumps(document, indent=1) + "\n", LIMITS_PAGE.parent, env["date"], SECTION)
    beside = f"[another page](measurements/{LIMITS_PAGE.name})"
    short = (
        f"{env['date']}, {env['cpu']}, {env['cpus']} CPUs. Versions, the command and the machine's limits: {beside}."
    )
    for page, head, tables in (
        (DOCS / "benchmarks.md", short, results.ratios(lines)),
        (LIMITS_PAGE, f"{about}{kept}.", results.of_limits(lines)),
    ):
        page.write_text(results.replace_between_marks(page.read_text(), SECTION, f"{head}\n\n{tables}"))
    figure = DOCS / "figures/sweep.svg"
    figure.parent.mkdir(exist_ok=True)
    python = prepare("plot", cache) / "bin/python"
    subprocess.run([python, HERE / "plot.py", json_file, figure], check=True)


def main() -> int:
    args = parse_arguments()
    if os.sched_getscheduler(0) == os.SCHED_FIFO:
        raise SystemExit("peers.py: under SCHED_FIFO ranks that spin starve their launchers; wanted chrt --rr, or none")
    if args.install:
        install(args)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended, too
    earlier = [json.loads(path.read_text()) for path in args.join if path.exists()]
    points, limits, failures = measure(args)
    points = [*(Point(**point) for part in earlier for point in part["points"]), *points]
    limits = results.best_limits([*(part["limits"] for part in earlier), *([limits] if limits else [])])
    failures = [*(failure for part in earlier for failure in part["failures"]), *failures]
    lines = results.summarise(points, limits)
    env = describe(args, points)
    json_file = args.json or args.cache / "results.json"
    json_file.write_text(json.dumps(results.document(env, limits, points, lines, failures), indent=1) + "\n")
    print_table(lines)
    print(f"limits: {json.dumps(limits)}\nresults: {json_file}")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    if args.write_docs and lines:
        write_docs(env, lines, json_file, args.cache)
    return 1 if failures or not lines else 0


if __name__ == "__main__":
    sys.exit(main())
