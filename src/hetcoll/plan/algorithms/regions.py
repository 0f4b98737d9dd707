"""How the members of islands split buffers: a whole one evenly. Of one that consists of shares, those of an island, in
its members' order, are its *region*, which the members of every island split evenly.

Where they cut depends on the sizes of the two islands alone: of thousands of islands few are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..ir import Span, Spans
from ..steps import MOST_NUMBERS, Ints, Numbers
from .base import Draft, each
from .between import Place

Make = Callable[[int, int], Span]  # inp, out or tmp


class Piece(NamedTuple):
    """Units [start, start + units) of the share of an island's member `owner`, which another's member `j` passes on."""

    owner: int
    j: int
    start: int
    units: int


class Pieces(NamedTuple):
    """Pieces of several islands, island by island: with which rank each is exchanged, where it begins in its share and
    in the buffer of all shares, and its length. Those of the islands end at `ends`."""

    peer: Ints
    start: Numbers
    wide: Numbers
    units: Numbers
    ends: Ints

    @classmethod
    def of(cls, pieces: Sequence[tuple[Piece, ...]], peers: list[int], begins: list[int], most: int) -> Pieces:
        """Those of each island, of shares that begin there, in buffers of at most so many units."""
        number: type[Any] = np.int64 if most < MOST_NUMBERS else np.object_
        start, units = (np.array([piece[i] for few in pieces for piece in few], number) for i in (2, 3))
        ends = np.cumsum([*map(len, pieces)], dtype=np.int64)
        return cls(np.array(peers, np.int64), start, start + np.array(begins, number), units, ends)

    def small(self, make: Callable[[Any], Span]) -> Spans:
        """In a buffer of one share."""
        return each(make, self.start, self.units)

    def large(self, make: Callable[[Any], Span]) -> Spans:
        """In a buffer of all shares."""
        return each(make, self.wide, self.units)

    @property
    def island(self) -> Ints:
        """The place of each one's island among them."""
        return np.repeat(np.arange(self.ends.size), np.diff(self.ends, prepend=0))

    def rounded(self, p: Draft, lane: int, dst: Spans, src: Spans, after: Ints | int | None) -> tuple[Spans, Ints]:
        """As `Draft.roundeds`, in turns."""
        first = len(p.lanes)
        terms, ready = p.roundeds(lane, dst, src, after, self.peer)
        self.batch(p, ready[ready >= first], ready >= first)
        return terms, ready

    def batch(self, p: Draft, steps: Ints, kept: NDArray[np.bool_] | slice = slice(None)) -> None:
        """These steps, one for each that is `kept`, take turns where they are for one island (`Plan.batches`)."""
        many = np.bincount(self.island[kept], minlength=self.ends.size)
        begins = (np.cumsum(many) - many)[many > 1]
        p.batches += zip(steps[begins].tolist(), many[many > 1].tolist(), strict=True)


class Regions(Place):
    """Buffers of one share a rank, of `pieces` units each. `home` is the root's island."""

    def __init__(self, p: Draft, parts: int = 1) -> None:
        super().__init__(p)
        p.islands = p.hosts
        p.pieces = self.pieces = p.there.common * parts
        self.home, self._all = p.there.of[p.root], p.size * p.pieces

    def share(self, make: Make, rank: int) -> Span:
        return make(rank * self.pieces, self.pieces)

    def shares(self, make: Make) -> tuple[Span, ...]:
        """Those of all members of my island."""
        return _shares(make, self.mates, self.pieces)

    def rows(self, make: Make, region: int, *, merge: bool = False) -> tuple[tuple[Span | None, ...], ...]:
        """What each member of my island has of another's region: a piece each, as often as it takes.

        `merge` makes one span of pieces that lie side by side: once suffices where the region does.
        """
        return _rows(make, self.hosts[region], self.k, self.pieces, merge)

    def column(self, make: Make, region: int) -> Iterator[Span | None]:
        """My part of each of `rows`."""
        owners, n = self.hosts[region], self.pieces
        mine = _passed(len(owners), self.k, n, self.j)
        yield from (make(owners[piece.owner] * n + piece.start, piece.units) for piece in mine)
        yield from [None] * (_most_passed(len(owners), self.k, n) - len(mine))

    def own(self, regions: Iterable[int]) -> Pieces:
        """My pieces of other islands' regions."""
        found = [self.hosts[region] for region in regions]
        pieces = [_passed(len(island), self.k, self.pieces, self.j) for island in found]
        owners = [island[piece.owner] for island, mine in zip(found, pieces, strict=True) for piece in mine]
        return self._columns(pieces, owners, owners)

    def mine(self, islands: Iterable[int]) -> Pieces:
        """The pieces of my share, as members of other islands pass them on."""
        found = [self.hosts[island] for island in islands]
        pieces = [_owned(self.k, len(island), self.pieces, self.j) for island in found]
        peers = [island[piece.j] for island, mine in zip(found, pieces, strict=True) for piece in mine]
        return self._columns(pieces, peers, [self.mates[self.j]] * len(peers))

    def _columns(self, pieces: Sequence[tuple[Piece, ...]], peers: list[int], owners: list[int]) -> Pieces:
        return Pieces.of(pieces, peers, [rank * self.pieces for rank in owners], 2 * self._all)


def _passed(size: int, k: int, n: int, j: int) -> tuple[Piece, ...]:
    """Of a region of `size` shares of `n` units what member j of `k` passes on, in order."""
    part = size * n // k
    return cut(part * j, part * (j + 1), n, part)


@lru_cache(maxsize=64)
def _most_passed(size: int, k: int, n: int) -> int:
    """How many pieces the member has that passes on the most."""
    part = size * n // k
    return max(-(-part * (j + 1) // n) - part * j // n for j in range(k))


def _owned(size: int, k: int, n: int, owner: int) -> tuple[Piece, ...]:
    """The pieces of an owner's share, in order."""
    return cut(n * owner, n * (owner + 1), n, size * n // k)


@lru_cache(maxsize=64)
def cut(begin: int, stop: int, share: int, part: int) -> tuple[Piece, ...]:
    """Units [begin, stop), of owners that have `share` units each and members of `part`."""
    cuts = sorted({begin, stop, *range(begin - begin % -share, stop, share), *range(begin - begin % -part, stop, part)})
    return tuple([Piece(a // share, a // part, a % share, b - a) for a, b in pairwise(cuts)])


@lru_cache(maxsize=64)
def _places(shape: tuple[int, ...], k: int, n: int, merge: bool) -> tuple[tuple[tuple[int, int] | None, ...], ...]:
    """As `_rows`: where spans begin, and their lengths. `shape` has the owners; all is counted from the first one's."""
    rows: list[list[tuple[int, int]]] = []
    for j in range(k):
        spans: list[tuple[int, int]] = []
        for owner, _, start, count in _passed(len(shape), k, n, j):
            begin = shape[owner] * n + start
            if merge and spans and sum(spans[-1]) == begin:
                begin, length = spans.pop()
                count += length
            spans.append((begin, count))
        rows.append(spans)
    return tuple(zip_longest(*rows))


@lru_cache(maxsize=64)  # the very same of all members, of which there may be a thousand
def _rows(make: Make, owners: tuple[int, ...], k: int, n: int, merge: bool) -> tuple[tuple[Span | None, ...], ...]:
    first = owners[0]
    begin, places, buf = first * n, _places(tuple([rank - first for rank in owners]), k, n, merge), make(0, 1).buf
    return tuple([tuple([at and Span(buf, begin + at[0], at[1]) for at in row]) for row in places])


@lru_cache(maxsize=64)
def _shares(make: Make, ranks: tuple[int, ...], n: int) -> tuple[Span, ...]:
    return tuple(make(rank * n, n) for rank in ranks)
