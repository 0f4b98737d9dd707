"""`hetcoll perf`: measures and verifies the collectives, and prints nccl-tests' table."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from . import compare, plot
from .bench import Bench
from .cases import places
from .on_device import Stream, choose_device, visible_gpus
from .own import import_own
from .report import Row, Table, check_output, describe_run, header, human_size, write_csv, write_json
from .sweeps import add_arguments, have_ml_dtypes
from .terminal import Progress, Screen

__all__ = ["add_arguments", "main", "measure"]


def main(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure. `argv` are the words of the command line after `hetcoll`, for the ranks that this starts."""
    if args.minbytes > args.maxbytes:
        raise SystemExit(f"hetcoll perf: -b {args.minbytes} is larger than -e {args.maxbytes}")
    import_own(args.modules)
    known = None if args.compare is None else compare.read(args.compare)
    if args.plot is not None:
        plot.check(args.plot)  # before minutes of measuring
    for option, path in (("--json", args.json), ("--csv", args.csv)):
        if path not in (None, "-"):
            check_output(option, path)
    if args.transport is not None:
        os.environ["HETCOLL_TRANSPORT"] = args.transport  # before anyone reads it; the ranks inherit it
    from ..config.env import environment

    launch = environment().launch
    ranks = args.ranks or (args.device or "").count(",") + 1
    if args.ranks is None and ranks == 1:
        ranks = args.ngpus or 2
    if launch.launcher == "single" and ranks > 1:
        return _start_ranks(ranks, argv)
    from .. import __version__, init

    device = None
    if args.device is not None or args.ngpus is not None:
        place = launch.rank if launch.local_rank is None else launch.local_rank
        device = choose_device(args.device or "auto", args.ngpus, place, visible_gpus())
    with init(device=device) as comm:
        stream = None if device is None else Stream.of(device)
        return measure(comm, args, argv, __version__, stream, known or [])


def _start_ranks(ranks: int, argv: Sequence[str]) -> int:
    from ..tools import launch

    command = [sys.executable, "-m", "hetcoll", *argv]
    if not sys.stderr.isatty():
        return launch.run(command, ranks, prefix=False)
    screen = Screen(sys.stdout.buffer, sys.stderr.buffer)
    command += ["--progress", "lines"]
    status = launch.run(command, ranks, prefix=False, stdout=screen.stdout, stderr=screen.stderr)
    screen.clear()
    return status


def measure(
    comm: Any,
    args: argparse.Namespace,
    argv: Sequence[str],
    version: str,
    stream: Stream | None = None,
    known: Sequence[compare.Known] = (),
) -> int:
    """Run every sweep on `comm`, this rank's on the GPU of `stream`, if any; rank 0 prints and writes. `known` is what
    to compare with. Returns 0, or 1 when any rank saw a wrong element."""
    bench = Bench(comm, args, stream)
    plans = bench.plans.values()
    transport = "+".join(dict.fromkeys(plan.transport for plan in plans)) or "none"
    env = describe_run(version, bench.hosts, transport, bench.device, ["hetcoll", *argv])
    first = comm.rank == 0
    out = sys.stderr if args.json == "-" else sys.stdout
    table = Table(out if first else None, [job.dtype.label for job, _ in bench.sweeps])
    table.comment(header(env, plans, _notes(args, bench.devices)))
    progress = Progress(sum(len(counts) for _, counts in bench.sweeps), _progress_mode(args, first))
    rows: list[Row] = []
    for job, counts in bench.sweeps:
        if not rows or job.op != rows[-1].op:
            table.comment([f"# {job.op}"])
            table.head()
        for elements in counts:
            progress.show(f"{job.op} {human_size(elements * job.dtype.itemsize)} {job.dtype.label}")
            line = [bench.measure(job, elements, place) for place in places(job.op, args.inplace)]
            progress.clear()
            table.row(line)
            rows += line
    table.foot(rows)
    table.comment(compare.lines(rows, known))
    if first and args.json:
        write_json(args.json, env, rows)
    if first and args.csv:
        write_csv(args.csv, rows)
    if first and args.plot:
        plot.draw(args.plot, env, rows)
    return 1 if any(row.wrong for row in rows) else 0


def _progress_mode(args: argparse.Namespace, first: bool) -> str:
    if not first:
        return "off"
    if args.progress == "lines":
        return "lines"
    return "terminal" if sys.stderr.isatty() else "off"


def _notes(args: argparse.Namespace, devices: Sequence[str]) -> list[str]:
    notes = ["Every element of every buffer is verified." if args.check else "Nothing is verified (-c 0)."]
    if len(args.datatype) > 1 and not have_ml_dtypes():
        notes.append("without bfloat16 and float8: they need the package ml_dtypes")
    if set(devices) != {"host"}:
        how = "in a row on one stream, by the GPU's clock"
        if args.cputime:
            how = "on the host, which does not wait for their ends"
        elif args.graph:
            how = f"in a captured graph, run {args.graph} times"
        elif args.blocking:
            how = "one by one, each with a wait of the host"
        notes.append(f"GPU calls are timed {how}.")
    return notes
