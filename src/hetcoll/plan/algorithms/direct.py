"""One hop: whoever has data sends it straight to whoever needs it.

The fewest dependent hops and the most messages: best between few ranks, and where a hop costs more than its bytes
(more ranks than cores). Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH" (IJHPCA 2005), compare such linear algorithms with trees and rings. Sends go round the ring from rank + 1 on
and receives from rank - 1 down, so nobody is everybody's first target; a message then waits only for messages over a
shorter distance, which is why nothing can deadlock even without buffers.
"""

from __future__ import annotations

from ...types import Collective
from ..ir import Span
from .base import Draft, inp, out, register, tmp


@register(Collective.ALLREDUCE, "oneshot", ordered=True)
def oneshot_allreduce(p: Draft) -> None:
    """Everyone sends all to everyone: 1 hop, n-1 messages a rank of the whole buffer.

    Every rank adds in rank order ((x0 + x1) + x2) + ..., so all hold the same bits. The first two may be swapped:
    reductions commute bit for bit where there is one NaN.
    """
    n, r, p.redundant = p.size, p.rank, True
    sent = None
    for peer in p.others():
        sent = p.send(0, inp(), peer)
    if n == 2:
        p.credits, p.apart = 1, True  # in place both overwrite what they send: a message must fit between
        p.scaled(2, out(), p.recv_reduce(1, out(), inp(), 1 - r, after=[sent]))
        return
    p.scratch_copies = 1
    p.scaled(2, out(), in_rank_order(p, 1, out(), inp(), tmp(), sent))


def in_rank_order(p: Draft, lane: int, result: Span, own: Span, held: Span, sent: int | None = None) -> int | None:
    """`result` gets the sum of my term `own` and of a message of each other rank, added in rank order.

    `held` is where the sum grows before it is whole: it may be `result` on ranks 0 and 1, whose own term is among the
    first two, which may be swapped. `result` is written after `sent`.
    """
    last, r, total, done = p.size - 1, p.rank, own if p.rank < 2 else held, None
    if r > 1:
        p.recv(lane, held, 0)
    for peer in range(int(r > 1), p.size):
        if peer == r and r > 1:
            done = p.reduce(lane, held, own)
        elif peer != r:
            total_to, after = (result, [sent]) if peer == last else (held, [])
            done = p.recv_reduce(lane, total_to, total, peer, after=after)
            total = held
    return p.copy(lane, result, held, after=[sent]) if r == last and held != result else done


def _reduce_own(p: Draft, result: Span, own: Span) -> int | None:
    """Channel 0, lanes 0, 1 and 5: everyone sends unit q of its input to q; `result` gets the sum of my unit `own`."""
    p.scratch_copies = int(p.compress and p.collective is Collective.REDUCE_SCATTER)
    for peer in p.after_me():
        sent, ready = p.rounded(5, tmp(peer) if p.scratch_copies else out(peer), inp(peer), None, [peer])
        p.send(0, sent, peer, after=[ready])
    if p.ordered:
        p.scratch_copies = int(p.size > 2)
        return in_rank_order(p, 1, result, own, result if p.rank < 2 else tmp(p.rank))
    reduced = None
    for peer in p.before_me():
        reduced = p.recv_reduce(1, result, own, peer)
        own = result
    return reduced


@register(Collective.ALLREDUCE, "direct", compresses=True, ordered=True, turns=True)
def allreduce(p: Draft) -> None:
    """Reduce-scatter and all-gather, each in one hop: 2(n-1) messages a rank, each a share of 1/n."""
    p.units = p.size
    mine = out(p.rank)
    ready = p.scaled(4, mine, _reduce_own(p, mine, inp(p.rank)))
    _, ready = p.rounded(6, mine, mine, ready, p.others())
    for peer in p.after_me():
        p.send(2, mine, peer, channel=1, after=[ready])
        ready = None
    for peer in p.before_me():
        p.recv(3, out(peer), peer, channel=1)


@register(Collective.REDUCE_SCATTER, "direct", compresses=True, ordered=True, turns=True)
def reduce_scatter(p: Draft) -> None:
    """1 hop, n-1 messages a rank, each a share of 1/n."""
    p.scaled(2, out(), _reduce_own(p, out(), inp(p.rank)))


@register(Collective.ALLGATHER, "direct", turns=True)
def allgather(p: Draft) -> None:
    """1 hop, n-1 messages a rank, each a share of 1/n."""
    for peer in p.after_me():
        p.send(0, inp(), peer)
    for peer in p.before_me():
        p.recv(1, out(peer), peer)
    p.copy(2, out(p.rank), inp())


@register(Collective.BROADCAST, "direct")
def broadcast(p: Draft) -> None:
    """The root sends all to everyone: 1 hop, n-1 messages."""
    if p.rank != p.root:
        p.recv(0, out(), p.root)
        return
    for peer in p.after_me():
        p.send(0, inp(), peer)


@register(Collective.REDUCE, "direct", ordered=True)
def reduce(p: Draft) -> None:
    """Everyone sends all to the root, which adds round the ring from itself on, or in rank order: 1 hop."""
    if p.rank != p.root:
        p.send(0, inp(), p.root)
        return
    if p.ordered:
        p.scratch_copies = int(p.rank > 1)
        p.scaled(1, out(), in_rank_order(p, 0, out(), inp(), out() if p.rank < 2 else tmp()))
        return
    total, reduced = inp(), None
    for peer in p.after_me():
        reduced = p.recv_reduce(0, out(), total, peer)
        total = out()
    p.scaled(1, out(), reduced)


@register(Collective.GATHER, "direct")
def gather(p: Draft) -> None:
    """Everyone sends its unit to the root: 1 hop, n-1 messages."""
    if p.rank != p.root:
        p.send(0, inp(), p.root)
        return
    for peer in p.after_me():
        p.recv(0, out(peer), peer)
    p.copy(1, out(p.root), inp())


@register(Collective.SCATTER, "direct")
def scatter(p: Draft) -> None:
    """The root sends everyone its unit: 1 hop, n-1 messages."""
    if p.rank != p.root:
        p.recv(0, out(), p.root)
        return
    for peer in p.after_me():
        p.send(0, inp(peer), peer)
    p.copy(1, out(), inp(p.root))


@register(Collective.BARRIER, "direct")
def barrier(p: Draft) -> None:
    """Everyone tells everyone: 1 hop, n-1 empty messages a rank. One lane, so an empty message must fit between."""
    p.credits = 1
    for peer in p.after_me():
        p.send(0, inp(), peer)
    for peer in p.before_me():
        p.recv(0, out(), peer)
