"""8-bit floats of two kinds in one call: OCP's, and AMD's older one (fnuz, gfx94x), converted by value.

All ranks know every rank's GPU, so they decide alike, before they know what is passed: where GPUs of the older kind are
beside others in a communicator, all its calls on 8-bit floats run in OCP's kind, messages as well. A rank that passes
arrays of the older kind has its input converted in a buffer of its own, and its result back. Elsewhere nothing is
converted.

What the kinds cannot both hold (the rules: ``convert.h`` of the kernels): of e4m3, OCP's goes up to 448 and fnuz to
240; of both formats, fnuz has a last place half as large near 0, one NaN, no -0, and no infinity. So what several ranks
receive (`types.SAME`) is brought to what both kinds hold on the ranks with OCP's arrays, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import hetcoll._native as _native

from ..calls import Call
from ..calls.buffers import Buffer
from ..calls.messages import SendRecv
from ..errors import ArgumentError
from ..types import FNUZ_OF, OCP_OF, SAME, Collective, DType
from ..vendors.devices.kernels.source import convert_name
from .lanes import SideStream

if TYPE_CHECKING:
    from ..links.facts import Gpu
    from ..vendors.devices.base import Device

_GRAIN = 256  # staged buffers begin at multiples


def two_kinds(gpus: Sequence[Gpu]) -> bool:
    """Whether calls on 8-bit floats run in OCP's kind and convert: GPUs of the older kind are beside others."""
    kinds = {gpu.float8 for gpu in gpus if gpu.vendor}
    return "fnuz" in kinds and len(kinds) > 1


class Float8Conversion(NamedTuple):
    """The buffers of one rank in such a call: whether it reads `send` and writes `recv`, and whether what it writes is
    the same on all ranks."""

    send: Buffer | None
    recv: Buffer | None
    reads: bool
    writes: bool
    alike: bool = False

    @classmethod
    def of_call(cls, call: Call, rank: int) -> Float8Conversion | None:
        """None for calls that have no 8-bit floats."""
        if call.dtype not in FNUZ_OF and call.dtype not in OCP_OF:
            return None
        root = call.collective is not Collective.BROADCAST or call.root == rank
        writes = call.recv is not None and (call.collective is not Collective.BROADCAST or not root)
        return cls(call.send, call.recv, call.send is not None and root, writes, call.collective in SAME)

    @classmethod
    def of_message(cls, ends: SendRecv, rank: int) -> Float8Conversion | None:
        """None for messages that have no 8-bit floats, and for those to oneself."""
        dtype, send, recv = ends.first.dtype, ends.send, ends.recv
        if (dtype not in FNUZ_OF and dtype not in OCP_OF) or rank in (ends.dest, ends.source):
            return None
        return cls(send, recv, send is not None, recv is not None)

    @property
    def first(self) -> Buffer:
        found = self.send or self.recv
        assert found is not None
        return found

    @property
    def dtype(self) -> DType:
        return self.first.dtype

    @property
    def older(self) -> bool:
        """Whether the arrays are of the older kind."""
        return self.dtype in OCP_OF

    def staged(self, base: int, owner: Any = None) -> tuple[Buffer | None, Buffer | None]:
        """The buffers in OCP's kind, in memory from `base` on: they overlap there as they do here."""
        ocp = OCP_OF[self.dtype]
        first, second = (
            None if buffer is None else replace(buffer, ptr=base + at, dtype=ocp, owner=(owner, buffer.owner))
            for buffer, at in zip((self.send, self.recv), self._places(), strict=True)
        )
        return first, second

    @property
    def nbytes(self) -> int:
        """What `staged` needs."""
        places = zip(self._places(), (self.send, self.recv), strict=True)
        return max(at + (0 if buffer is None else buffer.count) for at, buffer in places)

    def _places(self) -> tuple[int, int]:
        send, recv = self.send, self.recv
        if send is None or recv is None:
            return 0, 0
        if send.ptr == recv.ptr or send.overlaps(recv):
            first = min(send.ptr, recv.ptr)
            return send.ptr - first, recv.ptr - first
        return 0, -(-send.count // _GRAIN) * _GRAIN

    def before(self, staged: Buffer | None) -> tuple[int, int, int, DType, DType] | None:
        """What is to be converted before the call: to, from, count, of which kind, to which."""
        if staged is None or not self.reads:
            return None
        assert self.send is not None
        return staged.ptr, self.send.ptr, self.send.count, self.dtype, staged.dtype

    def after(self, staged: Buffer | None) -> tuple[int, int, int, DType, DType] | None:
        """And what after it; `staged` is None where the call wrote to the user's own buffer, of OCP's kind."""
        if self.recv is None or not self.writes:
            return None
        if staged is not None:
            return self.recv.ptr, staged.ptr, self.recv.count, staged.dtype, self.dtype
        return (self.recv.ptr, self.recv.ptr, self.recv.count, self.dtype, self.dtype) if self.alike else None


class _Staging:
    """Memory for conversions that come one after another, whatever streams they are on: until `ended`."""

    def __init__(self, device: Device) -> None:
        self._device, self.ended = device, device.event()
        self._memory: list[int] = []
        self._nbytes = 0

    def room(self, nbytes: int) -> int:
        """So much of it. Streams may still use what was smaller."""
        if nbytes > self._nbytes or not self._memory:
            self._nbytes = max(nbytes, 2 * self._nbytes, _GRAIN)
            self._memory.append(self._device.allocate(self._nbytes))
        return self._memory[-1]

    def close(self) -> None:
        self._device.destroy_event(self.ended)
        for at in self._memory:
            self._device.free(at)


class OnGpu:
    """Conversions on one GPU."""

    def __init__(self, device: Device) -> None:
        self._device, self._side = device, SideStream(device)
        self._staging: dict[object, _Staging] = {}  # other threads look at it

    @contextlib.contextmanager
    def around(
        self, conversions: Sequence[Float8Conversion], stream: int, async_op: bool, turns: object = None
    ) -> Iterator[tuple[list[Float8Conversion], int]]:
        """What to call with instead, in OCP's kind; the block enqueues the call on the stream given, which then waits
        for it. Calls with equal `turns` come one after another, and no others: what one of them waits for may have to
        come after another."""
        device = self._device
        if device.capturing(stream):
            raise ArgumentError("stream: a graph is being captured on it; 8-bit floats are not converted inside one")
        if turns not in self._staging:
            self._staging[turns] = _Staging(device)
        staging = self._staging[turns]
        if async_op:
            stream = self._side.behind(stream)
        device.wait(stream, staging.ended)
        made = self._staged(conversions, staging)
        for theirs, ours in zip(conversions, made, strict=True):
            self._run(theirs.before(ours.send if theirs.older else None), stream)
        yield made, stream
        for theirs, ours in zip(conversions, made, strict=True):
            self._run(theirs.after(ours.recv if theirs.older else None), stream)
        device.record(staging.ended, stream)

    @staticmethod
    def _staged(conversions: Sequence[Float8Conversion], staging: _Staging) -> list[Float8Conversion]:
        """With buffers in `staging` in the place of those of the older kind."""
        lengths = [-(-each.nbytes // _GRAIN) * _GRAIN if each.older else 0 for each in conversions]
        at, made = staging.room(sum(lengths)) if any(each.older for each in conversions) else 0, []
        for each, length in zip(conversions, lengths, strict=True):
            send, recv = each.staged(at) if each.older else (each.send, each.recv)
            made.append(each._replace(send=send, recv=recv))
            at += length
        return made

    def _run(self, step: tuple[int, int, int, DType, DType] | None, stream: int) -> None:
        if step is None or step[2] == 0:
            return
        dst, src, count, source, target = step
        table = self._device.kernels()
        shape = table.launch(count, 1)
        arguments = [value.to_bytes(8, "little") for value in (dst, src, count)]
        self._device.launch(table.function(convert_name(source, target)), *shape, arguments, stream)

    @property
    def done(self) -> bool:
        """Whether all that was enqueued is done."""
        return all(self._device.query(each.ended) for each in list(self._staging.values()))

    def join(self, stream: int) -> None:
        """What comes on `stream` later begins after all that was enqueued."""
        for each in list(self._staging.values()):
            self._device.wait(stream, each.ended)

    def close(self) -> None:
        """Give everything back. The device must be done."""
        self._side.close()
        for each in self._staging.values():
            each.close()


def on_host(conversion: Float8Conversion) -> tuple[Buffer | None, Buffer | None, Callable[[], None]]:
    """The same on a processor, before the call: what to call with instead, and what to do once it is complete."""
    fnuz = conversion.older
    memory = np.empty(conversion.nbytes if fnuz else 0, np.uint8)
    send, recv = conversion.staged(int(memory.ctypes.data), memory) if fnuz else (None, None)
    if (step := conversion.before(send)) is not None:
        _native.convert_float8(*step)

    def finish() -> None:
        if (step := conversion.after(recv)) is not None:
            _native.convert_float8(*step)

    return (*((send, recv) if fnuz else (conversion.send, conversion.recv)), finish)
