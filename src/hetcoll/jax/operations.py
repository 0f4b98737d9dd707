"""What can be called, as values that JAX can hash: shapes, transposes and what becomes of an axis of `vmap`.

All ranks' programs together are one function from all ranks' inputs to all ranks' outputs. The operations below are
linear in it where `op` is sum or avg, and `transpose` gives what the rank does in the transposed function.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax.numpy as jnp

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Member:
    """A communicator, by its number in this process, this rank's place in it, and where the call was written."""

    comm: int
    rank: int
    size: int
    site: str


@dataclass(frozen=True)
class Operation:
    """One call of this rank. `NAME` is the `Communicator`'s method."""

    NAME: ClassVar[str]
    IN_PLACE: ClassVar[bool] = False
    """Whether the result may take the argument's memory."""
    member: Member

    def words(self) -> tuple[object, ...]:
        """What the handler needs to know beside the arrays."""
        return ()

    def call(self, device: str) -> str:
        """For the handler (`handler.parse`), and for people who read HLO: ``cpu 0 allreduce sum at train.py:12``."""
        words = " ".join(map(str, (device, self.member.comm, self.NAME, *self.words())))
        return f"{words} at {self.member.site}"

    @property
    def sends(self) -> bool:
        """Whether the argument's values matter on this rank."""
        return True

    @property
    def receives(self) -> bool:
        """Whether the result is anything but zeros on this rank."""
        return True

    def out_shape(self, shape: Shape) -> Shape:
        return shape

    def differentiable(self) -> bool:
        return True

    def transpose(self, cotangent: Any) -> tuple[Any, Operation]:
        """What is to be called in the transposed function, and on what."""
        raise NotImplementedError

    def batch(self, x: Any, axis: int) -> tuple[Any, int]:
        """`x` with its batch axis where the operation leaves it alone, and where the result has it."""
        return x, axis


@dataclass(frozen=True)
class _Reducing(Operation):
    op: str

    def words(self) -> tuple[object, ...]:
        return (self.op,)

    def differentiable(self) -> bool:
        return self.op in ("sum", "avg")

    def divided(self, cotangent: Any) -> Any:
        return cotangent / self.member.size if self.op == "avg" else cotangent


class AllReduce(_Reducing):
    """y = sum of all x, everywhere. So the cotangent of x is the sum of all cotangents of y."""

    NAME, IN_PLACE = "allreduce", True

    def transpose(self, cotangent: Any) -> tuple[Any, Operation]:
        return cotangent, self


class AllGather(Operation):
    """y[r] = x of rank r."""

    NAME = "allgather"

    def out_shape(self, shape: Shape) -> Shape:
        return (self.member.size, *shape)

    def transpose(self, cotangent: Any) -> tuple[Any, Operation]:
        return cotangent, ReduceScatter(self.member, "sum")

    def batch(self, x: Any, axis: int) -> tuple[Any, int]:
        return x, axis + 1


class ReduceScatter(_Reducing):
    """y = sum of all x[rank]."""

    NAME = "reduce_scatter"

    def out_shape(self, shape: Shape) -> Shape:
        return shape[1:]

    def transpose(self, cotangent: Any) -> tuple[Any, Operation]:
        return self.divided(cotangent), AllGather(self.member)

    def batch(self, x: Any, axis: int) -> tuple[Any, int]:
        return (jnp.moveaxis(x, 0, 1), 0) if axis == 0 else (x, axis - 1)


class AllToAll(Operation):
    """y[r] = x[rank] of rank r, which is a symmetric matrix over ranks."""

    NAME = "alltoall"

    def transpose(self, cotangent: Any) -> tuple[Any, Operation]:
        return cotangent, self

    def batch(self, x: Any, axis: int) -> tuple[Any, int]:
        return (jnp.moveaxis(x, 0, 1), 1) if axis == 0 else (x, axis)


@dataclass(frozen=True)
class Broadcast(Operation):
    """y = x of the root."""

    NAME, IN_PLACE = "broadcast", True
    root: int

    def words(self) -> tuple[object, ...]:
        return (self.root,)

    def transpose(self, cotangent: Any) -> tuple[Any, Operation]:
        return cotangent, Reduce(self.member, "sum", self.root)


@dataclass(frozen=True)
class Reduce(_Reducing):
    """y = sum of all x on the root, 0 elsewhere."""

    NAME, IN_PLACE = "reduce", True
    root: int

    def words(self) -> tuple[object, ...]:
        return (self.op, self.root)

    @property
    def receives(self) -> bool:
        return self.member.rank == self.root

    def transpose(self, cotangent: Any) -> tuple[Any, Operation]:
        return self.divided(cotangent), Broadcast(self.member, self.root)


@dataclass(frozen=True)
class Move(Operation):
    """y = x of rank `source`; x goes to rank `dest`. A rank of -1 is nobody: nothing is sent, or y is 0."""

    NAME = "sendrecv"
    dest: int
    source: int

    def words(self) -> tuple[object, ...]:
        return (self.dest, self.source)

    @property
    def sends(self) -> bool:
        return self.dest >= 0

    @property
    def receives(self) -> bool:
        return self.source >= 0

    def transpose(self, cotangent: Any) -> tuple[Any, Operation]:
        return cotangent, replace(self, dest=self.source, source=self.dest)
