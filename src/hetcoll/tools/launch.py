"""`hetcoll run`: where the ranks of a job start, on this host or on several, and what each is told."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shlex
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import BinaryIO
from zlib import crc32

from ..config.env import child_environment
from ..config.launchers import NAMED_PORTS
from ..config.version import __version__
from ..errors import ArgumentError
from .processes import Command, Job, Printer

SSH = "ssh -o BatchMode=yes -o ServerAliveInterval=15"
_MOST = 1 << 16  # ranks of a host: no host has so many processes to spare, and a list of more may not fit its memory
_AGENT_GRACE = 5.0  # seconds beyond the ranks' own that a launcher on another host has to end


@dataclass(frozen=True)
class Options:
    """How ranks run, wherever they do; `run` says what each means."""

    prefix: bool = True
    grace: float = 5.0
    bind: bool = True
    keep_going: bool = False
    respawns: int = 0
    restarts: int = 0


@dataclass(frozen=True)
class Node:
    """The part of a job that one launcher starts: as node `index`, of the nodes whose numbers of ranks are `counts`.

    Rank 0 listens at `master` (host, port).
    """

    index: int
    counts: tuple[int, ...]
    master: tuple[str, int]

    @property
    def first(self) -> int:
        """The rank of the node's first process."""
        return sum(self.counts[: self.index])


def run(
    command: Sequence[str],
    nproc: int,
    *,
    env: Mapping[str, str] | None = None,
    node: Node | None = None,
    prefix: bool = True,
    grace: float = 5.0,
    bind: bool = True,
    keep_going: bool = False,
    respawns: int = 0,
    restarts: int = 0,
    until_stdin_ends: bool = False,
    stdout: BinaryIO | None = None,
    stderr: BinaryIO | None = None,
) -> int:
    """Run `command` as ranks 0 to `nproc` - 1 and return the job's exit code.

    A command that begins with ``-m`` or a word that ends in ``.py`` is run by this Python. Ranks get RANK, WORLD_SIZE,
    LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, HETCOLL_JOB and a random HETCOLL_SECRET on top of our
    environment and `env`; their stdin is empty. Where there are more ranks than cores that we may use, each is bound to
    one of them, by turns, unless `bind` is False: left to the kernel, three of four may share one of two for a second.
    Each is a process group of our session, not a session: Linux shares cores out among sessions
    (sched_autogroup_enabled), and a rank that has one to itself gives nothing away by sched_yield(2). Output goes to
    `stdout` and `stderr` (ours by default) in whole lines, with ``[rank]`` before each where `prefix`.

    With `node` these are the ranks of that node of a larger job. What its nodes have in common is then the caller's:
    HETCOLL_JOB and HETCOLL_SECRET are left as they are. `until_stdin_ends` ends the job with our stdin, as SIGTERM
    does.

    The first rank that fails ends the others: SIGTERM to their process groups, and SIGKILL after `grace` seconds. Its
    last lines are shown last and its code is returned, 128 + n for signal n. SIGINT, SIGTERM and SIGHUP to us end the
    job in the same way (130, 143, 129), a second one at once; but not a SIGHUP that we ignore. When we are killed, a
    watchdog process kills the ranks. What the ranks started and left running is killed when they have ended. 126 or
    127: the command could not be started. 141: nobody reads our output any more, or there is no room for it.

    With `keep_going` a rank that fails is told of at once and does not end the others, so that they can go on by
    `Communicator.shrink`. The job's code is then rank 0's.

    So it is with `respawns`. A rank that fails is then started again, up to so many times in all and as long as rank 0
    has not come to its end, with HETCOLL_JOIN=1: `hetcoll.init` makes it a newcomer, which the others take in by
    `Communicator.grow`. With several nodes each counts its own.

    A job that failed is started anew up to `restarts` times, all of its ranks, with another port and secret of ours.
    Not one that a signal to us ended, or whose command could not be started.
    """
    if nproc < 1:
        raise ArgumentError(f"nproc: wanted 1 or more, got {nproc}")
    if nproc > _MOST:
        raise ArgumentError(f"-n: wanted at most {_MOST} ranks on a host, got {nproc}")
    if not command:
        raise ArgumentError("command: wanted a program or a script, got nothing")
    by_python = command[0] == "-m" or command[0].endswith(".py")
    words = [sys.executable, *command] if by_python else list(command)
    cores = sorted(os.sched_getaffinity(0))
    bound = bind and nproc > len(cores)

    held = contextlib.ExitStack()

    def commands(name: str) -> list[Command]:
        held.close()  # of the attempt before
        where = node
        if where is None:
            where = Node(0, (nproc,), ("127.0.0.1", held.enter_context(_reserve_port()).getsockname()[1]))
        common = _common(name, dict(env or {}), where, node is None)
        return [_rank(words, common, number, node, prefix, cores if bound else []) for number in range(nproc)]

    options = Options(prefix, grace, bind, keep_going, respawns, restarts)
    with held:
        return _attempts(commands, options, stdout, stderr, until_stdin_ends=until_stdin_ends)


def run_hosts(
    command: Sequence[str],
    hosts: Sequence[tuple[str, int]],
    options: Options,
    *,
    master: tuple[str, int],
    env: Mapping[str, str] | None = None,
    ssh: str = SSH,
    python: str = sys.executable,
) -> int:
    """Run `command` on `hosts`, (name, number of ranks) each, in their order; the job's exit code, as of `run`.

    On each a launcher of its own is started by ``ssh HOST`` (directly where the name is localhost), with `python`, in
    our working directory. It is told everything by its stdin, the job's secret too, and ends its ranks when that ends:
    also where we are killed, or the connection is lost. Its ranks get the environment that it finds there, and `env`.
    Rank 0 listens at `master` (host, port), port 0: at one of ours.
    """
    if not command:
        raise ArgumentError("command: wanted a program or a script, got nothing")
    try:
        reach = shlex.split(ssh)
    except ValueError as error:  # of quotes
        raise ArgumentError(f"--ssh: wanted a command, got {ssh!r}: {error}") from error
    if not reach:
        raise ArgumentError("--ssh: wanted a command, got nothing")
    names = [host for host, _ in hosts]
    address, port = master
    if address == "localhost" and set(names) != {"localhost"}:
        raise ArgumentError(f"hosts: wanted a name of this host that {names[-1]} can reach, got localhost; or --master")
    counts = tuple(count for _, count in hosts)

    def commands(name: str) -> list[Command]:
        where = (address, port or NAMED_PORTS[crc32(name.encode()) % len(NAMED_PORTS)])
        told = _named(dict(env or {}), name)
        made = []
        for index, host in enumerate(names):
            words = [python, "-m", "hetcoll", "run", "--agent"]
            if host != "localhost":
                words = [*reach, host, f"exec {shlex.join(words)}"]
            task = {
                "version": __version__,
                "directory": os.getcwd(),
                "command": list(command),
                "env": told,
                "node": asdict(Node(index, counts, where)),
                "options": asdict(replace(options, restarts=0)),
            }
            line = json.dumps(task).encode() + b"\n"
            ours = child_environment({"HETCOLL_RUN": name})
            made.append(Command(words, ours, f"host {host}", stdin=line, decides=index == 0))
        return made

    return _attempts(commands, options, None, None, on_hosts=True)


def serve(line: bytes) -> int:
    """The launcher on one of several hosts: do what `line`, of `run_hosts`, says. Stdin ends with the job."""
    task = json.loads(line)
    if task["version"] != __version__:
        raise ArgumentError(
            f"hetcoll {__version__} is installed on {socket.gethostname()}, "
            f"and {task['version']} where the job was started: wanted the same on all hosts"
        )
    try:
        os.chdir(task["directory"])
    except OSError as error:
        raise ArgumentError(
            f"{socket.gethostname()}: wanted the directory {task['directory']!r} of the launcher: {error.strerror}"
        ) from error
    said = task["node"]
    node = Node(said["index"], tuple(said["counts"]), (said["master"][0], said["master"][1]))
    return run(
        task["command"], node.counts[node.index], env=task["env"], node=node, until_stdin_ends=True, **task["options"]
    )


def _attempts(
    commands: Callable[[str], list[Command]],
    options: Options,
    stdout: BinaryIO | None,
    stderr: BinaryIO | None,
    *,
    until_stdin_ends: bool = False,
    on_hosts: bool = False,
) -> int:
    """Run the `commands` of a new name, as often as `options` allow. `on_hosts`: they are launchers."""
    for name, number in (("restarts", options.restarts), ("respawns", options.respawns)):
        if number < 0:
            raise ArgumentError(f"{name}: wanted 0 or more, got {number}")
    if not (options.grace >= 0 and math.isfinite(options.grace)):
        raise ArgumentError(f"grace: wanted seconds, 0 or more, got {options.grace:g}")
    printer = Printer(stdout or sys.stdout.buffer, stderr or sys.stderr.buffer)
    for left in range(options.restarts, -1, -1):
        name = secrets.token_hex(8)
        job = Job(
            commands(name),
            name,
            printer,
            grace=options.grace + (_AGENT_GRACE if on_hosts else 0.0),
            keep_going=options.keep_going or options.respawns > 0,
            respawns=0 if on_hosts else options.respawns,
            until_stdin_ends=until_stdin_ends,
        )
        with job:
            code = job.run()
        if code == 0 or not left or not job.may_start_again:
            break
        printer.say(2, f"hetcoll run: starting all ranks anew, {left - 1} restarts left\n".encode())
    return code


def _common(name: str, env: dict[str, str], node: Node, whole: bool) -> dict[str, str]:
    """What all ranks here have in common: our own environment, the caller's changes, and where the job meets.

    With `whole` these are all ranks of the job, which gets a name and a secret.
    """
    common = child_environment(env)
    common.setdefault("PYTHONUNBUFFERED", "1")
    if whole:
        common = _named(common, name)
    common["HETCOLL_RUN"], common["HETCOLL_JOIN"] = name, "0"
    common["WORLD_SIZE"], common["LOCAL_WORLD_SIZE"] = str(sum(node.counts)), str(node.counts[node.index])
    common["MASTER_ADDR"], common["MASTER_PORT"] = node.master[0], str(node.master[1])
    return common


def _named(env: dict[str, str], name: str) -> dict[str, str]:
    """`env` with the name of a job and, where it has none, a secret."""
    secret = (
        {} if env.get("HETCOLL_SECRET") or env.get("HETCOLL_SECRET_FILE") else {"HETCOLL_SECRET": secrets.token_hex(32)}
    )
    return {**env, **secret, "HETCOLL_JOB": name}


def _rank(
    words: Sequence[str], common: dict[str, str], number: int, node: Node | None, prefix: bool, cores: Sequence[int]
) -> Command:
    """The `number`-th rank of this host, bound to one of `cores`, if there are any."""
    rank = number + (node.first if node else 0)
    return Command(
        words,
        {**common, "RANK": str(rank), "LOCAL_RANK": str(number)},
        name=f"rank {rank}",
        prefix=b"[%d] " % rank if prefix else b"",
        core=cores[number % len(cores)] if cores else None,
        decides=rank == 0,
    )


def _reserve_port() -> socket.socket:
    """Bound to a port that is free on all addresses, and not listening. As long as it is open the system gives the port
    to nobody who asks for any. Who asks for this one, as rank 0's store or PyTorch's, gets it on any address, if it
    sets SO_REUSEADDR, which servers do."""
    both = socket.has_dualstack_ipv6()
    sock = socket.socket(socket.AF_INET6 if both else socket.AF_INET)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if both:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(("", 0))
    except BaseException:
        sock.close()
        raise
    return sock
