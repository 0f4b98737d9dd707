"""What plans take in a cluster: the algorithms that its ranks may choose from, each simulated at many sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..errors import ArgumentError
from ..types import Collective
from .algorithms import ALGORITHMS, Algorithm, find
from .algorithms.among import among
from .algorithms.atoms import AMONG
from .algorithms.hosts import among_hosts, runs_among
from .algorithms.islands import ISLANDS
from .cluster import Cluster, Wiring
from .ir import Plan
from .simulator.graph import Outcome, Server, Symmetry, Tasks, Weaver, alike
from .simulator.timing import everyone

MOST_TASKS = 3_000_000
MANY = 256


class Forecast(NamedTuple):
    """The tasks of one algorithm. `standing`: of so many ranks, which stand for all."""

    algorithm: str
    tasks: Tasks
    standing: int

    def links(self, outcome: Outcome) -> list[tuple[str, float]]:
        """What worked, and during which part of the time; the busiest first, of equals the first by name."""
        rows = [
            (self.tasks.hardware.name(server), float(outcome.busy[i]) / outcome.seconds)
            for server, i in self.tasks.servers.items()
            if outcome.seconds > 0
        ]
        return sorted(rows, key=lambda row: (-round(row[1], 6), row[0]))


def candidates(cluster: Cluster, collective: Collective) -> list[str]:
    """The names of algorithms that the ranks may choose from, in order; with GPUs `islands` comes first, and others run
    among islands, as without GPUs among hosts.

    Among more than `MANY` ranks only those that are made for so many.
    """
    apart, inside = len(cluster.hosts) > 1, _inside(cluster)
    names = []
    known = ALGORITHMS.get(collective.plain, {}) if not inside or _among(cluster, collective) else {}
    for name, entry in known.items():
        m = _runners(cluster, entry)
        cost = entry.cost(m) if entry.cost and entry.supports(m) and not (inside and entry.stretches) else None
        if (cost is not None and not cost.turns and not (cost.copied and apart)) or (
            entry.levels is not None and _of_cpus(cluster)
        ):
            names.append(name)
    if collective.plain in ISLANDS and any(kind.vendor for kind in cluster.kinds if kind.count):
        names.insert(0, "islands")
    many = ("islands", "ring", "tree", *(["direct"] if _of_cpus(cluster) else []))
    return [name for name in names if name in many] or names if cluster.size > MANY else names


def among_hosts_there(cluster: Cluster, entry: Algorithm) -> bool:
    """Whether an algorithm runs among the hosts there: see `tuner.among_hosts_of`."""
    return _of_cpus(cluster) and runs_among(entry)


def _of_cpus(cluster: Cluster) -> bool:
    """Whether it is of several hosts, some of several ranks, none of which has a GPU."""
    return 1 < len(cluster.hosts) < cluster.size and not any(kind.vendor for kind in cluster.kinds if kind.count)


def _inside(cluster: Cluster) -> bool:
    """Whether vendors' libraries join ranks there."""
    return any(kind.vendor for kind in cluster.kinds if kind.count) and len(cluster.islands) < cluster.size


def _among(cluster: Cluster, collective: Collective) -> bool:
    """Whether algorithms run among islands there."""
    return _inside(cluster) and len(cluster.islands) > 1 and collective.plain in AMONG


def _runners(cluster: Cluster, entry: Algorithm) -> int:
    """How many islands, hosts or ranks run an algorithm there."""
    if _among(cluster, entry.collective):
        return len(cluster.islands)
    return len(cluster.hosts) if among_hosts_there(cluster, entry) else cluster.size


def forecasts(cluster: Cluster, collective: Collective, name: str, root: int = 0) -> list[Forecast]:
    """Of each form that an algorithm has in a cluster: see `forecast`."""
    forms = name != "islands" and among_hosts_there(cluster, find(collective, name))
    return [forecast(cluster, collective, name, root, led=led) for led in ((True, False) if forms else (False,))]


def forecast(cluster: Cluster, collective: Collective, name: str, root: int = 0, *, led: bool = False) -> Forecast:
    """The tasks of an algorithm in a cluster; `led`: of its form in which one rank leads each host, if it has one.

    Where the cluster has hosts that are alike (`Cluster.symmetry`) and the plans of the first ones are, rank by rank,
    those of the next and of the last ones with other peers, only these first ones are simulated, once for all.

    Raises
    ------
    ArgumentError
        There is no such algorithm, it does not support so many ranks, or there are too many steps to simulate.
    """
    if cluster.size < 2:
        raise ArgumentError(f"{collective.label} of one rank moves nothing: wanted at least 2 ranks")
    entry = ISLANDS.get(collective.plain) if name == "islands" else find(collective, name)
    if entry is None:
        raise ArgumentError(f"there is no {collective.label} by islands")
    between = name != "islands" and _among(cluster, collective)
    if name != "islands" and not entry.supports(many := _runners(cluster, entry)):
        kind = "islands" if between else "hosts" if many < cluster.size else "ranks"
        raise ArgumentError(f"{collective.label} by {name} does not support {many} {kind}")
    if between:
        entry = among(entry)
    elif name != "islands" and among_hosts_there(cluster, entry):
        entry = among_hosts(entry, led=led)
    draw = _Drawing(cluster, entry, root, between or name == "islands")
    symmetry = cluster.symmetry
    if symmetry is not None and draw.fits(symmetry):
        standing = symmetry.standing()
    else:
        symmetry, standing = everyone(cluster.size), list(range(cluster.size))
    wiring = Wiring(cluster)
    kept = symmetry

    def home(server: Server) -> Server:
        return wiring.home(kept, server) if len(standing) < cluster.size else server

    first = draw.plan(standing[0])
    steps = len(standing) * len(first.steps)
    if steps > MOST_TASKS and len(first.steps) > 64:
        raise ArgumentError(
            f"{collective.label} by {name}: about {steps} steps of {len(standing)} ranks that may all differ, more "
            f"than {MOST_TASKS}: wanted fewer ranks, or hosts that are alike (no slow or lost ones, equal counts)"
        )
    pipelined = len(first.islands) > 1
    weaver = Weaver(max(first.send_units, first.recv_units), wiring, symmetry, home, pipelined=pipelined)
    for rank in standing:
        weaver.add(draw.plan(rank))
    return Forecast(name, weaver.done(), len(standing))


class _Drawing:
    def __init__(self, cluster: Cluster, entry: Algorithm, root: int, islands: bool) -> None:
        self._entry, self._size, self._root = entry, cluster.size, root
        self._hosts = cluster.islands if islands else cluster.hosts
        self._kept: dict[int, Plan] = {}

    def plan(self, rank: int) -> Plan:
        if rank not in self._kept:
            return self._entry.build(self._size, rank, root=self._root, hosts=self._hosts)
        return self._kept[rank]

    def fits(self, symmetry: Symmetry) -> bool:
        """Whether the first rank of each group, and the last, do as those one stride further and at the end do."""
        for group in symmetry.groups:
            last = group.hosts // symmetry.stride - 1
            for rank in {group.begin, group.begin + symmetry.stride * group.each - 1}:
                plan = self._kept[rank] = self.plan(rank)
                for strides in {1, last}:
                    if not alike(plan, self.plan(symmetry.move(rank, strides)), symmetry, strides):
                        return False
        return True


def events(found: Forecast, outcome: Outcome, most: int = 200_000) -> Iterator[dict[str, object]]:
    """Chrome's trace events of at most so many tasks, the longest; a process a rank, a thread a lane."""
    lengths = outcome.end - outcome.begin
    chosen = np.sort(np.argsort(-lengths, kind="stable")[:most])
    for i in map(int, chosen):
        rank, step = found.tasks.steps[i]
        if step is not None:
            yield {
                "name": str(step), "ph": "X", "pid": rank, "tid": step.lane, "cat": step.op.name.lower(),
                "ts": float(outcome.begin[i]) * 1e6, "dur": float(lengths[i]) * 1e6,
            }  # fmt: skip
