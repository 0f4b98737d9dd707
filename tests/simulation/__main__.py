"""``python -m simulation 10000``: so many schedules, on all processors. ``--seed N`` plays one and tells all of it."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from itertools import count, islice

from . import product
from .job import KINDS, draw
from .kernel import World, process
from .lanes import campaign

_EVERY = 60.0  # seconds: how often it tells how far it is


class Told(logging.Handler):
    """What the product logs, with the virtual time."""

    def emit(self, record: logging.LogRecord) -> None:
        World.kernel.tell(process(), f"{record.name}: {record.getMessage()}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="simulation", description=__doc__)
    parser.add_argument("seeds", type=int, nargs="?", help="how many (10000, or what can be played in --seconds)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after so many")
    parser.add_argument("--first", type=int, default=0, help="the first one (%(default)s)")
    parser.add_argument("--seed", type=int, help="this one alone, with all that happens")
    parser.add_argument("--only", default="", choices=["", *KINDS], help="with this done in place of what was drawn")
    processors = len(os.sched_getaffinity(0))
    parser.add_argument("--lanes", type=int, default=processors, help="at a time (%(default)s)")
    parser.add_argument("--most", type=int, default=100, help="end after so many failures (%(default)s)")
    asked = parser.parse_args()
    if asked.seed is not None:
        return _show(asked.seed, asked.only)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # to tell what was found
    most = asked.seeds or (10000 if asked.seconds == float("inf") else None)
    return _play(asked, most)


def _play(asked: argparse.Namespace, most: int | None) -> int:
    failed: list[str] = []
    done = decisions = 0
    start = told = time.monotonic()
    try:
        work = ((seed, asked.only) for seed in islice(count(asked.first), most))
        for result in campaign(work, asked.lanes, asked.seconds):
            done, decisions = done + 1, decisions + result.decisions
            if result.problems:
                job = draw(result.seed, asked.only)
                failed.append(f"--seed {job.seed}{f' --only {asked.only}' if asked.only else ''} ({job.kind})")
                print(job, *result.problems, "", sep="\n", flush=True)
                if len(failed) == asked.most:
                    break
            if time.monotonic() > told + _EVERY:
                told = time.monotonic()
                print(f"{told - start:.0f} s: {done} played, {len(failed)} failed", flush=True)
    except KeyboardInterrupt:
        print("interrupted")
    seconds = time.monotonic() - start
    print(*failed, sep="\n")
    spelt = f"{done} schedules from {asked.first} on, {len(failed)} failed; {decisions} decisions"
    print(f"{spelt}; {seconds:.0f} s, {done / seconds:.1f} schedules a second in {asked.lanes} lanes", flush=True)
    return len(failed) > 0


def _show(seed: int, only: str) -> int:
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "simulation", *sys.argv[1:]])
    product.load()
    from .play import play

    log = logging.getLogger("hetcoll")
    log.setLevel(logging.DEBUG)
    log.addHandler(Told())
    print(draw(seed, only))
    played = play(seed, only, print)
    print(*played.problems, sep="\n")
    return bool(played.problems)


if __name__ == "__main__":
    sys.exit(main())
