"""How a block comes from the ranks that hold it to those that want it, in groups of ranks that are near each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from .ir import cut
from .layout import Box, extents, volume
from .near import Group

GRAIN = 1 << 18
"""Bytes: parts are no shorter. What is shorter by itself travels packed with others, since a message has its price."""

Transfer: TypeAlias = tuple[int, int, int, Box]
"""In which round, from whom, to whom, and what."""
_Holders: TypeAlias = Sequence[tuple[Group, frozenset[int]]]
"""Groups, and the ranks in each that hold a block."""


class _Part(NamedTuple):
    """What is a rank's: from where to where in the dimension that is cut."""

    rank: int
    begin: int
    end: int


class Spreading:
    """Of one block after another, in the same order on all ranks, as `rank` has to know it."""

    def __init__(self, group: Group, rank: int) -> None:
        self._group, self._rank = group, rank
        self._sent: Counter[Group | int] = Counter()  # bytes that groups, and ranks, send of what they hold
        self._turn = 0

    def block(self, box: Box, itemsize: int, holders: frozenset[int], away: frozenset[int]) -> Iterator[Transfer]:
        """What this rank sends and gets, where all that are `away` want it, of which none holds it.

        It is cut in a dimension that is long enough for a part for each of them, if there is one.
        """
        lengths = extents(box) or (1,)
        long = [dim for dim, length in enumerate(lengths) if length >= len(away)]
        self._dim = long[0] if long else lengths.index(max(lengths))
        self._length = lengths[self._dim]
        self._box, self._row = box, volume(box) * itemsize // self._length
        self._turn += 1
        for each in self._within(self._group, holders, away):
            if self._rank in each[1:3]:
                yield each

    def _within(self, group: Group, holders: frozenset[int], away: frozenset[int]) -> Iterator[Transfer]:
        """Inside of each part of a group that holds it; and once to each that holds none, or to all of these a part."""
        have: list[tuple[Group, frozenset[int]]] = []
        lacking: list[Group] = []
        for each in group.parts:
            if held := holders & each.members:
                have.append((each, held))
                if wanting := away & each.members:
                    yield from self._within(each, held, wanting)
            elif not away.isdisjoint(each.ranks):
                lacking.append(each.only(away))
        together = len(have) < len(lacking) <= self._length * self._row // GRAIN
        for each in [Group(lacking)] if together else lacking:
            dealt = self._deal(each, 0, self._length, self._turn)
            yield from self._fetch(have, dealt)
            if each.parts and self._rank in each.members:
                yield from self._pass_on(each, dealt, 1)

    def _deal(self, group: Group, begin: int, end: int, turn: int) -> list[_Part]:
        """A part for each rank, in their order; what is too short for that is for some of them, by turns."""
        if not group.parts:
            return [_Part(group.ranks[0], begin, end)]
        points, size = self._points(begin, end, len(group.parts)), len(group.parts)
        turn, first = divmod(turn, size)
        taken = sorted((first + at) % size for at in range(len(points) - 1))
        parts = zip(taken, pairwise(points), strict=True)
        return [part for at, (a, b) in parts for part in self._deal(group.parts[at], a, b, turn)]

    def _fetch(self, have: _Holders, dealt: Sequence[_Part]) -> Iterator[Transfer]:
        """Each part from whoever has least to send, in at least as many parts as ranks hold the block."""
        sent = self._sent
        most = -(-sum(len(held) for _, held in have) // len(dealt))
        for rank, first, last in dealt:
            for begin, end in pairwise(self._points(first, last, most)):
                group, held = min(have, key=lambda each: sent[each[0]])
                source = min(held, key=lambda each: (sent[each], each))
                sent[group] += (end - begin) * self._row
                sent[source] += (end - begin) * self._row
                yield 0, source, rank, self._part(begin, end)

    def _pass_on(self, group: Group, dealt: Sequence[_Part], number: int) -> Iterator[Transfer]:
        """What ranks of a group were dealt, to all of them: to each part of the group once, and then inside of it."""
        place = {rank: at for at, each in enumerate(group.parts) for rank in each.ranks}
        theirs: list[list[_Part]] = [[] for _ in group.parts]
        for part in dealt:
            theirs[place[part.rank]].append(part)
        own = place[self._rank]
        for at, each in enumerate(group.parts):
            for other, parts in enumerate(theirs) if at == own else [(own, theirs[own])]:
                if not parts:
                    continue
                mine = parts
                if other != at:
                    mine = self._deal(each, parts[0].begin, parts[-1].end, self._turn)
                    yield from self._between(parts, mine, number)
                if at == own and each.parts:
                    yield from self._pass_on(each, mine, number + 1)

    def _between(self, some: Sequence[_Part], others: Sequence[_Part], number: int) -> Iterator[Transfer]:
        for source in some:
            for target in others:
                begin, end = max(source.begin, target.begin), min(source.end, target.end)
                if begin < end:
                    yield number, source.rank, target.rank, self._part(begin, end)

    def _points(self, begin: int, end: int, most: int) -> list[int]:
        """Where a range is cut into at most so many parts, and the end."""
        length = end - begin
        return [begin + at for at in cut(length, max(1, min(most, length, length * self._row // GRAIN)))]

    def _part(self, begin: int, end: int) -> Box:
        """A range of the block."""
        if not self._box:
            return self._box
        first, _ = self._box[self._dim]
        return (*self._box[: self._dim], (first + begin, first + end), *self._box[self._dim + 1 :])
