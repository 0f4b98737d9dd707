"""What plans take in a cluster: the algorithms that its ranks may choose from, each simulated at many sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np

from ..errors import ArgumentError
from ..types import WHOLE, Collective
from .algorithms import ALGORITHMS, Algorithm, find
from .algorithms.among import among
from .algorithms.atoms import AMONG
from .algorithms.hosts import among_hosts, runs_among
from .algorithms.islands import ISLANDS
from .cluster import Cluster, Wiring
from .ir import Op, Plan, Step
from .one_kernel import BY_KERNEL, MOST_RANKS, moves
from .pieces import BEGIN_CALLS, SLOTS, Cut, Lengths, cut, slot_bytes, spill
from .simulator.graph import Outcome, Server, Tasks, Weaver
from .simulator.streams import Piecewise
from .symmetry import Stand, Symmetry, everyone

MOST_TASKS = 3_000_000
MANY = 256
KERNEL = "kernel"


class Forecast(NamedTuple):
    """The tasks of one algorithm. `standing`: of so many ranks, which stand for all."""

    algorithm: str
    tasks: Tasks | Kernels
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
        if entry.equal and _of_gpus(cluster) and entry.collective in AMONG:
            continue  # as `Planner` does
        m = _runners(cluster, entry)
        cost = entry.cost(m) if entry.cost and entry.supports(m) and not (inside and entry.stretches) else None
        if (cost is not None and not cost.turns and not (cost.copied and apart)) or (
            entry.levels is not None and _of_cpus(cluster)
        ):
            names.append(name)
    if collective.plain in ISLANDS and _of_gpus(cluster):
        names.insert(0, "islands")
    if _by_kernel(cluster, collective):
        names.append(KERNEL)
    many = ("islands", "ring", "tree", *(["direct"] if _of_cpus(cluster) else []))
    return [name for name in names if name in many] or names if cluster.size > MANY else names


class Kernels:
    """A collective of GPUs as one kernel a rank (`one_kernel`). How often one waits depends on the size."""

    def __init__(self, cluster: Cluster, collective: Collective, root: int) -> None:
        self._size, self._collective, self._root = cluster.size, collective.plain, root
        self.hardware = Wiring(cluster)
        self.steps: list[tuple[int, Step | None]] = []
        self.servers: dict[Server, int] = {}

    def run(self, nbytes: int) -> Outcome:
        """With a larger buffer of `nbytes`."""
        tasks = Tasks(1, self.hardware, lambda server: server)
        for rank in range(self._size):
            rounds, written, read = moves(self._collective, nbytes, self._size, rank, self._root)
            tasks.add(rank, None, round(written + read), self.hardware.kernel(rank, rounds), one=True)
        self.servers, self.steps = tasks.servers, tasks.steps
        return tasks.run(1)


def named(collective: Collective, name: str) -> None:
    """ArgumentError where there is no such algorithm to simulate."""
    if name not in ("islands", KERNEL):
        find(collective, name)


def _by_kernel(cluster: Cluster, collective: Collective) -> bool:
    """Whether one kernel a rank can do it there: on one host whose ranks all have GPUs, which no library joins."""
    kinds = [kind for kind in cluster.kinds if kind.count]
    alone = len(cluster.hosts) == 1 < len(cluster.islands)
    return collective.plain in BY_KERNEL and alone and bool(kinds[0].vendor) and cluster.size <= MOST_RANKS


def among_hosts_there(cluster: Cluster, entry: Algorithm) -> bool:
    """Whether an algorithm runs among the hosts there: see `tuner.among_hosts_of`."""
    return _of_cpus(cluster) and runs_among(entry)


def _of_cpus(cluster: Cluster) -> bool:
    """Whether it is of several hosts, some of several ranks, none of which has a GPU."""
    return 1 < len(cluster.hosts) < cluster.size and not _of_gpus(cluster)


def _of_gpus(cluster: Cluster) -> bool:
    """Whether ranks have GPUs there."""
    return any(kind.vendor for kind in cluster.kinds if kind.count)


def _inside(cluster: Cluster) -> bool:
    """Whether vendors' libraries join ranks there."""
    return _of_gpus(cluster) and len(cluster.islands) < cluster.size


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
    forms = name not in ("islands", KERNEL) and among_hosts_there(cluster, find(collective, name))
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
    if name == KERNEL:
        if not _by_kernel(cluster, collective):
            wanted = f"wanted one host, of 2 to {MOST_RANKS} GPUs that no library joins"
            raise ArgumentError(f"{collective.label} by one kernel is not for these ranks: {wanted}")
        return Forecast(name, Kernels(cluster, collective, root), cluster.size)
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
    if symmetry is None or not draw.fits(symmetry):
        symmetry = everyone(cluster.size)
    kept, standing = symmetry, symmetry.standing

    first = draw.plan(standing[0])
    steps = len(standing) * len(first.steps)
    if steps > MOST_TASKS and len(first.steps) > 64:
        raise ArgumentError(
            f"{collective.label} by {name}: about {steps} steps of {len(standing)} ranks that may all differ, more "
            f"than {MOST_TASKS}: wanted fewer ranks, or hosts that are alike (no slow or lost ones, equal counts)"
        )
    plans: Iterable[Plan] = chain([first], (draw.plan(rank) for rank in standing[1:]))
    how, spilling = None, frozenset[int]()
    if _of_gpus(cluster) and len(cluster.islands) > 1:  # else it is one call of the vendor's library
        plans = drawn = [*plans]
        how, spilling = _pieces(cluster, collective, drawn), _spilling(cluster, drawn)
    wiring = Wiring(cluster, spilling)

    def home(server: Server) -> Server:
        return wiring.home(kept, server) if len(standing) < cluster.size else server

    weaver = Weaver(max(first.send_units, first.recv_units), wiring, symmetry, home, how)
    for plan in plans:
        weaver.add(plan)
    return Forecast(name, weaver.done(), len(standing))


def _pieces(cluster: Cluster, collective: Collective, plans: list[Plan]) -> Piecewise:
    """How messages between GPUs are cut: as a communicator of these ranks cuts them."""
    lengths, slot = Lengths.of(plans), _slot(cluster)

    def cut_of(nbytes: int) -> Cut:
        share = nbytes if collective in WHOLE else -(-nbytes // cluster.size)
        return cut(nbytes, share, slot, lengths)

    begin = max(kind.enqueue for kind in cluster.kinds if kind.count) * BEGIN_CALLS
    return Piecewise(cut_of, lengths.longest, SLOTS, begin)


def _spilling(cluster: Cluster, plans: list[Plan]) -> frozenset[int]:
    """The hosts whose slots do not fit their caches."""
    host_of, fifos = cluster.host_of, set[tuple[int, int, int]]()
    for plan in plans:
        steps = (step for step in plan.steps if step.op is Op.SEND and host_of[step.peer] == host_of[plan.rank])
        fifos.update((plan.rank, step.peer, step.channel) for step in steps)
    counts, slot = Counter(host_of[rank] for rank, _, _ in fifos), _slot(cluster)
    return frozenset(host for host, count in counts.items() if spill(count, slot))


def _slot(cluster: Cluster) -> int:
    return slot_bytes(cluster.size, max(map(len, cluster.islands)), far=len(cluster.hosts) > 1)


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
        """Whether of ranks that stand for others and lie side by side the first and the last do as those one stride
        further and at the end do."""
        standing, ends = set(symmetry.standing), {1, symmetry.times - 1}
        for rank in (rank for rank in symmetry.standing if not {rank - 1, rank + 1} <= standing):
            plan = self._kept[rank] = self.plan(rank)
            stand = Stand(plan, symmetry)
            if not all(stand.fits(self.plan(symmetry.move(rank, strides)), strides) for strides in ends):
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
