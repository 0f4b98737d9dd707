"""Results of calls that were given no array for them: of the kind of the input, on its device, made new."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, TypeVar, cast

import numpy as np

from ..calls.buffers import Buffer, read_buffer
from ..errors import ArgumentError, BufferTypeError
from ..types import FormatName
from .core import Core

A = TypeVar("A")


class Options(TypedDict, total=False):
    """What a call without an array for its result may say besides: as `Communicator.allreduce` has it."""

    stream: object
    timeout: float | None


class ReducingOptions(Options, total=False):
    """The same of calls that reduce."""

    compress: FormatName | None


class ExchangeOptions(Options, total=False):
    """The same of `Communicator.alltoall`."""

    sendcounts: Sequence[int] | None
    recvcounts: Sequence[int] | None


def gathered(core: Core, call: Callable[..., object], array: A, async_op: bool, **options: Any) -> A:
    """What `call` gathers: every rank's `array`, by rank along a new leading axis."""
    return _filled(call, array, like(array, (core.size, *_shape(array))), async_op, **options)


def scattered(core: Core, call: Callable[..., object], array: A, async_op: bool, op: object, **options: Any) -> A:
    """This rank's part of what `call` reduces; `array` has one for each rank along its leading axis."""
    shape = _shape(array)
    if not shape or shape[0] != core.size:
        raise ArgumentError(
            f"sendbuf: wanted a leading axis of {core.size}, a part for each rank, where no recvbuf says how it is cut;"
            f" got the shape {shape}"
        )
    return _filled(call, array, like(array, shape[1:]), async_op, op, **options)


def exchanged(call: Callable[..., object], array: A, async_op: bool, **options: Any) -> A:
    """What `call` receives from all ranks: shaped as `array` where parts are equal, else flat."""
    counts = options["recvcounts"]
    if counts is not None:
        return joined(call, array, counts, async_op, **options)
    return _filled(call, array, like(array, _shape(array)), async_op, **options)


def joined(call: Callable[..., object], array: A, parts: Sequence[int], async_op: bool, **options: Any) -> A:
    """What `call` leaves here: parts of so many elements, flat."""
    return _filled(call, array, like(array, (_total(parts),)), async_op, **options)


def _filled(call: Callable[..., object], array: object, out: A, async_op: bool, *words: Any, **options: Any) -> A:
    """`out`, filled by `call`; on a GPU once its stream has come so far."""
    if async_op:
        raise ArgumentError("recvbuf: wanted an array with async_op=True, which returns a Work, got None")
    call(array, out, *words, **options)
    return out


def _total(counts: Sequence[int]) -> int:
    try:
        return max(0, sum(map(int, counts)))
    except (TypeError, ValueError, OverflowError):
        return 0  # the call says what is wrong with them


def _shape(array: Any) -> tuple[int, ...]:
    """BufferTypeError for what is no array."""
    read_buffer(array, "sendbuf", writable=False)
    return tuple(array.shape) if hasattr(array, "shape") else ()


def like(array: A, shape: tuple[int, ...]) -> A:
    """An array of this shape, of the kind, type and device of `array`, uninitialised."""
    return made_like(array, read_buffer(array, "sendbuf", writable=False), shape)[0]


def made_like(array: A, source: Buffer, shape: tuple[int, ...]) -> tuple[A, Buffer]:
    """The same of an array that was read before, and the new one's buffer."""
    if (nbytes := math.prod(shape) * source.dtype.itemsize) >= 1 << 63:
        raise ArgumentError(f"recvbuf: wanted less than 2**63 bytes, got {nbytes}")
    given: Any = array
    out: Any = None
    if isinstance(given, np.ndarray):
        out = np.empty(shape, given.dtype)
    elif hasattr(given, "new_empty"):  # PyTorch's tensors, and our own arrays on a GPU
        out = given.new_empty(shape)
    elif hasattr(given, "__array_function__"):  # CuPy's; JAX's arrays cannot be written, and have none
        with given.device:
            out = np.empty_like(given, shape=shape, order="C")
    if out is None:
        raise BufferTypeError(
            f"recvbuf: wanted an array, since none like a {type(array).__name__} can be made for the result: NumPy's,"
            " PyTorch's and CuPy's can"
        )
    made = read_buffer(out, "recvbuf", writable=True)
    wanted = (source.dtype, source.place, math.prod(shape))
    if (made.dtype, made.place, made.count) != wanted:
        raise BufferTypeError(
            f"recvbuf: wanted an array, since what {type(array).__name__} makes for the result lies on {made.place}"
        )
    return cast("A", out), made
