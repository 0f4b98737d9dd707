"""Which blocks go from whom to whom when arrays change their layout.

Each block that a source's block and a target's have in common is sent once to every rank that wants it and does not
hold it. Where several hold it, they share the work: the block is cut into one part for each, and a part comes from
whoever has least to send so far. Where more ranks want a block than hold it, each of them gets a part, and in a second
round they pass these on to each other. So the ranks that hold something send it all once, and all links are in use.

A round is one group of messages (`algorithms.p2p`), which the simulator proves. Arrays are moved in batches, one behind
the other, so that on GPUs the first are under way while the host packs later ones, and packing takes a batch's memory.
A batch has arrays of all ranks that hold some, so all send at once. Every rank draws its own messages from the same
arguments; what is done here follows from them alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from ..types import OCP_OF, DType
from .ir import cut
from .layout import Box, Layout, common, extents, volume

GRAIN = 1 << 18
"""Bytes: parts are no shorter. What is shorter by itself travels packed with others, since a message has its price."""
BATCH = 1 << 27
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
    """Pieces of one type that travel as one message, one behind the other, each in C order."""

    source: int
    target: int
    pieces: tuple[Piece, ...]


class Round(NamedTuple):
    """What one rank does at the same time: pieces that it copies, and messages in the order of their FIFOs."""

    copies: tuple[Piece, ...]
    messages: tuple[Message, ...]


def schedule(moves: Sequence[Move], rank: int) -> list[tuple[Round, Round]]:
    """What `rank` does so that all arrays reach their targets: two rounds for each batch.

    In the first round a rank reads its blocks of the sources, in the second one what it got in the first. All writes go
    to its blocks of the targets.
    """
    load: Counter[int] = Counter()  # bytes that ranks have to send
    return [_batch(moves, numbers, rank, load) for numbers in _batches(moves)]


def _batches(moves: Sequence[Move]) -> list[list[int]]:
    """The numbers of each one's arrays."""
    found: dict[int, list[int]] = {}
    before: Counter[tuple[int, ...]] = Counter()  # by the ranks that hold them: bytes of earlier ones
    for number, (source, target, dtype) in enumerate(moves):
        found.setdefault(before[source.ranks] // BATCH, []).append(number)
        before[source.ranks] += dtype.itemsize * max(volume(source.first), volume(target.first))
    return [found[at] for at in sorted(found)]


def _batch(moves: Sequence[Move], numbers: Sequence[int], rank: int, load: Counter[int]) -> tuple[Round, Round]:
    rounds: tuple[list[Piece], list[Piece]] = [], []

    def note(number: int, *piece: *tuple[int, int, int, Box]) -> None:
        if rank in piece[1:3]:
            rounds[number].append(Piece(*piece))

    def fetch(array: int, holders: tuple[int, ...], target: int, part: Box, itemsize: int) -> None:
        source = min(holders, key=lambda each: (load[each], each))
        load[source] += volume(part) * itemsize
        note(0, array, source, target, part)

    for array in numbers:
        source, target, dtype = moves[array]
        for box, holders, wanting in _shared(source, target):
            away = [each for each in wanting if each not in holders]
            for each in wanting:
                if each in holders:
                    note(0, array, each, each, box)
            most = volume(box) * dtype.itemsize // GRAIN
            if len(holders) < len(away) <= most:
                for middle, part in zip(away, _parts(box, len(away)), strict=False):
                    fetch(array, holders, middle, part, dtype.itemsize)
                    for each in away:
                        if each != middle:
                            note(1, array, middle, each, part)
            else:
                for each in away:
                    for part in _parts(box, max(1, min(len(holders), most))):
                        fetch(array, holders, each, part, dtype.itemsize)
    return _round(moves, rounds[0]), _round(moves, rounds[1])


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


def _parts(box: Box, parts: int) -> list[Box]:
    """A block in `parts`, or in as many as its longest dimension has: cut where they stay in one piece, if possible."""
    lengths = extents(box)
    if parts == 1 or not lengths:
        return [box]
    long = [dim for dim, length in enumerate(lengths) if length >= parts]
    dim = long[0] if long else lengths.index(max(lengths))
    begin, _ = box[dim]
    points = cut(lengths[dim], min(parts, lengths[dim]))
    return [(*box[:dim], (begin + a, begin + b), *box[dim + 1 :]) for a, b in pairwise(points)]


def _round(moves: Sequence[Move], pieces: list[Piece]) -> Round:
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
    return Round(copies, tuple(Message(source, target, tuple(some)) for source, target, some in messages))
