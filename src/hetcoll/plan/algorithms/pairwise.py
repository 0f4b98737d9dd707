"""Pairwise exchange for all-to-all.

Thakur, Rabenseifner and Gropp (IJHPCA 2005), section 4.3: ranks meet two by two; here rank r meets (k - r) mod n in
round k, which works for any n.
"""

from __future__ import annotations

from ...types import Collective
from .base import Draft, inp, out, register


@register(Collective.ALLTOALL, "pairwise")
def alltoall(p: Draft) -> None:
    """1 hop, n-1 messages a rank, each a share of 1/n.

    In place, what goes to a peer and what comes from it share their memory, so a message must fit between.
    """
    p.credits, p.apart = 1, True
    for k in range(p.size):
        peer = (k - p.rank) % p.size
        if peer == p.rank:
            p.copy(2, out(peer), inp(peer))
        else:
            sent = p.send(0, inp(peer), peer)
            p.recv(1, out(peer), peer, after=[sent])
