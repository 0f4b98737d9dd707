"""What algorithms and the network take, measured by all ranks of a communicator: the numbers of `hetcoll tune`.

On host memory all algorithms are timed that could be chosen for these ranks; on GPUs those of which the planner takes
the fastest among their islands, at sizes that no kernel and no library does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from .. import ArgumentError, Communicator, HetcollError
from ..plan import tuned, tuner
from ..plan.machine import Network
from ..runtime.regroup import name_of
from ..types import ROOTED, Collective
from .on_device import VENDORS, Mirror, Stream, Talk
from .timing import timed

KINDS = (
    Collective.ALLREDUCE, Collective.REDUCE_SCATTER, Collective.ALLGATHER, Collective.ALLTOALL, Collective.BROADCAST,
    Collective.REDUCE, Collective.GATHER, Collective.SCATTER,
)  # fmt: skip
_CELL_US = 8000.0  # of calls that are timed, for each algorithm and size, in each turn
_TURNS = 3
_MESSAGES, _LONG = 20, 4 << 20  # between two hosts; bytes of those that tell the rate
_ROW = 8  # messages one after another
_LEAST = 1e-7  # seconds that a network, or a call without a barrier, is taken for, at least
_UNLIKE = 1.5  # times as long at one time as at another,
_MOST_UNLIKE = 0.25  # which more than this part of all measurements may not take


class Open(NamedTuple):
    """What is to be measured of a collective: the algorithms, for ranks that are placed so, at these sizes."""

    placed: tuned.Placed
    names: Sequence[str]
    nbytes: Sequence[int]


def on_gpus(comm: Communicator) -> bool:
    """Whether some ranks were told to use a GPU: then it is data on GPUs that is measured."""
    return any(rank.wish in VENDORS for rank in comm.topology.ranks)


def measure(comm: Communicator, sizes: Sequence[int], stream: Stream | None = None) -> list[tuned.Measured]:
    """What each algorithm takes that could be chosen for these ranks; this one's data is on the GPU of `stream`, if
    any. Collective.

    Each child times a barrier, too: calls that end with one are told without.
    """
    gpus = on_gpus(comm)
    able = _open_on_gpus(comm, sizes, stream) if gpus else _open_on_host(comm, sizes)
    times: dict[tuple[Collective, str], list[list[float]]] = {}  # of each turn, and there of each size
    for turn in range(_TURNS):  # whatever else the machine does meanwhile, it does not do each time
        for name in sorted({name for one in able.values() for name in one.names}):
            kinds = {kind: one for kind, one in able.items() if name in one.names}
            with (_only_on_gpus if gpus else _only_on_host)(comm, name, kinds, turn) as child:
                times.setdefault((Collective.BARRIER, ""), []).append([_time(child, Collective.BARRIER, 0, stream)])
                for kind, one in kinds.items():
                    took = [_time(child, kind, nbytes, stream) for nbytes in one.nbytes]
                    times.setdefault((kind, name), []).append(took)
    if able:
        _check_alike(times.values(), f"{comm.size} ranks over {next(iter(able.values())).placed.transport}")
    found: dict[Collective, dict[str, tuple[float, ...]]] = {kind: {} for kind in able}
    barrier = min(best for [best] in times.pop((Collective.BARRIER, ""), [[0.0]]))
    for (kind, name), turns in times.items():
        best = map(min, *turns)
        ended = kind in ROOTED or gpus
        found[kind][name] = tuple(max(took - barrier, _LEAST) for took in best) if ended else tuple(best)
    return [tuned.Measured(kind, able[kind].placed, tuple(able[kind].nbytes), found[kind]) for kind in able]


def _open_on_host(comm: Communicator, sizes: Sequence[int]) -> dict[Collective, Open]:
    topology = comm._wiring.topology
    able = {kind: Open(tuned.Placed.of(topology), [*tuner.lines(kind, topology)], sizes) for kind in KINDS}
    return {kind: one for kind, one in able.items() if len(one.names) > 1}


def _open_on_gpus(comm: Communicator, sizes: Sequence[int], stream: Stream | None) -> dict[Collective, Open]:
    """At sizes of which an algorithm is chosen. ArgumentError where that is none."""
    call = _call(comm, Collective.ALLREDUCE, 8, stream)
    call()  # from then on the islands are known
    if stream is not None:
        stream.synchronize()
    able: dict[Collective, Open] = {}
    for kind in KINDS:
        found = {nbytes: comm._core.gpus.to_measure(kind, _whole(comm, nbytes)) for nbytes in sizes}
        if chosen := {nbytes: one for nbytes, one in found.items() if one is not None}:
            placed, names = next(iter(chosen.values()))
            able[kind] = Open(placed, names, [*chosen])
    if not able:
        raise ArgumentError(
            "wanted GPUs of several islands, and sizes beyond those of one kernel: nothing is chosen here by what it"
            " takes, as explain says; HETCOLL_ISLANDS parts ranks, HETCOLL_DEVICE=cpu measures host memory"
        )
    return able


def _only_on_host(
    comm: Communicator, name: str, kinds: dict[Collective, Open], turn: int
) -> AbstractContextManager[Communicator]:
    algo = ",".join(f"{kind.label}:{name}" for kind in kinds)
    return alike(comm, f"tune {algo} {turn}", algo=algo)


@contextmanager
def _only_on_gpus(comm: Communicator, name: str, kinds: dict[Collective, Open], turn: int) -> Iterator[Communicator]:
    """By a file that has no other algorithm: HETCOLL_ALGO would also have other slots, and never take `islands`."""
    with alike(comm, f"tune {name} {turn}", algo=None) as child:
        rows = (tuned.Measured(kind, one.placed, (1,), {name: (1.0,)}) for kind, one in kinds.items())
        child._wiring.measured = tuned.Tuned(tuple(rows))
        yield child


def networks(comm: Communicator) -> tuple[tuned.Between, ...]:
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


def _time(comm: Communicator, kind: Collective, nbytes: int, stream: Stream | None = None) -> float:
    """Seconds of one call: on the rank that takes the longest, the median. Where there is a root, and on GPUs, with a
    barrier.

    In a row of calls with a root nobody waits for the last rank: the root goes on at once, calls run into each other,
    and long chains of ranks look as fast as short ones. A program whose next step needs what came waits for all of a
    call. Each rank's own time from a barrier to its end, which osu-micro-benchmarks take, leaves out what ranks that
    share a core wait before they run. From barrier to barrier all is in it, by everyone's clock alike; and on GPUs,
    where a call returns before it is done, what the host waits for.
    """
    end = comm.barrier if stream is None else _before(stream.synchronize, comm.barrier)
    if kind is Collective.BARRIER:
        call: Callable[[], object] = end
    else:
        call = _call(comm, kind, nbytes, stream)
        if kind in ROOTED or on_gpus(comm):
            call = _before(call, end)
    call()
    return timed(comm if stream is None else Talk(comm, stream), call, _CELL_US, 3, 2000).p50_us * 1e-6


def _before(first: Callable[[], object], second: Callable[[], object]) -> Callable[[], object]:
    def both() -> None:
        first()
        second()

    return both


def _whole(comm: Communicator, nbytes: int) -> int:
    """The bytes of the larger buffer of a call of about so many: an element a rank at least."""
    return -(-nbytes // (4 * comm.size)) * 4 * comm.size


def _call(comm: Communicator, kind: Collective, nbytes: int, stream: Stream | None = None) -> Callable[[], Any]:
    """A call of `_whole` bytes, of ordinary memory or on the GPU of `stream`. Rank 0 is the root."""
    count = _whole(comm, nbytes)
    arrays = [np.ones(n, np.uint8) for n in (count, count, count // comm.size)]
    whole, result, own = (array.view(np.float32) for array in arrays)
    if stream is not None:
        mirror = Mirror(stream, arrays)
        mirror.upload()
        on_gpu = [mirror.buffer(array) for array in (whole, result, own)]
        return _kept(mirror, _bound(comm, kind, *on_gpu))
    return _bound(comm, kind, whole, result, own)


def _kept(memory: object, call: Callable[[], Any]) -> Callable[[], Any]:
    """The call, which keeps its memory."""
    return lambda: (call(), memory)


def _bound(comm: Communicator, kind: Collective, whole: Any, result: Any, own: Any) -> Callable[[], Any]:
    match kind:
        case Collective.ALLTOALL:
            return lambda: comm.alltoall(whole, result)
        case Collective.ALLGATHER:
            return lambda: comm.allgather(own, whole)
        case Collective.REDUCE_SCATTER:
            return lambda: comm.reduce_scatter(whole, own)
        case Collective.BROADCAST:
            return lambda: comm.broadcast(whole)
        case Collective.REDUCE:
            return lambda: comm.reduce(whole, result)
        case Collective.GATHER:
            return lambda: comm.gather(own, whole)
        case Collective.SCATTER:
            return lambda: comm.scatter(whole, own)
    return lambda: comm.allreduce(whole, result)
