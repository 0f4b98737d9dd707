"""How a job of many ranks starts and ends: light ranks, which are clients of a real store and nothing else.

    python benchmarks/start.py [--lose] [--json FILE] [256 1024 4096]

A light rank does what a rank does before it makes links: it connects to rank 0's store and proves the secret, joins,
tells who it is and where it listens, reads what all others told, and says goodbye in the end. Sockets, frames, threads
and the store are the real ones; 64 ranks share a process, and ranks are on hosts of eight. One rank a process reads
what was told as far as a topology; the others take it apart into columns.

Prints seconds from the first connection until every rank knows all others, and from the first goodbye until the last;
bytes on all connections before, and frames between the store and its members to the end; the CPU-seconds, peak
memory and open file descriptors of the process with the store; the most file descriptors of a rank (which may be a
relay), and the CPU-seconds and memory of one that reads; and what all have left behind, threads and descriptors. With
`--lose` the store is lost in between, as if its process died: seconds until one of the ranks serves the job, and all
have shrunk to those that are left.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import resource
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from hetcoll.config.env import Config
from hetcoll.config.limits import reserve_descriptors
from hetcoll.links.edges import Address, unpack_addresses
from hetcoll.links.introduction import Introduction, Introductions, Reach, read_cards
from hetcoll.plan.topology import Topology
from hetcoll.rendezvous import decisions
from hetcoll.rendezvous.bootstrap import get_unique_id
from hetcoll.rendezvous.control import ControlClient
from hetcoll.rendezvous.protocol.columns import Column, Telling
from hetcoll.rendezvous.protocol.wire import WORLD
from hetcoll.rendezvous.store import server as store

A_PROCESS = 64  # light ranks
A_HOST = 8  # ranks
SECONDS = 300.0
LEAVING = 10.0  # seconds
_ACKED = 120  # where a tcp_info has the bytes that were acknowledged, and after them those that came (tcp(7))


class Told(NamedTuple):
    """What a process of light ranks found out: bytes of its connections, and what one reader took."""

    nbytes: int
    reading: float  # CPU-seconds
    memory: int  # bytes
    descriptors: int  # of the rank that has most


class Gone(NamedTuple):
    """A process whose light ranks have said goodbye: frames that they sent and got, and what it still has of them."""

    frames: int
    left: int  # threads and descriptors


class Figures(NamedTuple):
    """A job of light ranks: what is printed, in its order. `store_` is of the process with the store, `rank_` the most
    of a rank."""

    ranks: int
    start: float  # seconds
    end: float
    nbytes: int
    frames: int
    store_start: float  # CPU-seconds
    store_end: float
    store_peak: int  # bytes
    store_descriptors: int
    rank_descriptors: int
    rank_reading: float  # CPU-seconds
    rank_memory: int  # bytes
    left: int
    lost: float | None  # seconds

    def __str__(self) -> str:
        job = f"{self.ranks:>6} {self.start:>8.2f} {self.end:>7.2f} {self.nbytes / 1e6:>9.1f} {self.frames:>7}"
        host = f"{self.store_start:>9.2f} {self.store_end:>7.2f} {self.store_peak / 1e6:>7.0f}"
        rank = f"{self.rank_descriptors:>6} {self.rank_reading:>9.3f} {self.rank_memory / 1e6:>8.1f} {self.left:>5}"
        lost = "" if self.lost is None else f" {self.lost:>9.2f}"
        return f"{job} {host} {self.store_descriptors:>7} {rank}{lost}"


def _tellings(rank: int) -> tuple[Telling, Telling]:
    """What light rank `rank` tells of itself, and of where it listens."""
    host = rank // A_HOST
    mine = replace(
        Introduction.here(Config(), 0), host=f"host {host}", pid=1000 + rank, cores=list(range(64)), name=os.urandom(16)
    )
    address = Address(f"10.1.{host >> 8}.{host & 255}", 20000 + rank % 40000, "eth0", os.urandom(16))
    return mine.telling(), Reach([address], [], "no RDMA here", (25000, 0), False, 64).telling()


def _in_threads(calls: Iterable[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _read(intros: list[Column], reaches: list[Column], size: int) -> None:
    topology = Topology(Introductions(intros).infos)
    assert len(topology.hosts) == -(-size // A_HOST)
    assert len(read_cards(*reaches)) == size


def _light_ranks(ranks: range, size: int, pipe: Connection) -> None:
    """A process of light ranks: starts at the parent's word, reports, and ends at its word."""
    threading.stack_size(256 << 10)
    if problem := reserve_descriptors(2 * len(ranks)):
        raise SystemExit(problem)
    unique_id = pipe.recv()
    told = {rank: _tellings(rank) for rank in ranks}
    clients: dict[int, ControlClient] = {}
    before = _held()
    columns: list[tuple[list[Column], list[Column]]] = []

    def start(rank: int) -> None:
        client = clients[rank] = ControlClient(unique_id, rank, size, SECONDS)
        intros = client.exchange_columns(WORLD, b"introduce", told[rank][0])
        reaches = client.exchange_columns(WORLD, b"addresses", told[rank][1])
        (place,) = client.look_up(WORLD, b"addresses", [(rank + 1) % size]).values()
        assert unpack_addresses(place)[0].port == 20000 + (rank + 1) % size % 40000
        if rank == ranks[0]:
            columns.append((intros, reaches))

    pipe.send("ready")
    pipe.recv()
    _in_threads([lambda rank=rank: start(rank) for rank in ranks])  # type: ignore[misc]
    pipe.send("started")
    relays = [client._relay for client in clients.values() if client._relay is not None]
    socks: list[socket.socket] = [client._uplink.sock for client in clients.values()]
    socks += [relay._up.sock for relay in relays if relay._up is not None]
    infos = [sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256) for sock in socks]
    most = max(client.holds().descriptors for client in clients.values())
    began = time.thread_time()
    _read(*columns[0], size)
    reading = time.thread_time() - began
    tracemalloc.start()
    _read(*columns[0], size)
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    pipe.send(Told(sum(sum(struct.unpack_from("<QQ", info, _ACKED)) for info in infos), reading, memory, most))

    def shrink(rank: int) -> None:
        number, left = decisions.shrink(clients[rank], WORLD, SECONDS)
        assert (number, len(left)) == (1, size), f"{number}, {len(left)} of {size}"

    if pipe.recv() == "lose":
        _in_threads([lambda rank=rank: shrink(rank) for rank in ranks])  # type: ignore[misc]
        pipe.send("shrunk")
        pipe.recv()
    _in_threads([client.close for client in clients.values()])
    streams = [client._uplink._stream for client in clients.values()]
    pipe.send(Gone(sum(each.received + each.sent for each in streams), _left(before)))


def _held() -> int:
    return threading.active_count() + len(os.listdir("/proc/self/fd"))


def _left(before: int) -> int:
    """What a process still has in the end: the last threads may take a moment."""
    deadline = time.monotonic() + LEAVING
    while (left := _held() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _all(pipes: list[Connection], word: object = None) -> list[object]:
    """Say `word` to all processes, and take what each answers."""
    for pipe in pipes:
        pipe.send(word)
    return [pipe.recv() for pipe in pipes]


def _job(size: int, lose: bool, pipe: Connection) -> None:
    """In a process of its own, which hosts the store: tells its `Figures`."""
    processes, pipes = [], []
    count = -(-size // A_PROCESS)
    for first in range(count):
        ours, theirs = mp.Pipe()
        ranks = range(first, size, count)
        processes.append(mp.Process(target=_light_ranks, args=(ranks, size, theirs), daemon=True))
        processes[-1].start()
        pipes.append(ours)
    before, files = _held(), len(os.listdir("/proc/self/fd"))
    unique_id = get_unique_id(Config(linger=0), loopback=True)
    served = store._hosted[unique_id.job_id]
    _all(pipes, unique_id)
    began, cpu = time.monotonic(), _cpu()
    _all(pipes)
    start, start_cpu = time.monotonic() - began, _cpu() - cpu
    files = len(os.listdir("/proc/self/fd")) - files
    found = [told for told in (each.recv() for each in pipes) if isinstance(told, Told)]
    lost = None
    if lose:
        time.sleep(1.0)  # successors are known
        began = time.monotonic()
        served.abandon()
        _all(pipes, "lose")
        lost = time.monotonic() - began
    began, cpu = time.monotonic(), _cpu()
    gone = [each for each in _all(pipes) if isinstance(each, Gone)]
    end, end_cpu = time.monotonic() - began, _cpu() - cpu
    left = sum(each.left for each in gone)
    if not lose:  # nothing can close what was abandoned
        served.close()
        left += _left(before)
    for process in processes:
        process.join()
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    most = [max(values) for values in zip(*(told[1:] for told in found), strict=True)]
    job = size, start, end, sum(told.nbytes for told in found), sum(each.frames for each in gone)
    reading, memory, descriptors = most
    pipe.send(Figures(*job, start_cpu, end_cpu, peak, files, descriptors, reading, memory, left, lost))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sizes", type=int, nargs="*", default=[256, 1024, 4096], help="ranks; default: 256 1024 4096")
    parser.add_argument("--lose", action="store_true", help="lose the store in between")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to this file")
    args = parser.parse_args()
    print("                                   all    the process with the store              most of a rank")
    without = " without s" if args.lose else ""
    heads = "MB  frames   start s   end s      MB   files  files   reads s       MB  left"
    print(f" ranks  start s   end s        {heads}{without}")
    found = []
    for size in args.sizes:
        ours, theirs = mp.Pipe()
        process = mp.Process(target=_job, args=(size, args.lose, theirs))
        process.start()
        theirs.close()
        found.append(ours.recv())
        process.join()
        print(found[-1], flush=True)
        if args.json:
            args.json.write_text(json.dumps([each._asdict() for each in found]))


if __name__ == "__main__":
    main()
