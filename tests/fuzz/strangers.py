"""A siege: strangers who connect to every port of a job with a secret, while it starts and runs.

`besiege(n)` ends when n connections were made, or some more. Jobs follow one another at one port. In each, ranks make
new links all the time, and check every result.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import secrets
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from ranks import context, start_server

from .stranger import attack

RANKS = 3
_JOBS = 3
_SECONDS = 120.0  # that a job may take beyond the siege

# Of each rank: where it listens. Then sums that are right, over links that are new each time, until rank 0 is told to
# stop; and at the end what it holds, at the beginning and then.
_RANK = """
import os, socket, sys
import numpy as np
import hetcoll

def holds():
    with open("/proc/self/statm") as file:
        return [int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE"), len(os.listdir("/proc/self/fd"))]

def ports():
    files = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    mine = {os.readlink(file) for file in files if os.path.islink(file)}
    rows = [line.split() for line in open("/proc/self/net/tcp").readlines()[1:]]
    return [int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]

comm = hetcoll.init()
before, rounds, x = None, 0, np.empty(1000)
while True:
    x[:] = comm.rank + rounds
    comm.allreduce(x)
    assert (x == comm.size * rounds + sum(range(comm.size))).all()
    with comm.split(rounds % 2 == comm.rank % 2) as part:
        x[:] = 1
        part.allreduce(x)
        assert (x == part.size).all()
    rounds += 1
    if rounds == 5:
        before = holds()
        with open(os.environ["SIEGE"] + f"/ports-{comm.rank}.new", "w") as file:
            print(*ports(), file=file)
        os.rename(file.name, file.name.removesuffix(".new"))
    stop = np.array([os.path.exists(os.environ["SIEGE"] + "/stop")], np.uint8)
    comm.broadcast(stop)
    if stop[0] and rounds > 5:
        break
print("HELD", *before, *holds(), rounds)
comm.close()
"""


@dataclass
class Outcome:
    """Connections that were made, rounds of the jobs, and how much a rank grew at most: bytes, descriptors."""

    connections: int = 0
    rounds: int = 0
    grown: tuple[int, int] = (0, 0)
    problems: list[str] = field(default_factory=list)


class Siege:
    """So many attackers, each a process of its own (`stranger`), from now on until `close`."""

    def __init__(self, attackers: int) -> None:
        start_server()
        self._pipes: list[Connection] = []
        self._processes = []
        self._counts = [context.Value(ctypes.c_uint64, lock=False) for _ in range(attackers)]
        for seed, count in enumerate(self._counts):
            theirs, ours = context.Pipe(duplex=False)
            process = context.Process(target=attack, args=(theirs, count, seed))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def made(self) -> int:
        """Connections so far."""
        return sum(count.value for count in self._counts)

    def aim(self, ports: list[int]) -> None:
        for pipe in self._pipes:
            pipe.send(ports)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            process.kill()
            process.join()


def _job(folder: Path, port: int) -> list[subprocess.Popen[str]]:
    """Ranks that meet at `port`."""
    env = os.environ | {
        "HETCOLL_SECRET": secrets.token_hex(16), "HETCOLL_TRANSPORT": "tcp", "SIEGE": str(folder),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS),
    }  # fmt: skip
    return [
        subprocess.Popen(
            [sys.executable, "-c", _RANK], env=env | {"RANK": str(rank)}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(RANKS)
    ]  # fmt: skip


def _end(rank: subprocess.Popen[str]) -> str:
    """What it said, when it has ended in its time."""
    try:
        return rank.communicate(timeout=_SECONDS)[0]
    except subprocess.TimeoutExpired:
        rank.kill()
        return rank.communicate()[0] + "\nit did not end in time"


def besiege(connections: int, folder: Path, port: int, attackers: int = 2) -> Outcome:
    """Jobs at `port` under so many connections of strangers in all."""
    outcome = Outcome()
    with closing(Siege(attackers)) as siege:
        for number in range(_JOBS):
            where = folder / str(number)
            where.mkdir()
            _withstand(siege, where, port, -(-connections // _JOBS), outcome)
        outcome.connections = siege.made
    return outcome


def _withstand(siege: Siege, where: Path, port: int, connections: int, outcome: Outcome) -> None:
    """One job, until there were so many connections since it was known where its ranks listen."""
    siege.aim([port])
    job, pause, enough = _job(where, port), threading.Event(), math.inf
    while all(rank.poll() is None for rank in job) and siege.made < enough:
        pause.wait(0.1)
        files = [where / f"ports-{rank}" for rank in range(RANKS)]
        if enough == math.inf and all(file.exists() for file in files):
            enough = siege.made + connections
            siege.aim([port, *(int(each) for file in files for each in file.read_text().split())])
    (where / "stop").touch()
    said = [_end(rank) for rank in job]
    rows = [list(map(int, line.split()[1:])) for text in said for line in text.splitlines() if "HELD" in line]
    if any(rank.returncode for rank in job) or len(rows) != RANKS:
        outcome.problems.append(f"job {where.name} failed:\n" + "\n".join(text[-3000:] for text in said))
        return
    outcome.rounds += rows[0][4]
    outcome.grown = (
        max(outcome.grown[0], *(after - before for before, _, after, _, _ in rows)),
        max(outcome.grown[1], *(more - some for _, some, _, more, _ in rows)),
    )


def main(connections: int, folder: Path) -> int:
    """Print what came out, as JSON; 1 where something was wrong."""
    from ports import free_port

    outcome = besiege(connections, folder, free_port(), attackers=4)
    print(json.dumps(vars(outcome)))
    return bool(outcome.problems)
