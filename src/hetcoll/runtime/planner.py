"""The planner: which algorithm runs a call, on host memory and on GPUs; and what was bound before is kept here.

A communicator imports it when it comes to be, and with it all that chooses and draws plans: `import hetcoll` costs less
without.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol, TypeVar, cast

import hetcoll._native as _native

from ..calls import Call, check_int
from ..errors import ArgumentError
from ..health.desync_report import Called
from ..health.status_report import call_site
from ..plan import tuned, tuner
from ..plan.algorithms import ALGORITHMS, Algorithm, find, installed
from ..plan.algorithms.among import among
from ..plan.algorithms.atoms import AMONG
from ..plan.algorithms.hosts import among_hosts
from ..plan.algorithms.islands import ISLANDS
from ..plan.ir import Plan
from ..plan.machine import Machine
from ..plan.topology import Islands, Topology, spell_islands
from ..types import LOGICAL, REDUCING, Collective, Format, ReduceOp
from .compression import Compression

_KEEP = 1024  # bound plans kept; the least recently used go first

K = TypeVar("K")
T = TypeVar("T")


class Kept(OrderedDict[K, T]):
    """The values used last, by key. Threads may use it at once; two of them may make one value twice."""

    def __init__(self, most: int = _KEEP) -> None:
        super().__init__()
        self._most, self._lock = most, threading.Lock()

    def get_or(self, key: K, make: Callable[[], T]) -> T:
        """The value of `key`, made if there is none."""
        with self._lock:
            if key in self:
                self.move_to_end(key)
                return self[key]
        found = make()
        self.put(key, found)
        return found

    def all(self) -> list[T]:
        """All of them now."""
        with self._lock:
            return list(self.values())

    def clear(self) -> None:
        """Forget all of them."""
        with self._lock:
            super().clear()

    def put(self, key: K, value: T) -> None:
        """Keep `value`; the one used longest ago goes where there are too many."""
        with self._lock:
            self[key] = value
            if len(self) > self._most:
                self.popitem(last=False)


class Explanation(NamedTuple):
    """What a call will use. `seconds` is what it took when `hetcoll tune` measured it, or else the cost model's
    prediction (nan when it has none). `reason` has the same of each algorithm that could be taken, and both where there
    are both.

    `transport` is what carries its data now. `paths` says of each rank of another host, in words, over which devices
    it is reached, what they did so far, and what is wrong with those that are not used; and of each other rank's GPU,
    once there were calls on GPUs, how data goes there. `compress` says which edges are compressed, and how much that
    makes of float32's bytes, or why none are. `gpus` says what arrays on GPUs would have it do, as float32 and sums,
    what would come next and why other ways are not taken, once there were calls on GPUs. `network` says what is taken
    for the rate and latency of the network between hosts.
    """

    collective: str
    nbytes: int
    algorithm: str
    transport: str
    channels: int
    seconds: float
    reason: str
    paths: tuple[str, ...] = ()
    compress: str = ""
    gpus: str = ""
    network: str = ""

    def __str__(self) -> str:
        time = "" if math.isnan(self.seconds) else f", about {self.seconds * 1e6:.1f} us"
        return (
            f"{self.collective} of {self.nbytes} bytes: {self.algorithm} over {self.transport},"
            f" {self.channels} channel{'s' * (self.channels != 1)}{time} ({self.reason})"
            + (f"\n  {self.network}" if self.network else "")
            + (f"\n  {self.compress}" if self.compress else "")
            + (f"\n  on GPUs: {self.gpus}" if self.gpus else "")
            + "".join(f"\n  {path}" for path in self.paths)
        )


class Drawing(NamedTuple):
    """What tells one drawn plan of a collective on host memory from another: an algorithm, and what `build` takes."""

    algorithm: Algorithm
    stretches: int
    root: int = 0
    scale: bool = False
    logical: bool = False
    compress: bool = False


class Connected(Protocol):
    """What knows the ranks (`links.wiring.Wiring`): RDMA devices are told later than ranks."""

    topology: Topology
    measured: tuned.Tuned | None


class Planner:
    """Chooses for one communicator, and keeps what its executors have bound."""

    def __init__(
        self,
        wiring: Connected,
        rank: int,
        algo: str | None,
        compression: Compression,
        ordered: bool = False,
    ) -> None:
        """`algo` is HETCOLL_ALGO. `ordered`: every reduction is in the order of ranks."""
        self.ordered = ordered
        self._wiring, self._rank, self.compression = wiring, rank, compression
        installed.load()  # before anything chooses
        self._forced = {} if algo is None else tuner.named(algo)
        self._tables: dict[Collective, list[tuple[int, str]]] = {}
        self._led: dict[tuple[Collective, str], int] = {}  # up to how many bytes hosts are led
        self._tables_among: dict[tuple[Collective, int], list[tuple[int, str]]] = {}  # and of how many islands
        self._bound: Kept[tuple[object, ...], object] = Kept()
        self._described: Kept[int, tuple[Called, int]] = Kept(2 * _KEEP)

    # Keeping.

    def bound(self, executor: str, key: tuple[object, ...], bind: Callable[[], T]) -> T:
        """What `executor` has bound for a call of this `key`; `bind` makes it at the first one."""
        return cast("T", self._bound.get_or((executor, *key), bind))  # what an executor binds is of one type

    def bound_bytes(self) -> int:
        """Of what is bound for calls on host memory."""
        return sum(shape.nbytes for shape in self._bound.all() if isinstance(shape, _native.Shape))

    def forget(self) -> None:
        """Drop all that was bound."""
        self._bound.clear()

    def describe(self, number: int) -> Called | None:
        """The call that a shape was bound for, and where it was first made; None where that is forgotten."""
        found = self.described(number)
        return found and found[0]

    def described(self, number: int) -> tuple[Called, int] | None:
        """The same, and the bytes of the larger buffer."""
        return self._described.get(number)

    def note(self, number: int, what: str, nbytes: int) -> None:
        """`described` is to know the shape of this number."""
        self._described.put(number, (Called(what, call_site(), exactly=False), nbytes))

    # Choosing.

    def on_host(self, call: Call) -> Drawing:
        """What is to be drawn for a call on host memory."""
        collective, topology = call.collective, self._wiring.topology
        if call.compress:
            name = self.compressing(collective)
        else:
            table = self._tables.get(collective)
            if table is None:
                forced = self._forced.get(collective)
                if (measured := self._measured(collective)) is not None:
                    table = measured.rows()
                else:
                    machine = None if self._wiring.measured is None else self._machine
                    table = tuner.table(collective, topology, forced, machine, ordered=self.ordered)
                self._tables[collective] = table
            name = tuner.look_up(table, call.nbytes)
        algorithm, _ = self._placed(collective, name, call.nbytes, compress=bool(call.compress))
        return Drawing(
            algorithm,
            algorithm.cut(call.nbytes, topology.cores, topology.size),
            call.root,
            scale=call.op is ReduceOp.AVG,
            logical=call.op in LOGICAL and topology.size == 1,
            compress=bool(call.compress),
        )

    def _placed(self, collective: Collective, name: str, nbytes: int, *, compress: bool) -> tuple[Algorithm, str]:
        """The algorithm of that name, and in words how it runs where it does so among hosts."""
        entry, topology = find(collective, name), self._wiring.topology
        if compress:
            return among_hosts(entry, led=False), "among hosts"
        if not tuner.among_hosts_of(entry, topology, self.ordered):
            return entry, ""
        if (collective, name) not in self._led:
            self._led[collective, name] = tuner.led(collective, name, topology, self._machine)
        led = nbytes <= self._led[collective, name]
        return among_hosts(
            entry, led=led
        ), f"among {len(topology.hosts)} hosts, each {'led by one rank' if led else 'split over its ranks'}"

    def _measured(self, collective: Collective) -> tuned.Measured | None:
        """What `hetcoll tune` measured for ranks that are placed so, where HETCOLL_ALGO leaves the choice open."""
        if self._wiring.measured is None or collective in self._forced:
            return None
        return tuned.lookup(collective, self._wiring.topology, self._wiring.measured.times, self.ordered)

    @property
    def _machine(self) -> Machine:
        """What the cost model starts from."""
        return Machine() if self._wiring.measured is None else self._wiring.measured.machine(self._wiring.topology)

    def on_gpus(self, collective: Collective, nbytes: int, islands: Islands, topology: Topology) -> Algorithm:
        """The algorithm of a call that GPUs of `topology` take part in, whose vendors' libraries serve `islands`: one
        call of the library, where there is one. `nbytes` is the larger of its two buffers.

        Raises
        ------
        ArgumentError
            HETCOLL_ALGO asks for another one, which cannot be had there.
        """
        size, forced, kind = topology.size, self._forced.get(collective), collective.plain
        m, inside = len(islands), len(islands) < size
        if self._only_islands(collective, islands):
            if forced is not None:
                raise ArgumentError(
                    f"HETCOLL_ALGO asks for {collective.label} by {forced}, but on these GPUs islands, over"
                    f" {spell_islands(islands)}, runs it; HETCOLL_ISLANDS with each rank apart ('0|1|...') makes every"
                    " algorithm possible"
                )
            return ISLANDS[kind]
        does = self._able(collective, m)
        if forced is None:
            return self._among(collective, self._chosen_among(collective, nbytes, islands, topology), islands)
        if does(entry := find(collective, forced)):
            return among(entry) if inside else entry
        who = f"{size} ranks" if not inside else f"{m} islands of ranks"
        raise ArgumentError(
            f"HETCOLL_ALGO asks for {collective.label} by {forced}, which {who} with GPUs cannot do"
            f"{' in the order of ranks' * (self.ordered and collective in REDUCING)}:"
            f" wanted {', '.join(name for name, e in ALGORITHMS[kind].items() if does(e))}"
        )

    def _among(self, collective: Collective, name: str, islands: Islands) -> Algorithm:
        """What runs where an algorithm is chosen."""
        if len(islands) == self._wiring.topology.size:
            return find(collective, name)
        if name in ("direct", "oneshot" if len(islands) == 2 else ""):
            return ISLANDS[collective.plain]  # which is that one
        return among(find(collective, name))

    def choices_on_gpus(self, collective: Collective, islands: Islands, topology: Topology) -> list[str]:
        """Of what `on_gpus` chooses where HETCOLL_ALGO leaves it open; of those that run alike the first."""
        if self._only_islands(collective, islands):
            return []
        able, found = self._able(collective, len(islands)), dict[Algorithm, str]()
        for name in tuner.times_among(collective, 0, topology, islands, able):
            found.setdefault(self._among(collective, name, islands), name)
        return [*found.values()]

    def why_on_gpus(self, collective: Collective, nbytes: int, islands: Islands, topology: Topology) -> str:
        """Why `on_gpus` takes that one, for people."""
        if self._forced.get(collective) is not None:
            return "asked for"
        if self._only_islands(collective, islands):
            return "the only one"
        predicted = tuner.times_among(collective, nbytes, topology, islands, self._able(collective, len(islands)))
        if one := self._measured_among(collective, islands, topology):
            return one.choose(nbytes, predicted).reason
        return tuner.before(predicted, self._chosen_among(collective, nbytes, islands, topology))

    def _only_islands(self, collective: Collective, islands: Islands) -> bool:
        """Whether there is one plan over islands of ranks that libraries serve, and no choice."""
        m = len(islands)
        return m < self._wiring.topology.size and (m == 1 or collective.plain not in AMONG)

    def _able(self, collective: Collective, m: int) -> Callable[[Algorithm], bool]:
        """Says of an algorithm whether `m` ranks with GPUs, or islands of them, can run it."""
        ordered = self.ordered and collective in REDUCING
        alike = collective.plain not in AMONG  # shares among islands may be of unequal length
        return lambda e: e.stretches is None and (alike or not e.equal) and e.supports(m) and (e.ordered or not ordered)

    def _measured_among(self, collective: Collective, islands: Islands, topology: Topology) -> tuned.Measured | None:
        """As `_measured`, on GPUs."""
        if self._wiring.measured is None:
            return None
        placed, able = tuned.Placed.among(topology, islands), self._able(collective, len(islands))
        return tuned.find(collective, placed, self._wiring.measured.times, able)

    def _chosen_among(self, collective: Collective, nbytes: int, islands: Islands, topology: Topology) -> str:
        """The fastest one."""
        key = collective, len(islands)
        if key not in self._tables_among:
            able, one = self._able(collective, len(islands)), self._measured_among(collective, islands, topology)
            self._tables_among[key] = one.rows() if one else tuner.table_among(collective, topology, islands, able)
        return tuner.look_up(self._tables_among[key], nbytes)

    @property
    def own_plans(self) -> bool:
        """Whether HETCOLL_ALGO, or the order of ranks, takes collectives from a library that serves all ranks."""
        return bool(self._forced) or self.ordered

    def asked(self, collective: Collective) -> str | None:
        """The algorithm that HETCOLL_ALGO names for this collective; None where it leaves that open."""
        return self._forced.get(collective)

    def compressing(self, collective: Collective) -> str:
        """The algorithm that compresses."""
        names = [name for name, algorithm in ALGORITHMS[collective.plain].items() if algorithm.compresses]
        forced = self._forced.get(collective)
        if forced not in (None, *names):
            raise ArgumentError(
                f"compress: {collective.label} is compressed by {', '.join(names)}, but HETCOLL_ALGO asks for {forced}"
            )
        return forced or names[0]

    def draw(self, what: Drawing) -> Plan:
        """This rank's plan of a call on host memory."""
        topology = self._wiring.topology
        return what.algorithm.build(
            topology.size,
            self._rank,
            root=what.root,
            scale=what.scale,
            logical=what.logical,
            hosts=self.compression.groups if what.compress else topology.hosts,
            compress=what.compress,
            stretches=what.stretches,
            cores=topology.cores,
            ordered=self.ordered,
        )

    # Telling.

    def explain(
        self,
        op: str,
        nbytes: int,
        compress: str | None,
        over: Callable[[Collection[int]], tuple[str, tuple[str, ...]]],
        on_gpus: Callable[[Collective, int, Format], str],
    ) -> Explanation:
        """See `Communicator.explain`. `over` gives what carries data to these ranks, and how, in words; `on_gpus` how
        a call on GPUs runs."""
        try:
            collective = Collective[op.upper()]
        except (KeyError, AttributeError):
            raise ArgumentError(f"op: wanted one of {', '.join(c.label for c in Collective)}, got {op!r}") from None
        if check_int(nbytes, "nbytes") < 0:
            raise ArgumentError(f"nbytes: wanted 0 or more, got {nbytes}")
        topology = self._wiring.topology
        if collective is Collective.P2P:
            carried, paths = over(range(topology.size))
            gpus = on_gpus(collective, nbytes, Format.NONE)
            return Explanation(
                collective.label, nbytes, "direct", carried, 1, math.nan, "the only one", paths, gpus=gpus
            )
        form, told = self.compression.explain(collective, nbytes, compress)
        forced = self.compressing(collective) if form else self._forced.get(collective)
        if not form and (measured := self._measured(collective)) is not None:
            predicted = tuner.times(collective, nbytes, topology, None, self._machine, self.ordered)
            choice = measured.choose(nbytes, predicted)
        else:
            choice = tuner.choose(collective, nbytes, topology, forced, self._machine, ordered=self.ordered)
        if self.ordered and collective in REDUCING:
            choice = choice._replace(reason=f"{choice.reason}; reproducible: reduces in the order of ranks")
        if form:
            choice = choice._replace(seconds=math.nan, reason="the one that compresses")
        algorithm, placed = self._placed(collective, choice.name, nbytes, compress=bool(form))
        if placed:
            choice = choice._replace(reason=f"{placed}; {choice.reason}")
        stretches = algorithm.cut(nbytes, topology.cores, topology.size)
        plan = self.draw(Drawing(algorithm, stretches, compress=bool(form)))
        if form:
            told = self.compression.spell(form, sorted({step.peer for step in plan.steps if step.compressed}))
        channels = len({channel for _, channel in plan.edges})
        carried, paths = over({peer for peer, _ in plan.edges})
        return Explanation(
            collective.label, nbytes, choice.name, carried, channels, choice.seconds, choice.reason, paths, told,
            gpus=on_gpus(collective, nbytes, form), network=self._machine.network(topology),
        )  # fmt: skip
