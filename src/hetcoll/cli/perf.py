"""`hetcoll perf`: measures and verifies the collectives, and prints nccl-tests' table."""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .. import ArgumentError, DType, ReduceOp
from ..types import supports
from . import compare, plot
from .cases import OPS, REDUCING, ROOTED, Case, bandwidths, places, shape
from .on_device import Stream, Talk, check_devices, choose_device, visible_gpus
from .own import add_import, import_own
from .patterns import numpy_dtype
from .report import PlanLine, Row, Table, describe_run, header, human_size, write_csv, write_json
from .terminal import Progress, Screen
from .timing import Schedule, Timing, agree_on_estimate, slowest, take_samples

T = TypeVar("T")

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}
_NCCL_NAMES = {
    "half": DType.FLOAT16, "float": DType.FLOAT32, "double": DType.FLOAT64, "f8e4m3": DType.FLOAT8_E4M3FN,
    "f8e5m2": DType.FLOAT8_E5M2,
}  # fmt: skip
_FROM_ML_DTYPES = frozenset(
    {
        DType.BFLOAT16, DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2, DType.FLOAT8_E4M3FNUZ, DType.FLOAT8_E5M2FNUZ,
    }
)  # fmt: skip
_HOST_NAME_BYTES = 64
_MOST_CAPTURED = 50  # calls in a graph


@dataclass(frozen=True, slots=True)
class Job:
    """One sweep: an operation with a type, a reduction (for those that reduce) and a root (for those with one)."""

    op: str
    dtype: DType
    redop: ReduceOp | None
    root: int


def parse_size(text: str) -> int:
    """Bytes from "8", "4K", "64M", "1G" (powers of 1024; "KB" and "KiB" too). argparse's error for anything else."""
    digits = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = digits[-1:] if digits[-1:].isalpha() else ""
    number = digits.removesuffix(unit)
    if unit not in _UNITS or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"wanted a size such as 8, 64K, 4M or 1G, got {text!r}")
    return int(number) << _UNITS[unit]


def _at_least(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise argparse.ArgumentTypeError(f"wanted a whole number from {low}, got {text!r}")
        return value

    return parse


def _dtypes(text: str) -> tuple[DType, ...]:
    if text == "all":
        return tuple(dtype for dtype in DType if dtype not in _FROM_ML_DTYPES or have_ml_dtypes())
    known = {dtype.label: dtype for dtype in DType} | _NCCL_NAMES
    if text not in known:
        raise argparse.ArgumentTypeError(f"wanted all or one of {', '.join(known)}; got {text!r}")
    if known[text] in _FROM_ML_DTYPES and not have_ml_dtypes():
        raise argparse.ArgumentTypeError(f"{text} needs the package ml_dtypes: pip install ml_dtypes")
    return (known[text],)


def _redops(text: str) -> tuple[ReduceOp, ...]:
    if text == "all":
        return tuple(ReduceOp)
    known = {op.label: op for op in ReduceOp}
    if text not in known:
        raise argparse.ArgumentTypeError(f"wanted all or one of {', '.join(known)}; got {text!r}")
    return (known[text],)


def _device(text: str) -> str:
    try:
        return check_devices(text)
    except ValueError:
        wanted = "cpu, cuda, hip, auto, or one for each rank, such as cuda,hip,cpu"
        raise argparse.ArgumentTypeError(f"wanted {wanted}; got {text!r}") from None


def have_ml_dtypes() -> bool:
    """Whether bfloat16 and fp8 can be measured."""
    return importlib.util.find_spec("ml_dtypes") is not None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags, which mean what they mean in nccl-tests where they are the same letter; -n is the ranks here."""
    parser.add_argument("ops", nargs="+", choices=(*OPS, "all"), metavar="OP", help=f"{', '.join(OPS)} or all")
    add = parser.add_argument
    add("-n", "--ranks", type=_at_least(1), help="ranks to start on this host (default: those of -g, or 2)")
    add("-b", "--minbytes", type=parse_size, default=8, metavar="SIZE", help="smallest size (default 8)")
    add("-e", "--maxbytes", type=parse_size, default=64 << 20, metavar="SIZE", help="largest size (default 64M)")
    add("-f", "--stepfactor", type=_at_least(2), default=2, metavar="N", help="factor between sizes (default 2)")
    add("-i", "--stepbytes", type=parse_size, metavar="SIZE", help="difference between sizes, instead of -f")
    add("--iters", type=_at_least(1), metavar="N", help="timed calls (default: as many as take 0.2 s, 5 to 5000)")
    add("-w", "--warmup", type=_at_least(0), default=3, metavar="N", help="calls before the timed ones (default 3)")
    add("-d", "--datatype", type=_dtypes, default=(DType.FLOAT32,), metavar="TYPE", help="float32 (default), ..., all")
    add("-o", "--op", type=_redops, default=(ReduceOp.SUM,), metavar="OP", help="sum (default), ..., all")
    add("-r", "--root", type=_at_least(-1), default=0, help="the root (default 0); -1 means each in turn")
    add("-c", "--check", type=_at_least(1), default=1, metavar="N", help="verified calls before and after (default 1)")
    add("--inplace", action="store_true", help="measure in place only")
    add(
        "--transport", choices=("auto", "shm", "tcp", "verbs"), help="how ranks reach each other (default: the fastest)"
    )
    add(
        "--device", type=_device, metavar="DEVICE",
        help="where buffers are: cpu (default), cuda, hip, auto, or one for each rank, such as cuda,hip,cpu",
    )  # fmt: skip
    add("-g", "--ngpus", type=_at_least(1), metavar="N", help="so many ranks of the host have a GPU, one each")
    add("-G", "--graph", type=_at_least(1), nargs="?", const=10, metavar="N", help="run a captured graph N times (10)")
    add("-z", "--blocking", action="store_true", help="wait for each call on a GPU before the next")
    add("--json", metavar="FILE", help="write the results as JSON, too; - is the output, and the table goes to stderr")
    add("--csv", metavar="FILE", help="write the results as CSV, too")
    add_import(parser)
    add("--plot", metavar="FILE", help="draw bandwidth and latency, as .png or .svg; in dark beside it (*-dark)")
    add("--compare", metavar="FILE", help="of perf (JSON), nccl-tests, osu-micro-benchmarks or PARAM: print ratios")
    add("--progress", choices=("auto", "lines"), default="auto", help=argparse.SUPPRESS)  # lines: terminal.py


def main(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure. `argv` are the words of the command line after `hetcoll`, for the ranks that this starts."""
    if args.minbytes > args.maxbytes:
        raise SystemExit(f"hetcoll perf: -b {args.minbytes} is larger than -e {args.maxbytes}")
    import_own(args.modules)
    known = None if args.compare is None else compare.read(args.compare)
    if args.plot is not None:
        plot.check(args.plot)  # before minutes of measuring
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


def expand(args: argparse.Namespace, size: int) -> list[Job]:
    """The sweeps that the arguments ask for, in the order of the operations."""
    ops = OPS if "all" in args.ops else tuple(dict.fromkeys(args.ops))
    if args.root >= size:
        raise SystemExit(f"hetcoll perf: -r wants a rank from 0 to {size - 1}, or -1 for each, got {args.root}")
    roots = range(size) if args.root < 0 else (args.root,)
    jobs = []
    for op in ops:
        if not places(op, args.inplace):
            continue
        if op == "barrier":
            jobs.append(Job(op, DType.UINT8, None, 0))
            continue
        for dtype in args.datatype:
            redops = [r for r in args.op if supports(dtype, r)] if op in REDUCING else [None]
            jobs += [Job(op, dtype, r, root) for r in redops for root in (roots if op in ROOTED else (0,))]
    if not jobs:
        raise SystemExit("hetcoll perf: nothing to measure: the operations have no such type, reduction or place")
    return jobs


def sizes(args: argparse.Namespace, op: str, ranks: int, dtype: DType) -> list[int]:
    """Elements of each size of the sweep. Sizes that come to the same number of elements are measured once."""
    if op == "barrier":
        return [0]
    item = numpy_dtype(dtype).itemsize
    nbytes = args.minbytes
    found: dict[int, int] = {}
    while nbytes <= args.maxbytes:
        elements = nbytes // item
        found.setdefault(shape(op, ranks, 0, elements, 0).total, elements)
        nbytes = nbytes + args.stepbytes if args.stepbytes else max(nbytes, 1) * args.stepfactor
    return list(found.values())


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
    jobs = expand(args, comm.size)
    sweeps = [(job, sizes(args, job.op, comm.size, job.dtype)) for job in jobs]
    talk = comm if stream is None else Talk(comm, stream)
    hosts = _gather_text(talk, socket.gethostname())
    devices = _gather_text(talk, "host" if stream is None else stream.device.vendor)
    if args.graph and "host" in devices:
        raise ArgumentError(f"--graph: wanted a GPU for every rank, rank {devices.index('host')} has none")
    plans = list(_plans(comm, sweeps))
    transport = "+".join(dict.fromkeys(plan.transport for plan in plans)) or "none"
    env = describe_run(version, hosts, transport, "+".join(dict.fromkeys(devices)), ["hetcoll", *argv])
    first = comm.rank == 0
    out = sys.stderr if args.json == "-" else sys.stdout
    table = Table(out if first else None, [job.dtype.label for job in jobs])
    table.comment(header(env, plans, _notes(args, devices)))
    progress = Progress(sum(len(counts) for _, counts in sweeps), _progress_mode(args, first))
    rows: list[Row] = []
    by_size = {(plan.op, plan.nbytes): plan for plan in plans}
    for index, (job, counts) in enumerate(sweeps):
        if index == 0 or job.op != sweeps[index - 1][0].op:
            table.comment([f"# {job.op}"])
            table.head()
        for elements in counts:
            progress.show(f"{job.op} {human_size(elements * job.dtype.itemsize)} {job.dtype.label}")
            line = [
                _one(comm, talk, args, job, elements, place, by_size, stream, env["device"])
                for place in places(job.op, args.inplace)
            ]
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
    notes = []
    if len(args.datatype) > 1 and not have_ml_dtypes():
        notes.append("without bfloat16 and float8: they need the package ml_dtypes")
    if set(devices) != {"host"}:
        how = "in a row on one stream, by the GPU's clock"
        if args.graph:
            how = f"in a captured graph, run {args.graph} times"
        elif args.blocking:
            how = "one by one, each with a wait of the host"
        notes.append(f"GPU calls are timed {how}.")
    return notes


def _plans(comm: Any, sweeps: Sequence[tuple[Job, list[int]]]) -> Iterator[PlanLine]:
    seen = set()
    for job, counts in sweeps:
        for elements in counts:
            nbytes = shape(job.op, comm.size, comm.rank, elements, job.root).total * job.dtype.itemsize
            if (job.op, nbytes) not in seen:
                seen.add((job.op, nbytes))
                told = comm.explain("p2p" if job.op == "sendrecv" else job.op, nbytes)
                yield PlanLine(job.op, nbytes, told.algorithm, told.transport, told.channels)


def _one(
    comm: Any,
    talk: Any,
    args: argparse.Namespace,
    job: Job,
    elements: int,
    place: str,
    plans: dict[tuple[str, int], PlanLine],
    stream: Stream | None,
    device: str,
) -> Row:
    """Verify, warm up, time, verify: one operation at one size in one place."""
    case = Case(comm, job.op, elements, job.dtype, job.redop, job.root, place == "in", stream)
    seeds = iter(range(1, 1 << 30))
    wrong, estimate = 0, 0.0
    for _ in range(args.check):
        bad, estimate = _verified_call(comm, case, next(seeds))
        wrong += bad
    case.fill(next(seeds))
    comm.barrier()
    if args.warmup:
        start = perf_counter_ns()
        for _ in range(args.warmup):
            case.call()
        if stream is not None:
            stream.synchronize()
        estimate = (perf_counter_ns() - start) / 1e3 / args.warmup
    schedule = Schedule.choose(agree_on_estimate(talk, estimate), args.iters)
    comm.barrier()
    timing = Timing.of(_samples(args, case, schedule, stream))
    if case.repeatable:
        wrong += case.wrong()
    for _ in range(args.check):
        wrong += _verified_call(comm, case, next(seeds))[0]
    timing, wrong = slowest(talk, timing, wrong)
    plan = plans[(job.op, case.nbytes)]
    algbw, busbw = bandwidths(job.op, comm.size, case.nbytes, timing.mean_us)
    return Row(
        job.op, device, plan.transport, plan.algorithm, comm.size, case.nbytes, case.shape.count,
        "none" if job.op == "barrier" else job.dtype.label, "none" if job.redop is None else job.redop.label,
        job.root if job.op in ROOTED else -1, place, timing.mean_us, timing.p50_us, timing.p99_us, algbw, busbw, wrong,
    )  # fmt: skip


def _samples(args: argparse.Namespace, case: Case, schedule: Schedule, stream: Stream | None) -> NDArray[np.float64]:
    """Microseconds a call of each sample on this rank."""
    if stream is None or case.op == "barrier":
        return take_samples(case.call, schedule)
    if args.blocking:

        def call() -> None:
            case.call()
            stream.synchronize()

        return take_samples(call, schedule)
    if not args.graph:
        return stream.samples(case.call, schedule)
    calls = min(_MOST_CAPTURED, schedule.samples * schedule.batch)
    graph = stream.captured(case.call, calls)
    try:
        return stream.samples(graph, Schedule(args.graph, 1)) / calls
    finally:
        stream.synchronize()
        graph.close()


def _verified_call(comm: Any, case: Case, seed: int) -> tuple[int, float]:
    """New values, one call, every element compared: how many are wrong, and the microseconds of the call."""
    case.fill(seed)
    comm.barrier()
    start = perf_counter_ns()
    case.call()
    case.wait()
    spent = (perf_counter_ns() - start) / 1e3
    return case.wrong(), spent


def _gather_text(comm: Any, text: str) -> list[str]:
    """Every rank's `text`, cut to 64 bytes, in the order of the ranks. Collective."""
    mine = np.zeros(_HOST_NAME_BYTES, np.uint8)
    data = np.frombuffer(text.encode()[:_HOST_NAME_BYTES], np.uint8)
    mine[: data.size] = data
    rows = np.empty(_HOST_NAME_BYTES * comm.size, np.uint8)
    comm.allgather(mine, rows)
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows.reshape(comm.size, -1)]
