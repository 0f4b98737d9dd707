"""The throughput form among any ranks: hosts make tables of the routes, and tokens are put into windows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .. import Communicator, DType
from ..calls.buffers import Buffer, read_buffer
from ..runtime.results import like
from .headers import Headers
from .put_rows import Sizes
from .routing import Column, Grouped, Sent, grouped, sent
from .rows import Rows, bytes_of
from .way import NUMPY, Dispatched


class _Route(NamedTuple):
    sent: Sent
    grouped: Grouped
    came: list[int]  # tokens, by rank


class ByWindows:
    """See `way.Way`. A rank has a window of what ranks tell each other, and one where its tokens are."""

    def __init__(self, comm: Communicator, sizes: Sizes, rows: Rows, timeout: float | None) -> None:
        self._comm, self._sizes, self._rows = comm, sizes, rows
        self._headers = Headers(comm, sizes.most, sizes.topk, timeout)
        self._arrived = [0] * comm.size  # puts of tokens, by rank
        self._window = comm.window(rows.window, signals=comm.size, timeout=timeout)

    def dispatch(self, call: Dispatched, timeout: float | None) -> tuple[Any, Any, list[int], Any]:
        size, rank, rows = self._comm.size, self._comm.rank, self._rows
        wire, most, _, own = self._sizes
        rows.settle()
        goes = sent(call.ids, size, own)
        packed = rows.pack(call.source, len(call.ids), call.stream)
        here = [call.ids[at].astype(np.int32) for at in goes.tokens]
        told = self._headers.exchange("dispatch", call.number, here, timeout)
        came = [len(each) for each in told]
        self._move(packed, [at * wire.stride for at in goes.tokens], wire.sent, came, call.stream, timeout)
        found = grouped(np.concatenate(told).astype(np.int64), rank * own, own)
        places = [peer * most + np.arange(n) for peer, n in enumerate(came)]
        places[rank] = size * most + goes.tokens[rank]
        received = like(call.x, (len(found.rows), wire.hidden))
        offsets = np.concatenate(places)[found.rows] * wire.stride
        rows.unpack(offsets, read_buffer(received, "received", writable=True), call.stream)
        counts = like(call.like_ids, (own,))
        into = read_buffer(counts, "counts", writable=True)
        rows.write(into, found.counts.astype(NUMPY[into.dtype]), call.stream)
        return received, counts, found.counts.tolist(), _Route(goes, found, came)

    def combine(
        self, source: Buffer, weights: Buffer | None, into: Buffer, tokens: int, number: int, route: Any,
        stream: int | None, timeout: float | None,
    ) -> None:  # fmt: skip
        assert isinstance(route, _Route)
        goes, taken, came = route
        size, rank, rows = self._comm.size, self._comm.rank, self._rows
        wire, most, topk, _ = self._sizes
        factors = None if weights is None else self._on_host(weights, stream).reshape(tokens, topk)
        rows.settle()
        empty = np.empty((0, topk), np.int32)
        given = [empty if factors is None else factors[at].view(np.int32) for at in goes.tokens]
        told = self._headers.exchange("combine", number, given, timeout)
        ones = np.float32(1).view(np.int32)
        theirs = [each if len(each) else np.full((n, topk), ones) for n, each in zip(came, told, strict=True)]
        offsets = np.where(taken.places < 0, -1, taken.places * wire.row)
        packed = rows.weigh(source, offsets, np.concatenate(theirs).view(np.float32), stream)
        starts = np.cumsum([0, *came])
        parts = [(starts[peer] + np.arange(n)) * wire.stride for peer, n in enumerate(came)]
        self._move(packed, parts, wire.row, [len(at) for at in goes.tokens], stream, timeout)
        found = np.full((tokens, goes.width), -1, np.int64)
        for peer, (at, column) in enumerate(zip(goes.tokens, goes.columns, strict=True)):
            first = peer * most if peer != rank else size * most + starts[rank]
            found[at, column] = (first + np.arange(len(at))) * wire.stride
        rows.add(found, into, stream)

    def close(self) -> None:
        for each in (self._headers, self._window, self._rows):
            each.close()

    def _on_host(self, weights: Buffer, stream: int | None) -> Any:
        """What an array holds after what is on the stream."""
        here = self._comm._core.gpus.on_host(weights, stream)
        assert here is not None, "the stream is not captured"
        return bytes_of(here).view(NUMPY[DType.FLOAT32]).copy()

    def _move(
        self, packed: Buffer, offsets: list[Column], nbytes: int, came: list[int], stream: int | None,
        timeout: float | None,
    ) -> None:  # fmt: skip
        """Put rows of `packed`, so many bytes from `offsets` on, to each rank, and wait for those that come here."""
        window, size, rank = self._window, self._comm.size, self._comm.rank
        works = []
        for step in range(1, size):  # each begins with another one
            peer = (rank + step) % size
            if (n := len(offsets[peer])) > 0:
                into = (rank * self._sizes.most + np.arange(n)) * self._sizes.wire.stride
                works.append(window.put(packed, peer, into, src_offset=offsets[peer], count=nbytes, signal=rank,
                                        stream=stream, async_op=True))  # fmt: skip
        for peer, n in enumerate(came):
            if peer != rank and n > 0:
                self._arrived[peer] += 1
                window.wait_signal(peer, self._arrived[peer], timeout=timeout)
        for work in works:
            work.wait(timeout)
