"""The `hetcoll` command."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands; `subcommand` and `main` of its result say which one and what runs it, `refuse`
    ends the program with that one's usage."""
    from .. import __version__
    from . import deploy, digest, doctor, explain, perf, run, selftest, simulate, top, topo, tune

    parser = argparse.ArgumentParser(prog="hetcoll", description="Collective communication: measure, start, inspect.")
    parser.add_argument("--version", action="version", version=f"hetcoll {__version__}")
    commands = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    about = {
        "perf": (perf.add_arguments, perf.main, "measure and verify collectives, in nccl-tests' table"),
        "run": (run.add_arguments, run.main, "start ranks of a program, here or on several hosts"),
        "deploy": (deploy.add_arguments, deploy.main, "print the manifest of a job for a Kubernetes cluster"),
        "digest": (digest.add_arguments, digest.main, "name the first call in which two runs differ"),
        "doctor": (doctor.add_arguments, doctor.main, "say what this machine lacks, and what to do about it"),
        "selftest": (selftest.add_arguments, selftest.main, "check all collectives on the devices of this machine"),
        "topo": (topo.add_arguments, topo.main, "show the ranks of a job and how they reach each other"),
        "top": (top.add_arguments, top.main, "show what a running job does, and whom it waits for"),
        "explain": (explain.add_arguments, explain.main, "say how a call of some size would run, and why"),
        "tune": (tune.add_arguments, tune.main, "measure this machine, so that the fastest algorithms are chosen"),
        "simulate": (
            simulate.add_arguments,
            simulate.main,
            "prove an algorithm's plans, or predict their time in a cluster",
        ),
    }
    for name, (add_arguments, main_of, text) in about.items():
        subparser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        add_arguments(subparser)
        subparser.set_defaults(main=main_of, refuse=subparser.error)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status. An error that hetcoll raised on purpose is one line on stderr and status 1.
    Where nobody reads stdout any more, as with ``| head``, it ends with 141 and without a word."""
    from .. import HetcollError

    words = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
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
