"""What bounds collectives on GPUs between islands of one host: the same bytes copied by the same engines, for nobody.

`Copies` is a library for gpu_worker.py whose calls only copy what crosses between islands: to slots in pinned host
memory and back, over and over the same ones, both ways at once, two streams a direction that wait for nothing.
`Nothing` is a kernel without work: what a call costs that does nothing but start, and what a host waits for its end.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hetcoll.gpu.slots import slot_bytes
from hetcoll.plan.pieces import SLOTS
from hetcoll.types import DType, ReduceOp
from hetcoll.vendors.devices.kernels import reduce_name

if TYPE_CHECKING:
    from hetcoll import Communicator
    from hetcoll.vendors.devices.base import Device

_LANES = 2  # streams a direction
_P = ctypes.c_void_p
_COPY = ctypes.CFUNCTYPE(ctypes.c_int, _P, _P, ctypes.c_size_t, _P)
_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, _P, *[ctypes.c_uint] * 7, _P, ctypes.POINTER(_P), ctypes.POINTER(_P))

Call = Callable[[], object]


def crossing(op: str, islands: Sequence[Sequence[int]], rank: int, nbytes: int) -> tuple[int, int]:
    """Bytes that `rank` sends to other islands, and that it receives from them: the least where all links are used.

    `nbytes` are those of the larger buffer. An all-reduce among m islands brings 2 (m - 1) / m of the buffer out of
    each island and into it, split over its members. What is gathered leaves its owner once for every other island and
    comes in once an island; scattered and reduced it goes the other way round.
    """
    mine = next(len(island) for island in islands if rank in island)
    others, size = len(islands) - 1, sum(map(len, islands))
    if op == "allreduce":
        each = 2 * others * nbytes // (len(islands) * mine)
        return each, each
    share, foreign = others * nbytes // size, (size - mine) * nbytes // (size * mine)
    return (share, foreign) if op == "allgather" else (foreign, share)


class Copies:
    """Of one rank, on its `device` and in the order of `stream`."""

    def __init__(self, comm: Communicator, device: Device, stream: int) -> None:
        self._rank, self._islands = comm.rank, comm.topology.islands
        self._device, self._stream = device, stream
        self._slot = slot_bytes(comm.topology)
        self._slots = [device.allocate_host(SLOTS * self._slot) for _ in range(2)]
        self._lanes = [[device.stream() for _ in range(_LANES)] for _ in range(2)]
        self._events = [device.event() for _ in range(1 + 2 * _LANES)]
        self._copy = _COPY(device.functions()["cuMemcpyAsync"])

    def bind(self, op: str, memory: int, nbytes: int) -> Call:
        """A call that copies from and to `memory`, of `nbytes` bytes on the device, the larger buffer of `op`."""
        sizes = crossing(op, self._islands, self._rank, nbytes)
        pieces = [self._pieces(way, total, memory, nbytes) for way, total in enumerate(sizes)]
        # By turns, so that the host is not behind with one direction.
        turns = [one for pair in zip(*pieces, strict=False) for one in pair]
        least = min(map(len, pieces))
        turns += [*pieces[0][least:], *pieces[1][least:]]
        begin, *ends = self._events
        lanes = [stream for each in self._lanes for stream in each]

        def call() -> None:
            self._device.record(begin, self._stream)
            for stream in lanes:
                self._device.wait(stream, begin)
            for dst, src, length, stream in turns:
                self._copy(dst, src, length, stream)
            for stream, end in zip(lanes, ends, strict=True):
                self._device.record(end, stream)
                self._device.wait(self._stream, end)

        return call

    def _pieces(self, way: int, total: int, memory: int, nbytes: int) -> list[tuple[int, int, int, int]]:
        """(to, from, bytes, stream) of copies out of the device (`way` 0) or into it (1), slot by slot."""
        found = []
        for i, at in enumerate(range(0, total, self._slot)):
            length = min(self._slot, total - at, nbytes)
            slot = self._slots[way] + i % SLOTS * self._slot
            there = memory + min(at % nbytes, nbytes - length)
            dst, src = (slot, there) if way == 0 else (there, slot)
            found.append((dst, src, length, self._lanes[way][i % _LANES]))
        return found


class Nothing:
    """A kernel of one warp that adds no elements, launched by the driver's C function."""

    def __init__(self, device: Device, stream: int) -> None:
        self._launch = _LAUNCH(device.functions()["cuLaunchKernel"])
        self._kernel = device.kernels().function(reduce_name(DType.FLOAT32, ReduceOp.SUM))
        self._stream = stream
        values = [ctypes.create_string_buffer(struct.pack("Q", 0), 8) for _ in range(4)]
        self._kept = values
        self._arguments = (_P * len(values))(*(ctypes.addressof(value) for value in values))

    def __call__(self) -> None:
        self._launch(self._kernel, 1, 1, 1, 32, 1, 1, 0, self._stream, self._arguments, None)
