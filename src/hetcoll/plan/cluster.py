"""A cluster as a file describes it (docs/scale.md): hosts that are alike in groups, and what joins them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, inf, log2
from typing import Any

from ..types import ROOTED, Collective
from .document import Document
from .ir import Op, Step
from .pieces import CALLS
from .simulator.graph import Route, Server, Use
from .symmetry import Symmetry

HOSTS = {
    "name": "name", "count": "count", "ranks": "some", "vendor": "cuda|hip", "cores": "some", "nics": "some",
    "nic": "bandwidth", "pcie": "bandwidth", "fabric": "bandwidth", "memory": "bandwidth", "reduce": "bandwidth",
    "sockets": "bandwidth", "latency": "time", "launch": "time", "speed": "factor", "islands": "islands",
    "pinned": "bandwidth", "spilled": "bandwidth", "copy": "time", "idle": "time", "kernel": "time", "chunk": "time",
    "enqueue": "time", "burst": "size", "overhead": "time",
}  # fmt: skip
NETWORK = {"latency": "time", "overhead": "time", "hosts_per_switch": "some", "uplink": "bandwidth"}
TRAINING = {"samples": "some", "gradients": "size", "hidden": "part"}
_ADDS = (Op.REDUCE, Op.SCALE, Op.ROUND)


@dataclass(frozen=True, slots=True)
class Kind:
    """Hosts that are alike. Bandwidths in bytes per second and direction, times in seconds.

    `ranks` of each host; `vendor` of their GPUs, nothing for ranks on CPUs, which share `cores`. `nic`: of each of
    `nics` cards, which pass `burst` bytes at once when they have rested. `pcie`: of each GPU's link. `fabric`: of each
    GPU's NVLink or xGMI, which the vendor's library uses. `memory`, `reduce`: how fast a rank copies through shared
    memory, and adds. `pinned`: how fast the host's memory takes and gives what all its ranks copy or add. `sockets`:
    how fast a core moves bytes through the kernel. `latency`, `overhead`: of a message inside a host, on its way and,
    for a core, at either end. `launch`: of a vendor's collective. `speed`: samples a second of one rank in training.

    Of messages between GPUs of a host: `islands`, the places of those that a vendor's library joins, if it does not
    join all of its GPUs everywhere; `spilled`, as `pinned`, where copies do not fit the host's cache; `enqueue`, how
    long its processor takes for a call of the driver; `copy` and `kernel`, how long one takes to begin, during `idle`
    of which the engine that copies does nothing else; `chunk`, how long one of a kernel takes to another GPU besides
    its bytes.
    """

    name: str
    count: int
    ranks: int
    nic: float
    vendor: str = ""
    cores: int = 0
    nics: int = 1
    pcie: float = 50e9
    fabric: float = 400e9
    memory: float = 20e9
    reduce: float = 20e9
    sockets: float = float("inf")
    latency: float = 0.25e-6
    launch: float = 15e-6
    speed: float = 0.0
    islands: tuple[tuple[int, ...], ...] = ()
    pinned: float = float("inf")
    spilled: float = 0.0
    copy: float = 10e-6
    idle: float = 5.6e-6
    kernel: float = 5e-6
    chunk: float = 15e-6
    enqueue: float = 0.8e-6
    burst: float = 0.0
    overhead: float = 0.06e-6

    @property
    def crowding(self) -> float:
        return max(1.0, self.ranks / self.cores) if self.cores and not self.vendor else 1.0


@dataclass(frozen=True, slots=True)
class Training:
    """A step of data-parallel training: samples of all ranks, bytes of gradients, and the part of the computation
    during which they may be reduced."""

    samples: int
    gradients: int
    hidden: float = 0.6


@dataclass(frozen=True)
class Cluster:
    """Hosts in the order of the file, ranks host by host. `slow` and `lost` are by host: how many times as long all
    takes there, and how many cards are gone."""

    kinds: tuple[Kind, ...]
    latency: float = 5e-6
    overhead: float = 1e-6
    hosts_per_switch: int = 0
    uplink: float = 0.0
    slow: dict[int, float] = field(default_factory=dict)
    lost: dict[int, int] = field(default_factory=dict)
    training: Training | None = None

    @cached_property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host."""
        found: list[tuple[int, ...]] = []
        begin = 0
        for kind in self.kinds:
            for _ in range(kind.count):
                found.append(tuple(range(begin, begin + kind.ranks)))
                begin += kind.ranks
        return tuple(found)

    @cached_property
    def size(self) -> int:
        return sum(kind.count * kind.ranks for kind in self.kinds)

    @cached_property
    def islands(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that one vendor's library serves; those on CPUs are alone."""
        vendors: dict[str, list[int]] = {}
        alone: list[tuple[int, ...]] = []
        for host, kind in zip(self.hosts, self.kind_of, strict=True):
            if kind.islands:
                alone += [tuple(host[place] for place in island) for island in kind.islands]
            elif kind.vendor:
                vendors.setdefault(kind.vendor, []).extend(host)
            else:
                alone += [(rank,) for rank in host]
        return tuple(sorted([*map(tuple, vendors.values()), *alone]))

    @cached_property
    def kind_of(self) -> tuple[Kind, ...]:
        """Of each host."""
        return tuple(kind for kind in self.kinds for _ in range(kind.count))

    @cached_property
    def host_of(self) -> list[int]:
        """Of each rank."""
        return [h for h, host in enumerate(self.hosts) for _ in host]

    def name(self, host: int) -> str:
        """Of a host, as `slow` and `lost` call it in the file."""
        for kind in self.kinds:
            if host < kind.count:
                return f"{kind.name}/{host}"
            host -= kind.count
        raise IndexError(host)

    @property
    def text(self) -> str:
        """For people: how many of what."""
        return " and ".join(f"{k.count} x {k.ranks} {k.name}" for k in self.kinds if k.count)

    @property
    def symmetry(self) -> Symmetry | None:
        """That of plans that are drawn alike for hosts that fare alike: each and the one a switch further, of all kinds
        together; None where each is on its own."""
        kinds = [kind for kind in self.kinds if kind.count]
        stride = self.hosts_per_switch if self.uplink else 1
        counts = {kind.count for kind in kinds}
        if self.slow or self.lost or len(counts) != 1 or (count := counts.pop()) % stride or count == stride:
            return None
        orbits, begin = list[range](), 0
        for kind in kinds:
            end, each = begin + count * kind.ranks, stride * kind.ranks
            orbits += (range(rank, end, each) for rank in range(begin, begin + each))
            begin = end
        return Symmetry(tuple(orbits))


def read(text: str, name: str, changes: tuple[str, ...] = ()) -> Cluster:
    """The cluster that a file describes; `changes` are ``KEY=VALUE``, such as ``hosts.h200.count=4``.

    Raises
    ------
    ArgumentError
        Says which line is wrong, and what was wanted.
    """
    document = Document(text, name)
    for change in changes:
        document.change(change)
    tables = document.tables
    for key in tables:
        if key not in ("hosts", "network", "slow", "lost", "training"):
            document.refuse((key,), "is no table here: there are hosts, network, slow, lost, training")
    kinds = _kinds(document)
    network = document.table(("network",), tables.get("network", {}), NETWORK)
    if ("uplink" in network) != ("hosts_per_switch" in network):
        document.refuse(("network",), "wanted both of hosts_per_switch and uplink, or neither")
    training = None
    if "training" in tables:
        given = document.table(("training",), tables["training"], TRAINING)
        for key in ("samples", "gradients"):
            if key not in given:
                document.refuse(("training",), f"wanted {key} there")
        if any(not kind.speed for kind in kinds if kind.count):
            document.refuse(("training",), "wanted the speed of all hosts")
        training = Training(given["samples"], int(given["gradients"]), given.get("hidden", 0.6))
    slow, lost = _by_host(document, kinds, "slow", "factor"), _by_host(document, kinds, "lost", "count")
    cluster = Cluster(kinds, slow=slow, lost=lost, training=training, **network)
    for host, cards in lost.items():
        if cards >= cluster.kind_of[host].nics:
            problem = f"wanted at least one of its {cluster.kind_of[host].nics} cards to be left"
            document.refuse(("lost", cluster.name(host)), problem)
    return cluster


def _kinds(document: Document) -> tuple[Kind, ...]:
    given = document.tables.get("hosts")
    if not isinstance(given, list) or not given:
        document.refuse(("hosts",), "wanted tables [[hosts]] with name, count, ranks and nic")
    kinds: list[Kind] = []
    for i, one in enumerate(given):
        values = document.table(("hosts", i), one, HOSTS)
        for key in ("name", "count", "ranks", "nic"):
            if key not in values:
                document.refuse(("hosts", i), f"wanted {key} there")
        if values.get("vendor"):
            values = {"latency": 1e-6, "reduce": 500e9} | values
        _check_islands(document, i, values)
        if values["name"] in [kind.name for kind in kinds]:
            document.refuse(("hosts", i, "name"), f"{values['name']!r} is taken")
        kinds.append(Kind(**values))
    if not any(kind.count for kind in kinds):
        document.refuse(("hosts",), "wanted at least one host")
    return tuple(kinds)


def _check_islands(document: Document, i: int, values: dict[str, Any]) -> None:
    if "islands" not in values:
        return
    places = sorted(place for island in values["islands"] for place in island)
    if not values.get("vendor"):
        document.refuse(("hosts", i, "islands"), "wanted a vendor there, whose library joins them")
    if places != list(range(values["ranks"])):
        problem = f"wanted each of the places 0 to {values['ranks'] - 1} once, got {places}"
        document.refuse(("hosts", i, "islands"), problem)


def _by_host(document: Document, kinds: tuple[Kind, ...], table: str, kind: str) -> dict[int, Any]:
    names = [f"{k.name}/{i}" for k in kinds for i in range(k.count)]
    given = document.tables.get(table, {})
    if not isinstance(given, dict):
        document.refuse((table,), f"wanted a table of hosts, got {given!r}")
    found = {}
    for key, value in given.items():
        if key not in names:
            document.refuse((table, key), f"is no host: wanted NAME/NUMBER, from {names[0]} to {names[-1]}")
        found[names.index(key)] = document.read((table, key), kind, value)
    return found


class Wiring:
    """What tasks occupy in a cluster. See `simulator.graph.Hardware`."""

    def __init__(self, cluster: Cluster, spilling: frozenset[int] = frozenset()) -> None:
        """`spilling`: hosts on which slots of GPUs do not fit the cache."""
        self._c, self._spilling = cluster, spilling
        self._members: dict[int, tuple[int, dict[int, int], float]] = {}  # by an island's first rank

    def home(self, symmetry: Symmetry, server: Server) -> Server:
        """The server that stands for one."""
        what, where, which = server
        if what.startswith("switch"):
            return (what, 0, which)
        if what.startswith("card") or what == "memory":
            rank = symmetry.home(self._c.hosts[where][0])[0]
            return (what, self._c.host_of[rank], which)
        return (what, symmetry.home(where)[0], which)

    def slack(self, server: Server) -> float:
        what, where, _ = server
        if not what.startswith("card"):
            return 0.0
        kind = self._c.kind_of[where]
        return kind.burst / kind.nic * self._slower(where)

    def name(self, server: Server) -> str:
        what, where, which = server
        if what.startswith("switch"):
            return f"{what} {where}"
        if what.startswith("card"):
            return f"{what} {which} of {self._c.name(where)}"
        if what == "memory":
            return f"{what} of {self._c.name(where)}"
        host = self._c.host_of[where]
        return f"{what} {where - self._c.hosts[host][0]} of {self._c.name(host)}"

    def route(self, a: int, b: int, reduces: bool) -> Route:
        from_host, to_host = self._c.host_of[a], self._c.host_of[b]
        if from_host == to_host:
            return self._inside(a, b, from_host, reduces)
        c, near, far = self._c, self._c.kind_of[from_host], self._c.kind_of[to_host]
        way = [self._card("card out", a), *self._switches(from_host, to_host), self._card("card in", b)]
        out = [*self._end(a, near, "pcie out"), *way]
        into = [self._use(b, "pcie in", far.pcie, far.idle)] if far.vendor else self._end(b, far, "core")
        if reduces:
            into.append(self._use(b, "gpu" if far.vendor else "core", far.reduce / far.crowding))
        starts = self._start(a, near), self._start(b, far, reduces)
        return Route(tuple(out), tuple(into), c.latency * self._slower(to_host), starts)

    def work(self, rank: int, op: Op) -> tuple[Use, ...]:
        kind = self._c.kind_of[self._c.host_of[rank]]
        if op not in _ADDS:
            return ()
        return (self._use(rank, "gpu" if kind.vendor else "core", kind.reduce / kind.crowding),)

    def local(self, rank: int, island: tuple[int, ...], step: Step) -> tuple[Use, ...]:
        """A ring over all members: bytes leave and enter each GPU, and each host, once for each phase."""
        c = self._c
        if island[0] not in self._members:
            hosts: dict[int, int] = {}
            for member in island:
                hosts[c.host_of[member]] = hosts.get(c.host_of[member], 0) + 1
            slow = max(self._slower(host) for host in hosts)
            self._members[island[0]] = (len(island), hosts, slow)
        k, hosts, slow = self._members[island[0]]
        host = c.host_of[rank]
        kind, what = c.kind_of[host], step.local.kind if step.local else Collective.ALLREDUCE
        passes = 1.0 if what in ROOTED else (k - 1) / k * (2 if what is Collective.ALLREDUCE else 1)
        begins = kind.launch if len(c.islands) == 1 else kind.kernel  # among several the host enqueues it meanwhile
        wait = (begins + c.latency * 2 * ceil(log2(len(hosts)))) * slow
        uses = [Use(("fabric", rank, 0), passes / kind.fabric * slow, wait)]
        if len(hosts) > 1:
            for card in ("card out", "card in"):
                server, per_byte, _ = self._card(card, rank)
                uses.append(Use(server, per_byte * passes / hosts[host]))
        return tuple(uses)

    def kernel(self, rank: int, rounds: int) -> tuple[Use, ...]:
        """Of a kernel that does a whole collective: it writes and reads the host's memory by turns."""
        host = self._c.host_of[rank]
        kind = self._c.kind_of[host]
        memory = Use(("memory", host, 0), self._slower(host) / kind.pinned)
        return (self._use(rank, "pcie", kind.pcie, kind.kernel + rounds * kind.chunk), memory)

    def _inside(self, a: int, b: int, host: int, reduces: bool) -> Route:
        kind = self._c.kind_of[host]
        if kind.vendor:
            spills = kind.spilled and host in self._spilling
            memory = Use(("memory", host, 0), self._slower(host) / (kind.spilled if spills else kind.pinned))
            into = [self._use(b, "pcie in", kind.pcie, kind.idle), memory]
            if reduces:
                into.append(self._use(b, "gpu", kind.reduce))
            starts = self._start(a, kind), self._start(b, kind, reduces)
            out = (self._use(a, "pcie out", kind.pcie, kind.idle), memory)
            return Route(out, tuple(into), kind.latency * self._slower(host), starts)
        crowding = kind.crowding
        common = [Use(("memory", host, 0), self._slower(host) / kind.pinned)] if kind.pinned < inf else []
        first = kind.overhead * crowding
        sent = self._use(a, "core", kind.memory / crowding, first)
        got = self._use(b, "core", (kind.reduce if reduces else kind.memory) / crowding, first)
        return Route((sent, *common), (got, *common), kind.latency * self._slower(host) * crowding)

    def host(self, rank: int, op: Op) -> float:
        kind = self._c.kind_of[self._c.host_of[rank]]
        return (CALLS[op] * kind.enqueue + kind.launch * (op is Op.LOCAL)) * self._slower(self._c.host_of[rank])

    def _start(self, rank: int, kind: Kind, reduces: bool = False) -> float:
        """How long a piece takes to begin: a copy, and where it is added to what is there a kernel behind it."""
        if not kind.vendor:
            return 0.0
        return (max(0.0, kind.copy - kind.idle) + kind.kernel * reduces) * self._slower(self._c.host_of[rank])

    def _end(self, rank: int, kind: Kind, pcie: str) -> list[Use]:
        """What a message between hosts takes of the rank itself."""
        if kind.vendor:
            return [self._use(rank, pcie, kind.pcie, self._c.overhead + kind.idle)]
        return [self._use(rank, "core", kind.sockets / kind.crowding, self._c.overhead * kind.crowding)]

    def _card(self, what: str, rank: int) -> Use:
        """Cards are dealt to the ranks of a host; where there are more, each rank has several, which are one here."""
        host = self._c.host_of[rank]
        kind, j = self._c.kind_of[host], rank - self._c.hosts[host][0]
        left = kind.nics - self._c.lost.get(host, 0)
        if left >= kind.ranks:
            return Use((what, host, j), self._slower(host) / (kind.nic * left / kind.ranks))
        return Use((what, host, j * left // kind.ranks), self._slower(host) / kind.nic)

    def _switches(self, a: int, b: int) -> list[Use]:
        each = self._c.hosts_per_switch
        if not each or a // each == b // each:
            return []
        up, down = ("switch up", a // each, 0), ("switch down", b // each, 0)
        return [Use(up, 1 / self._c.uplink), Use(down, 1 / self._c.uplink)]

    def _use(self, rank: int, what: str, bandwidth: float, first: float = 0.0) -> Use:
        slower = self._slower(self._c.host_of[rank])
        return Use((what, rank, 0), slower / bandwidth, first * slower)

    def _slower(self, host: int) -> float:
        return self._c.slow.get(host, 1.0)
