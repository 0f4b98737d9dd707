"""All-reduce between islands of any sizes, of what was added up inside them.

Island i has k_i ranks; its rank j owns the interval [j/k_i, (j+1)/k_i) of the buffer. The common refinement of all
islands' intervals are the *atoms*; each has one owner on every island, and each is cut into one *part* for every
island. A part is added up between the islands by the owner on the part's own island, and goes back the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

from ..costs import Groups
from ..ir import Spans
from ..steps import MOST_NUMBERS, Ints, Numbers
from .base import Draft, each, inp, out


class Place:
    """Where a rank stands: rank `j` of the `k` on host `i` of `m`."""

    def __init__(self, p: Draft) -> None:
        self.hosts, self.m, self._there = p.hosts, len(p.hosts), p.there
        self.i = p.there.of[p.rank]
        self.mates = self.hosts[self.i]
        self.j, self.k = self.mates.index(p.rank), len(self.mates)

    def mates_after(self) -> list[int]:
        return [self.mates[(self.j + d) % self.k] for d in range(1, self.k)]

    def others(self, sign: int) -> list[int]:
        """The other hosts by their distance from mine, forwards or backwards."""
        return [*range(self.i + 1, self.m), *range(self.i)][::sign]

    @cached_property
    def parts(self) -> Parts:
        """Those of all hosts' intervals."""
        return _parts(self._there)

    @cached_property
    def atoms(self) -> tuple[Numbers, Numbers]:
        """Where those of my interval begin, and how many units a part of each has."""
        begins, sizes = self.parts.atoms
        mine = begins * self.k // self.parts.units == self.j
        return begins[mine], sizes[mine]


class Parts:
    """The buffer in `units`: where the atoms begin, and how many units a part of each has; who owns them."""

    def __init__(self, there: Groups) -> None:
        hosts, m = there.ranks, len(there.ranks)
        sizes = sorted(set(map(len, hosts)))
        self.units = there.common * m
        cuts = sorted({self.units * j // k for k in sizes for j in range(k + 1)})
        number = np.int64 if self.units * max(*sizes, m) < MOST_NUMBERS else np.object_
        self.atoms = np.array(cuts[:-1], number), np.array([(b - a) // m for a, b in pairwise(cuts)], number)
        self._members, self._sizes = np.concatenate(hosts), np.array([len(host) for host in hosts])
        self._first = np.cumsum(self._sizes) - self._sizes

    def owners(self, hosts: Ints, atoms: Numbers) -> Ints:
        """The rank on each of `hosts` whose interval holds the atom that begins there; all of the first host first."""
        places = atoms * self._sizes[hosts][:, None] // self.units
        owners: Ints = self._members[self._first[hosts][:, None] + places.astype(np.int64)]
        return owners.ravel()

    def spans(self, hosts: Ints, atoms: Numbers, sizes: Numbers) -> Spans:
        """What is added up on each of `hosts` of each atom, in the same order."""
        return each(out, (atoms + hosts[:, None] * sizes).ravel(), np.tile(sizes, len(hosts)))


_parts = lru_cache(maxsize=8)(Parts)


def reduce_between(p: Draft, at: Place, summed: int | None) -> list[int | None]:
    """Lanes 2, 3 and 8; 9 and 10 round. All comes after `summed`. Gives the step after which each part that is added up
    on this host is final."""
    parts, (atoms, sizes), distance = at.parts, at.atoms, np.arange(1, at.m)
    hosts = (at.i + distance) % at.m
    held = inp if at.k == 1 else out
    leaving = parts.spans(hosts, atoms, sizes)
    owners = parts.owners(hosts, atoms)
    n, first = len(atoms), len(p.lanes)
    sent, ready = p.roundeds(9, leaving, each(held, leaving.start, leaving.count), summed, owners)
    p.sends(2, sent, owners, after=[ready])
    hosts = (at.i - distance) % at.m
    owners, mine = parts.owners(hosts, atoms), parts.spans(np.array([at.i]), atoms, sizes)
    p.recv_reduces(3, mine, each(held, mine.start, mine.count), owners[:n], after=[summed])
    again = parts.spans(np.full(at.m - 2, at.i), atoms, sizes)
    final: list[int | None] = p.recv_reduces(3, again, again, owners[n:])[-n:].tolist()
    spans = [out(int(mine.start[k]), int(sizes[k])) for k in range(n)]
    final = [p.scaled(8, span, step) for span, step in zip(spans, final, strict=True)]
    for k, span in enumerate(spans):
        others = parts.owners(hosts, atoms[k : k + 1]).tolist() if p.slow else ()
        _, final[k] = p.rounded(10, span, span, final[k], others)
    _one_host_each(p, first, n)
    return final


def _one_host_each(p: Draft, first: int, atoms: int) -> None:
    """The steps from `first` on are one for each atom, then the same with another host."""
    if atoms > 1:
        p.batches += ((begin, atoms) for begin in range(first, len(p.lanes), atoms))


def gather_between(p: Draft, at: Place, final: Sequence[int | None]) -> int:
    """Lanes 4 and 5. Each of my parts is `final` after one of these steps: the one after which all others have come."""
    parts, (atoms, sizes), distance = at.parts, at.atoms, np.arange(1, at.m)
    ready = np.full((at.m - 1) * len(atoms), -1)
    ready[: len(atoms)], first = final, len(p.lanes)
    own, owners = parts.spans(np.full(at.m - 1, at.i), atoms, sizes), parts.owners((at.i + distance) % at.m, atoms)
    p.sends(4, own, owners, channel=1, after=[ready])
    hosts = (at.i - distance) % at.m
    came = p.recvs(5, parts.spans(hosts, atoms, sizes), parts.owners(hosts, atoms), channel=1)
    _one_host_each(p, first, len(atoms))
    return int(came[-1])
