"""Rings and chains: every rank talks to its two neighbours only, and data streams through all of them.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (JPDC 2009). The phases of
an all-reduce run in lanes and on a channel of their own, so the second follows the first at the pace of elements.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...types import Collective
from ..ir import Span
from .base import Draft, Likeness, each, inp, out, register, tmp


def _reduce_phase(p: Draft, partial: Callable[[int], Span], result: Span) -> int:
    """n-1 steps, channel 0, lanes 0 and 1: unit u starts at rank u+1 and comes to its owner u, growing on its way."""
    n, r = p.size, p.rank
    left, right = (r - 1) % n, (r + 1) % n
    p.send(0, inp(left), right)
    if n > 2:
        got = (r - np.arange(2, n)) % n
        sums = each(partial, got)
        grown = p.recv_reduces(1, sums, each(inp, got), left)
        p.sends(0, sums, right, after=[grown])
    return p.recv_reduce(1, result, inp(r), left)


def _gather_phase(p: Draft, own: Span, ready: int | None, *, lane: int, channel: int) -> None:
    """n-1 steps, lanes `lane` and `lane + 1`: unit u goes from its owner u once round the ring."""
    n, r = p.size, p.rank
    left, right = (r - 1) % n, (r + 1) % n
    p.send(lane, own, right, channel=channel, after=[ready])
    if n > 2:
        got = each(out, (r - np.arange(1, n - 1)) % n)
        came = p.recvs(lane + 1, got, left, channel=channel)
        p.sends(lane, got, right, channel=channel, after=[came])
    p.recv(lane + 1, out(right), left, channel=channel)


@register(Collective.ALLREDUCE, "ring", likeness=Likeness.TURN)
def allreduce(p: Draft) -> None:
    """Reduce-scatter, then all-gather: 2(n-1) messages a rank, each a share of 1/n. Unit r is reduced on rank r."""
    p.units = p.size
    reduced = _reduce_phase(p, out, out(p.rank))
    _gather_phase(p, out(p.rank), p.scaled(4, out(p.rank), reduced), lane=2, channel=1)


@register(Collective.REDUCE_SCATTER, "ring", likeness=Likeness.TURN)
def reduce_scatter(p: Draft) -> None:
    """n-1 messages a rank, each a share of 1/n. What grows on its way lies in scratch: the input is not ours."""
    p.scratch_copies = 1 if p.size > 2 else 0
    reduced = _reduce_phase(p, tmp, out())
    p.scaled(2, out(), reduced)


@register(Collective.ALLGATHER, "ring", likeness=Likeness.TURN)
def allgather(p: Draft) -> None:
    """n-1 messages a rank, each a share of 1/n."""
    _gather_phase(p, inp(), None, lane=0, channel=0)
    p.copy(2, out(p.rank), inp())


@register(Collective.BROADCAST, "ring")
def broadcast(p: Draft) -> None:
    """A chain from the root on: n-1 hops, the whole buffer streams through every rank once."""
    n, place = p.size, (p.rank - p.root) % p.size
    got = p.recv(0, out(), (p.rank - 1) % n) if place > 0 else None
    if place < n - 1:
        p.send(1, inp() if place == 0 else out(), (p.rank + 1) % n, after=[got])


@register(Collective.REDUCE, "ring")
def reduce(p: Draft) -> None:
    """A chain that ends at the root: n-1 hops, each rank adds its own as the buffer streams through."""
    n, place = p.size, (p.rank - p.root) % p.size
    if place == 0:
        p.scaled(2, out(), p.recv_reduce(0, out(), inp(), (p.rank + 1) % n))
        return
    grown = None
    if place < n - 1:
        p.scratch_copies = 1
        grown = p.recv_reduce(0, tmp(), inp(), (p.rank + 1) % n)
    p.send(1, inp() if grown is None else tmp(), (p.rank - 1) % n, after=[grown])


@register(Collective.REDUCE, "chain", ordered=True)
def reduce_in_rank_order(p: Draft) -> None:
    """From rank 0 to the last one, and from there to the root: n hops, n-1 where the last one is the root."""
    last, mine, grown = p.size - 1, inp(), None
    if p.rank > 0:
        mine = out() if p.rank == p.root == last else tmp()
        p.scratch_copies = int(mine != out())
        grown = p.recv_reduce(0, mine, inp(), p.rank - 1)
    if p.rank < last:
        p.send(1, mine, p.rank + 1, after=[grown])
    elif p.root < last:
        p.send(1, mine, p.root, after=[grown])
    if p.rank == p.root:
        p.scaled(3, out(), grown if p.root == last else p.recv(2, out(), last))
