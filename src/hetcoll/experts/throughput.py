"""The throughput form of dispatch and combine: for prefill and training, by counts that the host knows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import ArgumentError, DType
from ..calls.buffers import Buffer, read_buffer
from ..runtime.results import like
from .common import Common
from .headers import Headers
from .routing import Column, Grouped, Sent, check_ids, grouped, sent
from .rows import HostRows, Rows, bytes_of

if TYPE_CHECKING:
    from ..runtime.one_sided import Window

_NUMPY = {DType.INT32: np.int32, DType.INT64: np.int64, DType.FLOAT32: np.float32}


@dataclass(frozen=True)
class ExpertLayout:
    """Where the tokens of one `Experts.dispatch` went, and where those that came are from."""

    counts: Any
    """Of tokens, by expert of this rank: an array like `topk_ids`, where that is."""
    num_tokens_per_expert: list[int]
    """The same on the host."""
    _number: int = field(repr=False)
    _tokens: int = field(repr=False)
    _sent: Sent = field(repr=False)
    _grouped: Grouped = field(repr=False)
    _came: list[int] = field(repr=False)  # tokens, by rank


class Experts(Common):
    """The experts of all ranks of a communicator, as many on each, in the order of ranks. Collective, as its calls are:
    all ranks make the same ones in the same order.

    A rank dispatches up to `max_tokens` tokens of `hidden` elements, each to up to `topk` experts. `dtype` is float32,
    float16 or bfloat16. With `fp8` tokens travel to experts as e4m3 with a float32 scale for 128 elements. Memory for
    ``size x max_tokens`` tokens is taken at the first dispatch where its `x` is, on a GPU twice as much.

    After an error that is no `ArgumentError` or `BufferTypeError` the object is good for `close` only.
    """

    _rows: Rows | None = None
    _window: Window | None = None
    _headers: Headers | None = None

    def dispatch(
        self, x: Any, topk_ids: Any, *, stream: Any = None, timeout: float | None = None
    ) -> tuple[Any, ExpertLayout]:
        """Send each row of `x`, [tokens, hidden], to the ranks of its experts: `topk_ids`, [tokens, topk] of int32 or
        int64, -1 for none. An expert that is named twice gets the token once; what it makes of it counts twice.

        Returns the tokens of this rank's experts, an array like `x` of [those, hidden], by expert and then by the rank
        and row that they are from; and what `combine` needs. `x` lies on the same device in all calls.

        The host waits until all tokens are there. On a GPU `x` is read after what is on `stream` (by default the
        current one of its library), and the result is written on it.

        ArgumentError or BufferTypeError, before anything is sent, for other shapes, types or experts; else as
        `Window.put`. `CollectiveMismatchError` where another rank is in another call.
        """
        source, named, tokens = self._tokens(x, topk_ids)
        handle = self._begin(source, "x", stream)
        ids = self._on_host(named, handle, (tokens, self.topk)).astype(np.int64)
        check_ids(ids, self.num_experts)
        with self._running():
            return self._dispatch(x, source, ids, topk_ids, handle, timeout)

    def _dispatch(
        self, x: Any, source: Buffer, ids: Column, like_ids: Any, stream: int | None, timeout: float | None
    ) -> tuple[Any, ExpertLayout]:
        size, rank, wire, own = self._comm.size, self._comm.rank, self._wire, self.num_local_experts
        rows = self._rows or self._open(source, timeout)
        rows.settle()
        goes = sent(ids, size, own)
        packed = rows.pack(source, len(ids), stream)
        headers = self._headers
        assert headers is not None, "it is there with the rows"
        told = headers.exchange("dispatch", self._dispatched, [ids[at].astype(np.int32) for at in goes.tokens], timeout)
        came = [len(each) for each in told]
        self._move(packed, [at * wire.stride for at in goes.tokens], wire.sent, came, stream, timeout)
        found = grouped(np.concatenate(told).astype(np.int64), rank * own, own)
        places = [peer * self.max_tokens + np.arange(n) for peer, n in enumerate(came)]
        places[rank] = size * self.max_tokens + goes.tokens[rank]
        received = like(x, (len(found.rows), wire.hidden))
        offsets = np.concatenate(places)[found.rows] * wire.stride
        rows.unpack(offsets, read_buffer(received, "received", writable=True), stream)
        counts = like(like_ids, (own,))
        into = read_buffer(counts, "counts", writable=True)
        rows.write(into, found.counts.astype(_NUMPY[into.dtype]), stream)
        layout = ExpertLayout(counts, found.counts.tolist(), self._dispatched, len(ids), goes, found, came)
        self._dispatched += 1
        return received, layout

    def combine(
        self, expert_out: Any, layout: ExpertLayout, topk_weights: Any = None, *, stream: Any = None,
        timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """Bring back what the experts made of the tokens of `layout`: `expert_out`, as `dispatch` returned them.

        Returns [tokens, hidden] like `expert_out`: for each token that this rank has dispatched the sum of its experts'
        rows, each times its weight: `topk_weights`, [tokens, topk] of float32 as in `topk_ids`, or None for 1. Each
        rank adds its experts' rows in the order of `topk_ids` in float32, from 0 on, and rounds the sum to the dtype;
        these are added in the order of ranks, in float32, and rounded. So the bits are the same run after run. A
        token of no expert is 0. A layout may be combined several times.
        """
        rows = self._rows
        if rows is None:
            raise ArgumentError("layout: wanted one of these experts' dispatch, got another")
        shape = (len(layout._grouped.rows), self.hidden)
        source, given = self._made(expert_out, topk_weights, shape, layout._tokens)
        handle = self._begin(source, "expert_out", stream)
        weights = None if given is None else self._on_host(given, handle, (layout._tokens, self.topk))
        with self._running():
            return self._combine(rows, expert_out, source, layout, weights, handle, timeout)

    def _combine(
        self, rows: Rows, expert_out: Any, source: Buffer, layout: ExpertLayout, weights: Any, stream: int | None,
        timeout: float | None,
    ) -> Any:  # fmt: skip
        rank, wire, goes, came = self._comm.rank, self._wire, layout._sent, layout._came
        rows.settle()
        empty = np.empty((0, self.topk), np.int32)
        given = [empty if weights is None else weights[at].view(np.int32) for at in goes.tokens]
        headers = self._headers
        assert headers is not None, "it is there with the rows"
        told = headers.exchange("combine", layout._number, given, timeout)
        ones = np.float32(1).view(np.int32)
        factors = [each if len(each) else np.full((n, self.topk), ones) for n, each in zip(came, told, strict=True)]
        places = layout._grouped.places
        offsets = np.where(places < 0, -1, places * wire.row)
        packed = rows.weigh(source, offsets, np.concatenate(factors).view(np.float32), stream)
        starts = np.cumsum([0, *came])
        parts = [(starts[peer] + np.arange(n)) * wire.stride for peer, n in enumerate(came)]
        self._move(packed, parts, wire.row, [len(at) for at in goes.tokens], stream, timeout)
        found = np.full((layout._tokens, goes.width), -1, np.int64)
        for peer, (at, column) in enumerate(zip(goes.tokens, goes.columns, strict=True)):
            first = peer * self.max_tokens if peer != rank else self._comm.size * self.max_tokens + starts[rank]
            found[at, column] = (first + np.arange(len(at))) * wire.stride
        result = like(expert_out, (layout._tokens, self.hidden))
        rows.add(found, read_buffer(result, "result", writable=True), stream)
        return result

    def close(self) -> None:
        """Give the memory back. Local: other ranks' calls must be over. On a GPU it waits for what was begun here."""
        super().close()
        for each in (self._headers, self._window, self._rows):
            if each is not None:
                each.close()
        self._headers = self._window = self._rows = None

    def _open(self, source: Buffer, timeout: float | None) -> Rows:
        """At the first dispatch, on all ranks together: windows of what ranks tell each other, and where this rank's
        tokens are."""
        most = self._comm.size * self.max_tokens
        if source.device == "cpu":
            self._rows = HostRows(self._wire, most)
        else:
            from ..gpu.device_of import device_of
            from .on_gpu import GpuRows

            self._rows = GpuRows(device_of(source), self._wire, most)
        self._place = source.place
        self._headers = Headers(self._comm, self.max_tokens, self.topk, timeout)
        self._arrived = [0] * self._comm.size  # puts of tokens, by rank
        self._window = self._comm.window(self._rows.window, signals=self._comm.size, timeout=timeout)
        return self._rows

    def _on_host(self, buffer: Buffer, stream: int | None, shape: tuple[int, ...]) -> Any:
        """What an array holds after what is on the stream."""
        here = self._comm._core.gpus.on_host(buffer, stream)
        assert here is not None, "the stream is not captured"
        return bytes_of(here).view(_NUMPY[buffer.dtype]).reshape(shape).copy()

    def _move(
        self, packed: Buffer, offsets: list[Column], nbytes: int, came: list[int], stream: int | None,
        timeout: float | None,
    ) -> None:  # fmt: skip
        """Put rows of `packed`, so many bytes from `offsets` on, to each rank, and wait for those that come here."""
        window, size, rank = self._window, self._comm.size, self._comm.rank
        assert window is not None
        works = []
        for step in range(1, size):  # each begins with another one
            peer = (rank + step) % size
            if (n := len(offsets[peer])) > 0:
                into = (rank * self.max_tokens + np.arange(n)) * self._wire.stride
                works.append(window.put(packed, peer, into, src_offset=offsets[peer], count=nbytes, signal=rank,
                                        stream=stream, async_op=True))  # fmt: skip
        for peer, n in enumerate(came):
            if peer != rank and n > 0:
                self._arrived[peer] += 1
                window.wait_signal(peer, self._arrived[peer], timeout=timeout)
        for work in works:
            work.wait(timeout)
