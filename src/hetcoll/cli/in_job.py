"""What commands have alike that look at a job: of the launcher that they are under, or of one that they start here."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .. import Communicator


def at_least(low: int) -> Callable[[str], int]:
    """What reads an option's whole number, which is `low` or more."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise argparse.ArgumentTypeError(f"wanted a whole number from {low}, got {text!r}")
        return value

    return parse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How many ranks to start, where no launcher did."""
    parser.add_argument("-n", "--ranks", type=at_least(1), default=2, help="ranks to start on this host (default 2)")
    parser.add_argument("--transport", choices=("auto", "shm", "tcp", "verbs"), help="how ranks reach each other")


def tell(args: argparse.Namespace, argv: Sequence[str], text: Callable[[Communicator], str]) -> int:
    """Rank 0 prints the `text` of the job; where there is none yet, `argv` is run again in one of so many ranks."""
    from ..config.env import environment

    if args.transport is not None:
        os.environ["HETCOLL_TRANSPORT"] = args.transport  # before anyone reads it; the ranks inherit it
    if environment().launch.launcher == "single" and args.ranks > 1:
        from ..tools import launch

        return launch.run([sys.executable, "-m", "hetcoll", *argv], args.ranks, prefix=False)
    from .. import init

    with init() as comm:
        if comm.rank == 0:
            print(text(comm), flush=True)
        comm.barrier()
    return 0
