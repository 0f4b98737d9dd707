"""Who the ranks are and where: what they tell each other once, and what follows from it on all of them alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Literal

from ..errors import ArgumentError, InitError, spell_ranks
from .rails import Nic, first_apart, pair_up

Islands = tuple[tuple[int, ...], ...]
"""The ranks of each island, in the order in which its members count."""
Path = Literal["shm", "tcp", "verbs"]
Setting = Literal["auto", "shm", "tcp", "verbs"]
Way = Literal["direct", "mapped", "staged-rdma", "staged-tcp"]
"""How messages go between two ranks of which one or both have GPUs: by RDMA from one GPU's memory to the other's;
through slots in host memory that both have; through pinned slots of each, which RDMA or sockets carry."""
SPELLED: dict[Way, str] = {
    "direct": "by RDMA between both GPUs' memory",
    "mapped": "through memory that both have mapped",
    "staged-rdma": "through pinned slots and RDMA",
    "staged-tcp": "through pinned slots and sockets",
}
Excluded = frozenset[tuple[int, int, Way]]
"""What must not be used between two ranks, the lower one first."""
Pair = tuple[int, int]
"""Two ranks, the lower one first."""


def pair_of(a: int, b: int) -> Pair:
    """In either order."""
    return (a, b) if a < b else (b, a)


_TOLD = 16  # hosts, or ranks of islands, that a line names


@dataclass(frozen=True, slots=True)
class RankInfo:
    """What one rank tells all others.

    `host` is equal on ranks that can share memory, and says no more. `cores` is the number of cores that the ranks of
    its host can use together. `version` must be the same everywhere. `vendor` is whose library serves its GPU
    (``cuda``, ``hip``) and `device` which GPU of the host it is; empty while it has none. `nics` are the ports of RDMA
    devices that it has opened, and `no_nics` says why there are none. `wish` is the device that it was told to use:
    ``cpu``, ``cuda`` or ``hip``, or nothing. `no_direct` says why its RDMA devices do not reach its GPU's memory;
    nothing where they do, or nobody has looked. `claims`: its processor is slow to write where others have only read,
    so slots are claimed (native/transport/shm/shm.h). `rates`, in Mbit/s, are those of the cards that it uses for TCP
    and for RDMA, as its system says; 0 where it does not. `unlike`: one of its cards for TCP has at most half of what
    another one has. `round_trip`, in microseconds, is that to the host of the job's store, or of a relay, by TCP; 0 on
    that host, and where the system does not say it.
    """

    rank: int
    host: str
    cores: int = 1
    version: str = ""
    vendor: str = ""
    device: str = ""
    nics: tuple[Nic, ...] = ()
    no_nics: str = ""
    wish: str = ""
    no_direct: str = ""
    claims: bool = False
    rates: tuple[int, int] = (0, 0)
    unlike: bool = False
    round_trip: int = 0


@dataclass(frozen=True)
class Topology:
    """All ranks of a communicator, in order, and what was asked for: the transport, islands, the way between GPUs.

    Everything derived from it is a pure function of what all ranks hold alike.

    Raises
    ------
    ArgumentError
        The ranks are not 0, 1, 2, ...; shared memory is asked for between hosts; or islands are asked for that do not
        hold each rank once, or hold ranks that no one library serves.
    InitError
        Ranks run different versions; or some were told to use a GPU and some a CPU, and others were told nothing; or
        the way between GPUs that was asked for is not there.
    """

    ranks: tuple[RankInfo, ...]
    setting: Setting = "auto"
    asked: Islands | None = None
    cross: Literal["auto", "direct", "mapped", "staged"] = "auto"
    excluded: Excluded = frozenset()

    def __post_init__(self) -> None:
        numbers = [info.rank for info in self.ranks]
        if not numbers or numbers != list(range(len(numbers))):
            raise ArgumentError(f"wanted ranks 0, 1, 2, ... in order, got {numbers}")
        for info in self.ranks:
            if info.version != self.ranks[0].version:
                raise InitError(
                    f"rank {info.rank} runs version {info.version!r}, but rank 0 runs {self.ranks[0].version!r}"
                )
            if self.setting == "shm" and info.host != self.ranks[0].host:
                raise ArgumentError(
                    f"shared memory is asked for, but rank {info.rank} is on host {info.host} and rank 0 on host "
                    f"{self.ranks[0].host}"
                )

        untold = [info.rank for info in self.ranks if not info.wish]
        if self.some_without_gpu and untold:
            cpus, gpus = ([i.rank for i in self.ranks if i.wish and (i.wish == "cpu") == cpu] for cpu in (True, False))
            raise InitError(
                f"device: {spell_ranks(cpus)} said cpu, and {spell_ranks(gpus)} a GPU; then all must say which, and "
                f"{spell_ranks(untold)} did not"
            )
        self._check_cross()
        if self.asked is not None:
            self._check_asked(self.asked)

    def _check_cross(self) -> None:
        if self.cross == "direct" and self.setting not in ("auto", "verbs"):
            raise InitError(f"HETCOLL_CROSS=direct: no rank may use RDMA: HETCOLL_TRANSPORT is {self.setting}")
        for info in self.ranks if self.cross == "mapped" else ():
            first = self.ranks[0]
            if info.host != first.host:
                raise InitError(
                    f"HETCOLL_CROSS=mapped: ranks {first.rank} and {info.rank} share no memory: they are on hosts"
                    f" {first.host} and {info.host}"
                )
        if self.cross == "mapped" and self.setting not in ("auto", "shm"):
            raise InitError(f"HETCOLL_CROSS=mapped: no rank may share memory: HETCOLL_TRANSPORT is {self.setting}")

    def _check_asked(self, asked: Islands) -> None:
        if not all(asked) or sorted(r for island in asked for r in island) != list(range(self.size)):
            raise ArgumentError(f"islands: wanted each of the ranks 0-{self.size - 1} once, got {spell_islands(asked)}")
        for island in asked:
            first, taken = self.ranks[island[0]], set[tuple[str, str]]()
            for info in (self.ranks[r] for r in island):
                ranks = f"islands: {spell_islands(asked)} has ranks {first.rank} and {info.rank} in one island, but"
                if info.vendor != first.vendor:
                    vendors = " and ".join(i.vendor or "no GPU" for i in (first, info))
                    raise ArgumentError(f"{ranks} no one library serves {vendors}")
                if info.vendor and info.device and (info.host, info.device) in taken:
                    raise ArgumentError(
                        f"{ranks} a library takes each GPU once, and {info.host} {info.device} is taken"
                    )
                taken.add((info.host, info.device))

    def check_rails(self) -> None:
        """ArgumentError where RDMA is asked for and two ranks have none between them: says which, and why."""
        if self.cross == "direct":
            self._check_direct()
        if self.setting != "verbs" or self.size == 1:
            return
        for info in self.ranks:
            if not info.nics:
                raise ArgumentError(f"RDMA is asked for, but rank {info.rank} has none: {info.no_nics or 'not found'}")
        if apart := self._apart(range(self.size)):
            raise ArgumentError(f"RDMA is asked for, but {self.without_rails(*apart)}")

    def _check_direct(self) -> None:
        """InitError where two ranks that have GPUs, or may have, on different hosts, cannot go the direct way."""
        gpus = [info.rank for info in self.ranks if info.wish != "cpu"]
        if apart := self._apart(gpus, direct=True):
            raise InitError(f"HETCOLL_CROSS=direct: {self.not_direct(*apart)}")

    def _apart(self, ranks: Iterable[int], *, direct: bool = False) -> Pair | None:
        """The first two of these ranks that RDMA would have to join, and does not; `direct`: from GPU to GPU."""
        return first_apart(  # ranks of one host share memory, but for where RDMA is asked for
            (
                info.rank,
                info.host if self.setting == "auto" else info.rank,
                () if direct and info.no_direct else info.nics,
            )
            for info in map(self.ranks.__getitem__, ranks)
        )

    @cached_property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def line(self) -> str:
        """All of it that fits a line, for people."""
        hosts = self.hosts
        parts = [f"{self.size} rank{'s' * (self.size > 1)} on {len(hosts)} host{'s' * (len(hosts) > 1)}"]
        if 1 < len(hosts) <= _TOLD:
            parts[0] += f" ({' | '.join(spell_ranks(ranks).split(' ', 1)[1] for ranks in hosts)})"
        inside = next((self.transport(*ranks[:2]) for ranks in hosts if len(ranks) > 1), None)
        ways = [f"{inside} inside"] if inside else []
        ways += [f"{self.between_hosts} between hosts"] if len(hosts) > 1 else []
        parts += [" and ".join(ways)] if ways else []
        wishes = Counter(info.wish for info in self.ranks if info.wish)
        parts += [f"devices {', '.join(f'{count} {wish}' for wish, count in wishes.items())}"] if wishes else []
        parts += [f"islands {spell_islands(self.asked)}"] if self.asked is not None and self.size <= _TOLD else []
        return ", ".join(parts)

    @cached_property
    def some_without_gpu(self) -> bool:
        """Whether some ranks were told to use a GPU and others to use none: then all calls are for both."""
        wishes = {info.wish for info in self.ranks if info.wish}
        return "cpu" in wishes and len(wishes) > 1

    @cached_property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host, hosts in the order of their first ranks."""
        hosts: dict[str, list[int]] = {}
        for info in self.ranks:
            hosts.setdefault(info.host, []).append(info.rank)
        return tuple(map(tuple, hosts.values()))

    @cached_property
    def islands(self) -> Islands:
        """The ranks of each island: those that one vendor's library serves, on all hosts; others are alone.

        Vendor libraries take each GPU once: ranks that share one are in different islands. In the order of their first
        ranks, unless islands were asked for.
        """
        if self.asked is not None:
            return self.asked
        islands: list[list[int]] = []
        of_vendor: dict[str, list[list[int]]] = {}
        earlier = Counter[tuple[str, str, str]]()  # ranks that have the same GPU
        for info in self.ranks:
            mine = of_vendor.setdefault(info.vendor, [])
            place = (info.vendor, info.host, info.device)
            number = earlier[place] if info.device else 0  # each of those is in another island
            earlier[place] += 1
            if not info.vendor or number == len(mine):
                mine.append([])
                islands.append(mine[-1])
                number = -1
            mine[number].append(info.rank)
        return tuple(map(tuple, islands))

    def island(self, rank: int) -> tuple[int, ...]:
        """The members of the island of `rank`."""
        return next(island for island in self.islands if rank in island)

    @cached_property
    def crowding(self) -> float:
        """Ranks for each core on the host where there are most, at least 1."""
        each: list[float] = [len(host) / cores for host, cores in zip(self.hosts, self._cores, strict=True)]
        return max(1.0, *each)

    @cached_property
    def cores(self) -> int:
        """Cores of the host that has the fewest."""
        return min(self._cores)

    @cached_property
    def _cores(self) -> list[int]:
        """Of each host."""
        return [max(1, *[self.ranks[rank].cores for rank in host]) for host in self.hosts]

    @cached_property
    def claims(self) -> bool:
        """Whether slots in shared memory are claimed anywhere."""
        return any(map(attrgetter("claims"), self.ranks))

    @cached_property
    def shares(self) -> tuple[int, ...]:
        """By rank, the cores of its host for each rank there; 0 where these are more."""
        ranks = Counter(info.host for info in self.ranks)
        return tuple(info.cores // ranks[info.host] for info in self.ranks)

    def local_rank(self, rank: int) -> int:
        """The place of `rank` among the ranks of its host."""
        return next(host.index(rank) for host in self.hosts if rank in host)

    def same_host(self, a: int, b: int) -> bool:
        """Whether two ranks can share memory."""
        return self.ranks[a].host == self.ranks[b].host

    def transport(self, a: int, b: int) -> Path:
        """What carries data between two ranks."""
        if self.setting == "auto":
            return "shm" if self.same_host(a, b) else "verbs" if self.rails(a, b) else "tcp"
        return self.setting

    def ways(self, a: int, b: int) -> tuple[Way, ...]:
        """How messages may go between two ranks of which one or both have GPUs, the best way first, without those that
        are excluded."""
        path, found = self.transport(a, b), list[Way]()
        gpus = bool(self.ranks[a].vendor and self.ranks[b].vendor)
        if path == "shm" and self.cross != "staged":
            found.append("mapped")
        if path == "verbs" and gpus and self.cross != "staged" and not self.not_direct(a, b):
            found.append("direct")
        if self.cross != "mapped" and not (self.cross == "direct" and gpus):
            found += ["staged-rdma"] if path == "verbs" else []
            found += ["staged-tcp"] if self.setting != "verbs" else []
        failed = self.failed(a, b)
        return tuple(way for way in found if way not in failed)

    def failed(self, a: int, b: int) -> list[Way]:
        """The ways that must not be used between two ranks, by name."""
        return sorted(way for x, y, way in self.excluded if (x, y) == pair_of(a, b))

    def way(self, a: int, b: int) -> Way:
        """The one that is used. InitError where none is left."""
        ways = self.ways(a, b)
        if not ways:
            raise InitError(f"no way is left between ranks {a} and {b}: HETCOLL_CROSS is {self.cross}")
        return ways[0]

    def far(self, a: int, b: int) -> bool:
        """Whether each has slots of its own, which proxies carry."""
        return self.way(a, b) != "mapped"

    def not_direct(self, a: int, b: int) -> str:
        """Why no RDMA goes from the memory of one's GPU to that of the other's, for people; nothing where it does."""
        for rank in (a, b):
            if self.ranks[rank].no_direct:
                return f"rank {rank}: {self.ranks[rank].no_direct}"
        return "" if self.rails(a, b) else self.without_rails(a, b)

    def why(self, a: int, b: int) -> str:
        """Why they go that way, for people."""
        way = self.way(a, b)
        name = way.removesuffix("-rdma").removesuffix("-tcp")
        if self.cross == name:
            return f"{name}, as HETCOLL_CROSS says"
        if way == "mapped":
            return "mapped: one host"
        if failed := self.failed(a, b):
            return f"{name}: {' and '.join(failed)} did not work"
        if way == "direct":
            return "direct: the RDMA devices of both reach the GPUs' memory"
        reason = self.not_direct(a, b) if self.transport(a, b) == "verbs" else ""
        where = "HETCOLL_TRANSPORT" if self.same_host(a, b) else "another host"
        return f"{name}: {where}" + (f"; not direct: {reason}" if reason else "")

    def rails(self, a: int, b: int) -> tuple[tuple[int, int], ...]:
        """The RDMA paths of an edge: places in the `nics` of `a` and of `b`, in the order of the lower rank."""
        key = self.ranks[min(a, b)].nics, self.ranks[max(a, b)].nics
        if key not in self._rails:
            self._rails[key] = pair_up(*key)
        return self._rails[key] if a < b else tuple((j, i) for i, j in self._rails[key])

    @cached_property
    def _rails(self) -> dict[tuple[tuple[Nic, ...], tuple[Nic, ...]], tuple[tuple[int, int], ...]]:
        return {}

    @cached_property
    def between_hosts(self) -> Path:
        """What carries data between hosts: TCP where it does between some of them."""
        if len(self.hosts) == 1 or self.setting not in ("auto", "verbs"):
            return "tcp"
        apart = self.setting == "auto" and self._apart(host[0] for host in self.hosts)
        return "tcp" if apart else "verbs"

    @cached_property
    def rate(self) -> tuple[int, int]:
        """Mbit/s between hosts, by the slowest cards of which a system says it, and the rank that has them; or 0s."""
        which = self.between_hosts == "verbs"
        told = ((info.rates[which], info.rank) for info in self.ranks if info.rates[which] > 0)
        return min(told, default=(0, 0)) if len(self.hosts) > 1 else (0, 0)

    @cached_property
    def unlike(self) -> bool:
        """Whether TCP carries data between hosts over cards of unlike rates, on some host."""
        return len(self.hosts) > 1 and self.between_hosts == "tcp" and any(info.unlike for info in self.ranks)

    @cached_property
    def round_trip(self) -> tuple[int, int]:
        """The longest between hosts that a rank told, in microseconds, and the first rank that did; or 0s."""
        told = ((info.round_trip, -info.rank) for info in self.ranks)
        longest, rank = max(told) if len(self.hosts) > 1 else (0, 0)
        return (longest, -rank) if longest > 0 else (0, 0)

    def without_rails(self, a: int, b: int) -> str:
        """Why two ranks have no RDMA path to each other."""
        for rank in (a, b):
            if not self.ranks[rank].nics:
                return f"rank {rank}: {self.ranks[rank].no_nics or 'RDMA was not looked for'}"
        mine, theirs = (", ".join(f"{n.name} {n.address}" for n in self.ranks[r].nics) for r in (a, b))
        return f"no device of rank {a} ({mine}) reaches one of rank {b} ({theirs})"

    def equipped(self, gpus: Sequence[tuple[str, str]], no_direct: Sequence[str] = ()) -> Topology:
        """The same with the (vendor, device) of each rank's GPU, and why its memory is out of RDMA's reach, which ranks
        learn when they first use one. InitError where the direct way was asked for and is not there."""
        reasons = no_direct or [""] * self.size
        infos = (
            replace(info, vendor=v, device=d, no_direct=reason)
            for info, (v, d), reason in zip(self.ranks, gpus, reasons, strict=True)
        )
        found = replace(self, ranks=tuple(infos))
        if self.cross == "direct":
            found._check_direct()
        return found

    def with_ports(self, places: Sequence[Sequence[int]]) -> Topology:
        """The same with the RDMA ports of each rank in this order; empty: as they are."""
        infos = zip(self.ranks, places, strict=True)
        return replace(
            self, ranks=tuple(replace(i, nics=tuple(i.nics[p] for p in order)) if order else i for i, order in infos)
        )


def restrict(islands: Islands | None, ranks: Sequence[int]) -> Islands | None:
    """The islands of some of the ranks, numbered anew in the order given. A newcomer, which is in none, has its own."""
    if islands is None:
        return None
    new = {old: i for i, old in enumerate(ranks)}
    kept = tuple(found for island in islands if (found := tuple(new.pop(r) for r in island if r in new)))
    return kept + tuple((rank,) for rank in new.values())


def spell_islands(islands: Islands) -> str:
    """``0,1|2,3``: as HETCOLL_ISLANDS has it."""
    return "|".join(",".join(map(str, island)) for island in islands)
