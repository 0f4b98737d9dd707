"""Few tokens between ranks, with room for the most that may come: what of them there is, on CPUs."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from .. import Communicator, Work
from ..calls.buffers import Buffer
from .put_rows import Arrivals, Places, Sizes, agree
from .routing import Grouped, grouped, sent
from .rows import Bytes, bytes_of, decode, encode, narrow, sum_rows, widen
from .way import NUMPY


class Few(Protocol):
    """What one kind of memory does."""

    direct: bool
    """Whether ranks read each other's tokens; then graphs may capture calls."""

    def dispatch(self, x: Buffer, ids: Buffer, tokens: int, stream: int | None, timeout: float | None) -> None: ...

    def combine(
        self, made: Buffer, weights: Buffer | None, to: Buffer, tokens: int, stream: int | None, timeout: float | None
    ) -> None: ...

    def close(self) -> None: ...


class HostFew:
    """Those of a rank with its tokens in the host's memory; others may be GPUs."""

    direct = False

    def __init__(
        self, comm: Communicator, sizes: Sizes, received: Buffer, counts: Buffer, timeout: float | None
    ) -> None:
        self._comm, self._sizes, self._places, size = comm, sizes, Places(sizes, comm.size), comm.size
        self._memory, self._word = np.zeros(self._places.end, np.uint8), np.zeros(1, np.int32)
        comm.allreduce(self._word, timeout=timeout)
        agree(comm, "", timeout)
        self._window = comm.window(self._memory, signals=size, timeout=timeout)
        self._arrivals = Arrivals(comm, self._window)
        self._works: list[Work] = []
        self._blocks, self._parts = np.zeros((size, sizes.block), np.uint8), np.empty((0, sizes.wire.stride), np.uint8)
        self._given = np.ones(sizes.ids // 4, np.float32)
        self._factors = np.empty((size, sizes.ids // 4), np.float32)
        self._received, self._counts = received, counts
        self._goes = sent(np.empty((0, sizes.topk), np.int64), size, sizes.experts)
        self._came = np.zeros((size, sizes.most), bool)  # by rank and token: whether it did
        self._grouped: Grouped | None = None

    def dispatch(self, x: Buffer, ids: Buffer, tokens: int, stream: int | None, timeout: float | None) -> None:
        wire, most, topk, experts = self._sizes
        size, head, rank, turn = self._comm.size, self._sizes.head, self._comm.rank, self._arrivals.turn
        named = np.full((most, topk), -1, np.int32)
        named[:tokens] = bytes_of(ids).view(NUMPY[ids.dtype]).reshape(tokens, topk)
        rows = bytes_of(x).reshape(tokens, wire.row)
        packed = encode(widen(rows, wire.dtype)) if wire.fp8 else rows
        self._settle(timeout)
        goes = self._goes = sent(named[:tokens].astype(np.int64), size, experts)
        for block, at in zip(self._blocks, goes.tokens, strict=True):
            block[: named.nbytes] = named.reshape(-1).view(np.uint8)
            block[head:].reshape(most, wire.packed)[: len(at), : wire.sent] = packed[at]
        self._put(
            self._places.block(rank, turn), list(self._blocks), [head + len(at) * wire.packed for at in goes.tokens]
        )
        self._comm.allreduce(self._word, timeout=timeout)
        self._arrivals.wait(timeout)
        self._arrivals.dispatches += 1
        blocks = self._memory[turn * self._places.odd :][: self._places.odd].reshape(size, -1)
        theirs = np.ascontiguousarray(blocks[:, : named.nbytes]).view(np.int32).reshape(size, most, topk)
        self._came = ((theirs >= 0) & (theirs // experts == rank)).any(axis=2)
        found = self._grouped = grouped(theirs.reshape(-1, topk).astype(np.int64), rank * experts, experts)
        source = found.rows // most
        at = (self._came.cumsum(axis=1) - 1)[source, found.rows % most]
        came = blocks[:, head:].reshape(size, most, wire.packed)[source, at]
        into = bytes_of(self._received).reshape(experts, size * most, wire.row)
        got = narrow(decode(came, wire.hidden), wire.dtype) if wire.fp8 else came[:, : wire.row]
        ends = np.cumsum(found.counts)
        for expert, (end, count) in enumerate(zip(ends, found.counts, strict=True)):
            into[expert, :count] = got[end - count : end]
        bytes_of(self._counts).view(NUMPY[self._counts.dtype])[:] = found.counts

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
        self._settle(timeout)
        here = np.flatnonzero(self._came)
        factors = self._factors[:, : most * topk].reshape(size * most, topk)[here]
        firsts = np.cumsum(found.counts) - found.counts  # of each expert's, among all
        owner = np.repeat(np.arange(experts), found.counts)
        slots = owner * size * most + np.arange(len(owner)) - firsts[owner]
        places = np.where(found.places < 0, -1, np.append(slots, -1)[found.places])[here]
        rows = bytes_of(made).reshape(-1, wire.row)
        self._parts = np.empty((len(here), wire.stride), np.uint8)
        sum_rows(wire, lambda at: rows[at], places, factors, self._parts)
        parts = np.split(self._parts, np.cumsum(self._came.sum(axis=1))[:-1])
        self._put(self._places.sums(self._comm.rank), parts, [part.nbytes for part in parts])
        self._arrivals.wait(timeout)
        table = np.full((tokens, self._goes.width), -1, np.int64)
        for peer, (at, column) in enumerate(zip(self._goes.tokens, self._goes.columns, strict=True)):
            table[at, column] = peer * most + np.arange(len(at))
        sums = self._memory[self._places.sums(0) :].reshape(size * most, wire.stride)
        sum_rows(wire, lambda at: sums[at], table, None, bytes_of(to).reshape(tokens, wire.row))

    def _put(self, to: int, parts: list[Bytes], lengths: list[int]) -> None:
        """So many bytes of what is for each rank to there in its window; each rank begins with another one."""
        size, rank = self._comm.size, self._comm.rank
        for peer in ((rank + step) % size for step in range(1, size)):
            data = parts[peer].reshape(-1)[: lengths[peer]]
            self._works.append(self._window.put(data, peer, to, signal=rank, async_op=True))
        self._memory[to : to + lengths[rank]] = parts[rank].reshape(-1)[: lengths[rank]]

    def _settle(self, timeout: float | None) -> None:
        """Wait until what is put may be written again."""
        for work in self._works:
            work.wait(timeout)
        self._works.clear()

    def close(self) -> None:
        """Give the memory back."""
        self._window.close()
