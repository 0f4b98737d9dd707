"""The dissemination barrier.

Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization" (1988).
"""

from __future__ import annotations

from ...types import Collective
from ..costs import ceil_log2
from .base import Draft, inp, out, register


@register(Collective.BARRIER, "dissemination")
def barrier(p: Draft) -> None:
    """Round k tells rank + 2^k all that is known so far: ceil(log2 n) hops, one empty message a round and rank.

    One lane, so an empty message must fit between.
    """
    p.credits = 1
    for k in range(ceil_log2(p.size)):
        p.send(0, inp(), (p.rank + (1 << k)) % p.size)
        p.recv(0, out(), (p.rank - (1 << k)) % p.size)
