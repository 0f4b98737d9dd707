"""Run PyTorch's own tests of a distributed backend (torch.testing._internal.distributed.distributed_test) on hetcoll.

    python tests/frameworks/torch_suite.py [--write-docs] [--ranks 3] [--backend nccl] [--save FILE] [PART OF NAME ...]

They are Gloo's tests: the program asks for "gloo" and gets hetcoll (HETCOLL_REPLACE); or, on a machine with a GPU a
rank, NCCL's. Needs PyTorch and `expecttest`.
What the tests want to see in the profiler's events is left out.

Several teams of ranks run tests side by side, and keep their processes from test to test (torch_teams.py), since
loading PyTorch takes longer than most tests. Results are written as they come, so that a run that is cut off still
tells; `--limit` ends one after so many seconds, and says what was not run.
"""

from __future__ import annotations

import argparse
import collections
import json
import queue
import re
import sys
import threading
import time
import unittest
from pathlib import Path

from torch_teams import Found, Teams, tests_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/measurements/torch-suite.md"
SECONDS = {"gloo": 100.0, "nccl": 60.0}  # for one test
MANY = 8  # ranks for the tests that want so many


class Results:
    """What came of each test, printed and saved as it comes."""

    def __init__(self, save: Path | None) -> None:
        self.found: dict[str, Found] = {}
        self._lock = threading.Lock()
        self._file = save.open("w", buffering=1) if save else None

    def add(self, name: str, found: Found, seconds: float) -> None:
        with self._lock:
            self.found[name] = found
            print(f"{seconds:6.1f} s {found.state:7} {name} {last_words(found.reason)}", flush=True)
            if self._file:
                self._file.write(json.dumps([name, found.state, found.reason, round(seconds, 2)]) + "\n")

    def summary(self) -> dict[str, int]:
        return dict(collections.Counter(each.state for each in self.found.values()))


def last_words(reason: str) -> str:
    """What a trace ends with, or the only line of a reason."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", reason)  # colours
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or [""])[-1]


def run(
    names: list[str], ranks: int, backend: str, teams: int, deadline: float, results: Results, *, ours: bool = True
) -> None:
    """All of `names`, by so many teams; what is left at the deadline is not run. Not `ours`: on the backend itself."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        waiting.put(name)

    def work(made: Teams) -> None:
        with made.team() as team:
            while time.monotonic() < deadline:
                try:
                    name = waiting.get_nowait()
                except queue.Empty:
                    return
                start = time.monotonic()
                allowed = min(SECONDS[backend], max(1.0, deadline - start))
                found = team.run(name, allowed)
                if not found.late or allowed == SECONDS[backend]:
                    results.add(name, found, time.monotonic() - start)

    with Teams(ranks, backend, teams, ours) as made:
        threads = [threading.Thread(target=work, args=(made,)) for _ in range(teams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="run only tests whose names contain one of these")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--backend", choices=tuple(SECONDS), default="gloo", help="what the tests believe to run on")
    parser.add_argument("--teams", type=int, default=1, help="of ranks that run tests at the same time")
    parser.add_argument("--peer", type=float, help="run what failed on the backend itself, too, for so many seconds")
    parser.add_argument("--after", type=Path, help="what --save wrote: what passed in that run is not run again")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for all of it")
    parser.add_argument("--write-docs", action="store_true", help="write the table of docs/measurements/torch-suite.md")
    parser.add_argument("--save", type=Path, help="also write the results to this file, a line of JSON each")
    args = parser.parse_args()
    deadline = time.monotonic() + args.limit
    names = [name for name in unittest.TestLoader().getTestCaseNames(tests_of(args.backend, args.ranks, None, True))
             if not args.names or any(part in name for part in args.names)]  # fmt: skip
    earlier = read(args.after) if args.after else {}
    names = [name for name in names if name not in earlier]
    results = Results(args.save)
    run(names, args.ranks, args.backend, args.teams, deadline, results)
    small = [name for name, found in results.found.items() if "small world size" in found.reason]
    if args.backend == "gloo" and small:
        run(small, MANY, args.backend, 1, deadline, results)
    late = [name for name in names if name not in results.found]
    theirs = Results(None)
    if args.peer:
        print(f"on {args.backend} itself:", flush=True)
        failed = [name for name, found in results.found.items() if found.state == "failed"]
        run(failed, args.ranks, args.backend, args.teams, time.monotonic() + args.peer, theirs, ours=False)
    print(results.summary(), f"{len(late)} not run: {' '.join(late)}" if late else "")
    if args.write_docs:
        write(earlier | results.found, theirs.found, len(late), len(earlier), args.ranks, args.backend)
    return int(bool(results.summary().get("failed")))


def read(file: Path) -> dict[str, Found]:
    """What passed in the run that wrote this file."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {name: Found(state) for name, state, _, _ in rows if state == "passed"}


def write(found: dict[str, Found], theirs: dict[str, Found], late: int, earlier: int, ranks: int, backend: str) -> None:
    """The table between this backend's marks in the page. `theirs` is what the backend itself did."""
    import torch

    states = collections.Counter(each.state for each in found.values())
    reasons: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for name, each in sorted(found.items()):
        if each.state != "passed":
            also = f" ({backend} itself fails, too)" if name in theirs and theirs[name].state == "failed" else ""
            reasons[each.state, last_words(each.reason)[:160].replace("|", "/") + also].append(name)
    on = f"CPU tensors on {ranks} ranks, or {MANY} where a test wants them"
    if backend == "nccl":
        on = f"{ranks} ranks that have a GPU each ({torch.cuda.get_device_name(0)})"
    counts = [f"{states[state]} {state}" for state in ("passed", "skipped", "failed")]
    lines = [
        f"Of {len(found) + late} tests of torch {torch.__version__} with {on}: "
        + ", ".join([*counts, *([f"{late} not run"] if late else [])]) + "."
        + (f" {earlier} of those that passed did so in an earlier run and were not run again." if earlier else ""),
        "", "| Not run or failed, and why | Tests |", "| --- | --- |",
    ]  # fmt: skip
    for (state, text), names in sorted(reasons.items(), key=lambda pair: (pair[0][0], -len(pair[1]))):
        shown = ", ".join(f"`{name.removeprefix('test_')}`" for name in names[:4])
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        lines.append(f"| {state}: {text} | {shown}{more} |")
    begin, end = (f"<!-- suite of {backend} {which} -->" for which in ("begins", "ends"))
    before, rest = PAGE.read_text().split(begin)
    PAGE.write_text(f"{before}{begin}\n\n" + "\n".join(lines) + f"\n\n{end}{rest.split(end)[1]}")


if __name__ == "__main__":
    sys.exit(main())
