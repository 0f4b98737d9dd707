"""How an array is cut over ranks: which block of it each one holds. Words and cuts are those of PyTorch's DTensor.

Examples
--------
>>> Layout((5, 4), ranks=(0, 1, 2, 3), mesh=(2, 2), cuts=(0, None)).boxes  # [Shard(0), Replicate()]
{0: ((0, 3), (0, 4)), 1: ((0, 3), (0, 4)), 2: ((3, 5), (0, 4)), 3: ((3, 5), (0, 4))}
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from ..errors import ArgumentError, BufferTypeError

Box = tuple[tuple[int, int], ...]
"""A block of an array: where it begins and ends in each dimension."""


def _whole(values: Iterable[Any], name: str) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, values))
    except TypeError:
        raise BufferTypeError(f"{name}: wanted whole numbers, got {values!r}") from None


@dataclass(frozen=True)
class Layout:
    """An array of `shape` over the ranks of a mesh.

    `mesh` has the extent of each of the mesh's dimensions, `ranks` its ranks row by row. `cuts` has for each dimension
    of the mesh that of the array which it cuts (``Shard``), or None where its ranks hold the same (``Replicate``). A
    dimension is cut as by `torch.chunk`: all blocks are as long as the first one, but the last ones may be shorter or
    empty. `order` says which dimension of the mesh cuts first, by default one after another; it matters where several
    cut the same dimension.

    Raises
    ------
    ArgumentError
        There is no such mesh, or no such dimension of the array.
    BufferTypeError
        An extent, a rank or a dimension is no whole number.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    mesh: tuple[int, ...]
    cuts: tuple[int | None, ...]
    order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("shape", "ranks", "mesh", "order"):  # equal layouts are told to others in equal words
            object.__setattr__(self, name, _whole(getattr(self, name), name))
        cuts = tuple(dim if dim is None else _whole([dim], "cuts")[0] for dim in self.cuts)
        object.__setattr__(self, "cuts", cuts)
        if min(self.shape, default=0) < 0:
            raise ArgumentError(f"shape: wanted extents of 0 or more, got {self.shape}")
        if min(self.mesh, default=1) < 1 or math.prod(self.mesh) != len(self.ranks):
            raise ArgumentError(f"mesh: wanted {math.prod(self.mesh)} ranks for {self.mesh}, got {len(self.ranks)}")
        if min(self.ranks) < 0 or len(set(self.ranks)) < len(self.ranks):
            raise ArgumentError(f"mesh: wanted each rank once, got {self.ranks}")
        if len(self.cuts) != len(self.mesh):
            raise ArgumentError(
                f"placements: wanted {len(self.mesh)}, one for each dimension of the mesh, got {len(self.cuts)}"
            )
        for dim in self.cuts:
            if dim is not None and not 0 <= dim < len(self.shape):
                raise ArgumentError(f"placements: wanted a dimension of an array of shape {self.shape}, got {dim}")
        if self.order and sorted(self.order) != list(range(len(self.mesh))):
            raise ArgumentError(f"order: wanted each dimension of the mesh once, got {self.order}")

    @cached_property
    def boxes(self) -> dict[int, Box]:
        """What each rank of the mesh holds."""
        return {rank: self._box(at) for rank, at in zip(self.ranks, product(*map(range, self.mesh)), strict=True)}

    def _box(self, at: tuple[int, ...]) -> Box:
        box = [(0, extent) for extent in self.shape]
        for number in self.order or range(len(self.mesh)):
            if (dim := self.cuts[number]) is not None:
                box[dim] = _chunk(*box[dim], self.mesh[number], at[number])
        return tuple(box)

    @property
    def first(self) -> Box:
        """The block that the mesh's first rank holds: none is longer."""
        return self._box((0,) * len(self.mesh))

    def shape_on(self, rank: int) -> tuple[int, ...]:
        """Of the block that `rank` holds; (0,) where it is not in the mesh."""
        if rank not in self.ranks:
            return (0,)
        at, number = list[int](), self.ranks.index(rank)
        for extent in reversed(self.mesh):
            number, place = divmod(number, extent)
            at.insert(0, place)
        return extents(self._box(tuple(at)))

    def __str__(self) -> str:
        cuts = ", ".join("Replicate()" if dim is None else f"Shard({dim})" for dim in self.cuts)
        order = f" in the order {self.order}" if self.order else ""
        return f"{self.shape} over ranks {self.ranks} as {self.mesh}: [{cuts}]{order}"


def _chunk(begin: int, end: int, parts: int, part: int) -> tuple[int, int]:
    longest = -(-(end - begin) // parts)
    return min(begin + longest * part, end), min(begin + longest * (part + 1), end)


def extents(box: Box) -> tuple[int, ...]:
    """The shape of a block."""
    return tuple(end - begin for begin, end in box)


def volume(box: Box) -> int:
    """The number of elements in a block."""
    return math.prod(extents(box))


def common(a: Box, b: Box) -> Box | None:
    """What two blocks of an array share, or None."""
    both = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return None if any(begin >= end for begin, end in both) else both


def within(box: Box, whole: Box) -> Box:
    """`box` in the coordinates of a block that it is a part of."""
    return tuple((begin - at, end - at) for (begin, end), (at, _) in zip(box, whole, strict=True))


def first_of(box: Box, shape: tuple[int, ...]) -> int | None:
    """Where a block of an array of `shape` in C order begins, in elements, if it lies in one piece; else None."""
    first, stride, whole = 0, 1, True  # whether it has all of the dimensions so far
    for (begin, end), extent in zip(reversed(box), reversed(shape), strict=True):
        if not whole and end - begin > 1:
            return None
        whole = whole and end - begin == extent
        first, stride = first + begin * stride, stride * extent
    return first
