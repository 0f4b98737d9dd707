"""Which port talks to which: what ranks tell each other of theirs, and the pairs that follow from it on both sides."""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

ETHERNET = "Ethernet"
INFINIBAND = "InfiniBand"
MOST_RAILS = 8  # native/transport/verbs/outbox.h: kMaxRails


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

    def reaches(self, other: Nic) -> bool:
        """Whether the two may be able to talk. Between networks of Ethernet there may be a router: only bytes that
        arrived can tell."""
        if self.layer != other.layer:
            return False
        if self.layer != ETHERNET:
            return self.network == other.network
        mine, theirs = ipaddress.ip_address(self.address), ipaddress.ip_address(other.address)
        return (mine.version, mine.is_link_local) == (theirs.version, theirs.is_link_local)


def pair_up(a: Sequence[Nic], b: Sequence[Nic]) -> tuple[tuple[int, int], ...]:
    """The rails of an edge: pairs of places in `a` and `b`, so that every port that reaches one of the other side's
    has a part. Ports of one network come together before others, and near ones come first.
    """
    reached = [(i, j) for i, j in itertools.product(range(len(a)), range(len(b))) if a[i].reaches(b[j])]
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
