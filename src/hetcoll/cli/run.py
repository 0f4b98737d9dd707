"""`hetcoll run`: start ranks of a program, on this host or on several."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from .. import ArgumentError
from ..config.env import REPLACEABLE, forwarded_variables
from ..tools import hosts, launch
from .in_job import at_least

_MASTER_PORT = 29500  # torchrun's default, where this command runs on each host


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How many ranks of what. Everything after the script belongs to it."""
    parser.usage = "hetcoll run [OPTION ...] [--] (SCRIPT.py | PROGRAM | -m MODULE) [ARGUMENT ...]"
    parser.add_argument(
        "-n", "--ranks", default="2", metavar="N",
        help="number of ranks on this host, or on each of several (default 2); with --node-rank also one for each "
        "node: 8,8,4",
    )  # fmt: skip
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
        "--respawn", type=int, default=0, metavar="N",
        help="as --keep-going, and start a rank that failed again, up to N times in all, which the others take in by "
        "grow() (default 0)",
    )  # fmt: skip
    parser.add_argument(
        "--restart", type=int, default=0, metavar="N", help="start a job that failed anew, up to N times (default 0)"
    )
    ssh = parser.add_argument_group("on several hosts, from here")
    ssh.add_argument("--hosts", metavar="HOST[:N],...", help="start N ranks on each by ssh; localhost without it")
    ssh.add_argument("--hostfile", type=Path, metavar="FILE", help="the same from a file: HOST, HOST:N or HOST slots=N")
    ssh.add_argument("--ssh", default=launch.SSH, metavar="COMMAND", help=f"default: {launch.SSH}")
    ssh.add_argument("--python", default=sys.executable, metavar="PATH", help="the Python with hetcoll on the hosts")
    ssh.add_argument(
        "-x", dest="exported", action="append", default=[], metavar="NAME[=VALUE]",
        help="a variable for all ranks; HETCOLL_* and what they find on their host they get anyway",
    )  # fmt: skip
    hand = parser.add_argument_group("on several hosts, with this command on each")
    hand.add_argument("--nnodes", type=at_least(1), metavar="N", help="number of hosts")
    hand.add_argument("--node-rank", type=int, metavar="K", help="which of them this is, from 0")
    parser.add_argument(
        "--master", metavar="HOST[:PORT]",
        help="where rank 0 listens; with --hosts the name by which the others reach the first host",
    )  # fmt: skip
    parser.add_argument("--agent", action="store_true", help=argparse.SUPPRESS)  # what --hosts starts on each
    parser.add_argument(
        "-m", "--module", nargs=argparse.REMAINDER,
        help="run a Python module instead of a script; what follows it is its own",
    )  # fmt: skip
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the script or program, and its arguments")


def main(args: argparse.Namespace, _argv: Sequence[str]) -> int:
    """Run the ranks to their end; the job's exit status, that of the rank that failed first."""
    if args.agent:
        return launch.serve(_first_line())
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if args.module is not None:
        if not args.module:
            raise ArgumentError("-m: wanted a module, got nothing")
        command = ["-m", *args.module, *args.command]
    env = forwarded_variables(args.exported)
    if args.torch:
        env["HETCOLL_REPLACE"] = ",".join(REPLACEABLE)
    options = launch.Options(
        not args.no_prefix, args.grace, not args.no_bind, args.keep_going, args.respawn, args.restart
    )
    if args.hosts is not None or args.hostfile is not None:
        return _by_ssh(args, command, options, env)
    counts, node = _counts(args), None
    if args.node_rank is not None:
        host, port = _master(args.master)
        node = launch.Node(args.node_rank, counts, (host, port or _MASTER_PORT))
    elif args.nnodes or args.master is not None or len(counts) > 1:
        raise ArgumentError("--nnodes, --master and numbers for several nodes: wanted --node-rank or --hosts as well")
    return launch.run(command, counts[node.index if node else 0], env=env, node=node, **vars(options))


def _by_ssh(args: argparse.Namespace, command: list[str], options: launch.Options, env: dict[str, str]) -> int:
    if None not in (args.hosts, args.hostfile) or args.node_rank is not None or args.nnodes:
        raise ArgumentError("wanted one of --hosts, --hostfile and --node-rank, got several")
    (each,) = counts if len(counts := _counts(args)) == 1 else (0,)
    if not each:
        raise ArgumentError(f"-n: wanted one number of ranks for each host, got {args.ranks!r}: name others in --hosts")
    where = hosts.read_hosts(args.hosts, each) if args.hostfile is None else hosts.read_hostfile(args.hostfile, each)
    first = where[0][0].rpartition("@")[2]  # ssh takes USER@HOST
    master = (first, 0) if args.master is None else _master(args.master)
    return launch.run_hosts(command, where, options, env=env, master=master, ssh=args.ssh, python=args.python)


def _counts(args: argparse.Namespace) -> tuple[int, ...]:
    """The ranks of each node, of one where there are no others."""
    try:
        counts = tuple(int(part) for part in args.ranks.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise ArgumentError(f"-n: wanted a number of ranks, 1 or more, got {args.ranks!r}")
    if args.node_rank is None:
        return counts
    counts = counts * args.nnodes if args.nnodes and len(counts) == 1 else counts
    if args.nnodes and len(counts) != args.nnodes:
        raise ArgumentError(f"-n: wanted {args.nnodes} numbers, as --nnodes says, got {args.ranks!r}")
    if not 0 <= args.node_rank < len(counts):
        raise ArgumentError(f"--node-rank: wanted 0 to {len(counts) - 1}, got {args.node_rank}")
    return counts


def _master(text: str | None) -> tuple[str, int]:
    """``HOST``, ``HOST:PORT`` or ``[ADDRESS]:PORT``; port 0 where there is none."""
    found = re.fullmatch(r"(\[[^\[\]]+\]|[^\[\]:]+)(?::(\d+))?", text or "")
    port = int(found[2] or 0) if found else -1
    if not found or not 0 <= port < 1 << 16:
        raise ArgumentError(f"--master: wanted the host of rank 0, such as gpu07 or gpu07:{_MASTER_PORT}, got {text!r}")
    return found[1].strip("[]"), port


def _first_line() -> bytes:
    """Stdin's first line, and no byte more."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            raise ArgumentError("--agent: wanted a task from the launcher, got nothing")
        line += byte
    return line
