"""Collectives among the GPUs of one host as one kernel a rank: which are, up to which sizes, and what they move.

Up to `SMALL` bytes each rank writes its input with a flag in every word, and reads all others'. Beyond that it writes
chunks and then a word that says so; among four and more, all-reduces of more than `ONE_SHOT` read bytes are done in two
rounds, of which the first leaves each rank with the sum of a part.
"""

from __future__ import annotations

from typing import NamedTuple

from ..types import REDUCING, Collective

MOST_RANKS = 16
SMALL = 64 << 10  # bytes up to which a kernel of words beats copies
ONE_SHOT, MOST_ONE_SHOT = 1 << 20, 4 << 20  # bytes that a rank reads up to which each reduces all; of two or three
_MOST_CUT = 1 << 20  # bytes that a rank reads where buffers are cut by rank
_MOST_TWO_SHOT = 6 << 20  # of four and more, which each reduce a part beyond ONE_SHOT
CUT = (Collective.REDUCE_SCATTER, Collective.ALLGATHER, Collective.ALLTOALL)


class Moves(NamedTuple):
    """What a kernel does: how often it waits for all others, and how many bytes it writes and reads."""

    rounds: int
    written: float
    read: float


def choose(collective: Collective, nbytes: int, size: int) -> str | None:
    """Which kernel does it among `size` GPUs; None where copies are faster, or none can. `nbytes`: of all parts."""
    if nbytes == 0 or not 1 < size <= MOST_RANKS:
        return None
    if collective in CUT:
        name = "exchange" if collective in REDUCING else "gather"
        return name if nbytes - nbytes // size <= _MOST_CUT else None
    if collective is not Collective.ALLREDUCE:
        return None
    if nbytes <= SMALL:
        return "oneshot"
    read = moves(collective, nbytes, size).read
    return "exchange" if read <= (_MOST_TWO_SHOT if two_shot(nbytes, size) else MOST_ONE_SHOT) else None


def two_shot(nbytes: int, size: int) -> bool:
    """Whether each rank reduces a part. Three read a third less then, and wait once more: that takes as long."""
    return size > 3 and (size - 1) * nbytes > ONE_SHOT


def moves(collective: Collective, nbytes: int, size: int) -> Moves:
    """Of an all-reduce, reduce-scatter, all-gather or all-to-all. Words of 4 bytes have a flag of 4 beside them."""
    if collective is Collective.ALLGATHER:
        return Moves(1, nbytes / size, nbytes - nbytes / size)
    if collective in CUT:
        return Moves(1, nbytes - nbytes / size, nbytes - nbytes / size)
    if nbytes <= SMALL:
        return Moves(0, 2 * nbytes, 2 * (size - 1) * nbytes)
    if two_shot(nbytes, size):
        return Moves(2, nbytes + nbytes / size, 2 * (nbytes - nbytes / size))
    return Moves(1, nbytes, (size - 1) * nbytes)
