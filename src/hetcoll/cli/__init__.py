"""The `hetcoll` command."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

COMMANDS = {
    "perf": "measure and verify collectives, in nccl-tests' table",
    "run": "start ranks of a program, here or on several hosts",
    "deploy": "print the manifest of a job for a Kubernetes cluster",
    "digest": "name the first call in which two runs differ",
    "doctor": "say what this machine lacks, and what to do about it",
    "selftest": "check all collectives on the devices of this machine",
    "topo": "show the ranks of a job and how they reach each other",
    "top": "show what a running job does, and whom it waits for",
    "explain": "say how a call of some size would run, and why",
    "tune": "measure this machine, so that the fastest algorithms are chosen",
    "simulate": "prove an algorithm's plans, or predict their time in a cluster",
}
"""Each subcommand is a module here, with its `add_arguments` and its `main`."""


def build_parser(asked: str) -> argparse.ArgumentParser:
    """The parser of all subcommands; `subcommand` and `main` of its result say which one and what runs it, `refuse`
    ends the program with that one's usage. Only the one that is `asked` for is loaded: all take twice as long."""
    from .. import __version__

    parser = argparse.ArgumentParser(prog="hetcoll", description="Collective communication: measure, start, inspect.")
    parser.add_argument("--version", action="version", version=f"hetcoll {__version__}")
    commands = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        subparser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == asked:
            module = importlib.import_module(f".{name}", __package__)
            module.add_arguments(subparser)
            subparser.set_defaults(main=module.main, refuse=subparser.error)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status. An error that hetcoll raised on purpose is one line on stderr and status 1.
    Where nobody reads stdout any more, as with ``| head``, it ends with 141 and without a word."""
    from .. import HetcollError

    words = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser(next((word for word in words if not word.startswith("-")), ""))
    if not words:
        parser.print_help(sys.stderr)
        return 2
    args, unknown = parser.parse_known_args(words)
    if unknown:
        args.refuse(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        status: int = args.main(args, words)
        sys.stdout.flush()
    except HetcollError as error:
        print(f"hetcoll {args.subcommand}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at its end
        return 128 + signal.SIGPIPE
    return status
