"""How a job of many ranks starts and ends: light ranks, which are clients of a real store and nothing else.

    python benchmarks/start.py [--lose] [256 1024 4096]

A light rank does what a rank does before it makes links: it connects to rank 0's store and proves the secret, joins,
tells who it is and where it listens, reads what all others told, and says goodbye in the end. Sockets, frames, threads
and the store are the real ones; 64 ranks share a process, and ranks are on hosts of eight. One rank a process reads
what was told as far as a topology; the others take it apart into columns.

Prints seconds from the first connection until every rank knows all others, and from the first goodbye until the last;
bytes on all connections; the CPU-seconds, peak memory and open file descriptors of the process with the store; and
the most file descriptors of a rank (which may be a relay), and the CPU-seconds and memory of one that reads. With
`--lose` the store is lost in between, as if its process died: seconds until one of the ranks serves the job, and all
have shrunk to those that are left.
"""

from __future__ import annotations

import argparse
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
_ACKED = 120  # where a tcp_info has the bytes that were acknowledged, and after them those that came (tcp(7))


class Told(NamedTuple):
    """What a process of light ranks found out: bytes of its connections, and what one reader took."""

    nbytes: int
    reading: float  # CPU-seconds
    memory: int  # bytes
    descriptors: int  # of the rank that has most


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
    pipe.send("ended")


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _all(pipes: list[Connection], word: object = None) -> list[object]:
    """Say `word` to all processes, and take what each answers."""
    for pipe in pipes:
        pipe.send(word)
    return [pipe.recv() for pipe in pipes]


def _job(size: int, lose: bool) -> None:
    """In a process of its own, which hosts the store."""
    processes, pipes = [], []
    count = -(-size // A_PROCESS)
    for first in range(count):
        ours, theirs = mp.Pipe()
        ranks = range(first, size, count)
        processes.append(mp.Process(target=_light_ranks, args=(ranks, size, theirs), daemon=True))
        processes[-1].start()
        pipes.append(ours)
    before = len(os.listdir("/proc/self/fd"))
    unique_id = get_unique_id(Config(linger=0), loopback=True)
    _all(pipes, unique_id)
    began, cpu = time.monotonic(), _cpu()
    _all(pipes)
    start, start_cpu = time.monotonic() - began, _cpu() - cpu
    descriptors = len(os.listdir("/proc/self/fd")) - before
    found = [told for told in (pipe.recv() for pipe in pipes) if isinstance(told, Told)]
    lost = 0.0
    if lose:
        time.sleep(1.0)  # successors are known
        began = time.monotonic()
        store._hosted[unique_id.job_id].abandon()
        _all(pipes, "lose")
        lost = time.monotonic() - began
    began, cpu = time.monotonic(), _cpu()
    _all(pipes)
    end, end_cpu = time.monotonic() - began, _cpu() - cpu
    for process in processes:
        process.join()
    nbytes, peak = sum(told.nbytes for told in found), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    host = f"{start_cpu:>9.2f} {end_cpu:>7.2f} {peak / 1e3:>7.0f} {descriptors:>7}"
    most, reading = max(t.descriptors for t in found), max(t.reading for t in found)
    rank = f"{most:>6} {reading:>9.3f} {max(t.memory for t in found) / 1e6:>8.1f}"
    without = f" {lost:>9.2f}" if lose else ""
    print(f"{size:>6} {start:>8.2f} {end:>7.2f} {nbytes / 1e6:>9.1f} {host} {rank}{without}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sizes", type=int, nargs="*", default=[256, 1024, 4096], help="ranks; default: 256 1024 4096")
    parser.add_argument("--lose", action="store_true", help="lose the store in between")
    args = parser.parse_args()
    print("                           all    the process with the store       most of a rank")
    without = " without s" if args.lose else ""
    print(f" ranks  start s   end s        MB   start s   end s      MB   files  files   reads s       MB{without}")
    for size in args.sizes:
        process = mp.Process(target=_job, args=(size, args.lose))
        process.start()
        process.join()


if __name__ == "__main__":
    main()
