"""From the ranks' files to tables: the slowest rank's median, the best round, the ratio to the best peer, the limit."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

OURS = "hetcoll"
MARK = "<!-- {which} of {script} -->"


@dataclass(frozen=True)
class Point:
    """One size of one operation in one launch of one library: the slowest rank's median, microseconds."""

    name: str
    version: str
    transport: str
    ranks: int
    op: str
    nbytes: int
    median_us: float
    wrong: int


@dataclass(frozen=True)
class Line:
    """One line of the table. Times in microseconds: of all rounds the best median, and the median of the medians.

    `peers` has both for every peer. `ratio` is the best peer's best over ours, so above 1 means that we are faster;
    `ratio_mid` the same of the medians. `limit_us` is what the machine would need; 0: no model for it.
    """

    op: str
    transport: str
    ranks: int
    nbytes: int
    best_us: float
    mid_us: float
    peers: Mapping[str, tuple[float, float]]
    limit_us: float

    @property
    def best_peer(self) -> str:
        return min(self.peers, key=lambda name: self.peers[name][0], default="")

    @property
    def ratio(self) -> float:
        return self.peers[self.best_peer][0] / self.best_us if self.peers else 0.0

    @property
    def ratio_mid(self) -> float:
        return min(mid for _, mid in self.peers.values()) / self.mid_us if self.peers else 0.0

    @property
    def of_limit(self) -> float:
        return self.limit_us / self.best_us


def read_launch(out: Path, name: str, transport: str, ranks: int) -> list[Point]:
    """What the ranks of one launch wrote. An incomplete launch is a ValueError."""
    documents = []
    for rank in range(ranks):
        path = Path(f"{out}.{rank}.json")
        if not path.exists():
            raise ValueError(f"{name} over {transport}: rank {rank} of {ranks} wrote no results")
        documents.append(json.loads(path.read_text()))
    points = []
    for rows in zip(*(document["rows"] for document in documents), strict=True):
        first = rows[0]
        if any((row["op"], row["nbytes"]) != (first["op"], first["nbytes"]) for row in rows):
            raise ValueError(f"{name} over {transport}: the ranks measured different things")
        median, wrong = max(row["median_us"] for row in rows), sum(row["wrong"] for row in rows)
        points.append(
            Point(name, documents[0]["version"], transport, ranks, first["op"], first["nbytes"], median, wrong)
        )
    return points


def summarise(points: Iterable[Point], limits: Mapping[str, Any]) -> list[Line]:
    """One line for each operation, transport, number of ranks and size that we were measured on."""
    groups: dict[tuple[str, str, int, int], dict[str, list[float]]] = {}
    for point in points:
        key = (point.op, point.transport, point.ranks, point.nbytes)
        groups.setdefault(key, {}).setdefault(point.name, []).append(point.median_us)
    lines = []
    for (op, transport, ranks, nbytes), by_name in groups.items():
        both = {name: (min(medians), statistics.median(medians)) for name, medians in by_name.items()}
        if OURS in both:
            best, mid = both.pop(OURS)
            limit = limit_us(limits, op, transport, ranks, nbytes)
            lines.append(Line(op, transport, ranks, nbytes, best, mid, both, limit))
    return lines


def most_launches(points: Iterable[Point]) -> int:
    """Of any library on any line."""
    return max(Counter((p.name, p.op, p.transport, p.ranks, p.nbytes) for p in points).values(), default=0)


def limit_us(limits: Mapping[str, Any], op: str, transport: str, ranks: int, nbytes: int) -> float:
    """The least time the machine allows by a simple model, microseconds; 0 without one (more than two ranks).

    Shared memory: one hop of a flag, and every byte that must come into a rank's output is copied or added once, at
    the rate that two processes reach at once. TCP: one hop, and the bytes that a rank must receive at the rate that
    loopback carries both ways at once (one way for broadcast).
    """
    if ranks != 2 or not limits:
        return 0.0
    if transport == "tcp":
        both, one = limits["loopback_gbs"]["each_way"], limits["loopback_gbs"]["one_way"]
        share = 1.0 if op in ("allreduce", "broadcast", "sendrecv") else 0.5
        return float(limits["loopback_latency_us"] + share * nbytes / (one if op == "broadcast" else both) / 1e3)
    copied = {"allreduce": 0.5, "reduce_scatter": 0.0}.get(op, 1.0) * nbytes
    added = {"allreduce": 0.5, "reduce_scatter": 0.5}.get(op, 0.0) * nbytes
    copy_us = copied / _rate(limits["memcpy_gbs"], nbytes) / 1e3
    return float(limits["flag_us"] + copy_us + added / _rate(limits["add_gbs"], nbytes) / 1e3)


def _rate(rates: Mapping[str, Mapping[str, float]], nbytes: int) -> float:
    """GB/s of the smallest measured size that is not below `nbytes`, both processes at once."""
    sizes = sorted(int(size) for size in rates)
    fitting = next((size for size in sizes if size >= nbytes), sizes[-1])
    return rates[str(fitting)]["both"]


def best_limits(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The best of several runs of the probe, figure by figure: the largest rates and the smallest times."""
    best: dict[str, Any] = {}
    for key, value in runs[0].items():
        column = [run[key] for run in runs]
        if isinstance(value, dict):
            best[key] = best_limits(column)
        else:
            best[key] = min(column) if key.endswith("_us") else max(column)
    return best


def human(nbytes: int) -> str:
    """8 B, 64 KiB, 16 MiB."""
    for shift, unit in ((20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << shift and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} B"


def digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def ratios(lines: Sequence[Line]) -> str:
    """A table for each transport and number of ranks: how many times as fast as the best peer."""
    return _tables(lines, "how many times as fast as the best peer", lambda x: f"{x.ratio:.2f}" if x.peers else "")


def of_limits(lines: Sequence[Line]) -> str:
    """A table for each transport and number of ranks: the parts of the limit that are reached."""
    return _tables(lines, "per cent of the limit", lambda x: f"{100 * x.of_limit:.0f}" if x.limit_us else "")


def _tables(lines: Sequence[Line], what: str, cell: Callable[[Line], str]) -> str:
    parts = []
    for transport, ranks in dict.fromkeys((line.transport, line.ranks) for line in lines):
        chosen = [line for line in lines if (line.transport, line.ranks) == (transport, ranks)]
        cells = {(x.op, x.nbytes): cell(x) for x in chosen if cell(x)}
        if cells:
            parts += [f"### {ranks} ranks, {transport}: {what}", _matrix(cells)]
    return "\n\n".join(parts)


def _matrix(cells: Mapping[tuple[str, int], str]) -> str:
    """A row for each operation, a column for each size."""
    sizes = sorted({nbytes for _, nbytes in cells})
    head = [_row(["operation", *map(human, sizes)]), _row(["---", *["---:"] * len(sizes)])]
    ops = dict.fromkeys(op for op, _ in cells)
    return "\n".join([*head, *(_row([op, *(cells.get((op, nbytes), "") for nbytes in sizes)]) for op in ops)])


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def between_marks(text: str, name: str, script: str = "benchmarks/peers.py") -> str:
    """What stands between the marks of `name`; ValueError without the marks."""
    return _at_marks(text, name, script)[1]


def replace_between_marks(text: str, name: str, body: str, script: str = "benchmarks/peers.py") -> str:
    """`text` with that replaced."""
    head, _, tail = _at_marks(text, name, script)
    return f"{head}\n{body.strip()}\n{tail}"


def _at_marks(text: str, name: str, script: str) -> tuple[str, str, str]:
    """What stands before the end of the first mark, between the two, and from the second one on."""
    start, end = (MARK.format(which=f"{name} {what}: output", script=script) for what in ("begins", "ends"))
    head, found, rest = text.partition(start)
    body, also, tail = rest.partition(end)
    if not (found and also):
        raise ValueError(f"wanted the marks {start!r} and {end!r}, found {'one' if found else 'none'} of them")
    return head + start, body, end + tail


def keep(text: str, folder: Path, date: str, name: str) -> str:
    """Writes a run's JSON text into docs/measurements; the link from a page in `folder`, docs or measurements."""
    kept = f"{date}-{name}.json" if folder.name == "measurements" else f"measurements/{date}-{name}.json"
    (folder / kept).write_text(text)
    return f"[{kept}]({kept})"


def document(env: Mapping[str, Any], limits: Mapping[str, Any], points: Sequence[Point],
             lines: Sequence[Line], failures: Sequence[str]) -> dict[str, Any]:  # fmt: skip
    """Everything, for the JSON file."""
    table = [
        {**asdict(line), "best_peer": line.best_peer, "ratio": line.ratio, "ratio_mid": line.ratio_mid,
         "of_limit": line.of_limit}
        for line in lines
    ]  # fmt: skip
    return {
        "schema": 1, "env": dict(env), "limits": dict(limits), "table": table, "failures": list(failures),
        "points": [asdict(point) for point in points],
    }  # fmt: skip
