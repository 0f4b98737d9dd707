"""What a user asked for, checked: every argument error is found here, before anything is sent.

Each function takes the user's arguments and returns a `Call`; `communicator.py` runs it.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from ..errors import ArgumentError, BufferTypeError
from ..types import REDUCING, REDUCTIONS, ROOTED, Collective, DType, Format, ReduceOp, as_seconds
from .buffers import Buffer, read_buffer

SEND, RECV, SENDRECV = 13, 14, 15  # native/python/module.cc: Collective.P2P's forms
_OPS = {op.label: op for op in ReduceOp}
OP_LABELS = tuple(map(sys.intern, _OPS))  # as literals are: the engine knows them by identity
"""The reductions' names in the order of their numbers."""


@dataclass(slots=True)  # not frozen: that takes 2 us a call
class Call:
    """One operation of one rank. A buffer that this rank does not have is None."""

    collective: Collective
    send: Buffer | None
    recv: Buffer | None
    dtype: DType
    count: int
    """Elements that all ranks must agree on: a rank's share, the whole for allreduce; -1 where ranks may differ."""
    nbytes: int
    """The size that algorithms are chosen by; the same on every rank."""
    op: ReduceOp = ReduceOp.SUM
    root: int = 0
    send_table: tuple[int, ...] = ()
    recv_table: tuple[int, ...] = ()
    label: str = ""
    """What the user called it, where that is not `collective`."""
    compress: Format = Format.NONE
    """How it travels over slow edges."""
    remembered: bool = True
    """Whether the fast path may take calls that look like it for the same."""
    snapshot: Buffer | None = None
    """Of an asynchronous call on host memory: where its result is copied once it is there, before a later call
    begins."""

    @property
    def send_count(self) -> int:
        """Elements of SEND as the plan sees it: the root's, where only the root has that buffer."""
        return self.nbytes // self.dtype.itemsize if self.send is None else self.send.count

    @property
    def recv_count(self) -> int:
        """Elements of RECV as the plan sees it: the root's, where only the root has that buffer."""
        return self.nbytes // self.dtype.itemsize if self.recv is None else self.recv.count

    def shares(self, size: int) -> tuple[list[int], list[int]]:
        """The parts by rank that SEND and RECV consist of, in elements; one part where they are not cut by rank. On the
        ranks that lack a buffer as well: plans are cut alike everywhere."""
        send = 0 if self.send is None else self.send.count
        recv = send if self.recv is None else self.recv.count
        match self.collective.plain:
            case Collective.ALLGATHER | Collective.GATHER:
                return [send], [b - a for a, b in pairwise(self.recv_table)] or [send] * size
            case Collective.REDUCE_SCATTER | Collective.SCATTER:
                return [b - a for a, b in pairwise(self.send_table)] or [recv] * size, [recv]
            case Collective.ALLTOALL:
                return [send // size] * size, [recv // size] * size
            case _:
                return [send], [recv]

    @property
    def key(self) -> tuple[int, int, int, int, int, int] | None:
        """By what the fast path knows such a call: collective, dtype, op, root, counts. None where it never runs it."""
        if self.label or self.send_table or self.recv_table or self.compress or not self.remembered:
            return None
        if self.collective is Collective.BARRIER:
            return (self.collective, self.dtype, self.op, 0, 0, 0)
        # It sees one buffer as both where this rank has only one of the two.
        first, second = self.send or self.recv, self.recv or self.send
        if first is None or second is None:
            return None
        return (self.collective, self.dtype, self.op, self.root, first.count, second.count)

    @property
    def binding(self) -> tuple[object, ...]:
        """What two calls have alike that one bound plan serves, wherever their buffers lie."""
        return (
            self.collective, self.dtype, self.op, self.root, self.send_count, self.recv_count, self.send_table,
            self.recv_table, self.label, self.compress,
        )  # fmt: skip

    @property
    def in_place(self) -> bool:
        """Whether both buffers begin at one address."""
        return self.send is not None and self.recv is not None and self.send.ptr == self.recv.ptr

    def describe(self) -> str:
        """What all ranks must agree on, for people and for the hash that travels with every frame."""
        if self.label:
            return self.label
        parts = [self.dtype.label]
        if self.count >= 0:
            parts.append(f"count={self.count}")
        if self.collective in (Collective.ALLGATHERV, Collective.REDUCE_SCATTERV):
            parts.append(f"offsets={self.recv_table or self.send_table}")
        if self.collective in REDUCING:
            parts.append(f"op={self.op.label}")
        if self.collective in ROOTED:
            parts.append(f"root={self.root}")
        if self.compress is not Format.NONE:
            parts.append(f"compress={self.compress.label}")
        if self.collective is Collective.BARRIER:
            parts = []
        return f"{self.collective.label}({', '.join(parts)})"


def parse_op(op: object, dtype: DType) -> ReduceOp:
    """`op` as a ReduceOp that is defined on `dtype`."""
    if isinstance(op, ReduceOp):
        found: ReduceOp | None = op
    else:
        found = _OPS.get(op.lower()) if isinstance(op, str) else None
    if found is None:
        raise ArgumentError(f"op: wanted one of {', '.join(_OPS)}, got {op!r}")
    if found not in REDUCTIONS[dtype]:
        raise ArgumentError(f"op: {found.label} is not defined on {dtype.label}")
    return found


def check_rank(rank: object, size: int, name: str) -> int:
    """`rank` as an int in [0, size)."""
    value = None if isinstance(rank, bool) else whole(rank)
    if value is None:
        raise BufferTypeError(f"{name}: wanted a rank, got {rank!r}")
    if not 0 <= value < size:
        raise ArgumentError(f"{name}: wanted a rank in [0, {size}), got {value}")
    return value


def check_int(value: object, name: str) -> int:
    """`value` as a 64-bit int."""
    number = whole(value)
    if number is None:
        raise BufferTypeError(f"{name}: wanted a whole number, got {value!r}")
    if not -(1 << 63) <= number < 1 << 63:
        raise ArgumentError(f"{name}: wanted 64 bits, got {number}")
    return number


def check_seconds(timeout: Any, name: str = "timeout") -> float:
    """ArgumentError for what `types.as_seconds` does not take."""
    if (found := as_seconds(timeout)) is None:
        raise ArgumentError(f"{name}: wanted seconds above 0, got {timeout!r}")
    return found


def whole(value: Any) -> int | None:
    """`value` as an int where it is a whole number."""
    try:
        return int(value.__index__())
    except (AttributeError, TypeError):  # arrays have it, and refuse
        return None


def _alike(send: Buffer, recv: Buffer) -> None:
    if send.dtype is not recv.dtype:
        raise BufferTypeError(f"sendbuf and recvbuf: wanted one dtype, got {send.dtype.label} and {recv.dtype.label}")
    if (send.device, send.index) != (recv.device, recv.index):
        raise BufferTypeError(f"sendbuf and recvbuf: wanted memory of one device, got {send.place} and {recv.place}")


def _check_overlap(send: Buffer, recv: Buffer, in_place_offset: int | None) -> None:
    """In place, the smaller buffer is this rank's part of the larger one; any other overlap would corrupt data."""
    if not send.overlaps(recv):
        return
    if in_place_offset is None or send.ptr - recv.ptr != in_place_offset:
        raise ArgumentError(
            "sendbuf and recvbuf overlap; in place, wanted the smaller one to be this rank's part of the larger one"
        )


def _check_recvbuf(recvbuf: object) -> None:
    """The reduction's place is that of recvbuf in other libraries."""
    if isinstance(recvbuf, str | ReduceOp):
        got = f"ReduceOp.{recvbuf.name}" if isinstance(recvbuf, ReduceOp) else repr(recvbuf)
        raise BufferTypeError(f"recvbuf: wanted an array or None, got {got}; write op={got}")


def _wanted(name: str, buffer: Buffer, count: int, why: str) -> None:
    if buffer.count != count:
        raise ArgumentError(f"{name}: wanted {count} elements ({why}), got {buffer.count}")


def _result(recvbuf: Any, send: Buffer) -> Buffer:
    """Where a reduction of all of `send` goes that has a place of its own."""
    recv = read_buffer(recvbuf, "recvbuf", writable=True)
    _alike(send, recv)
    _wanted("recvbuf", recv, send.count, "as many as sendbuf")
    _check_overlap(send, recv, 0)
    return recv


def allreduce(rank: int, size: int, sendbuf: Any, recvbuf: Any, op: object) -> Call:
    _check_recvbuf(recvbuf)
    send = read_buffer(sendbuf, "sendbuf", writable=recvbuf is None)
    recv = send if recvbuf is None else _result(recvbuf, send)
    redop = parse_op(op, send.dtype)
    return Call(Collective.ALLREDUCE, send, recv, send.dtype, send.count, send.nbytes, redop)


def allgather(rank: int, size: int, sendbuf: Any, recvbuf: Any) -> Call:
    send, recv = read_buffer(sendbuf, "sendbuf", writable=False), read_buffer(recvbuf, "recvbuf", writable=True)
    _alike(send, recv)
    _wanted("recvbuf", recv, send.count * size, f"{size} ranks x {send.count}")
    _check_overlap(send, recv, rank * send.nbytes)
    return Call(Collective.ALLGATHER, send, recv, send.dtype, send.count, recv.nbytes)


def reduce_scatter(rank: int, size: int, sendbuf: Any, recvbuf: Any, op: object) -> Call:
    _check_recvbuf(recvbuf)
    send, recv = read_buffer(sendbuf, "sendbuf", writable=False), read_buffer(recvbuf, "recvbuf", writable=True)
    _alike(send, recv)
    _wanted("sendbuf", send, recv.count * size, f"{size} ranks x {recv.count}")
    _check_overlap(send, recv, -rank * recv.nbytes)
    redop = parse_op(op, send.dtype)
    return Call(Collective.REDUCE_SCATTER, send, recv, send.dtype, recv.count, send.nbytes, redop)


def broadcast(rank: int, size: int, buf: Any, root: object) -> Call:
    at = check_rank(root, size, "root")
    buffer = read_buffer(buf, "buf", writable=rank != at)
    return Call(Collective.BROADCAST, buffer, buffer, buffer.dtype, buffer.count, buffer.nbytes, root=at)


def reduce(rank: int, size: int, sendbuf: Any, recvbuf: Any, op: object, root: object) -> Call:
    _check_recvbuf(recvbuf)
    at = check_rank(root, size, "root")
    send = read_buffer(sendbuf, "sendbuf", writable=rank == at and recvbuf is None)
    recv = None
    if rank == at:
        recv = send if recvbuf is None else _result(recvbuf, send)
    redop = parse_op(op, send.dtype)
    return Call(Collective.REDUCE, send, recv, send.dtype, send.count, send.nbytes, redop, at)


def gather(rank: int, size: int, sendbuf: Any, recvbuf: Any, root: object) -> Call:
    at = check_rank(root, size, "root")
    send = read_buffer(sendbuf, "sendbuf", writable=False)
    recv = None
    if rank == at:
        recv = read_buffer(recvbuf, "recvbuf", writable=True)
        _alike(send, recv)
        _wanted("recvbuf", recv, send.count * size, f"{size} ranks x {send.count}")
        _check_overlap(send, recv, rank * send.nbytes)
    return Call(Collective.GATHER, send, recv, send.dtype, send.count, send.nbytes * size, root=at)


def scatter(rank: int, size: int, sendbuf: Any, recvbuf: Any, root: object) -> Call:
    at = check_rank(root, size, "root")
    if recvbuf is None:
        raise ArgumentError("recvbuf: wanted an array, got None")
    recv = read_buffer(recvbuf, "recvbuf", writable=True)
    send = None
    if rank == at:
        if sendbuf is None:
            raise ArgumentError("sendbuf: wanted an array on the root, got None")
        send = read_buffer(sendbuf, "sendbuf", writable=False)
        _alike(send, recv)
        _wanted("sendbuf", send, recv.count * size, f"{size} ranks x {recv.count}")
        _check_overlap(send, recv, -rank * recv.nbytes)
    return Call(Collective.SCATTER, send, recv, recv.dtype, recv.count, recv.nbytes * size, root=at)


def all_counts(counts: Sequence[int], size: int, name: str = "counts") -> list[int]:
    """`counts` as so many ints of 0 or more."""
    try:
        if isinstance(counts, (Iterator, Set, Mapping)):
            raise TypeError("read once only, or in no order")
        values = [check_int(c, name) for c in counts]
    except TypeError as error:
        if isinstance(error, BufferTypeError):
            raise
        raise BufferTypeError(f"{name}: wanted {size} counts, one a rank, got {counts!r}") from None
    if len(values) != size or min(values) < 0:
        raise ArgumentError(f"{name}: wanted {size} counts of 0 or more, one a rank, got {values}")
    return values


def _offsets(counts: list[int]) -> tuple[int, ...]:
    return (0, *accumulate(counts))


def alltoall(
    rank: int,
    size: int,
    sendbuf: Any,
    recvbuf: Any,
    sendcounts: Sequence[int] | None = None,
    recvcounts: Sequence[int] | None = None,
) -> Call:
    send, recv = read_buffer(sendbuf, "sendbuf", writable=False), read_buffer(recvbuf, "recvbuf", writable=True)
    _alike(send, recv)
    if (sendcounts is None) != (recvcounts is None):
        raise ArgumentError("sendcounts and recvcounts: wanted both or neither, got one")
    if sendcounts is None or recvcounts is None:
        _wanted("recvbuf", recv, send.count, "as many as sendbuf")
        if send.count % size:
            raise ArgumentError(f"sendbuf: wanted a multiple of {size} elements, got {send.count}")
        _check_overlap(send, recv, 0)
        return Call(Collective.ALLTOALL, send, recv, send.dtype, send.count // size, send.nbytes)
    out, into = all_counts(sendcounts, size, "sendcounts"), all_counts(recvcounts, size, "recvcounts")
    _wanted("sendbuf", send, sum(out), "the sum of sendcounts")
    _wanted("recvbuf", recv, sum(into), "the sum of recvcounts")
    if out[rank] != into[rank]:
        raise ArgumentError(f"recvcounts: wanted sendcounts[{rank}] = {out[rank]} for this rank, got {into[rank]}")
    _check_overlap(send, recv, None)
    return Call(
        Collective.ALLTOALLV, send, recv, send.dtype, -1, -1, send_table=_offsets(out), recv_table=_offsets(into)
    )


def allgatherv(rank: int, size: int, sendbuf: Any, recvbuf: Any, counts: Sequence[int]) -> Call:
    send, recv = read_buffer(sendbuf, "sendbuf", writable=False), read_buffer(recvbuf, "recvbuf", writable=True)
    _alike(send, recv)
    table = _offsets(all_counts(counts, size))
    _wanted("sendbuf", send, table[rank + 1] - table[rank], f"counts[{rank}]")
    _wanted("recvbuf", recv, table[-1], "the sum of counts")
    _check_overlap(send, recv, table[rank] * send.dtype.itemsize)
    return Call(Collective.ALLGATHERV, send, recv, send.dtype, -1, recv.nbytes, recv_table=table)


def reduce_scatterv(rank: int, size: int, sendbuf: Any, recvbuf: Any, op: object, counts: Sequence[int]) -> Call:
    _check_recvbuf(recvbuf)
    send, recv = read_buffer(sendbuf, "sendbuf", writable=False), read_buffer(recvbuf, "recvbuf", writable=True)
    _alike(send, recv)
    table = _offsets(all_counts(counts, size))
    _wanted("sendbuf", send, table[-1], "the sum of counts")
    _wanted("recvbuf", recv, table[rank + 1] - table[rank], f"counts[{rank}]")
    _check_overlap(send, recv, -table[rank] * send.dtype.itemsize)
    redop = parse_op(op, send.dtype)
    return Call(Collective.REDUCE_SCATTERV, send, recv, send.dtype, -1, send.nbytes, redop, send_table=table)


def meeting(rank: int, label: str, mine: Any, all_rows: Any) -> Call:
    """What every rank must know of all others before it can go on; `label` is what they do together."""
    call = allgather(rank, len(all_rows), mine, all_rows)
    return replace(call, label=label)


def barrier() -> Call:
    return Call(Collective.BARRIER, None, None, DType.UINT8, 0, 0)


def descriptor(text: str) -> int:
    """What travels with every frame: 64 bits of a hash of what all ranks must agree on."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
