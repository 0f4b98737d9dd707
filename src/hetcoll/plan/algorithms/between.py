"""All-reduce between islands of any sizes, of what was added up inside them.

Island i has k_i ranks; its rank j owns the interval [j/k_i, (j+1)/k_i) of the buffer. The common refinement of all
islands' intervals are the *atoms*; each has one owner on every island, and each is cut into one *part* for every
island. A part is added up between the islands by the owner on the part's own island, and goes back the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import lcm

from ..costs import Hosts
from ..ir import Span
from .base import Draft, inp, out


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
