"""Which algorithm for which size.

A pure function of the topology, which all ranks hold alike, so all ranks choose alike. `costs` states what each
algorithm takes from the busiest rank; a few numbers for each kind of edge turn that into a time that is linear in the
size: alpha-beta-gamma, as in Thakur, Rabenseifner and Gropp (IJHPCA 2005). The fastest algorithm for
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
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple, TypeVar

from ..errors import ArgumentError
from ..types import REDUCING, ROOTED, Collective
from .algorithms import ALGORITHMS, Algorithm, find, known
from .algorithms.hosts import runs_among
from .costs import COSTS, Cost, Levels, Reach, levels
from .machine import GPUS, Link, Machine
from .topology import Islands, Topology

UNLIMITED = (1 << 63) - 1
K = TypeVar("K")
LOOP_PIECE = 64 << 10  # bytes that a rank of a loop has before it hands them on, about

Line = tuple[float, float]
"""Seconds of an empty message, and a byte's."""
Forms = dict[str, tuple[Line, ...]]
"""Of each algorithm, one line, or two where it runs among hosts: led, and split (`algorithms.hosts`)."""


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
    found = times(collective, nbytes, topology, forced, machine, ordered)
    if forced is not None:
        entry = find(collective, forced)
        hosts = among_hosts_of(entry, topology, ordered)
        if not entry.supports(len(topology.hosts) if hosts else topology.size):
            who = f"{len(topology.hosts)} hosts" if hosts else f"{topology.size} ranks"
            raise ArgumentError(f"{collective.label} by {forced} does not support {who}")
        if ordered and collective in REDUCING and not entry.ordered:
            able = ", ".join(name for name, each in ALGORITHMS[collective.plain].items() if each.ordered)
            raise ArgumentError(
                f"reproducible: HETCOLL_ALGO asks for {collective.label} by {forced}, which does not reduce in the"
                f" order of ranks; wanted one of {able}"
            )
        return Choice(forced, found.get(forced, math.nan), "asked for")
    name = look_up(table(collective, topology, machine=machine, ordered=ordered), nbytes)
    return Choice(name, found[name], before(found, name))


def times(
    collective: Collective,
    nbytes: int,
    topology: Topology,
    forced: str | None = None,
    machine: Machine | None = None,
    ordered: bool = False,
) -> dict[str, float]:
    """The predicted seconds of each algorithm that can be chosen, or of the one that is `forced`."""
    found = lines(collective, topology, machine, forced, ordered)
    return {name: min(fixed + nbytes * slope for fixed, slope in forms) for name, forms in found.items()}


def before(found: Mapping[str, float], name: str) -> str:
    """Why that one is taken, for people."""
    others = sorted((t, other) for other, t in found.items() if other != name)
    told = ", ".join(f"{other} ({t * 1e6:.1f} us)" for t, other in others)
    return f"before {told}" if told else "the only one"


def table(
    collective: Collective,
    topology: Topology,
    forced: str | None = None,
    machine: Machine | None = None,
    ordered: bool = False,
    able: Callable[[Algorithm], bool] | None = None,
    hosts: bool = True,
) -> list[tuple[int, str]]:
    """(largest nbytes, algorithm) in rising order, up to `UNLIMITED`: what `choose` answers, for all sizes. `able`:
    only of such algorithms. `hosts`: they may run among hosts."""
    if forced is not None:
        return [(UNLIMITED, choose(collective, 0, topology, forced, machine, ordered).name)]
    found = lines(collective, topology, machine, ordered=ordered, hosts=hosts)
    if able is not None:
        found = {name: line for name, line in found.items() if able(find(collective, name))}
    if not found:
        raise ArgumentError(f"no algorithm for {collective.label} among {topology.size} ranks states its cost")
    rows: list[tuple[int, str]] = []
    for upper, (name, _) in _envelope(
        {(name, i): line for name, forms in found.items() for i, line in enumerate(forms)}
    ):
        if rows and rows[-1][1] == name:  # the other form
            rows.pop()
        rows.append((upper, name))
    return rows


def _envelope(found: Mapping[K, Line]) -> list[tuple[int, K]]:
    """(largest nbytes, which line is the lowest) in rising order, up to `UNLIMITED`."""
    key = min(found, key=found.__getitem__)  # of equals, the first in the table
    rows: list[tuple[int, K]] = []
    while True:
        fixed, slope = found[key]
        crossings = [
            ((other_fixed - fixed) / (slope - other_slope), other_slope, other)
            for other, (other_fixed, other_slope) in found.items()
            if other_slope < slope
        ]
        where, _, following = min(crossings, key=itemgetter(0, 1), default=(math.inf, 0.0, key))
        if where >= UNLIMITED:
            return [*rows, (UNLIMITED, key)]
        rows.append((math.floor(where), key))
        key = following


def table_among(
    collective: Collective, topology: Topology, islands: Islands, able: Callable[[Algorithm], bool]
) -> list[tuple[int, str]]:
    """The same for ranks with GPUs: which algorithm runs among `islands`, one member of each on a part of the buffer,
    of those that are `able` and know no levels.

    Calls inside them take as long whatever this is.
    """
    fewest, among = min(map(len, islands)), _firsts(topology, islands)
    rows = table(collective, among, machine=GPUS, able=lambda e: able(e) and e.levels is None, hosts=False)
    return [(upper if upper == UNLIMITED else upper * fewest, name) for upper, name in rows]


def times_among(
    collective: Collective, nbytes: int, topology: Topology, islands: Islands, able: Callable[[Algorithm], bool]
) -> dict[str, float]:
    """The predicted seconds of each algorithm of which `table_among` takes one."""
    found = lines(collective, _firsts(topology, islands), GPUS, hosts=False)
    part, kinds = nbytes / min(map(len, islands)), ALGORITHMS[collective.plain]
    return {name: min(fixed + part * slope for fixed, slope in forms)
            for name, forms in found.items() if able(kinds[name]) and kinds[name].levels is None}  # fmt: skip


def _firsts(topology: Topology, islands: Islands) -> Topology:
    """One rank of each island."""
    firsts = [topology.ranks[island[0]] for island in islands]
    cores = len(firsts)  # a GPU moves data without them
    return Topology(tuple(replace(info, rank=i, cores=cores) for i, info in enumerate(firsts)), topology.setting)


def look_up(rows: list[tuple[int, str]], nbytes: int) -> str:
    """The algorithm for one size, of a `table`."""
    return rows[bisect_left(rows, (nbytes,))][1]


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
                raise ArgumentError(f"HETCOLL_ALGO: {setting!r} names no collective: {label!r}")
            try:
                find(kinds[0], name.strip())
            except ArgumentError as error:
                raise ArgumentError(f"HETCOLL_ALGO: {error}") from None
        else:
            kinds = [kind for kind in Collective if name in known(kind)]
            if not kinds:
                there = ", ".join(sorted({n for entries in ALGORITHMS.values() for n in entries}))
                raise ArgumentError(f"HETCOLL_ALGO: {setting!r} names no algorithm: {name!r}; there are {there}")
        asked.update(dict.fromkeys(kinds, name.strip()))
    return asked


def among_hosts_of(entry: Algorithm, topology: Topology, ordered: bool = False) -> bool:
    """Whether an algorithm runs among the hosts: where there are several, some of several ranks, unless it is to reduce
    in the order of ranks (`ordered`)."""
    several = 1 < len(topology.hosts) < topology.size
    return several and runs_among(entry) and not (ordered and entry.collective in REDUCING)


def led(collective: Collective, name: str, topology: Topology, machine: Machine | None = None) -> int:
    """The largest nbytes for which hosts are led where an algorithm runs among them; from there on they are split. One
    that states no cost is taken for `direct`."""
    stated = COSTS[collective.plain]
    one, both = _forms(_Place(collective, topology, machine or Machine()), stated.get(name, stated["direct"]))
    return _envelope({True: one, False: both})[0][0] if one <= both else -1


def lines(
    collective: Collective,
    topology: Topology,
    machine: Machine | None = None,
    forced: str | None = None,
    ordered: bool = False,
    hosts: bool = True,
) -> Forms:
    """For each algorithm that can be chosen, or the one that is `forced`: what it takes, in each of its forms."""
    plain, size, ordered = collective.plain, topology.size, ordered and collective in REDUCING
    able = {forced: find(collective, forced)} if forced else ALGORITHMS.get(plain, {})
    place, found = _Place(collective, topology, machine or Machine()), dict[str, tuple[Line, ...]]()
    several, costs = hosts and 1 < len(topology.hosts) < size, COSTS.get(plain, {})
    for name, each in able.items():
        among = several and among_hosts_of(each, topology, ordered)
        if not each.supports(len(topology.hosts) if among else size) or (ordered and not each.ordered):
            continue
        if each.equal and collective is not plain:
            continue
        stated = costs.get(name)
        if among and stated:
            found[name] = _forms(place, stated)
        elif several and each.levels:
            found[name] = (place.levels(each.levels(topology.hosts)),)
        elif stated:
            cost = stated(size)
            if name == forced or not cost.turns or (place.crowding > 1 and topology.cores <= cost.turns):
                found[name] = (place.line(cost),)
    return found


def _forms(place: _Place, cost: Callable[[int], Cost]) -> tuple[Line, Line]:
    """Led, and split."""
    hosts = place.hosts
    one, both = (levels(place.collective, cost(len(hosts)), hosts, led=led) for led in (True, False))
    return place.levels(one), place.levels(both)


class _Place:
    """Where a collective runs, and how long there is what an algorithm takes."""

    def __init__(self, collective: Collective, topology: Topology, machine: Machine) -> None:
        self.machine = machine = machine.on(topology) if len(topology.hosts) > 1 else machine
        self.crowding, self.collective = topology.crowding, collective.plain
        self.hosts = hosts = topology.hosts
        self.size = topology.size
        self.inside, self.between = _links(topology, machine)
        self.several, self.claims = len(hosts) > 1, topology.claims
        self.unlike = self.several and topology.unlike
        # How many ranks have the next one on another host; and how many ranks' whole traffic the busiest host's network
        # card carries, where they talk to those next to them, and where they talk to anyone.
        self.borders, self.next_senders, self.senders = 0, 0.0, 0.0
        if self.several:
            host_of = [info.host for info in topology.ranks]
            leaving = [a for a, b in pairwise([*host_of, host_of[0]]) if a != b]
            self.borders, self.next_senders = len(leaving), max(map(leaving.count, set(host_of)))
            rooted = collective in ROOTED
            self.senders = max((1 if rooted else len(h)) * (self.size - len(h)) / (self.size - 1) for h in hosts)

    def line(self, cost: Cost) -> Line:
        """Hops one after another, and the busiest rank's work, which the ranks of a core share; or its host's card."""
        machine, inside, between, crowding = self.machine, self.inside, self.between, self.crowding
        near, far = cost.reach is Reach.NEAR, float(self.several)
        if near and cost.hops > 0:  # a chain of neighbours leaves its host now and then, at least once for each
            far = max(self.borders / self.size, min(1.0, self.borders / cost.hops))
        latency = inside.latency + far * (between.latency - inside.latency) + machine.switch * (crowding - 1)
        overhead = inside.overhead + far * (between.overhead - inside.overhead)
        link = between if far > 0 else inside
        mean = max(cost.mean, 1 / crowding) if link is machine.loopback else 1.0  # all that it takes is work of cores
        # The ranks of a core run one after another, and not always the one that could go on.
        hops = 1.5 * (cost.hops - 1) / crowding + 1 if cost.turns else cost.hops
        ends = 2 * cost.hops if link is machine.tcp else 0  # both ends of a hop work over TCP, one after the other
        fixed = hops * latency + max(cost.messages * crowding * mean, ends) * overhead
        passed = self.collective is Collective.REDUCE and cost.messages <= 2 <= cost.hops  # the sum, from rank to rank
        if passed and cost.stepwise and self.size > 2:  # in a loop no rank runs ahead
            fixed += cost.hops * LOOP_PIECE / link.bandwidth
        copied = cost.sent + cost.received - cost.reduced - (0 if far > 0 else cost.answered)
        if cost.copied > 0:
            copied += cost.copied - (cost.sent if link is machine.shm and not self.claims else 0)
            fixed += machine.staging * cost.copied / crowding**2
        moved = max(cost.sent, cost.received) if link.duplex else copied
        if self.several or machine.slots_incast > 0:
            moved *= self.incast(cost)
        work = (moved / link.bandwidth + cost.reduced / machine.reduce) * crowding * mean
        # Cards go on while ranks wait for each other; cores that copy do not. Who waits for one other leaves a shared
        # core to the rest; where several streams meet, all wait.
        waits = cost.stepwise or (passed and link is machine.shm)  # there each wakes the next one for each piece
        if waits and far == 0 and (near or cost.senders > 1 or crowding <= 1 or link is not machine.loopback):
            work *= machine.stall
        senders = self.next_senders if near else self.senders
        return fixed, max(work, max(cost.sent, cost.received) / link.bandwidth * senders)

    def incast(self, cost: Cost) -> float:
        """How much longer bytes take where several send to one host at a time, or several GPUs to one; and where that
        waits for the slow one of a host's cards."""
        machine = self.machine
        if not self.several:
            return 1 + machine.slots_incast * max(0, min(cost.senders, machine.slots_incast_most) - 2)
        if self.between is not machine.tcp:
            return 1.0
        waits = machine.unlike if self.unlike and (cost.stepwise or cost.senders > 1) else 1.0
        return waits * (1 + machine.incast * (min(cost.senders, machine.incast_most) - 1))

    def levels(self, levels: Levels) -> Line:
        """The work inside a host, then that between hosts, as if nothing overlapped."""
        (inside, between), near, far = levels, self.inside, self.between
        machine, crowding = self.machine, self.crowding
        fixed = inside.hops * near.latency + between.hops * far.latency
        fixed += (inside.hops + between.hops) * machine.switch * (crowding - 1)
        ends = 2 * between.hops if far is machine.tcp else 0
        fixed += inside.messages * crowding * near.overhead + max(between.messages * crowding, ends) * far.overhead
        slope = (inside.sent + inside.received - inside.reduced) / near.bandwidth * crowding
        slope += max(between.sent, between.received) / far.bandwidth * self.incast(between)
        return fixed, slope + (inside.reduced + between.reduced) / machine.reduce * crowding


def _links(topology: Topology, machine: Machine) -> tuple[Link, Link]:
    """What edges are like inside hosts and between them."""
    loopback = len(topology.hosts) == 1
    every = {"tcp": machine.loopback if loopback else machine.tcp, "verbs": machine.verbs}.get(topology.setting)
    if every is not None:
        return every, every
    return machine.shm, machine.verbs if topology.between_hosts == "verbs" else machine.tcp
