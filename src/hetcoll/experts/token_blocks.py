"""Where GPUs' tokens lie between the kernels of ``tokens.h``, and how ranks get to see each other's.

Where all GPUs see each other's memory (`SeenBlocks`), a rank offers its tokens in a window, and the others read what is
for them; a small all-reduce before that is the barrier. Elsewhere (`SentBlocks`) all-to-alls carry blocks of a fixed
size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from .. import Communicator
from ..calls.buffers import Buffer
from ..gpu.array import DeviceArray
from .few import Sizes

if TYPE_CHECKING:
    from ..runtime.one_sided import Window
    from ..vendors.devices.base import Device

_CALLS = 8  # that a barrier tells from each other


class Blocks(Protocol):
    """Of one object of experts. The methods bring to all ranks what the kernels before them on the stream have written.

    `call` says which call of which layout it is of.
    """

    lists: list[list[int]]
    """`to`, `from`, `weights` and `came` of ``arguments.h``: addresses by rank."""
    odd: int
    given: Buffer
    """Where this rank's weights belong."""
    parts: int
    """Where this rank writes what its experts made of the tokens that came."""

    def tokens(self, call: int, stream: int, timeout: float | None) -> None: ...

    def weights(self, call: int, stream: int, timeout: float | None) -> None: ...

    def sums(self, call: int, stream: int, timeout: float | None) -> None: ...

    def close(self) -> None: ...


class SeenBlocks:
    """In a window of each rank: two blocks of tokens by turns, weights, and sums of each rank's tokens."""

    def __init__(
        self, comm: Communicator, device: Device, sizes: Sizes, memory: DeviceArray, window: Window, stream: int,
        timeout: float | None,
    ) -> None:  # fmt: skip
        self._comm, self._window = comm, window
        weights, parts = 2 * sizes.block, 2 * sizes.block + sizes.head
        seen = {**window.mapped, comm.rank: memory.ptr}
        bases = [seen[rank] for rank in range(comm.size)]
        self.given, self.parts, self.odd = memory.buffer(weights, sizes.head), memory.ptr + parts, sizes.block
        mine = parts + comm.rank * sizes.rows
        self.lists = [[memory.ptr] * comm.size, bases, [at + weights for at in bases], [at + mine for at in bases]]
        self._words = DeviceArray.of(device, np.zeros(_CALLS, np.int32))
        for call in range(_CALLS):  # no call draws a plan, which no graph could capture
            self._barrier(call, stream, timeout)

    @classmethod
    def offer(
        cls, comm: Communicator, device: Device, sizes: Sizes, stream: int, timeout: float | None
    ) -> SeenBlocks | None:
        """By all ranks together. None where some GPU does not see all others' windows."""
        memory = DeviceArray(device, 2 * sizes.block + sizes.head + comm.size * sizes.rows, "uint8")
        window = comm.window(memory.buffer(), signals=0, timeout=timeout)
        if len(window.mapped) == comm.size - 1:
            return cls(comm, device, sizes, memory, window, stream, timeout)
        window.close()
        return None

    def _barrier(self, call: int, stream: int, timeout: float | None) -> None:
        """What comes on the stream later is after what all ranks had on theirs. It has as many words as the number of
        the call says: so ranks that are in different calls hear of it as those of different all-reduces do."""
        self._comm.allreduce(self._words.buffer(0, 1 + call % _CALLS), stream=stream, timeout=timeout)

    tokens = weights = sums = _barrier

    def close(self) -> None:
        self._window.close()


class SentBlocks:
    """In this rank's memory alone: what is sent, and what came."""

    odd = 0

    def __init__(self, comm: Communicator, device: Device, sizes: Sizes) -> None:
        self._comm, size = comm, comm.size
        self._sent, self._blocks = (DeviceArray.of(device, np.zeros(size * sizes.block, np.uint8)) for _ in range(2))
        self._packed, self._sums = (DeviceArray.of(device, np.zeros(size * sizes.rows, np.uint8)) for _ in range(2))
        self._own, self._factors = (DeviceArray(device, n * sizes.head, "uint8") for n in (1, size))
        self.given, self.parts = self._own.buffer(), self._packed.ptr
        rows = ((self._sent, sizes.block), (self._blocks, sizes.block), (self._factors, sizes.head),
                (self._sums, sizes.rows))  # fmt: skip
        self.lists = [[array.ptr + rank * nbytes for rank in range(size)] for array, nbytes in rows]

    def tokens(self, call: int, stream: int, timeout: float | None) -> None:
        self._comm.alltoall(self._sent, self._blocks, stream=stream, timeout=timeout)

    def weights(self, call: int, stream: int, timeout: float | None) -> None:
        self._comm.allgather(self._own, self._factors, stream=stream, timeout=timeout)

    def sums(self, call: int, stream: int, timeout: float | None) -> None:
        self._comm.alltoall(self._packed, self._sums, stream=stream, timeout=timeout)

    def close(self) -> None:
        """Nothing but memory is held."""
