"""Through memory that all ranks of the host read, from rank to rank: all-reduces of ranks that take turns on cores.

Of what all have copied somewhere no cache is left by the time that all have had their turn, which is what `staged`
does. Here a stretch is cut into a share for each core. A share goes from rank to rank: each writes the sum of what the
last one left and of its own input, where the next one reads it. As such a sum is only sent on, the engine leaves it
where its first summand lies (`BorrowedBuffers` in native/transport/shm/shm.h): in the scratch memory of the first rank,
to which all but the last add. So input is read once and copied nowhere, and what was written is read by whoever has the
next turn, on the same core first: the chains begin on different ones, and ranks are dealt to cores in turn. The last
rank's sum is read by all where it lies.
"""

from __future__ import annotations

from itertools import pairwise

from ...types import Collective
from ..ir import cut
from .base import Draft, inp, out, register, tmp

_MOST_CHAINS = 4  # more are no faster: a rank waits for one chain while another could go on
_STRETCH_KIB = (128, 512, 3072, 4096)  # by the number of chains; measured, as is the next
_WHOLE_BYTES = 1 << 20  # up to here beginning anew costs more than caches give, where cores work at the same time
_MOST_STRETCHES = 128


def _chains(cores: int) -> int:
    return min(cores, _MOST_CHAINS)


def _stretches(nbytes: int, cores: int) -> int:
    chains = _chains(cores)
    if chains > 1 and nbytes <= _WHOLE_BYTES:
        return 1
    return min(max(1, nbytes // (_STRETCH_KIB[chains - 1] << 10)), _MOST_STRETCHES)


def _order(n: int, chains: int, h: int) -> list[int]:
    """Through which ranks chain `h` goes."""
    return sorted(range(n), key=lambda rank: ((rank - h) % chains, rank // chains))


@register(Collective.ALLREDUCE, "chained", stretches=_stretches, ordered=True)
def allreduce(p: Draft) -> None:
    """Chains through all ranks, each to a star. The last stretch, whose length may be another, has a place of its own.
    In rank order all chains begin at rank 0.

    In place, sums come only after whoever gets them was passed by its chain.
    """
    n, last, c = p.size, p.stretches - 1, min(_chains(p.cores), p.size)
    p.units, p.scratch_copies, p.staged = n * p.stretches, 1, True
    orders, shares = [_order(n, 1 if p.ordered else c, h) for h in range(c)], list(pairwise(cut(n, c)))
    mine_first = sorted(range(c), key=lambda h: orders[h].index(p.rank))
    read: dict[int, list[int | None]] = {h: [] for h in range(c)}  # what a share's next sum waits for
    for k in range(p.stretches):
        place = n * k if k == last else 0
        for h in mine_first:
            order, (begin, end) = orders[h], shares[h]
            at, mine, sums = order.index(p.rank), inp(n * k + begin, end - begin), tmp(place + begin, end - begin)
            after = read[h] if k < last else []
            if at == 0:
                summed = p.copy(0, sums, mine, after=after)
            else:
                summed = p.recv_reduce(1, sums, mine, order[at - 1], after=after)
            if at < n - 1:
                read[h] = [p.send(2, sums, order[at + 1], after=[summed])]
                continue
            total = p.scaled(1, sums, summed)
            for peer in p.after_me():
                shown = p.send(3, sums, peer, channel=1, after=[total])
            read[h] = [shown, p.copy(4, out(n * k + begin, end - begin), sums, after=[total])]
        for h in mine_first:
            if orders[h][-1] != p.rank:
                begin, end = shares[h]
                p.recv(5, out(n * k + begin, end - begin), orders[h][-1], channel=1)
