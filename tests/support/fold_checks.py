"""What every build of the kernels that fold must do (``checks.h``), wherever it runs: as NumPy does it."""

from __future__ import annotations

import ctypes

import numpy as np
from elements import Array
from kernel_checks import Launch, Machine, as_bytes

from hetcoll.types import DType, ReduceOp
from hetcoll.vendors.devices.kernels import table
from hetcoll.vendors.devices.kernels.source import checks_names

_RECORD = np.dtype(
    [(name, "u8") for name in ("hash", "odd", "first", "most")]
    + [(name, "u8", table.FOLD_LANES) for name in ("lane", "size")]
)
_BLOCKS = 3


def fold(machine: Machine, dtype: DType, op: int, values: Array, parts: list[int], shift: int) -> Array:
    """The records of these parts, which lie `shift` bytes behind a multiple of 256; each is folded by some blocks."""
    offsets = np.cumsum([0, *parts]).astype(np.uint64)
    at, table_at = machine.allocate(values.nbytes + shift), machine.allocate(offsets.nbytes, shared=True)
    to, partial = (machine.allocate(n * _RECORD.itemsize) for n in (len(parts), _BLOCKS * len(parts)))
    tickets = machine.allocate(4 * len(parts))
    machine.write(at + shift, as_bytes(values))
    ctypes.memmove(table_at, offsets.ctypes.data, offsets.nbytes)
    machine.write(tickets, np.zeros(4 * len(parts), np.uint8))
    arguments = table.Fold(to, at + shift, table_at, partial, tickets, op, _BLOCKS)
    launch = Launch(checks_names(dtype)[0], _BLOCKS * len(parts), table.FOLD_THREADS, bytes(arguments))
    for _ in range(2):  # what the first leaves behind is what the second needs
        machine.run([launch])
    return machine.read(to, len(parts) * _RECORD.itemsize).view(_RECORD)


def lanes(values: Array, ufunc: np.ufunc, itemsize: int) -> list[object]:
    """By which 16 bytes elements of so many bytes are in."""
    lane = np.arange(values.size) // (16 // itemsize) % table.FOLD_LANES
    return [ufunc.reduce(values[lane == i]).item() if (lane == i).any() else 0 for i in range(table.FOLD_LANES)]


def check_folds(machine: Machine, dtype: DType) -> None:
    """Parts of many packs, of some that end within one, of fewer than there are lanes, and of none."""
    parts, item = [40_003, 0, 9, 12_301], dtype.itemsize
    values = np.random.default_rng(1).integers(-100, 100, sum(parts)).astype(dtype.label)
    cut = np.split(values, np.cumsum(parts)[:-1])
    word = np.float64 if values.dtype.kind == "f" else np.int64
    for shift in (0, item, 3):
        moved, sums, most = (
            fold(machine, dtype, op, values, parts, shift) for op in (table.MOVED, ReduceOp.AVG, ReduceOp.MAX)
        )
        for part, record, summed, largest in zip(cut, moved, sums, most, strict=True):
            assert record["hash"] == summed["hash"] == largest["hash"]
            assert (record["odd"], record["first"]) == (0, 2**64 - 1)
            wide = part.astype(np.float64)  # in which these sums are exact
            assert summed["lane"].view(np.float64).tolist() == lanes(wide, np.add, item)
            assert summed["size"].view(np.float64).tolist() == lanes(np.abs(wide), np.add, item)
            assert summed["most"].view(np.float64) == np.abs(wide).max(initial=0)
            assert largest["lane"].view(word).tolist() == lanes(part, np.maximum, item)
    for at in (0, 40_002, 40_004, values.size - 1):
        changed = values.copy()
        changed.view(np.uint8)[at * values.itemsize] ^= 1
        found = fold(machine, dtype, table.MOVED, changed, parts, 0)["hash"] != moved["hash"]
        assert found.tolist() == [at < 40_003, False, 40_003 <= at < 40_012, at >= 40_012]
