"""What goes from rank to rank: a send, a receive, or both at once."""

from __future__ import annotations

from typing import NamedTuple

import hetcoll._native as _native

from ..types import DType, ReduceOp
from . import RECV, SEND, SENDRECV
from .buffers import Buffer


class SendRecv(NamedTuple):
    """A message to `dest`, one from `source`, or both at once, of one type. Where there is none, its buffer is None and
    its rank -1."""

    send: Buffer | None
    dest: int
    recv: Buffer | None
    source: int

    @property
    def first(self) -> Buffer:
        found = self.send or self.recv
        assert found is not None
        return found

    @property
    def nbytes(self) -> int:
        """Of the larger one."""
        return max(buffer.nbytes for buffer in (self.send, self.recv) if buffer)

    @property
    def addresses(self) -> tuple[int, int]:
        return 0 if self.send is None else self.send.ptr, 0 if self.recv is None else self.recv.ptr

    @property
    def counts(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """The other rank and how many elements: of what is sent, and of what is received."""
        sent = () if self.send is None else ((self.dest, self.send.count),)
        return sent, () if self.recv is None else ((self.source, self.recv.count),)

    @property
    def key(self) -> tuple[int, DType, ReduceOp, int, int, int]:
        """By what the fast path knows it; as `Call.key`."""
        first, second, both = self.first, self.recv or self.first, self.send and self.recv
        kind = SENDRECV if both else SEND if self.send else RECV
        where = _native.ranks_key(self.dest, self.source) if both else self.dest if self.send else self.source
        return kind, first.dtype, ReduceOp.SUM, where, first.count, second.count

    @property
    def halves(self) -> list[Message]:
        sent = [] if self.send is None else [Message(SEND, self.send, self.dest)]
        return sent if self.recv is None else [*sent, Message(RECV, self.recv, self.source)]

    def describe(self) -> str:
        """For people."""
        parts = []
        if self.send is not None:
            parts.append(f"send({self.send.dtype.label}, count={self.send.count}) to rank {self.dest}")
        if self.recv is not None:
            parts.append(f"recv({self.recv.dtype.label}, count={self.recv.count}) from rank {self.source}")
        return " and ".join(parts)


class Message(NamedTuple):
    """One half of a message: what this rank sends to a peer, or receives from it."""

    kind: int  # SEND or RECV
    buffer: Buffer
    peer: int

    @property
    def alone(self) -> SendRecv:
        if self.kind == SEND:
            return SendRecv(self.buffer, self.peer, None, -1)
        return SendRecv(None, -1, self.buffer, self.peer)

    def __str__(self) -> str:
        return self.alone.describe()
