"""Rows of tokens in a GPU's memory: the same by kernels (``vendors/devices/kernels/rows.h``), in the order of streams.

Tables of offsets and weights lie in pinned memory, which kernels read as it is.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import DType
from ..calls.buffers import Buffer
from ..gpu.array import DeviceArray
from ..vendors.devices.kernels.source import GATHER_ROWS, rows_names
from ..vendors.devices.kernels.table import Rows as Arguments
from .routing import Column
from .rows import Floats, Wire, bytes_of

if TYPE_CHECKING:
    from ..vendors.devices.base import Device

_THREADS = 256
_BLOCKS = 8  # of a multiprocessor
_LEAST_TABLE = 64 << 10  # bytes


class GpuRows:
    """`rows.Rows` of this rank's GPU. The window is twice as large: its second half is what is packed."""

    def __init__(self, device: Device, wire: Wire, most: int) -> None:
        self._device, self._wire = device, wire
        self._incoming = most * wire.stride
        self.window = DeviceArray(device, 2 * self._incoming, "uint8").buffer()  # which keeps the memory
        table = device.kernels()
        self._gather = table.function(GATHER_ROWS)
        self._combine, self._encode, self._decode = map(table.function, rows_names(wire.dtype))
        self._done = device.event()
        self._tables: list[tuple[int, int]] = []  # pinned memory: address, bytes
        self._used = 0  # of the last one
        self._end = weakref.finalize(self, _give_back, device, self._done, self._tables)
        self._end.atexit = False  # the driver's own end takes it

    def settle(self) -> None:
        self._device.synchronize_event(self._done)
        self._used = 0
        for address, _ in self._tables[:-1]:
            self._device.free_host(address)
        del self._tables[:-1]

    def pack(self, x: Buffer, tokens: int, stream: int | None) -> Buffer:
        wire, to = self._wire, self.window.ptr + self._incoming
        if wire.fp8:
            self._run(self._encode, stream, to=to, from_=x.ptr, rows=tokens, to_stride=wire.stride)
        elif tokens:
            offsets = np.arange(tokens, dtype=np.int64) * wire.row
            self._copy(offsets, x.ptr, to, wire.stride, stream)
        return self._packed(tokens)

    def unpack(self, offsets: Column, to: Buffer, stream: int | None) -> None:
        wire = self._wire
        if not wire.fp8:
            self._copy(offsets, self.window.ptr, to.ptr, wire.row, stream)
        else:
            table = self._keep(offsets)
            self._run(self._decode, stream, to=to.ptr, from_=self.window.ptr, offsets=table, rows=len(offsets),
                      to_stride=wire.row)  # fmt: skip

    def weigh(self, source: Buffer, offsets: Column, weights: Floats | None, stream: int | None) -> Buffer:
        to, stride = self.window.ptr + self._incoming, self._wire.stride
        self._sum(source.ptr, offsets, weights, to, stride, stream)
        return self._packed(len(offsets))

    def add(self, offsets: Column, to: Buffer, stream: int | None) -> None:
        self._sum(self.window.ptr, offsets, None, to.ptr, self._wire.row, stream)

    def write(self, to: Buffer, values: np.ndarray[Any, Any], stream: int | None) -> None:
        if to.device == "cpu":
            bytes_of(to)[:] = values.view(np.uint8)
        else:
            self._device.copy(to.ptr, self._keep(values), values.nbytes, stream or 0)
            self._device.record(self._done, stream or 0)

    def close(self) -> None:
        self._end()

    def _packed(self, rows: int) -> Buffer:
        window = self.window
        at, nbytes = window.ptr + self._incoming, rows * self._wire.stride
        return Buffer(at, nbytes, DType.UINT8, None, window.device, window.index)

    def _copy(self, offsets: Column, source: int, to: int, stride: int, stream: int | None) -> None:
        self._run(self._gather, stream, to=to, from_=source, offsets=self._keep(offsets), rows=len(offsets),
                  to_stride=stride)  # fmt: skip

    def _sum(
        self, source: int, offsets: Column, weights: Floats | None, to: int, stride: int, stream: int | None
    ) -> None:
        rows, columns = offsets.shape
        table, weight = self._keep(offsets), 0 if weights is None else self._keep(weights)
        self._run(self._combine, stream, to=to, from_=source, offsets=table, weights=weight, rows=rows, columns=columns,
                  to_stride=stride)  # fmt: skip

    def _run(self, function: int, stream: int | None, *, rows: int, **words: int) -> None:
        if rows == 0:
            return
        device, wire = self._device, self._wire
        arguments = Arguments(rows=rows, hidden=wire.hidden, itemsize=wire.dtype.itemsize, **words)
        grid = min(rows, _BLOCKS * device.multiprocessors)
        device.launch(function, grid, _THREADS, [bytes(arguments)], stream or 0)
        device.record(self._done, stream or 0)

    def _keep(self, table: np.ndarray[Any, Any]) -> int:
        """A copy of a table in pinned memory, until the next `settle`."""
        nbytes = -(-table.nbytes // 16) * 16
        if not self._tables or self._used + nbytes > self._tables[-1][1]:
            most = max(_LEAST_TABLE, 2 * nbytes, 2 * self._tables[-1][1] if self._tables else 0)
            self._tables.append((self._device.allocate_host(most), most))
            self._used = 0
        address = self._tables[-1][0] + self._used
        whole = np.ascontiguousarray(table)
        ctypes.memmove(address, whole.ctypes.data, whole.nbytes)
        self._used += nbytes
        return address


def _give_back(device: Device, done: int, tables: list[tuple[int, int]]) -> None:
    """Once nothing reads the tables any more."""
    device.synchronize_event(done)
    device.destroy_event(done)
    for address, _ in tables:
        device.free_host(address)
    tables.clear()
