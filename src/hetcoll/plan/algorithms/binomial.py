"""Binomial trees: about log2 n hops and messages, for messages whose bytes cost less than their hops.

Rank v (counted from the root) is over v + 1, v + 2, v + 4, ... up to its own lowest bit, and so over the interval that
they cover. All but the all-reduce run in one lane: nothing streams, nothing needs a dep. Thakur, Rabenseifner and Gropp
(IJHPCA 2005) describe them.

Gather and scatter are taken only by name: what is on its way needs scratch as large as the root's buffer, on ranks
whose own buffers are small.
"""

from __future__ import annotations

from ...types import Collective
from ..costs import ceil_log2
from ..ir import Buf
from .base import Draft, inp, out, register, tmp
from .direct import in_rank_order


def _family(p: Draft) -> tuple[int | None, list[int]]:
    """My parent, and my children, nearest first."""
    v = (p.rank - p.root) % p.size
    low = v & -v if v else 1 << ceil_log2(p.size)
    below = [v + (1 << k) for k in range(low.bit_length() - 1) if v + (1 << k) < p.size]
    parent = (v - low + p.root) % p.size if v else None
    return parent, [(c + p.root) % p.size for c in below]


def _interval(p: Draft, rank: int) -> list[tuple[int, int]]:
    """The ranks that `rank` is over, itself first, as (start, count): two when they pass the last rank."""
    v = (rank - p.root) % p.size
    count = min(v & -v if v else p.size, p.size - v)
    first = min(count, p.size - rank)
    return [(rank, first), (0, count - first)] if count > first else [(rank, count)]


@register(Collective.BROADCAST, "binomial")
def broadcast(p: Draft) -> None:
    """floor(log2 n) hops; the furthest child first, since it has the most below it."""
    parent, children = _family(p)
    if parent is not None:
        p.recv(0, out(), parent)
    for child in reversed(children):
        p.send(0, inp() if parent is None else out(), child)


@register(Collective.REDUCE, "binomial")
def reduce(p: Draft) -> None:
    """floor(log2 n) hops; the nearest child first, since it has the least to wait for."""
    parent, children = _family(p)
    partial = out() if parent is None else tmp()
    if parent is not None and children:
        p.scratch_copies = 1
    total, reduced = inp(), None
    for child in children:
        reduced = p.recv_reduce(0, partial, total, child)
        total = partial
    if parent is None:
        p.scaled(0, out(), reduced)
    else:
        p.send(0, total, parent)


@register(Collective.GATHER, "binomial")
def gather(p: Draft) -> None:
    """floor(log2 n) hops; each rank hands on all that lies below it, in one message or two."""
    parent, children = _family(p)
    if parent is not None and not children:
        p.send(0, inp(), parent)
        return
    if parent is not None:
        p.scratch_copies, p.scratch_like = 1, Buf.RECV
    held = out if parent is None else tmp
    p.copy(0, held(p.rank), inp())
    for child in children:
        for start, count in _interval(p, child):
            p.recv(0, held(start, count), child)
    if parent is not None:
        for start, count in _interval(p, p.rank):
            p.send(0, tmp(start, count), parent)


@register(Collective.SCATTER, "binomial")
def scatter(p: Draft) -> None:
    """floor(log2 n) hops; each rank gets all that belongs below it, in one message or two."""
    parent, children = _family(p)
    if parent is not None and not children:
        p.recv(0, out(), parent)
        return
    if parent is not None:
        p.scratch_copies = 1
        for start, count in _interval(p, p.rank):
            p.recv(0, tmp(start, count), parent)
    held = inp if parent is None else tmp
    for child in reversed(children):
        for start, count in _interval(p, child):
            p.send(0, held(start, count), child)
    p.copy(0, out(), held(p.rank))


@register(Collective.ALLREDUCE, "reduce_broadcast", ordered=True)
def allreduce(p: Draft) -> None:
    """Everyone sends all to one rank, which adds in rank order; the sum comes down the tree: 1 + floor(log2 n) hops,
    and the fewest messages that all ranks together can do with, 2(n-1)."""
    parent, children = _family(p)
    final: int | None
    if parent is None:
        p.scratch_copies = int(p.rank > 1)
        final = p.scaled(2, out(), in_rank_order(p, 0, out(), inp(), out() if p.rank < 2 else tmp()))
    else:
        p.send(0, inp(), p.root)
        final = p.recv(1, out(), parent, channel=1)
    for child in reversed(children):
        p.send(3, out(), child, channel=1, after=[final])
