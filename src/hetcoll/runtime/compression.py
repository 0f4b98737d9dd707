"""Compression of what goes over slow edges: for which calls, in which format, and what earlier calls lost.

Slow are the edges between hosts, or between islands where the user says which there are. Only sums and averages of
16- and 32-bit floats are compressed, by `Collective.ALLREDUCE` and `Collective.REDUCE_SCATTER`. What a rank sends is
rounded to the format once, where it was added up; what it keeps of that is the rounded value. All additions are in the
arrays' own type, as without compression.

Error feedback: what rounding took from a buffer is added to what is sent for that buffer next time, so that over many
calls nothing is lost (Seide et al., "1-bit stochastic gradient descent", 2014; Karimireddy et al., "Error feedback
fixes SignSGD", 2019). A buffer is known by its address, type and count.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from ..config.variables import parse_format
from ..errors import ArgumentError, spell_ranks
from ..plan.topology import Topology
from ..types import Collective, DType, Format, ReduceOp

if TYPE_CHECKING:
    from ..calls import Call

log = logging.getLogger("hetcoll")

LEAST_BYTES = 64 << 10
"""A communicator's setting holds for calls from here on: smaller ones are a matter of latency, often of precision."""

_COLLECTIVES = (Collective.ALLREDUCE, Collective.REDUCE_SCATTER)
_DTYPES = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
_OPS = (ReduceOp.SUM, ReduceOp.AVG)


HostResidual = np.ndarray[Any, np.dtype[np.float32]]


class DeviceResidual(Protocol):
    """What was lost of a buffer on a GPU, kept there: `nbytes` from `address` on (`gpu.array.Residual`)."""

    address: int
    nbytes: int

    def free(self) -> None:
        """Give the memory back, once no call is under way."""


R = TypeVar("R", HostResidual, DeviceResidual)


def float32_zeros(count: int) -> HostResidual:
    """A residual in host memory."""
    return np.zeros(count, np.float32)


class Shape(Protocol):
    """What a bound plan of either kind of memory tells: elements that are rounded, and bytes before and after."""

    @property
    def residuals(self) -> int: ...

    @property
    def compressed(self) -> tuple[int, int]: ...


class Compression:
    """One communicator's: its setting, and the residuals of its calls."""

    def __init__(self, topology: Topology, default: Format, most_bytes: int, reproducible: bool = False) -> None:
        self.default, self._reproducible = default, reproducible
        self.groups = topology.asked or topology.hosts
        self._topology, self._most_bytes = topology, most_bytes
        self._residuals: OrderedDict[tuple[object, ...], HostResidual | DeviceResidual] = OrderedDict()
        self._lock = threading.Lock()  # of the two around it
        self._counters = {"compressed_before": 0, "compressed_after": 0, "residual_bytes": 0, "residuals_dropped": 0}
        if default is not Format.NONE and (why := self._nowhere()):
            log.info("compress=%s: nothing is compressed: %s", default.label, why)

    def choose(self, call: Call, asked: object) -> None:
        """Give the call its format: what was asked for, or where that is None, the communicator's if it suits.

        Raises
        ------
        ArgumentError
            `asked` is no format, or the call cannot be compressed.
        """
        if asked is None:
            if self.default is not Format.NONE and call.nbytes >= LEAST_BYTES and not self._why_not(call, self.default):
                call.compress = self.default
            return
        call.compress, call.remembered = parse_format(asked), False
        if call.compress is not Format.NONE and (why := self._why_not(call, call.compress)):
            raise ArgumentError(f"compress: {call.compress.label} was asked for, but {why}")

    def _why_not(self, call: Call, wanted: Format) -> str:
        """Why a call cannot be compressed; empty where it can."""
        if call.collective not in _COLLECTIVES:
            return f"{call.collective.label} is not compressed"
        if call.dtype not in _DTYPES:
            return f"only {', '.join(d.label for d in _DTYPES)} are compressed, not {call.dtype.label}"
        if call.op not in _OPS:
            return f"only sums and averages are compressed, not {call.op.label}"
        if wanted.factor(call.dtype.itemsize) >= 1:
            return f"{call.dtype.label} is not wider"
        return self._nowhere()

    def _nowhere(self) -> str:
        """Why this communicator compresses nothing; empty where it has slow edges, and may round what crosses them."""
        if self._reproducible:
            return "it is reproducible, and which edges are slow must not change bits"
        if len(self.groups) > 1:
            return ""
        return f"all {self._topology.size} ranks are in one {'island' if self._topology.asked else 'host'}"

    def residual(self, call: Call, shape: Shape, make: Callable[[int], R | None]) -> R | None:
        """What calls on this buffer have lost so far, to be changed by this one; None: it is not kept.

        `make` gives memory for so many float32, all 0, or None where there is none left.
        """
        with self._lock:
            self._counters["compressed_before"] += shape.compressed[0]
            self._counters["compressed_after"] += shape.compressed[1]
            return self._residual(call, shape, make)

    def _residual(self, call: Call, shape: Shape, make: Callable[[int], R | None]) -> R | None:
        if shape.residuals == 0 or self._most_bytes == 0:
            return None
        assert call.send is not None
        assert call.recv is not None
        key = (call.collective, call.send.ptr, call.recv.ptr, call.dtype, call.op, call.send.count, call.compress)
        found = self._residuals.get(key)
        if found is not None:
            self._residuals.move_to_end(key)
            return found  # type: ignore[return-value]  # a buffer's place does not change
        if not self._made_room(4 * shape.residuals):
            return None
        made = make(shape.residuals)
        if made is None:
            self._dropped(0)
            return None
        self._residuals[key] = made
        self._counters["residual_bytes"] += made.nbytes
        return made

    def _made_room(self, nbytes: int) -> bool:
        """Drops what was used longest ago; not of GPUs, whose calls may be under way yet."""
        if nbytes <= self._most_bytes:
            for key, each in list(self._residuals.items()):
                if self._counters["residual_bytes"] + nbytes <= self._most_bytes:
                    return True
                if isinstance(each, np.ndarray):
                    self._dropped(self._residuals.pop(key).nbytes)
        if self._counters["residual_bytes"] + nbytes <= self._most_bytes:
            return True
        self._dropped(0)
        return False

    def _dropped(self, nbytes: int) -> None:
        if self._counters["residuals_dropped"] == 0:
            log.warning(
                "compression: HETCOLL_COMPRESS_FEEDBACK allows %d bytes of residuals, and the buffers in use need more,"
                " or than a GPU has left: what was lost of some is forgotten",
                self._most_bytes,
            )
        self._counters["residual_bytes"] -= nbytes
        self._counters["residuals_dropped"] += 1

    def forget(self) -> None:
        """Drop all residuals. Waits for calls on GPUs that are under way."""
        with self._lock:
            kept = list(self._residuals.values())
            self._residuals.clear()
            self._counters["residual_bytes"] = 0
        for each in kept:
            if not isinstance(each, np.ndarray):
                each.free()

    def counters(self) -> dict[str, int]:
        """What was sent over compressed edges, and what is kept; empty while nothing was."""
        return dict(self._counters) if self._counters["compressed_before"] else {}

    def explain(self, collective: Collective, nbytes: int, asked: object) -> tuple[Format, str]:
        """In which format a call of float32 would travel; for people, why in none although one is set."""
        wanted = self.default if asked is None else parse_format(asked)
        why = self._nowhere()
        if collective not in _COLLECTIVES:
            why = f"{collective.label} is not compressed"
        elif asked is None and nbytes < LEAST_BYTES:
            why = f"less than {LEAST_BYTES} bytes"
        if wanted is Format.NONE or not why:
            return wanted, ""
        return Format.NONE, f"{wanted.label}: not compressed: {why}"

    def spell(self, found: Format, peers: Collection[int]) -> str:
        """What compression does to the edges to these ranks."""
        kept = "with error feedback" if self._most_bytes else "without error feedback"
        return f"{found.label} to and from {spell_ranks(peers)}: {found.factor(4):.3f} of float32's bytes, {kept}"
