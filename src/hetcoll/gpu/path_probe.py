"""Each pair's way, inside a host or between hosts, carries a known pattern both ways at once before a call uses it.

That goes through what calls use: compiled programs, streams and signals. What came is compared byte by byte. A way that
fails is given up for the next one of `Topology.ways`, which is tried in turn.

Ways inside hosts are tried when the GPU path is set up, all ranks together: pairs take turns, and all ranks hear of
what came. Those between hosts are tried by their two ranks, when a plan first needs them: see `far_proof`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..errors import InitError, RegistrationError
from ..plan.topology import SPELLED, Pair, Topology
from ..vendors.devices.base import URGENT

if TYPE_CHECKING:
    from ..vendors.devices.base import Device
    from .shared import GpuShare

LABEL = "proof of paths()"
_SMALL = 257  # bytes
_SLOTS = 4  # so many slots full, and a bit
SECONDS = 10.0  # that one pattern may take, whatever HETCOLL_TIMEOUT is: some machines are slow
MOST = 300  # characters of what went wrong, for others
_PAUSE = 200e-6  # seconds between looks at streams
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
    """Find a way between pairs of one host (`pairs_to_try`); `share` hears what is given up. Whether any is.

    Collective over all ranks. `leave` ends what goes to a peer by a way that is given up, and `listen` makes ranks
    reachable by sockets. InitError on all ranks: see `give_up`.
    """
    tried = pairs_to_try(share.topology, [bool(gpu.vendor) for gpu in share.gpus])
    pairs: Collection[Pair] = tried
    given_up = False
    while failed := try_all(pairs, share.rank, lengths(share), exchange, meet):
        give_up(share, failed, leave)
        listen()
        pairs, given_up = failed, True
    share.proved.update(sum(pair) - share.rank for pair in tried if share.rank in pair)
    return given_up


def lengths(share: GpuShare) -> tuple[int, int]:
    """Bytes of the patterns that a way has to carry."""
    return _SMALL, _SLOTS * share.slot_bytes + 8


def messages(share: GpuShare, nbytes: int) -> Iterator[tuple[int, int]]:
    """Those in which a pattern goes, as offsets and lengths: each fits a slot, and is sent before the other rank's is
    received, so that no number of hardware queues is too small."""
    for at in range(0, nbytes, share.slot_bytes):
        yield at, min(share.slot_bytes, nbytes - at)


def give_up(share: GpuShare, failed: dict[Pair, str], leave: Callable[[int], None]) -> None:
    """Ways that failed, and why: `share` goes on with what is left, and `leave` ends what goes to a peer of this rank.

    InitError where no way is left, as where HETCOLL_CROSS asked for the one that failed, and where it is one to a rank
    without a GPU on another host: its engine keeps those links, whose RDMA ends on TCP by itself.
    """
    left = without(share.topology, failed)
    lost = {pair: text for pair, text in failed.items() if not left.ways(*pair)}
    asked = f"HETCOLL_CROSS={left.cross}" if left.cross != "auto" else f"HETCOLL_TRANSPORT={left.setting}"
    _refuse(lost, share.topology, f"{asked} leaves no other way")
    has_cpu = (pair for pair in failed if not all(share.gpus[rank].vendor for rank in pair))
    lost = {pair: failed[pair] for pair in has_cpu if share.topology.far(*pair)}
    _refuse(lost, share.topology, "one of them is a CPU, which keeps its links")
    for pair in failed:
        if share.rank in pair:
            leave(sum(pair) - share.rank)
    share.exclude(failed, left)


def pairs_to_try(topology: Topology, has_gpu: Sequence[bool]) -> set[Pair]:
    """All pairs of one host of which one has a GPU."""
    pairs = itertools.chain.from_iterable(itertools.combinations(host, 2) for host in topology.hosts)
    return {(a, b) for a, b in pairs if has_gpu[a] or has_gpu[b]}


def turns(pairs: Collection[Pair]) -> list[set[Pair]]:
    """The same pairs, those together that meet at once: a rank has no two to meet in one turn. There are as many turns
    as ranks of the fullest host, rounded up to a power of two."""
    found, taken = list[set[Pair]](), dict[int, set[int]]()
    for pair in sorted(pairs):
        busy = taken.setdefault(pair[0], set()) | taken.setdefault(pair[1], set())
        turn = next(turn for turn in itertools.count() if turn not in busy)
        for rank in pair:
            taken[rank].add(turn)
        if turn == len(found):
            found.append(set())
        found[turn].add(pair)
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
    for turn in turns(pairs):
        pair = next((pair for pair in turn if rank in pair), None)
        for nbytes in lengths:
            problem = "" if pair is None or pair in failed else exchange(sum(pair) - rank, nbytes, SECONDS)
            words = json.dumps([*(pair or (rank, rank)), problem[:MOST]])
            told = [json.loads(blob) for blob in meet(LABEL, words.encode())]
            for who, (a, b, text) in enumerate(told):
                if text:
                    failed[a, b] = "; ".join(filter(None, (failed.get((a, b)), f"rank {who}: {text}")))
    return failed


Enqueue = Callable[[bool, int, int, int, int, int], None]
"""See `Bench`."""


class Ways(Protocol):
    """What carries patterns to other ranks (`edges.GpuEdges`)."""

    def problem(self, peer: int) -> str:
        """What the way to a rank failed with, where that is known."""

    def give_up(self, peer: int) -> None:
        """Let go what waits for a rank, on the way that did not work."""


class Bench:
    """Memory of a GPU, and a stream for each direction, on which patterns are sent and come: in the middle of a job,
    too, when other streams wait for who knows what. `undo` gives them back. `enqueue` takes whether a message is sent,
    a peer, a channel, the address and length of its bytes, and a stream, on which alone it runs."""

    def __init__(
        self,
        device: Device,
        edges: Ways,
        share: GpuShare,
        enqueue: Enqueue,
        undo: contextlib.ExitStack,
    ) -> None:
        self._device, self._edges, self._share, self._enqueue = device, edges, share, enqueue
        most = max(lengths(share))
        self._out, self._in = self._streams = device.stream(URGENT), device.stream(URGENT)
        self._events = device.event(), device.event()
        for stream, event in zip(self._streams, self._events, strict=True):
            undo.callback(device.destroy_stream, stream)
            undo.callback(device.destroy_event, event)
        # What is sent repeats itself, and is there once. Drivers wait for all streams to free memory.
        self._send, self._recv = device.allocate(min(most, share.slot_bytes + _CHUNK)), device.allocate(most)
        undo.callback(device.free, self._send)
        undo.callback(device.free, self._recv)

    def exchange(self, peer: int, channel: int, nbytes: int, seconds: float) -> str:
        """See `Exchange`, on a channel. Streams that wait for what does not come are let go."""
        mine, got, problem = pattern(self._share.rank, min(nbytes, _CHUNK)), np.empty(_CHUNK, np.uint8), ""

        def read(at: int, n: int) -> Bytes:
            self._copy(int(got.ctypes.data), self._recv + at, n)
            return got[:n]

        filled = min(nbytes, self._share.slot_bytes + _CHUNK)
        self._copy(self._send, int(mine.ctypes.data), done := mine.size)
        while done < filled:
            self._copy(self._send + done, self._send, n := min(done, filled - done))
            done += n
        for at, n in messages(self._share, nbytes):
            self._copy(self._recv + at, self._send + at % _CHUNK, n)  # where nothing comes, it is not the peer's
        try:
            for at, n in messages(self._share, nbytes):
                self._enqueue(True, peer, channel, self._send + at % _CHUNK, n, self._out)
                self._enqueue(False, peer, channel, self._recv + at, n, self._in)
        except RegistrationError as error:
            return str(error)
        if not self.idle(time.monotonic() + seconds):
            problem = self._edges.problem(peer) or nothing_came(peer, seconds)
            self._edges.give_up(peer)
            self.idle(math.inf)
        return self._edges.problem(peer) or problem or wrong(read, peer, nbytes)

    def _copy(self, dst: int, src: int, nbytes: int) -> None:
        self._device.copy(dst, src, nbytes, self._out)
        self._device.synchronize(self._out)

    def idle(self, deadline: float) -> bool:
        """Wait until nothing is on its streams. Whether that is so by then."""
        for stream, event in zip(self._streams, self._events, strict=True):
            self._device.record(event, stream)
        return idle(self._device, self._events, deadline)


def idle(device: Device, events: Collection[int], deadline: float) -> bool:
    """Wait until all of these events have come. Whether they have by then."""
    while not all(map(device.query, events)):
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE)
    return True


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
