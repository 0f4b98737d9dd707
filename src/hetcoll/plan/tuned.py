"""What `hetcoll tune` measured, as a file that people review and commit: times of algorithms, for ranks that are placed
in one way. Where a job's are placed so, the fastest are taken; elsewhere the cost model chooses. Of several hosts it
has what the network takes, too, from which the model starts where there are no times. Where `islands` are named, the
times are those of data on GPUs, among these islands.

Examples
--------
>>> text = '''
... [[measured]]
... collective = "allgather"
... hosts = [4]
... cores = 4
... transport = "shm"
... bytes = [8, 1024, 1048576]
... us = { direct = [1.0, 2.0, 90.0], ring = [3.0, 2.5, 60.0] }
... '''
>>> [found] = read(text, "numbers.toml").times
>>> found.rows()
[(32768, 'direct'), (9223372036854775807, 'ring')]
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, combinations, islice, pairwise
from typing import TYPE_CHECKING, NamedTuple

from ..types import REDUCING, Collective
from . import tuner
from .algorithms import ALGORITHMS, Algorithm, installed, known
from .machine import Machine, Network
from .topology import SPELLED, Islands, RankInfo, Setting, Topology

if TYPE_CHECKING:
    from .document import Document

_TABLES = {
    "measured": ("collective", "hosts", "islands", "cores", "transport", "bytes", "us"),
    "network": ("hosts", "transport", "latency", "overhead", "bandwidth"),
}
_OPTIONAL = ("islands",)
_TRANSPORTS = "shm|tcp|verbs|shm and tcp|shm and verbs"
_WAYS = "|".join(" and ".join(some) for n in (1, 2, 3) for some in combinations(sorted(SPELLED), n))  # of GPUs
_ISLAND = re.compile(r"(cpu|cuda|hip) (\d+ on host \d+(?:, \d+ on host \d+)*)")
_BETTER = 0.97  # of the time of what is taken for smaller messages, at most: else that stays


class Island(NamedTuple):
    """Of data on GPUs: whose they are, ``cpu`` where there is none, and how many of its ranks each host has, by the
    number of the host."""

    vendor: str
    ranks: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return f"{self.vendor} {', '.join(f'{count} on host {host}' for host, count in self.ranks)}"

    @classmethod
    def parse(cls, text: str) -> Island:
        """ValueError where it is spelled in another way."""
        if not (found := _ISLAND.fullmatch(text)):
            raise ValueError(text)
        words = [part.split(" on host ") for part in found[2].split(", ")]
        return cls(found[1], tuple((int(host), int(count)) for count, host in words))


class Placed(NamedTuple):
    """How ranks are placed: how many on each host, of which so many cores count, and what carries their messages. Of
    data on GPUs, among which islands: then a `Way` or several."""

    hosts: tuple[int, ...]
    cores: int
    transport: str
    islands: tuple[Island, ...] = ()

    @classmethod
    def among(cls, topology: Topology, islands: Islands) -> Placed:
        """Of data on GPUs: of what carries it counts what is between islands that follow each other."""
        host_of = {rank: host for host, ranks in enumerate(topology.hosts) for rank in ranks}
        found = tuple(
            Island(topology.ranks[ranks[0]].vendor or "cpu", tuple(sorted(Counter(host_of[r] for r in ranks).items())))
            for ranks in islands
        )
        ways = {topology.way(a[0], b[0]) for a, b in pairwise([*islands, islands[0]]) if a != b}
        return cls.of(topology)._replace(transport=" and ".join(sorted(ways)), islands=found)

    @classmethod
    def of(cls, topology: Topology) -> Placed:
        """Cores that no rank would use do not count."""
        hosts = tuple(map(len, topology.hosts))
        if (transport := str(topology.setting)) in ("auto", "shm"):
            several = f" and {topology.between_hosts}" if len(hosts) > 1 else ""
            transport = f"shm{several}" if max(hosts) > 1 else topology.between_hosts
        return cls(hosts, min(topology.cores, max(hosts)), transport)

    @property
    def members(self) -> Islands:
        """The ranks of each island, those of `topology`."""
        left = [iter(range(end - n, end)) for n, end in zip(self.hosts, accumulate(self.hosts), strict=True)]
        return tuple(tuple(r for host, n in one.ranks for r in islice(left[host], n)) for one in self.islands)

    @property
    def topology(self) -> Topology:
        """Ranks that are placed so, by shared memory and TCP."""
        hosts = [str(number) for number, ranks in enumerate(self.hosts) for _ in range(ranks)]
        setting: Setting = "tcp" if self.transport in ("tcp", "staged-tcp") else "auto"
        return Topology(tuple(RankInfo(r, host, self.cores) for r, host in enumerate(hosts)), setting)


class Measured(NamedTuple):
    """What the algorithms of a collective took, in seconds, at rising sizes: `nbytes` of the larger of two buffers."""

    collective: Collective
    placed: Placed
    nbytes: tuple[int, ...]
    seconds: dict[str, tuple[float, ...]]

    def rows(self) -> list[tuple[int, str]]:
        """(largest nbytes, algorithm) in rising order, as `tuner.table` has them: the fastest.

        Between two sizes with different ones the first is taken up to their geometric mean.
        """
        chosen: list[str] = []
        for i in range(len(self.nbytes)):
            best = min(self.seconds, key=lambda name: self.seconds[name][i])
            last = chosen[-1] if chosen else best
            better = self.seconds[best][i] < _BETTER * self.seconds[last][i]
            chosen.append(best if better else last)
        rows = [
            (math.isqrt(self.nbytes[i] * self.nbytes[i + 1]), one)
            for i, (one, other) in enumerate(pairwise(chosen))
            if one != other
        ]
        return [*rows, (tuner.UNLIMITED, chosen[-1])]

    def over(self, rows: list[tuple[int, str]]) -> tuple[float, ...]:
        """At each size, what `rows` choose took over what the fastest did."""
        names = [tuner.look_up(rows, nbytes) for nbytes in self.nbytes]
        return tuple(self.seconds[name][i] / min(t[i] for t in self.seconds.values()) for i, name in enumerate(names))

    def choose(self, nbytes: int, predicted: Mapping[str, float]) -> tuner.Choice:
        """As `tuner.choose` has it, by the measured size that is the nearest. `predicted`: `tuner.times`."""
        i = min(range(len(self.nbytes)), key=lambda i: abs(math.log((self.nbytes[i] + 1) / (nbytes + 1))))
        name = tuner.look_up(self.rows(), nbytes)
        told = sorted((seconds[i], one) for one, seconds in self.seconds.items())
        told += [(math.nan, one) for one in sorted(predicted, key=predicted.__getitem__) if one not in self.seconds]
        texts = [
            one
            + ("" if math.isnan(took) else f" {took * 1e6:.1f} us")
            + (f" ({predicted[one] * 1e6:.1f} predicted)" if one in predicted else "")
            for took, one in told
        ]
        return tuner.Choice(name, self.seconds[name][i], f"measured with {self.nbytes[i]} bytes: {', '.join(texts)}")


class Between(NamedTuple):
    """What messages between hosts take, on which so many ranks are, over such a transport."""

    hosts: tuple[int, ...]
    transport: str
    network: Network


class Tuned(NamedTuple):
    """A file."""

    times: tuple[Measured, ...] = ()
    networks: tuple[Between, ...] = ()

    def machine(self, topology: Topology) -> Machine:
        """What the cost model is to start from for these ranks."""
        if not self.networks or len(topology.hosts) == 1:
            return Machine()
        placed = Placed.of(topology)
        found = (one.network for one in self.networks if (one.hosts, one.transport) == (placed.hosts, placed.transport))
        return Machine(measured=next(found, None))


def lookup(
    collective: Collective, topology: Topology, measured: Iterable[Measured], ordered: bool = False
) -> Measured | None:
    """What was measured of this collective for ranks that are placed as these are, of algorithms that may be taken."""
    free = collective.plain not in REDUCING or not ordered
    return find(collective, Placed.of(topology), measured, lambda e: e.supports(topology.size) and (free or e.ordered))


def find(
    collective: Collective, placed: Placed, measured: Iterable[Measured], may: Callable[[Algorithm], bool]
) -> Measured | None:
    """The same for ranks that are `placed` so, of algorithms that `may` be taken."""
    for one in measured:
        if one.collective is collective.plain and one.placed == placed:
            able = {name for name, entry in known(collective).items() if may(entry)}
            seconds = {name: times for name, times in one.seconds.items() if name in able}
            return one._replace(seconds=seconds) if seconds else None
    return None


def read(text: str, name: str) -> Tuned:
    """What a file says.

    Raises
    ------
    ArgumentError
        Says which line is wrong, and what was wanted.
    """
    from .document import Document  # which imports what reads TOML, and not every job has such a file

    installed.load()  # the file may name one of these
    document = Document(text, name)
    for key in document.tables:
        if key not in _TABLES:
            document.refuse((key,), f"is no table here: there are {', '.join(f'[[{table}]]' for table in _TABLES)}")
    times, networks = (document.tables.get(table, []) for table in _TABLES)
    for table, given in zip(_TABLES, (times, networks), strict=True):
        if not isinstance(given, list):
            document.refuse((table,), f"wanted tables [[{table}]] with {', '.join(_TABLES[table])}")
    return Tuned(
        tuple(_read(document, ("measured", i), one) for i, one in enumerate(times)),
        tuple(_between(document, ("network", i), one) for i, one in enumerate(networks)),
    )


def _whole(document: Document, path: tuple[str | int, ...], given: dict[str, object]) -> None:
    """Whether a table has all of its keys, and no others."""
    keys = _TABLES[str(path[0])]
    for key in given:
        if key not in keys:
            document.refuse((*path, key), f"is no key here: there are {', '.join(keys)}")
    for key in keys:
        if key not in given and key not in _OPTIONAL:
            document.refuse(path, f"wanted {key} there")


def _between(document: Document, path: tuple[str | int, ...], given: dict[str, object]) -> Between:
    _whole(document, path, given)
    hosts = _list(document, (*path, "hosts"), "some", given["hosts"])
    transport = document.read((*path, "transport"), _TRANSPORTS, given["transport"])
    latency, overhead = (document.read((*path, key), "time", given[key]) for key in ("latency", "overhead"))
    bandwidth = document.read((*path, "bandwidth"), "bandwidth", given["bandwidth"])
    if latency <= 0:
        document.refuse((*path, "latency"), "wanted more than no time")
    return Between(tuple(map(int, hosts)), transport, Network(latency, overhead, bandwidth))


def _read(document: Document, path: tuple[str | int, ...], given: dict[str, object]) -> Measured:
    _whole(document, path, given)
    labels = "|".join(kind.label for kind in Collective if kind.plain is kind)
    collective = Collective[document.read((*path, "collective"), labels, given["collective"]).upper()]
    hosts = tuple(map(int, _list(document, (*path, "hosts"), "some", given["hosts"])))
    islands = _islands(document, (*path, "islands"), hosts, given["islands"]) if "islands" in given else ()
    cores = document.read((*path, "cores"), "some", given["cores"])
    transport = document.read((*path, "transport"), _WAYS if islands else _TRANSPORTS, given["transport"])
    nbytes = _list(document, (*path, "bytes"), "some", given["bytes"])
    if list(nbytes) != sorted(set(nbytes)):
        document.refuse((*path, "bytes"), f"wanted rising sizes, got {list(nbytes)}")
    table, seconds = given["us"], {}
    if not isinstance(table, dict) or not table:
        document.refuse((*path, "us"), f"wanted lists of microseconds by the names of algorithms, got {table!r}")
    for algorithm, times in table.items():
        if algorithm not in ALGORITHMS[collective]:
            there = ", ".join(sorted(ALGORITHMS[collective]))
            document.refuse((*path, "us", algorithm), f"is no algorithm of {collective.label}: there are {there}")
        found = _list(document, (*path, "us", algorithm), "factor", times)
        if len(found) != len(nbytes):
            document.refuse((*path, "us", algorithm), f"wanted {len(nbytes)} times, one a size, got {len(found)}")
        seconds[algorithm] = tuple(time * 1e-6 for time in found)
    return Measured(collective, Placed(hosts, cores, transport, islands), tuple(map(int, nbytes)), seconds)


def _islands(
    document: Document, path: tuple[str | int, ...], hosts: tuple[int, ...], given: object
) -> tuple[Island, ...]:
    """Two or more, of all ranks."""
    try:
        found = tuple(map(Island.parse, given if isinstance(given, list) else ()))
    except (TypeError, ValueError):
        found = ()
    told, there = [pair for one in found for pair in one.ranks], dict.fromkeys(range(len(hosts)), 0)
    for host, count in told:
        there[host] = there.get(host, 0) + count
    if len(found) < 2 or any(count < 1 for _, count in told) or [*there.values()] != [*hosts]:
        wanted = 'a list of islands, such as "cuda 2 on host 0", that together have the ranks of all hosts'
        document.refuse(path, f"wanted {wanted}, got {given!r}")
    return found


def _list(document: Document, path: tuple[str | int, ...], kind: str, given: object) -> Sequence[float]:
    if not isinstance(given, list) or not given:
        document.refuse(path, f"wanted a list, got {given!r}")
    return [document.read(path, kind, value) for value in given]


def write(found: Tuned, about: Sequence[str]) -> str:
    """The file that `read` reads; `about` stands first, as comments."""
    lines = [f"# {line}" for line in about]
    for between in found.networks:
        latency, overhead, bandwidth = between.network
        lines += ["", "[[network]]", f"hosts = {list(between.hosts)}", f'transport = "{between.transport}"']
        lines += [f'latency = "{latency * 1e6:.4g} us"', f'overhead = "{overhead * 1e6:.4g} us"']
        lines.append(f'bandwidth = "{bandwidth / 1e6:.4g} MB/s"')
    for one in found.times:
        hosts, cores, transport, islands = one.placed
        lines += ["", "[[measured]]", f'collective = "{one.collective.label}"', f"hosts = {list(hosts)}"]
        lines += [f"islands = {json.dumps([*map(str, islands)])}"] if islands else []
        lines += [f"cores = {cores}", f'transport = "{transport}"', f"bytes = {list(one.nbytes)}", "[measured.us]"]
        for name, seconds in one.seconds.items():
            lines.append(f"{name} = [{', '.join(f'{time * 1e6:.4g}' for time in seconds)}]")
    return "\n".join(lines) + "\n"
