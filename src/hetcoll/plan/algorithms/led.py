"""Gather and scatter where one rank of each host, or the root, is its host's leader: one message a host goes between
hosts, and leaders collect or deal out their mates' parts inside.

Fewer messages, but each byte of another host is copied once more, and nothing is sent on before a whole host's parts
are there: for few bytes. Where a host's ranks do not follow each other, a message carries a run of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...types import Collective
from ..costs import Cost, Hosts, Levels
from ..ir import Buf
from .base import Draft, Likeness, inp, out, register, tmp

Run = tuple[int, int]
"""Ranks that follow each other: the first, and how many."""


def _leader(p: Draft, host: tuple[int, ...]) -> int:
    return p.root if p.root in host else min(host)


def runs(host: Iterable[int]) -> list[Run]:
    """The runs of these ranks, in order."""
    found: list[Run] = []
    for rank in sorted(host):
        if found and sum(found[-1]) == rank:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((rank, 1))
    return found


def _hosts(p: Draft) -> tuple[tuple[int, ...], list[tuple[int, Run]]]:
    """The ranks of this host in order, and what the root exchanges with whom: mates' parts, then a run at a time."""
    mine = tuple(sorted(next(host for host in p.hosts if p.rank in host)))
    home = next(host for host in p.hosts if p.root in host)
    rows = [(mate, (mate, 1)) for mate in sorted(home) if mate != p.root]
    return mine, rows + [(_leader(p, host), run) for host in p.hosts if host != home for run in runs(host)]


def _levels(hosts: Hosts, *, gathers: bool) -> Levels:
    """Between hosts as many bytes as `direct` states, so that what counts is what is copied inside."""
    n, k = sum(map(len, hosts)), max(map(len, hosts))
    inside, between = k / n, (n - 1) / n
    messages = max(len(hosts) - 1, sum(len(runs(host)) for host in hosts) - 1)
    if gathers:
        return Cost(1, k - 1, 0, inside), Cost(1, messages, 0, between)
    return Cost(1, k - 1, inside, 0), Cost(1, messages, between, 0)


@register(Collective.GATHER, "led", levels=lambda hosts: _levels(hosts, gathers=True), likeness=Likeness.STAR)
def gather(p: Draft) -> None:
    """2 hops: to the leader, and from there to the root."""
    mine, rows = _hosts(p)
    leader = _leader(p, mine)
    if p.rank == p.root:
        for peer, run in rows:
            p.recv(0, out(*run), peer)
        p.copy(1, out(p.root), inp())
    elif p.rank != leader or len(mine) == 1:
        p.send(0, inp(), p.root if p.rank == leader else leader)
    else:
        p.scratch_copies, p.scratch_like = 1, Buf.RECV
        came = {p.rank: p.copy(0, tmp(p.rank), inp())}
        came |= {mate: p.recv(1, tmp(mate), mate) for mate in mine if mate != leader}
        for first, count in runs(mine):
            p.send(2, tmp(first, count), p.root, after=[came[first + i] for i in range(count)])


@register(Collective.SCATTER, "led", levels=lambda hosts: _levels(hosts, gathers=False), likeness=Likeness.STAR)
def scatter(p: Draft) -> None:
    """2 hops: from the root to the leader, which has mates' parts next; the furthest hosts' first."""
    mine, rows = _hosts(p)
    leader = _leader(p, mine)
    if p.rank == p.root:
        for peer, run in reversed(rows):
            p.send(0, inp(*run), peer)
        p.copy(1, out(), inp(p.root))
    elif p.rank != leader or len(mine) == 1:
        p.recv(0, out(), p.root if p.rank == leader else leader)
    else:
        p.scratch_copies = 1
        for first, count in reversed(runs(mine)):
            came = p.recv(0, tmp(first, count), p.root)
            for mate in range(first, first + count):
                if mate == leader:
                    p.copy(1, out(), tmp(mate), after=[came])
                else:
                    p.send(2, tmp(mate), mate, after=[came])
