"""Recursive doubling and halving: log2 n rounds in which ranks meet in pairs, at distances 1, 2, 4, ...

Thakur, Rabenseifner and Gropp (IJHPCA 2005), sections 4.2 and 4.5; Rabenseifner, "Optimization of collective reduction
operations" (ICCS 2004). When n is not a power of two, each of the first n - 2^k even ranks hands its input to the next
rank, sits the rounds out and gets the result back: two more hops.
"""

from __future__ import annotations

from ...types import Collective
from ..ir import Span
from .base import Draft, Likeness, inp, out, power_of_two, register, tmp


class Fold:
    """Which ranks take part in the rounds, and their places among the `size` that do."""

    def __init__(self, n: int, rank: int) -> None:
        self.size = 1 << (n.bit_length() - 1)
        self.extra = n - self.size
        self.paired = rank < 2 * self.extra
        self.sits_out = self.paired and rank % 2 == 0
        self.place = rank // 2 if self.paired else rank - self.extra

    def rank(self, place: int) -> int:
        return 2 * place + 1 if place < self.extra else place + self.extra


def _fold_in(p: Draft, fold: Fold) -> int | None:
    """Channel 0: the even rank of a pair gives its whole input and waits for the result; the odd one adds it."""
    if not fold.paired:
        return None
    if fold.sits_out:
        p.send(0, inp(0, p.units), p.rank + 1)
        p.recv(1, out(0, p.units), p.rank + 1)
        return None
    return p.recv_reduce(1, out(0, p.units), inp(0, p.units), p.rank - 1)


@register(Collective.ALLREDUCE, "doubling", likeness=Likeness.SWAP)
def allreduce_doubling(p: Draft) -> None:
    """log2 n rounds, in each of which partners swap the whole buffer and both add: all hold the same bits, since
    reductions commute bit for bit where there is one NaN. Both overwrite what they send, so a message must fit
    between."""
    p.credits, p.redundant = 1, True
    fold = Fold(p.size, p.rank)
    ready = _fold_in(p, fold)
    if fold.sits_out:
        return
    total = inp() if ready is None else out()
    for k in range(fold.size.bit_length() - 1):
        partner = fold.rank(fold.place ^ 1 << k)
        sent = p.send(0, total, partner, after=[ready])
        ready = p.recv_reduce(1, out(), total, partner, after=[sent])
        total = out()
    ready = p.scaled(2, out(), ready)
    if fold.paired:
        p.send(0, out(), p.rank - 1, after=[ready])


@register(Collective.ALLREDUCE, "halving_doubling", likeness=Likeness.SWAP)
def allreduce_halving(p: Draft) -> None:
    """Rabenseifner's: log2 n rounds that swap halves, quarters, ... and add, then the same backwards without adding."""
    fold = Fold(p.size, p.rank)
    p.units = fold.size
    ready = _fold_in(p, fold)
    if fold.sits_out:
        return
    total, start, half = inp if ready is None else out, 0, fold.size // 2
    while half:
        partner = fold.rank(fold.place ^ half)
        keep, give = (start + half, start) if fold.place & half else (start, start + half)
        p.send(0, total(give, half), partner, after=[ready])
        ready = p.recv_reduce(1, out(keep, half), total(keep, half), partner)
        total, start, half = out, keep, half // 2
    ready = p.scaled(2, out(start), ready)
    half = 1
    while half < fold.size:
        partner = fold.rank(fold.place ^ half)
        p.send(3, out(start, half), partner, channel=1, after=[ready])
        theirs = start ^ half
        ready = p.recv(4, out(theirs, half), partner, channel=1)
        start, half = min(start, theirs), 2 * half
    if fold.paired:
        p.send(3, out(0, p.units), p.rank - 1, after=[ready])


@register(Collective.REDUCE_SCATTER, "halving", supports=power_of_two, likeness=Likeness.SWAP)
def reduce_scatter(p: Draft) -> None:
    """log2 n rounds that swap half, a quarter, ... of the buffer; powers of two only."""
    p.scratch_copies = 1 if p.size > 2 else 0
    total, start, half, ready = inp, 0, p.size // 2, None
    while half:
        partner = p.rank ^ half
        keep, give = (start + half, start) if p.rank & half else (start, start + half)
        p.send(0, total(give, half), partner, after=[ready])
        ready = p.recv_reduce(1, tmp(keep, half) if half > 1 else out(), total(keep, half), partner)
        total, start, half = tmp, keep, half // 2
    p.scaled(2, out(), ready)


@register(Collective.REDUCE_SCATTER, "hypercube", supports=power_of_two, ordered=True, equal=True)
def reduce_scatter_at_the_end(p: Draft) -> None:
    """log2 n rounds that swap half of all terms, as an all-to-all on a hypercube does: Johnsson and Ho, "Optimum
    broadcasting and personalized communication in hypercubes" (IEEE Transactions on Computers, 1989). Nothing is added
    on the way, so a message is half as long as the input; then each rank adds the terms of its share in the order of
    ranks."""
    p.scratch_copies = p.size.bit_length() - 1
    terms = {p.rank: inp(0, p.size)}  # of every rank heard of, own first: for the shares of those that are to hear it
    half, room, came = p.size // 2, 0, None
    while half:
        partner = p.rank ^ half
        keep, give = (half, 0) if p.rank & half else (0, half)
        given = [Span(span.buf, span.start + give, half) for span in terms.values()]
        whole, ready = given[0], came
        if len(given) > 1:  # side by side
            whole = tmp(room, half * len(given))
            ready = p.copy(2, tmp(room, half), given[0])
            for i, span in enumerate(given[1:], 1):
                ready = p.copy(2, tmp(room + half * i, half), span, after=[came])
            room += whole.count
        p.send(0, whole, partner, after=[ready])
        came = p.recv(1, tmp(room, whole.count), partner)
        terms = {rank: Span(span.buf, span.start + keep, half) for rank, span in terms.items()}
        terms |= {rank ^ half: tmp(room + half * i, half) for i, rank in enumerate([*terms])}
        room, half = room + whole.count, half // 2
    first, *others = (terms[rank] for rank in range(p.size))
    total, ready = first, came  # where it is scratch
    if p.rank == 0:
        total, ready = out(), p.copy(2, out(), first, after=[came])
    for term in others:
        ready = p.reduce(2, total, term, after=[ready])
    p.scaled(3, out(), ready if p.rank == 0 else p.copy(2, out(), total, after=[ready]))


@register(Collective.ALLGATHER, "doubling", supports=power_of_two, likeness=Likeness.SWAP)
def allgather(p: Draft) -> None:
    """log2 n rounds that swap all that is known so far: 1, 2, 4, ... units; powers of two only."""
    own: int | None = p.copy(2, out(p.rank), inp())
    ready, half = None, 1
    while half < p.size:
        partner, start = p.rank ^ half, p.rank & -half
        p.send(0, inp() if half == 1 else out(start, half), partner, after=[ready, own if half > 1 else None])
        if half > 1:
            own = None
        ready = p.recv(1, out(start ^ half, half), partner)
        half *= 2
