"""Few tokens between ranks, with room for the most that may come: by all-to-alls, on CPUs."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from .. import Communicator, DType
from ..calls.buffers import Buffer
from .routing import Grouped, grouped, sent
from .rows import Wire, bytes_of, decode, encode, narrow, sum_rows, widen

_LINE = 16


class Sizes(NamedTuple):
    """What a rank sends each other one: up to `most` tokens with `topk` ids each. Each rank has so many experts."""

    wire: Wire
    most: int
    topk: int
    experts: int

    @property
    def head(self) -> int:
        """Bytes of ids, or weights, of 32 bits, and a line more; BlockHead of tokens.h."""
        return -(-4 * self.most * self.topk // _LINE) * _LINE + _LINE

    @property
    def rows(self) -> int:
        """Bytes of the rows of a rank."""
        return self.most * self.wire.stride

    @property
    def block(self) -> int:
        """Bytes of both."""
        return self.head + self.rows


class Few(Protocol):
    """What one kind of memory does."""

    def dispatch(self, x: Buffer, ids: Buffer, tokens: int, stream: int | None, timeout: float | None) -> None: ...

    def combine(
        self, made: Buffer, weights: Buffer | None, to: Buffer, tokens: int, stream: int | None, timeout: float | None
    ) -> None: ...

    def close(self) -> None: ...


class HostFew:
    """Those of a rank with its tokens in the host's memory; others may be GPUs."""

    def __init__(self, comm: Communicator, sizes: Sizes, received: Buffer, counts: Buffer) -> None:
        self._comm, self._sizes = comm, sizes
        size = comm.size
        self._sent, self._came = np.zeros((2, size, sizes.block), np.uint8)
        self._parts, self._sums = np.zeros((2, size, sizes.rows), np.uint8)
        self._given, self._factors = np.ones(sizes.head // 4, np.float32), np.empty((size, sizes.head // 4), np.float32)
        self._received, self._counts = received, counts
        self._ids = np.empty((0, sizes.topk), np.int64)
        self._grouped: Grouped | None = None

    def dispatch(self, x: Buffer, ids: Buffer, tokens: int, stream: int | None, timeout: float | None) -> None:
        wire, most, topk, experts = self._sizes
        size, head, rank = self._comm.size, self._sizes.head, self._comm.rank
        words = bytes_of(ids).view(np.int32 if ids.dtype is DType.INT32 else np.int64)
        self._ids = words.reshape(tokens, topk).astype(np.int64)
        rows = bytes_of(x).reshape(tokens, wire.row)
        packed = encode(widen(rows, wire.dtype)) if wire.fp8 else rows
        named = np.full((most, topk), -1, np.int32)
        named[:tokens] = self._ids
        self._sent[:, : 4 * most * topk] = named.reshape(-1).view(np.uint8)
        for peer, at in enumerate(sent(self._ids, size, experts).tokens):
            self._sent[peer, head:].reshape(most, wire.stride)[at, : wire.sent] = packed[at]
        self._comm.alltoall(self._sent, self._came, timeout=timeout)
        theirs = np.ascontiguousarray(self._came[:, : 4 * most * topk]).view(np.int32).reshape(-1, topk)
        found = self._grouped = grouped(theirs.astype(np.int64), rank * experts, experts)
        came = self._came[:, head:].reshape(size * most, wire.stride)[found.rows]
        into = bytes_of(self._received).reshape(experts, size * most, wire.row)
        got = narrow(decode(came, wire.hidden), wire.dtype) if wire.fp8 else came[:, : wire.row]
        ends = np.cumsum(found.counts)
        for expert, (end, count) in enumerate(zip(ends, found.counts, strict=True)):
            into[expert, :count] = got[end - count : end]
        bytes_of(self._counts).view(np.int32 if self._counts.dtype is DType.INT32 else np.int64)[:] = found.counts

    def combine(
        self, made: Buffer, weights: Buffer | None, to: Buffer, tokens: int, stream: int | None, timeout: float | None
    ) -> None:
        wire, most, topk, experts = self._sizes
        size, found = self._comm.size, self._grouped
        assert found is not None, "something was dispatched"
        self._given[:] = 1
        if weights is not None:
            self._given[: tokens * topk] = bytes_of(weights).view(np.float32)
        self._comm.allgather(self._given.view(np.uint8), self._factors.view(np.uint8), timeout=timeout)
        factors = self._factors[:, : most * topk].reshape(size * most, topk)
        firsts = np.cumsum(found.counts) - found.counts  # of each expert's, among all
        owner = np.repeat(np.arange(experts), found.counts)
        slots = owner * size * most + np.arange(len(owner)) - firsts[owner]
        places = np.where(found.places < 0, -1, np.append(slots, -1)[found.places])
        rows = bytes_of(made).reshape(-1, wire.row)
        parts = self._parts.reshape(size * most, wire.stride)
        sum_rows(wire, lambda at: rows[at], places, factors, parts)
        self._comm.alltoall(self._parts, self._sums, timeout=timeout)
        goes = sent(self._ids, size, experts)
        table = np.full((tokens, goes.width), -1, np.int64)
        for peer, (at, column) in enumerate(zip(goes.tokens, goes.columns, strict=True)):
            table[at, column] = peer * most + at
        sums = self._sums.reshape(size * most, wire.stride)
        sum_rows(wire, lambda at: sums[at], table, None, bytes_of(to).reshape(tokens, wire.row))

    def close(self) -> None:
        """Nothing but memory is held."""
