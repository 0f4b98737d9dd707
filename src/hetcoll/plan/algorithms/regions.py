"""How the members of islands split buffers that consist of shares: an island's shares, in its members' order, are its
*region*, which the members of every island split evenly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, zip_longest
from typing import Final

from ..ir import Span
from .base import Draft
from .between import Place

Make = Callable[[int, int], Span]  # inp, out or tmp


@dataclass(slots=True)
class Piece:
    """Units [start, start + count) of the share of `rank`, which member `j` of another island passes on. Never changed,
    as a `Span`."""

    rank: Final[int]
    j: Final[int]
    start: Final[int]
    count: Final[int]


class Regions(Place):
    """Buffers of one share a rank, of `pieces` units each. `home` is the root's island."""

    def __init__(self, p: Draft, parts: int = 1) -> None:
        super().__init__(p)
        p.islands = p.hosts
        p.pieces = self.pieces = p.there.common * parts
        self.home = p.there.of[p.root]

    def split(self, region: int, island: int) -> tuple[Piece, ...]:
        """The region of one island as another's members split it, in order."""
        return _split(self.hosts[region], len(self.hosts[island]), self.pieces)

    def span(self, make: Make, piece: Piece) -> Span:
        """Where a piece lies in a buffer of all shares."""
        return make(piece.rank * self.pieces + piece.start, piece.count)

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

    def own(self, region: int) -> list[Piece]:
        """My pieces of another island's region."""
        return [piece for piece in self.split(region, self.i) if piece.j == self.j]

    def mine(self, island: int) -> list[tuple[int, Piece]]:
        """The pieces of my share, and to which rank of another island each belongs."""
        pieces = self.split(self.i, island)
        return [(self.hosts[island][piece.j], piece) for piece in pieces if piece.rank == self.mates[self.j]]

    def others(self, sign: int) -> list[int]:
        """The other islands by their distance from mine, forwards or backwards."""
        return [self.host_after(sign * d) for d in range(1, self.m)]


@lru_cache(maxsize=64)
def _split(owners: tuple[int, ...], k: int, n: int) -> tuple[Piece, ...]:
    each = len(owners) * n // k
    cuts = sorted({*range(0, len(owners) * n + 1, n), *range(0, len(owners) * n + 1, each)})
    return tuple(Piece(owners[a // n], a // each, a % n, b - a) for a, b in pairwise(cuts))


@lru_cache(maxsize=64)  # the very same of all members, as `_intervals`
def _rows(make: Make, owners: tuple[int, ...], k: int, n: int, merge: bool) -> tuple[tuple[Span | None, ...], ...]:
    members: list[list[Span]] = [[] for _ in range(k)]
    for piece in _split(owners, k, n):
        spans, span = members[piece.j], make(piece.rank * n + piece.start, piece.count)
        if merge and spans and spans[-1].start + spans[-1].count == span.start:
            span = make(spans[-1].start, spans.pop().count + span.count)
        spans.append(span)
    return tuple(zip_longest(*members))


@lru_cache(maxsize=64)
def _shares(make: Make, ranks: tuple[int, ...], n: int) -> tuple[Span, ...]:
    return tuple(make(rank * n, n) for rank in ranks)
