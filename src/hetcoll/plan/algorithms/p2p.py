"""Point to point: the sends and receives of one `group()`, or a single one, as a plan."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import ArgumentError
from ...types import Collective
from ..ir import P2P_CHANNEL, Buf, Builder, Op, Plan, Span

LANES = 15  # for each direction; one more for copies to oneself


def p2p(size: int, rank: int, sends: Sequence[int], recvs: Sequence[int]) -> Plan:
    """SEND unit i goes to `sends[i]`, RECV unit j comes from `recvs[j]`; one pair's messages match in order.

    All run beside each other: sends and receives have lanes of their own, and so has each peer as long as they
    suffice. Peers that share a lane are served by their distance round the ring, on both sides, so that a message waits
    only for shorter ones and a group never deadlocks. A message to oneself is a copy.

    Raises
    ------
    ArgumentError
        A peer is not a rank, or the messages to oneself do not pair up.
    """
    for peer in (*sends, *recvs):
        if not 0 <= peer < size:
            raise ArgumentError(f"peer must lie in 0..{size - 1}, got {peer}")
    plan = Builder()
    out = sorted(((peer - rank) % size, i) for i, peer in enumerate(sends) if peer != rank)
    into = sorted(((rank - peer) % size, j) for j, peer in enumerate(recvs) if peer != rank)
    used = [*sorted({_lane(d) for d, _ in out}), *sorted({LANES + _lane(d) for d, _ in into})]
    number = {lane: i for i, lane in enumerate(used)}  # the engine passes all lanes up to the last
    for distance, i in out:
        plan.add(Op.SEND, number[_lane(distance)], src=Span(Buf.SEND, i), peer=sends[i], channel=P2P_CHANNEL)
    for distance, j in into:
        plan.add(Op.RECV, number[LANES + _lane(distance)], dst=Span(Buf.RECV, j), peer=recvs[j], channel=P2P_CHANNEL)
    given = [i for i, peer in enumerate(sends) if peer == rank]
    taken = [j for j, peer in enumerate(recvs) if peer == rank]
    if len(given) != len(taken):
        raise ArgumentError(f"rank {rank} sends itself {len(given)} messages but receives {len(taken)} from itself")
    for i, j in zip(given, taken, strict=True):
        plan.add(Op.COPY, len(used), src=Span(Buf.SEND, i), dst=Span(Buf.RECV, j))
    return Plan(Collective.P2P, "p2p", size, rank, len(sends), len(recvs), plan.steps)


def _lane(distance: int) -> int:
    return (distance - 1) % LANES
