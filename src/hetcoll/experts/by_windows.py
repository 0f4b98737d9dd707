"""The throughput form in the host's memory: tables of the routes, and puts into windows. Other ranks may be GPUs."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .. import Communicator, DType
from ..calls.buffers import Buffer, read_buffer
from ..runtime.results import like
from .exchange import Exchange
from .put_rows import Sizes
from .routing import Grouped, Sent, grouped, sent
from .rows import HostRows, bytes_of
from .way import NUMPY, Dispatched


class _Route(NamedTuple):
    sent: Sent
    grouped: Grouped
    came: list[int]  # tokens, by rank


class ByWindows:
    """See `way.Way`. A rank has a window of what ranks tell each other, and one where its tokens are."""

    def __init__(self, comm: Communicator, sizes: Sizes, timeout: float | None) -> None:
        self._comm, self._sizes, self._rows = comm, sizes, HostRows(sizes.wire, comm.size * sizes.most)
        self._exchange = Exchange(comm, sizes, self._rows.window, timeout)

    def dispatch(self, call: Dispatched, timeout: float | None) -> tuple[Any, Any, list[int], Any]:
        size, rank, rows = self._comm.size, self._comm.rank, self._rows
        wire, most, _, own = self._sizes
        goes = sent(call.ids, size, own)
        packed = rows.pack(call.source, len(call.ids))
        here = [call.ids[at].astype(np.int32) for at in goes.tokens]
        told = self._exchange.headers.exchange("dispatch", call.number, here, timeout)
        came = [len(each) for each in told]
        self._exchange.move(packed, [at * wire.stride for at in goes.tokens], wire.sent, came, None, timeout)
        found = grouped(np.concatenate(told).astype(np.int64), rank * own, own)
        places = [peer * most + np.arange(n) for peer, n in enumerate(came)]
        places[rank] = size * most + goes.tokens[rank]
        received = like(call.x, (len(found.rows), wire.hidden))
        offsets = np.concatenate(places)[found.rows] * wire.stride
        rows.unpack(offsets, read_buffer(received, "received", writable=True))
        counts = like(call.like_ids, (own,))
        into = read_buffer(counts, "counts", writable=True)
        bytes_of(into).view(NUMPY[into.dtype])[:] = found.counts
        return received, counts, found.counts.tolist(), _Route(goes, found, came)

    def combine(
        self, source: Buffer, weights: Buffer | None, into: Buffer, tokens: int, number: int, route: Any,
        stream: int | None, timeout: float | None,
    ) -> None:  # fmt: skip
        assert isinstance(route, _Route)
        goes, taken, came = route
        size, rank, rows = self._comm.size, self._comm.rank, self._rows
        wire, most, topk, _ = self._sizes
        factors = None if weights is None else bytes_of(weights).view(NUMPY[DType.FLOAT32]).reshape(tokens, topk)
        empty = np.empty((0, topk), np.int32)
        given = [empty if factors is None else factors[at].view(np.int32) for at in goes.tokens]
        told = self._exchange.headers.exchange("combine", number, given, timeout)
        ones = np.float32(1).view(np.int32)
        theirs = [each if len(each) else np.full((n, topk), ones) for n, each in zip(came, told, strict=True)]
        offsets = np.where(taken.places < 0, -1, taken.places * wire.row)
        packed = rows.weigh(source, offsets, np.concatenate(theirs).view(np.float32))
        starts = np.cumsum([0, *came])
        parts = [(starts[peer] + np.arange(n)) * wire.stride for peer, n in enumerate(came)]
        self._exchange.move(packed, parts, wire.row, [len(at) for at in goes.tokens], None, timeout)
        found = np.full((tokens, goes.width), -1, np.int64)
        for peer, (at, column) in enumerate(zip(goes.tokens, goes.columns, strict=True)):
            first = peer * most if peer != rank else size * most + starts[rank]
            found[at, column] = (first + np.arange(len(at))) * wire.stride
        rows.add(found, into)

    def close(self) -> None:
        self._exchange.close()
        self._rows.close()
