"""What all ranks tell each other at once, each different content once.

In an exchange a rank tells a few values, one a column. Most are the same on many ranks: what a host is called, which
GPUs it has. So a column travels as the different values that it has, and the number of its value for each rank: the
answer to n ranks grows with what really differs, and who reads it works on each different value once.

Two kinds of values need not travel to all. Of some, ranks need to know only who has the same as whom: in their place
come the numbers of the different ones, as text. And what a rank tells for those who will have to do with it (where it
listens) stays with the store, for who asks.

A column, little-endian: how many different values u32; the length of each u32, or MIXED, or UNTOLD where only who has
the same is told; bytes of a rank's number u8 (0: one value for all, or as many as ranks, in their order); 1 where the
numbers are compressed, u8; 2 reserved; with MIXED the lengths, u32 each; the values; the numbers of all ranks, each
but the first as its distance from the one before it, compressed (zlib) where that is shorter: ranks are most often
placed in some regular way.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar, overload

import numpy as np

from ...errors import parser
from .wire import pack, unpack

T = TypeVar("T")

_HEAD = struct.Struct("<IIBB2x")
_MIXED, _UNTOLD = 0xFFFFFFFF, 0xFFFFFFFE
_WIDTHS = {1: "<u1", 2: "<u2", 4: "<u4"}


class Telling(NamedTuple):
    """What a rank tells in an exchange: `shared` values, which all learn; `alike` ones, of which all learn who has the
    same; and its `own`, for those who ask."""

    shared: Sequence[bytes]
    alike: Sequence[bytes] = ()
    own: bytes = b""


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


def pack_columns(columns: Sequence[Sequence[bytes]], size: int, alike: int = 0) -> bytes:
    """The body that `unpack_columns` reads, of columns of `size` ranks. Of the last `alike` no values are told."""
    told = len(columns) - alike
    return pack(_pack(intern(column), size, number < told) for number, column in enumerate(columns))


def _pack(column: Column, size: int, told: bool) -> bytes:
    count = len(column.values)
    lengths = np.fromiter(map(len, column.values), "<u4", count)
    equal = count > 0 and bool((lengths == lengths[0]).all())
    width = 0 if count in (1, size) else next(w for w in _WIDTHS if count <= 1 << (8 * w))
    numbers, small = b"", False
    if width:
        numbers = np.diff(np.array(column.which, _WIDTHS[width]), prepend=np.zeros(1, _WIDTHS[width])).tobytes()
        packed = zlib.compress(numbers, 1)
        small = len(packed) < len(numbers)
        numbers = packed if small else numbers
    parts = [_HEAD.pack(count, _UNTOLD if not told else lengths[0] if equal else _MIXED, width, small)]
    if told:
        parts += ([] if equal else [lengths.tobytes()]) + list(column.values)
    return b"".join((*parts, numbers))


@parser("what ranks told each other")
def unpack_columns(body: bytes, size: int) -> list[Column]:
    """What `pack_columns` made for `size` ranks; CommunicationError for anything else."""
    return [_unpack(field, size) for field in unpack(body)]


def _unpack(data: bytes, size: int) -> Column:
    count, length, width, small = _HEAD.unpack_from(data)
    at = _HEAD.size
    if count > size or width not in (0, *_WIDTHS):
        raise ValueError(f"{count} values for {size} ranks, with numbers of {width} bytes")
    if length == _UNTOLD:
        lengths = []
    elif length == _MIXED:
        lengths = np.frombuffer(data, "<u4", count, at).tolist()
        at += 4 * count
    else:
        lengths = [length] * count
    values = [b"%d" % number for number in range(count)] if length == _UNTOLD else []
    for nbytes in lengths:
        values.append(data[at : at + nbytes])
        at += nbytes
    index: Sequence[int]
    if width:
        numbers, at = data[at:], len(data)
        if small:
            unpacker = zlib.decompressobj()
            try:
                numbers = unpacker.decompress(numbers, width * size)
            except zlib.error as error:
                raise ValueError(str(error)) from error
            if not unpacker.eof or unpacker.unused_data:
                raise ValueError("numbers of ranks that are compressed in another way")
        if len(numbers) != width * size:
            raise ValueError(f"numbers of {len(numbers)} bytes for {size} ranks: wanted {width * size}")
        steps = np.frombuffer(numbers, _WIDTHS[width])
        index = np.cumsum(steps, dtype=_WIDTHS[width]).tolist()
        if max(index) >= count:
            raise ValueError(f"a rank has value {max(index)} of {count}")
    elif count not in (1, size):
        raise ValueError(f"{count} values without numbers for {size} ranks")
    else:
        index = range(size) if count == size else [0] * size
    if at != len(data):
        raise ValueError(f"a column of {len(data)} bytes: wanted {at}")
    return Column(values, index)
