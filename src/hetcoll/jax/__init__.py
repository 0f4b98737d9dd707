"""Collectives inside JAX programs: under `jax.jit`, `grad`, `vmap`, `scan`, on CPU, CUDA and ROCm alike.

Every rank is a process with a JAX program of its own, on one device. All of a process's calls run in the order in which
the program makes them (JAX threads a token through them), so ranks whose programs make the same calls in the same order
never wait for each other's later calls.

Differentiation sees all ranks' programs as one function: `jax.grad` gives, on every rank, the derivative of the *sum of
all ranks' losses* by that rank's arguments. Every rank must differentiate, since the transpose of a call is a call:
that of `allreduce` and `alltoall` is itself, of `allgather` `reduce_scatter`, of `broadcast` `reduce`, of a message the
message back. The result of a call must take part in the loss on every rank or on none.

All functions take `x`, an array or a tracer of a type in `hetcoll.types.DType`, and `comm`, a `hetcoll.Communicator`
whose other ranks make the same call. They return a new array; where XLA can reuse the memory of `x` (donated, or not
needed any more) `allreduce`, `broadcast` and `reduce` work in place.

TypeError and ValueError (`hetcoll.BufferTypeError`, `ArgumentError`) are raised while JAX traces. What happens when the
program runs is a `jax.errors.JaxRuntimeError` whose text has the name of hetcoll's error; `comm.error` is that error
itself. After it, `recover` lets programs of other communicators run again.
"""

from __future__ import annotations

from .functions import allgather, allreduce, alltoall, broadcast, ppermute, recv, reduce, reduce_scatter, send, sendrecv
from .primitive import recover

__all__ = [
    "allgather", "allreduce", "alltoall", "broadcast", "ppermute", "recover", "recv", "reduce", "reduce_scatter",
    "send", "sendrecv",
]  # fmt: skip
