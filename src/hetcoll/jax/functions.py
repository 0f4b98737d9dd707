"""The public functions: every error of a caller is found here, on the caller's line, while JAX traces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from .. import ArgumentError, BufferTypeError, Communicator, DType
from ..calls import check_rank, parse_op
from ..health.status_report import call_site
from .handler import number_of
from .operations import AllGather, AllReduce, AllToAll, Broadcast, Member, Move, Reduce, ReduceScatter
from .primitive import bind

_DTYPES = {dtype.label: dtype for dtype in DType}

Array = Any
"""A `jax.Array`, a tracer, or what `jax.numpy.asarray` makes one of."""


def allreduce(x: Array, op: str = "sum", *, comm: Communicator) -> Array:
    """`x` reduced over all ranks, element by element; as `x` in shape and dtype, which are the same on all ranks.

    `op` as in `hetcoll.Communicator.allreduce`. Derivatives exist for sum and avg.
    """
    array, member = _prepare("allreduce", x, comm)
    return bind(array, AllReduce(member, _op("allreduce", op, array)))


def allgather(x: Array, *, comm: Communicator) -> Array:
    """Every rank's `x`, by rank along a new leading axis: (size, \\*x.shape)."""
    array, member = _prepare("allgather", x, comm)
    return bind(array, AllGather(member))


def reduce_scatter(x: Array, op: str = "sum", *, comm: Communicator) -> Array:
    """``x[rank]`` reduced over all ranks: `x` has the shape (size, \\*rest), the result `rest`.

    `op` as in `allreduce`. Derivatives exist for sum and avg.
    """
    array, member = _prepare("reduce_scatter", x, comm)
    _check_leading("reduce_scatter", array, comm)
    return bind(array, ReduceScatter(member, _op("reduce_scatter", op, array)))


def alltoall(x: Array, *, comm: Communicator) -> Array:
    """``x[r]`` goes to rank r; what comes from rank r is ``result[r]``. Both have the shape (size, \\*rest)."""
    array, member = _prepare("alltoall", x, comm)
    _check_leading("alltoall", array, comm)
    return bind(array, AllToAll(member))


def broadcast(x: Array, root: int = 0, *, comm: Communicator) -> Array:
    """The root's `x`, on every rank. The others' have the same shape and dtype."""
    array, member = _prepare("broadcast", x, comm)
    return bind(array, Broadcast(member, check_rank(root, comm.size, "root")))


def reduce(x: Array, op: str = "sum", root: int = 0, *, comm: Communicator) -> Array:
    """`x` reduced over all ranks on the root; zeros of that shape on the others. `op` as in `allreduce`."""
    array, member = _prepare("reduce", x, comm)
    return bind(array, Reduce(member, _op("reduce", op, array), check_rank(root, comm.size, "root")))


def sendrecv(x: Array, dest: int, source: int, *, comm: Communicator) -> Array:
    """Sends `x` to rank `dest` and returns what rank `source` sends, of the same shape and dtype, at the same time."""
    array, member = _prepare("sendrecv", x, comm)
    to, origin = check_rank(dest, comm.size, "dest"), check_rank(source, comm.size, "source")
    if (to == comm.rank) != (origin == comm.rank):
        raise ArgumentError(f"dest and source: a message to oneself needs both to be rank {comm.rank}")
    return _move(array, Move(member, to, origin))


def ppermute(x: Array, perm: Iterable[Sequence[int]], *, comm: Communicator) -> Array:
    """`x` of the rank that `perm` pairs with this one, zeros where there is none: as `jax.lax.ppermute`.

    `perm` has pairs (source, destination), the same on all ranks; no rank is twice a source or twice a destination.
    """
    array, member = _prepare("ppermute", x, comm)
    if not isinstance(perm, Iterable):
        raise ArgumentError(f"perm: wanted pairs (source, destination), got {perm!r}")
    pairs = [_pair(pair, comm.size) for pair in perm]
    onward, back = dict(pairs), {dest: source for source, dest in pairs}
    if len(onward) != len(pairs) or len(back) != len(pairs):
        raise ArgumentError(f"perm: wanted each rank at most once as source and once as destination, got {pairs}")
    return _move(array, Move(member, onward.get(comm.rank, -1), back.get(comm.rank, -1)))


def send(x: Array, dest: int, *, comm: Communicator) -> Array:
    """Sends `x` to rank `dest`, which calls `recv`. Returns zeros like `x`: they stand for it in a loss.

    To differentiate through the message, let the zeros take part in the loss (``loss + sent.sum()``); the gradient of
    `x` is then received from `dest`, where `recv` is differentiated by its argument.
    """
    array, member = _prepare("send", x, comm)
    return _move(array, Move(member, _other(dest, comm, "dest"), -1))


def recv(like: Array, source: int, *, comm: Communicator) -> Array:
    """What rank `source` sends, of the shape and dtype of `like`, whose values do not matter.

    To differentiate through the message, differentiate by `like`, too: its gradient is zeros, and the gradient of the
    result is sent to `source`.
    """
    array, member = _prepare("recv", like, comm)
    return _move(array, Move(member, -1, _other(source, comm, "source")))


def _prepare(name: str, x: Any, comm: Any) -> tuple[Array, Member]:
    """`x` as an array that can travel, and this process's place in `comm`."""
    if not isinstance(comm, Communicator):
        raise BufferTypeError(f"hetcoll.jax.{name}: comm: wanted a hetcoll.Communicator, got {type(comm).__name__}")
    array = jnp.asarray(x)
    if str(array.dtype) not in _DTYPES:
        raise BufferTypeError(
            f"hetcoll.jax.{name}: dtype {array.dtype} of {_spell(array)} is not supported; supported:"
            f" {', '.join(_DTYPES)}"
        )
    return array, Member(number_of(comm), comm.rank, comm.size, call_site())


def _op(name: str, op: object, array: Array) -> str:
    try:
        return parse_op(op, _DTYPES[str(array.dtype)]).label
    except ArgumentError as error:
        raise ArgumentError(f"hetcoll.jax.{name} of {_spell(array)}: {error}") from None


def _check_leading(name: str, array: Array, comm: Communicator) -> None:
    if array.ndim == 0 or array.shape[0] != comm.size:
        raise ArgumentError(
            f"hetcoll.jax.{name}: wanted a leading axis of {comm.size}, the number of ranks, got {_spell(array)}"
        )


def _pair(pair: Any, size: int) -> tuple[int, int]:
    try:
        source, dest = pair
    except (TypeError, ValueError):
        raise ArgumentError(f"perm: wanted pairs (source, destination), got {pair!r}") from None
    return check_rank(source, size, "perm"), check_rank(dest, size, "perm")


def _other(rank: object, comm: Communicator, name: str) -> int:
    found = check_rank(rank, comm.size, name)
    if found == comm.rank:
        raise ArgumentError(f"{name}: rank {found} is this rank; a message to oneself is a sendrecv")
    return found


def _move(array: Array, move: Move) -> Array:
    """Nothing is sent where nothing leaves this rank."""
    if move.dest == move.source == move.member.rank:
        return array
    return jnp.zeros_like(array) if move.dest < 0 and move.source < 0 else bind(array, move)


def _spell(array: Array) -> str:
    """As JAX spells an array's type: ``float32[2,3]``."""
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"
