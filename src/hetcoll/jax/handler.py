"""From XLA to the communicator: the function that the native handler (``native/python/xla.cc``) calls when a program
comes to one of our calls. It runs on a thread of XLA's, or on that which started the program.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

import hetcoll._native as _native

from .. import (
    AbortedError,
    ClosedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    Communicator,
    HetcollError,
    PeerLostError,
)

_INTERNAL = 13
_CODES = {  # absl::StatusCode
    CollectiveTimeoutError: 4, CollectiveMismatchError: 9, ClosedError: 9, AbortedError: 10, PeerLostError: 14,
}  # fmt: skip

_communicators: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()
_numbers: weakref.WeakKeyDictionary[Communicator, int] = weakref.WeakKeyDictionary()
_next = itertools.count()


def number_of(comm: Communicator) -> int:
    """By which programs know `comm`: they outlive communicators, and must not keep them alive.

    It counts communicators in the order of their first use, so that a program that JAX takes from its persistent cache
    finds the one that it was written for.
    """
    if comm not in _numbers:
        _numbers[comm] = next(_next)
        _communicators[_numbers[comm]] = comm
    return _numbers[comm]


Start = Callable[[Communicator, Any, Any, int], object]


class Parsed(NamedTuple):
    """What `Operation.call` wrote."""

    comm: int
    start: Start
    site: str


@functools.lru_cache(maxsize=4096)
def parse(call: bytes) -> Parsed:
    words, _, site = call.decode().partition(" at ")
    _, number, method, *rest = words.split(" ")
    return Parsed(int(number), _starter(method, rest), site)


def _starter(method: str, words: list[str]) -> Start:
    known: list[Any] = list(map(sys.intern, words))  # as the engine knows the names of reductions
    match method, known:
        case "allreduce", [op]:
            return lambda comm, x, y, stream: comm.allreduce(x, y, op, stream=stream)
        case "reduce_scatter", [op]:
            return lambda comm, x, y, stream: comm.reduce_scatter(x, y, op, stream=stream)
        case "reduce", [op, root]:
            return lambda comm, x, y, stream: comm.reduce(x, y, op, int(root), stream=stream)
        case "broadcast", [root]:
            return lambda comm, x, y, stream: comm.broadcast(y, int(root), stream=stream)
        case "sendrecv", [dest, source]:
            return functools.partial(_move, int(dest), int(source))
        case (("allgather" | "alltoall"), []):
            return lambda comm, x, y, stream: getattr(comm, method)(x, y, stream=stream)
    raise ValueError(f"no such call: {method} {words}")


def _move(dest: int, source: int, comm: Communicator, x: Any, y: Any, stream: int) -> object:
    if source < 0:
        return comm.send(x, dest, stream=stream)
    if dest < 0:
        return comm.recv(y, source, stream=stream)
    return comm.sendrecv(x, dest, y, source, stream=stream)


def _start(parsed: Parsed, x: Any, y: Any, stream: int, called_at: str) -> None:
    """`called_at` is for `reporter.call_site`."""
    comm = _communicators.get(parsed.comm)
    if comm is None:
        raise ClosedError("the communicator of this call does not exist any more")
    parsed.start(comm, x, y, stream)


def run(call: bytes, x: _native.Memory | None, y: _native.Memory | None, stream: int) -> tuple[int, str] | None:
    """Run a call with its argument, its result, and a GPU's stream; a status code and a message where it fails."""
    try:
        parsed = parse(call)
        _start(parsed, x, y, stream, parsed.site)
    except HetcollError as error:
        code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), _INTERNAL)
        return code, f"hetcoll.{type(error).__name__}: {error}"
    return None


_capsule = _native.xla_handler(run)


def register(target: str, platform: str) -> None:
    """Tell XLA of the handler, for one of its platforms."""
    jax.ffi.register_ffi_target(target, _capsule, platform=platform)
