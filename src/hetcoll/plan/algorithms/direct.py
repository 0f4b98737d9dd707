"""One hop: whoever has data sends it straight to whoever needs it.

The fewest dependent hops and the most messages: best between few ranks, and where a hop costs more than its bytes
(more ranks than cores). Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH" (IJHPCA 2005), compare such linear algorithms with trees and rings. Sends go round the ring from rank + 1 on
and receives from rank - 1 down, so nobody is everybody's first target; a message then waits only for messages over a
shorter distance, which is why nothing can deadlock even without buffers.
"""

from __future__ import annotations

import numpy as np

from ...types import Collective
from ..ir import Op, Plan, Span
from ..steps import Ints
from .base import Draft, Likeness, Rounds, each, inp, out, register, tmp


def _ends(plan: Plan) -> tuple[Ints, Ints]:
    """From which rank each message goes, and to which."""
    sends, peer = plan.columns.fields[0] == Op.SEND, plan.columns.peer
    return np.where(sends, plan.rank, peer), np.where(sends, peer, plan.rank)


def in_order(plan: Plan) -> Rounds:
    """Every rank sends in the order of ranks, and receives so."""
    source, target = _ends(plan)
    return Rounds(source + target, np.zeros_like(source))


def round_the_ring(plan: Plan) -> Rounds:
    """Every rank sends round the ring, and receives round the ring or in the order of ranks; then, on channel 1, it
    passes on round the ring what has become of that."""
    source, target = _ends(plan)
    distance, later = (target - source) % plan.size, plan.columns.fields[3] > 0
    ranks = source + target + plan.size * (source > target)
    first, last = (ranks, 3 * plan.size - 3) if plan.ordered else (distance, plan.size - 1)
    return Rounds(np.where(later, last + distance - 1, first), later.astype(np.int64))


@register(Collective.ALLREDUCE, "oneshot", ordered=True, rounds=in_order)
def oneshot_allreduce(p: Draft) -> None:
    """Everyone sends all to everyone: 1 hop, n-1 messages a rank of the whole buffer.

    Every rank adds in rank order ((x0 + x1) + x2) + ..., so all hold the same bits. The first two may be swapped:
    reductions commute bit for bit where there is one NaN.
    """
    n, r, p.redundant = p.size, p.rank, True
    sent = int(p.sends(0, inp(), np.array(p.others()))[-1])
    if n == 2:
        p.credits, p.apart = 1, True  # in place both overwrite what they send: a message must fit between
        p.scaled(2, out(), p.recv_reduce(1, out(), inp(), 1 - r, after=[sent]))
        return
    p.scratch_copies = 1
    p.scaled(2, out(), in_rank_order(p, 1, out(), inp(), tmp(), sent))


def in_rank_order(
    p: Draft, lane: int, result: Span, mine: Span, held: Span, sent: int | None = None, there: int | None = None
) -> int | None:
    """`result` gets the sum of my term `mine` and of a message of each other rank, added in rank order.

    `held` is where the sum grows before it is whole: it may be `result` on ranks 0 and 1, whose own term is among the
    first two, which may be swapped. `result` is written after `sent`; `mine` is there after `there`.
    """
    last, r = p.size - 1, p.rank
    if r > 1:
        p.recv(lane, held, 0)
        p.recv_reduces(lane, held, held, np.arange(1, r))
        own, rest = held, np.arange(r + 1, p.size)
        done = p.reduce(lane, held, mine, after=[there])
        if r == last:
            return p.copy(lane, result, held, after=[sent]) if held != result else done
    else:
        own, rest = mine, np.array(p.others())
    if len(rest) > 1:
        p.recv_reduce(lane, held, own, int(rest[0]), after=[there])
        p.recv_reduces(lane, held, held, rest[1:-1])
        own = held
    return p.recv_reduce(lane, result, own, int(rest[-1]), after=[sent])


def _reduce_own(p: Draft, result: Span, own: Span) -> int | None:
    """Channel 0, lanes 0, 1 and 5: everyone sends unit q of its input to q; `result` gets the sum of my unit `own`."""
    p.scratch_copies = int(p.compress and p.collective is Collective.REDUCE_SCATTER)
    peers = p.ring(1)
    rounded = each(tmp if p.scratch_copies else out, peers)
    sent, ready = p.roundeds(5, rounded, each(inp, peers), None, peers)
    p.sends(0, sent, peers, after=[ready])
    if p.ordered:
        p.scratch_copies = int(p.size > 2)
        return in_rank_order(p, 1, result, own, result if p.rank < 2 else tmp(p.rank))
    return _added(p, 1, result, own, p.ring(-1))


def _added(p: Draft, lane: int, result: Span, own: Span, peers: Ints) -> int:
    """`result` gets the sum of `own` and of a message of each of `peers`, one after another."""
    first = p.recv_reduce(lane, result, own, int(peers[0]))
    return first if p.size == 2 else int(p.recv_reduces(lane, result, result, peers[1:])[-1])


@register(Collective.ALLREDUCE, "direct", compresses=True, ordered=True, likeness=Likeness.TURN, rounds=round_the_ring)
def allreduce(p: Draft) -> None:
    """Reduce-scatter and all-gather, each in one hop: 2(n-1) messages a rank, each a share of 1/n."""
    p.units = p.size
    mine = out(p.rank)
    ready = p.scaled(4, mine, _reduce_own(p, mine, inp(p.rank)))
    _, ready = p.rounded(6, mine, mine, ready, p.others())
    p.sends(2, mine, p.ring(1), channel=1, after=[ready])
    p.recvs(3, each(out, p.ring(-1)), p.ring(-1), channel=1)


@register(
    Collective.REDUCE_SCATTER, "direct", compresses=True, ordered=True, likeness=Likeness.TURN, rounds=round_the_ring
)
def reduce_scatter(p: Draft) -> None:
    """1 hop, n-1 messages a rank, each a share of 1/n."""
    p.scaled(2, out(), _reduce_own(p, out(), inp(p.rank)))


@register(Collective.ALLGATHER, "direct", likeness=Likeness.TURN)
def allgather(p: Draft) -> None:
    """1 hop, n-1 messages a rank, each a share of 1/n."""
    p.sends(0, inp(), p.ring(1))
    p.recvs(1, each(out, p.ring(-1)), p.ring(-1))
    p.copy(2, out(p.rank), inp())


@register(Collective.BROADCAST, "direct", likeness=Likeness.STAR)
def broadcast(p: Draft) -> None:
    """The root sends all to everyone: 1 hop, n-1 messages."""
    if p.rank != p.root:
        p.recv(0, out(), p.root)
        return
    p.sends(0, inp(), p.ring(1))


@register(Collective.REDUCE, "direct", ordered=True, likeness=Likeness.STAR)
def reduce(p: Draft) -> None:
    """Everyone sends all to the root, which adds round the ring from itself on, or in rank order: 1 hop."""
    if p.rank != p.root:
        p.send(0, inp(), p.root)
        return
    if p.ordered:
        p.scratch_copies = int(p.rank > 1)
        p.scaled(1, out(), in_rank_order(p, 0, out(), inp(), out() if p.rank < 2 else tmp()))
        return
    p.scaled(1, out(), _added(p, 0, out(), inp(), p.ring(1)))


@register(Collective.REDUCE, "reduce_scatter_gather", ordered=True, rounds=round_the_ring)
def reduce_by_shares(p: Draft) -> None:
    """Reduce-scatter, and a gather at the root, each in one hop: every rank adds a share of 1/n."""
    p.units = p.size
    mine = out(p.rank) if p.rank == p.root else tmp(p.rank)
    p.sends(0, each(inp, p.ring(1)), p.ring(1))
    if p.ordered:
        held = mine if p.rank < 2 else tmp(p.rank)
        p.scratch_copies = int(tmp(p.rank) in (mine, held))
        added = in_rank_order(p, 1, mine, inp(p.rank), held)
    else:
        p.scratch_copies = int(p.rank != p.root)
        added = _added(p, 1, mine, inp(p.rank), p.ring(-1))
    total = p.scaled(2, mine, added)
    if p.rank == p.root:
        p.recvs(3, each(out, p.ring(-1)), p.ring(-1), channel=1)
    else:
        p.send(3, mine, p.root, channel=1, after=[total])


@register(Collective.GATHER, "direct", likeness=Likeness.STAR)
def gather(p: Draft) -> None:
    """Everyone sends its unit to the root: 1 hop, n-1 messages."""
    if p.rank != p.root:
        p.send(0, inp(), p.root)
        return
    p.recvs(0, each(out, p.ring(1)), p.ring(1))
    p.copy(1, out(p.root), inp())


@register(Collective.SCATTER, "direct", likeness=Likeness.STAR)
def scatter(p: Draft) -> None:
    """The root sends everyone its unit: 1 hop, n-1 messages."""
    if p.rank != p.root:
        p.recv(0, out(), p.root)
        return
    p.sends(0, each(inp, p.ring(1)), p.ring(1))
    p.copy(1, out(), inp(p.root))


@register(Collective.BARRIER, "direct")
def barrier(p: Draft) -> None:
    """Everyone tells everyone: 1 hop, n-1 empty messages a rank. One lane, so an empty message must fit between."""
    p.credits = 1
    p.sends(0, inp(), p.ring(1))
    p.recvs(0, out(), p.ring(-1))
