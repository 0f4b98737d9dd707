"""`hetcoll selftest`: do the collectives work on the devices of this machine? One command, one report.

It looks for GPUs, starts a job for each way of using them (a vendor's library, hetcoll's own way between GPUs, both
vendors together, GPUs beside a CPU) and for CPUs alone. Every rank of a job checks every element of every case and
times some all-reduces. The report holds what `hetcoll doctor` says, the settings, what was wrong, and the times.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import DType, ReduceOp
from ..config.env import child_environment, shown_variables
from ..types import supports
from .cases import OPS, REDUCING, Case, places
from .in_job import at_least
from .report import check_output
from .terminal import MARK, Progress, Screen

if TYPE_CHECKING:
    from .. import Communicator
    from .on_device import Stream

REPORT = "hetcoll-selftest.txt"
PART_SECONDS, CALL_SECONDS = 900.0, 60.0
SIZES = (8, 64 << 10, 1 << 20, 16 << 20, 64 << 20)  # bytes of the timed all-reduces
_SOME = (DType.FLOAT32, DType.BFLOAT16, DType.INT64, DType.UINT8)


@dataclass(frozen=True, slots=True)
class Part:
    """One job: the device of each rank (``cuda:0``, ``hip:1``, ``cpu``), and the islands that are asked for."""

    name: str
    devices: tuple[str, ...]
    islands: str = ""


@dataclass(slots=True)
class Result:
    """What one rank found."""

    cases: int = 0
    wrong: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    microseconds: dict[str, float] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)
    error: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How much is run, and where the report goes."""
    parser.add_argument("-o", "--output", default=REPORT, metavar="FILE", help=f"the report (default {REPORT})")
    parser.add_argument("-n", "--ranks", type=at_least(1), default=2, help="ranks of the job on CPUs alone (default 2)")
    parser.add_argument("--quick", action="store_true", help="few types and sizes")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # for the ranks: devices, islands, folder of the results
    parser.epilog = "The exit status is 1 where anything is wrong. The report is one text file to attach to a bug."


def main(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run all parts and write the report; or, as a rank, one part."""
    if args.part:
        return _be_rank(*json.loads(args.part), quick=args.quick)
    check_output("-o", args.output)  # before minutes of checks
    from ..tools.checks import run_checks
    from .doctor import text

    found, reasons = _gpus()
    lines = [*_header(), "", "hetcoll doctor", text(run_checks()), "", *reasons]
    good = True
    screen = Screen(sys.stdout.buffer, sys.stderr.buffer)
    for part in parts(found, max(2, args.ranks)):
        start = time.monotonic()
        results = _run(part, args.quick, screen if sys.stderr.isatty() else None)
        screen.clear()
        fine = all(not r.error and not r.wrong for r in results)
        good &= fine
        summary = f"{'ok' if fine else 'FAILED':6} {part.name}: {', '.join(part.devices)}"
        print(f"{summary} ({time.monotonic() - start:.0f} s)", flush=True)
        lines += ["", summary, *_told(part, results)]
    verdict = "everything is right" if good else "something is wrong"
    Path(args.output).write_text("\n".join([*lines, "", verdict, ""]))
    print(f"{verdict}; the report is in {args.output}", flush=True)
    return 0 if good else 1


def parts(gpus: Mapping[str, int], cpus: int) -> list[Part]:
    """The jobs for so many GPUs of each vendor, and so many ranks on CPUs alone."""
    of = {vendor: tuple(f"{vendor}:{i}" for i in range(count)) for vendor, count in gpus.items() if count}
    every = tuple(device for devices in of.values() for device in devices)
    found = [Part("CPUs", ("cpu",) * cpus)]
    for vendor, devices in of.items():
        if len(devices) > 1:
            found.append(Part(f"{vendor}: the vendor's library", devices))
            found.append(Part(f"{vendor}: each GPU on its own", devices, "|".join(map(str, range(len(devices))))))
    if len(of) > 1:
        found.append(Part("GPUs of both vendors", every))
    if every:
        found.append(Part("GPUs and a CPU", (*every, "cpu")))
    return found


def _gpus() -> tuple[dict[str, int], list[str]]:
    """How many GPUs of each vendor there are, and why there are none."""
    from ..vendors.devices import cuda, hip
    from .on_device import visible_gpus

    counts, reasons = visible_gpus(), {"cuda": cuda.why_not(), "hip": hip.why_not()}
    return counts, [f"GPUs of {vendor}: {reasons[vendor] or count}" for vendor, count in counts.items()]


def _header() -> Iterator[str]:
    from .. import __version__

    yield f"hetcoll {__version__} selftest, {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())}"
    yield f"Python {platform.python_version()}, {platform.platform()}, {os.cpu_count()} cores"
    yield from (f"{name}={value}" for name, value in shown_variables())


def _run(part: Part, quick: bool, screen: Screen | None) -> list[Result]:
    """Start the ranks of a job, and read what each found. `screen` shows how far they are."""
    with tempfile.TemporaryDirectory(prefix="hetcoll-selftest-") as folder:
        words = ["selftest", "--part", json.dumps([part.devices, part.islands, folder]), *["--quick"] * quick]
        python = [sys.executable, "-m", "hetcoll"]
        command = [*python, "run", "--no-prefix", "-n", str(len(part.devices)), *python, *words]
        env = child_environment({"HETCOLL_TIMEOUT": f"{CALL_SECONDS:g}", "HETCOLL_ISLANDS": "", "HETCOLL_DEVICE": ""})
        try:
            status, output = _listen(command, env, part.name, screen)
            said = f"exit status {status}\n{output[-4000:]}" if status else ""
        except subprocess.TimeoutExpired as error:
            said = f"not done after {error.timeout:.0f} s"
        results = []
        for rank in range(len(part.devices)):
            path = Path(folder) / str(rank)
            results.append(Result(**json.loads(path.read_text())) if path.exists() else Result(error=said or "no word"))
    if said and not any(result.error or result.wrong for result in results):
        results[0].error = said
    return results


def _listen(command: Sequence[str], env: Mapping[str, str], name: str, screen: Screen | None) -> tuple[int, str]:
    """Run a command: its exit status, and its output but for progress messages, which go to `screen`.

    TimeoutExpired after PART_SECONDS. Killing the launcher ends the ranks: it has a watchdog.
    """
    lines: list[str] = []
    expired = threading.Event()
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:

        def end() -> None:
            expired.set()
            job.kill()

        late = threading.Timer(PART_SECONDS, end)
        late.start()
        try:
            assert job.stdout is not None
            for line in job.stdout:
                if not line.startswith(MARK):
                    lines.append(line)
                elif screen is not None:
                    screen.stderr.write(f"{MARK}{name} {line.removeprefix(MARK)}".encode())
            status = job.wait()
        finally:
            job.kill()
            late.cancel()
            late.join()
    if expired.is_set():
        raise subprocess.TimeoutExpired(command, PART_SECONDS)
    return status, "".join(lines)


def _told(part: Part, results: Sequence[Result]) -> Iterator[str]:
    """A part for people."""
    yield f"  {results[0].cases} cases, islands {part.islands or 'by vendor'}"
    for rank, result in enumerate(results):
        yield from (f"  rank {rank}: {line}" for line in (*result.wrong, *result.error.splitlines()))
    yield from (f"  {line}" for line in (*results[0].left_out, *results[0].paths))
    for nbytes in results[0].microseconds:
        slowest = max(result.microseconds.get(nbytes, 0.0) for result in results)
        yield f"  all-reduce of {nbytes:>9} bytes: {slowest:10.1f} us {int(nbytes) / slowest / 1e3:8.2f} GB/s"


# What a rank does.


def _be_rank(devices: Sequence[str], islands: str, folder: str, *, quick: bool) -> int:
    from .. import init
    from ..config.env import environment

    rank, result = environment().launch.rank, Result()
    try:
        with init(device=devices[rank], islands=islands or None) as comm:
            check(comm, devices[rank], quick, result)
            comm.barrier()
    except Exception:
        result.error = traceback.format_exc()
    Path(folder, str(rank)).write_text(json.dumps({name: getattr(result, name) for name in Result.__slots__}))
    return int(bool(result.error or result.wrong))


def check(comm: Communicator, device: str, quick: bool, result: Result) -> None:
    """Run all cases and the timed all-reduces on `comm`; what is found goes to `result`."""
    from .on_device import Stream
    from .sweeps import have_ml_dtypes

    stream = Stream.of(device)
    if not have_ml_dtypes():
        result.left_out.append("without bfloat16 and 8-bit floats: they need the package ml_dtypes")
    cases = list(listed(comm.size, quick, have_ml_dtypes()))
    progress = Progress(len(cases), "lines" if comm.rank == 0 else "off")
    for op, dtype, redop, root, elements, inplace in cases:
        progress.show(f"{op} {dtype.label}")
        wrong = wrong_elements(Case(comm, op, elements, dtype, redop, root, inplace, stream))
        result.cases += 1
        if wrong:
            how = "" if redop is None else f" {redop.label}"
            place = "in place" if inplace else "out of place"
            result.wrong.append(f"{op} {dtype.label}{how}, {elements} elements, root {root}, {place}: {wrong} wrong")
    result.paths = list(comm.explain("allreduce", SIZES[-1]).paths)
    for nbytes in SIZES[:2] if quick else SIZES:
        result.microseconds[str(nbytes)] = _time(comm, stream, nbytes)


def listed(size: int, quick: bool, narrow: bool) -> Iterator[tuple[str, DType, ReduceOp | None, int, int, bool]]:
    """(operation, type, reduction, root, elements, in place) of every case. `narrow`: with 8- and 16-bit floats."""
    types = [DType.FLOAT32, DType.INT32] if quick else [d for d in DType if narrow or not _needs_ml_dtypes(d)]
    for dtype in types:
        for each in ReduceOp:
            if supports(dtype, each):
                for elements in (1009,) if quick else (7, 40_001):
                    yield "allreduce", dtype, each, 0, elements, False
    for op in OPS:
        for dtype in types if quick else [d for d in _SOME if d in types]:
            for elements in (1009,) if quick else (1, 1009, 70_001):
                for place in places(op):
                    redop = ReduceOp.SUM if op in REDUCING else None
                    yield op, dtype, redop, size - 1, elements, place == "in"
    for op in () if quick else ("allreduce", "allgather", "reduce_scatter"):
        yield op, DType.FLOAT32, ReduceOp.SUM if op in REDUCING else None, 0, 5_000_003, False


def _needs_ml_dtypes(dtype: DType) -> bool:
    return dtype.label.startswith(("bfloat", "float8"))


def wrong_elements(case: Case) -> int:
    """Of two calls with other values each."""
    wrong = 0
    for seed in (1, 2):
        case.fill(seed)
        case.call()
        wrong += case.wrong()
    return wrong


def _time(comm: Communicator, stream: Stream | None, nbytes: int) -> float:
    """Microseconds of an all-reduce in a row of them, the best of three rows."""
    import numpy as np

    from .on_device import Mirror

    memory = np.empty(nbytes, np.uint8)
    values = memory.view(np.float32)
    values[:] = 1
    array: Any = values
    if stream is not None:
        mirror = Mirror(stream, [memory])
        mirror.upload()
        array = mirror.buffer(values)
    calls = max(3, min(100, (256 << 20) // nbytes))
    comm.allreduce(array, op="max").wait()
    best = float("inf")
    for _ in range(3):
        comm.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            work = comm.allreduce(array, op="max")
        work.wait()
        best = min(best, time.perf_counter() - start)
    return best / calls * 1e6
