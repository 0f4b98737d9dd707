"""Which blocks go from whom to whom when arrays change their layout.

Each block that a source's block and a target's have in common comes to every rank that wants it and does not hold it.
Ranks are in groups (`near`): those of an island of a host, islands of a host, hosts. A group that holds a block gets
nothing of it from outside. To one that holds none it comes once: each of its ranks that want it gets a part (`spread`).
In later rounds they pass these on, first to other groups, then inside. Where several hold a block, they share the work:
a part comes from whoever has least to send so far. Where more groups want it than hold it, each gets a part first. So
what holds something sends it all once, what crosses between hosts does so once, and all links are in use.

A round is one group of messages (`algorithms.p2p`), which the simulator proves. Arrays are moved in batches, so that
packing takes the memory of a few, and on GPUs the first are under way while the host packs later ones. A round has what
one batch sends first, and what batches before it pass on: that goes inside of hosts while the other crosses. A batch
has arrays of all ranks that hold some, so all send at once. Every rank draws its own messages from the same arguments;
what is done here follows from them alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ..types import OCP_OF, DType
from .layout import Box, Layout, common, volume
from .near import Group, Nested
from .spread import GRAIN, Spreading

BATCH = 1 << 26
"""Bytes in a batch, about, of what a rank holds or wants of arrays with the same source ranks."""
_OF_TWO_KINDS = frozenset(OCP_OF.values())
"""Types for which arrays may be of another kind, which a message cannot mix."""


class Move(NamedTuple):
    """An array that is in one layout, and is to be in another one of the same shape."""

    source: Layout
    target: Layout
    dtype: DType

    def __str__(self) -> str:
        return f"{self.dtype.label} {self.source} -> {self.target}"


class Piece(NamedTuple):
    """A block of one array that a rank hands to another one, or to itself."""

    array: int
    source: int
    target: int
    box: Box


class Message(NamedTuple):
    """Pieces of one type that travel as one message, one behind the other, each in C order. They are read in blocks of
    the sources, or of the targets, where they came to before (`passed_on`)."""

    source: int
    target: int
    pieces: tuple[Piece, ...]
    passed_on: bool


class Round(NamedTuple):
    """What one rank does at the same time: pieces that it copies, and messages in the order of their FIFOs."""

    copies: tuple[Piece, ...]
    messages: tuple[Message, ...]


def schedule(moves: Sequence[Move], rank: int, groups: Nested) -> list[Round]:
    """What `rank` does, round after round, so that all arrays reach their targets; it writes its blocks of these alone.
    `groups` has all ranks."""
    group, found = Group.of(groups), list[Round]()
    spreading = Spreading(group, rank)
    for number, arrays in enumerate(_batches(moves)):
        rounds = _batch(moves, arrays, rank, spreading, 1 + group.depth)
        found += [Round((), ())] * (number + len(rounds) - len(found))
        for at, (copies, messages) in enumerate(rounds, number):
            found[at] = Round(found[at].copies + copies, found[at].messages + messages)
    return found


def _batches(moves: Sequence[Move]) -> list[list[int]]:
    """The numbers of each one's arrays."""
    found: dict[int, list[int]] = {}
    before: Counter[tuple[int, ...]] = Counter()  # by the ranks that hold them: bytes of earlier ones
    for number, (source, target, dtype) in enumerate(moves):
        found.setdefault(before[source.ranks] // BATCH, []).append(number)
        before[source.ranks] += dtype.itemsize * max(volume(source.first), volume(target.first))
    return [found[at] for at in sorted(found)]


def _batch(
    moves: Sequence[Move], numbers: Sequence[int], rank: int, spreading: Spreading, count: int
) -> tuple[Round, ...]:
    rounds: list[list[Piece]] = [[] for _ in range(count)]
    for array in numbers:
        source, target, dtype = moves[array]
        for box, holders, wanting in _shared(source, target):
            if rank in holders and rank in wanting:
                rounds[0].append(Piece(array, rank, rank, box))
            if away := frozenset(wanting).difference(holders):
                for number, giver, taker, part in spreading.block(box, dtype.itemsize, frozenset(holders), away):
                    rounds[number].append(Piece(array, giver, taker, part))
    return tuple(_round(moves, pieces, number > 0) for number, pieces in enumerate(rounds))


@lru_cache(maxsize=256)
def _shared(source: Layout, target: Layout) -> tuple[tuple[Box, tuple[int, ...], tuple[int, ...]], ...]:
    """Each block that one of the source and one of the target have in common: who holds it, and who wants it."""
    return tuple(
        (both, holders, wanting)
        for wanted, wanting in _by_box(target).items()
        for held, holders in _by_box(source).items()
        if (both := common(held, wanted)) is not None
    )


def _by_box(layout: Layout) -> dict[Box, tuple[int, ...]]:
    found: dict[Box, tuple[int, ...]] = {}
    for rank, box in layout.boxes.items():
        found[box] = (*found.get(box, ()), rank)
    return found


def _round(moves: Sequence[Move], pieces: list[Piece], passed_on: bool) -> Round:
    messages: list[tuple[int, int, list[Piece]]] = []
    packed: dict[tuple[int, int, DType, int], list[Piece]] = {}
    for piece in pieces:
        _, source, target, box = piece
        if source == target:
            continue
        dtype = moves[piece.array].dtype
        key = (source, target, dtype, piece.array if dtype in _OF_TWO_KINDS else -1)
        if volume(box) * dtype.itemsize >= GRAIN:
            messages.append((source, target, [piece]))
        elif (together := packed.get(key)) is not None:
            together.append(piece)
        else:
            packed[key] = [piece]
            messages.append((source, target, packed[key]))
    copies = tuple(piece for piece in pieces if piece.source == piece.target)
    return Round(copies, tuple(Message(source, target, tuple(some), passed_on) for source, target, some in messages))
