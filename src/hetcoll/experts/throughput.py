"""The throughput form of dispatch and combine: for prefill and training, by counts that the host knows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import ArgumentError
from ..calls.buffers import Buffer, read_buffer
from ..runtime.results import like
from .by_windows import ByWindows
from .common import Common
from .put_rows import Sizes
from .routing import check_ids
from .rows import bytes_of
from .way import NUMPY, Dispatched, Way


@dataclass(frozen=True)
class ExpertLayout:
    """Where the tokens of one `Experts.dispatch` went, and where those that came are from."""

    counts: Any
    """Of tokens, by expert of this rank: an array like `topk_ids`, where that is."""
    num_tokens_per_expert: list[int]
    """The same on the host."""
    _of: object = field(repr=False)
    _number: int = field(repr=False)
    _tokens: int = field(repr=False)
    _route: Any = field(repr=False)  # of the way that tokens took


class Experts(Common):
    """The experts of all ranks of a communicator, as many on each, in the order of ranks. Collective, as its calls are:
    all ranks make the same ones in the same order.

    A rank dispatches up to `max_tokens` tokens of `hidden` elements, each to up to `topk` experts. `dtype` is float32,
    float16 or bfloat16. With `fp8` tokens travel to experts as e4m3 with a float32 scale for 128 elements. Memory for
    ``size x max_tokens`` tokens is taken at the first dispatch where its `x` is, on a GPU up to twice as much; between
    GPUs that do not see each other's, up to an eighth of what may be pinned (``HETCOLL_PINNED_BYTES``), in which tokens
    go in as many rounds as they need.

    Where all ranks are GPUs of one host they read each other's tokens: in each other's memory, or in the host's where
    GPUs do not see that. Elsewhere tokens are put into windows.

    After an error that is no `ArgumentError` or `BufferTypeError` the object is good for `close` only.
    """

    _way: Way | None = None

    def dispatch(
        self, x: Any, topk_ids: Any, *, stream: Any = None, timeout: float | None = None
    ) -> tuple[Any, ExpertLayout]:
        """Send each row of `x`, [tokens, hidden], to the ranks of its experts: `topk_ids`, [tokens, topk] of int32 or
        int64, -1 for none. An expert that is named twice gets the token once; what it makes of it counts twice.

        Returns the tokens of this rank's experts, an array like `x` of [those, hidden], by expert and then by the rank
        and row that they are from; and what `combine` needs. `x` and `topk_ids` lie on the same device in all calls.

        The host waits until all tokens are there. On a GPU `x` is read after what is on `stream` (by default the
        current one of its library), and the result is written on it. `stream` is ignored for host buffers, as in
        `Communicator`.

        ArgumentError or BufferTypeError, before anything is sent, for other shapes, types or experts; else as
        `Window.put`. `CollectiveMismatchError` where another rank is in another call.
        """
        source, named, tokens = self._tokens(x, topk_ids)
        handle = self._begin(source, "x", named, "topk_ids", stream, timeout)
        here = self._comm._core.gpus.on_host(named, handle)
        assert here is not None, "the stream is not captured"
        ids = bytes_of(here).view(NUMPY[named.dtype]).reshape(tokens, self.topk).astype(np.int64)
        check_ids(ids, self.num_experts)
        with self._running():
            way = self._way or self._open(source, handle, timeout)
            call = Dispatched(x, topk_ids, source, named, ids, self._dispatched, handle)
            received, counts, found, route = way.dispatch(call, timeout)
        layout = ExpertLayout(counts, found, self._layouts, self._dispatched, tokens, route)
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
        self._check_open()
        way = self._way
        if way is None or not isinstance(layout, ExpertLayout) or layout._of is not self._layouts:
            raise ArgumentError("layout: wanted one of these experts' dispatch, got another")
        shape = (sum(layout.num_tokens_per_expert), self.hidden)
        source, weights = self._made(expert_out, topk_weights, shape, layout._tokens)
        handle = self._begin(source, "expert_out", weights, "topk_weights", stream, timeout)
        result = like(expert_out, (layout._tokens, self.hidden))
        into = read_buffer(result, "result", writable=True)
        with self._running():
            way.combine(source, weights, into, layout._tokens, layout._number, layout._route, handle, timeout)
        return result

    def close(self) -> None:
        """Give the memory back. Local: other ranks' calls must be over. On a GPU it waits for what was begun here."""
        super().close()
        if self._way is not None:
            self._way.close()
        self._way = None

    def _open(self, source: Buffer, stream: int | None, timeout: float | None) -> Way:
        """At the first dispatch, on all ranks together."""
        comm, sizes = self._comm, Sizes(self._wire, self.max_tokens, self.topk, self.num_local_experts)
        kinds = comm._core.meet("the first dispatch()", source.device.encode(), timeout)
        if source.device == "cpu":
            self._way, self._place = ByWindows(comm, sizes, timeout), source.place
            return self._way
        from ..gpu.device_of import device_of
        from .by_kernels import ByKernels
        from .token_blocks import Blocks, SeenBlocks
        from .window_blocks import WindowBlocks

        device = device_of(source)
        seen: Blocks | None = None if b"cpu" in kinds else SeenBlocks.offer(comm, device, sizes, stream or 0, timeout)
        blocks = seen or WindowBlocks(comm, device, sizes, timeout)
        self._way, self._place = ByKernels(comm, device, sizes, blocks), source.place
        return self._way
