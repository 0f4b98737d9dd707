"""Ranks that count for more than others: weighted means, and shares of a whole by weight."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import calls
from ..calls import check_int
from ..calls.buffers import Buffer, array_of
from ..errors import ArgumentError, BufferTypeError
from ..types import DType, ReduceOp
from .core import Core

if TYPE_CHECKING:
    from fractions import Fraction

_WIDE = {
    DType.FLOAT64: np.float64, DType.COMPLEX64: np.complex64, DType.COMPLEX128: np.complex128,
}  # fmt: skip

_HAVE_PARTS = ("float", "bfloat", "complex")  # how the names of these types begin


def shares(total: int, weights: Sequence[float], least: int = 1) -> list[int]:
    """`total` in proportion to `weights`, in whole numbers of at least `least`: by how fast ranks are, for example.

    Largest remainders first, then lower ranks: the same on all ranks for the same weights. ArgumentError where `total`
    does not suffice, or a weight is not above 0.
    """
    total, least = check_int(total, "total"), check_int(least, "least")
    if least < 0:
        raise ArgumentError(f"least: wanted 0 or more, got {least}")
    known = [_checked(weight, "weights", zero=False) for weight in weights]
    if not known:
        raise ArgumentError("weights: wanted one or more, got none")
    spare = total - least * len(known)
    if spare < 0:
        raise ArgumentError(f"total: wanted {least} or more for each of {len(known)} ranks, got {total}")
    heavy = _exact(known)
    whole = sum(heavy)
    above = [total * weight / whole - least for weight in heavy]
    wanted = [each if each > 0 else 0 for each in above]
    scale = spare / sum(wanted) if any(wanted) else 0
    exact = [scale * each for each in wanted]
    found = [int(each) for each in exact]
    order = sorted(range(len(known)), key=lambda rank: (found[rank] - exact[rank], rank))
    for rank in order[: spare - sum(found)]:
        found[rank] += 1
    return [least + each for each in found]


def shards(core: Core, total: int, weight: float, least: int, timeout: float | None) -> list[slice]:
    """See `Communicator.shards`."""
    whole, floor = check_int(total, "total"), check_int(least, "least")
    if floor < 0 or whole < floor * core.size:
        raise ArgumentError(
            f"total: wanted {floor} or more for each of {core.size} ranks, got {whole}"
            if floor >= 0
            else f"least: wanted 0 or more, got {floor}"
        )
    told = _told(core, f"shards({whole}, least={floor})", _checked(weight, "weight", zero=False), timeout)
    return [slice(a, b) for a, b in pairwise((0, *accumulate(shares(whole, told, floor))))]


def weighed(
    core: Core,
    sendbuf: Any,
    recvbuf: Any,
    op: object,
    weight: float,
    stream: object,
    timeout: float | None,
    compress: object,
) -> tuple[Any, None, ReduceOp]:
    """What to reduce, in place and by which operation, so that the mean of all ranks' `sendbuf` comes out, each
    counted `weight` times: this rank's part of it, which lies where the result is to be.

    The ranks tell each other their weights first.
    """
    call = calls.allreduce(core.rank, core.size, sendbuf, recvbuf, op)
    assert call.send is not None
    assert call.recv is not None
    if call.op is not ReduceOp.AVG:
        raise ArgumentError(f"weight: wanted op='avg' with it, got {call.op.label}")
    if not call.dtype.label.startswith(_HAVE_PARTS):
        raise BufferTypeError(f"weight: wanted floats or complex numbers, got {call.dtype.label}")
    if stream is not None:
        raise ArgumentError("weight: wanted no stream, since the array's library scales on its own current one")
    core.compression.choose(call, compress)  # before anything is sent, or scaled where it lies
    target = sendbuf if recvbuf is None else recvbuf
    scale = _scaling(sendbuf, call.send, target, call.recv)
    told = _told(core, "allreduce(op=avg, weight)", _checked(weight, "weight", zero=True), timeout)
    exact = _exact(told)
    if not (whole := sum(exact)):
        raise ArgumentError(f"weight: wanted one above 0 on some rank, got {told}")
    if call.count:
        scale(float(exact[core.rank] / whole))
    return target, None, ReduceOp.SUM


def _checked(weight: object, name: str, *, zero: bool) -> float:
    if isinstance(weight, bool) or not hasattr(weight, "__float__"):
        raise BufferTypeError(f"{name}: wanted a number, got {weight!r}")
    try:
        value = float(weight)
    except (TypeError, ValueError, RuntimeError):  # arrays have it, and refuse: PyTorch's by the last of these
        raise BufferTypeError(f"{name}: wanted a number, got {weight!r}") from None
    except OverflowError:
        value = math.inf
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ArgumentError(f"{name}: wanted a number {'of 0 or more' if zero else 'above 0'}, got {value}")
    return value


def _exact(weights: Sequence[float]) -> list[Fraction]:
    """Floats would lose elements of many, and the largest have no sum."""
    from fractions import Fraction  # few programs weigh, and imports count

    return list(map(Fraction, weights))


def _told(core: Core, label: str, weight: float, timeout: float | None) -> list[float]:
    """Every rank's weight, by rank."""
    rows = np.empty(core.size, np.float64)
    core.launch(calls.meeting(core.rank, label, np.array([weight]), rows), False, timeout)
    return [float(each) for each in rows]


def _scaling(array: Any, source: Buffer, out: Any, target: Buffer) -> Callable[[float], object]:
    """What does ``out = factor * array``, computed in float32 or wider and rounded once. On a GPU the arrays' library
    does it; BufferTypeError where that cannot."""
    if source.device == "cpu":
        wide = _WIDE.get(source.dtype, np.float32)

        def scale(factor: float) -> None:
            np.multiply(array_of(source), wide(factor), out=array_of(target), dtype=wide, casting="unsafe")

        return scale
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor) and isinstance(out, torch.Tensor):
        return partial(torch.mul, array.detach().view(-1), out=out.detach().view(-1))
    if hasattr(array, "__array_ufunc__") and hasattr(out, "__array_ufunc__"):  # CuPy
        return partial(np.multiply, array.reshape(-1), out=out.reshape(-1), casting="same_kind")
    kinds = " and ".join(dict.fromkeys((type(array).__name__, type(out).__name__)))
    raise BufferTypeError(f"weight: wanted arrays on a GPU that can be scaled, of PyTorch or CuPy, got {kinds}")
