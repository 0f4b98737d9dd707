"""Two levels: inside the hosts through shared memory, between them over the network, for hosts of any sizes.

Host i has k_i ranks; its rank j owns the interval [j/k_i, (j+1)/k_i) of the buffer. The common refinement of all hosts'
intervals are the *atoms*; each has one owner on every host, and each is cut into one *part* for every host. A part is
added up inside each host by the atom's owner there, between the hosts by the owner on the part's own host, and goes
back the same way. So every byte enters and leaves a host once in each direction, through all of its ranks at a time.
The idea of aligned intervals is that of hierarchical all-reduce (Jia et al., "Highly scalable deep learning training
system with mixed-precision", 2018), made independent of equal host sizes.

All steps on a part have the same span, so the four phases stream: each has lanes of its own. Within a phase, a message
waits only for messages that come before it in an order that sender and receiver share, so nothing deadlocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, zip_longest
from math import lcm

from ...types import Collective
from ..costs import Hosts
from ..ir import Span
from .base import Draft, inp, out, register, tmp


@dataclass(frozen=True, slots=True)
class Part:
    """The units [start, start + count), which are added up on host `host`; `atom` is where its atom begins."""

    host: int
    atom: int
    start: int
    count: int

    @property
    def input(self) -> Span:
        return inp(self.start, self.count)

    @property
    def output(self) -> Span:
        return out(self.start, self.count)


class Place:
    """Where a rank stands: rank `j` of the `k` on host `i` of `m`."""

    def __init__(self, hosts: Hosts, rank: int) -> None:
        self.hosts, self.m = hosts, len(hosts)
        self.i = next(i for i, host in enumerate(hosts) if rank in host)
        self.mates = hosts[self.i]
        self.j, self.k = self.mates.index(rank), len(self.mates)
        self.sizes = set(map(len, hosts))
        self.units = lcm(*self.sizes) * self.m

    def mates_after(self) -> list[int]:
        return [self.mates[(self.j + d) % self.k] for d in range(1, self.k)]

    def mates_before(self) -> list[int]:
        return [self.mates[(self.j - d) % self.k] for d in range(1, self.k)]

    def host_after(self, d: int) -> int:
        return (self.i + d) % self.m

    def owner(self, host: int, atom: int) -> int:
        """The rank on `host` whose interval holds the atom."""
        return self.hosts[host][atom * len(self.hosts[host]) // self.units]

    def parts(self, rank: int, order: list[int]) -> list[Part]:
        """The parts of the interval of `rank`, host by host in the order given."""
        return [Part(h, a, a + h * size, size) for h in order for a, size in self._atoms[rank]]

    @cached_property
    def _atoms(self) -> dict[int, list[tuple[int, int]]]:
        """Of each rank of this host, where the atoms of its interval begin, and how many units a part of each has."""
        cuts = sorted({self.units * j // k for k in self.sizes for j in range(k + 1)})
        atoms: dict[int, list[tuple[int, int]]] = {mate: [] for mate in self.mates}
        for a, b in pairwise(cuts):
            atoms[self.owner(self.i, a)].append((a, (b - a) // self.m))
        return atoms

    def counterparts(self, host: int) -> list[int]:
        """The ranks of another host whose units pass through this rank: every k-th."""
        return list(self.hosts[host][self.j :: self.k])

    def counterpart(self, host: int) -> int:
        """The rank of another host through which this rank's unit passes there."""
        return self.hosts[host][self.j % len(self.hosts[host])]


@register(Collective.ALLREDUCE, "hierarchical", compresses=True)
def allreduce(p: Draft) -> None:
    """Reduce inside, reduce between, gather between, gather inside: 4 hops. 2(m-1)/m of the buffer leaves a host."""
    at = Place(p.hosts, p.rank)
    p.units = at.units
    outward = [at.host_after(d) for d in range(1, at.m + 1)]  # the next host's parts first, the own last
    inward = [at.host_after(-d) for d in range(at.m)]  # the own parts first, then the previous host's
    partial = _reduce_inside(p, at, outward)
    final = reduce_between(p, at, partial)
    gather_between(p, at, final)
    _gather_inside(p, at, inward, final)


def _reduce_inside(p: Draft, at: Place, order: list[int]) -> dict[Part, int | None]:
    """Lanes 0 and 1. When each of my parts is added up inside this host."""
    for row in zip_longest(*(at.parts(mate, order) for mate in at.mates_after())):
        for mate, part in zip(at.mates_after(), row, strict=True):
            if part is not None:
                p.send(0, part.input, mate)
    partial: dict[Part, int | None] = {}
    for part in at.parts(p.rank, order):
        total, partial[part] = part.input, None
        for mate in at.mates_before():
            partial[part] = p.recv_reduce(1, part.output, total, mate)
            total = part.output
    return partial


def reduce_between(p: Draft, at: Place, partial: dict[Part, int | None]) -> dict[Part, int | None]:
    """Lanes 2, 3 and 8; 9 and 10 round. When each of my parts that is added up on this host is final."""
    held = {part: part.input if at.k == 1 else part.output for part in partial}
    final = {part: step for part, step in partial.items() if part.host == at.i}
    for part, step in partial.items():
        if part.host != at.i:
            owner = at.owner(part.host, part.atom)
            sent, ready = p.rounded(9, part.output, held[part], step, [owner])
            p.send(2, sent, owner, after=[ready])
    for d in range(1, at.m):
        for part in final:
            peer = at.owner(at.host_after(-d), part.atom)
            final[part] = p.recv_reduce(3, part.output, held[part], peer, after=[final[part]])
            held[part] = part.output
    for part, step in final.items():
        others = (at.owner(at.host_after(d), part.atom) for d in range(1, at.m))
        _, final[part] = p.rounded(10, part.output, part.output, p.scaled(8, part.output, step), others)
    return final


def gather_between(p: Draft, at: Place, final: dict[Part, int | None]) -> None:
    """Lanes 4 and 5. Adds to `final` when each of my other parts has come from its host."""
    own = dict(final)
    for d in range(1, at.m):
        for part, step in own.items():
            p.send(4, part.output, at.owner(at.host_after(d), part.atom), channel=1, after=[step] if d == 1 else [])
        host = at.host_after(-d)
        for part in at.parts(p.rank, [host]):
            final[part] = p.recv(5, part.output, at.owner(host, part.atom), channel=1)


def _gather_inside(p: Draft, at: Place, order: list[int], final: dict[Part, int | None]) -> None:
    """Lanes 6 and 7."""
    for part in at.parts(p.rank, order):
        ready = final[part]
        for mate in at.mates_after():
            p.send(6, part.output, mate, channel=1, after=[ready])
            ready = None
    for row in zip_longest(*(at.parts(mate, order) for mate in at.mates_before())):
        for mate, part in zip(at.mates_before(), row, strict=True):
            if part is not None:
                p.recv(7, part.output, mate, channel=1)


@register(Collective.ALLGATHER, "hierarchical")
def allgather(p: Draft) -> None:
    """Each unit goes to one rank of every other host, which hands it on inside: 2 hops; a unit enters a host once."""
    at = Place(p.hosts, p.rank)

    def passing(place: Place) -> list[int]:
        """The units that a rank hands on: its own, then others in the order in which they come."""
        others = (place.counterparts(place.host_after(-d)) for d in range(1, place.m))
        return [place.mates[place.j], *(u for row in others for u in row)]

    for d in range(1, at.m):
        p.send(0, inp(), at.counterpart(at.host_after(d)))
    for unit in passing(at):
        ready = p.recv(1, out(unit), unit) if unit != p.rank else None
        for mate in at.mates_after():
            p.send(2, inp() if unit == p.rank else out(unit), mate, channel=1, after=[ready])
            ready = None
    for row in zip_longest(*(passing(Place(p.hosts, mate)) for mate in at.mates_before())):
        for mate, unit in zip(at.mates_before(), row, strict=True):
            if unit is not None:
                p.recv(3, out(unit), mate, channel=1)
    p.copy(4, out(p.rank), inp())


@register(Collective.REDUCE_SCATTER, "hierarchical", compresses=True)
def reduce_scatter(p: Draft) -> None:
    """Each unit is added up on one rank of every other host, which sends it to its owner: 2 hops."""
    at = Place(p.hosts, p.rank)

    def passing(place: Place) -> list[int]:
        """The units that a rank adds up: others' in the order in which they leave, then its own."""
        others = (place.counterparts(place.host_after(d)) for d in range(1, place.m))
        return [*(u for row in others for u in row), place.mates[place.j]]

    for row in zip_longest(*(passing(Place(p.hosts, mate)) for mate in at.mates_after())):
        for mate, unit in zip(at.mates_after(), row, strict=True):
            if unit is not None:
                p.send(0, inp(unit), mate)
    ready: int | None = None
    for unit in passing(at):
        total, ready = inp(unit), None
        result = out() if unit == p.rank else tmp(unit)
        for mate in at.mates_before():
            ready = p.recv_reduce(1, result, total, mate)
            total = result
        if unit != p.rank:
            p.scratch_copies = 1 if at.k > 1 or p.compress else 0
            sent, ready = p.rounded(5, tmp(unit), total, ready, [unit])
            p.send(2, sent, unit, channel=1, after=[ready])
    for d in range(1, at.m):
        peer = at.counterpart(at.host_after(-d))
        ready = p.recv_reduce(3, out(), total, peer, channel=1, after=[ready])
        total = out()
    p.scaled(4, out(), ready)
