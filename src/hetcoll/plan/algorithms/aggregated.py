"""All-to-all among hosts: what the ranks of a host have for one rank of another goes there as one message.

The ranks of a host share the others' ranks among themselves. Each collects, inside the host, what its mates have for
those that are its own, and sends that on. So a rank sends as many messages to other hosts as there are, about, and not
as there are ranks; but each byte is copied once more, inside the host: for few bytes. Shares must be of one length,
since they lie side by side on the way. Traff and Rougier, "MPI collectives and datatypes for hierarchical all-to-all
communication" (EuroMPI 2014).
"""

from __future__ import annotations

import numpy as np

from ...types import Collective
from ..costs import Cost, Hosts, Levels
from .base import Draft, each, find, inp, out, register, tmp
from .led import runs
from .pairwise import meetings


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


@register(Collective.ALLTOALL, "aggregated", levels=_levels, equal=True, rounds=meetings)
def alltoall(p: Draft) -> None:
    """2 hops. In place a share's memory is free when it has gone: see `pairwise`."""
    if len(p.hosts) == 1:
        find(Collective.ALLTOALL, "pairwise").draw(p)
        return
    p.credits, p.apart = 1, True
    host = _Host(p)
    k, mine, mates = len(host.mates), np.array(host.owned(host.place), np.int64), host.mates
    room = p.size // k  # ranks for which a copy of SCRATCH has room
    p.scratch_copies = -(-len(mine) // room) if k > 1 else 0
    numbers = np.arange(len(mine))
    held = numbers // room * p.size + numbers % room * k  # where in SCRATCH what mates have for each of mine begins
    gone = np.full(p.size, -1)  # what reads each share of the input
    meeting = _meet(host.place, k)
    for place in meeting:
        given = np.array([*host.owned(place), mates[place]])
        gone[given] = p.sends(0, each(inp, given), mates[place])
    if k > 1:
        gone[mine] = p.copies(2, each(tmp, held + host.place), each(inp, mine))
    p.copy(2, out(p.rank), inp(p.rank))
    came = [gone[mine]]
    for place in meeting:
        came.append(p.recvs(1, each(tmp, held + place), mates[place]))
        p.recv(1, out(mates[place]), mates[place], after=[int(gone[mates[place]])])
    if k == 1:
        gone[mine] = p.sends(3, each(inp, mine), mine, channel=1)
    else:
        first, count = np.array([(mates.index(rank), count) for rank, count in runs(mates)]).T
        parts = each(tmp, np.add.outer(held, first).ravel(), np.tile(count, len(mine)))
        p.sends(3, parts, mine.repeat(len(count)), channel=1, after=[step.repeat(len(count)) for step in came])
    rows = [(*run, other[host.place % len(other)]) for other in host.others for run in runs(other)]
    first, count, peers = np.array(rows).T
    ranks = np.concatenate(host.others)
    own = np.isin(ranks, mine)
    reads = [np.where(own == which, gone[ranks], -1) for which in (False, True)]  # of a lane each
    last = [np.maximum.reduceat(read, np.cumsum(count) - count) for read in reads]
    p.recvs(4, each(out, first, count), peers, channel=1, after=last)
