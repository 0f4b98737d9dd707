"""`hetcoll simulate CLUSTER.toml COLLECTIVE`: what a collective would take in a cluster that is described by a file."""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from .. import ArgumentError
from ..plan.cluster import Cluster, read
from ..plan.forecast import Forecast, candidates, events, forecasts, named
from ..plan.simulator.graph import Outcome
from ..types import Collective

_POWERS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_HALF = 0.5


class Row(NamedTuple):
    """What the algorithms take at one size, and in which of their forms."""

    nbytes: int
    outcomes: dict[str, Outcome]
    forecasts: dict[str, Forecast]

    @property
    def best(self) -> str:
        return min(self.outcomes, key=lambda name: self.outcomes[name].seconds)

    @property
    def seconds(self) -> float:
        return self.outcomes[self.best].seconds

    @property
    def found(self) -> tuple[Forecast, Outcome]:
        """Of the best one."""
        return self.forecasts[self.best], self.outcomes[self.best]


class Table(NamedTuple):
    """All sizes in one cluster."""

    cluster: Cluster
    forecasts: dict[str, list[Forecast]]
    rows: list[Row]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is only for clusters."""
    group = parser.add_argument_group("with a cluster file")
    group.add_argument("--sizes", metavar="FROM..TO", help="bytes in powers of two, such as 1K..1G (default 1K..1G)")
    group.add_argument("--algo", metavar="NAMES", help="these algorithms only, with commas between")
    group.add_argument(
        "--what-if", metavar="KEY=VALUE", action="append", default=[],
        help="compare with the cluster where this holds, such as hosts.NAME.count=0; may be given several times",
    )  # fmt: skip
    group.add_argument("--plot", metavar="FILE", help="draw time over bytes; the name's end says the format (svg, png)")
    group.add_argument(
        "--trace", metavar="FILE", help="write the fastest algorithm's steps at the last size for Perfetto"
    )


def only_for_clusters(args: argparse.Namespace) -> list[str]:
    """The options of those that were given."""
    names = ("sizes", "algo", "what_if", "plot", "trace")
    return [f"--{name.replace('_', '-')}" for name in names if getattr(args, name)]


def main(args: argparse.Namespace) -> int:
    """Print what was asked for; 0."""
    path = Path(args.collective)
    labels = [collective.label for collective in Collective]
    if args.algorithm not in labels:
        raise ArgumentError(f"wanted a collective after {path}, one of {', '.join(labels)}; got {args.algorithm}")
    collective = Collective[args.algorithm.upper()]
    sizes = [0] if collective is Collective.BARRIER else spans(args.sizes or "1K..1G")
    plot = _matplotlib() if args.plot else None
    try:
        text = path.read_text()
    except OSError as error:
        raise ArgumentError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ArgumentError(f"{path}: wanted text, got {error}") from None
    base = _table(read(text, str(path)), collective, sizes, args)
    other = _table(read(text, str(path), tuple(args.what_if)), collective, sizes, args) if args.what_if else None
    if args.json:
        print(json.dumps(_document(base, other), indent=1))
    else:
        print("\n".join(_text(base, other, collective, " and ".join(args.what_if))))
    if args.trace:
        _write_trace(Path(args.trace), other or base)
    if plot is not None:
        _draw(plot, Path(args.plot), base, other, collective)
    return 0


def spans(given: str) -> list[int]:
    """The sizes of ``1K..1G``, in powers of two from the first to the last; of ``1M``, itself; of several with commas.

    Raises
    ------
    ArgumentError
        It has another form.
    """
    found: list[int] = []
    for part in given.split(","):
        ends = [re.fullmatch(r"\s*(\d+)\s*([KMGT]?)i?B?\s*", end) for end in part.split("..")]
        numbers = [int(end[1]) << _POWERS[end[2]] for end in ends if end]
        if len(numbers) != len(ends) or len(ends) > 2 or numbers[0] < 1 or numbers != sorted(numbers):
            raise ArgumentError(f"--sizes wants bytes, such as 1K..1G, 64M or 8,1M, got {given!r}")
        size = numbers[0]
        while size <= numbers[-1]:
            found.append(size)
            size *= 2
    return sorted(set(found))


def _table(cluster: Cluster, collective: Collective, sizes: list[int], args: argparse.Namespace) -> Table:
    names = [name.strip() for name in args.algo.split(",")] if args.algo else candidates(cluster, collective)
    if not names:
        raise ArgumentError(f"no algorithm for {collective.label} among these ranks: name one by --algo")
    for name in names:
        named(collective, name)
    found = {name: forecasts(cluster, collective, name, args.root) for name in names}
    return Table(cluster, found, [_row(n, found) for n in sizes])


def _row(nbytes: int, found: dict[str, list[Forecast]]) -> Row:
    best = {
        name: min(((form.tasks.run(nbytes), form) for form in forms), key=lambda pair: pair[0].seconds)
        for name, forms in found.items()
    }
    return Row(nbytes, {n: outcome for n, (outcome, _) in best.items()}, {n: form for n, (_, form) in best.items()})


def _text(base: Table, other: Table | None, collective: Collective, change: str) -> list[str]:
    lines = _curve(base, collective)
    if other is not None:
        lines += ["", f"with {change}:", "", *_curve(other, collective), ""]
        lines += [f"{'bytes':>10}  {'as it is':>10}  {'with it':>10}  {'times':>6}"]
        for one, two in zip(base.rows, other.rows, strict=True):
            ratio = two.seconds / one.seconds
            lines.append(f"{_bytes(one.nbytes):>10}  {_time(one.seconds):>10}  {_time(two.seconds):>10}  {ratio:>6.2f}")
    lines += ["", *_busy(base), *_training(base)]
    if other is not None:
        lines += ["", f"with {change}: ", *_busy(other), *_training(other)]
    return [line.rstrip() for line in lines]


def _curve(table: Table, collective: Collective) -> list[str]:
    cluster, names = table.cluster, list(table.forecasts)
    lines = [f"{collective.label} among {cluster.size} ranks, hosts x ranks: {cluster.text}"]
    for name, forms in table.forecasts.items():
        if (standing := forms[-1].standing) < cluster.size:
            lines.append(f"{name}: {standing} ranks stand for all, which fare alike")
    lines.append("  ".join([f"{'bytes':>10}", *(f"{name:>10}" for name in names), "fastest"]))
    for row in table.rows:
        times = (f"{_time(row.outcomes[name].seconds):>{max(10, len(name))}}" for name in names)
        lines.append("  ".join([f"{_bytes(row.nbytes):>10}", *times, row.best]))
    return lines


def _busy(table: Table) -> list[str]:
    """By kind of link, how busy the busiest and the average one are at the last size."""
    row = table.rows[-1]
    forecast, outcome = row.found
    links = forecast.links(outcome)
    kinds: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for name, part in links:
        kinds[re.split(r" \d| of ", name)[0]].append((name, part))
    lines = [f"{'link':<12}  {'busiest':>7}  {'mean':>5}  which    ({_bytes(row.nbytes)} by {row.best})"]
    for kind, rows in kinds.items():
        mean = sum(part for _, part in rows) / len(rows)
        lines.append(f"{kind:<12}  {rows[0][1]:>7.0%}  {mean:>5.0%}  {rows[0][0]}")
    if not links or links[0][1] < _HALF:
        lines.append("what holds it back: latency; no link is busy half of the time")
    else:
        lines.append(f"what holds it back: {links[0][0]}")
    return lines


def _training(table: Table) -> list[str]:
    """What a step of data-parallel training takes."""
    cluster, plan = table.cluster, table.cluster.training
    if plan is None:
        return []
    found = table.rows[-1].found[0]
    speed = sum(kind.count * kind.ranks * kind.speed for kind in cluster.kinds)
    computes, reduces = plan.samples / speed, found.tasks.run(plan.gradients).seconds
    room = plan.hidden * computes
    step = computes + max(0.0, reduces - room)
    hides, nbytes = 0, 1 << 20
    while nbytes <= 1 << 40 and found.tasks.run(nbytes).seconds <= room:
        hides, nbytes = nbytes, 2 * nbytes
    return [
        "",
        f"a step of {plan.samples} samples computes for {_time(computes)}; {_bytes(plan.gradients)} of gradients take "
        f"{_time(reduces)} by {found.algorithm}, of which up to {_time(room)} are hidden",
        f"so it takes {_time(step)}: {plan.samples / step:.0f} samples a second, {computes / step:.0%} of what the"
        f" ranks compute; all is hidden up to {_bytes(hides) if hides else 'less than 1M'}",
    ]  # fmt: skip


def _document(base: Table, other: Table | None) -> dict[str, Any]:
    def curve(table: Table) -> dict[str, Any]:
        forecast, outcome = table.rows[-1].found
        return {
            "ranks": table.cluster.size,
            "standing": {name: forms[-1].standing for name, forms in table.forecasts.items()},
            "seconds": [
                {"bytes": row.nbytes} | {name: one.seconds for name, one in row.outcomes.items()} for row in table.rows
            ],
            "links": dict(forecast.links(outcome)),
        }

    return {"schema": 1, "cluster": curve(base), "what_if": None if other is None else curve(other)}


def _write_trace(path: Path, table: Table) -> None:
    document = {"displayTimeUnit": "ns", "traceEvents": list(events(*table.rows[-1].found))}
    try:
        path.write_text(json.dumps(document))
    except OSError as error:
        raise ArgumentError(f"--trace {path}: {error.strerror}") from None


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ArgumentError("--plot needs matplotlib: pip install 'hetcoll[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _draw(plot: Any, path: Path, base: Table, other: Table | None, collective: Collective) -> None:
    figure, axes = plot.subplots(figsize=(7, 4.5))
    for table, style, suffix in ((base, "-", ""), (other, "--", ", what if")):
        for name in table.forecasts if table is not None else ():
            rows = table.rows if table is not None else []
            times = [row.outcomes[name].seconds for row in rows]
            axes.plot([max(1, row.nbytes) for row in rows], times, style, marker=".", label=name + suffix)
    axes.set(
        xscale="log", yscale="log", xlabel="bytes", ylabel="seconds", title=f"{collective.label}: {base.cluster.text}"
    )
    axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"--plot {path}: {error}") from None


def _bytes(n: int) -> str:
    for unit, power in reversed(_POWERS.items()):
        if n >= 1 << power and n % (1 << power) == 0:
            return f"{n >> power}{unit}" if unit else f"{n}"
    return str(n)


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}" if seconds < 1000 * scale else f"{seconds / scale:.0f} {unit}"
    return f"{seconds * 1e6:.3g} us"
