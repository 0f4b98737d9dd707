"""Arrays over ranks as NumPy cuts them: the model of `hetcoll.plan.layout`, and layouts to move between."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np

from hetcoll.plan import reshard
from hetcoll.plan.layout import Layout
from hetcoll.runtime.reshard import _prepare

Arrays = dict[int, np.ndarray[Any, Any]]
MESHES = [(1,), (2,), (3,), (4,), (5,), (6,), (1, 3), (2, 2), (3, 2), (2, 3), (2, 1, 3), ()]


@contextlib.contextmanager
def in_batches_of(nbytes: int) -> Iterator[None]:
    """Arrays that change their layout do so, in this process."""
    try:
        with patch.object(reshard, "BATCH", nbytes):
            _prepare.cache_clear()
            yield
    finally:
        _prepare.cache_clear()


def block(whole: np.ndarray[Any, Any], layout: Layout, at: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """What the rank at this place of the mesh holds: `torch.chunk`, one dimension of the mesh after another."""
    for number in layout.order or range(len(layout.mesh)):
        dim, parts = layout.cuts[number], layout.mesh[number]
        if dim is not None:
            longest = -(-whole.shape[dim] // parts)
            points = [min(longest * (part + 1), whole.shape[dim]) for part in range(parts - 1)]
            whole = np.split(whole, points, axis=dim)[at[number]]
    return whole


def values(array: int, layout: Layout, dtype: str = "int64") -> Arrays:
    """Each rank's block of an array whose elements differ, from each other and from those of other arrays."""
    numbers = np.arange(math.prod(layout.shape)) + 10_007 * array
    whole = numbers.astype(dtype).reshape(layout.shape)
    places = product(*map(range, layout.mesh))
    return {rank: block(whole, layout, at) for rank, at in zip(layout.ranks, places, strict=True)}


def random_layout(rng: np.random.Generator, shape: Sequence[int], size: int) -> Layout:
    """Of an array of this shape over some of `size` ranks."""
    fitting = [mesh for mesh in MESHES if math.prod(mesh) <= size]
    mesh = fitting[rng.integers(len(fitting))]
    ranks = tuple(map(int, rng.permutation(size)[: math.prod(mesh)]))
    dims = [None, *range(len(shape))]
    return Layout(tuple(shape), ranks, mesh, tuple(dims[rng.integers(len(dims))] for _ in mesh))
