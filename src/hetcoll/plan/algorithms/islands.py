"""Islands: a vendor's collectives inside them, messages between them. For islands of any sizes, and any ranks in them.

A buffer is split over the members of an island: member j of k has the interval [j/k, (j+1)/k). What goes from one
island to another goes from the owner of an interval there to the owner here, piece by piece where their intervals do
not agree: so each byte crosses once, through all members' links at a time, and a rank talks to few others. Inside,
LOCAL steps bring the intervals together. `between` describes the middle of all-reduce.

Collectives whose buffers consist of shares treat an island's shares, in its members' order, as one such buffer: its
*region*. Messages between two islands are in the order of the region at both ends, and rank i's islands in the order of
their distance, so that a message waits only for earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from ...types import Collective
from ..ir import Buf, Plan, Span, Spans
from .base import Algorithm, Draft, Likeness, Rounds, each, inp, out, tmp
from .between import Place, gather_between, reduce_between
from .direct import round_the_ring
from .regions import Make, Pieces, Regions, cut

LOCAL, SEND, RECV, LAST, ROUND = 0, 1, 2, 3, 4  # lanes; all-reduce has those of `between`

ISLANDS: dict[Collective, Algorithm] = {}


def _register(
    collective: Collective,
    *,
    compresses: bool = False,
    likeness: Likeness | None = None,
    rounds: Callable[[Plan], Rounds] | None = None,
) -> Callable[[Callable[[Draft], None]], Callable[[Draft], None]]:
    def enter(draw: Callable[[Draft], None]) -> Callable[[Draft], None]:
        ISLANDS[collective] = Algorithm(
            "islands", collective, draw, compresses=compresses, likeness=likeness, rounds=rounds
        )
        return draw

    return enter


# ------------------------------------------------------------------------------------------------ whole buffers


class Split(Place):
    """A buffer of `units` split over the members of every island. `home` is the root's."""

    def __init__(self, p: Draft, parts: int = 1) -> None:
        super().__init__(p)
        p.islands = p.hosts
        p.units = self.units = p.there.common * parts
        self.home = p.there.of[p.root]

    def intervals(self, make: Make) -> tuple[Span, ...]:
        """Of all members of my island."""
        return _intervals(make, self.units, self.k)

    def crossing(self, islands: Iterable[int]) -> Pieces:
        """The pieces of my interval, as other islands split it."""
        found, part = [self.hosts[island] for island in islands], self.units // self.k
        mine = part * self.j, part * (self.j + 1), self.units
        pieces = [cut(*mine, self.units // len(island)) for island in found]
        peers = [island[piece.j] for island, few in zip(found, pieces, strict=True) for piece in few]
        return Pieces.of(pieces, peers, [0] * len(peers), 2 * self.units)


@lru_cache(maxsize=64)  # the very same of all members, of which there may be a thousand
def _intervals(make: Make, units: int, k: int) -> tuple[Span, ...]:
    cuts = [units * j // k for j in range(k + 1)]
    return tuple(make(a, b - a) for a, b in pairwise(cuts))


@_register(Collective.ALLREDUCE, compresses=True, likeness=Likeness.TURN, rounds=round_the_ring)
def allreduce(p: Draft) -> None:
    """Reduce-scatter inside; all-reduce each interval among its owners, one an island; all-gather inside."""
    at = Split(p, parts=len(p.hosts) if len(p.hosts) > 2 else 1)
    if at.m == 1:
        p.scaled(LAST, out(0, at.units), p.local(0, Collective.ALLREDUCE, src=inp(0, at.units), dst=out(0, at.units)))
        return
    mine = at.intervals(out)[at.j]
    summed = None
    if at.k > 1:
        summed = p.local(LOCAL, Collective.REDUCE_SCATTER, dst=mine, parts=at.intervals(inp))
    if at.m == 2:
        p.credits, p.redundant = 1, True  # both send first, and both add
        final = _exchange(p, at, summed)
        if at.k > 1:
            p.local(LOCAL, Collective.ALLGATHER, src=mine, parts=at.intervals(out), after=final)
        return
    final = reduce_between(p, at, summed)
    came = gather_between(p, at, final)
    if at.k > 1:
        p.local(LOCAL, Collective.ALLGATHER, src=mine, parts=at.intervals(out), after=[*final, came])


def _exchange(p: Draft, at: Split, summed: int | None) -> list[int | None]:
    """Of two islands: both owners of a piece send it and add what comes. As many bytes each way as in two phases, and
    nothing to wait for in between; a + b has the same bits as b + a where there
    is one NaN."""
    pieces = at.crossing([1 - at.i])
    here = pieces.large(out)
    terms, ready = pieces.rounded(p, 9, here, pieces.large(inp if at.k == 1 else out), summed)
    sent = p.sends(2, terms, pieces.peer, after=[ready])
    came = p.recv_reduces(3, here, terms, pieces.peer, after=[sent])
    for steps in (sent, came):
        pieces.batch(p, steps)
    if p.average:
        came = np.array(
            [p.scaled(8, span, step) for span, step in zip(here.each(came.size), came.tolist(), strict=True)]
        )
        pieces.batch(p, came)
    final: list[int | None] = came.tolist()
    return final


@_register(Collective.BROADCAST, likeness=Likeness.STAR)
def broadcast(p: Draft) -> None:
    """Inside the root's island first, whose members send an interval each to every other; all-gather there."""
    at = Split(p)
    if at.i == at.home:
        known, whole = None, inp(0, at.units)
        if at.k > 1 and p.rank == p.root:
            p.local(LOCAL, Collective.BROADCAST, root=p.root, src=whole)
        elif at.k > 1:
            known = p.local(LOCAL, Collective.BROADCAST, root=p.root, dst=out(0, at.units))
        theirs = at.crossing(at.others(1))
        theirs.batch(p, p.sends(SEND, theirs.large(inp if known is None else out), theirs.peer, after=[known]))
        return
    mine = at.crossing([at.home])
    came = p.recvs(RECV, mine.large(out), mine.peer)
    mine.batch(p, came)
    if at.k > 1:
        parts = at.intervals(out)
        p.local(LOCAL, Collective.ALLGATHER, src=parts[at.j], parts=parts, after=came.tolist())


@_register(Collective.REDUCE, likeness=Likeness.STAR)
def reduce(p: Draft) -> None:
    """Reduce-scatter inside; the root's island adds what comes to its members' intervals, and reduces to the root."""
    at = Split(p)
    p.scratch_copies = int(at.m > 1 and at.k > 1)
    if at.i != at.home:
        grown, make = None, inp
        if at.k > 1:
            mine, make = at.intervals(tmp)[at.j], tmp
            grown = p.local(LOCAL, Collective.REDUCE_SCATTER, dst=mine, parts=at.intervals(inp))
        away = at.crossing([at.home])
        away.batch(p, p.sends(SEND, away.large(make), away.peer, after=[grown]))
        return
    theirs = at.crossing(at.others(-1))
    grow = theirs.large(out if at.k == 1 else tmp)
    terms = Spans(np.where(theirs.island == 0, Buf.SEND, grow.buf), theirs.wide, theirs.units)
    came = p.recv_reduces(RECV, grow, terms, theirs.peer)
    theirs.batch(p, came)
    reduced = int(came[-1]) if at.m > 1 else None
    if at.k > 1:
        for j, (term, result) in enumerate(zip(at.intervals(inp), at.intervals(out), strict=True)):
            if j == at.j and at.m > 1:
                term = at.intervals(tmp)[j]
            dst = result if p.rank == p.root else None
            reduced = p.local(LOCAL, Collective.REDUCE, root=p.root, src=term, dst=dst, after=[reduced])
    if p.rank == p.root:
        p.scaled(LAST, out(0, at.units), reduced)


# ------------------------------------------------------------------------------------------------------- shares


@_register(Collective.ALLGATHER, likeness=Likeness.TURN)
def allgather(p: Draft) -> None:
    """The members of every other island get an interval of each region, and gather it there."""
    at = Regions(p)
    if at.k > 1:
        p.local(LOCAL, Collective.ALLGATHER, src=inp(0, at.pieces), parts=at.shares(out))
    else:
        p.copy(LAST, at.share(out, p.rank), inp(0, at.pieces))
    mine, islands = at.mine(at.others(1)), at.others(-1)
    mine.batch(p, p.sends(SEND, mine.small(inp), mine.peer))
    theirs = at.own(islands)
    came = p.recvs(RECV, theirs.large(out), theirs.peer)
    theirs.batch(p, came)
    for island, last in zip(islands, came[theirs.ends - 1].tolist(), strict=True) if at.k > 1 else ():
        for parts in at.rows(out, island, merge=True):
            p.local(LOCAL, Collective.ALLGATHER, src=parts[at.j], parts=parts, after=[last])


@_register(Collective.REDUCE_SCATTER, compresses=True, likeness=Likeness.TURN, rounds=round_the_ring)
def reduce_scatter(p: Draft) -> None:
    """Every island adds up the others' regions, an interval each member, and sends them to their owners."""
    at = Regions(p)
    p.scratch_copies = int(at.m > 1 and (at.k > 1 or p.compress))
    islands, grown, ready = at.others(1), np.full(at.m - 1, -1), None
    for i, island in enumerate(islands) if at.k > 1 else ():
        for parts in at.rows(inp, island, merge=True):
            part = parts[at.j]
            dst = None if part is None else tmp(part.start, part.count)
            grown[i] = p.local(LOCAL, Collective.REDUCE_SCATTER, dst=dst, parts=parts)
    if at.k > 1:
        ready = p.local(LOCAL, Collective.REDUCE_SCATTER, dst=out(0, at.pieces), parts=at.shares(inp))
    away, mine = at.own(islands), at.mine(at.others(-1))
    summed = away.large(tmp if at.k > 1 else inp)
    terms, there = away.rounded(p, ROUND, away.large(tmp), summed, grown[away.island])
    away.batch(p, p.sends(SEND, terms, away.peer, after=[there]))
    fresh = (mine.island == 0) & (at.k == 1)
    term = Spans(np.where(fresh, Buf.SEND, Buf.RECV), np.where(fresh, mine.wide, mine.start), mine.units)
    came = p.recv_reduces(RECV, mine.small(out), term, mine.peer, after=[ready])
    mine.batch(p, came)
    p.scaled(LAST, out(0, at.pieces), int(came[-1]) if at.m > 1 else ready)


@_register(Collective.GATHER, likeness=Likeness.STAR)
def gather(p: Draft) -> None:
    """The members of the root's island get an interval each of every other's region, and gather it at the root."""
    at = Regions(p)
    if at.i != at.home:
        mine = at.mine([at.home])
        mine.batch(p, p.sends(SEND, mine.small(inp), mine.peer))
        return
    is_root = p.rank == p.root
    if at.k > 1:
        own = at.shares(out) if is_root else ()
        p.local(LOCAL, Collective.GATHER, root=p.root, src=inp(0, at.pieces), parts=own)
    else:
        p.copy(LAST, at.share(out, p.rank), inp(0, at.pieces))
    p.scratch_like, p.scratch_copies = Buf.RECV, int(at.m > 1 and not is_root)
    islands = at.others(-1)
    theirs = at.own(islands)
    came = p.recvs(RECV, theirs.large(out if is_root else tmp), theirs.peer)
    theirs.batch(p, came)
    for island, last in zip(islands, came[theirs.ends - 1].tolist(), strict=True) if at.k > 1 else ():
        for src, others in _beside_root(p, at, out, island):
            p.local(LOCAL, Collective.GATHER, root=p.root, src=src, parts=others, after=[last])


def _beside_root(p: Draft, at: Regions, make: Make, region: int) -> Iterator[tuple[Span | None, Sequence[Span | None]]]:
    """What a member has in its scratch of a region, and what the root has of the others, whose own part is where it
    belongs; again for each piece of a member."""
    if p.rank != p.root:
        yield from ((part, ()) for part in at.column(tmp, region))
        return
    for parts in at.rows(make, region):
        yield None, [None if j == at.j else part for j, part in enumerate(parts)]


@_register(Collective.SCATTER, likeness=Likeness.STAR)
def scatter(p: Draft) -> None:
    """The root scatters every region over the members of its island, who send the pieces to their owners."""
    at = Regions(p)
    if at.i != at.home:
        mine = at.mine([at.home])
        mine.batch(p, p.recvs(RECV, mine.small(out), mine.peer))
        return
    is_root = p.rank == p.root
    p.scratch_copies = int(at.m > 1 and not is_root)
    islands, came = at.others(1), np.full(at.m - 1, -1)
    for i, island in enumerate(islands) if at.k > 1 else ():
        for dst, others in _beside_root(p, at, inp, island):
            came[i] = p.local(LOCAL, Collective.SCATTER, root=p.root, dst=dst, parts=others)
    theirs = at.own(islands)
    theirs.batch(p, p.sends(SEND, theirs.large(inp if is_root else tmp), theirs.peer, after=[came[theirs.island]]))
    if at.k > 1:
        own = at.shares(inp) if is_root else ()
        p.local(LOCAL, Collective.SCATTER, root=p.root, dst=out(0, at.pieces), parts=own)
    else:
        p.copy(LAST, out(0, at.pieces), at.share(inp, p.rank))


@_register(Collective.ALLTOALL)
def alltoall(p: Draft) -> None:
    """Each member scatters inside its island; between islands rank r meets (k - r) mod n in round k.

    In place, what goes to a mate and what comes from it share their memory, so the first is put aside; and a message
    between islands must fit between.
    """
    at = Place(p)
    p.islands, p.credits, p.scratch_copies = p.hosts, 1, int(at.k > 1)
    aside = None
    for mate in at.mates_after():
        aside = p.copy(LAST, tmp(mate), inp(mate))
    p.copy(LAST, out(p.rank), inp(p.rank))
    for root in at.mates if at.k > 1 else ():
        if root == p.rank:
            parts = [None if mate == root else tmp(mate) for mate in at.mates]
            p.local(LOCAL, Collective.SCATTER, root=root, parts=parts, after=[aside])
        else:
            p.local(LOCAL, Collective.SCATTER, root=root, dst=out(root), after=[aside])
    peers = (np.arange(p.size) - p.rank) % p.size
    peers = peers[~np.isin(peers, at.mates)]
    sent = p.sends(SEND, each(inp, peers), peers)
    p.recvs(RECV, each(out, peers), peers, after=[sent])
