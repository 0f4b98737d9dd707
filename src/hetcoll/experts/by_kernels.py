"""The throughput form on a GPU: kernels find the routes, the host waits for counts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import Communicator, DType
from ..calls.buffers import Buffer, read_buffer
from ..runtime.results import like
from .put_rows import Sizes
from .rows import bytes_of
from .token_blocks import Blocks, Route
from .token_kernels import Table, TokenKernels
from .way import Dispatched

if TYPE_CHECKING:
    from ..vendors.devices.base import Device


class ByKernels:
    """See `way.Way`."""

    def __init__(self, comm: Communicator, device: Device, sizes: Sizes, blocks: Blocks) -> None:
        self._comm, self._sizes, self._numbers = comm, sizes, bool(blocks.lists.tell)
        self._kernels = TokenKernels(comm, device, sizes, blocks)

    def dispatch(self, call: Dispatched, timeout: float | None) -> tuple[Any, Any, list[int], Any]:
        own, places, rows = Table.words(self._sizes, self._comm.size)
        kind, on = call.named.dtype, call.stream or 0
        counts = like(call.like_ids, (self._sizes.experts,))
        words = own + places + 1 + (rows if self._numbers else 0)
        kept = like(call.like_ids, (-(-4 * words // kind.itemsize),))
        memory, numbers = (read_buffer(each, "kept", writable=True) for each in (kept, counts))
        longest = replace(memory, ptr=memory.ptr + 4 * (own + places), count=1, dtype=DType.INT32)
        numbered = {"sent": longest.ptr + 4} if self._numbers else {"longest": longest.ptr}
        table = Table(memory.ptr, memory.ptr + 4 * own, numbers, dense=True, route=Route([], []), **numbered)
        self._kernels.place(call.source, call.named, len(call.ids), table, call.number, on, timeout)
        here = self._comm._core.gpus.on_host(numbers, on)
        self._comm._core.host.check_usable()  # what ends the wait may be a failure
        assert here is not None, "the stream is not captured"
        found = bytes_of(here).view(np.int32 if kind.itemsize == 4 else np.int64).tolist()
        received = like(call.x, (sum(found), self._sizes.wire.hidden))
        into, sent = read_buffer(received, "received", writable=True), (call.source, call.named, len(call.ids))
        rounds = 1
        if self._kernels.rounds > 1:
            rounds = self._kernels.rounds_of(int(bytes_of(self._comm._core.gpus.read(longest)).view(np.int32)[0]))
        self._kernels.spread(*sent, into, table, call.number, rounds, on, timeout)
        return received, counts, found, (kept, table, rounds)

    def combine(
        self, source: Buffer, weights: Buffer | None, into: Buffer, tokens: int, number: int, route: Any,
        stream: int | None, timeout: float | None,
    ) -> None:  # fmt: skip
        _, table, rounds = route
        self._kernels.combine(source, weights, into, tokens, table, number, rounds, stream or 0, timeout)

    def close(self) -> None:
        self._kernels.close()
