"""A siege: strangers who connect to every port of a job with a secret, while it starts and runs.

`besiege(n)` ends when n connections were made. Jobs follow one another at one port. In each, ranks make new links all
the time, and check every result.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import secrets
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from hetcoll.rendezvous.connections.auth import CLAIM, GREETING

RANKS = 3
_JOBS = 3
_IDLE = 200  # connections that an attacker keeps open
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


class Stranger(threading.Thread):
    """Connects until told to end, to `ports`, which may change."""

    def __init__(self, ports: list[int], seed: int) -> None:
        super().__init__(daemon=True)
        self.ports, self.made, self.ended = ports, 0, False
        self._random = random.Random(seed)
        self._idle: list[socket.socket] = []
        self._sources = itertools.cycle(f"127.0.{seed % 250 + 1}.{n}" for n in range(1, 250))

    def run(self) -> None:
        while not self.ended:
            with suppress(OSError):
                self._connect()
        for sock in self._idle:
            sock.close()

    def _connect(self) -> None:
        draw = self._random
        with ExitStack() as stack:
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.IPPROTO_IP, 24, 1)  # IP_BIND_ADDRESS_NO_PORT: each address has all ports
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # no TIME_WAIT
            sock.settimeout(5)
            sock.bind((next(self._sources), 0))
            sock.connect(("127.0.0.1", draw.choice(self.ports)))
            self.made += 1
            kind = draw.randrange(8)
            if kind in (1, 2):
                sock.sendall(draw.randbytes(draw.randrange(1, 300)))
            elif kind == 3:
                sock.recv(GREETING.size, socket.MSG_WAITALL)
                sock.sendall(b"\1" + draw.randbytes(CLAIM.size - 1))
                sock.recv(1000)
            elif kind == 4:
                sock.sendall(sock.recv(GREETING.size, socket.MSG_WAITALL) * 3)
            elif kind == 5:
                sock.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(draw.choice([0, 1 << 16])))
            elif kind == 6:
                stack.pop_all()
                self._idle.append(sock)
                if len(self._idle) > _IDLE:
                    self._idle.pop(0).close()


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


def _ports(folder: Path) -> Iterator[int]:
    for path in folder.glob("ports-*[0-9]"):
        yield from map(int, path.read_text().split())


def _end(rank: subprocess.Popen[str]) -> str:
    """What it said, when it has ended in its time."""
    try:
        return rank.communicate(timeout=_SECONDS)[0]
    except subprocess.TimeoutExpired:
        rank.kill()
        return rank.communicate()[0] + "\nit did not end in time"


def besiege(connections: int, folder: Path, port: int, attackers: int = 2) -> Outcome:
    """Jobs at `port` under so many connections of strangers in all."""
    outcome, pause = Outcome(), threading.Event()
    strangers = [Stranger([port], seed) for seed in range(attackers)]
    for stranger in strangers:
        stranger.start()
    for number in range(_JOBS):
        where = folder / str(number)
        where.mkdir()
        job = _job(where, port)
        enough = connections * (number + 1) // _JOBS
        while all(rank.poll() is None for rank in job) and sum(each.made for each in strangers) < enough:
            pause.wait(0.1)
            for stranger in strangers:
                stranger.ports = [port, *_ports(where)]
        (where / "stop").touch()
        said = [_end(rank) for rank in job]
        for stranger in strangers:
            stranger.ports = [port]
        rows = [list(map(int, line.split()[1:])) for text in said for line in text.splitlines() if "HELD" in line]
        if any(rank.returncode for rank in job) or len(rows) != RANKS:
            outcome.problems.append(f"job {number} failed:\n" + "\n".join(text[-3000:] for text in said))
            continue
        outcome.rounds += rows[0][4]
        grown = [(after - before, more - some) for before, some, after, more, _ in rows]
        outcome.grown = (
            max(outcome.grown[0], *(each for each, _ in grown)),
            max(outcome.grown[1], *(d for _, d in grown)),
        )
    for stranger in strangers:
        stranger.ended = True
    for stranger in strangers:
        stranger.join(10)
    outcome.connections = sum(stranger.made for stranger in strangers)
    return outcome


def main(connections: int, folder: Path) -> int:
    """Print what came out, as JSON; 1 where something was wrong."""
    from ports import free_port

    outcome = besiege(connections, folder, free_port(), attackers=4)
    print(json.dumps(vars(outcome)))
    return bool(outcome.problems)
