"""The `hetcoll` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    from .. import __version__
    from . import perf, run, simulate, topo

    parser = argparse.ArgumentParser(prog="hetcoll", description="Collective communication: measure, start, inspect.")
    parser.add_argument("--version", action="version", version=f"hetcoll {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    about = {
        "perf": (perf.add_arguments, "measure and verify collectives, in nccl-tests' table"),
        "run": (run.add_arguments, "start ranks of a script on this host"),
        "topo": (topo.add_arguments, "show the ranks of a job and how they reach each other"),
        "simulate": (simulate.add_arguments, "print the plans of an algorithm and prove them"),
    }
    for name, (add_arguments, text) in about.items():
        add_arguments(commands.add_parser(name, help=text, description=text))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status. An error that hetcoll raised on purpose is one line on stderr and status 1."""
    from ..errors import HetcollError
    from . import perf, run, simulate, topo

    words = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(words)
    commands = {"perf": perf.main, "run": run.main, "topo": topo.main, "simulate": simulate.main}
    try:
        return commands[args.command](args, words)
    except HetcollError as error:
        print(f"hetcoll {args.command}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
