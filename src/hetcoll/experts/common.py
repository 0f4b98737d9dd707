"""What both forms of dispatch and combine have in common: what all ranks agree on, and what a call may be given."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any, Self

import numpy as np

from .. import ArgumentError, BufferTypeError, ClosedError, Communicator, DeviceError, DType
from ..calls import check_int
from ..calls.buffers import Buffer, read_buffer
from .routing import check_dtype, check_shape
from .rows import GROUP, Wire

_DTYPES = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
_MOST_TOKENS = 1 << 20  # runtime.offsets.MOST_PIECES


class Common:
    """Made by all ranks of `comm` together."""

    def __init__(
        self,
        comm: Communicator,
        num_experts: int,
        hidden: int,
        dtype: Any,
        max_tokens: int,
        topk: int,
        *,
        fp8: bool = False,
        timeout: float | None = None,
    ) -> None:
        num_experts, hidden = check_int(num_experts, "num_experts"), check_int(hidden, "hidden")
        max_tokens, topk = check_int(max_tokens, "max_tokens"), check_int(topk, "topk")
        for name, value in (("num_experts", num_experts), ("hidden", hidden), ("topk", topk)):
            if value < 1:
                raise ArgumentError(f"{name}: wanted 1 or more, got {value}")
        if num_experts % comm.size:
            raise ArgumentError(f"num_experts: wanted a multiple of the {comm.size} ranks, got {num_experts}")
        if not 1 <= max_tokens <= _MOST_TOKENS:
            raise ArgumentError(f"max_tokens: wanted 1 to {_MOST_TOKENS}, got {max_tokens}")
        if fp8 and hidden % GROUP:
            raise ArgumentError(f"hidden: wanted a multiple of {GROUP} with fp8, got {hidden}")
        self.num_experts, self.hidden, self.max_tokens, self.topk = num_experts, hidden, max_tokens, topk
        self.num_local_experts = num_experts // comm.size
        self.dtype, self.fp8 = _dtype(dtype), bool(fp8)
        self._comm, self._wire = comm, Wire(hidden, self.dtype, self.fp8)
        mine = [num_experts, hidden, self.dtype.label, max_tokens, topk, self.fp8]
        told = comm._core.meet("Experts()", json.dumps(mine).encode(), timeout)
        for rank, theirs in enumerate(map(json.loads, told)):
            if theirs != mine:
                raise ArgumentError(f"Experts: wanted the same on all ranks, got {mine} here and {theirs} on {rank}")
        self._place = ""  # where tokens are
        self._dispatched = 0
        self._layouts = object()
        """Whose a layout is."""
        self._closed = ""

    def close(self) -> None:
        """Give the memory back."""
        self._closed = self._closed or "these experts were closed"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        self._comm._core.host.check_usable()
        if self._closed:
            raise ClosedError(self._closed)

    def _tokens(self, x: Any, topk_ids: Any) -> tuple[Buffer, Buffer, int]:
        """What is dispatched: tokens, ids, and how many."""
        tokens, _ = check_shape(x, "x", None, self.hidden)
        check_shape(topk_ids, "topk_ids", tokens, self.topk)
        if tokens > self.max_tokens:
            raise ArgumentError(f"x: wanted at most {self.max_tokens} tokens, got {tokens}")
        source, ids = read_buffer(x, "x", writable=False), read_buffer(topk_ids, "topk_ids", writable=False)
        check_dtype(source, "x", self.dtype)
        check_dtype(ids, "topk_ids", DType.INT32, DType.INT64)
        return source, ids, tokens

    def _made(
        self, expert_out: Any, topk_weights: Any, shape: tuple[int, ...], tokens: int
    ) -> tuple[Buffer, Buffer | None]:
        """What is combined: what experts made, of this shape, and weights of so many tokens."""
        check_shape(expert_out, "expert_out", *shape)
        source = read_buffer(expert_out, "expert_out", writable=False)
        check_dtype(source, "expert_out", self.dtype)
        if topk_weights is None:
            return source, None
        check_shape(topk_weights, "topk_weights", tokens, self.topk)
        weights = read_buffer(topk_weights, "topk_weights", writable=False)
        check_dtype(weights, "topk_weights", DType.FLOAT32)
        return source, weights

    def _begin(
        self, source: Buffer, name: str, beside: Buffer | None, its: str, stream: Any, timeout: float | None, *,
        captured: bool = False, why: str = "",
    ) -> int | None:  # fmt: skip
        """The handle of the stream; None on the host. Raises where a call may not begin here, or what belongs to
        `source` is elsewhere; `captured`: a graph may capture it. What is refused later other ranks have heard of."""
        self._check_open()
        core = self._comm._core
        core.check_outside_group(lambda: f"experts' tokens ({name})")
        core.seconds(timeout)
        if self._place not in ("", source.place):
            raise BufferTypeError(f"{name}: wanted memory of {self._place}, as before, got some of {source.place}")
        if beside is not None and beside.place != source.place:
            raise BufferTypeError(
                f"{its}: wanted memory of {source.place}, where {name} is, got some of {beside.place}"
            )
        if source.device == "cpu":
            return None
        from ..gpu import streams
        from ..gpu.device_of import device_of

        handle = streams.handle(stream, source)
        if not captured and device_of(source).capturing(handle):
            raise ArgumentError(f"stream: a graph is being captured on it; wanted one on which the host may wait{why}")
        return handle

    @contextlib.contextmanager
    def _running(self, refuses: bool = False) -> Iterator[None]:
        """Other ranks are in the same call: what goes wrong from here on cannot be made good. `refuses`: but for what
        is refused before it begins, as by a graph that cannot capture it."""
        try:
            yield
        except (ArgumentError, BufferTypeError) as error:
            self._closed = "" if refuses else f"these experts have failed before: {error}"
            raise
        except BaseException as error:
            self._closed = f"these experts have failed before: {error}"
            if not isinstance(error, DeviceError):
                raise
            raise self._comm._core.device_failed(error) from error


def _dtype(dtype: Any) -> DType:
    """Of a `DType`, its label, or what NumPy and PyTorch call it."""
    name = dtype.label if isinstance(dtype, DType) else str(dtype).removeprefix("torch.")
    if isinstance(dtype, type):
        name = np.dtype(dtype).name  # a NumPy scalar's class
    found = next((each for each in _DTYPES if each.label == name), None)
    if found is None:
        raise ArgumentError(f"dtype: wanted {', '.join(each.label for each in _DTYPES)}, got {dtype!r}")
    return found
