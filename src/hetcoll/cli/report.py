"""What `hetcoll perf` prints and writes: nccl-tests' table, JSON (schema 1) and CSV.

The table is by hand and not by rich: programs read nccl-tests' columns.
"""

from __future__ import annotations

import csv
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from .. import ArgumentError
from ..links.tuned import processor

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: one operation at one size, in or out of place. Times in microseconds, 10**9 bytes a GB."""

    op: str
    device: str
    transport: str
    algorithm: str
    ranks: int
    nbytes: int
    count: int
    dtype: str
    redop: str
    root: int
    place: str
    time_us: float
    p50_us: float
    p99_us: float
    algbw_gbs: float
    busbw_gbs: float
    wrong: int | None  # elements; None: nobody looked


@dataclass(frozen=True, slots=True)
class PlanLine:
    """How calls of `nbytes` run, as `Communicator.explain` says."""

    op: str
    nbytes: int
    algorithm: str
    transport: str
    channels: int


def describe_run(
    version: str, hosts: Sequence[str], transport: str, device: str, command: Sequence[str]
) -> dict[str, Any]:
    """What the JSON says of the machine and the run; `hosts` has one name a rank."""
    return {
        "hetcoll": version,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "hosts": list(dict.fromkeys(hosts)),
        "ranks": len(hosts),
        "transport": transport,
        "device": device,
        "command": list(command),
    }


def header(env: Mapping[str, Any], plans: Iterable[PlanLine], notes: Iterable[str]) -> list[str]:
    """The comment lines above the table."""
    hosts = ", ".join(env["hosts"][:4]) + (", ..." if len(env["hosts"]) > 4 else "")
    lines = [
        f"# hetcoll {env['hetcoll']}, Python {env['python']}, NumPy {env['numpy']}, {env['system']}",
        f"# host {hosts}: {env['cpu']}, {env['cpus']} CPUs here",
        f"# {_plural(env['ranks'], 'rank')} on {_plural(len(env['hosts']), 'host')}, device {env['device']}, "
        f"transport {env['transport']}",
        *(f"# plan {line}" for line in plan_lines(plans)),
        "# time: mean over the timed calls on the slowest rank (nccl-tests averages over ranks); its p50",
        "#       and p99 are in --json and --csv.",
        "#       Calls under 10 us are timed in batches of 10.",
    ]
    return lines + [f"# {note}" for note in notes]


def plan_lines(plans: Iterable[PlanLine]) -> list[str]:
    """One line for each range of sizes that runs the same way."""
    lines = []
    for (op, algorithm, transport, channels), group in groupby(
        plans, lambda p: (p.op, p.algorithm, p.transport, p.channels)
    ):
        sizes = [plan.nbytes for plan in group]
        span = human_size(sizes[0]) + (f" to {human_size(sizes[-1])}" if len(sizes) > 1 else "")
        lines.append(f"{op} {span}: {algorithm} over {transport}, {_plural(channels, 'channel')}")
    return lines


def _plural(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def human_size(nbytes: int) -> str:
    """`65536` as `64 KiB`; exact, so 1000 stays `1000 B`."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} B"


class Table:
    """nccl-tests' table, 120 columns wide unless a type has a long name: p50 and p99 are in the files."""

    def __init__(self, out: TextIO | None, dtypes: Iterable[str]) -> None:
        self._out = out  # None on every rank but the first: prints nothing
        self._type_width = max(8, *(len(name) for name in dtypes))

    def head(self) -> None:
        """The three lines above the columns."""
        width = self._type_width
        left = 12 + 2 + 12 + 2 + width + 2 + 6 + 2 + 6
        four = f"  {'time':>7} {'algbw':>7} {'busbw':>7} {'#wrong':>7}"
        units = f"  {'(us)':>7} {'(GB/s)':>7} {'(GB/s)':>7} {'':>7}"
        names = f"{'size':>11}  {'count':>12}  {'type':>{width}}  {'redop':>6}  {'root':>6}"
        below = f"{'(B)':>11}  {'(elements)':>12}  {'':>{width}}  {'':>6}  {'':>6}"
        groups = "".join(f"{title:^{len(four)}}" for title in ("out-of-place", "in-place"))
        self._line(f"#{'':>{left - 1}}{groups}".rstrip())
        self._line(f"#{names}{four * 2}")
        self._line(f"#{below}{units * 2}".rstrip())

    def row(self, rows: Sequence[Row]) -> None:
        """One line: the out-of-place and in-place measurements of one size, either of which may be missing."""
        first = rows[0]
        by_place = {row.place: row for row in rows}
        text = f"{first.nbytes:>12}  {first.count:>12}  {first.dtype:>{self._type_width}}"
        text += f"  {first.redop:>6}  {first.root:>6}"
        for place in ("out", "in"):
            row = by_place.get(place)
            cells = ["N/A"] * 4
            if row is not None:
                wrong = "N/A" if row.wrong is None else str(row.wrong)
                cells = [_time(row.time_us), f"{row.algbw_gbs:.2f}", f"{row.busbw_gbs:.2f}", wrong]
            text += "  " + " ".join(f"{cell:>7}" for cell in cells)
        self._line(text)

    def foot(self, rows: Sequence[Row]) -> None:
        """The two closing lines of nccl-tests."""
        wrong = sum(row.wrong or 0 for row in rows)
        moved = [row.busbw_gbs for row in rows if row.nbytes]
        if all(row.wrong is not None for row in rows):
            self._line(f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
        self._line(f"# Avg bus bandwidth    : {sum(moved) / len(moved) if moved else 0.0:g}")

    def comment(self, lines: Iterable[str]) -> None:
        """Lines as they are."""
        for line in lines:
            self._line(line)

    def _line(self, text: str) -> None:
        if self._out is not None:
            print(text, file=self._out, flush=True)


def _time(microseconds: float) -> str:
    digits = 3 if microseconds < 10 else 2 if microseconds < 100 else 1 if microseconds < 10000 else 0
    return f"{microseconds:.{digits}f}"


def check_output(option: str, path: str) -> None:
    """ArgumentError unless such a file can be written."""
    if Path(path).is_dir() or not Path(path).absolute().parent.is_dir():
        raise ArgumentError(f"{option}: wanted a file in a folder that is there, got {path!r}")
    if not os.access(path if os.path.exists(path) else Path(path).absolute().parent, os.W_OK):
        raise ArgumentError(f"{option}: wanted a file that can be written, got {path!r}")


def write_json(path: str, env: Mapping[str, Any], rows: Iterable[Row]) -> None:
    """Schema 1: `{"schema": 1, "env": {...}, "rows": [{...}]}`; "-" is the output."""
    document = {"schema": SCHEMA, "env": dict(env), "rows": [asdict(row) for row in rows]}
    text = json.dumps(document, indent=1) + "\n"
    if path == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        Path(path).write_text(text)


def write_csv(path: str, rows: Iterable[Row]) -> None:
    """The rows of the JSON, a line each, under a line with the names."""
    with open(path, "w", newline="") as out:
        writer = csv.DictWriter(out, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
