"""Each pair's way inside a host carries a known pattern, in both directions at once, before a call uses it.

That happens when the GPU path is set up, all ranks together, through what calls use: compiled programs, streams and
signals. Pairs take turns; what came is compared byte by byte, and all ranks hear of it. A way that fails is not used:
`prove` says which, and all ranks go on from there alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from .errors import InitError
from .gpu_facts import Gpu
from .topology import Pair, Topology

_SMALL, _SLOTS = 257, 6  # bytes; and slots full of bytes: then some pieces fill one
SECONDS = 10.0  # that one pattern may take, whatever HETCOLL_TIMEOUT is: some machines are slow
_PERIOD = 4099  # bytes; a prime, so that no two slots hold the same

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Meet = Callable[[str, bytes], Sequence[bytes]]
Exchange = Callable[[int, Bytes, float], "Bytes | str"]
"""Send these bytes to a peer and receive as many within so many seconds: what came, or what went wrong."""


def pairs_of_hosts(topology: Topology, has_gpu: Sequence[bool]) -> frozenset[Pair]:
    """Those of one host of which one has a GPU."""
    return frozenset(
        (a, b) for host in topology.hosts for a in host for b in host if a < b and (has_gpu[a] or has_gpu[b])
    )


def prove(
    topology: Topology,
    rank: int,
    pairs: Collection[Pair],
    lengths: Sequence[int],
    exchange: Exchange,
    meet: Meet,
) -> dict[Pair, str]:
    """Which of these pairs' ways do not work, and why; the same on all ranks. Collective over all of them."""
    failed: dict[Pair, str] = {}
    here = topology.local_rank(rank)
    mine = next(host for host in topology.hosts if rank in host)
    places = 1 << (max(map(len, topology.hosts)) - 1).bit_length()
    for turn in range(1, places):  # place a meets place a ^ turn: nobody has two to meet at once
        other = mine[here ^ turn] if here ^ turn < len(mine) else -1
        pair = (min(rank, other), max(rank, other))
        for nbytes in lengths:
            problem = ""
            if pair in pairs and pair not in failed:
                problem = _problem(exchange(other, pattern(rank, nbytes), SECONDS), pattern(other, nbytes))
            told = [json.loads(blob) for blob in meet("proof of paths()", json.dumps([*pair, problem]).encode())]
            failed |= {(a, b): f"rank {who}: {text}" for who, (a, b, text) in enumerate(told) if text}
    return failed


def sizes(slot_bytes: int) -> tuple[int, ...]:
    """Of the patterns, in bytes."""
    return _SMALL, _SLOTS * slot_bytes


def pattern(rank: int, nbytes: int) -> Bytes:
    """What a rank sends."""
    period = np.random.default_rng(rank).integers(0, 256, _PERIOD, np.uint8)
    return np.resize(period, nbytes)


def _problem(got: Bytes | str, want: Bytes) -> str:
    if isinstance(got, str):
        return got
    wrong = np.flatnonzero(got != want)
    return f"{wrong.size} of {want.size} bytes came wrong, the first at {wrong[0]}" if wrong.size else ""


def refuse(failed: dict[Pair, str], way: str, why: str) -> None:
    """InitError that names the ranks, where a way failed that there is nothing left to use instead of."""
    if failed:
        said = "; ".join(f"ranks {a} and {b} do not reach each other {way}: {text}" for (a, b), text in failed.items())
        raise InitError(f"{said} ({why})")


def demoted(failed: dict[Pair, str], topology: Topology, gpus: Sequence[Gpu]) -> dict[Pair, str]:
    """The pairs that go on through pinned slots and sockets; InitError where some of those that failed cannot."""
    stuck = {pair: text for pair, text in failed.items() if not all(gpus[rank].vendor for rank in pair)}
    refuse(stuck, "through memory that both have mapped", "one of them is a CPU")
    if topology.cross != "auto":
        refuse(failed, f"the way that HETCOLL_CROSS={topology.cross} asks for", "nothing else was tried")
    return failed
