"""Through memory that all ranks of the host read, a stretch at a time: long messages among four ranks or more.

A rank that fills a slot for each of the others writes as many bytes for a reduce-scatter as its buffer has, and as many
again for the all-gather, in a place for each of them; where ranks take turns on a core, no cache holds them until the
others run. Here it leaves one copy of a stretch of its input, in SCRATCH, which the others can read where it lies; each
adds up its share of all copies, over its own part of its own copy, and the sums are read there as well. The next
stretch goes through the same place: short enough for the caches, and long enough for what messages take besides.
"""

from __future__ import annotations

from ...types import Collective
from .base import Draft, each, inp, out, register, tmp
from .direct import in_rank_order

_STRETCH_BYTES = 2 << 20
_MOST_STRETCHES = 64


@register(
    Collective.ALLREDUCE,
    "staged",
    stretches=lambda nbytes, _: min(max(1, nbytes // _STRETCH_BYTES), _MOST_STRETCHES),
    ordered=True,
)
def allreduce(p: Draft) -> None:
    """Of each stretch a copy, then reduce-scatter and all-gather, each in one hop. The last stretch, whose length may
    be another, has a place of its own. In place, sums come only after all of the stretch was copied: they hold it.
    In rank order a sum grows in a copy of its own."""
    n, last = p.size, p.stretches - 1
    p.units, p.scratch_copies, p.staged = n * p.stretches, 1 + p.ordered, True
    read: list[int | None] = []  # what the next copy waits for
    for k in range(p.stretches):
        begin, place = n * k, n * k if k == last else 0
        mine = tmp(place + p.rank)
        copied = p.copy(0, tmp(place, n), inp(begin, n), after=read if k < last else ())
        given = p.sends(1, each(tmp, place + p.ring(1)), p.ring(1), after=[copied])
        if p.ordered:
            reduced = in_rank_order(p, 2, mine, mine, tmp(p.units + place + p.rank), copied, copied)
        else:
            reduced = int(p.recv_reduces(2, mine, mine, p.ring(-1), after=[copied])[-1])
        total = p.scaled(3, mine, reduced)
        shown = p.sends(4, mine, p.ring(1), channel=1, after=[total])
        p.recvs(5, each(out, begin + p.ring(-1)), p.ring(-1), channel=1)
        read = [int(given[-1]), int(shown[-1]), p.copy(6, out(begin + p.rank), mine, after=[total])]
