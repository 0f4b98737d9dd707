"""What all ranks tell each other at once, each different content once.

In an exchange a rank tells a few values, one a column. Most are the same on many ranks: what a host is called, which
GPUs it has. So a column travels as the different values that it has, and the number of its value for each rank: the
answer to n ranks grows with what really differs, and who reads it works on each different value once.

A column, little-endian: how many different values u32; the length of each u32, or MIXED; bytes of a rank's number u8
(0: one value for all, or as many as ranks, in their order), 3 reserved; with MIXED the lengths, u32 each; the values;
the numbers of all ranks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, overload

import numpy as np

from ..errors import CommunicationError
from .wire import pack, unpack

T = TypeVar("T")

_HEAD = struct.Struct("<IIB3x")
_MIXED = 0xFFFFFFFF
_WIDTHS = {1: "<u1", 2: "<u2", 4: "<u4"}


class Column(Sequence[bytes]):
    """One value a rank. `values` are the different ones, `which` says which of them each rank has."""

    def __init__(self, values: Sequence[bytes], which: Sequence[int]) -> None:
        self.values, self.which = values, which

    def __len__(self) -> int:
        return len(self.which)

    @overload
    def __getitem__(self, rank: int) -> bytes: ...
    @overload
    def __getitem__(self, rank: slice) -> list[bytes]: ...
    def __getitem__(self, rank: int | slice) -> bytes | list[bytes]:
        if isinstance(rank, slice):
            return [self.values[i] for i in self.which[rank]]
        return self.values[self.which[rank]]

    def __iter__(self) -> Iterator[bytes]:
        return map(self.values.__getitem__, self.which)

    def each(self, read: Callable[[bytes], T]) -> list[T]:
        """What `read` makes of each rank's value. It is called once for each different one, so ranks share results."""
        found = [read(value) for value in self.values]
        return [found[i] for i in self.which]


def intern(values: Sequence[bytes]) -> Column:
    """The column of these values, by rank."""
    numbers: dict[bytes, int] = {}
    index = [numbers.setdefault(value, len(numbers)) for value in values]
    return Column(list(numbers), index)


def pack_columns(columns: Sequence[Sequence[bytes]], size: int) -> bytes:
    """The body that `unpack_columns` reads, of columns of `size` ranks."""
    return pack(_pack(intern(column), size) for column in columns)


def _pack(column: Column, size: int) -> bytes:
    count = len(column.values)
    lengths = np.fromiter(map(len, column.values), "<u4", count)
    equal = count > 0 and bool((lengths == lengths[0]).all())
    width = 0 if count in (1, size) else next(w for w in _WIDTHS if count <= 1 << (8 * w))
    parts = [_HEAD.pack(count, lengths[0] if equal else _MIXED, width)]
    if not equal:
        parts.append(lengths.tobytes())
    parts += column.values
    if width:
        parts.append(np.array(column.which, _WIDTHS[width]).tobytes())
    return b"".join(parts)


def unpack_columns(body: bytes, size: int) -> list[Column]:
    """What `pack_columns` made for `size` ranks; CommunicationError for anything else."""
    try:
        return [_unpack(field, size) for field in unpack(body)]
    except (struct.error, ValueError, IndexError) as error:
        raise CommunicationError(f"what ranks told each other came garbled: {error}") from error


def _unpack(data: bytes, size: int) -> Column:
    count, length, width = _HEAD.unpack_from(data)
    at = _HEAD.size
    if count > size or width not in (0, *_WIDTHS):
        raise ValueError(f"{count} values for {size} ranks, with numbers of {width} bytes")
    if length == _MIXED:
        lengths = np.frombuffer(data, "<u4", count, at).tolist()
        at += 4 * count
    else:
        lengths = [length] * count
    values = []
    for nbytes in lengths:
        values.append(data[at : at + nbytes])
        at += nbytes
    index: Sequence[int]
    if width:
        index = np.frombuffer(data, _WIDTHS[width], size, at).tolist()
        at += width * size
        if max(index) >= count:
            raise ValueError(f"a rank has value {max(index)} of {count}")
    elif count not in (1, size):
        raise ValueError(f"{count} values without numbers for {size} ranks")
    else:
        index = range(size) if count == size else [0] * size
    if at != len(data):
        raise ValueError(f"a column of {len(data)} bytes: wanted {at}")
    return Column(values, index)
