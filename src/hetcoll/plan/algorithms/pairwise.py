"""Pairwise exchange for all-to-all.

Thakur, Rabenseifner and Gropp (IJHPCA 2005), section 4.3: ranks meet two by two; here rank r meets (k - r) mod n in
round k, which works for any n.
"""

from __future__ import annotations

import numpy as np

from ...types import Collective
from ..ir import Plan
from .base import Draft, Rounds, each, inp, out, register


def meetings(plan: Plan) -> Rounds:
    """In which rank r meets (k - r) mod n: k."""
    meeting = (plan.rank + plan.columns.peer) % plan.size
    return Rounds(meeting, np.zeros_like(meeting))


@register(Collective.ALLTOALL, "pairwise", rounds=meetings)
def alltoall(p: Draft) -> None:
    """1 hop, n-1 messages a rank, each a share of 1/n.

    In place, what goes to a peer and what comes from it share their memory, so a message must fit between.
    """
    p.credits, p.apart = 1, True
    meeting = (np.arange(p.size) - p.rank) % p.size
    peers = meeting[meeting != p.rank]
    sent = p.sends(0, each(inp, peers), peers)
    p.recvs(1, each(out, peers), peers, after=[sent])
    p.copy(2, out(p.rank), inp(p.rank))
