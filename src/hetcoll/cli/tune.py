"""`hetcoll tune`: measure what algorithms take on this machine, and keep numbers by which the fastest are chosen."""

from __future__ import annotations

import argparse
import datetime
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import ArgumentError, Communicator, HetcollError
from ..config.env import environment
from ..links import tuned as files
from ..plan import tuned, tuner
from ..plan.machine import Network
from ..runtime.regroup import name_of
from ..types import ROOTED, Collective
from .sweeps import parse_size
from .timing import timed

SIZES = (8, 1 << 10, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
KINDS = (
    Collective.ALLREDUCE, Collective.REDUCE_SCATTER, Collective.ALLGATHER, Collective.ALLTOALL, Collective.BROADCAST,
    Collective.REDUCE, Collective.GATHER, Collective.SCATTER,
)  # fmt: skip
_CELL_US = 8000.0  # of calls that are timed, for each algorithm and size, in each turn
_TURNS = 3
_MESSAGES, _LONG = 20, 4 << 20  # between two hosts; bytes of those that tell the rate
_ROW = 8  # messages one after another
_LEAST = 1e-7  # seconds that a network, or a call without a barrier, is taken for, at least
_MOST_RANKS = 16
_UNLIKE = 1.5  # times as long at one time as at another,
_MOST_UNLIKE = 0.25  # which more than this part of all measurements may not take


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How many ranks, over what, and where to write the numbers."""
    parser.add_argument(
        "-n", "--ranks", type=_size, nargs="+", metavar="N",
        help="ranks to measure with (default: 2, as many as there are cores, and twice as many, 16 at most)",
    )  # fmt: skip
    parser.add_argument(
        "--transport", choices=("shm", "tcp", "verbs"), nargs="+", default=["shm", "tcp"], help="default: shm tcp"
    )
    parser.add_argument(
        "--sizes", type=parse_size, nargs="+", default=SIZES, metavar="SIZE", help="bytes (default 8 to 4M)"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write the numbers there, to be set as HETCOLL_TUNED")
    parser.add_argument("--measure", metavar="FILE", help=argparse.SUPPRESS)
    parser.epilog = (
        "Ranks of this host measure every algorithm at many sizes. Under a launcher the ranks of that job do, over "
        "HETCOLL_TRANSPORT: so the network between hosts is measured. Later jobs choose by these numbers; where ranks "
        "have others, by rank 0's. HETCOLL_TUNED=none goes without."
    )


def main(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure, and write what was found; 0."""
    config = environment()
    if args.output is None and config.config.cache is None:
        raise ArgumentError("-o: wanted a file to write to, since nothing is kept: HETCOLL_CACHE is none")
    path = Path(args.output or files.place(str(config.config.cache)))
    if (sizes := sorted(set(args.sizes)))[0] < 1:
        raise ArgumentError(f"--sizes: wanted 1 byte or more, got {sizes[0]}")
    if config.launch.rank == 0 and not args.measure:
        _kept(path)  # before minutes of measuring
    if config.launch.launcher != "single":
        return _in_job(Path(args.measure or path), bool(args.measure), sizes)
    found = [_launch(transport, size, sizes) for transport in args.transport for size in args.ranks or _ranks()]
    _finish(tuned.Tuned(tuple(times for one in found for times in one.times)), path)
    return 0


def _size(text: str) -> int:
    if not text.isdecimal() or not 2 <= int(text) <= _MOST_RANKS:
        raise argparse.ArgumentTypeError(f"wanted 2 to {_MOST_RANKS} ranks, got {text}")
    return int(text)


def _ranks() -> list[int]:
    cores = len(os.sched_getaffinity(0))
    return sorted({min(n, _MOST_RANKS) for n in (2, cores, 2 * cores) if n > 1})


def _launch(transport: str, size: int, sizes: Sequence[int]) -> tuned.Tuned:
    """What so many ranks of this host measure."""
    from ..tools import launch

    with tempfile.TemporaryDirectory(prefix="hetcoll-tune-") as directory:
        file = Path(directory) / "measured.toml"
        command = [sys.executable, "-m", "hetcoll", "tune", "--measure", str(file), "--sizes", *map(str, sizes)]
        env = {"HETCOLL_TRANSPORT": transport, "HETCOLL_ALGO": "", "HETCOLL_TUNED": "none"}
        if launch.run(command, size, env=env, prefix=False) != 0:
            raise HetcollError(f"{size} ranks over {transport} did not measure to the end: see above")
        return tuned.read(file.read_text(), str(file))


def _in_job(path: Path, quiet: bool, sizes: Sequence[int]) -> int:
    """The ranks of a launcher's job measure, and rank 0 writes."""
    from .. import init

    with init() as comm:
        if any(info.vendor for info in comm._wiring.topology.ranks):
            raise ArgumentError("tune: wanted ranks on CPUs, got some with GPUs: HETCOLL_DEVICE=cpu makes them such")
        found = tuned.Tuned(tuple(_measure(comm, sizes)), _networks(comm))
        if comm.rank == 0 and quiet:
            path.write_text(tuned.write(found, ()))
        elif comm.rank == 0:
            _finish(found, path)
        comm.barrier()
    return 0


def _measure(comm: Communicator, sizes: Sequence[int]) -> list[tuned.Measured]:
    """What each algorithm takes that could be chosen for these ranks. Collective.

    Each child times a barrier, too: calls with a root are timed with one, and told without.
    """
    topology = comm._wiring.topology
    able = {kind: names for kind in KINDS if len(names := [*tuner.lines(kind, topology)]) > 1}
    times: dict[tuple[Collective, str], list[list[float]]] = {}  # of each turn, and there of each size
    for turn in range(_TURNS):  # whatever else the machine does meanwhile, it does not do each time
        for name in sorted({name for names in able.values() for name in names}):
            kinds = [kind for kind in able if name in able[kind]]
            algo = ",".join(f"{kind.label}:{name}" for kind in kinds)
            with alike(comm, f"tune {algo} {turn}", algo=algo) as child:
                times.setdefault((Collective.BARRIER, ""), []).append([_time(child, Collective.BARRIER, 0)])
                for kind in kinds:
                    times.setdefault((kind, name), []).append([_time(child, kind, nbytes) for nbytes in sizes])
    placed = tuned.Placed.of(topology)
    _check_alike(times.values(), f"{comm.size} ranks over {placed.transport}")
    found: dict[Collective, dict[str, tuple[float, ...]]] = {kind: {} for kind in able}
    barrier = min(best for [best] in times.pop((Collective.BARRIER, ""), [[0.0]]))
    for (kind, name), turns in times.items():
        best = map(min, *turns)
        found[kind][name] = tuple(max(took - barrier, _LEAST) for took in best) if kind in ROOTED else tuple(best)
    return [tuned.Measured(kind, placed, tuple(sizes), seconds) for kind, seconds in found.items()]


def _networks(comm: Communicator) -> tuple[tuned.Between, ...]:
    """What messages take between rank 0's host and the others by TCP: of the slowest one. Collective; for rank 0."""
    topology = comm._wiring.topology
    if len(topology.hosts) == 1 or topology.between_hosts != "tcp":
        return ()
    peers = [host[0] for host in topology.hosts if 0 not in host]
    ways = []
    for peer in peers:
        if comm.rank in (0, peer):
            other = peer - comm.rank
            ways.append((*message_to(comm, other), half_way(comm, other, _LONG) - half_way(comm, other, 8)))
    if comm.rank != 0:
        return ()
    latency, overhead, long = map(max, zip(*ways, strict=True))
    network = Network(max(latency, _LEAST), overhead, _LONG / max(long, _LEAST))
    placed = tuned.Placed.of(topology)
    return (tuned.Between(placed.hosts, placed.transport, network),)


def message_to(comm: Communicator, peer: int) -> tuple[float, float]:
    """Latency and overhead of messages between this rank and `peer`, which calls it, too, of two hosts: of the fastest,
    since other work only delays.

    A core works on a message for as long as it is busy with each of a row of them that it sends. What an exchange
    takes beyond that work at both ends is the way.
    """
    x, y = np.ones(8, np.uint8), np.ones(8, np.uint8)
    sending, exchange = math.inf, math.inf
    for sends in (comm.rank < peer, comm.rank > peer) * _MESSAGES:
        took = _row(lambda: comm.send(x, peer)) if sends else _row(lambda: comm.recv(y, peer))
        sending = min(sending, took if sends else math.inf)
        exchange = min(exchange, _row(lambda: comm.sendrecv(x, peer, y, peer)))
    return max(0.0, exchange - 2 * sending), sending


def _row(call: Callable[[], object]) -> float:
    """Seconds of a call, of several in a row: so that who comes late to one does not find it done."""
    start = time.perf_counter()
    for _ in range(_ROW):
        call()
    return (time.perf_counter() - start) / _ROW


def half_way(comm: Communicator, peer: int, nbytes: int, rest: float = 0.0) -> float:
    """Half of the seconds of the fastest message from the first of two ranks to the other one and back, each after so
    many seconds of rest, and one byte that ends it."""
    x, least = np.ones(nbytes, np.uint8), math.inf
    for _ in range(_MESSAGES):
        time.sleep(rest)
        for y in (x[:1], x) if rest else (x,):
            start = time.perf_counter()
            if comm.rank < peer:
                comm.send(y, peer)
                comm.recv(y, peer)
            else:
                comm.recv(y, peer)
                comm.send(y, peer)
        least = min(least, (time.perf_counter() - start) / 2)
    return least


def _check_alike(times: Iterable[Sequence[Sequence[float]]], who: str) -> None:
    """Of each measurement, the best two turns."""
    best = [sorted(each)[:2] for turns in times for each in zip(*turns, strict=True)]
    unlike = sum(second > _UNLIKE * first for first, second in best) / len(best)
    if unlike > _MOST_UNLIKE:
        raise HetcollError(
            f"{unlike:.0%} of what {who} measured took more than {_UNLIKE:g} times as long at one time as at another: "
            "wanted a machine that does nothing else. Nothing was kept"
        )


@contextmanager
def alike(comm: Communicator, name: str, **changed: Any) -> Iterator[Communicator]:
    """A communicator of the same ranks with another configuration; no other one of `comm` has the name. Collective."""
    config = replace(comm._config, **changed)
    group = name_of(comm._core.group, name)
    child = type(comm)(comm._session, group, comm.rank, comm.size, config, config.init_timeout)
    try:
        yield child
        child.barrier()
    finally:
        child.close()


def _time(comm: Communicator, kind: Collective, nbytes: int) -> float:
    """Seconds of one call: on the rank that takes the longest, the median. Where there is a root, with a barrier.

    In a row of such calls nobody waits for the last rank: the root goes on at once, calls run into each other, and long
    chains of ranks look as fast as short ones. A program whose next step needs what came waits for all of a call. Each
    rank's own time from a barrier to its end, which osu-micro-benchmarks take, leaves out what ranks that share a core
    wait before they run. From barrier to barrier all is in it, by everyone's clock alike.
    """
    call = _call(comm, kind, nbytes)
    if kind in ROOTED:
        call = _before(call, comm.barrier)
    call()
    return timed(comm, call, _CELL_US, 3, 2000).p50_us * 1e-6


def _before(first: Callable[[], object], second: Callable[[], object]) -> Callable[[], object]:
    def both() -> None:
        first()
        second()

    return both


def _call(comm: Communicator, kind: Collective, nbytes: int) -> Callable[[], Any]:
    """A call whose larger buffer has about so many bytes, and at least an element a rank; of ordinary memory. Rank 0 is
    the root."""
    if kind is Collective.BARRIER:
        return comm.barrier
    part = -(-nbytes // (4 * comm.size))
    whole, result, own = (np.ones(n * part, np.float32) for n in (comm.size, comm.size, 1))
    if kind is Collective.ALLTOALL:
        return lambda: comm.alltoall(whole, result)
    if kind is Collective.ALLGATHER:
        return lambda: comm.allgather(own, whole)
    if kind is Collective.REDUCE_SCATTER:
        return lambda: comm.reduce_scatter(whole, own)
    if kind is Collective.BROADCAST:
        return lambda: comm.broadcast(whole)
    if kind is Collective.REDUCE:
        return lambda: comm.reduce(whole, result)
    if kind is Collective.GATHER:
        return lambda: comm.gather(own, whole)
    if kind is Collective.SCATTER:
        return lambda: comm.scatter(whole, own)
    return lambda: comm.allreduce(whole, result)


def _finish(found: tuned.Tuned, path: Path) -> None:
    """Keep what was measured, and say what is chosen by it, and how far from the fastest choices were until now."""
    about = [
        f"What `hetcoll tune` measured on {datetime.date.today().isoformat()} with {files.hardware()}, in microseconds",
        "a call, for sizes of the larger of its two buffers. Where there is a root, until all ranks are done.",
    ]
    kept = _kept(path)
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:  # nobody reads half of it
        file = Path(directory) / path.name
        file.write_text(tuned.write(found, about))
        file.replace(path)
    print(f"{'collective':>14} {'ranks':>5} {'transport':>13} {'model':>11} {'kept':>11}  chosen, up to so many bytes")
    every: list[tuple[list[float], list[float]]] = []
    for one in found.times:
        rows = [f"{name} {upper}" if upper < tuner.UNLIMITED else name for upper, name in one.rows()]
        every.append((_by_model(one, found), _by_kept(one, kept)))
        where = f"{one.collective.label:>14} {sum(one.placed.hosts):>5} {one.placed.transport:>13}"
        print(f"{where} {' '.join(map(_spell, every[-1]))}  {', '.join(rows)}")
    whole = [[ratio for pair in every for ratio in pair[i]] for i in (0, 1)]
    print(f"{'all':>34} {' '.join(map(_spell, whole))}  (times of what the cost model and the file kept until now")
    print(f"{'':>58}  choose over the fastest: geometric mean, largest)")
    for between in found.networks:
        latency, overhead, bandwidth = between.network
        print(
            f"between hosts: {latency * 1e6:.3g} us a message and {overhead * 1e6:.3g} us of work at either end, "
            f"{8e-9 * bandwidth:.3g} Gbit/s"
        )
    print(f"kept in {path}; HETCOLL_TUNED=none goes without it")


def _kept(path: Path) -> tuple[tuned.Measured, ...]:
    """What the file has until now, in a folder that is there. ArgumentError where it is none, or cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryDirectory(dir=path.parent).cleanup()  # as it is written
        return tuned.read(path.read_text(), str(path)).times if path.exists() else ()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"-o: wanted a file to write to, got {str(path)!r}: {error}") from None


def _by_model(one: tuned.Measured, found: tuned.Tuned) -> list[float]:
    if "verbs" in one.placed.transport:  # whose devices the file does not name
        return []
    topology = one.placed.topology
    return [*one.over(tuner.table(one.collective, topology, machine=found.machine(topology)))]


def _by_kept(one: tuned.Measured, kept: Iterable[tuned.Measured]) -> list[float]:
    """By times of another run: what was measured first is no judge of itself."""
    before = next((each for each in kept if each[:2] == one[:2]), None)
    known = before is not None and {name for _, name in before.rows()} <= set(one.seconds)
    return [*one.over(before.rows())] if known and before is not None else []


def _spell(ratios: Sequence[float]) -> str:
    if not ratios:
        return f"{'-':>11}"
    return f"{math.exp(math.fsum(map(math.log, ratios)) / len(ratios)):>5.3f} {max(ratios):>5.2f}"
