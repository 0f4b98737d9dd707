"""Lists of memory regions as NIXL has them: address, length in bytes and device of each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ... import ArgumentError, DType
from ...calls.buffers import Buffer, place_of, read_buffer

Rows = np.ndarray[Any, np.dtype[np.int64]]

MEMORIES = {"DRAM": "DRAM", "VRAM": "VRAM", "cpu": "DRAM", "cuda": "VRAM"}
_WIDTH = 3


class Descriptors:
    """So many of one kind of memory. Iterates over tuples."""

    def __init__(self, memory: str, rows: Rows) -> None:
        self.memory, self.rows = memory, rows

    def descCount(self) -> int:  # noqa: N802  # as there
        return len(self.rows)

    def getType(self) -> str:  # noqa: N802  # as there
        return self.memory

    def isEmpty(self) -> bool:  # noqa: N802  # as there
        return len(self.rows) == 0

    def trim(self) -> Descriptors:
        return self

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[int, ...]:
        return tuple(int(word) for word in self.rows[index])

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Descriptors) and self.memory == other.memory
        return same and np.array_equal(self.rows, other.rows)  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]

    def to_bytes(self) -> bytes:
        return json.dumps([self.memory, self.rows.tolist()]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Descriptors:
        """What `to_bytes` made; ArgumentError for anything else."""
        try:
            memory, rows = json.loads(data)
            return cls(_memory(memory), _rows(rows or np.empty((0, _WIDTH), np.int64)))
        except (ValueError, TypeError) as error:
            raise ArgumentError(f"serialized_descs: wanted what get_serialized_descs made, got {error}") from error


def read(descs: Any, mem_type: str | None) -> Descriptors:
    """NIXL's forms: a list of these; an array or several; tuples, or rows of a NumPy array, with `mem_type`."""
    if isinstance(descs, Descriptors):
        return descs
    if isinstance(descs, np.ndarray) and mem_type is not None:
        return Descriptors(_memory(mem_type), _rows(descs))
    several = isinstance(descs, list | tuple)
    if several and descs and all(isinstance(each, tuple) for each in descs):
        return Descriptors(_memory(mem_type), _rows([each[:_WIDTH] for each in descs]))
    buffers = [read_buffer(each, "descs", writable=False) for each in (descs if several else [descs])]
    memories = {"DRAM" if buffer.device == "cpu" else "VRAM" for buffer in buffers}
    if len(memories) != 1:
        raise ArgumentError(f"descs: wanted one or more arrays of one kind of memory, got {sorted(memories)}")
    return Descriptors(memories.pop(), _rows([(each.ptr, each.nbytes, each.index) for each in buffers]))


def _memory(name: object) -> str:
    if name not in MEMORIES:
        raise ArgumentError(f"mem_type: wanted DRAM or VRAM, got {name!r}: hetcoll moves no files, blocks or objects")
    return MEMORIES[str(name)]


def _rows(values: Any) -> Rows:
    try:
        found = np.asarray(values)
    except ValueError:
        found = np.empty(0)
    if found.ndim != 2 or found.shape[1] != _WIDTH or found.dtype.kind not in "iu":
        raise ArgumentError(f"descs: wanted rows of address, length and device, got shape {found.shape}")
    rows = found.astype(np.int64)
    if (rows < 0).any():
        raise ArgumentError("descs: wanted addresses and lengths below 2**63")
    return rows


class Region(NamedTuple):
    """A registered piece of memory, the number of its window, and how a GPU of the host opens it."""

    number: int
    memory: str
    address: int
    nbytes: int
    shared: Sequence[Any] | None = None

    @property
    def place(self) -> tuple[str, int, int]:
        return self.memory, self.address, self.nbytes


def place(descs: Descriptors, regions: Iterable[Region]) -> tuple[Rows, Rows]:
    """The number of the last region in which each lies, or -1, and where in it."""
    numbers, offsets = np.full(len(descs), -1, np.int64), np.zeros(len(descs), np.int64)
    address, nbytes = descs.rows[:, 0], descs.rows[:, 1]
    for region in regions:
        if region.memory == descs.memory:
            at = address - region.address
            inside = (at >= 0) & (nbytes <= region.nbytes) & (at <= region.nbytes - nbytes)
            numbers[inside], offsets[inside] = region.number, at[inside]
    return numbers, offsets


def memory_at(memory: str, row: Rows) -> Buffer:
    """A region as memory of this process."""
    address, nbytes = int(row[0]), int(row[1])
    if memory == "DRAM":
        return Buffer(address, nbytes, DType.UINT8, None)
    kind, index = place_of(address, nbytes, "descs")
    if kind == "cpu":
        raise ArgumentError(f"descs: wanted device memory at {address:#x}, as VRAM says, got the host's")
    return Buffer(address, nbytes, DType.UINT8, None, kind, index)
