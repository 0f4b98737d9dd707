"""``python -m simulation 10000``: so many schedules, on all processors. ``--seed N`` plays one and tells all of it."""

from __future__ import annotations

import argparse
import logging
import os
import sys

from . import product
from .kernel import World, process


class Told(logging.Handler):
    """What the product logs, with the virtual time."""

    def emit(self, record: logging.LogRecord) -> None:
        World.kernel.tell(process(), f"{record.name}: {record.getMessage()}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="simulation", description=__doc__)
    parser.add_argument("seeds", type=int, nargs="?", default=1000, help="how many (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first one (%(default)s)")
    parser.add_argument("--seed", type=int, help="this one alone, with all that happens")
    parser.add_argument("--only", default="", help="with this done to them in place of what was drawn")
    asked = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "simulation", *sys.argv[1:]])
    product.load()
    from .job import draw
    from .play import play

    if asked.seed is not None:
        log = logging.getLogger("hetcoll")
        log.setLevel(logging.DEBUG)
        log.addHandler(Told())
        print(draw(asked.seed, asked.only))
        played = play(asked.seed, asked.only, print)
        print(*played.problems, sep="\n")
        return bool(played.problems)
    logging.getLogger("hetcoll").setLevel(logging.CRITICAL)
    import time

    t0, d, failed = time.process_time(), 0, 0
    for seed in range(asked.first, asked.first + asked.seeds):
        played = play(seed, asked.only)
        d += played.decisions
        if played.problems:
            failed += 1
            print(draw(seed, asked.only).kind, seed, *[p[-700:] for p in played.problems[:3]], sep="\n   ", flush=True)
    t = time.process_time() - t0
    print(f"{asked.seeds} played, {failed} failed, {d} decisions, {asked.seeds / t:.1f}/s, {d / t:.0f}/s")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
