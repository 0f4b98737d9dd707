"""`hetcoll run`: start ranks of a program on this host."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..config.env import REPLACEABLE
from ..tools import launch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How many ranks of what. Everything after the script belongs to it."""
    parser.usage = (
        "hetcoll run [-n N] [--torch] [--no-prefix] [--no-bind] [--grace SECONDS] [--keep-going] [--restart N] [--] "
        "(SCRIPT.py | PROGRAM | -m MODULE) [ARGUMENT ...]"
    )
    parser.add_argument("-n", "--ranks", type=int, default=2, metavar="N", help="number of ranks (default 2)")
    parser.add_argument(
        "--torch",
        action="store_true",
        help="what asks PyTorch for nccl or gloo gets hetcoll: HETCOLL_REPLACE=nccl,gloo",
    )
    parser.add_argument("--no-prefix", action="store_true", help="do not begin lines with the rank that printed them")
    parser.add_argument(
        "--no-bind", action="store_true", help="do not bind each rank to a core where they outnumber the cores"
    )
    parser.add_argument(
        "--grace", type=float, default=5.0, metavar="SECONDS",
        help="time that ranks have to end when one has failed, before they are killed (default 5)",
    )  # fmt: skip
    parser.add_argument(
        "--keep-going",
        action="store_true",
        help="a rank that fails does not end the others, which can call shrink(); the exit status is rank 0's",
    )
    parser.add_argument(
        "--restart", type=int, default=0, metavar="N", help="start a job that failed anew, up to N times (default 0)"
    )
    parser.add_argument("-m", "--module", help="run a Python module instead of a script")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the script or program, and its arguments")


def main(args: argparse.Namespace, _argv: Sequence[str]) -> int:
    """Run the ranks to their end; the job's exit status, that of the rank that failed first."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if args.module:
        command = [sys.executable, "-m", args.module, *args.command]
    env = {"HETCOLL_REPLACE": ",".join(REPLACEABLE)} if args.torch else {}
    return launch.run(
        command,
        args.ranks,
        env=env,
        prefix=not args.no_prefix,
        grace=args.grace,
        bind=not args.no_bind,
        keep_going=args.keep_going,
        restarts=args.restart,
    )
