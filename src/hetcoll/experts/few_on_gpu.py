"""Few tokens between ranks, on a GPU: the host waits for nothing of a call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import Communicator
from ..calls.buffers import Buffer
from ..gpu.array import DeviceArray
from .put_rows import Sizes
from .token_blocks import Blocks, PutBlocks, SeenBlocks
from .token_kernels import Table, TokenKernels

if TYPE_CHECKING:
    from ..vendors.devices.base import Device


class GpuFew:
    """Those of a rank with its tokens on `device`. `received` and `counts` are where dispatches write."""

    def __init__(
        self, comm: Communicator, device: Device, sizes: Sizes, received: Buffer, counts: Buffer, stream: int,
        all_gpus: bool, timeout: float | None,
    ) -> None:  # fmt: skip
        """`all_gpus`: all ranks have one."""
        seen: Blocks | None = SeenBlocks.offer(comm, device, sizes, stream, timeout) if all_gpus else None
        self.direct = seen is not None
        self._kernels = TokenKernels(comm, device, sizes, seen or PutBlocks(comm, device, sizes, timeout))
        self._received = received
        self._own, self._places = (DeviceArray(device, n, "int32") for n in Table.words(sizes, comm.size)[:2])
        self._table = Table(self._own.ptr, self._places.ptr, counts, dense=False)

    def dispatch(self, x: Buffer, ids: Buffer, tokens: int, stream: int | None, timeout: float | None) -> None:
        on = stream or 0
        self._kernels.place(x, ids, tokens, self._table, 0, on, timeout)
        self._kernels.spread(x, ids, tokens, self._received, self._table, 0, self._kernels.rounds, on, timeout)

    def combine(
        self, made: Buffer, weights: Buffer | None, to: Buffer, tokens: int, stream: int | None, timeout: float | None
    ) -> None:
        kernels = self._kernels
        kernels.combine(made, weights, to, tokens, self._table, 0, kernels.rounds, stream or 0, timeout)

    def close(self) -> None:
        self._kernels.close()
