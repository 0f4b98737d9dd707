"""All-to-all among hosts: what the ranks of a host have for one rank of another goes there as one message.

The ranks of a host share the others' ranks among themselves. Each collects, inside the host, what its mates have for
those that are its own, and sends that on. So a rank sends as many messages to other hosts as there are, about, and not
as there are ranks; but each byte is copied once more, inside the host: for few bytes. Shares must be of one length,
since they lie side by side on the way. Traff and Rougier, "MPI collectives and datatypes for hierarchical all-to-all
communication" (EuroMPI 2014).
"""

from __future__ import annotations

from ...types import Collective
from ..costs import Cost, Hosts, Levels
from ..ir import Span
from .base import Draft, find, inp, out, register, tmp
from .led import runs


def _levels(hosts: Hosts) -> Levels:
    n, m, k, least = sum(map(len, hosts)), len(hosts), max(map(len, hosts)), min(map(len, hosts))
    onward, inside, leaving = (m - 1) * -(-k // least), (k - 1) / k, k * (n - k) / n
    return Cost(1, 2 * (k - 1) * (onward + 1), inside, inside), Cost(1, 2 * onward, leaving, leaving)


def _meet(me: int, n: int) -> list[int]:
    """The others of so many, in the order in which I meet them two by two: see `pairwise`."""
    return [peer for k in range(n) if (peer := (k - me) % n) != me]


class _Host:
    """The ranks of this rank's host, in order, and those of the others in the order in which it meets them."""

    def __init__(self, p: Draft) -> None:
        hosts = [sorted(host) for host in p.hosts]
        here = next(i for i, host in enumerate(hosts) if p.rank in host)
        self.mates, self.place = hosts[here], hosts[here].index(p.rank)
        self.others = [hosts[i] for i in _meet(here, len(hosts))]

    def owned(self, place: int) -> list[int]:
        """The ranks of other hosts to which this member sends."""
        k = len(self.mates)
        return [rank for host in self.others for i, rank in enumerate(host) if i % k == place]


@register(Collective.ALLTOALL, "aggregated", levels=_levels, equal=True)
def alltoall(p: Draft) -> None:
    """2 hops. In place a share's memory is free when it has gone: see `pairwise`."""
    if len(p.hosts) == 1:
        find(Collective.ALLTOALL, "pairwise").draw(p)
        return
    p.credits, p.apart = 1, True
    host = _Host(p)
    k, mine = len(host.mates), host.owned(host.place)
    each = p.size // k  # ranks for which a copy of SCRATCH has room
    p.scratch_copies = -(-len(mine) // each) if k > 1 else 0

    def held(number: int, place: int, count: int = 1) -> Span:
        """What the mates from `place` on have for the rank of this number among mine."""
        return tmp(number // each * p.size + number % each * k + place, count)

    gone: dict[int, int] = {}  # what reads each share of the input
    came: list[list[int]] = [[] for _ in mine]
    meeting = _meet(host.place, k)
    for place in meeting:
        for rank in (*host.owned(place), host.mates[place]):
            gone[rank] = p.send(0, inp(rank), host.mates[place])
    for number, rank in enumerate(mine if k > 1 else ()):
        gone[rank] = p.copy(2, held(number, host.place), inp(rank))
        came[number].append(gone[rank])
    p.copy(2, out(p.rank), inp(p.rank))
    for place in meeting:
        for number in range(len(mine)):
            came[number].append(p.recv(1, held(number, place), host.mates[place]))
        mate = host.mates[place]
        p.recv(1, out(mate), mate, after=[gone[mate]])
    for number, rank in enumerate(mine):
        if k == 1:
            gone[rank] = p.send(3, inp(rank), rank, channel=1)
            continue
        for first, count in runs(host.mates):
            p.send(3, held(number, host.mates.index(first), count), rank, channel=1, after=came[number])
    for other in host.others:
        for first, count in runs(other):
            read = sorted(gone[rank] for rank in range(first, first + count))
            last = {p.steps[step].lane: step for step in read}
            p.recv(4, out(first, count), other[host.place % len(other)], channel=1, after=last.values())
