"""Rows of tokens: as they travel, and in the host's memory packed for that, grouped by expert, summed by weights.

A rank offers a window with room for the most tokens that each rank may send to it. What it sends itself is packed
behind that, where `offsets` find it like what came: in bytes from the beginning of the window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .. import DType
from ..calls.buffers import Buffer, bytes_at
from .routing import Column

GROUP = 128  # elements of 8-bit floats with a scale in common; kGroup of eighths.h
_LARGEST = np.float32(448)
_LEAST_TOP = np.float32(2.0**-100)  # kLeastTop
_CHUNK = 256  # rows that are summed at a time, so that sums stay in a cache
_LINE = 16

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]


class Wire(NamedTuple):
    """How tokens of `hidden` elements travel."""

    hidden: int
    dtype: DType
    fp8: bool

    @property
    def row(self) -> int:
        """Bytes of a token, as an array has it."""
        return self.hidden * self.dtype.itemsize

    @property
    def sent(self) -> int:
        """Bytes of a token on the way to experts."""
        return self.hidden + 4 * self.hidden // GROUP if self.fp8 else self.row

    @property
    def packed(self) -> int:
        """Bytes from a row to the next where only those are that go to experts."""
        return -(-self.sent // _LINE) * _LINE

    @property
    def stride(self) -> int:
        """Bytes from a packed row to the next, for both ways."""
        return -(-self.row // _LINE) * _LINE


def bytes_of(buffer: Buffer) -> Bytes:
    """Host memory, without a copy, which the array keeps alive: what is put is read for longer than a call that gives
    up."""
    return bytes_at(buffer.ptr, buffer.nbytes, buffer.owner)


class HostRows:
    """Rows in the host's memory. What is packed stays where it is, beside the window."""

    def __init__(self, wire: Wire, most: int) -> None:
        self._wire, self._memory = wire, np.empty(most * wire.stride, np.uint8)
        self._table, self._packed = self._memory.reshape(-1, wire.stride), np.empty((0, wire.stride), np.uint8)
        self.window = as_bytes(self._memory)  # what other ranks put into

    def pack(self, x: Buffer, tokens: int) -> Buffer:
        """Tokens as they travel, `Wire.stride` apart."""
        wire, rows = self._wire, bytes_of(x).reshape(tokens, self._wire.row)
        if wire.fp8:
            self._packed = np.empty((tokens, wire.stride), np.uint8)
            for at in range(0, tokens, _CHUNK):
                self._packed[at : at + _CHUNK, : wire.sent] = encode(widen(rows[at : at + _CHUNK], wire.dtype))
        else:
            self._packed = rows if wire.row == wire.stride else np.pad(rows, ((0, 0), (0, wire.stride - wire.row)))
        return as_bytes(self._packed)

    def unpack(self, offsets: Column, to: Buffer) -> None:
        """Tokens out of the window, as an array has them."""
        wire, out = self._wire, bytes_of(to).reshape(len(offsets), self._wire.row)
        for at in range(0, len(offsets), _CHUNK):
            rows = self._rows(offsets[at : at + _CHUNK])
            out[at : at + _CHUNK] = narrow(decode(rows, wire.hidden), wire.dtype) if wire.fp8 else rows[:, : wire.row]

    def weigh(self, source: Buffer, offsets: Column, weights: Floats) -> Buffer:
        """As `add`, with `offsets` in `source`; packed."""
        wire, rows = self._wire, bytes_of(source).reshape(-1, self._wire.row)
        self._packed = np.empty((len(offsets), wire.stride), np.uint8)
        sum_rows(wire, lambda at: rows[at // wire.row], offsets, weights, self._packed)
        return as_bytes(self._packed)

    def add(self, offsets: Column, to: Buffer) -> None:
        """Of each row of `to` the sum of those at `offsets` of the window, where they are 0 or more, in their order."""
        sum_rows(self._wire, self._rows, offsets, None, bytes_of(to).reshape(len(offsets), self._wire.row))

    def close(self) -> None:
        self._packed = self._packed[:0].copy()

    def _rows(self, offsets: Column) -> Bytes:
        numbers = offsets // self._wire.stride
        here = numbers >= len(self._table)
        found = self._table[np.where(here, 0, numbers)]
        found[here] = self._packed[numbers[here] - len(self._table)]
        return found


def sum_rows(wire: Wire, read: Callable[[Column], Bytes], offsets: Column, weights: Floats | None, to: Bytes) -> None:
    """Of each row of `to` the sum of those that `read` gives for its `offsets` of 0 and more, in float32."""
    for at in range(0, len(offsets), _CHUNK):
        part = offsets[at : at + _CHUNK]
        sums = np.zeros((len(part), wire.hidden), np.float32)
        for column in range(part.shape[1]):
            there = np.flatnonzero(part[:, column] >= 0)
            if len(there):
                values = widen(read(part[there, column])[:, : wire.row], wire.dtype)
                with np.errstate(over="ignore", invalid="ignore"):
                    sums[there] += values if weights is None else values * weights[at + there, column][:, None]
        to[at : at + _CHUNK, : wire.row] = narrow(sums, wire.dtype)


def as_bytes(array: Bytes) -> Buffer:
    """As calls take it."""
    return Buffer(int(array.ctypes.data), array.nbytes, DType.UINT8, array)


def widen(rows: Bytes, dtype: DType) -> Floats:
    """Rows of a type's bytes as float32."""
    rows = np.ascontiguousarray(rows)
    if dtype is DType.BFLOAT16:
        return (rows.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    found: Floats = rows.view(np.float16 if dtype is DType.FLOAT16 else np.float32).astype(np.float32)
    return found


def narrow(rows: Floats, dtype: DType) -> Bytes:
    """The reverse, rounded to nearest even."""
    if dtype is DType.BFLOAT16:
        bits = rows.view(np.uint32)
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        return (np.where(nan, bits | np.uint32(0x400000), rounded) >> np.uint32(16)).astype(np.uint16).view(np.uint8)
    with np.errstate(over="ignore"):
        return rows.astype(np.float16 if dtype is DType.FLOAT16 else np.float32).view(np.uint8)


def encode(rows: Floats) -> Bytes:
    """Codes (e4m3) of each row and its scales behind them: a group's largest magnitude becomes 448. A group with an
    infinity or a NaN is all NaN."""
    groups = rows.reshape(len(rows), rows.shape[1] // GROUP, GROUP)
    top = np.abs(groups).max(axis=2)
    finite = np.isfinite(top)
    most = np.where(finite, np.maximum(top, _LEAST_TOP), np.float32(1))
    with np.errstate(invalid="ignore", over="ignore"):
        scaled: Floats = np.clip(groups * (_LARGEST / most)[:, :, None], -_LARGEST, _LARGEST)
        codes = np.where(finite[:, :, None], _to_e4m3(scaled), np.uint8(0)).reshape(rows.shape)
    scales = np.where(finite, most / _LARGEST, np.float32(np.nan))
    return np.concatenate([codes, scales.view(np.uint8)], axis=1)


def decode(rows: Bytes, hidden: int) -> Floats:
    """What `encode` has made of rows."""
    scales = np.ascontiguousarray(rows[:, hidden : hidden + 4 * hidden // GROUP]).view(np.float32)
    values = _VALUES[rows[:, :hidden]].reshape(len(rows), hidden // GROUP, GROUP) * scales[:, :, None]
    return values.reshape(len(rows), hidden)


def _to_e4m3(x: Floats) -> Bytes:
    """Of numbers up to 448: as floats.h does it, adding a power of two whose last place is the result's."""
    bits: np.ndarray[Any, np.dtype[np.uint32]] = x.view(np.uint32)
    magnitude, lowest = bits & np.uint32(0x7FFFFFFF), np.uint32((128 - 7) << 23)
    place = np.maximum(magnitude & np.uint32(0x7F800000), lowest)
    power = place + np.uint32(20 << 23)
    significand = (magnitude.view(np.float32) + power.view(np.float32)).view(np.uint32) - power
    code = significand + (place >> np.uint32(20)) - (lowest >> np.uint32(20))
    found: Bytes = (code | (bits >> np.uint32(24) & np.uint32(0x80))).astype(np.uint8)
    return found


def _values() -> Floats:
    """Of every code."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    magnitude[code & 127 == 127] = np.nan
    return np.where(code < 128, magnitude, -magnitude).astype(np.float32)


_VALUES = _values()
