"""``python -m simulation 10000``: so many schedules, on all processors. ``--seed N`` plays one and tells all of it."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time

from . import product
from .job import KINDS, draw
from .kernel import World, process
from .lanes import campaign


class Told(logging.Handler):
    """What the product logs, with the virtual time."""

    def emit(self, record: logging.LogRecord) -> None:
        World.kernel.tell(process(), f"{record.name}: {record.getMessage()}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="simulation", description=__doc__)
    parser.add_argument("seeds", type=int, nargs="?", default=10000, help="how many (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first one (%(default)s)")
    parser.add_argument("--seed", type=int, help="this one alone, with all that happens")
    parser.add_argument("--only", default="", choices=["", *KINDS], help="with this done in place of what was drawn")
    parser.add_argument("--lanes", type=int, default=os.cpu_count() or 1, help="at a time (%(default)s)")
    parser.add_argument("--most", type=int, default=10, help="end after so many failures (%(default)s)")
    asked = parser.parse_args()
    if asked.seed is not None:
        return _show(asked.seed, asked.only)
    failed = decisions = done = 0
    start = time.monotonic()
    work = [(seed, asked.only) for seed in range(asked.first, asked.first + asked.seeds)]
    for result in campaign(work, asked.lanes):
        done, decisions = done + 1, decisions + result.decisions
        if result.problems:
            failed += 1
            print(draw(result.seed, asked.only), *result.problems, "", sep="\n", flush=True)
            if failed == asked.most:
                break
        if done % 5000 == 0:
            print(f"{done} of {asked.seeds} played, {failed} failed", flush=True)
    seconds = time.monotonic() - start
    print(f"{done} schedules, {failed} failed; {decisions} decisions; {done / seconds:.1f} schedules a second")
    return failed > 0


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
