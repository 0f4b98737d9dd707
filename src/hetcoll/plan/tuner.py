"""Which algorithm for which size.

A pure function of the topology, which all ranks hold alike, so all ranks choose alike. Each algorithm states what it
takes from the busiest rank (`algorithms.base.Cost`); a few numbers for each kind of edge turn that into a time that is
linear in the size: alpha-beta-gamma, as in Thakur, Rabenseifner and Gropp (IJHPCA 2005). The fastest algorithm for
every size is then the lower envelope of a few straight lines, computed once: no size is looked at when a call is made.

Examples
--------
>>> from hetcoll.plan.topology import RankInfo, Topology
>>> pair = Topology(tuple(RankInfo(r, "a", cores=2) for r in range(2)))
>>> choose(Collective.ALLREDUCE, 8, pair).name
'oneshot'
>>> [name for upper, name in table(Collective.ALLREDUCE, pair)]
['oneshot', 'direct']
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..errors import ArgumentError
from ..types import REDUCING, ROOTED, Collective
from .algorithms import ALGORITHMS, Cost, Reach, find
from .machine import Link, Machine
from .topology import Topology

UNLIMITED = (1 << 63) - 1


class Choice(NamedTuple):
    """An algorithm, its predicted seconds (nan when it was named and states no cost), and why it was taken."""

    name: str
    seconds: float
    reason: str


def choose(
    collective: Collective,
    nbytes: int,
    topology: Topology,
    forced: str | None = None,
    machine: Machine | None = None,
    ordered: bool = False,
) -> Choice:
    """The algorithm for one call; `nbytes` is the larger of its two buffers. `ordered`: it reduces in rank order.

    Raises
    ------
    ArgumentError
        `forced` does not exist, cannot serve this many ranks, or has another order.
    """
    machine = machine or Machine()
    lines = _lines(collective, topology, machine, forced, ordered)
    times = {name: fixed + nbytes * slope for name, (fixed, slope) in lines.items()}
    if forced is not None:
        if not find(collective, forced).supports(topology.size):
            raise ArgumentError(f"{collective.label} by {forced} does not support {topology.size} ranks")
        if ordered and collective in REDUCING and not find(collective, forced).ordered:
            able = ", ".join(name for name, entry in ALGORITHMS[collective.plain].items() if entry.ordered)
            raise ArgumentError(
                f"reproducible: HETCOLL_ALGO asks for {collective.label} by {forced}, which does not reduce in the"
                f" order of ranks; wanted one of {able}"
            )
        return Choice(forced, times.get(forced, math.nan), "asked for")
    rows = table(collective, topology, machine=machine, ordered=ordered)
    name = next(name for upper, name in rows if nbytes <= upper)
    others = sorted((t, other) for other, t in times.items() if other != name)
    reason = f"before {others[0][1]} ({others[0][0] * 1e6:.1f} us)" if others else "the only one"
    return Choice(name, times[name], reason)


def table(
    collective: Collective,
    topology: Topology,
    forced: str | None = None,
    machine: Machine | None = None,
    ordered: bool = False,
) -> list[tuple[int, str]]:
    """(largest nbytes, algorithm) in rising order, up to `UNLIMITED`: what `choose` answers, for all sizes."""
    if forced is not None:
        return [(UNLIMITED, choose(collective, 0, topology, forced, machine, ordered).name)]
    lines = _lines(collective, topology, machine or Machine(), ordered=ordered)
    if not lines:
        raise ArgumentError(f"no algorithm for {collective.label} among {topology.size} ranks states its cost")
    name = min(lines, key=lines.__getitem__)  # of equals, the first in the table
    rows: list[tuple[int, str]] = []
    while True:
        fixed, slope = lines[name]
        crossings = [
            ((other_fixed - fixed) / (slope - other_slope), other_slope, other)
            for other, (other_fixed, other_slope) in lines.items()
            if other_slope < slope
        ]
        where, _, following = min(crossings, key=lambda c: c[:2], default=(math.inf, 0.0, ""))
        if where >= UNLIMITED:
            return [*rows, (UNLIMITED, name)]
        rows.append((math.floor(where), name))
        name = following


def named(setting: str) -> dict[Collective, str]:
    """What ``HETCOLL_ALGO`` asks for, by collective: ``ring``, or ``allreduce:tree,broadcast:ring``.

    A bare name holds for every collective that has such an algorithm; a later entry wins over an earlier one.

    Raises
    ------
    ArgumentError
        There is no such collective or algorithm.
    """
    asked: dict[Collective, str] = {}
    for entry in setting.split(","):
        label, colon, name = entry.strip().rpartition(":")
        if colon:
            kinds = [kind for kind in Collective if kind.label == label.strip().lower()]
            if not kinds:
                raise ArgumentError(f"{setting!r} names no collective: {label!r}")
            find(kinds[0], name.strip())
        else:
            kinds = [kind for kind in Collective if name in ALGORITHMS.get(kind.plain, {})]
            if not kinds:
                known = ", ".join(sorted({n for entries in ALGORITHMS.values() for n in entries}))
                raise ArgumentError(f"{setting!r} names no algorithm: {name!r}; there are {known}")
        asked.update(dict.fromkeys(kinds, name.strip()))
    return asked


def _lines(
    collective: Collective, topology: Topology, machine: Machine, forced: str | None = None, ordered: bool = False
) -> dict[str, tuple[float, float]]:
    """For each algorithm that can be chosen or is asked for: seconds of an empty message, and for each byte."""
    lines = {}
    for name, algorithm in ALGORITHMS.get(collective.plain, {}).items():
        if algorithm.supports(topology.size) and (algorithm.ordered or not ordered or collective not in REDUCING):
            if algorithm.cost is not None:
                cost = algorithm.cost(topology.size)
                if name == forced or not cost.turns or (topology.crowding > 1 and topology.cores <= cost.turns):
                    lines[name] = _line(cost, topology, machine, rooted=collective in ROOTED)
            elif algorithm.levels is not None and 1 < len(topology.hosts) < topology.size:
                lines[name] = _two_lines(*algorithm.levels(topology.hosts), topology, machine)
    return lines


def _two_lines(inside: Cost, between: Cost, topology: Topology, machine: Machine) -> tuple[float, float]:
    """The work inside a host, then that between hosts: some of it overlaps, which is not counted on."""
    (near, far), crowding = _links(topology, machine), topology.crowding
    fixed = inside.hops * near.latency + between.hops * far.latency
    fixed += (inside.hops + between.hops) * machine.switch * (crowding - 1)
    fixed += (inside.messages * near.overhead + between.messages * far.overhead) * crowding
    slope = (inside.sent + inside.received - inside.reduced) / near.bandwidth * crowding
    slope += max(between.sent, between.received) / far.bandwidth
    return fixed, slope + (inside.reduced + between.reduced) / machine.reduce * crowding


def _line(cost: Cost, topology: Topology, machine: Machine, *, rooted: bool) -> tuple[float, float]:
    """Hops one after another, and the busiest rank's work, which the ranks of a core share; or its host's card."""
    near, crowding = cost.reach is Reach.NEAR, topology.crowding
    inside, between = _links(topology, machine)
    far = float(len(topology.hosts) > 1)
    if near and cost.hops > 0:  # a chain of neighbours leaves its host now and then, but once for each host at least
        borders = _far_neighbours(topology)
        far = max(borders / topology.size, min(1.0, borders / cost.hops))
    latency = inside.latency + far * (between.latency - inside.latency) + machine.switch * (crowding - 1)
    overhead = inside.overhead + far * (between.overhead - inside.overhead)
    link = between if far > 0 else inside
    mean = max(cost.mean, 1 / crowding) if link is machine.loopback else 1.0  # all that it takes is work of the cores
    # The ranks of a core run one after another, and not always the one that could go on.
    hops = 1.5 * (cost.hops - 1) / crowding + 1 if cost.turns else cost.hops
    fixed = (hops * latency + cost.messages * overhead * crowding) * mean
    copied = cost.sent + cost.received - cost.reduced - (0 if far > 0 else cost.answered)
    if cost.copied > 0:
        copied += cost.copied - (cost.sent if link is machine.shm and not topology.claims else 0)
        fixed += machine.staging * cost.copied / crowding**2
    moved = max(cost.sent, cost.received) if link.duplex else copied
    work = (moved / link.bandwidth + cost.reduced / machine.reduce) * crowding * mean
    # Who waits for one other leaves a shared core to the rest; where several streams meet (near), all wait.
    if cost.stepwise and (near or crowding <= 1 or link is not machine.loopback):
        work *= machine.stall
    return fixed, max(work, max(cost.sent, cost.received) / link.bandwidth * _senders(near, rooted, topology))


def _links(topology: Topology, machine: Machine) -> tuple[Link, Link]:
    """What edges are like inside hosts and between them."""
    loopback = len(topology.hosts) == 1
    every = {"tcp": machine.loopback if loopback else machine.tcp, "verbs": machine.verbs}.get(topology.setting)
    if every is not None:
        return every, every
    return machine.shm, machine.verbs if topology.between_hosts == "verbs" else machine.tcp


def _far_neighbours(topology: Topology) -> int:
    """How many ranks have the next one on another host."""
    return sum(not topology.same_host(r, (r + 1) % topology.size) for r in range(topology.size))


def _senders(near: bool, rooted: bool, topology: Topology) -> float:
    """How many ranks' whole traffic the busiest host's network card carries."""
    if len(topology.hosts) == 1:
        return 0.0
    if near:
        return max(sum(not topology.same_host(r, (r + 1) % topology.size) for r in host) for host in topology.hosts)
    return max((1 if rooted else len(h)) * (topology.size - len(h)) / (topology.size - 1) for h in topology.hosts)
