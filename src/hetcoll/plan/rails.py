"""Which port talks to which: what ranks tell each other of theirs, and the pairs that follow from it on both sides."""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

ETHERNET = "Ethernet"
INFINIBAND = "InfiniBand"
MOST_RAILS = 8  # native/transport/verbs/outbox.h: kMaxRails
Fabric = tuple[str | int | bool, ...]


@dataclass(frozen=True, slots=True)
class Nic:
    """What a rank tells the others of one port. JSON has all of it.

    `network` is the IP network of its address (``10.77.0.0/24``), or InfiniBand's prefix of the subnet in hexadecimal;
    empty where the interface does not say.
    """

    name: str
    layer: str
    address: str
    network: str

    @property
    def device(self) -> str:
        return self.name.rpartition(":")[0]

    @property
    def fabric(self) -> Fabric:
        """Equal on ports that may be able to talk. Between networks of Ethernet there may be a router: only bytes that
        arrived can tell."""
        return (self.layer, *_family(self.address)) if self.layer == ETHERNET else (self.layer, self.network)


@lru_cache(maxsize=1 << 15)
def _family(address: str) -> tuple[int, bool]:
    found = ipaddress.ip_address(address)
    return found.version, found.is_link_local


def pair_up(a: Sequence[Nic], b: Sequence[Nic]) -> tuple[tuple[int, int], ...]:
    """The rails of an edge: pairs of places in `a` and `b`, so that every port that reaches one of the other side's
    has a part. Ports of one network come together before others, and near ones come first.
    """
    mine, theirs = ([nic.fabric for nic in nics] for nics in (a, b))
    reached = [(i, j) for i, j in itertools.product(range(len(a)), range(len(b))) if mine[i] == theirs[j]]
    reached.sort(key=lambda pair: (a[pair[0]].network != b[pair[1]].network, abs(pair[0] - pair[1]), pair))
    rails: list[tuple[int, int]] = []
    left_a, left_b = {i for i, _ in reached}, {j for _, j in reached}
    for both in (True, False):
        for i, j in reached:
            if (i in left_a and j in left_b) if both else (i in left_a or j in left_b):
                rails.append((i, j))
                left_a.discard(i)
                left_b.discard(j)
    return tuple(rails[:MOST_RAILS])


def first_apart(rows: Iterable[tuple[int, str | int, Sequence[Nic]]]) -> tuple[int, int] | None:
    """The first two ranks on different hosts of which no port reaches one of the other's, given each rank's number, its
    host and its ports. Ranks whose ports reach the same fabrics are alike: the first ones on two hosts stand for all.
    """
    kinds = dict[frozenset[Fabric], dict[str | int, int]]()
    for rank, host, nics in rows:
        firsts = kinds.setdefault(frozenset(nic.fabric for nic in nics), {})
        if len(firsts) < 2:
            firsts.setdefault(host, rank)
    found = [
        (min(a, b), max(a, b))
        for x, y in itertools.combinations_with_replacement(kinds, 2)
        if x.isdisjoint(y)
        for (here, a), (there, b) in itertools.product(kinds[x].items(), kinds[y].items())
        if here != there
    ]
    return min(found, default=None)
