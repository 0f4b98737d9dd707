"""Plays the schedule of a seed, and says what was wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from hetcoll.rendezvous import bootstrap, succession
from hetcoll.rendezvous.protocol import exchanges
from hetcoll.rendezvous.store import groups, returns, server, tree
from hetcoll.rendezvous.store.group import Group

from .engine import Links
from .job import LONG, SUCCESSOR, Fault, Job, address, draw, new_address
from .kernel import Kernel, Process, World
from .network import Host, Network
from .rank import History, Rank
from .verdict import judge

_FEW, _FAN = exchanges.FEW, tree.FAN
_finish_exchange = groups.Groups._finish_exchange
_FOR_EVER = 100.0  # seconds that a stopped process is


@dataclass
class Played:
    """`decisions`: how often a thread was picked; `digest` is the same number where all were the same."""

    problems: list[str]
    decisions: int
    digest: int
    seconds: float


class Cluster:
    """The machines and processes of a job."""

    def __init__(self, job: Job, kernel: Kernel) -> None:
        self.job, self.kernel, self.history = job, kernel, History()
        self.network = Network(kernel, job.weather)
        self.links = Links(self.network)
        self.told: dict[str, Any] = {}
        self.ranks: dict[str, Rank] = {}
        self.processes: dict[str, Process] = {}
        self.at: dict[str, float] = {}
        """When something was done to a process."""
        self._to_come = len(job.newcomers)
        self.history.over = lambda: all(
            each.dead or name in self.history.done or name in self.history.ends for name, each in self.processes.items()
        )
        for rank, number in enumerate(job.hosts):
            self._start(str(rank), self.network.host(address(number)), rank)
        for number, when in enumerate(job.newcomers):
            host = self.network.host(new_address(number))
            kernel.after(when, partial(self._start, f"+{number}", host, None))
        for fault in job.faults:
            kernel.after(fault.at, partial(self._strike, fault))

    @property
    def over(self) -> bool:
        return not self._to_come and all(each.dead for each in self.processes.values())

    def _start(self, name: str, host: Host, rank: int | None) -> None:
        self._to_come -= rank is None
        process = self.processes[name] = Process(self.kernel, name, host)
        one = self.ranks[name] = Rank(self.job, self.history, name, self.told, self.links)
        process.main = process.spawn(lambda: one.run(rank), "main")

    def _first_successor(self) -> str:
        """The last rank where the job has none as yet."""
        for name, one in self.ranks.items():
            known = None if one.session is None else one.session.control._succession
            if known is not None and known._order[:1] == [known._mine]:
                self.history.stopped = name
                return name
        return str(self.job.size - 1)

    def _stores(self) -> set[str]:
        """Where the store is or may be from now on, as the ranks know it."""
        controls = [one.session.control for one in self.ranks.values() if one.session is not None]
        places = [
            *(each.unique_id.addresses for each in controls),
            *(p for c in controls for p in c._succession._order),
        ]
        return {host for each in places for host, _ in each}

    def _strike(self, fault: Fault) -> None:
        name = self._first_successor() if fault.rank == SUCCESSOR else str(fault.rank)
        process = self.processes[name]
        self.kernel.tell(None, f"{fault}")
        if fault.what == "reset":
            streams = list(self.network.streams)
            if streams:
                self.network.reset(streams[int(self.kernel.random.random() * len(streams))])
        elif fault.what == "cut":
            side = fault.side or (process.host.address, self.processes["0"].host.address)
            now, hosts = self.kernel.seconds, self.network.hosts.items()
            self.history.stores |= self._stores()
            self.history.cuts.append((now, now + fault.seconds if fault.seconds else 1e9, set(side)))
            self.network.cut(
                [host for where, host in hosts if where in side],
                [host for where, host in hosts if where not in side],
            )
            if fault.seconds:
                self.kernel.after(fault.seconds, self.network.mend)
        elif process.dead:
            return
        elif fault.what == "freeze":
            process.freeze()
            self.kernel.after(fault.seconds or _FOR_EVER, process.thaw)
        elif fault.what == "kill":
            self.at[name] = self.kernel.seconds
            process.kill()
            self.kernel.after(self.network.delay(), partial(self.links.close, name))
        elif fault.what == "vanish":
            self.network.vanish(process.host)
            for other, each in self.processes.items():
                if each.host is process.host and not each.dead:
                    self.at[other] = self.kernel.seconds
                    each.kill(close=False)
        else:
            self.at[name] = self.kernel.seconds
            self.ranks[name].leaving = True


def play(seed: int, only: str = "", trace: Callable[[str], None] | None = None) -> Played:
    """The schedule of a seed."""
    job = draw(seed, only)
    few, fan = (job.few, job.few) if job.few else (_FEW, _FAN)
    for module in (exchanges, returns, server, succession, tree):
        module.FEW = few  # type: ignore[attr-defined]
    tree.FAN = fan
    bootstrap.PORTS = 3  # at which to look for the store again and again
    kernel = World.kernel = Kernel(seed, job.preempt, trace)
    cluster = Cluster(job, kernel)
    _note_decisions(cluster.history)
    try:
        kernel.run(lambda: cluster.over, LONG)
    finally:
        decisions, digest, seconds = kernel.decisions, kernel.digest, kernel.seconds
        stuck = [f"{each.name} {task.name}" for each in cluster.processes.values() for task in each.tasks]
        alive = [each.name for each in cluster.processes.values() if not each.dead]
        if kernel.problems and alive:
            kernel.problems.append(f"{alive} are alive, with {stuck}")
        kernel.unwind(cluster.processes.values())
    problems = [*kernel.problems, *judge(job, cluster.history, cluster.at)]
    return Played(problems, decisions, digest, seconds)


def _note_decisions(history: History) -> None:
    """When a store finishes an exchange."""

    def finish(store: groups.Groups, group: Group, tag: bytes, exchange: exchanges.Exchange) -> None:
        _finish_exchange(store, group, tag, exchange)
        if tag not in group.exchanges:
            history.decided.setdefault((group.name, "exchange", tag), World.kernel.seconds)

    groups.Groups._finish_exchange = finish  # type: ignore[method-assign,assignment]
