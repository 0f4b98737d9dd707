"""Collectives among the GPUs of one host as one kernel a rank: which are, up to which sizes, and what they move.

Up to `SMALL` bytes of an all-reduce, or `SMALL_NEAR` inside an island, each rank writes its input with a flag in every
word, and reads all others'. Beyond that, and of other collectives, those that give write chunks and then a word that
says so, and those that take read them (`Way`). Among four and more, all-reduces of more than `ONE_SHOT` read bytes are
done in two rounds, of which the first leaves each rank with the sum of a part.
"""

from __future__ import annotations

from typing import NamedTuple

from ..types import CUT, FROM_ROOT, REDUCING, TO_ROOT, WHOLE, Collective

MOST_RANKS = 16
SMALL = 64 << 10  # bytes up to which a kernel of words beats copies
ONE_SHOT, MOST_ONE_SHOT = 1 << 20, 4 << 20  # bytes that a rank reads up to which each reduces all; of two or three
MOST_MOVED = 1 << 20  # bytes that a rank of another collective reads, or writes
MOST_ALONE = 3 << 20  # likewise of four and more, each of which is an island
SMALL_NEAR = 1 << 20  # bytes that a rank reads inside an island up to which a kernel of words beats a library
MOST_NEAR = 4 << 20  # that it reads or writes, up to which any kernel does
MOST_ALONE_NEAR = 16 << 20  # likewise of what no library reduces so: beats copies
_WORDS = 8  # bytes, of the data of two
_MOST_TWO_SHOT = 6 << 20  # of four and more, which each reduce a part beyond ONE_SHOT
BY_KERNEL = frozenset({Collective.ALLREDUCE, Collective.ALLGATHER}) | CUT | FROM_ROOT | TO_ROOT


class Way(NamedTuple):
    """What one rank does in one round: from whom it takes, perhaps from itself, and whether a peer takes from it."""

    takes: range
    gives: bool
    cut: bool
    """Whether what is given has a part for each rank, and not one for all."""


class Moves(NamedTuple):
    """What a kernel does: how often it waits for others, and how many bytes it writes and reads."""

    rounds: int
    written: float
    read: float


def way(collective: Collective, size: int, rank: int, root: int) -> Way:
    """That of `rank`; `root` counts where there is one."""
    sources = range(root, root + 1) if collective in FROM_ROOT else range(size)
    takers = {root} if collective in TO_ROOT else {*range(size)}
    if collective is Collective.BROADCAST:
        takers.remove(root)  # whose buffer holds it
    takes = sources if rank in takers else range(0)
    return Way(takes, rank in sources and takers != {rank}, collective in CUT)


def choose(collective: Collective, nbytes: int, size: int, islands: int, *, alone: bool = False) -> str | None:
    """Which kernel does it among `size` GPUs of so many islands; None where copies or a library are faster, or none
    can.

    `nbytes` are those of all parts. `alone`: no library reduces so.
    """
    if collective not in BY_KERNEL or nbytes == 0 or not 1 < size <= MOST_RANKS:
        return None
    small = SMALL if islands > 1 else SMALL_NEAR // (size - 1) // _WORDS * _WORDS
    if collective is Collective.ALLREDUCE and nbytes <= small:
        return "oneshot"
    most = MOST_ALONE if islands == size > 3 else MOST_MOVED  # copies begin once for each peer in another island
    if islands == 1:
        most = MOST_ALONE_NEAR if alone and collective in REDUCING else MOST_NEAR
        if collective is Collective.BROADCAST:
            most //= size - 1  # who all read from the root
    elif collective is Collective.ALLREDUCE:
        most = _MOST_TWO_SHOT if two_shot(nbytes, size) else MOST_ONE_SHOT
    if max(max(moves(collective, nbytes, size, rank)[1:]) for rank in range(size)) > most:
        return None
    return "exchange" if collective in REDUCING else "gather"


def two_shot(nbytes: int, size: int) -> bool:
    """Whether each rank of an all-reduce reduces a part. Three read a third less then, and wait once more: that takes
    as long."""
    return size > 3 and (size - 1) * nbytes > ONE_SHOT


def moves(collective: Collective, nbytes: int, size: int, rank: int, root: int = 0) -> Moves:
    """Of one of `BY_KERNEL`. Words of 4 bytes have a flag of 4 beside them."""
    if collective is Collective.ALLREDUCE and nbytes <= SMALL:
        return Moves(0, 2 * nbytes, 2 * (size - 1) * nbytes)
    if collective is Collective.ALLREDUCE and two_shot(nbytes, size):
        return Moves(2, nbytes + nbytes / size, 2 * (nbytes - nbytes / size))
    takes, gives, cut = way(collective, size, rank, root)
    each, peers = nbytes if collective in WHOLE else nbytes / size, len(takes) - (rank in takes)
    return Moves(1 if peers else 0, gives * each * (size - 1 if cut else 1), each * peers)
