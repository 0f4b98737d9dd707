"""How groups of ranks hold a paged KV cache, and which pieces of one group's arrays become which of the other's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .. import ArgumentError
from ..calls import check_int

_AXES = ("layer", "kv", "block", "token", "head", "dim")
_ALIKE = ("layers", "kv", "block_tokens", "heads", "head_dim")

Numbers = Sequence[int] | np.ndarray[Any, Any]
Column = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class CacheLayout:
    """A paged KV cache as a group of ranks holds it: each has all blocks of all layers, and some of the heads.

    `axes` is their order in memory, outermost first, of ``layer kv block token head dim``, with ``dim`` last. `heads`
    are those of the model, which `ranks` share evenly; where there are more ranks than heads, as many in a row have one
    head. `kv` is 1 where keys and values are one (MLA), or lie side by side in ``dim``. With `apart` each layer is an
    array of its own.
    """

    layers: int
    blocks: int
    block_tokens: int
    heads: int
    head_dim: int
    ranks: int = 1
    axes: tuple[str, ...] = _AXES
    kv: int = 2
    apart: bool = False

    def __post_init__(self) -> None:
        for name in (*_ALIKE, "blocks", "ranks"):
            if (number := check_int(getattr(self, name), name)) < 1:
                raise ArgumentError(f"{name}: wanted 1 or more, got {number}")
            object.__setattr__(self, name, number)  # since ranks compare their layouts, whatever integers were given
        axes = tuple(self.axes) if isinstance(self.axes, list | tuple) else ()
        if len(axes) != len(_AXES) or any(axis not in axes for axis in _AXES) or axes[-1] != "dim":
            raise ArgumentError(f"axes: wanted {', '.join(_AXES)} in any order with dim last, got {self.axes}")
        object.__setattr__(self, "axes", axes)
        if self.heads % self.ranks and self.ranks % self.heads:
            raise ArgumentError(f"ranks: wanted a divisor or multiple of the {self.heads} heads, got {self.ranks}")

    def heads_of(self, member: int) -> range:
        """The heads that the group's rank `member` holds."""
        if self.ranks > self.heads:
            head = member * self.heads // self.ranks
            return range(head, head + 1)
        each = self.heads // self.ranks
        return range(member * each, (member + 1) * each)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one rank's array, by `axes`; of a layer's, with a 1 in its place, where these are `apart`."""
        own = len(self.heads_of(0))
        sizes = (1 if self.apart else self.layers, self.kv, self.blocks, self.block_tokens, own, self.head_dim)
        found = dict(zip(_AXES, sizes, strict=True))
        return tuple(found[axis] for axis in self.axes)

    @property
    def strides(self) -> dict[str, int]:
        """Elements from one to the next along each axis of a rank's array."""
        shape = self.shape
        return {axis: math.prod(shape[i + 1 :]) for i, axis in enumerate(self.axes)}


class Cut(NamedTuple):
    """Heads that one rank of the source's group sends to one of the target's."""

    source: int
    target: int
    heads: range


def cuts(src: CacheLayout, dst: CacheLayout) -> list[Cut]:
    """Who sends which heads to whom: every head that a target holds comes to it once. Of several sources that hold it,
    targets ask different ones. ArgumentError where the layouts are not of one cache."""
    for layout in (src, dst):
        if not isinstance(layout, CacheLayout):
            raise ArgumentError(f"layouts: wanted a CacheLayout, got {layout!r}")
    for name in _ALIKE:
        if getattr(src, name) != getattr(dst, name):
            raise ArgumentError(f"layouts: wanted one {name}, got {getattr(src, name)} and {getattr(dst, name)}")
    found: list[Cut] = []
    for target in range(dst.ranks):
        for head in dst.heads_of(target):
            holders = [source for source in range(src.ranks) if head in src.heads_of(source)]
            source = holders[target % len(holders)]
            if found and found[-1][:2] == (source, target):
                found[-1] = Cut(source, target, range(found[-1].heads.start, head + 1))
            else:
                found.append(Cut(source, target, range(head, head + 1)))
    return found


def pieces(
    src: CacheLayout, dst: CacheLayout, cut: Cut, layer: int, src_blocks: Numbers, dst_blocks: Numbers
) -> tuple[Column, Column, Column]:
    """Offsets in the source's array and in the target's, and lengths, in elements, of one layer of blocks: as few
    pieces as the two orders allow. Block `src_blocks[i]` becomes `dst_blocks[i]`."""
    if not 0 <= (layer := check_int(layer, "layer")) < src.layers:
        raise ArgumentError(f"layer: wanted one of {src.layers}, got {layer}")
    columns = [_blocks(src_blocks, src.blocks, "src_blocks"), _blocks(dst_blocks, dst.blocks, "dst_blocks")]
    if len(columns[0]) != len(columns[1]):
        raise ArgumentError(f"blocks: wanted as many targets as sources, got {len(columns[0])} and {len(columns[1])}")
    if len(columns[0]) == 0:
        return (np.empty(0, np.int64),) * 3
    order = [axis for axis in src.axes if axis not in ("layer", "dim")]  # what lies together there comes one by one
    offsets = []
    for layout, member, blocks in ((src, cut.source, columns[0]), (dst, cut.target, columns[1])):
        first, steps = layout.heads_of(member).start, layout.strides
        along = {
            "kv": np.arange(src.kv),
            "block": blocks,
            "token": np.arange(src.block_tokens),
            "head": np.arange(cut.heads.start - first, cut.heads.stop - first),
        }
        sums = np.zeros(1, np.int64) + (0 if layout.apart else layer * steps["layer"])
        for axis in order:
            sums = np.add.outer(sums, along[axis] * steps[axis])
        offsets.append(sums.ravel())
    here, there = offsets
    apart = (np.diff(here) != src.head_dim) | (np.diff(there) != src.head_dim)
    begins = np.concatenate([[0], np.flatnonzero(apart) + 1])
    lengths = np.diff(np.append(begins, len(here))) * src.head_dim
    return here[begins], there[begins], lengths


def whole_numbers(values: Numbers, name: str) -> Column:
    """ArgumentError unless it is a sequence of these."""
    try:
        found = np.asarray(values)
    except (TypeError, ValueError):  # a GPU's tensor; rows of several lengths
        raise ArgumentError(f"{name}: wanted a sequence of whole numbers, got {values!r}") from None
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise ArgumentError(f"{name}: wanted a sequence of whole numbers, got {values!r}")
    return found.astype(np.int64)


def _blocks(blocks: Numbers, most: int, name: str) -> Column:
    found = whole_numbers(blocks, name)
    if found.size and not (int(found.min()) >= 0 and int(found.max()) < most):
        raise ArgumentError(f"{name}: wanted blocks in [0, {most}), got {found.min()} to {found.max()}")
    return found
