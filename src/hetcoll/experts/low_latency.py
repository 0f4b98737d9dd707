"""The low-latency form of dispatch and combine: for decoding, with results of fixed shapes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import ArgumentError, BufferTypeError, DType
from ..calls.buffers import Buffer, read_buffer
from ..runtime.results import like
from .common import Common
from .few import Few, HostFew
from .put_rows import Sizes
from .routing import check_ids
from .rows import bytes_of

_WHY = ", since not all ranks are GPUs of one host"


@dataclass(frozen=True)
class LowLatencyLayout:
    """What `LowLatencyExperts.combine` needs of a dispatch."""

    counts: Any
    """Of tokens, by expert of this rank: an array like `topk_ids`, where that is. Of all dispatches the same array."""
    _of: object = field(repr=False)
    _number: int = field(repr=False)
    _tokens: int = field(repr=False)


class LowLatencyExperts(Common):
    """As `Experts`, for few tokens: what a dispatch gives has room for all that may come, and only the device knows how
    many have. On GPUs no call waits on the host.

    Where all ranks are GPUs of one host, each reads its tokens where the others offer them: the routed ones, each once.
    A CUDA or HIP graph may capture the calls. Elsewhere ids, the routed tokens and their sums are put into windows, by
    counts that are read late. For these a rank with a GPU pins memory of the host (``HETCOLL_PINNED_BYTES``), with
    room for all that may come and go, and twice for tokens; an `InitError` on all ranks where one has none.

    The first dispatch takes the memory, and no graph captures it. Expert ids on a GPU that are out of range are none.
    """

    _few: Few | None = None
    _received: Any = None
    _counts: Any = None

    def dispatch(
        self, x: Any, topk_ids: Any, *, stream: Any = None, timeout: float | None = None
    ) -> tuple[Any, LowLatencyLayout]:
        """As `Experts.dispatch`. `topk_ids` lies where `x` is, and has the same type in all calls.

        Returns an array like `x` of [experts of this rank, ranks x max_tokens, hidden]: of each expert its tokens, by
        the rank and row that they are from; what is behind them is undefined. It is the same array each time, so
        the next dispatch writes over it.
        """
        source, ids, tokens = self._tokens(x, topk_ids)
        few = self._few
        handle = self._begin(
            source,
            "x",
            ids,
            "topk_ids",
            stream,
            timeout,
            captured=few is not None and few.direct,
            why=" at the first dispatch" if few is None else _WHY,
        )
        if (
            self._counts is not None
            and (wanted := read_buffer(self._counts, "counts", writable=True).dtype) != ids.dtype
        ):
            raise BufferTypeError(f"topk_ids: wanted {wanted.label}, as before, got {ids.dtype.label}")
        if source.device == "cpu":
            numbers = bytes_of(ids).view(np.int32 if ids.dtype is DType.INT32 else np.int64)
            check_ids(numbers.astype(np.int64).reshape(tokens, self.topk), self.num_experts)
        with self._running(refuses=few is not None):
            if few is None:
                few = self._open(x, topk_ids, source, handle, timeout)
            few.dispatch(source, ids, tokens, handle, timeout)
        layout = LowLatencyLayout(self._counts, self._layouts, self._dispatched, tokens)
        self._dispatched += 1
        return self._received, layout

    def combine(
        self, expert_out: Any, layout: LowLatencyLayout, topk_weights: Any = None, *, out: Any = None,
        stream: Any = None, timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """As `Experts.combine`, of what the last dispatch gave, with the same bits; any number of times.

        The result is written to `out`, where there is one, which a graph needs unless its library makes arrays
        while it captures.
        """
        self._check_open()
        few, shape = self._few, (self.num_local_experts, self._comm.size * self.max_tokens, self.hidden)
        if (
            few is None
            or not isinstance(layout, LowLatencyLayout)
            or layout._of is not self._layouts
            or layout._number != self._dispatched - 1
        ):
            raise ArgumentError("layout: wanted that of the last dispatch, got another")
        source, weights = self._made(expert_out, topk_weights, shape, layout._tokens)
        handle = self._begin(
            source, "expert_out", weights, "topk_weights", stream, timeout, captured=few.direct, why=_WHY
        )
        result = like(expert_out, (layout._tokens, self.hidden)) if out is None else out
        into = read_buffer(result, "out", writable=True)
        if (into.dtype, into.place, into.count) != (self.dtype, source.place, layout._tokens * self.hidden):
            wanted = f"{layout._tokens * self.hidden} elements of {self.dtype.label} on {source.place}"
            raise BufferTypeError(f"out: wanted {wanted}, got {into.count} of {into.dtype.label} on {into.place}")
        if into.nbytes and into.overlaps(source):  # of several rounds the first ones would write what others read
            raise ArgumentError("out: wanted memory apart from expert_out")
        with self._running(refuses=True):
            few.combine(source, weights, into, layout._tokens, handle, timeout)
        return result

    def close(self) -> None:
        """Give the memory back. Local: other ranks' calls must be over, and no graph with these calls is replayed."""
        super().close()
        if self._few is not None:
            self._few.close()
        self._few = self._received = self._counts = None

    def _open(self, x: Any, topk_ids: Any, source: Buffer, stream: int | None, timeout: float | None) -> Few:
        """At the first dispatch, on all ranks together."""
        own, room = self.num_local_experts, self._comm.size * self.max_tokens
        received, counts = like(x, (own, room, self.hidden)), like(topk_ids, (own,))
        into, numbers = (read_buffer(each, "received", writable=True) for each in (received, counts))
        sizes = Sizes(self._wire, self.max_tokens, self.topk, own)
        kinds = self._comm._core.meet("the first dispatch()", source.device.encode(), timeout)
        if source.device == "cpu":
            few: Few = HostFew(self._comm, sizes, into, numbers, timeout)
        else:
            from ..gpu.device_of import device_of
            from .few_on_gpu import GpuFew

            few = GpuFew(self._comm, device_of(source), sizes, into, numbers, stream or 0, b"cpu" not in kinds, timeout)
        self._few, self._received, self._counts, self._place = few, received, counts, source.place
        return few
