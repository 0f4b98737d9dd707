"""`hetcoll top`: what a running job does, looked at from outside."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from .. import ArgumentError, CommunicationError, InitError
from ..config.env import configuration
from ..tools.observing import observe
from ..tools.rates import RankRates, Rates, Slowest, Watch

_PATIENCE = 1.0  # seconds that a rank has to answer, at most half of the interval
_LEAST, _MOST = 0.1, 3600.0  # seconds of an interval
_HOME = "\x1b[H\x1b[J"
_EDGES = 8
_NONE = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which job, how often, and the form of the answer."""
    parser.add_argument(
        "job", nargs="?", metavar="JOB",
        help="HOST:PORT of rank 0 (MASTER_ADDR:MASTER_PORT), or the number of rank 0's process or its launcher's on "
        "this host; without it the one job of yours whose rank 0 is on this host",
    )  # fmt: skip
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="SECONDS", help="time between two looks (default 2)"
    )
    parser.add_argument("--once", action="store_true", help="look at one interval, and end")
    parser.add_argument(
        "--json", metavar="FILE", help="write a line of JSON for each look to this file, - for stdout, in place of text"
    )
    parser.epilog = (
        "The job needs no preparation, and its calls cost nothing more. `inside` is the part of the last minute that a "
        "rank spent in collectives: the slowest spent least, and the others waited for it there. A job at HOST:PORT "
        "wants its HETCOLL_SECRET here, too."
    )


def main(args: argparse.Namespace, _argv: Sequence[str]) -> int:
    """Look until the job ends, or Ctrl-C; 1 where the job is lost."""
    if not _LEAST <= args.interval <= _MOST:
        raise ArgumentError(f"--interval: wanted {_LEAST} to {_MOST:g} seconds, got {args.interval:g}")
    with contextlib.suppress(KeyboardInterrupt), _output(args.json) as out:
        return _look(args, out)
    return 0


@contextlib.contextmanager
def _output(path: str | None) -> Iterator[TextIO]:
    if path in (None, "-"):
        yield sys.stdout
        return
    try:
        file = Path(str(path)).open("w")  # noqa: SIM115
    except OSError as error:
        raise ArgumentError(f"--json: wanted a file that can be written, got {path!r}: {error.strerror}") from error
    with file:
        yield file


def _look(args: argparse.Namespace, out: TextIO) -> int:
    observer, watch, problem = observe(args.job, configuration()), Watch(), ""
    patience = min(_PATIENCE, args.interval / 2)
    due = time.monotonic()
    for number in range(sys.maxsize):
        try:
            watch.add(observer.activity(patience))
            problem = ""
        except InitError as error:  # it is there, and says nothing
            problem = f"{error}: the process of rank 0 is stopped, cut off or busy"
        except CommunicationError as error:
            if "has ended" in str(error):
                if args.json is None:
                    print("the job has ended", file=out, flush=True)
                return 0
            try:
                observer.follow()
            except InitError:
                raise error from None
            continue
        if number > 0:
            _show(args, watch.rates(), problem, out)
            if args.once:
                return int(bool(problem))
        due = max(due + args.interval, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
    return 0


def _show(args: argparse.Namespace, rates: Rates, problem: str, out: TextIO) -> None:
    if args.json is not None:
        line = {"time": time.time(), "problem": problem, **rates.document()}
        print(json.dumps(line), file=out, flush=True)
        return
    rows = columns = 0
    if out.isatty():
        columns, lines = shutil.get_terminal_size()
        if not args.once:
            out.write(_HOME)
            rows = max(1, lines - _EDGES - 7)
    print(text(rates, problem, rows, columns), file=out, flush=True)
    if not out.isatty() and not args.once:
        print(file=out, flush=True)


def text(rates: Rates, problem: str = "", most: int = 0, columns: int = 0) -> str:
    """A look for people; `most` ranks of it, 0: all. Those that stand out come first then. Lines have up to `columns`,
    0: as many as they take."""
    ranks, left = rates.ranks, 0
    if most and len(ranks) > most:
        left = len(ranks) - most
        ranks = sorted(ranks, key=lambda rank: (not rank.silent, not rank.failed, _order(rank)))[:most]
    lines = [
        f"{len(rates.ranks)} ranks on {rates.hosts} host{'s' * (rates.hosts != 1)}  {rates.program}"[: columns or None],
        f"{_number(rates.collectives)} collectives/s, {_number(rates.messages)} messages/s, {_bytes(rates.sent)}/s",
        _spell_slowest(rates.slowest),
        *([f"! {problem}"] if problem else []),
        "",
        f"{'rank':>6} {'host':<16} {'pid':>8} {'coll/s':>8} {'msg/s':>8} {'sent/s':>9} {'inside':>6}  state",
        *(_line(rank, columns) for rank in ranks),
        *([f"       and {left} more"] if left else []),
        "",
        *(["edges: none that the host carries"] if not rates.edges else ["  edge, bytes a second"]),
        *(f"  {edge.source:>5} -> {edge.destination:<5} {_bytes(edge.sent):>9}/s" for edge in rates.edges[:_EDGES]),
        *([f"       and {len(rates.edges) - _EDGES} more"] if len(rates.edges) > _EDGES else []),
    ]
    return "\n".join(lines)


def _order(rank: RankRates) -> float:
    return 2.0 if rank.inside is None else rank.inside


def _line(rank: RankRates, columns: int) -> str:
    inside = _NONE if rank.inside is None else f"{100 * rank.inside:.0f} %"
    head = (
        f"{rank.rank:>6} {rank.host[:16] or '?':<16} {rank.pid or '?':>8} {_number(rank.collectives):>8} "
        f"{_number(rank.messages):>8} {_bytes(rank.sent):>9} {inside:>6}  "
    )
    state = rank.state
    if columns and len(head + state) > columns:
        what, _, site = state.rpartition(", ")  # the program's line is what nobody can guess
        kept = columns - len(f"{head}..., {site}")
        state = f"{what[:kept]}..., {site}" if what and kept > 0 else site
    return (head + state)[: columns or None].rstrip()


def _spell_slowest(slowest: Slowest | None) -> str:
    if slowest is None:
        return "slowest: none, no rank is later than the others"
    head = f"slowest of the last {slowest.window:.0f} s: rank {slowest.rank}"
    if slowest.others is None or slowest.own is None:
        return f"{head}, {slowest.behind} collectives behind the others"
    return f"{head}: the others waited {slowest.others:.2f} s in collectives, it {slowest.own:.2f} s"


def _number(value: float | None) -> str:
    if value is None:
        return _NONE
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}" if value < 1e3 * limit else f"{value / limit:.0f}{unit}"
    return f"{value:.3g}"


def _bytes(value: float | None) -> str:
    """10**9 bytes a GB, as elsewhere."""
    if value is None:
        return _NONE
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= limit:
            return f"{value / limit:.3g} {unit}" if value < 1e3 * limit else f"{value / limit:.0f} {unit}"
    return f"{value:.3g} B"
