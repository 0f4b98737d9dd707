"""Each pair's way, inside a host or between hosts, carries a known pattern both ways at once before a call uses it.

That happens when the GPU path is set up, all ranks together, through what calls use: compiled programs, streams and
signals. Pairs take turns; what came is compared byte by byte, and all ranks hear of it. A way that fails is given up
for the next one of `Topology.ways`, which is tried in turn, and all ranks go on from there alike.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import CollectiveTimeoutError, InitError, RegistrationError
from ..plan.topology import SPELLED, Pair, Topology, pair_of

if TYPE_CHECKING:
    from ..vendors.devices.base import Device
    from ..work import Work
    from .edges import GpuEdges
    from .shared import GpuShare

LABEL = "proof of paths()"
_SMALL = 257  # bytes
_SLOTS = 4  # so many slots full, and a bit: of such a message some pieces fill a slot, and each slot is used
SECONDS = 10.0  # that one pattern may take, whatever HETCOLL_TIMEOUT is: some machines are slow
_ALL = 64  # ranks among which all pairs are tried
_MOST = 300  # characters of what went wrong, for others
_PERIOD = 4099  # bytes; a prime, so that no two slots hold the same
_CHUNK = 64 * _PERIOD  # bytes that are written and looked at at once: a host's memory for more is not touched

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Meet = Callable[[str, bytes], Sequence[bytes]]
Exchange = Callable[[int, int, float], str]
"""Send so many bytes of the pattern to a peer, and receive its own within so many seconds: what went wrong, if anything
did."""


def prove(
    share: GpuShare, exchange: Exchange, meet: Meet, leave: Callable[[int], None], listen: Callable[[], None]
) -> bool:
    """Find a way between pairs of which one has a GPU (`pairs_to_try`); `share` hears what is given up. Whether any is.

    Collective over all ranks. `leave` ends what goes to a peer by a way that is given up, and `listen` makes ranks
    reachable by sockets. InitError on all ranks where no way is left, as where HETCOLL_CROSS asked for the one that
    failed, and where it is one to a rank without a GPU on another host: its engine keeps those links, whose RDMA ends
    on TCP by itself.
    """
    gpus, lengths = share.gpus, (_SMALL, _SLOTS * share.slot_bytes + 8)
    tried = pairs_to_try(share.topology, [bool(gpu.vendor) for gpu in gpus])
    pairs: Collection[Pair] = tried
    given_up = False
    while failed := try_all(pairs, share.rank, lengths, exchange, meet):
        left = without(share.topology, failed)
        lost = {pair: text for pair, text in failed.items() if not left.ways(*pair)}
        asked = f"HETCOLL_CROSS={left.cross}" if left.cross != "auto" else f"HETCOLL_TRANSPORT={left.setting}"
        _refuse(lost, share.topology, f"{asked} leaves no other way")
        has_cpu = (pair for pair in failed if not all(gpus[rank].vendor for rank in pair))
        lost = {pair: failed[pair] for pair in has_cpu if share.topology.far(*pair)}
        _refuse(lost, share.topology, "one of them is a CPU, which keeps its links")
        for pair in failed:
            if share.rank in pair:
                leave(sum(pair) - share.rank)
        share.exclude(failed, left)
        listen()
        pairs, given_up = failed, True
    share.tried = tried
    return given_up


def pairs_to_try(topology: Topology, has_gpu: Sequence[bool]) -> set[Pair]:
    """All pairs of which one has a GPU. Among very many ranks each GPU of a host is tried with one of each other host
    instead, at least: a link to every rank would be more sockets than a process may have."""
    place = {rank: (host, i) for host in topology.hosts for i, rank in enumerate(host)}
    found = set()
    for a, b in itertools.combinations(range(topology.size), 2):
        (mine, i), (theirs, j) = place[a], place[b]
        meet = mine == theirs or topology.size <= _ALL or i % len(theirs) == j or j % len(mine) == i
        if meet and (has_gpu[a] or has_gpu[b]):
            found.add((a, b))
    return found


def without(topology: Topology, pairs: Collection[Pair]) -> Topology:
    """What is left where these pairs' ways must not be used."""
    return replace(topology, excluded=topology.excluded | {(a, b, topology.way(a, b)) for a, b in pairs})


def _refuse(failed: dict[Pair, str], topology: Topology, why: str) -> None:
    """InitError that names the ranks, where a way failed that nothing is used instead of."""
    if failed:
        said = (f"ranks {a} and {b} do not reach each other {SPELLED[topology.way(a, b)]}: {text}"
                for (a, b), text in failed.items())  # fmt: skip
        raise InitError(f"{'; '.join(said)} ({why})")


def try_all(
    pairs: Collection[Pair], rank: int, lengths: Sequence[int], exchange: Exchange, meet: Meet
) -> dict[Pair, str]:
    """Which of these pairs' ways do not work, and why; the same on all ranks. Collective over all of them."""
    failed: dict[Pair, str] = {}
    for turn in sorted({a ^ b for a, b in pairs}):  # a rank meets rank ^ turn: nobody has two to meet at once
        other = rank ^ turn
        pair = pair_of(rank, other)
        for nbytes in lengths:
            problem = ""
            if pair in pairs and pair not in failed:
                problem = exchange(other, nbytes, SECONDS)
            words = json.dumps([*pair, problem[:_MOST]])
            told = [json.loads(blob) for blob in meet(LABEL, words.encode())]
            failed |= {(a, b): f"rank {who}: {text}" for who, (a, b, text) in enumerate(told) if text}
    return failed


def exchange_on(
    device: Device, edges: GpuEdges, enqueue: Callable[[int, int], Work], rank: int, peer: int, nbytes: int, wait: float
) -> str:
    """`Exchange` on a GPU. `enqueue` sends from one address there and receives at another. Streams that wait for what
    does not come are let go."""
    mine, got, problem = pattern(rank, min(nbytes, _CHUNK)), np.empty(_CHUNK, np.uint8), ""

    def read(at: int, n: int) -> Bytes:
        device.copy(int(got.ctypes.data), recv + at, n)
        return got[:n]

    with contextlib.ExitStack() as undo:
        send, recv = device.allocate(nbytes), device.allocate(nbytes)
        undo.callback(device.free, send)
        undo.callback(device.free, recv)
        device.copy(send, int(mine.ctypes.data), done := mine.size)
        while done < nbytes:
            device.copy(send + done, send, n := min(done, nbytes - done))
            done += n
        device.copy(recv, send, nbytes)  # where nothing comes, what is there is not the peer's
        try:
            work = enqueue(send, recv)
        except RegistrationError as error:
            return str(error)
        try:
            work.wait(wait)
        except CollectiveTimeoutError:
            problem = edges.problem(peer) or nothing_came(peer, wait)
            edges.give_up(peer)
            work.wait()
        return edges.problem(peer) or problem or wrong(read, peer, nbytes)


def nothing_came(peer: int, seconds: float) -> str:
    return f"nothing came from rank {peer} in {seconds:.3g} s"


def pattern(rank: int, nbytes: int) -> Bytes:
    """What a rank sends."""
    period = np.random.default_rng(rank).integers(0, 256, _PERIOD, np.uint8)
    return np.resize(period, nbytes)


def wrong(read: Callable[[int, int], Bytes], rank: int, nbytes: int) -> str:
    """What is wrong with what came from a rank, if anything is. `read` gives so many bytes of it from an offset on."""
    want, count, first = pattern(rank, min(nbytes, _CHUNK)), 0, 0
    for at in range(0, nbytes, _CHUNK):
        n = min(_CHUNK, nbytes - at)
        places = np.flatnonzero(read(at, n) != want[:n])
        if places.size and not count:
            first = at + int(places[0])
        count += places.size
    return f"{count} of {nbytes} bytes came wrong, the first at {first}" if count else ""
