"""Numbers that stand for data: what ranks give, and what sums of it are."""

from __future__ import annotations

from functools import lru_cache, reduce
from typing import Any

import numpy as np

from ..ir import Buf, Plan
from ..symmetry import Symmetry

PRIME = (1 << 61) - 1  # of sums; two of them fit a word
WORD = (1 << 64) - 1  # what NumPy's integers leave of a product
Value = tuple[Any, Any]
"""The sum, and a number that knows the order of additions. Where a rank stands for others each is an array: of what
this rank has and of what they have in its place, by their strides from it."""


def mixed(x: Any) -> Any:
    """A word to which every bit of `x` matters, which may be an array."""
    for factor in (0x2545F4914F6CDD1D, 0x369DEA0F31A53F85):
        x = x & WORD
        x = (x ^ x >> 32) * factor
    x = x & WORD
    return x ^ x >> 29


def input_of(rank: Any, unit: Any) -> Any:
    """The random number of a rank's unit, the same in every process; or those of an array of ranks, of units."""
    return mixed(mixed(rank + 1) + unit) % PRIME


@lru_cache(1 << 13)
def sum_of(size: int, unit: int) -> int:
    """Of a unit of all ranks."""
    numbers: list[int] = input_of(np.arange(size, dtype=np.uint64), hash(unit)).tolist()
    return sum(numbers) % PRIME


def add(a: Value, b: Value) -> Value:
    """Commutative; associative in the first number, not in the second."""
    return (a[0] + b[0]) % PRIME, mixed(a[1] * b[1] + 0x9E3779B9 * (a[1] + b[1]))


def divide(a: Value, size: int) -> Value:
    inverse = pow(size, -1, PRIME)
    if isinstance(a[0], np.ndarray):  # the product takes two words
        return (a[0].astype(object) * inverse % PRIME).astype(np.uint64), mixed(a[1] + size)
    return a[0] * inverse % PRIME, mixed(a[1] + size)


def rounded(a: Value) -> Value:
    """The same sum to the checker, in other bits."""
    return a[0], mixed(a[1] + 0x51ED270B)


def inputs(plan: Plan, symmetry: Symmetry, unit: int) -> Value:
    if symmetry.times == 1:
        number: Any = input_of(plan.rank, hash(unit))
    else:
        units = np.array(list(map(hash, symmetry.units(Buf.SEND, unit))), np.uint64)
        number = input_of(np.array(symmetry.orbit(plan.rank), np.uint64), units)
    return number, number


def moved(values: list[Value], symmetry: Symmetry, strides: int) -> list[Value]:
    """What ranks so many strides before those that have these values get from them."""
    if symmetry.times == 1 or strides == 0:
        return values
    return [(np.roll(a, -strides), np.roll(b, -strides)) for a, b in values]


def in_rank_order(ranks: range, unit: int, divisor: int) -> Value:
    """What this unit of these ranks, one after another, comes to, and its average where `divisor` is not 1."""
    total = reduce(add, ((x, x) for x in (input_of(rank, hash(unit)) for rank in ranks)))
    return total if divisor == 1 else divide(total, divisor)
