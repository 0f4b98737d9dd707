"""Few tokens between ranks, on a GPU (``vendors/devices/kernels/tokens.h``): all of a call is on one stream, and the
host waits for none of it.

Where all GPUs see each other's memory, a rank offers its tokens in a window, and the others read what is for them; a
small all-reduce before that is the barrier. Elsewhere an all-to-all carries blocks of a fixed size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .. import Communicator
from ..calls.buffers import Buffer
from ..gpu.array import DeviceArray
from ..vendors.devices.kernels.source import PLACE_TOKENS, tokens_names
from ..vendors.devices.kernels.table import Tokens
from .few import Sizes

if TYPE_CHECKING:
    from ..runtime.one_sided import Window
    from ..vendors.devices.base import Device

_THREADS, _PLACING = 256, 512
_BLOCKS = 8  # of a multiprocessor


class GpuFew:
    """Those of a rank with its tokens on `device`. `received` and `counts` are where dispatches write."""

    def __init__(
        self, comm: Communicator, device: Device, sizes: Sizes, received: Buffer, counts: Buffer, stream: int,
        alike: bool, timeout: float | None,
    ) -> None:  # fmt: skip
        """`alike`: all ranks have GPUs of one vendor."""
        self._comm, self._device, self._sizes, self._received = comm, device, sizes, received
        table, size, wire = device.kernels(), comm.size, sizes.wire
        self._place = table.function(PLACE_TOKENS)
        self._pack, self._spread, self._weigh, self._sum = map(table.function, tokens_names(wire.dtype))
        self._window: Window | None = None
        places = self._offer(timeout) if alike else None
        self.direct = places is not None
        """Whether GPUs read each other's memory."""
        self._lists = DeviceArray.of(device, np.array(places or self._rooms(), np.int64))
        self._ids, self._places = (DeviceArray(device, n * sizes.most * sizes.topk, "int32") for n in (1, size))
        self._state = DeviceArray.of(device, np.zeros(2, np.uint32))
        self._ones = DeviceArray.of(device, np.ones(sizes.most * sizes.topk, np.float32))
        self._token = DeviceArray.of(device, np.zeros(1, np.int32))
        self._common = {
            "own": self._ids.ptr, "places": self._places.ptr, "counts": counts.ptr, "parts": self._parts.ptr,
            "state": self._state.ptr, "odd": sizes.block if self.direct else 0, "stride": wire.stride,
            "hidden": wire.hidden, "most": sizes.most, "columns": sizes.topk, "size": size, "rank": comm.rank,
            "experts": sizes.experts, "id_bytes": counts.dtype.itemsize, "fp8": int(wire.fp8),
            **{name: self._lists.ptr + 8 * size * i for i, name in enumerate(("to", "from_", "weights", "came"))},
        }  # fmt: skip
        self._last: int | None = None
        self._done = device.event()
        if self.direct:
            self._barrier(stream, timeout)  # a graph may capture it once it was made

    def _offer(self, timeout: float | None) -> list[list[int]] | None:
        """A window of two blocks by turns, weights, and sums of each rank's tokens. Returns the lists of `Tokens`: to
        where this rank writes, from where it reads; None where some GPU does not see all others' windows."""
        comm, sizes = self._comm, self._sizes
        weights, parts = 2 * sizes.block, 2 * sizes.block + sizes.head
        memory = DeviceArray(self._device, parts + comm.size * sizes.rows, "uint8")
        self._window = comm.window(memory.buffer(), signals=0, timeout=timeout)
        if len(self._window.mapped) < comm.size - 1:
            self._window.close()
            return None
        seen = {**self._window.mapped, comm.rank: memory.ptr}
        bases = [seen[rank] for rank in range(comm.size)]
        self._given, self._parts = memory.buffer(weights, sizes.head), memory.buffer(parts)
        mine = parts + comm.rank * sizes.rows
        return [[memory.ptr] * comm.size, bases, [at + weights for at in bases], [at + mine for at in bases]]

    def _rooms(self) -> list[list[int]]:
        """The same where all-to-alls carry it: what is sent, and what came."""
        device, size, sizes = self._device, self._comm.size, self._sizes
        self._sent, self._blocks = (DeviceArray.of(device, np.zeros(size * sizes.block, np.uint8)) for _ in range(2))
        self._packed, self._sums = (DeviceArray.of(device, np.zeros(size * sizes.rows, np.uint8)) for _ in range(2))
        self._own, self._factors = (DeviceArray(device, n * sizes.head, "uint8") for n in (1, size))
        self._given, self._parts = self._own.buffer(), self._packed.buffer()
        rows = ((self._sent, sizes.block), (self._blocks, sizes.block), (self._factors, sizes.head),
                (self._sums, sizes.rows))  # fmt: skip
        return [[array.ptr + rank * nbytes for rank in range(size)] for array, nbytes in rows]

    def dispatch(self, x: Buffer, ids: Buffer, tokens: int, stream: int | None, timeout: float | None) -> None:
        on, sizes = self._follow(stream), self._sizes
        words = {"x": x.ptr, "ids": ids.ptr, "tokens": tokens, "received": self._received.ptr}
        self._run(self._pack, max(1, tokens), _THREADS, on, words)
        if self.direct:
            self._barrier(on, timeout)
        else:
            self._comm.alltoall(self._sent, self._blocks, stream=on, timeout=timeout)
        self._run(self._place, sizes.experts, _PLACING, on, words)
        self._run(self._spread, self._some(self._comm.size * sizes.most), _THREADS, on, words)
        self._end(on)

    def combine(
        self, made: Buffer, weights: Buffer | None, to: Buffer, tokens: int, stream: int | None, timeout: float | None
    ) -> None:
        on, sizes = self._follow(stream), self._sizes
        words: dict[str, int] = {"tokens": tokens, "received": made.ptr, "result": to.ptr}
        given = self._ones.buffer() if weights is None else weights
        if given.nbytes:
            self._device.copy(self._given.ptr, given.ptr, given.nbytes, on)
        if self.direct:
            self._barrier(on, timeout)
        else:
            self._comm.allgather(self._own, self._factors, stream=on, timeout=timeout)
        self._run(self._weigh, self._some(self._comm.size * sizes.most), _THREADS, on, words)
        if self.direct:
            self._barrier(on, timeout)
        else:
            self._comm.alltoall(self._packed, self._sums, stream=on, timeout=timeout)
        self._run(self._sum, self._some(tokens), _THREADS, on, words)
        self._end(on)

    def close(self) -> None:
        self._device.synchronize_event(self._done)
        if self._window is not None:
            self._window.close()
        self._device.destroy_event(self._done)

    def _barrier(self, stream: int, timeout: float | None) -> None:
        """What comes on the stream later is after what all ranks had on theirs."""
        self._comm.allreduce(self._token, stream=stream, timeout=timeout)

    def _some(self, rows: int) -> int:
        return min(max(rows, 1), _BLOCKS * self._device.multiprocessors)

    def _run(self, function: int, blocks: int, threads: int, stream: int, words: dict[str, int]) -> None:
        self._device.launch(function, blocks, threads, [bytes(Tokens(**self._common, **words))], stream)

    def _follow(self, stream: int | None) -> int:
        """Calls on several streams are one after another, too; a graph's are as the graph has them."""
        on = stream or 0
        if self._last not in (None, on) and not self._device.capturing(on):
            self._device.wait(on, self._done)
        return on

    def _end(self, stream: int) -> None:
        if not self._device.capturing(stream):
            self._device.record(self._done, stream)
            self._last = stream
