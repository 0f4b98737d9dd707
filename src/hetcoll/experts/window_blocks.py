"""Tokens of a GPU in the windows of `by_windows`, for many of them: kernels find which go where, and the host hears how
many, which it tells the others and puts.

What travels is what `by_windows` sends: ids of the tokens that come, these, weights and sums; so ranks without a GPU
may be among the others.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import Communicator
from ..calls.buffers import bytes_at
from ..gpu.array import DeviceArray
from .exchange import Exchange
from .put_rows import Sizes
from .token_blocks import Lists, Numbers, Route

if TYPE_CHECKING:
    from ..vendors.devices.base import Device

_Words = np.ndarray[Any, np.dtype[np.int32]]


class WindowBlocks:
    """See `token_blocks.Blocks`. Blocks hold rows that follow each other, of those tokens alone that go to a rank, or
    that came from one; so do the lists of ids, and of weights."""

    numbers: Numbers | None = None
    given: Sequence[int] = ()
    odd = 0

    def __init__(self, comm: Communicator, device: Device, sizes: Sizes, timeout: float | None) -> None:
        size, me, stride = comm.size, comm.rank, sizes.wire.stride
        self._device, self._sizes, self.room, self.packed = device, sizes, sizes.most, stride
        self._block = sizes.head + sizes.most * stride
        self._incoming = size * sizes.most * stride
        # The window is all of it, since what is put out of a window goes from GPU to GPU where that can be.
        memory = self._memory = DeviceArray(device, self._incoming + size * self._block, "uint8")
        self._words = DeviceArray(device, size * sizes.most * sizes.topk, "int32")
        # Of each rank: ids or weights that go there, and that came; and how many bytes its block has.
        shape = (2, size, sizes.most, sizes.topk)
        words = 4 * math.prod(shape)
        self._pinned = device.allocate_host(words + 8 * size)
        self._read = device.event()  # of what came
        self._end = weakref.finalize(self, _give_back, device, self._read, self._pinned)
        self._end.atexit = False  # the driver's own end takes it
        pinned = bytes_at(self._pinned, words + 8 * size)
        self._goes, self._came = pinned[:words].view(np.int32).reshape(shape)
        self._bytes = pinned[words:].view(np.int64)
        out = [memory.ptr + self._incoming + rank * self._block for rank in range(size)]
        rows = [memory.ptr + rank * sizes.most * stride for rank in range(size)]
        rows[me] = out[me] + sizes.head
        each = 4 * sizes.most * sizes.topk
        lists = [self._words.ptr + rank * each for rank in range(size)]
        self.lists = Lists(
            to=out,
            via=list(range(size)),
            from_=lists,
            rows=[at - sizes.head for at in rows],  # which lie as behind a head
            weights=lists,
            parts=[at + sizes.head for at in out],
            came=rows,
            tell=[self._pinned + rank * each for rank in range(size)],
        )
        self._named = [sizes.most] * size  # of each rank: the rows behind these are ids of no expert
        self._exchange = Exchange(comm, sizes, memory.buffer(), timeout)

    def late(self, incoming: bool) -> int:
        """What came the host knows."""
        return 0 if incoming else self._pinned + self._goes.nbytes + self._came.nbytes

    def tokens(self, call: int, route: Route, stream: int, timeout: float | None) -> None:
        """The host waits for what is on the stream, which tells how many tokens go where, and for the tokens."""
        self._device.synchronize(stream)
        sizes = self._sizes
        route.goes[:] = ((self._bytes - sizes.head) // self.packed).tolist()
        told = self._told("dispatch", call, route, timeout)
        route.came[:] = [len(each) for each in told]
        self._give(told, [max(pair) for pair in zip(route.came, self._named, strict=True)], np.int32(-1), stream)
        self._named = list(route.came)
        self._put(route.goes, sizes.wire.sent, route.came, stream, timeout)

    def weights(self, call: int, route: Route, stream: int, timeout: float | None) -> None:
        self._device.synchronize(stream)
        told = self._told("combine", call, route, timeout)
        self._give(told, route.came, np.float32(1).view(np.int32), stream)
        self._named = [max(pair) for pair in zip(route.came, self._named, strict=True)]

    def sums(self, call: int, route: Route, stream: int, timeout: float | None) -> None:
        self._put(route.came, self._sizes.wire.row, route.goes, stream, timeout)

    def _told(self, what: str, call: int, route: Route, timeout: float | None) -> list[_Words]:
        """Each rank is told what is for it. Returns what it told this one."""
        mine = [each[:count] for each, count in zip(self._goes, route.goes, strict=True)]
        return self._exchange.headers.exchange(what, call // 2, mine, timeout)

    def _give(self, told: list[_Words], rows: list[int], rest: np.int32, stream: int) -> None:
        """To the GPU, of each rank so many rows; those that it has not told are `rest`."""
        for into, each, count, at in zip(self._came, told, rows, self.lists.from_, strict=True):
            into[: len(each)], into[len(each) : count] = each, rest
            self._device.copy(at, int(into.ctypes.data), into[:count].nbytes, stream)
        self._device.record(self._read, stream)

    def _put(self, goes: list[int], nbytes: int, came: list[int], stream: int, timeout: float | None) -> None:
        """Rows of so many bytes, of each rank's block as many as go there. Waits for those that come."""
        stride, first = self.packed, self._sizes.head
        offsets = [rank * self._block + first + np.arange(n) * stride for rank, n in enumerate(goes)]
        packed = self._memory.buffer(self._incoming, len(goes) * self._block)
        self._exchange.move(packed, offsets, nbytes, came, stream, timeout)

    def close(self) -> None:
        self._exchange.close()
        self._end()


def _give_back(device: Device, read: int, pinned: int) -> None:
    """Once nothing reads it any more. What is written there the host has waited for."""
    device.synchronize_event(read)
    device.destroy_event(read)
    device.free_host(pinned)
